// The picture of one record: a canvas as high as the window at most, which draws what is in sight.

const AXIS = 26, GAP = 15, MAIN = 30, PLANNED = 15, MEMORY = 28, EDGE = 12;

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
      + "0 shows all, Shift with an arrow moves the view, Enter goes to what the action waited for.");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.host.append(this.canvas);
    this.context = this.canvas.getContext("2d");
    this.strip = new Strip();
    this.selected = null; // the block that the keyboard has come to
    this.hovered = null;
    this.overlay = () => {}; // draws more, over the blocks
  }

  /** Work out where everything stands; needed after a change of width, step or options. */
  layout() {
    const {options} = this.page;
    this.width = this.host.clientWidth;
    this.gutter = this.width < 560 ? 58 : 74;
    let top = AXIS + 8;
    this.rows = this.record.timeline.ranks.map((_, rank) => {
      const row = {rank, top, main: top};
      top += MAIN;
      if (this.record.planned && options.planned) { row.planned = top + 2; top += 2 + PLANNED; }
      if (options.memory) { row.memory = top + 5; top += 5 + MEMORY; }
      row.bottom = top;
      top += GAP;
      return row;
    });
    this.height = top - GAP + 10;
    this.host.style.height = `${this.height + 2}px`;
    this.visibleHeight = Math.min(this.height, Math.max(200, window.innerHeight));
    const density = window.devicePixelRatio || 1;
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
    return Math.min(Math.max(0, above), this.height - this.visibleHeight);
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
    const seen = this.rows.filter((row) => row.bottom > slid && row.top < slid + this.visibleHeight);
    this.strip.clear(this.canvas.width, 2 * seen.length);
    for (const row of seen) this.drawRow(row);
    this.strip.draw(c, this.width);
    if (page.options.path) this.drawPath();
    this.drawMarks();
    this.overlay();
    c.restore();
    c.save();
    c.translate(0, -slid);
    for (const row of seen) this.drawLabels(row);
    c.restore();
    this.drawAxis(ticks);
  }

  drawRow(row) {
    const {timeline, planned} = this.record;
    this.drawIdle(timeline.ranks[row.rank], row.main, MAIN);
    this.drawBlocks(timeline, row.rank, row.main, MAIN, true);
    if (row.planned && planned.ranks[row.rank]) {
      this.context.globalAlpha = 0.62;
      this.drawIdle(planned.ranks[row.rank], row.planned, PLANNED);
      this.drawBlocks(planned, row.rank, row.planned, PLANNED, false);
      this.context.globalAlpha = 1;
    }
    if (row.memory) this.drawMemory(row);
  }

  /** A tint with a line at its foot; where there is no room for that, a column of the strip. */
  drawIdle({idle, idleEnds}, top, height) {
    this.strip.lane(top, height, this.context.globalAlpha);
    const {context: c} = this, {colors, pixels, view} = this.page, alpha = c.globalAlpha, least = this.perPixel / 2;
    for (let i = firstAfter(idleEnds, view.from); i < idle.length && idle[i][0] < view.to; i++) {
      const [start, end, cause] = idle[i];
      if (end - start < least) continue;
      const left = Math.floor(this.x(start)), wide = Math.ceil(this.x(end)) - left;
      if (wide < 6) {
        this.strip.paint(Math.round(this.x(start) * this.density), Math.round(this.x(end) * this.density), pixels[cause]);
        continue;
      }
      c.fillStyle = colors[cause];
      c.globalAlpha = alpha * 0.26;
      c.fillRect(left, top, wide, height);
      c.globalAlpha = alpha;
      c.fillRect(left, top + height - 3, wide, 3);
    }
  }

  /** Narrow blocks go to the strip, over the idle times of their lane; of those narrower than a pixel, one in each column of pixels. */
  drawBlocks(timeline, rank, top, height, named) {
    const {context: c, density, strip} = this, {colors, pixels, view} = this.page, {blocks, ends} = timeline.ranks[rank];
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "center";
    for (let i = firstAfter(ends, view.from); i < blocks.length && blocks[i].start < view.to;) {
      const block = blocks[i], left = this.x(block.start), wide = this.x(block.end) - left;
      if (wide <= 9 && block.half === null) {
        const column = Math.round(left * density), next = Math.max(column + 1, Math.round((left + wide) * density));
        strip.paint(column, next - (wide > 3 ? 1 : 0), pixels[block.kind]);
        i = wide * density < 1 ? Math.max(i + 1, firstAfter(ends, this.timeAt(next / density))) : i + 1;
        continue;
      }
      const [from, high] = block.half === null ? [top, height] : [top + (block.half * height) / 2, height / 2 - 1];
      c.fillStyle = colors[block.kind];
      c.beginPath();
      c.roundRect(left + (wide > 9 ? 0.5 : 0), from, wide > 9 ? wide - 1 : wide, high, wide > 9 ? Math.min(3, high / 3) : 0);
      c.fill();
      if (named) this.drawName(block, timeline.severalStages, left, wide, from + high / 2);
      i += 1;
    }
  }

  drawName(block, several, left, wide, middle) {
    const kind = block.kind + block.microbatch, texts = several ? [block.text, kind] : [kind];
    const text = [...texts, String(block.microbatch)].find((each) => 6.4 * each.length + 5 < wide);
    if (text === undefined) return;
    const from = Math.max(left, this.gutter), to = Math.min(left + wide, this.gutter + this.plotWidth + EDGE);
    this.context.fillStyle = this.page.colors.letter;
    this.context.fillText(text, to - from > 30 ? (from + to) / 2 : left + wide / 2, middle + 0.5);
  }

  drawMemory(row) {
    const {context: c} = this, {timeline} = this.record, {colors} = this.page;
    const planned = this.record.planned?.data.memory_unit === timeline.data.memory_unit ? this.record.planned : null;
    const most = Math.max(timeline.peak, planned ? planned.peak : 0) || 1;
    const base = row.memory + MEMORY, y = (held) => base - (held / most) * (MEMORY - 2);
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

  drawPath() {
    const {context: c} = this, {colors, view} = this.page, {path} = this.record.timeline;
    c.strokeStyle = c.fillStyle = colors.ink;
    let before = null;
    for (const block of path) {
      const left = this.x(block.start), wide = this.x(block.end) - left, source = before;
      before = block;
      if (block.end < view.from || block.start > view.to) continue;
      if (wide > 13) {
        c.lineWidth = 2;
        c.beginPath();
        c.roundRect(left + 1, this.topOf(block) + 1, wide - 2, this.heightOf(block) - 2, 2.5);
        c.stroke();
      } else { // no room for an outline: a line above
        c.fillRect(left, this.topOf(block) - 4, Math.max(wide, 1), 3);
      }
      c.globalAlpha = wide > 13 ? 0.9 : wide > 4 ? 0.55 : wide > 1.5 ? 0.25 : 0.08;
      if (source && source.rank !== block.rank) this.link(source, block);
      c.globalAlpha = 1;
    }
  }

  topOf(block) { return this.rows[block.rank].main + (block.half ? MAIN / 2 : 0); }
  heightOf(block) { return block.half === null ? MAIN : MAIN / 2 - 1; }

  /** A line from the end of one block to the start of another. */
  link(source, taker) {
    const {context: c} = this, down = taker.rank > source.rank;
    c.lineWidth = 1.25;
    c.beginPath();
    c.moveTo(this.x(source.end), this.topOf(source) + (down ? this.heightOf(source) : 0));
    c.lineTo(this.x(taker.start), this.topOf(taker) + (down ? 0 : this.heightOf(taker)));
    c.stroke();
  }

  /** The block under the pointer or chosen by keyboard, and lines to it from what it received. */
  drawMarks() {
    const {context: c} = this, {colors} = this.page, {blocks} = this.record.timeline;
    for (const block of [this.hovered, this.selected]) {
      if (!block) continue;
      c.strokeStyle = colors.accent;
      for (const {action} of block.receives) if (blocks.has(action)) this.link(blocks.get(action), block);
      c.lineWidth = block === this.selected ? 3 : 2;
      const left = this.x(block.start), wide = Math.max(3, this.x(block.end) - left);
      c.beginPath();
      c.roundRect(left - 1, this.topOf(block) - 1, wide + 2, this.heightOf(block) + 2, 4);
      c.stroke();
    }
  }

  drawLabels(row) {
    const {context: c} = this, {colors} = this.page, right = this.gutter - 10;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillStyle = colors.ink;
    c.font = `600 ${this.gutter > 60 ? 12 : 11}px system-ui, sans-serif`;
    c.fillText(`rank ${row.rank}`, right, row.main + MAIN / 2);
    c.fillStyle = colors.muted;
    c.font = "10.5px system-ui, sans-serif";
    if (row.planned) c.fillText("planned", right, row.planned + PLANNED / 2);
    if (row.memory) {
      const peak = this.record.timeline.amount(this.record.timeline.data.peak_memory[row.rank]), long = `peak ${peak}`;
      c.fillText(c.measureText(long).width < right - 2 ? long : peak, right, row.memory + MEMORY / 2);
    }
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

  /** What stands at a point of the window: a block, an idle time, or nothing. */
  at(clientX, clientY) {
    const box = this.host.getBoundingClientRect(), x = clientX - box.left, y = clientY - box.top;
    if (x < this.gutter || y - this.slid < AXIS) return {};
    const row = this.rows.find((each) => y >= each.main && y < each.bottom);
    if (!row) return {};
    const inPlanned = row.planned && y >= row.planned && y < row.planned + PLANNED;
    if (!inPlanned && y > row.main + MAIN) return {};
    const timeline = inPlanned ? this.record.planned : this.record.timeline, lane = timeline.ranks[row.rank], time = this.timeAt(x);
    const index = firstAfter(lane.ends, time);
    const inPair = lane.blocks[index] && lane.blocks[index].half === 0 && y > row.main + MAIN / 2 ? index + 1 : index;
    const block = lane.blocks[inPair];
    if (block && block.start <= time) return {block: this.record.timeline.blocks.get(block.text) || block};
    const idle = lane.idle[firstAfter(lane.idleEnds, time)];
    return idle && idle[0] <= time ? {idle, rank: row.rank} : {};
  }
}
