// The table below the chart: a row for each rank, a cell for each action, moved by pointer or keyboard.
// Only cells in sight are elements, so that a table of 260,000 actions is as fast as a small one.

const LABEL_WIDTH = 72, TOP_MARGIN = 16, CELL_HEIGHT = 29; // pixels
const MAX_ROWS_WITH_ARROWS = 8; // with more rows there is no space between them for arrows
const OVERSCAN_PIXELS = 300; // cells up to that far outside the window are elements too

class Table {
  /** `onMove(rank, from, to)` is called when an action is moved within its rank's row, `onSelect(action)` when one is selected. */
  constructor(host, {onMove, onSelect}) {
    this.host = host;
    Object.assign(this, {onMove, onSelect});
    this.position = [0, 0]; // rank and index of the selected cell, which the Tab key leads to
    Object.assign(this, {drag: null, rows: [], rowElements: new Map(), cells: new Map(), wrongActions: new Set()});
    this.inner = element("div", {class: "grid", role: "grid", "aria-label": "Actions of every rank, in order. Arrow keys select, Alt with an arrow moves."});
    this.marker = element("i", {class: "marker", hidden: ""});
    this.waitArrows = new WaitArrows();
    host.append(this.inner);
    host.addEventListener("scroll", () => this.fill(), {passive: true});
    new ResizeObserver(() => this.fill()).observe(host);
    this.inner.addEventListener("pointerdown", (event) => this.startDrag(event));
    this.inner.addEventListener("pointermove", (event) => this.moveDrag(event));
    this.inner.addEventListener("pointerup", () => this.drop());
    this.inner.addEventListener("pointercancel", () => this.cancelDrag());
    this.inner.addEventListener("keydown", (event) => this.onKey(event));
    this.inner.addEventListener("focusin", ({target}) => { if (target.dataset.place) this.select(target); });
  }

  show(rows) {
    if (JSON.stringify(rows) === this.shown) return;
    const focused = this.inner.contains(document.activeElement), maxCells = Math.max(0, ...rows.map((row) => row.length));
    this.shown = JSON.stringify(rows);
    this.rows = rows;
    this.firstTeacherStage = Math.min(...rows.flat().filter((text) => text.includes("TEACHER")).map(parseFloat)); // infinity without one
    this.maxNameLength = rows.reduce((longest, row) => row.reduce((length, text) => Math.max(length, namesOf(text).join(" ").length), longest), 3);
    this.columnWidth = Math.max(38, 7.4 * this.maxNameLength + 14) + 3;
    this.rowHeight = rows.length > MAX_ROWS_WITH_ARROWS ? CELL_HEIGHT + 8 : CELL_HEIGHT + 24;
    Object.assign(this.inner.style, {width: `${LABEL_WIDTH + maxCells * this.columnWidth + 12}px`, height: `${TOP_MARGIN + rows.length * this.rowHeight}px`});
    for (const [name, count] of [["aria-rowcount", rows.length], ["aria-colcount", maxCells]]) this.inner.setAttribute(name, count);
    const rank = Math.max(0, Math.min(this.position[0], rows.length - 1));
    this.position = [rank, Math.min(this.position[1], Math.max(0, (rows[rank] || []).length - 1))];
    for (const group of [this.rowElements, this.cells, this.wrongActions]) group.clear();
    this.waitArrows.show([]);
    this.inner.replaceChildren(this.waitArrows.drawing, this.marker);
    this.fill();
    if (focused) this.current?.focus({preventScroll: true});
  }

  left(index) { return LABEL_WIDTH + index * this.columnWidth; }
  top(rank) { return TOP_MARGIN + rank * this.rowHeight; }

