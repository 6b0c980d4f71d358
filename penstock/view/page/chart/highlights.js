// Drawn over the blocks: the messages of a followed microbatch, the block under the pointer, the selection.

/** Draw a line from the end of one block to the start of another. */
function drawLink(chart, source, receiver) {
  const {context: c} = chart, down = chart.rows[receiver.rank].main > chart.rows[source.rank].main;
  c.lineWidth = 1.25;
  c.beginPath();
  c.moveTo(chart.x(source.end), chart.topOf(source) + (down ? chart.heightOf(source) : 0));
  c.lineTo(chart.x(receiver.start), chart.topOf(receiver) + (down ? 0 : chart.heightOf(receiver)));
  c.stroke();
}

/** Draw the messages of the followed microbatch. */
function drawFollowedMessages(chart) {
  const {page: {followedMicrobatch, colors}, record: {timeline}, context: c} = chart;
  if (followedMicrobatch === null) return;
  c.strokeStyle = colors.accent;
  for (const block of timeline.blocksOfMicrobatch(followedMicrobatch)) {
    for (const {action} of block.receives) if (timeline.blocks.has(action)) drawLink(chart, timeline.blocks.get(action), block);
  }
}

/** Outline the block under the pointer and the selected one, and draw the messages that they received. */
function drawHighlights(chart) {
  const {context: c} = chart, {colors} = chart.page, {blocks} = chart.record.timeline;
  for (const block of [chart.hovered, chart.selected]) {
    if (!block || !chart.rows[block.rank]) continue;
    c.strokeStyle = colors.accent;
    for (const {action} of block.receives) if (blocks.has(action)) drawLink(chart, blocks.get(action), block);
    c.lineWidth = block === chart.selected ? 3 : 2;
    const left = chart.x(block.start), width = Math.max(3, chart.x(block.end) - left);
    c.beginPath();
    c.roundRect(left - 1, chart.topOf(block) - 1, width + 2, chart.heightOf(block) + 2, 4);
    c.stroke();
  }
}

/** Draw the selected time and ranks. */
function drawSelection(chart) {
  const {context: c, page: {selection, colors}} = chart;
  if (!selection) return;
  const left = chart.x(selection.from), width = Math.max(1, chart.x(selection.to) - left);
  for (const rank of selection.ranks) {
    const row = chart.rows[rank];
    if (!row) continue;
    c.globalAlpha = 0.14;
    c.fillStyle = colors.accent;
    c.fillRect(left, row.top - 2, width, row.bottom - row.top + 4);
    c.globalAlpha = 1;
    c.fillRect(left - 1, row.top - 2, 1.5, row.bottom - row.top + 4);
    c.fillRect(left + width - 0.5, row.top - 2, 1.5, row.bottom - row.top + 4);
  }
}
