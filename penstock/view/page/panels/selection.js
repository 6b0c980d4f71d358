// The selection, an interval on some ranks: its summary as a table, and its form in the address.

/** Summarize a selection rank by rank: {rank, busy, causes, messages, onTheWay, slowest}; times in the unit of the timeline. */
function summarizeRanks(timeline, {from, to, ranks}) {
  const overlap = (start, end) => Math.max(0, Math.min(end, to) - Math.max(start, from));
  return ranks.filter((rank) => timeline.ranks[rank]).map((rank) => {
    const {blocks, idle, sums} = timeline.ranks[rank], causes = {}, overlapping = blocks.filter(({start, end}) => overlap(start, end) > 0);
    for (const [start, end, cause] of idle) causes[cause] = (causes[cause] || 0) + overlap(start, end);
    const arrivals = blocks.flatMap(({receives}) => receives).filter(({arrived}) => arrived >= from && arrived <= to);
    const onTheWay = arrivals.reduce((sum, {action, arrived}) => sum + Math.max(0, arrived - timeline.blocks.get(action).end), 0);
    const busy = overlapping.reduce((sum, {start, end, half}) => sum + overlap(start, end) * (half === null ? 1 : 0.5), 0);
    const slowest = overlapping.reduce((most, block) => (!most || block.end - block.start > most.end - most.start ? block : most), null);
    if (sums) return {rank, ...summarizeBins(sums, overlap), messages: 0, onTheWay: 0, slowest: null};
    return {rank, busy, causes, messages: arrivals.length, onTheWay, slowest};
  });
}

/** Summarize the bins of a huge step. */
function summarizeBins({end, parts}, overlap) {
  const time = (shares) => shares.reduce((sum, share, index) => sum + share * overlap((index * end) / shares.length, ((index + 1) * end) / shares.length), 0);
  const times = Object.entries(parts).map(([paint, shares]) => [paint, time(shares)]);
  return {busy: times.filter(([paint]) => paint in KIND_NAMES).reduce((sum, [, duration]) => sum + duration, 0), causes: Object.fromEntries(times.filter(([paint]) => paint in CAUSE_TEXTS))};
}

/** Return the panel of the selection: a caption, buttons and a table. */
function selectionPanel(chart, page) {
  const {selection} = page, {record} = chart, {timeline} = record, duration = selection.to - selection.from, rows = summarizeRanks(timeline, selection);
  const causes = timeline.causes.filter((cause) => rows.some((row) => row.causes[cause] > 0)), share = (time) => (time > 0 ? percent(time / duration) : "–");
  const linkTo = (block) => (block ? element("span", {}, element("button", {type: "button", click: () => { chart.host.focus({preventScroll: true}); page.select(chart, block); }}, block.text), ` ${record.formatTime(block.end - block.start)}`) : "–");
  const mean = (value) => rows.reduce((sum, row) => sum + value(row), 0) / rows.length;
  const caption = `Selected: ${record.formatTime(duration)}, from ${record.formatTime(selection.from)} to ${record.formatTime(selection.to)}, ${formatRanks(selection.ranks)}`;
  const cells = rows.map((row) => [`rank ${row.rank}`, share(row.busy), ...causes.map((cause) => share(row.causes[cause])), `${row.messages} in ${record.formatTime(row.onTheWay)}`, linkTo(row.slowest)]);
  const all = rows.length > 1 ? [["all", share(mean((row) => row.busy)), ...causes.map((cause) => share(mean((row) => row.causes[cause] || 0))), String(rows.reduce((sum, row) => sum + row.messages, 0)), ""]] : [];
  const buttons = element("div", {class: "tools"}, element("button", {type: "button", click: () => page.setView(selection.from, selection.to)}, "Zoom to it"),
    element("button", {type: "button", click: () => page.setSelection(null)}, "Clear"));
  return [element("h3", {}, caption), buttons, table(caption, ["", "busy", ...causes.map((cause) => `idle by ${cause}`), "messages received", "slowest action"], [...all, ...cells])];
}

/** Return the hash of the address for a selection: `#t=1.2-1.9&ranks=0-3`; empty for null. */
function selectionToHash(selection) {
  const text = (time) => String(Number(time.toPrecision(6)));
  return selection ? `#t=${text(selection.from)}-${text(selection.to)}&ranks=${formatRanges(selection.ranks)}` : "";
}

/** Return the selection in the hash of an address, or null. */
function selectionFromHash(hash, ranks) {
  const match = /^#t=([\d.]+)-([\d.]+)&ranks=([\d,-]+)$/.exec(hash);
  if (!match) return null;
  const [from, to] = [Number(match[1]), Number(match[2])], selectedRanks = new Set();
  for (const range of match[3].split(",")) {
    const [first, last = first] = range.split("-").map(Number);
    for (let rank = first; rank <= Math.min(last, ranks - 1); rank++) selectedRanks.add(rank);
  }
  return from < to && selectedRanks.size ? {from, to, ranks: [...selectedRanks]} : null;
}
