// The picture of one record: a canvas as high as the window at most, which draws what is in sight.

const DIM = 0.16; // of what is not followed
const NARROW = 9, SNAPPED = 3; // a block up to so many pixels wide is painted without corners; one below so many as a proportion

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
    c.setTransform(this.density, 0, 0, this.density, 0, 0);
    c.fillStyle = colors.panel;
    c.fillRect(0, 0, this.width, this.visibleHeight);
    const ticks = this.ticks();
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
    for (const row of seen) this.drawLabels(row);
    if (this.pathRow) this.drawLabel("path", this.pathRow.top + this.pathRow.high / 2);
    c.restore();
    this.drawAxis(ticks);
  }

  drawRow(row) {
    const {timeline} = this.record, lane = timeline.ranks[row.rank], {beside} = this;
    this.drawLane(timeline, lane, row.main, row.high, true, 1);
    if (row.planned && beside.timeline.ranks[row.rank]) this.drawLane(beside.timeline, beside.timeline.ranks[row.rank], row.planned, row.plannedHigh, false, this.instead ? 0.85 : 0.62);
    if (row.memory) this.drawMemory(row);
  }

  drawLane(timeline, lane, top, height, main, alpha) {
    const {density, strip, slidNow} = this;
    strip.lane((top - slidNow) * density, (top + height - slidNow) * density, alpha);
    this.context.globalAlpha = alpha;
    if (lane.sums) this.drawSums(lane.sums);
    this.drawIdle(lane, top, height, alpha);
    this.drawBlocks(timeline, lane, top, height, main, alpha);
    this.context.globalAlpha = 1;
  }

  /** Of a huge step the shares of each part of its time. */
  drawSums({end, parts}) {
    const {density, strip} = this;
    for (const [paint, shares] of Object.entries(parts)) {
      shares.forEach((share, place) => {
        if (share) strip.add(this.x(place * end / shares.length) * density, this.x((place + 1) * end / shares.length) * density, paint, share);
      });
    }
  }

  /** A tint with a pattern and a line at its foot; where there is no room for that, a proportion. */
  drawIdle({idle, idleEnds}, top, height, alpha) {
    const {context: c, density, strip} = this, {colors, patterns, view, lit} = this.page, dimmed = lit ? 2 * DIM : 1;
    for (let i = firstAfter(idleEnds, view.from); i < idle.length && idle[i][0] < view.to; i++) {
      const [start, end, cause] = idle[i], left = this.x(start), right = this.x(end);
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
  drawBlocks(timeline, {blocks, ends}, top, height, named, alpha) {
    const {context: c, density} = this, {colors, view, lit} = this.page, several = timeline.severalStages;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "center";
    for (let i = firstAfter(ends, view.from); i < blocks.length && blocks[i].start < view.to; i++) {
      const block = blocks[i], left = this.x(block.start), wide = this.x(block.end) - left, shown = lit && !lit(block) ? DIM : 1;
      if (wide <= NARROW || height < 8) {
        this.paintNarrow(block, left * density, wide * density, shown);
        continue;
      }
      const [from, high] = block.half === null ? [top, height] : [top + (block.half * height) / 2, height / 2 - 1];
      c.globalAlpha = alpha * shown;
      c.fillStyle = colors[block.chunk % 2 ? `${block.kind} second` : block.kind];
      c.beginPath();
      c.roundRect(left + 0.5, from, wide - 1, high, Math.min(3, high / 3));
      c.fill();
      if (named && high >= 10) this.drawName(block, several, left, wide, from + high / 2, timeline.partner(block));
    }
    c.globalAlpha = alpha;
  }

  /** At whole pixels, with one between two blocks, as long as there are enough of them. */
  paintNarrow({kind, half}, left, wide, shown) {
    const weight = half === null ? shown : shown / 2;
    if (wide < SNAPPED) this.strip.add(left, left + wide, kind, weight);
    else this.strip.add(Math.round(left), Math.round(left + wide) - (wide > 4 && half === null ? 1 : 0), kind, weight);
  }

  /** The longest name that has room; the two of a pair have the same form of it. */
  drawName(block, several, left, wide, middle, partner, color = this.page.colors[`letter-${block.kind}`]) {
    const names = ({text, kind, microbatch}) => [...(several ? [text] : []), kind + microbatch, ...(partner ? [] : [String(microbatch)])];
    const other = partner ? names(partner) : [], texts = names(block);
    const text = texts.find((each, form) => 6.4 * Math.max(each.length, (other[form] || "").length) + 5 < wide);
    if (text === undefined) return;
    const from = Math.max(left, this.gutter), to = Math.min(left + wide, this.gutter + this.plotWidth + EDGE);
    this.context.fillStyle = color;
    this.context.fillText(text, to - from > 30 ? (from + to) / 2 : left + wide / 2, middle + 0.5);
  }

  drawMemory(row) {
    const {context: c} = this, {timeline} = this.record, {colors} = this.page;
    const beside = this.beside?.timeline, planned = beside?.data.memory_unit === timeline.data.memory_unit ? beside : null;
    const most = Math.max(timeline.peak, planned ? planned.peak : 0) || 1;
    const base = row.memory + row.memoryHigh, y = (held) => base - (held / most) * (row.memoryHigh - 2);
    c.strokeStyle = c.fillStyle = colors.shade;
    this.trace(timeline.ranks[row.rank].memory, y, base);
    c.lineTo(this.gutter + this.plotWidth + EDGE, base);
    c.globalAlpha = 0.22;
    c.fill();
    c.globalAlpha = 1;
    c.lineWidth = 1.25;
    this.trace(timeline.ranks[row.rank].memory, y, base);
    c.stroke();
    if (planned && planned.ranks[row.rank] && this.page.options.planned) {
      c.setLineDash([3, 3]);
      c.strokeStyle = colors.ink;
      c.lineWidth = 1;
      this.trace(planned.ranks[row.rank].memory, y, base);
      c.stroke();
      c.setLineDash([]);
    }
  }

  /** The path of a curve in steps; of what falls on one column of pixels, the most. */
  trace(points, y, base) {
    const {context: c} = this, right = this.gutter + this.plotWidth + EDGE;
    let held = 0, column = -1, at = 0, most = 0;
    c.beginPath();
    c.moveTo(this.gutter - 2, base);
    const finish = () => { if (column >= 0) { c.lineTo(at, y(most)); c.lineTo(at, y(held)); } };
    for (const [time, next] of points) {
      const x = Math.min(Math.max(this.x(time), this.gutter - 2), right + 2);
      if (Math.floor(x) !== column) {
        finish();
        c.lineTo(x, y(held));
        [column, at, most] = [Math.floor(x), x, next];
      }
      most = Math.max(most, next);
      held = next;
      if (x > right) break;
    }
    finish();
    c.lineTo(right + 2, y(held));
  }

  topOf(block) { return this.rows[block.rank].main + (block.half ? this.rows[block.rank].high / 2 : 0); }
  heightOf(block) { return block.half === null ? this.rows[block.rank].high : Math.max(1, this.rows[block.rank].high / 2 - 1); }

  drawLabels(row) {
    const {context: c} = this, {colors} = this.page, right = this.gutter - 10, pinned = this.pinned.has(row.rank);
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillStyle = pinned ? colors.accent : colors.ink;
    c.font = `600 ${this.gutter > 60 && row.high > 11 ? 12 : 11}px system-ui, sans-serif`;
    if (row.labelled) c.fillText(`${row.folded ? "▸ " : ""}rank ${row.rank}`, right, row.main + row.high / 2);
    if (row.planned && row.plannedHigh >= 8) this.drawLabel(this.beside.name, row.planned + row.plannedHigh / 2);
    if (row.memory) {
      const peak = this.record.timeline.amount(this.record.timeline.data.peak_memory[row.rank]), long = `peak ${peak}`;
      this.drawLabel(this.widthOf(long) < right - 2 ? long : peak, row.memory + row.memoryHigh / 2);
    }
  }

  widthOf(text) {
    this.context.font = "10.5px system-ui, sans-serif";
    return this.context.measureText(text).width;
  }

  /** A small text at the left of a lane, shortened to its room. */
  drawLabel(text, middle) {
    const {context: c} = this, right = this.gutter - 10;
    let shown = text;
    while (this.widthOf(shown) > right - 2 && shown.length > 3) shown = `${shown.slice(0, -2)}…`;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillStyle = this.page.colors.muted;
    c.fillText(shown, right, middle);
  }

  ticks() {
    const {from, to} = this.page.view, rough = ((to - from) * (this.width < 560 ? 68 : 90)) / this.plotWidth, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || rough;
    const [factor, unit] = this.record.unit === "s" ? scaleOf(to) : [1, ""], digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
    const found = [];
    for (let count = Math.ceil(from / step - 1e-9); count * step <= to + step * 1e-9; count++) {
      found.push({x: this.x(count * step), text: `${(count * step * factor).toFixed(digits)}${unit && ` ${unit}`}`});
    }
    return found;
  }

  drawAxis(ticks) {
    const {context: c} = this, {colors} = this.page;
    c.fillStyle = colors.panel;
    c.fillRect(0, 0, this.width, AXIS);
    c.fillStyle = colors.line;
    c.fillRect(0, AXIS - 1, this.width, 1);
    c.fillStyle = colors.muted;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (const {x, text} of ticks) {
      c.textAlign = x > this.width - 26 ? "right" : x < this.gutter + 12 ? "left" : "center";
      c.fillText(text, Math.min(x, this.width - 5), AXIS / 2);
    }
  }

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
    return idle && idle[0] <= time ? {idle, rank: row.rank} : {};
  }

  onPath(time) {
    const block = this.record.timeline.path.find((each) => each.end > time);
    return block && block.start <= time ? {block} : {};
  }
}
