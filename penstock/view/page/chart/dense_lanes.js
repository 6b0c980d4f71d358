// Blocks narrower than pixels: each column of pixels shows how its time was shared, and omits no block.

const MIN_STACK_ROWS = 4; // a lane with fewer rows of pixels mixes the colours of a column instead of stacking them

/** An image of lanes, computed pixel by pixel, so that thousands of blocks cost little more than a few. */
class DenseLanes {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d", {willReadFrequently: true});
  }

  /** Clear the image, `width` by `height` pixels. `paintColors`: paint -> its colour as [red, green, blue]. */
  clear(width, height, paintColors) {
    if (this.canvas.width !== width || this.canvas.height !== height || !this.image) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = this.context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.paintColors = null;
    }
    if (this.paintColors !== paintColors) {
      this.paintColors = paintColors;
      this.colors = Object.values(paintColors);
      this.paintIndices = new Map(Object.keys(paintColors).map((paint, index) => [paint, index]));
      this.weights = new Float32Array(width * this.colors.length);
    }
    this.pixels.fill(0);
    this.openLane = null;
  }

  /** Begin a lane from the pixel row `top` to `bottom`. A lane on the same single row as the one before is merged with it. */
  lane(top, bottom, alpha = 1) {
    const from = Math.round(top), to = Math.max(from + 1, Math.round(bottom));
    if (this.openLane && this.openLane.from === from && this.openLane.to === to && to === from + 1) return;
    this.close();
    this.openLane = {from, to, alpha: Math.round(255 * alpha), first: Infinity, last: -1};
  }

  /** Add the interval `from` .. `to`, in (fractional) pixels, to the open lane. */
  add(from, to, paint, weight = 1) {
    const {canvas: {width}, weights, openLane} = this, paintIndex = this.paintIndices.get(paint), count = this.colors.length;
    const begin = Math.max(0, from), end = Math.min(width, to);
    if (!(begin < end)) return;
    const first = Math.floor(begin), last = Math.min(width - 1, Math.ceil(end) - 1);
    for (let column = first; column <= last; column++) {
      weights[column * count + paintIndex] += weight * (Math.min(end, column + 1) - Math.max(begin, column));
    }
    openLane.first = Math.min(openLane.first, first);
    openLane.last = Math.max(openLane.last, last);
  }

  /** Close the open lane, and paint its columns. */
  close() {
    const {openLane, weights} = this, count = this.colors.length;
    this.openLane = null;
    if (!openLane || openLane.last < 0) return;
    for (let column = openLane.first; column <= openLane.last; column++) {
      let total = 0;
      for (let index = column * count; index < (column + 1) * count; index++) total += weights[index];
      if (total > 0.02) this.paint(column, openLane, total);
    }
    weights.fill(0, openLane.first * count, (openLane.last + 1) * count);
  }

  /** Paint a column of a lane, whose weights sum to `total`: stacked, or mixed if the lane is too low. */
  paint(column, {from: top, to: bottom, alpha: maxAlpha}, total) {
    const {canvas: {width, height}, pixels, colors, weights} = this, laneHeight = bottom - top, alpha = Math.min(1, total) * maxAlpha;
    const from = Math.max(0, top), to = Math.min(height, bottom), first = column * colors.length;
    if (laneHeight < MIN_STACK_ROWS) {
      const mixture = [0, 1, 2].map((channel) => colors.reduce((sum, color, paintIndex) => sum + weights[first + paintIndex] * color[channel], 0) / total);
      const color = pixel(...mixture, alpha);
      for (let row = from; row < to; row++) pixels[row * width + column] = color;
      return;
    }
    let sum = 0, row = from;
    for (let paintIndex = 0; paintIndex < colors.length; paintIndex++) {
      if (!weights[first + paintIndex]) continue;
      sum += weights[first + paintIndex];
      const end = Math.min(to, top + Math.round((laneHeight * sum) / total)), [red, green, blue] = colors[paintIndex], color = pixel(red, green, blue, alpha);
      for (; row < end; row++) pixels[row * width + column] = color;
    }
  }

  /** Draw the image on another canvas, scaled to `width` by `height`. */
  draw(context, width, height) {
    this.close();
    this.context.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, 0, 0, width, height);
  }
}

/** Return a pixel as it is stored in ImageData: ABGR on little-endian machines. */
function pixel(red, green, blue, alpha) { return ((alpha << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0; }
