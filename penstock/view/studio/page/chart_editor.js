// The studio's additions to the chart: actions are dragged in it, and the waits of a deadlock are drawn over it.

const DRAG_PIXELS = 4; // a shorter movement is a click
const ERROR_COLOR = "#d13a30"; // visible on light and dark
const STUCK_ALPHA = 0.3; // of actions that never run

class ChartEditor {
  /** `onMove(rank, from, to)` is called when an action is moved within its rank's row. */
  constructor(chart, page, onMove) {
    Object.assign(this, {chart, page, onMove, drag: null, answer: null, denseLanes: new DenseLanes()});
    chart.overlay = () => this.draw();
    const {host} = chart, listen = (name, handle) => host.addEventListener(name, (event) => {
      if (handle(event)) event.stopImmediatePropagation(); // otherwise the chart pans
    }, {capture: true});
    listen("pointerdown", (event) => this.startDrag(event));
    listen("pointermove", (event) => this.moveDrag(event));
    listen("pointerup", () => this.drop());
    listen("pointercancel", () => this.cancelDrag());
    listen("keydown", (event) => event.key === "Escape" && this.cancelDrag());
    listen("click", () => this.suppressClick());
  }

  /** Show the server's answer for a table: `answer.timeline` is in the chart, `answer.stuck` never runs. */
  show(answer) {
    this.cancelDrag();
    this.answer = answer;
    this.stuck = new Map(answer.stuck.map((stuck) => {
      const [, stage, kind, part, microbatch] = /^(\d+)([FBIW])((\d+)(?:\.\d+)?)$/.exec(stuck.action);
      return [stuck.action, {...stuck, text: stuck.action, stage: Number(stage), kind, part, microbatch: Number(microbatch)}];
    }));
    this.end = Math.max(0, ...answer.stuck.map(({end}) => end));
  }

  /** The timeline that is edited: the predicted one, if a measured run is above it. */
  get timeline() { return this.chart.record.predicted || this.chart.record.timeline; }
  lane(rank) {
    const row = this.chart.rows[rank];
    return this.chart.record.predicted ? {top: row.predicted, height: row.predictedHeight} : {top: row.main, height: row.height};
  }

  /** Return the block of an action and its box on the canvas; null if it is not in the chart. */
  box(name) {
    const fullBackward = name.replace(/[IW]/, "B"); // at a run's costs, I and W run as one B
    const block = [name, fullBackward].map((action) => this.timeline.blocks.get(action) || this.stuck.get(action)).find(Boolean);
    if (!block) return null;
    const {top, height} = this.lane(block.rank), left = this.chart.x(block.start), half = block.half ?? null;
    const box = {block, left, width: Math.max(2, this.chart.x(block.end) - left), top, height};
    return half === null ? box : {...box, top: top + half * height / 2, height: height / 2 - 1};
  }

  /** Return for each cell of a rank's row the boxes of its actions. */
  cells(rank) {
    return this.answer.rows[rank].map((text) => (text.match(/\d+[FBIW]\d+(?:\.\d+)?/g) || []).map((name) => this.box(name)).filter(Boolean));
  }

  // ---- pointer

  /** Return the cell under a point of the window as {rank, from}, its index in the row; null if there is none. */
  cellAt({clientX, clientY}) {
    if (!this.answer || (this.chart.record.predicted && !this.page.options.predicted)) return null;
    const {left, top} = this.chart.host.getBoundingClientRect(), x = clientX - left, y = clientY - top;
    if (x < this.chart.gutter || y - this.chart.scrollOffset < AXIS_HEIGHT) return null;
    for (const {rank} of this.chart.rows) {
      const lane = this.lane(rank);
      if (y < lane.top || y > lane.top + lane.height || !this.answer.rows[rank]) continue;
      const from = this.cells(rank).findIndex((boxes) => boxes.some((box) => x >= box.left && x <= box.left + box.width));
      return from < 0 ? null : {rank, from};
    }
    return null;
  }

  startDrag(event) {
    this.suppressesClick = false;
    const found = event.button === 0 && event.pointerType !== "touch" ? this.cellAt(event) : null; // touch pans
    if (!found) return false;
    this.drag = {...found, begin: event.clientX, x: event.clientX, to: null};
    this.chart.host.setPointerCapture(event.pointerId);
    return true;
  }

  moveDrag(event) {
    const {drag, chart} = this;
    if (!drag) {
      chart.host.classList.toggle("movable", Boolean(this.cellAt(event)));
      return false;
    }
    if (drag.to === null && Math.abs(event.clientX - drag.begin) < DRAG_PIXELS) return true;
    const box = chart.host.getBoundingClientRect();
    drag.x = event.clientX;
    if (event.clientX > box.right - RIGHT_MARGIN) this.page.pan(14 * chart.timePerPixel);
    if (event.clientX < box.left + chart.gutter) this.page.pan(-14 * chart.timePerPixel);
    const x = event.clientX - box.left, cells = this.cells(drag.rank);
    drag.gap = cells.filter((boxes) => boxes.length && x > (Math.min(...boxes.map(({left}) => left)) + Math.max(...boxes.map(({left, width}) => left + width))) / 2).length;
    drag.to = drag.gap > drag.from ? drag.gap - 1 : drag.gap;
    this.page.hideTip();
    this.page.redraw();
    return true;
  }

