// All ranks over the whole step in one lane, with the window that the charts show.

class Overview {
  constructor(page) {
    this.page = page;
    this.host = element("div", {class: "overview", "aria-hidden": "true", title: "All ranks together; drag to move the window"});
    this.canvas = element("canvas");
    this.host.append(this.canvas);
    this.denseLanes = new DenseLanes();
    const moveWindow = (event) => {
      const {left, width} = this.host.getBoundingClientRect(), {from, to} = page.view, [chart] = page.charts;
      const time = page.duration * Math.min(1, Math.max(0, (event.clientX - left - chart.gutter) / (width - chart.gutter - RIGHT_MARGIN)));
      page.setView(time - (to - from) / 2, time + (to - from) / 2);
    };
    this.host.addEventListener("pointerdown", (event) => { this.host.setPointerCapture(event.pointerId); moveWindow(event); });
    this.host.addEventListener("pointermove", (event) => { if (event.buttons) moveWindow(event); });
  }

  draw() {
    const {page, canvas} = this, [chart] = page.charts, {timeline} = chart.record, {pixelRatio, width, gutter, plotWidth} = chart, height = 26;
    const pixels = Math.round(width * pixelRatio), scale = (plotWidth / page.duration) * pixelRatio, left = gutter * pixelRatio;
    const key = [pixels, page.duration, chart.record.step].join();
    if (this.key !== key || this.timeline !== timeline || this.denseLanes.paintColors !== page.paintColors) {
      Object.assign(this, {key, timeline});
      this.denseLanes.clear(pixels, Math.round(height * pixelRatio), page.paintColors);
      this.denseLanes.lane(0, height * pixelRatio);
      for (const {blocks, idle, sums} of timeline.ranks) {
        for (const block of blocks) this.denseLanes.add(left + block.start * scale, left + block.end * scale, paintOf(block, page.options.hues), block.half === null ? 1 : 0.5);
        for (const [start, end, cause] of idle) this.denseLanes.add(left + start * scale, left + end * scale, cause);
        for (const [paint, shares] of Object.entries(sums?.parts || {})) {
          const binWidth = sums.end / shares.length * scale;
          shares.forEach((share, index) => share && this.denseLanes.add(left + index * binWidth, left + (index + 1) * binWidth, paint, share));
        }
      }
    }
    canvas.width = pixels;
    canvas.height = Math.round(height * pixelRatio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d"), {from, to} = page.view, x = (time) => left + time * scale;
    this.denseLanes.draw(c, canvas.width, canvas.height);
    c.fillStyle = page.colors.panel;
    c.globalAlpha = 0.72;
    c.fillRect(left, 0, x(from) - left, canvas.height);
    c.fillRect(x(to), 0, x(page.duration) - x(to), canvas.height);
    c.globalAlpha = 1;
    c.strokeStyle = page.colors.accent;
    c.lineWidth = 2 * pixelRatio;
    c.strokeRect(x(from), pixelRatio, x(to) - x(from), canvas.height - 2 * pixelRatio);
  }
}
