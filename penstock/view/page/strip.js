// Blocks denser than pixels: each column of pixels shows in which proportions its time was spent, never a sample of it.

const PAINTS = [...Object.keys(KINDS), ...Object.keys(CAUSES)];
const LEVELS = 4; // rows of pixels a lane needs to stack proportions; one that has fewer shows their mixture

/** Lanes of proportions, painted pixel by pixel: thousands of blocks cost no more than a few. */
class Strip {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d", {willReadFrequently: true});
  }

  /** Make room for a picture of `width` by `height` pixels, and empty it; `colors` are those of all that is painted. */
  clear(width, height, colors) {
    if (this.canvas.width !== width || this.canvas.height !== height || !this.image) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = this.context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.weights = new Float32Array(width * PAINTS.length);
    }
    this.pixels.fill(0);
    this.colors = PAINTS.map((paint) => colors[paint]);
    this.lanes = 0;
    this.open = null;
  }

  /** Begin a lane from the row of pixels `top` to `bottom`; one that falls on the same row as the lane before joins it. */
  lane(top, bottom, alpha = 1) {
    const from = Math.round(top), to = Math.max(from + 1, Math.round(bottom));
    if (this.open && this.open.from === from && this.open.to === to && to === from + 1) return;
    this.close();
    this.open = {from, to, alpha: Math.round(255 * alpha), first: Infinity, last: -1};
  }

  /** Paint the time between two places, in pixels and parts of them. */
  add(from, to, paint, weight = 1) {
    const {canvas: {width}, weights, open} = this, kind = PAINTS.indexOf(paint), count = PAINTS.length;
    const begin = Math.max(0, from), end = Math.min(width, to);
    if (!(begin < end)) return;
    const first = Math.floor(begin), last = Math.min(width - 1, Math.ceil(end) - 1);
    for (let column = first; column <= last; column++) {
      weights[column * count + kind] += weight * (Math.min(end, column + 1) - Math.max(begin, column));
    }
    open.first = Math.min(open.first, first);
    open.last = Math.max(open.last, last);
  }

  /** End a lane: its columns become pixels. */
  close() {
    const {open, weights} = this, count = PAINTS.length;
    this.open = null;
    if (!open || open.last < 0) return;
    const from = Math.max(0, open.from), to = Math.min(this.canvas.height, open.to);
    for (let column = open.first; column <= open.last; column++) {
      const shares = weights.subarray(column * count, (column + 1) * count);
      let whole = 0;
      for (const share of shares) whole += share;
      if (whole > 0.02) this.paint(column, from, to, open, shares, whole);
    }
    weights.fill(0, open.first * count, (open.last + 1) * count);
  }

  paint(column, from, to, open, shares, whole) {
    const {canvas: {width}, pixels, colors} = this, high = open.to - open.from, alpha = Math.min(1, whole) * open.alpha;
    if (high < LEVELS) {
      let [red, green, blue] = [0, 0, 0];
      shares.forEach((share, kind) => { red += share * colors[kind][0]; green += share * colors[kind][1]; blue += share * colors[kind][2]; });
      const mixed = pixel(red / whole, green / whole, blue / whole, alpha);
      for (let row = from; row < to; row++) pixels[row * width + column] = mixed;
      return;
    }
    let sum = 0, row = open.from;
    for (let kind = 0; kind < shares.length; kind++) {
      if (!shares[kind]) continue;
      sum += shares[kind];
      const end = open.from + Math.round(high * sum / whole), color = pixel(...colors[kind], alpha);
      for (; row < end; row++) if (row >= from && row < to) pixels[row * width + column] = color;
    }
  }

  /** Put all lanes on another canvas, `width` by `height` there. */
  draw(context, width, height) {
    this.close();
    this.context.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, 0, 0, width, height);
  }
}

function pixel(red, green, blue, alpha) { return ((alpha << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0; }

/** A colour `rgb(1, 2, 3)` as its three numbers. */
function partsOf(color) { return color.match(/[\d.]+/g).slice(0, 3).map(Number); }

/** How the idle times of a cause are drawn where there is room: each differently, for eyes and paper without colours. */
function patternOf(cause, color) {
  const tile = element("canvas", {width: 8, height: 8}), c = tile.getContext("2d");
  const lines = {fill: [], drain: [[0, 4, 8, 4]], imbalance: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]], communication: [[-2, -2, 10, 10], [-2, 6, 2, 10], [6, -2, 10, 2]], sending: [[4, 0, 4, 8]]}[cause];
  c.strokeStyle = c.fillStyle = color;
  c.globalAlpha = 0.75;
  c.lineWidth = 1;
  if (cause === "fill") c.fillRect(3, 3, 1.5, 1.5);
  for (const [x, y, toX, toY] of lines) {
    c.beginPath();
    c.moveTo(x, y);
    c.lineTo(toX, toY);
    c.stroke();
  }
  return c.createPattern(tile, "repeat");
}

/** All of the time in one lane, all ranks together, and in it the window that the charts show. */
class Overview {
  constructor(page) {
    this.page = page;
    this.host = element("div", {class: "overview", "aria-hidden": "true", title: "All ranks together; drag to move the window"});
    this.canvas = element("canvas");
    this.host.append(this.canvas);
    this.strip = new Strip();
    const go = (event) => {
      const {left, width} = this.host.getBoundingClientRect(), {from, to} = page.view, [chart] = page.charts;
      const time = page.whole * Math.min(1, Math.max(0, (event.clientX - left - chart.gutter) / (width - chart.gutter - EDGE)));
      page.show(time - (to - from) / 2, time + (to - from) / 2);
    };
    this.host.addEventListener("pointerdown", (event) => { this.host.setPointerCapture(event.pointerId); go(event); });
    this.host.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  }

  draw() {
    const {page, canvas} = this, [chart] = page.charts, {timeline} = chart.record, {density, width, gutter, plotWidth} = chart, high = 26;
    const pixels = Math.round(width * density), scale = (plotWidth / page.whole) * density, left = gutter * density;
    const key = [pixels, page.whole, chart.record.step, page.colors.panel].join();
    if (this.key !== key || this.timeline !== timeline) {
      Object.assign(this, {key, timeline});
      this.strip.clear(pixels, Math.round(high * density), page.parts);
      this.strip.lane(0, high * density);
      for (const {blocks, idle, sums} of timeline.ranks) {
        for (const {start, end, kind, half} of blocks) this.strip.add(left + start * scale, left + end * scale, kind, half === null ? 1 : 0.5);
        for (const [start, end, cause] of idle) this.strip.add(left + start * scale, left + end * scale, cause);
        for (const [paint, shares] of Object.entries(sums?.parts || {})) {
          const each = sums.end / shares.length * scale;
          shares.forEach((share, place) => share && this.strip.add(left + place * each, left + (place + 1) * each, paint, share));
        }
      }
    }
    canvas.width = pixels;
    canvas.height = Math.round(high * density);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${high}px`;
    const c = canvas.getContext("2d"), {from, to} = page.view, x = (time) => left + time * scale;
    this.strip.draw(c, canvas.width, canvas.height);
    c.fillStyle = page.colors.panel;
    c.globalAlpha = 0.72;
    c.fillRect(left, 0, x(from) - left, canvas.height);
    c.fillRect(x(to), 0, x(page.whole) - x(to), canvas.height);
    c.globalAlpha = 1;
    c.strokeStyle = page.colors.accent;
    c.lineWidth = 2 * density;
    c.strokeRect(x(from), density, x(to) - x(from), canvas.height - 2 * density);
  }
}
