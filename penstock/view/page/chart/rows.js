// Where the row of each rank stands: in which order, how high, folded or not, so that all ranks are in sight.

const AXIS = 26, GAP = 15, MAIN = 30, PLANNED = 15, MEMORY = 28, EDGE = 12;
const FOLDED = 6, PATH = 32, LABEL = 12; // pixels: of a folded row, of the row with the critical path, between two labels

/** The ranks from top to bottom: pinned ones first, then by number, by idle time or by their first stage. */
function inOrder(chart) {
  const {ranks, data} = chart.record.timeline, {sort} = chart.page.options;
  const key = {rank: (rank) => rank, idle: (rank) => data.busy[rank], stage: (rank) => ranks[rank].stages[0] ?? Infinity}[sort];
  return ranks.map((_, rank) => rank).sort((a, b) => chart.pinned.has(b) - chart.pinned.has(a) || key(a) - key(b) || a - b);
}

/** The height of a row's lanes: as they are read best, or, where there are many ranks, as high as the window allows. */
function heights(chart, count) {
  const {options} = chart.page, beside = options.planned && Boolean(chart.beside);
  const full = {main: MAIN, planned: beside ? PLANNED : 0, memory: options.memory && chart.record.timeline.peak > 0 ? MEMORY : 0, gap: GAP};
  const tall = full.main + (full.planned && full.planned + 2) + (full.memory && full.memory + 5) + full.gap;
  const each = (chart.page.roomFor(chart) - AXIS - 20 - (options.path ? PATH : 0)) / count;
  if (!options.fit || count <= 4 || each >= tall) return full;
  const room = each >= 3 ? Math.floor(each) : each, gap = room >= 9 ? Math.min(GAP, Math.floor(room / 5)) : room >= 5 ? 1 : 0;
  if (room >= 34 && full.memory) return {main: room - gap - 21 - (full.planned && 10), planned: full.planned && 8, memory: 16, gap};
  const planned = full.planned && (room >= 18 || chart.instead) ? (room - gap) * 0.36 : 0;
  return {main: room - gap - planned - (planned ? Math.min(2, room / 10) : 0), planned, memory: 0, gap};
}

/** Rank -> its row: where its lanes begin, and how high they are. */
function placed(chart) {
  const order = inOrder(chart), open = order.filter((rank) => !chart.folded.has(rank)).length, high = heights(chart, Math.max(1, open));
  const rows = [], between = Math.min(2, high.planned / 4);
  let top = AXIS + 8;
  for (const rank of order) {
    const folded = chart.folded.has(rank), row = {rank, top, main: top, high: folded ? FOLDED : high.main, folded};
    top += row.high;
    if (high.planned && !folded) {
      Object.assign(row, {planned: top + between, plannedHigh: high.planned});
      top += between + high.planned;
    }
    if (high.memory && !folded) {
      const apart = Math.min(5, high.memory / 4);
      Object.assign(row, {memory: top + apart, memoryHigh: high.memory});
      top += apart + high.memory;
    }
    row.bottom = top;
    top += folded ? Math.min(4, high.gap) : high.gap;
    rows[rank] = row;
  }
  labelled(order.map((rank) => rows[rank]), chart);
  chart.order = order;
  return rows;
}

/** Which rows have room for their label: as many as do not touch each other. */
function labelled(rows, chart) {
  let free = -Infinity;
  const apart = rows.length > 1 ? rows[1].main - rows[0].main : LABEL, every = [1, 2, 4, 8, 16, 32, 64, 128].find((each) => each * apart >= LABEL) || 256;
  rows.forEach((row, place) => {
    const middle = row.main + row.high / 2, due = place % every === 0 || chart.pinned.has(row.rank);
    row.labelled = due && middle - free >= LABEL - 1;
    if (row.labelled) free = middle;
  });
}
