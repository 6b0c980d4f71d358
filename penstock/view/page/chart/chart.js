// The chart of one record: a canvas at most as high as the window, which draws the rows in sight.

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
      + "0 shows all, Shift with an arrow moves the view, Enter goes to what the action waited for, F follows its microbatch, Escape clears.");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.host.append(this.canvas);
    this.context = this.canvas.getContext("2d");
    this.denseLanes = new DenseLanes();
    this.selected = null; // the block chosen by keyboard or click
    this.hovered = null;
    this.alternative = null; // another step, drawn below this one: {name, timeline}
    this.folded = new Set(); // ranks, shown as a thin row
    this.pinned = new Set(); // ranks, at the top
    this.overlay = () => {}; // draws over the blocks
  }

  /** The step drawn below this one, {name, timeline}: the alternative if there is one, else the prediction. */
  get comparison() { return this.alternative || (this.record.predicted && {name: "predicted", timeline: this.record.predicted}); }

  /** Compute the layout, after a change of width, step or options. */
  layout() {
    this.width = this.host.clientWidth;
    this.gutter = this.width < 560 ? 58 : 74;
    this.rows = layoutRows(this);
    const last = this.rows[this.order.at(-1)];
    this.pathRow = this.page.options.path && this.record.timeline.path.length ? {top: (last ? last.bottom : AXIS_HEIGHT) + 12, height: 20} : null;
    this.height = (this.pathRow ? this.pathRow.top + this.pathRow.height : last ? last.bottom : AXIS_HEIGHT) + 10;
    this.host.style.height = `${this.height + 2}px`;
    this.visibleHeight = this.page.printing ? this.height : Math.min(this.height, Math.max(200, window.innerHeight));
    const pixelRatio = this.page.printing ? 3 : window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * pixelRatio);
    this.canvas.height = Math.round(this.visibleHeight * pixelRatio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.visibleHeight}px`;
    this.pixelRatio = pixelRatio;
  }

  get plotWidth() { return Math.max(1, this.width - this.gutter - RIGHT_MARGIN); }
  get timePerPixel() { return (this.page.view.to - this.page.view.from) / this.plotWidth; }
  x(time) { return this.gutter + (time - this.page.view.from) / this.timePerPixel; }
  timeAt(x) { return this.page.view.from + (x - this.gutter) * this.timePerPixel; }

  /** How far the canvas is moved down inside its host, to stay in the window. */
  get scrollOffset() {
    const above = -this.host.getBoundingClientRect().top;
    return this.page.printing ? 0 : Math.min(Math.max(0, above), this.height - this.visibleHeight);
  }

  draw() {
    const {context: c, page} = this, {colors} = page, scrollOffset = this.scrollOffset;
    if (!this.canvas.width || !this.canvas.height) return; // not in sight
    c.setTransform(this.pixelRatio, 0, 0, this.pixelRatio, 0, 0);
    c.fillStyle = colors.panel;
    c.fillRect(0, 0, this.width, this.visibleHeight);
    const ticks = axisTicks(this);
    c.save();
    c.beginPath();
    c.rect(this.gutter, AXIS_HEIGHT, this.plotWidth + RIGHT_MARGIN, this.visibleHeight);
    c.clip();
    c.fillStyle = colors.grid;
    for (const {x} of ticks) c.fillRect(Math.round(x), AXIS_HEIGHT, 1, this.visibleHeight);
    c.translate(0, -scrollOffset);
    const visibleRows = this.order.map((rank) => this.rows[rank]).filter((row) => row.bottom > scrollOffset && row.top < scrollOffset + this.visibleHeight);
    this.denseLanes.clear(this.canvas.width, this.canvas.height, page.paintColors);
    this.drawnOffset = scrollOffset;
    for (const row of visibleRows) this.drawRow(row);
    if (this.pathRow) addNarrowPathBlocks(this);
    c.translate(0, scrollOffset);
    this.denseLanes.draw(c, this.width, this.visibleHeight);
    c.translate(0, -scrollOffset);
    if (page.options.path) drawCriticalPath(this);
    drawFollowedMessages(this);
    drawHighlights(this);
    this.overlay();
    drawSelection(this);
    c.restore();
    c.save();
    c.translate(0, -scrollOffset);
    for (const row of visibleRows) drawLabels(this, row);
    if (this.pathRow) drawSmallLabel(this, "path", this.pathRow.top + this.pathRow.height / 2);
    c.restore();
    drawAxis(this, ticks);
  }

  drawRow(row) {
    const {rank} = row, {comparison} = this;
    drawLane(this, this.record.timeline, rank, row.main, row.height, true, 1);
    if (row.predicted && comparison.timeline.ranks[rank]) drawLane(this, comparison.timeline, rank, row.predicted, row.predictedHeight, false, this.alternative ? 0.85 : 0.62);
    if (row.memory) drawMemory(this, row);
  }

  topOf(block) { return this.rows[block.rank].main + (block.half ? this.rows[block.rank].height / 2 : 0); }
  heightOf(block) { return block.half === null ? this.rows[block.rank].height : Math.max(1, this.rows[block.rank].height / 2 - 1); }

  /** Return the row at `y`, or the nearest. */
  rowAt(y) {
    const row = this.order.map((rank) => this.rows[rank]).find((candidate) => y < candidate.bottom + 1);
    return row || this.rows[this.order.at(-1)];
  }

  /** Return what is at a point of the window: {axis}, {label}, {block, main}, {idle, rank, timeline, next}, or {}. */
  hitTest(clientX, clientY) {
    const box = this.host.getBoundingClientRect(), x = clientX - box.left, y = clientY - box.top;
    if (y - this.scrollOffset < AXIS_HEIGHT) return x >= this.gutter ? {axis: true} : {};
    if (this.pathRow && y >= this.pathRow.top) return this.hitTestPath(this.timeAt(x));
    const row = this.rowAt(y);
    if (!row || y < row.top - 1) return {};
    if (x < this.gutter) return {label: row.rank};
    const inComparison = row.predicted && y >= row.predicted && y < row.predicted + row.predictedHeight;
    if (!inComparison && y > row.main + row.height) return {};
    const timeline = inComparison ? this.comparison.timeline : this.record.timeline, lane = timeline.ranks[row.rank], time = this.timeAt(x);
    if (!lane) return {};
    const index = firstAfter(lane.ends, time);
    const indexInPair = lane.blocks[index] && lane.blocks[index].half === 0 && y > row.main + row.height / 2 ? index + 1 : index;
    const block = lane.blocks[indexInPair];
    if (block && block.start <= time) return {block: this.record.timeline.blocks.get(block.text) || block, main: !inComparison};
    const idle = lane.idle[firstAfter(lane.idleEnds, time)];
    return idle && idle[0] <= time ? {idle, rank: row.rank, timeline, next: timeline.lastReceiver(block)} : {};
  }

  hitTestPath(time) {
    const block = this.record.timeline.path.find((candidate) => candidate.end > time);
    return block && block.start <= time ? {block} : {};
  }
}
