// Tables below the charts: largest deviations from the plan or longest waits; differences of two records.

const MAX_ROWS = 12; // of a table

function table(caption, heads, rows) {
  return element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption}, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {scope: "col"}, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))))));
}

/** Return a table of the largest deviations from the plan; without a plan, of the longest waits. */
function stepTable(chart, page) {
  const {record} = chart, time = (value) => record.formatTime(value);
  const linkTo = (block) => element("button", {type: "button", click: () => { chart.host.focus(); page.select(chart, block); }}, block.text);
  if (record.predicted) {
    const rows = record.deviations(MAX_ROWS).map(({block, predicted, longer, later}) => [linkTo(block), String(block.rank), time(predicted.end - predicted.start),
      time(block.end - block.start), record.formatTime(longer, true), record.formatTime(later, true)]);
    const caption = "Largest deviations from the plan";
    return [element("h3", {}, caption), table(caption, ["action", "rank", "predicted", "measured", "longer by", "starts later by"], rows)];
  }
  const rows = record.waits(MAX_ROWS).map((block) => {
    const source = record.timeline.blocks.get(block.waitedFor);
    return [linkTo(block), String(block.rank), time(block.start), time(block.waited), source ? `${source.text} of rank ${source.rank}` : "–"];
  });
  const caption = "Longest waits";
  return rows.length ? [element("h3", {}, caption), table(caption, ["action", "rank", "starts at", "waited", "for"], rows)] : [];
}

/** Return a table that compares two records, with a warning if their work was not the same. */
function differencesTable(records) {
  const [first, second] = records, [a, b] = records.map((record) => record.timeline.data);
  const signed = (share, unit) => (Math.abs(share) < 5e-4 ? "same" : `${share > 0 ? "+" : "−"}${oneDecimal(Math.abs(100 * share))} ${unit}`);
  const points = (from, to) => signed(to - from, "points"), relative = (from, to) => (from ? signed(to / from - 1, "%") : "–");
  const rows = [
    ["makespan", first.formatTime(a.makespan), second.formatTime(b.makespan), relative(a.makespan, b.makespan)],
    ["bubble", percent(a.bubble), percent(b.bubble), points(a.bubble, b.bubble)],
    ["memory, most on a rank", first.timeline.formatMemory(first.timeline.peak), second.timeline.formatMemory(second.timeline.peak),
      a.memory_unit === b.memory_unit ? relative(first.timeline.peak, second.timeline.peak) : "–"],
    ...Object.keys(CAUSE_TEXTS).filter((cause) => records.some(({timeline}) => timeline.causes.includes(cause))).map((cause) => [`idle by ${cause}`, percent(a.causes[cause]), percent(b.causes[cause]), points(a.causes[cause], b.causes[cause])]),
  ];
  const workDifferences = [["ranks", ({ranks}) => ranks.length], ["microbatches", ({microbatches}) => microbatches]]
    .map(([name, value]) => [name, ...records.map(({timeline}) => value(timeline))]).filter(([, a, b]) => a !== b);
  const warning = `These differ in ${workDifferences.map(([name, a, b]) => `${name} (${a} and ${b})`).join(" and ")}: their times are those of different work.`;
  return element("div", {}, table("Differences", ["", first.name, second.name, "difference"], rows), ...(workDifferences.length ? [element("p", {class: "muted"}, warning)] : []));
}
