// What a rank holds, as a curve below its lane.

function drawMemory(chart, row) {
  const {context: c, page: {colors, options}, record: {timeline}} = chart;
  const beside = chart.beside?.timeline, planned = beside?.data.memory_unit === timeline.data.memory_unit ? beside : null;
  const alike = chart.page.records.map((record) => record.timeline).filter(({data}) => data.memory_unit === timeline.data.memory_unit);
  const most = Math.max(timeline.peak, planned ? planned.peak : 0, ...alike.map(({peak}) => peak)) || 1; // one scale for all that stand beside each other
  const base = row.memory + row.memoryHigh, y = (held) => base - (held / most) * (row.memoryHigh - 2);
  c.strokeStyle = c.fillStyle = colors.shade;
  trace(chart, timeline.ranks[row.rank].memory, y, base);
  c.lineTo(chart.gutter + chart.plotWidth + EDGE, base);
  c.globalAlpha = 0.22;
  c.fill();
  c.globalAlpha = 1;
  c.lineWidth = 1.25;
  trace(chart, timeline.ranks[row.rank].memory, y, base);
  c.stroke();
  if (planned && planned.ranks[row.rank] && options.planned) {
    c.setLineDash([3, 3]);
    c.strokeStyle = colors.ink;
    c.lineWidth = 1;
    trace(chart, planned.ranks[row.rank].memory, y, base);
    c.stroke();
    c.setLineDash([]);
  }
}

/** The path of a curve in steps; of what falls on one column of pixels, the most. */
function trace(chart, points, y, base) {
  const {context: c} = chart, right = chart.gutter + chart.plotWidth + EDGE;
  let held = 0, column = -1, at = 0, most = 0;
  c.beginPath();
  c.moveTo(chart.gutter - 2, base);
  const finish = () => { if (column >= 0) { c.lineTo(at, y(most)); c.lineTo(at, y(held)); } };
  for (const [time, next] of points) {
    const x = Math.min(Math.max(chart.x(time), chart.gutter - 2), right + 2);
    if (Math.floor(x) !== column) {
      finish();
      c.lineTo(x, y(held));
      [column, at, most] = [Math.floor(x), x, next];
    }
    most = Math.max(most, next);
    held = next;
    if (x > right) break;
  }
  finish();
  c.lineTo(right + 2, y(held));
}
