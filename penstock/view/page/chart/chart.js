// The picture of one record: a canvas as high as the window at most, which draws what is in sight.

class Chart {
  constructor(record, page) {
    this.record = record;
    this.page = page;
    this.host = document.createElement("div");
    this.host.className = "chart";
    this.host.tabIndex = 0;
    this.host.setAttribute("role", "application");
    this.host.setAttribute("aria-roledescription", "timeline");
    this.host.setAttribute("aria-label", `Timeline of ${record.name}. Arrow keys move between actions, plus and minus zoom, `
      + "0 shows all, Shift with an arrow moves the view, Enter goes to what the action waited for, F follows its microbatch, Escape leaves.");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.host.append(this.canvas);
    this.context = this.canvas.getContext("2d");
    this.strip = new Strip();
    this.selected = null; // the block that the keyboard has come to
    this.hovered = null;
    this.instead = null; // another step to draw below this one: {name, timeline}
    this.folded = new Set(); // ranks, shown as a thin row
    this.pinned = new Set(); // ranks, at the top
    this.overlay = () => {}; // draws more, over the blocks
  }

  /** The step below the one that is shown: an alternative that was asked for, else what was planned. */
  get beside() { return this.instead || (this.record.planned && {name: "planned", timeline: this.record.planned}); }

  /** Work out where everything stands; needed after a change of width, step or options. */
  layout() {
    this.width = this.host.clientWidth;
    this.gutter = this.width < 560 ? 58 : 74;
    this.rows = placed(this);
    const last = this.rows[this.order.at(-1)];
    this.pathRow = this.page.options.path && this.record.timeline.path.length ? {top: (last ? last.bottom : AXIS) + 12, high: 20} : null;
    this.height = (this.pathRow ? this.pathRow.top + this.pathRow.high : last ? last.bottom : AXIS) + 10;
    this.host.style.height = `${this.height + 2}px`;
    this.visibleHeight = this.page.printing ? this.height : Math.min(this.height, Math.max(200, window.innerHeight));
    const density = this.page.printing ? 3 : window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * density);
    this.canvas.height = Math.round(this.visibleHeight * density);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.visibleHeight}px`;
    this.density = density;
  }

  get plotWidth() { return Math.max(1, this.width - this.gutter - EDGE); }
  get perPixel() { return (this.page.view.to - this.page.view.from) / this.plotWidth; }
  x(time) { return this.gutter + (time - this.page.view.from) / this.perPixel; }
  timeAt(x) { return this.page.view.from + (x - this.gutter) * this.perPixel; }

  /** How far the canvas has slid down inside its host, to stay in the window. */
  get slid() {
    const above = -this.host.getBoundingClientRect().top;
    return this.page.printing ? 0 : Math.min(Math.max(0, above), this.height - this.visibleHeight);
  }

  draw() {
    const {context: c, page} = this, {colors} = page, slid = this.slid;
    if (!this.canvas.width || !this.canvas.height) return; // nothing of it is in sight
    c.setTransform(this.density, 0, 0, this.density, 0, 0);
    c.fillStyle = colors.panel;
    c.fillRect(0, 0, this.width, this.visibleHeight);
    const ticks = ticksOf(this);
    c.save();
    c.beginPath();
    c.rect(this.gutter, AXIS, this.plotWidth + EDGE, this.visibleHeight);
    c.clip();
    c.fillStyle = colors.grid;
    for (const {x} of ticks) c.fillRect(Math.round(x), AXIS, 1, this.visibleHeight);
    c.translate(0, -slid);
    const seen = this.order.map((rank) => this.rows[rank]).filter((row) => row.bottom > slid && row.top < slid + this.visibleHeight);
    this.strip.clear(this.canvas.width, this.canvas.height, page.parts);
    this.slidNow = slid;
    for (const row of seen) this.drawRow(row);
    if (this.pathRow) addPath(this);
    c.translate(0, slid);
    this.strip.draw(c, this.width, this.visibleHeight);
    c.translate(0, -slid);
    if (page.options.path) drawPath(this);
    drawFollowed(this);
    drawMarks(this);
    this.overlay();
    drawSelection(this);
    c.restore();
    c.save();
    c.translate(0, -slid);
    for (const row of seen) drawLabels(this, row);
    if (this.pathRow) drawLabel(this, "path", this.pathRow.top + this.pathRow.high / 2);
    c.restore();
    drawAxis(this, ticks);
  }

  drawRow(row) {
    const {rank} = row, {beside} = this;
    drawLane(this, this.record.timeline, rank, row.main, row.high, true, 1);
    if (row.planned && beside.timeline.ranks[rank]) drawLane(this, beside.timeline, rank, row.planned, row.plannedHigh, false, this.instead ? 0.85 : 0.62);
    if (row.memory) drawMemory(this, row);
  }

  topOf(block) { return this.rows[block.rank].main + (block.half ? this.rows[block.rank].high / 2 : 0); }
  heightOf(block) { return block.half === null ? this.rows[block.rank].high : Math.max(1, this.rows[block.rank].high / 2 - 1); }

  /** The row at a height of the picture, as close as there is one. */
  rowAt(y) {
    const row = this.order.map((rank) => this.rows[rank]).find((each) => y < each.bottom + 1);
    return row || this.rows[this.order.at(-1)];
  }

  /** What stands at a point of the window: a block, an idle time, the label of a rank, or nothing. */
  at(clientX, clientY) {
    const box = this.host.getBoundingClientRect(), x = clientX - box.left, y = clientY - box.top;
    if (y - this.slid < AXIS) return x >= this.gutter ? {axis: true} : {};
    if (this.pathRow && y >= this.pathRow.top) return this.onPath(this.timeAt(x));
    const row = this.rowAt(y);
    if (!row || y < row.top - 1) return {};
    if (x < this.gutter) return {label: row.rank};
    const below = row.planned && y >= row.planned && y < row.planned + row.plannedHigh;
    if (!below && y > row.main + row.high) return {};
    const timeline = below ? this.beside.timeline : this.record.timeline, lane = timeline.ranks[row.rank], time = this.timeAt(x);
    if (!lane) return {};
    const index = firstAfter(lane.ends, time);
    const inPair = lane.blocks[index] && lane.blocks[index].half === 0 && y > row.main + row.high / 2 ? index + 1 : index;
    const block = lane.blocks[inPair];
    if (block && block.start <= time) return {block: this.record.timeline.blocks.get(block.text) || block, main: !below};
    const idle = lane.idle[firstAfter(lane.idleEnds, time)];
    return idle && idle[0] <= time ? {idle, rank: row.rank, timeline, next: timeline.last(block)} : {};
  }

  onPath(time) {
    const block = this.record.timeline.path.find((each) => each.end > time);
    return block && block.start <= time ? {block} : {};
  }
}
