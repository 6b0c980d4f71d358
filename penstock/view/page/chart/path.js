// The critical path: outlined on the blocks, and unrolled in a row of its own.

function drawPath(chart) {
  const {context: c} = chart, {colors, view} = chart.page, {path, pathEnds} = chart.record.timeline, first = firstAfter(pathEnds, view.from);
  const seen = path.slice(first, firstAfter(pathEnds, view.to) + 1), dense = seen.length > chart.plotWidth / 3;
  c.strokeStyle = c.fillStyle = colors.ink;
  let before = path[first - 1];
  for (const block of seen) {
    const left = chart.x(block.start), wide = chart.x(block.end) - left, high = chart.heightOf(block);
    if (wide > 13 && high >= 8) {
      c.lineWidth = 2;
      c.beginPath();
      c.roundRect(left + 1, chart.topOf(block) + 1, wide - 2, high - 2, 2.5);
      c.stroke();
    } else { // no room for an outline: a line above
      c.fillRect(left, chart.topOf(block) - Math.min(4, high / 2), Math.max(wide, 1), Math.min(3, high / 2));
    }
    c.globalAlpha = dense ? 0.3 : 0.9;
    if (before && before.rank !== block.rank) link(chart, before, block);
    c.globalAlpha = 1;
    before = block;
  }
  if (chart.pathRow) unroll(chart, seen, path[first - 1]);
}

/** What of the unrolled path has no room for a text, as proportions. */
function addPath(chart) {
  const {pathRow: {top, high}, density, strip, slidNow, page: {view, options}} = chart, {path, pathEnds} = chart.record.timeline, first = firstAfter(pathEnds, view.from);
  strip.lane((top - slidNow) * density, (top + high - slidNow) * density);
  for (const block of path.slice(first, firstAfter(pathEnds, view.to) + 1)) {
    const left = chart.x(block.start), right = chart.x(block.end);
    if (right - left <= NARROW) strip.add(left * density, right * density, paintOf(block, options.hued));
  }
}

/** Each action of the path, then what it took to come to the next, from left to right. */
function unroll(chart, blocks, first) {
  const {context: c, pathRow: {top, high}, record, page: {colors, options}} = chart;
  c.textBaseline = "middle";
  c.textAlign = "center";
  const fits = (texts, wide) => texts.find((text) => 6.2 * text.length + 4 < wide);
  let before = first;
  c.font = "11px system-ui, sans-serif";
  for (const block of blocks) {
    const left = chart.x(block.start), wide = chart.x(block.end) - left, middle = top + high / 2;
    if (wide > NARROW) {
      c.fillStyle = colors[paintOf(block, options.hued)];
      c.fillRect(left, top, wide - 1, high);
      c.fillStyle = colors[`letter-${block.kind}`];
      const text = fits([`rank ${block.rank} ${block.kind}${block.part}`, `r${block.rank} ${block.kind}${block.part}`, `r${block.rank}`], wide);
      if (text) c.fillText(text, left + wide / 2, middle + 0.5);
    }
    const from = before ? chart.x(before.end) : left, gap = left - from;
    if (gap > 0.5) {
      const what = before.rank === block.rank ? "engine" : "message";
      c.fillStyle = colors[before.rank === block.rank ? "shade" : "communication"];
      c.fillRect(from, middle - 1.5, gap, 3);
      const told = fits([`${what} ${record.time(block.start - before.end)}`], gap);
      c.fillStyle = colors.ink;
      if (told) c.fillText(told, from + gap / 2, top + 4);
    }
    before = block;
  }
}
