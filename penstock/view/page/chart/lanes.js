// One lane of a rank: its blocks and idle times; those too narrow to draw go to the dense lanes.

const DIMMED_ALPHA = 0.16; // of blocks that are not highlighted
const NARROW_PIXELS = 9, SNAP_PIXELS = 3; // widths: narrower blocks go to the dense lanes; still narrower ones are not rounded to pixels

/** Draw the lane of a rank of `timeline` at `top`, with names on its blocks if `withNames`. */
function drawLane(chart, timeline, rank, top, height, withNames, alpha) {
  const {pixelRatio, denseLanes, drawnOffset, context: c} = chart, lane = timeline.ranks[rank];
  denseLanes.lane((top - drawnOffset) * pixelRatio, (top + height - drawnOffset) * pixelRatio, alpha);
  c.globalAlpha = alpha;
  if (lane.sums) drawSums(chart, lane.sums);
  drawIdle(chart, lane, top, height, alpha);
  drawBlocks(chart, timeline, lane, top, height, withNames, alpha);
  c.globalAlpha = 1;
}

/** Draw the shares of each time bin of a huge step. */
function drawSums(chart, {end, parts}) {
  const {pixelRatio, denseLanes} = chart;
  for (const [paint, shares] of Object.entries(parts)) {
    shares.forEach((share, index) => {
      if (share) denseLanes.add(chart.x(index * end / shares.length) * pixelRatio, chart.x((index + 1) * end / shares.length) * pixelRatio, paint, share);
    });
  }
}

/** Draw idle times as a tint with a hatch and a line at the bottom; narrow ones in the dense lanes. */
function drawIdle(chart, {idle, idleEnds}, top, height, alpha) {
  const {context: c, pixelRatio, denseLanes} = chart, {colors, patterns, view, isHighlighted} = chart.page, alphaFactor = isHighlighted ? 2 * DIMMED_ALPHA : 1;
  for (let i = firstAfter(idleEnds, view.from); i < idle.length && idle[i][0] < view.to; i++) {
    const [start, end, cause] = idle[i], left = chart.x(start), right = chart.x(end);
    if (right - left < 2 || height < 8) {
      denseLanes.add(left * pixelRatio, right * pixelRatio, cause, alphaFactor);
      continue;
    }
    c.globalAlpha = alpha * alphaFactor * 0.3;
    c.fillStyle = colors[cause];
    c.fillRect(left, top, right - left, height);
    c.globalAlpha = alpha * alphaFactor;
    c.fillStyle = patterns[cause];
    c.fillRect(left, top, right - left, height);
    c.fillStyle = colors[`${cause} ink`];
    if (height >= 16) c.fillRect(left, top + height - 2, right - left, 2);
  }
}

/** Draw blocks with their names; narrow ones in the dense lanes. */
function drawBlocks(chart, timeline, {blocks, ends}, top, height, withNames, alpha) {
  const {context: c, pixelRatio, denseLanes} = chart, {colors, view, isHighlighted, options: {hues}} = chart.page, showStage = timeline.hasSeveralStages;
  const pixelsPerTime = 1 / chart.timePerPixel, origin = chart.gutter - view.from * pixelsPerTime; // as in chart.x, computed once for thousands of blocks
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  c.textAlign = "center";
  for (let i = firstAfter(ends, view.from); i < blocks.length && blocks[i].start < view.to; i++) {
    const block = blocks[i], left = origin + block.start * pixelsPerTime, width = (block.end - block.start) * pixelsPerTime, blockAlpha = isHighlighted && !isHighlighted(block) ? DIMMED_ALPHA : 1, paint = paintOf(block, hues);
    if (width <= NARROW_PIXELS || height < 8) {
      paintNarrow(denseLanes, block, paint, left * pixelRatio, width * pixelRatio, blockAlpha);
      continue;
    }
    const [from, blockHeight] = block.half === null ? [top, height] : [top + (block.half * height) / 2, height / 2 - 1];
    c.globalAlpha = alpha * blockAlpha;
    c.fillStyle = colors[hues && block.chunk % 2 ? `${paint} second` : paint];
    c.beginPath();
    c.roundRect(left + 0.5, from, width - 1, blockHeight, Math.min(3, blockHeight / 3));
    c.fill();
    if (withNames && blockHeight >= 10) drawName(chart, block, showStage, left, width, from + blockHeight / 2, timeline.partner(block));
  }
  c.globalAlpha = alpha;
}

/** Add a narrow block to the dense lanes: at whole pixels, with a gap of one to the next, if it is wide enough. */
function paintNarrow(denseLanes, {half}, paint, left, width, blockAlpha) {
  const weight = half === null ? blockAlpha : blockAlpha / 2;
  if (width < SNAP_PIXELS) denseLanes.add(left, left + width, paint, weight);
  else denseLanes.add(Math.round(left), Math.round(left + width) - (width > 4 && half === null ? 1 : 0), paint, weight);
}

/** Draw the longest name that fits. Both actions of a pair have names of the same form. */
function drawName(chart, block, showStage, left, width, middle, partner, color = chart.page.colors[letterOf(block, chart.page.options.hues)]) {
  const names = ({text, kind, part}) => [...(showStage ? [text] : []), kind + part, ...(partner ? [] : [part])];
  const partnerTexts = partner ? names(partner) : [];
  const text = names(block).find((name, form) => 6.4 * Math.max(name.length, (partnerTexts[form] || "").length) + 5 < width);
  if (text === undefined) return;
  const from = Math.max(left, chart.gutter), to = Math.min(left + width, chart.gutter + chart.plotWidth + RIGHT_MARGIN);
  chart.context.fillStyle = color;
  chart.context.fillText(text, to - from > 30 ? (from + to) / 2 : left + width / 2, middle + 0.5);
}
