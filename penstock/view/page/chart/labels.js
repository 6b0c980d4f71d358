// The texts around the lanes: names of ranks at the left, times above.

function drawLabels(chart, row) {
  const {context: c, page: {colors}, record: {timeline}} = chart, right = chart.gutter - 10;
  c.textAlign = "right";
  c.textBaseline = "middle";
  c.fillStyle = chart.pinned.has(row.rank) ? colors.accent : colors.ink;
  c.font = `600 ${chart.gutter > 60 && row.height > 11 ? 12 : 11}px system-ui, sans-serif`;
  const name = `${row.folded ? "▸ " : ""}rank ${row.rank}`;
  if (row.hasLabel) c.fillText(c.measureText(name).width < right ? name : String(row.rank), right, row.main + row.height / 2);
  if (row.predicted && row.predictedHeight >= 8) drawSmallLabel(chart, chart.comparison.name, row.predicted + row.predictedHeight / 2);
  if (row.memory) {
    const peak = timeline.formatMemory(timeline.data.peak_memory[row.rank]), long = `peak ${peak}`;
    drawSmallLabel(chart, smallTextWidth(c, long) < right - 2 ? long : peak, row.memory + row.memoryHeight / 2);
  }
}

function smallTextWidth(context, text) {
  context.font = "10.5px system-ui, sans-serif";
  return context.measureText(text).width;
}

/** Draw a small text at the left of a lane, shortened to fit. */
function drawSmallLabel({context: c, gutter, page: {colors}}, text, middle) {
  const right = gutter - 10;
  let shown = text;
  while (smallTextWidth(c, shown) > right - 2 && shown.length > 3) shown = `${shown.slice(0, -2)}…`;
  c.textAlign = "right";
  c.textBaseline = "middle";
  c.fillStyle = colors.muted;
  c.fillText(shown, right, middle);
}

/** Return the ticks of the time axis, {x, text}, at round times that leave room for their texts. */
function axisTicks(chart) {
  const {from, to} = chart.page.view, rough = ((to - from) * (chart.width < 560 ? 68 : 90)) / chart.plotWidth, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough) || rough;
  const [factor, unit] = chart.record.unit === "s" ? timeScale(to) : [1, ""], digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  const ticks = [];
  for (let count = Math.ceil(from / step - 1e-9); count * step <= to + step * 1e-9; count++) {
    ticks.push({x: chart.x(count * step), text: `${(count * step * factor).toFixed(digits)}${unit && ` ${unit}`}`});
  }
  return ticks;
}

function drawAxis({context: c, width, gutter, page: {colors}}, ticks) {
  c.fillStyle = colors.panel;
  c.fillRect(0, 0, width, AXIS_HEIGHT);
  c.fillStyle = colors.line;
  c.fillRect(0, AXIS_HEIGHT - 1, width, 1);
  c.fillStyle = colors.muted;
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  for (const {x, text} of ticks) {
    c.textAlign = x > width - 26 ? "right" : x < gutter + 12 ? "left" : "center";
    c.fillText(text, Math.min(x, width - 5), AXIS_HEIGHT / 2);
  }
}