  /** Create the cells in sight, and remove the others. */
  fill() {
    const {scrollLeft, scrollTop, clientWidth, clientHeight} = this.host, [rank, index] = this.position, visible = new Set([`${rank} ${index}`]);
    const span = (from, size, margin, step) => [Math.max(0, Math.floor((from - margin - OVERSCAN_PIXELS) / step)), Math.ceil((from + size - margin + OVERSCAN_PIXELS) / step)];
    const [firstRank, endRank] = span(scrollTop, clientHeight, TOP_MARGIN, this.rowHeight), [first, end] = span(scrollLeft, clientWidth, LABEL_WIDTH, this.columnWidth);
    for (let r = firstRank; r < Math.min(endRank, this.rows.length); r++) for (let p = first; p < Math.min(end, this.rows[r].length); p++) visible.add(`${r} ${p}`);
    for (const [key, cell] of this.cells) if (!visible.has(key)) { cell.remove(); this.cells.delete(key); }
    for (const [r, line] of this.rowElements) if (r !== rank && (r < firstRank || r >= endRank)) { line.remove(); this.rowElements.delete(r); }
    for (let r = firstRank; r < Math.min(endRank, this.rows.length); r++) this.row(r);
    for (const key of visible) if (!this.cells.has(key)) this.createCell(...key.split(" ").map(Number));
  }

  row(rank) {
    if (!this.rowElements.has(rank)) {
      const line = element("div", {role: "row", class: "row", "aria-rowindex": rank + 1}, element("span", {role: "rowheader", class: "rank"}, `rank ${rank}`));
      line.style.top = `${this.top(rank)}px`;
      this.rowElements.set(rank, line);
      this.inner.insertBefore(line, this.marker);
    }
    return this.rowElements.get(rank);
  }

  createCell(rank, index) {
    const text = this.rows[rank]?.[index];
    if (text === undefined) return;
    const names = namesOf(text), [kind, secondKind] = names.map((name) => (parseFloat(name) >= this.firstTeacherStage ? "teacher" : (/[FBIW]/.exec(name) || ["F"])[0]));
    const cell = element("button", {
      type: "button", role: "gridcell", tabindex: rank === this.position[0] && index === this.position[1] ? 0 : -1, class: `cell paint-${kind}`, "aria-colindex": index + 1,
      "data-rank": rank, "data-place": index, "data-names": names.join(" "), "aria-label": `${names.join(" with ")}, place ${index + 1} of rank ${rank}`,
    }, ...(secondKind ? [element("span", {class: `paint-${kind}`}, `${names[0]} `), element("span", {class: `paint-${secondKind}`}, names[1])] : names)); // a pair
    Object.assign(cell.style, {left: `${this.left(index)}px`, width: `${this.columnWidth - 3}px`});
    cell.classList.toggle("wrong", names.some((name) => this.wrongActions.has(name)));
    this.cells.set(`${rank} ${index}`, cell);
    this.row(rank).append(cell);
  }

  get current() { return this.cells.get(this.position.join(" ")); }

  select(cell) {
    if (this.current) this.current.tabIndex = -1;
    this.position = [Number(cell.dataset.rank), Number(cell.dataset.place)];
    cell.tabIndex = 0;
    this.onSelect(cell.dataset.names.split(" ")[0]);
  }

  /** Select the cell at an index of a row, and scroll to it. */
  goTo(rank, index) {
    const row = this.rows[rank];
    if (!row?.length) return;
    const to = Math.min(Math.max(index, 0), row.length - 1);
    this.reveal(rank, to);
    if (!this.cells.has(`${rank} ${to}`)) this.createCell(rank, to);
    this.cells.get(`${rank} ${to}`).focus({preventScroll: true});
  }

  /** Move the selected action `by` cells. */
  moveSelected(by) {
    const [rank, index] = this.position, to = Math.min(Math.max(index + by, 0), this.rows[rank].length - 1);
    if (to !== index) this.move(rank, index, to);
  }

  move(rank, from, to) {
    this.position = [rank, to];
    this.onMove(rank, from, to);
    this.reveal(rank, to);
  }