  drop() {
    const {drag} = this;
    if (!drag) return false;
    this.cancelDrag();
    this.suppressesClick = drag.to !== null;
    if (drag.to !== null && drag.to !== drag.from) this.onMove(drag.rank, drag.from, drag.to);
    return true;
  }

  cancelDrag() {
    const {drag} = this;
    this.drag = null;
    if (drag) this.page.redraw();
    return Boolean(drag);
  }

  /** Stop the click that ends a drag, so that it selects nothing. */
  suppressClick() {
    const suppressesClick = this.suppressesClick;
    this.suppressesClick = false;
    return suppressesClick;
  }

  // ---- drawing over the blocks

  draw() {
    if (!this.answer || (this.chart.record.predicted && !this.page.options.predicted)) return;
    if (this.stuck.size) this.drawStuck();
    const {actions, waits} = this.answer.proof;
    for (const box of actions.map((name) => this.box(name)).filter(Boolean)) this.outline(box, ERROR_COLOR, 2.5);
    for (const [awaited, waiting] of waits) {
      const ends = [this.box(waiting), this.box(awaited)];
      if (ends.every(Boolean)) this.arrow(...ends);
    }
    if (this.drag?.to !== null && this.drag) this.drawDrag();
  }

  outline({left, width, top, height}, color, lineWidth, dashes = []) {
    const {context: c} = this.chart;
    c.strokeStyle = color;
    c.lineWidth = lineWidth;
    c.setLineDash(dashes);
    c.beginPath();
    c.roundRect(left + 0.5, top, Math.max(1, width - 1), height, Math.min(3, height / 3));
    c.stroke();
    c.setLineDash([]);
  }

  /** Draw the actions that never run, pale, where their rank would reach them; narrow ones in the dense lanes. */
  drawStuck() {
    const {chart, denseLanes, page: {view, paintColors}} = this, {context: c, pixelRatio, drawnOffset} = chart;
    let laneRank = null; // they are in order of ranks
    denseLanes.clear(chart.canvas.width, chart.canvas.height, paintColors);
    for (const block of this.stuck.values()) {
      if (block.end < view.from || block.start > view.to || !chart.rows[block.rank]) continue;
      const left = chart.x(block.start), right = chart.x(block.end);
      if (right - left > NARROW_PIXELS) { this.drawPale(this.box(block.text)); continue; }
      if (laneRank !== block.rank) {
        const {top, height} = this.lane(laneRank = block.rank);
        denseLanes.lane((top - drawnOffset) * pixelRatio, (top + height - drawnOffset) * pixelRatio, STUCK_ALPHA);
      }
      denseLanes.add(left * pixelRatio, right * pixelRatio, block.kind, block.half === undefined ? 1 : 0.5);
    }
    c.translate(0, drawnOffset);
    denseLanes.draw(c, chart.width, chart.visibleHeight);
    c.translate(0, -drawnOffset);
  }

  drawPale(box) {
    const {context: c} = this.chart, {colors} = this.page, {block, left, width, top, height} = box;
    c.globalAlpha = STUCK_ALPHA;
    c.fillStyle = colors[block.kind];
    c.fillRect(left + 0.5, top, Math.max(1, width - 1), height);
    c.globalAlpha = 1;
    if (height > 6) this.outline(box, colors.muted, 1, [3, 3]);
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    c.textBaseline = "middle";
    if (height >= 10) drawName(this.chart, block, this.timeline.hasSeveralStages, left, width, top + height / 2, undefined, colors.ink);
  }

  /** Draw an arrow from a waiting action to the awaited one. */
  arrow(from, to) {
    const {context: c} = this.chart, x = from.left + from.width / 2, toX = to.left + to.width / 2, down = Math.sign(to.top - from.top);
    const edge = (box, side) => box.top + (side > 0 ? box.height : 0);
    const y = edge(from, down), toY = edge(to, -down || 0), bendX = (x + toX) / 2, bendY = down ? (y + toY) / 2 : from.top - 14;
    c.strokeStyle = ERROR_COLOR;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x, y);
    c.quadraticCurveTo(bendX, bendY, toX, toY);
    const angle = Math.atan2(toY - bendY, toX - bendX);
    for (const turn of [0.45, -0.45]) {
      c.moveTo(toX, toY);
      c.lineTo(toX - 9 * Math.cos(angle + turn), toY - 9 * Math.sin(angle + turn));
    }
    c.stroke();
  }

  /** Draw the dragged action under the pointer, and a line where it would go. */
  drawDrag() {
    const {drag, chart, page} = this, {context: c} = chart, cells = this.cells(drag.rank), by = drag.x - drag.begin;
    c.globalAlpha = 0.6;
    for (const {block, left, width, top, height} of cells[drag.from]) {
      c.fillStyle = page.colors[block.kind];
      c.fillRect(left + by, top - 4, width, height);
    }
    c.globalAlpha = 1;
    const next = cells[drag.gap]?.[0], last = cells.at(-1)[0], {top, height} = this.lane(drag.rank);
    c.fillStyle = page.colors.accent;
    c.fillRect((next ? next.left : last ? last.left + last.width : 0) - 1.5, top - 6, 3, height + 12);
  }
}
