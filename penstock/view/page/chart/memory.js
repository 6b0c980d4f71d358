// The memory that a rank holds, as a curve below its lane.

function drawMemory(chart, row) {
  const {context: c, page: {colors, options}, record: {timeline}} = chart;
  const comparison = chart.comparison?.timeline, predicted = comparison?.data.memory_unit === timeline.data.memory_unit ? comparison : null;
  const sameUnit = chart.page.records.map((record) => record.timeline).filter(({data}) => data.memory_unit === timeline.data.memory_unit);
  const maximum = Math.max(timeline.peak, predicted ? predicted.peak : 0, ...sameUnit.map(({peak}) => peak)) || 1; // one scale for all charts of the page
  const base = row.memory + row.memoryHeight, y = (held) => base - (held / maximum) * (row.memoryHeight - 2);
  c.strokeStyle = c.fillStyle = colors.shade;
  traceCurve(chart, timeline.ranks[row.rank].memory, y, base);
  c.lineTo(chart.gutter + chart.plotWidth + RIGHT_MARGIN, base);
  c.globalAlpha = 0.22;
  c.fill();
  c.globalAlpha = 1;
  c.lineWidth = 1.25;
  traceCurve(chart, timeline.ranks[row.rank].memory, y, base);
  c.stroke();
  if (predicted && predicted.ranks[row.rank] && options.predicted) {
    c.setLineDash([3, 3]);
    c.strokeStyle = colors.ink;
    c.lineWidth = 1;
    traceCurve(chart, predicted.ranks[row.rank].memory, y, base);
    c.stroke();
    c.setLineDash([]);
  }
}

/** Make the path of a step curve through `points`, [time, memory]. A column of pixels shows its maximum. */
function traceCurve(chart, points, y, base) {
  const {context: c} = chart, right = chart.gutter + chart.plotWidth + RIGHT_MARGIN;
  let held = 0, column = -1, columnX = 0, maximum = 0;
  c.beginPath();
  c.moveTo(chart.gutter - 2, base);
  const finish = () => { if (column >= 0) { c.lineTo(columnX, y(maximum)); c.lineTo(columnX, y(held)); } };
  for (const [time, next] of points) {
    const x = Math.min(Math.max(chart.x(time), chart.gutter - 2), right + 2);
    if (Math.floor(x) !== column) {
      finish();
      c.lineTo(x, y(held));
      [column, columnX, maximum] = [Math.floor(x), x, next];
    }
    maximum = Math.max(maximum, next);
    held = next;
    if (x > right) break;
  }
  finish();
  c.lineTo(right + 2, y(held));
}
