// Tables below the pictures: what differs most from the plan, what was waited for longest, two records side by side.

const ROWS = 12; // of a table

function table(caption, heads, rows) {
  return element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption}, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {scope: "col"}, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))))));
}

/** The largest deviations from what was planned, or without a plan the longest waits. */
function tableBelow(chart, page) {
  const {record} = chart, time = (value) => record.time(value);
  const go = (block) => element("button", {type: "button", click: () => { chart.host.focus(); page.select(chart, block); }}, block.text);
  if (record.planned) {
    const rows = record.deviations(ROWS).map(({block, planned, longer, later}) => [go(block), String(block.rank), time(planned.end - planned.start),
      time(block.end - block.start), record.time(longer, true), record.time(later, true)]);
    const caption = "Largest deviations from the plan";
    return [element("h3", {}, caption), table(caption, ["action", "rank", "planned", "measured", "longer by", "starts later by"], rows)];
  }
  const rows = record.waits(ROWS).map((block) => {
    const source = record.timeline.blocks.get(block.waitedFor);
    return [go(block), String(block.rank), time(block.start), time(block.waited), source ? `${source.text} of rank ${source.rank}` : "–"];
  });
  const caption = "Longest waits";
  return rows.length ? [element("h3", {}, caption), table(caption, ["action", "rank", "starts at", "waited", "for"], rows)] : [];
}

/** Two records, number beside number. */
function differences(records) {
  const [first, second] = records, [a, b] = records.map((record) => record.timeline.data);
  const signed = (share, unit) => (Math.abs(share) < 5e-4 ? "same" : `${share > 0 ? "+" : "−"}${tenths(Math.abs(100 * share))} ${unit}`);
  const points = (from, to) => signed(to - from, "points"), relative = (from, to) => (from ? signed(to / from - 1, "%") : "–");
  const rows = [
    ["makespan", first.time(a.makespan), second.time(b.makespan), relative(a.makespan, b.makespan)],
    ["bubble", percent(a.bubble), percent(b.bubble), points(a.bubble, b.bubble)],
    ["memory, most on a rank", first.timeline.amount(first.timeline.peak), second.timeline.amount(second.timeline.peak),
      a.memory_unit === b.memory_unit ? relative(first.timeline.peak, second.timeline.peak) : "–"],
    ...Object.keys(CAUSES).filter((cause) => records.some(({timeline}) => timeline.causes.includes(cause))).map((cause) => [`idle by ${cause}`, percent(a.causes[cause]), percent(b.causes[cause]), points(a.causes[cause], b.causes[cause])]),
  ];
  const unlike = [["ranks", ({ranks}) => ranks.length], ["microbatches", ({microbatches}) => microbatches]]
    .map(([what, of]) => [what, ...records.map(({timeline}) => of(timeline))]).filter(([, one, other]) => one !== other);
  const warning = `These differ in ${unlike.map(([what, one, other]) => `${what} (${one} and ${other})`).join(" and ")}: their times are those of different work.`;
  return element("div", {}, table("Differences", ["", first.name, second.name, "difference"], rows), ...(unlike.length ? [element("p", {class: "muted"}, warning)] : []));
}
