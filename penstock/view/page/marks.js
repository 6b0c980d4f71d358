// What is drawn over the blocks: the critical path, a microbatch that is followed, what is pointed at, what is selected.

/** The critical path: an outline on the blocks, lines between ranks, and all of it unrolled in a row of its own. */
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
  const {pathRow: {top, high}, density, strip, slidNow, page: {view}} = chart, {path, pathEnds} = chart.record.timeline, first = firstAfter(pathEnds, view.from);
  strip.lane((top - slidNow) * density, (top + high - slidNow) * density);
  for (const block of path.slice(first, firstAfter(pathEnds, view.to) + 1)) {
    const left = chart.x(block.start), right = chart.x(block.end);
    if (right - left <= NARROW) strip.add(left * density, right * density, block.kind);
  }
}

/** Each action of the path, then what it took to come to the next, from left to right. */
function unroll(chart, blocks, first) {
  const {context: c, pathRow: {top, high}, record} = chart, {colors} = chart.page;
  c.textBaseline = "middle";
  c.textAlign = "center";
  const fits = (texts, wide) => texts.find((text) => 6.2 * text.length + 4 < wide);
  let before = first;
  c.font = "11px system-ui, sans-serif";
  for (const block of blocks) {
    const left = chart.x(block.start), wide = chart.x(block.end) - left, middle = top + high / 2;
    if (wide > NARROW) {
      c.fillStyle = colors[block.kind];
      c.fillRect(left, top, wide - 1, high);
      c.fillStyle = colors[`letter-${block.kind}`];
      const text = fits([`rank ${block.rank} ${block.kind}${block.microbatch}`, `r${block.rank} ${block.kind}${block.microbatch}`, `r${block.rank}`], wide);
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

/** A line from the end of one block to the start of another. */
function link(chart, source, taker) {
  const {context: c} = chart, down = chart.rows[taker.rank].main > chart.rows[source.rank].main;
  c.lineWidth = 1.25;
  c.beginPath();
  c.moveTo(chart.x(source.end), chart.topOf(source) + (down ? chart.heightOf(source) : 0));
  c.lineTo(chart.x(taker.start), chart.topOf(taker) + (down ? 0 : chart.heightOf(taker)));
  c.stroke();
}

/** The messages of the microbatch that is followed. */
function drawFollowed(chart) {
  const {page: {followed, colors}, record: {timeline}, context: c} = chart;
  if (followed === null) return;
  c.strokeStyle = colors.accent;
  for (const block of timeline.journey(followed)) {
    for (const {action} of block.receives) if (timeline.blocks.has(action)) link(chart, timeline.blocks.get(action), block);
  }
}

/** The block under the pointer or chosen by keyboard, and lines to it from what it received. */
function drawMarks(chart) {
  const {context: c} = chart, {colors} = chart.page, {blocks} = chart.record.timeline;
  for (const block of [chart.hovered, chart.selected]) {
    if (!block || !chart.rows[block.rank]) continue;
    c.strokeStyle = colors.accent;
    for (const {action} of block.receives) if (blocks.has(action)) link(chart, blocks.get(action), block);
    c.lineWidth = block === chart.selected ? 3 : 2;
    const left = chart.x(block.start), wide = Math.max(3, chart.x(block.end) - left);
    c.beginPath();
    c.roundRect(left - 1, chart.topOf(block) - 1, wide + 2, chart.heightOf(block) + 2, 4);
    c.stroke();
  }
}

/** The time and the ranks that are selected. */
function drawSelection(chart) {
  const {context: c, page: {selection, colors}} = chart;
  if (!selection) return;
  const left = chart.x(selection.from), wide = Math.max(1, chart.x(selection.to) - left);
  for (const rank of selection.ranks) {
    const row = chart.rows[rank];
    if (!row) continue;
    c.globalAlpha = 0.14;
    c.fillStyle = colors.accent;
    c.fillRect(left, row.top - 2, wide, row.bottom - row.top + 4);
    c.globalAlpha = 1;
    c.fillRect(left - 1, row.top - 2, 1.5, row.bottom - row.top + 4);
    c.fillRect(left + wide - 0.5, row.top - 2, 1.5, row.bottom - row.top + 4);
  }
}