  /** Scroll the table, not the page, until a cell is in sight. */
  reveal(rank, index) {
    const {host} = this, left = this.left(index), top = this.top(rank);
    if (left - LABEL_WIDTH - 2 < host.scrollLeft) host.scrollLeft = left - LABEL_WIDTH - 2;
    else if (left + this.columnWidth + 12 > host.scrollLeft + host.clientWidth) host.scrollLeft = left + this.columnWidth + 12 - host.clientWidth;
    if (top < host.scrollTop) host.scrollTop = top - TOP_MARGIN;
    else if (top + this.rowHeight > host.scrollTop + host.clientHeight) host.scrollTop = top + this.rowHeight - host.clientHeight;
    this.fill();
  }

  // ---- pointer

  startDrag(event) {
    const cell = event.target.closest(".cell");
    if (!cell || event.button !== 0 || event.pointerType === "touch") return; // touch scrolls; a tap selects, and buttons move
    this.drag = {cell, x: event.clientX, rank: Number(cell.dataset.rank), from: Number(cell.dataset.place), to: null};
    this.inner.setPointerCapture(event.pointerId);
    cell.focus({preventScroll: true});
    event.preventDefault();
  }

  moveDrag(event) {
    const {drag} = this;
    if (!drag || (drag.to === null && Math.abs(event.clientX - drag.x) < 4)) return;
    const box = this.host.getBoundingClientRect();
    if (event.clientX > box.right - 24) this.host.scrollLeft += 14;
    if (event.clientX < box.left + 80) this.host.scrollLeft -= 14;
    const x = event.clientX - this.inner.getBoundingClientRect().left - LABEL_WIDTH, count = this.rows[drag.rank].length;
    const gap = Math.min(Math.max(Math.round(x / this.columnWidth), 0), count); // the index of the cell before which it goes
    drag.to = gap > drag.from ? gap - 1 : gap;
    drag.cell.classList.add("dragging");
    Object.assign(this.marker.style, {left: `${this.left(gap) - 2}px`, top: `${this.top(drag.rank) - 3}px`, height: `${CELL_HEIGHT + 6}px`});
    this.marker.hidden = false;
  }

  cancelDrag() {
    this.drag?.cell.classList.remove("dragging");
    this.marker.hidden = true;
    this.drag = null;
  }

  drop() {
    const {drag} = this;
    this.cancelDrag();
    if (drag && drag.to !== null && drag.to !== drag.from) this.move(drag.rank, drag.from, drag.to);
  }

  // ---- keyboard

  onKey(event) {
    const [rank, index] = this.position, by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape" && this.drag) this.cancelDrag();
    else if (event.ctrlKey || event.metaKey) return;
    else if (event.altKey && by) this.moveSelected(by);
    else if (event.altKey) return;
    else if (by) this.goTo(rank, index + by);
    else if (event.key === "Home") this.goTo(rank, 0);
    else if (event.key === "End") this.goTo(rank, Infinity);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.goTo(rank + (event.key === "ArrowUp" ? -1 : 1), index);
    else return;
    event.preventDefault();
  }

  // ---- the proof

  /** Mark the actions that the proof names, and draw an arrow from each waiting action to the awaited one. */
  mark({actions, waits}) {
    this.wrongActions = new Set(actions);
    const positions = new Map();
    if (actions.length) this.rows.forEach((row, rank) => row.forEach((text, index) => {
      for (const name of namesOf(text)) if (this.wrongActions.has(name)) positions.set(name, [rank, index]);
    }));
    for (const cell of this.cells.values()) cell.classList.toggle("wrong", cell.dataset.names.split(" ").some((name) => this.wrongActions.has(name)));
    const middle = (name) => { const [rank, index] = positions.get(name); return [this.left(index) + (this.columnWidth - 3) / 2, this.top(rank) + CELL_HEIGHT / 2]; };
    this.waitArrows.show(waits.filter((pair) => pair.every((name) => positions.has(name))).map(([awaited, waiting]) => [middle(waiting), middle(awaited)]));
    const first = actions.map((name) => positions.get(name)).find(Boolean);
    if (first && !this.inner.contains(document.activeElement)) this.reveal(...first);
  }
}

/** Return the actions of a cell: one, or the two of a pair that may overlap. */
function namesOf(text) { return text.startsWith("(") ? text.match(/\d+[FBIW]\d+(?:\.\d+)?/g) || [text] : [text]; }
