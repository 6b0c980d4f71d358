// Rows of narrow blocks, painted pixel by pixel: thousands of them cost no more than a few.

/** One row of pixels for each lane; a lane's row is stretched to its height when all are painted. */
class Strip {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d", {willReadFrequently: true});
    this.lanes = [];
  }

  /** Make room for `lanes` rows of `width` pixels, all of them empty. */
  clear(width, lanes) {
    if (this.canvas.width !== width || this.canvas.height < lanes) {
      this.canvas.width = width;
      this.canvas.height = lanes;
      this.image = this.context.createImageData(width, lanes);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.pixels.fill(0);
    this.lanes = [];
  }

  /** Begin the row of a lane that stands at `top`, `height` high, and is drawn with `alpha`. */
  lane(top, height, alpha) { this.lanes.push({top, height, alpha}); }

  /** Paint the pixels from `from` up to `to` of the lane begun last. */
  paint(from, to, color) {
    const row = (this.lanes.length - 1) * this.canvas.width;
    this.pixels.fill(color, row + Math.max(from, 0), row + Math.max(0, Math.min(to, this.canvas.width)));
  }

  /** Put all lanes on another canvas, `width` wide there. */
  draw(context, width) {
    if (!this.lanes.length) return;
    this.context.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    this.lanes.forEach(({top, height, alpha}, row) => {
      context.globalAlpha = alpha;
      context.drawImage(this.canvas, 0, row, this.canvas.width, 1, 0, top, width, height);
    });
    context.globalAlpha = 1;
  }
}

/** A colour `rgb(1, 2, 3)`, or the middle of two, as the number that stands for it in a row of pixels. */
function pixelOf(color, other = color) {
  const [parts, others] = [color, other].map((each) => each.match(/[\d.]+/g).map(Number));
  return new Uint32Array(new Uint8ClampedArray([0, 1, 2].map((i) => (parts[i] + others[i]) / 2).concat(255)).buffer)[0];
}
