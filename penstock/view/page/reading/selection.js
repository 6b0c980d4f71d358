// Some time on some ranks: what they did in it, why they waited, what came, what was slowest. It is part of the address.

/** Rank after rank what happened from `from` to `to`: {rank, busy, causes, messages, onTheWay, slowest}. */
function happened(timeline, {from, to, ranks}) {
  const inside = (start, end) => Math.max(0, Math.min(end, to) - Math.max(start, from));
  return ranks.filter((rank) => timeline.ranks[rank]).map((rank) => {
    const {blocks, idle, sums} = timeline.ranks[rank], causes = {}, seen = blocks.filter(({start, end}) => inside(start, end) > 0);
    for (const [start, end, cause] of idle) causes[cause] = (causes[cause] || 0) + inside(start, end);
    const came = blocks.flatMap(({receives}) => receives).filter(({arrived}) => arrived >= from && arrived <= to);
    const onTheWay = came.reduce((sum, {action, arrived}) => sum + Math.max(0, arrived - timeline.blocks.get(action).end), 0);
    const busy = seen.reduce((sum, {start, end, half}) => sum + inside(start, end) * (half === null ? 1 : 0.5), 0);
    const slowest = seen.reduce((most, block) => (!most || block.end - block.start > most.end - most.start ? block : most), null);
    if (sums) return {rank, ...inSums(sums, inside), messages: 0, onTheWay: 0, slowest: null};
    return {rank, busy, causes, messages: came.length, onTheWay, slowest};
  });
}

/** The same of a huge step, as far as its slices tell. */
function inSums({end, parts}, inside) {
  const time = (shares) => shares.reduce((sum, share, place) => sum + share * inside((place * end) / shares.length, ((place + 1) * end) / shares.length), 0);
  const took = Object.entries(parts).map(([paint, shares]) => [paint, time(shares)]);
  return {busy: took.filter(([paint]) => paint in KINDS).reduce((sum, [, each]) => sum + each, 0), causes: Object.fromEntries(took.filter(([paint]) => paint in CAUSES))};
}

/** The table of what is selected, below the chart. */
function selectionBelow(chart, page) {
  const {selection} = page, {record} = chart, {timeline} = record, wide = selection.to - selection.from, rows = happened(timeline, selection);
  const causes = timeline.causes.filter((cause) => rows.some((row) => row.causes[cause] > 0)), share = (time) => (time > 0 ? percent(time / wide) : "–");
  const go = (block) => (block ? element("span", {}, element("button", {type: "button", click: () => { chart.host.focus({preventScroll: true}); page.select(chart, block); }}, block.text), ` ${record.time(block.end - block.start)}`) : "–");
  const total = (of) => rows.reduce((sum, row) => sum + of(row), 0) / rows.length;
  const caption = `Selected: ${record.time(wide)}, from ${record.time(selection.from)} to ${record.time(selection.to)}, ${ranksTold(selection.ranks)}`;
  const cells = rows.map((row) => [`rank ${row.rank}`, share(row.busy), ...causes.map((cause) => share(row.causes[cause])), `${row.messages} in ${record.time(row.onTheWay)}`, go(row.slowest)]);
  const all = rows.length > 1 ? [["all", share(total((row) => row.busy)), ...causes.map((cause) => share(total((row) => row.causes[cause] || 0))), String(rows.reduce((sum, row) => sum + row.messages, 0)), ""]] : [];
  const buttons = element("div", {class: "tools"}, element("button", {type: "button", click: () => page.show(selection.from, selection.to)}, "Zoom to it"),
    element("button", {type: "button", click: () => page.choose(null)}, "Clear"));
  return [element("h3", {}, caption), buttons, table(caption, ["", "busy", ...causes.map((cause) => `idle by ${cause}`), "messages came", "slowest action"], [...all, ...cells])];
}

/** The selection in the address: `#t=1.2-1.9&ranks=0-3`. */
function toAddress(selection) {
  const t = (time) => String(Number(time.toPrecision(6)));
  return selection ? `#t=${t(selection.from)}-${t(selection.to)}&ranks=${runs(selection.ranks)}` : "";
}

/** The selection that an address says, or null where it says none. */
function fromAddress(hash, ranks) {
  const said = /^#t=([\d.]+)-([\d.]+)&ranks=([\d,-]+)$/.exec(hash);
  if (!said) return null;
  const [from, to] = [Number(said[1]), Number(said[2])], chosen = new Set();
  for (const run of said[3].split(",")) {
    const [first, last = first] = run.split("-").map(Number);
    for (let rank = first; rank <= Math.min(last, ranks - 1); rank++) chosen.add(rank);
  }
  return from < to && chosen.size ? {from, to, ranks: [...chosen]} : null;
}
