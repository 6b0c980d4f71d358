// All of the time in one lane, all ranks together, and in it the window that the charts show.

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
    const key = [pixels, page.whole, chart.record.step].join();
    if (this.key !== key || this.timeline !== timeline || this.strip.parts !== page.parts) {
      Object.assign(this, {key, timeline});
      this.strip.clear(pixels, Math.round(high * density), page.parts);
      this.strip.lane(0, high * density);
      for (const {blocks, idle, sums} of timeline.ranks) {
        for (const block of blocks) this.strip.add(left + block.start * scale, left + block.end * scale, paintOf(block, page.options.hued), block.half === null ? 1 : 0.5);
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
