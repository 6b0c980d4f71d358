// Blocks denser than pixels: each column of pixels shows in which proportions its time was spent, never a sample of it.

const LEVELS = 4; // rows of pixels a lane needs to stack proportions; one that has fewer shows their mixture

/** Lanes of proportions, painted pixel by pixel: thousands of blocks cost no more than a few. */
class Strip {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d", {willReadFrequently: true});
  }

  /** Make room for a picture of `width` by `height` pixels, and empty it; `parts` are the colours of all that is painted. */
  clear(width, height, parts) {
    if (this.canvas.width !== width || this.canvas.height !== height || !this.image) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = this.context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.parts = null;
    }
    if (this.parts !== parts) {
      this.parts = parts;
      this.colors = Object.values(parts);
      this.places = new Map(Object.keys(parts).map((paint, place) => [paint, place]));
      this.weights = new Float32Array(width * this.colors.length);
    }
    this.pixels.fill(0);
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
    const {canvas: {width}, weights, open} = this, kind = this.places.get(paint), count = this.colors.length;
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
    const {open, weights} = this, count = this.colors.length;
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
