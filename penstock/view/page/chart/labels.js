// The texts around the lanes: the names of the ranks at the left, the times above.

function drawLabels(chart, row) {
  const {context: c, page: {colors}, record: {timeline}} = chart, right = chart.gutter - 10;
  c.textAlign = "right";
  c.textBaseline = "middle";
  c.fillStyle = chart.pinned.has(row.rank) ? colors.accent : colors.ink;
  c.font = `600 ${chart.gutter > 60 && row.high > 11 ? 12 : 11}px system-ui, sans-serif`;
  const name = `${row.folded ? "▸ " : ""}rank ${row.rank}`;
  if (row.labelled) c.fillText(c.measureText(name).width < right ? name : String(row.rank), right, row.main + row.high / 2);
  if (row.planned && row.plannedHigh >= 8) drawLabel(chart, chart.beside.name, row.planned + row.plannedHigh / 2);
  if (row.memory) {
    const peak = timeline.amount(timeline.data.peak_memory[row.rank]), long = `peak ${peak}`;
    drawLabel(chart, widthOf(c, long) < right - 2 ? long : peak, row.memory + row.memoryHigh / 2);
  }
}

function widthOf(context, text) {
  context.font = "10.5px system-ui, sans-serif";
  return context.measureText(text).width;
}

/** A small text at the left of a lane, shortened to its room. */
function drawLabel({context: c, gutter, page: {colors}}, text, middle) {
  const right = gutter - 10;
  let shown = text;
  while (widthOf(c, shown) > right - 2 && shown.length > 3) shown = `${shown.slice(0, -2)}…`;
  c.textAlign = "right";
  c.textBaseline = "middle";
  c.fillStyle = colors.muted;
  c.fillText(shown, right, middle);
}

/** Round times that have room beside each other: where, and what they are called. */
function ticksOf(chart) {
  const {from, to} = chart.page.view, rough = ((to - from) * (chart.width < 560 ? 68 : 90)) / chart.plotWidth, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || rough;
  const [factor, unit] = chart.record.unit === "s" ? scaleOf(to) : [1, ""], digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  const found = [];
  for (let count = Math.ceil(from / step - 1e-9); count * step <= to + step * 1e-9; count++) {
    found.push({x: chart.x(count * step), text: `${(count * step * factor).toFixed(digits)}${unit && ` ${unit}`}`});
  }
  return found;
}

function drawAxis({context: c, width, gutter, page: {colors}}, ticks) {
  c.fillStyle = colors.panel;
  c.fillRect(0, 0, width, AXIS);
  c.fillStyle = colors.line;
  c.fillRect(0, AXIS - 1, width, 1);
  c.fillStyle = colors.muted;
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  for (const {x, text} of ticks) {
    c.textAlign = x > width - 26 ? "right" : x < gutter + 12 ? "left" : "center";
    c.fillText(text, Math.min(x, width - 5), AXIS / 2);
  }
}
