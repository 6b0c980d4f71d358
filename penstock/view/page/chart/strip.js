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
    for (let column = open.first; column <= open.last; column++) {
      let whole = 0;
      for (let place = column * count; place < (column + 1) * count; place++) whole += weights[place];
      if (whole > 0.02) this.paint(column, open, whole);
    }
    weights.fill(0, open.first * count, (open.last + 1) * count);
  }

  /** Fill a column of a lane, whose weights are `whole` together: stacked, or mixed where it is too low for that. */
  paint(column, {from: top, to: bottom, alpha: most}, whole) {
    const {canvas: {width, height}, pixels, colors, weights} = this, high = bottom - top, alpha = Math.min(1, whole) * most;
    const from = Math.max(0, top), to = Math.min(height, bottom), first = column * colors.length;
    if (high < LEVELS) {
      const mixed = [0, 1, 2].map((part) => colors.reduce((sum, color, kind) => sum + weights[first + kind] * color[part], 0) / whole);
      const color = pixel(...mixed, alpha);
      for (let row = from; row < to; row++) pixels[row * width + column] = color;
      return;
    }
    let sum = 0, row = from;
    for (let kind = 0; kind < colors.length; kind++) {
      if (!weights[first + kind]) continue;
      sum += weights[first + kind];
      const end = Math.min(to, top + Math.round((high * sum) / whole)), [red, green, blue] = colors[kind], color = pixel(red, green, blue, alpha);
      for (; row < end; row++) pixels[row * width + column] = color;
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
