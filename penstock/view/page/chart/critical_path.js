// The critical path: outlined on the blocks, and as a row below the ranks.

function drawCriticalPath(chart) {
  const {context: c} = chart, {colors, view} = chart.page, {path, pathEnds} = chart.record.timeline, first = firstAfter(pathEnds, view.from);
  const visible = path.slice(first, firstAfter(pathEnds, view.to) + 1), dense = visible.length > chart.plotWidth / 3;
  c.strokeStyle = c.fillStyle = colors.ink;
  let previous = path[first - 1];
  for (const block of visible) {
    const left = chart.x(block.start), width = chart.x(block.end) - left, height = chart.heightOf(block);
    if (width > 13 && height >= 8) {
      c.lineWidth = 2;
      c.beginPath();
      c.roundRect(left + 1, chart.topOf(block) + 1, width - 2, height - 2, 2.5);
      c.stroke();
    } else { // too narrow for an outline: a line above
      c.fillRect(left, chart.topOf(block) - Math.min(4, height / 2), Math.max(width, 1), Math.min(3, height / 2));
    }
    c.globalAlpha = dense ? 0.3 : 0.9;
    if (previous && previous.rank !== block.rank) drawLink(chart, previous, block);
    c.globalAlpha = 1;
    previous = block;
  }
  if (chart.pathRow) drawPathRow(chart, visible, path[first - 1]);
}

/** Add the blocks of the path row that are too narrow for a text to the dense lanes. */
function addNarrowPathBlocks(chart) {
  const {pathRow: {top, height}, pixelRatio, denseLanes, drawnOffset, page: {view, options}} = chart, {path, pathEnds} = chart.record.timeline, first = firstAfter(pathEnds, view.from);
  denseLanes.lane((top - drawnOffset) * pixelRatio, (top + height - drawnOffset) * pixelRatio);
  for (const block of path.slice(first, firstAfter(pathEnds, view.to) + 1)) {
    const left = chart.x(block.start), right = chart.x(block.end);
    if (right - left <= NARROW_PIXELS) denseLanes.add(left * pixelRatio, right * pixelRatio, paintOf(block, options.hues));
  }
}

/** Draw the row of the path: each action, and each gap as a message or as time of the engine. */
function drawPathRow(chart, blocks, first) {
  const {context: c, pathRow: {top, height}, record, page: {colors, options}} = chart;
  c.textBaseline = "middle";
  c.textAlign = "center";
  const longestThatFits = (texts, width) => texts.find((text) => 6.2 * text.length + 4 < width);
  let previous = first;
  c.font = "11px system-ui, sans-serif";
  for (const block of blocks) {
    const left = chart.x(block.start), width = chart.x(block.end) - left, middle = top + height / 2;
    if (width > NARROW_PIXELS) {
      c.fillStyle = colors[paintOf(block, options.hues)];
      c.fillRect(left, top, width - 1, height);
      c.fillStyle = colors[`letter-${block.kind}`];
      const text = longestThatFits([`rank ${block.rank} ${block.kind}${block.part}`, `r${block.rank} ${block.kind}${block.part}`, `r${block.rank}`], width);
      if (text) c.fillText(text, left + width / 2, middle + 0.5);
    }
    const from = previous ? chart.x(previous.end) : left, gap = left - from;
    if (gap > 0.5) {
      const cause = previous.rank === block.rank ? "engine" : "message";
      c.fillStyle = colors[previous.rank === block.rank ? "shade" : "communication"];
      c.fillRect(from, middle - 1.5, gap, 3);
      const text = longestThatFits([`${cause} ${record.formatTime(block.start - previous.end)}`], gap);
      c.fillStyle = colors.ink;
      if (text) c.fillText(text, from + gap / 2, top + 4);
    }
    previous = block;
  }
}
