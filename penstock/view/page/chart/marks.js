// What is drawn over the blocks: a microbatch that is followed, what is pointed at, what is selected.

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
