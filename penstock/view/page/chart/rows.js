// The layout of the rows of ranks: order, heights, folding, so that all ranks are in sight.

const AXIS_HEIGHT = 26, ROW_GAP = 15, MAIN_HEIGHT = 30, PREDICTED_HEIGHT = 15, MEMORY_HEIGHT = 28, RIGHT_MARGIN = 12;
const FOLDED_HEIGHT = 6, PATH_HEIGHT = 32, LABEL_SPACING = 12; // pixels; LABEL_SPACING: the least between two labels

/** Return the ranks from top to bottom: pinned ones first, then by number, idle time or first stage. */
function orderRanks(chart) {
  const {ranks, data} = chart.record.timeline, {sort} = chart.page.options;
  const key = {rank: (rank) => rank, idle: (rank) => data.busy[rank], stage: (rank) => ranks[rank].stages[0] ?? Infinity}[sort];
  return ranks.map((_, rank) => rank).sort((a, b) => chart.pinned.has(b) - chart.pinned.has(a) || key(a) - key(b) || a - b);
}

/** Return the heights of a row's lanes: the usual ones, or smaller ones so that `count` ranks fit into the window. */
function laneHeights(chart, count) {
  const {options} = chart.page, comparison = options.predicted && Boolean(chart.comparison);
  const full = {main: MAIN_HEIGHT, predicted: comparison ? PREDICTED_HEIGHT : 0, memory: options.memory && chart.record.timeline.peak > 0 ? MEMORY_HEIGHT : 0, gap: ROW_GAP};
  const fullHeight = full.main + (full.predicted && full.predicted + 2) + (full.memory && full.memory + 5) + full.gap;
  const available = (chart.page.heightFor(chart) - AXIS_HEIGHT - 20 - (options.path ? PATH_HEIGHT : 0)) / count;
  if (!options.fit || count <= 4 || available >= fullHeight) return full;
  const rowHeight = available >= 3 ? Math.floor(available) : available, gap = rowHeight >= 9 ? Math.min(ROW_GAP, Math.floor(rowHeight / 5)) : rowHeight >= 5 ? 1 : 0;
  if (rowHeight >= 34 && full.memory) return {main: rowHeight - gap - 21 - (full.predicted && 10), predicted: full.predicted && 8, memory: 16, gap};
  const predicted = full.predicted && (rowHeight >= 18 || chart.alternative) ? (rowHeight - gap) * 0.36 : 0;
  return {main: rowHeight - gap - predicted - (predicted ? Math.min(2, rowHeight / 10) : 0), predicted, memory: 0, gap};
}

/** Return rank -> its row: tops and heights of its lanes, in pixels. Sets `chart.order`. */
function layoutRows(chart) {
  const order = orderRanks(chart), open = order.filter((rank) => !chart.folded.has(rank)).length, heights = laneHeights(chart, Math.max(1, open));
  const rows = [], predictedSpacing = Math.min(2, heights.predicted / 4);
  let top = AXIS_HEIGHT + 8;
  for (const rank of order) {
    const folded = chart.folded.has(rank), row = {rank, top, main: top, height: folded ? FOLDED_HEIGHT : heights.main, folded};
    top += row.height;
    if (heights.predicted && !folded) {
      Object.assign(row, {predicted: top + predictedSpacing, predictedHeight: heights.predicted});
      top += predictedSpacing + heights.predicted;
    }
    if (heights.memory && !folded) {
      const spacing = Math.min(5, heights.memory / 4);
      Object.assign(row, {memory: top + spacing, memoryHeight: heights.memory});
      top += spacing + heights.memory;
    }
    row.bottom = top;
    top += folded ? Math.min(4, heights.gap) : heights.gap;
    rows[rank] = row;
  }
  chooseLabels(order.map((rank) => rows[rank]), chart);
  chart.order = order;
  return rows;
}

/** Set `hasLabel` of the rows whose labels do not overlap. */
function chooseLabels(rows, chart) {
  let lastLabel = -Infinity;
  const spacing = rows.length > 1 ? rows[1].main - rows[0].main : LABEL_SPACING, stride = [1, 2, 4, 8, 16, 32, 64, 128].find((count) => count * spacing >= LABEL_SPACING) || 256;
  rows.forEach((row, index) => {
    const middle = row.main + row.height / 2, isCandidate = index % stride === 0 || chart.pinned.has(row.rank);
    row.hasLabel = isCandidate && middle - lastLabel >= LABEL_SPACING - 1;
    if (row.hasLabel) lastLabel = middle;
  });
}
