// One lane of a rank: its blocks and its idle times, each where there is room for it, else as proportions.

const DIM = 0.16; // of what is not followed
const NARROW = 9, SNAPPED = 3; // a block up to so many pixels wide is painted without corners; one below so many as a proportion

/** The lane of `timeline` at the height `top`; only the main one of a rank has names on its blocks. */
function drawLane(chart, timeline, rank, top, height, named, alpha) {
  const {density, strip, slidNow, context: c} = chart, lane = timeline.ranks[rank];
  strip.lane((top - slidNow) * density, (top + height - slidNow) * density, alpha);
  c.globalAlpha = alpha;
  if (lane.sums) drawSums(chart, lane.sums);
  drawIdle(chart, lane, top, height, alpha);
  drawBlocks(chart, timeline, lane, top, height, named, alpha);
  c.globalAlpha = 1;
}

/** Of a huge step the shares of each part of its time. */
function drawSums(chart, {end, parts}) {
  const {density, strip} = chart;
  for (const [paint, shares] of Object.entries(parts)) {
    shares.forEach((share, place) => {
      if (share) strip.add(chart.x(place * end / shares.length) * density, chart.x((place + 1) * end / shares.length) * density, paint, share);
    });
  }
}

/** A tint with a pattern and a line at its foot; where there is no room for that, a proportion. */
function drawIdle(chart, {idle, idleEnds}, top, height, alpha) {
  const {context: c, density, strip} = chart, {colors, patterns, view, lit} = chart.page, dimmed = lit ? 2 * DIM : 1;
  for (let i = firstAfter(idleEnds, view.from); i < idle.length && idle[i][0] < view.to; i++) {
    const [start, end, cause] = idle[i], left = chart.x(start), right = chart.x(end);
    if (right - left < 2 || height < 8) {
      strip.add(left * density, right * density, cause, dimmed);
      continue;
    }
    c.globalAlpha = alpha * dimmed * 0.3;
    c.fillStyle = colors[cause];
    c.fillRect(left, top, right - left, height);
    c.globalAlpha = alpha * dimmed;
    c.fillStyle = patterns[cause];
    c.fillRect(left, top, right - left, height);
    c.fillStyle = colors[`${cause} ink`];
    if (height >= 16) c.fillRect(left, top + height - 2, right - left, 2);
  }
}

/** Blocks that are wide enough with their name; all others go to the strip. */
function drawBlocks(chart, timeline, {blocks, ends}, top, height, named, alpha) {
  const {context: c, density, strip} = chart, {colors, view, lit, options: {hued}} = chart.page, several = timeline.severalStages;
  const perTime = 1 / chart.perPixel, origin = chart.gutter - view.from * perTime; // as chart.x has it, for thousands of blocks
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  c.textAlign = "center";
  for (let i = firstAfter(ends, view.from); i < blocks.length && blocks[i].start < view.to; i++) {
    const block = blocks[i], left = origin + block.start * perTime, wide = (block.end - block.start) * perTime, shown = lit && !lit(block) ? DIM : 1, paint = paintOf(block, hued);
    if (wide <= NARROW || height < 8) {
      paintNarrow(strip, block, paint, left * density, wide * density, shown);
      continue;
    }
    const [from, high] = block.half === null ? [top, height] : [top + (block.half * height) / 2, height / 2 - 1];
    c.globalAlpha = alpha * shown;
    c.fillStyle = colors[hued && block.chunk % 2 ? `${paint} second` : paint];
    c.beginPath();
    c.roundRect(left + 0.5, from, wide - 1, high, Math.min(3, high / 3));
    c.fill();
    if (named && high >= 10) drawName(chart, block, several, left, wide, from + high / 2, timeline.partner(block));
  }
  c.globalAlpha = alpha;
}

/** At whole pixels, with one between two blocks, as long as there are enough of them. */
function paintNarrow(strip, {half}, paint, left, wide, shown) {
  const weight = half === null ? shown : shown / 2;
  if (wide < SNAPPED) strip.add(left, left + wide, paint, weight);
  else strip.add(Math.round(left), Math.round(left + wide) - (wide > 4 && half === null ? 1 : 0), paint, weight);
}

/** The longest name that has room; the two of a pair have the same form of it. */
function drawName(chart, block, several, left, wide, middle, partner, color = chart.page.colors[`letter-${block.kind}`]) {
  const names = ({text, kind, part}) => [...(several ? [text] : []), kind + part, ...(partner ? [] : [part])];
  const other = partner ? names(partner) : [], texts = names(block);
  const text = texts.find((each, form) => 6.4 * Math.max(each.length, (other[form] || "").length) + 5 < wide);
  if (text === undefined) return;
  const from = Math.max(left, chart.gutter), to = Math.min(left + wide, chart.gutter + chart.plotWidth + EDGE);
  chart.context.fillStyle = color;
  chart.context.fillText(text, to - from > 30 ? (from + to) / 2 : left + wide / 2, middle + 0.5);
}
