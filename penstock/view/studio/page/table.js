// The table under the picture: a row for each rank, a cell for each action, to be moved by pointer or keyboard.
// Only the cells in sight are there: a table of 260,000 costs no more than a small one.

const LABELS = 72, TOP = 16, HIGH = 29, LOW_ROWS = 8; // pixels: beside the cells, above them, of one; so many rows have room for arrows
const BESIDE = 300; // pixels around the window whose cells are there too

class Table {
  /** `moved(rank, from, to)` is told of an action that was put elsewhere, `chosen(action)` of one that was selected. */
  constructor(host, {moved, chosen}) {
    this.host = host;
    this.told = {moved, chosen};
    this.at = [0, 0]; // rank and place of the cell that the Tab key leads to
    Object.assign(this, {drag: null, rows: [], lines: new Map(), cells: new Map(), wrong: new Set()});
    this.inner = element("div", {class: "grid", role: "grid", "aria-label": "Actions of every rank, in order. Arrow keys select, Alt with an arrow moves."});
    this.marker = element("i", {class: "marker", hidden: ""});
    this.circle = new Circle();
    host.append(this.inner);
    host.addEventListener("scroll", () => this.fill(), {passive: true});
    new ResizeObserver(() => this.fill()).observe(host);
    this.inner.addEventListener("pointerdown", (event) => this.press(event));
    this.inner.addEventListener("pointermove", (event) => this.pull(event));
    this.inner.addEventListener("pointerup", () => this.drop());
    this.inner.addEventListener("pointercancel", () => this.let());
    this.inner.addEventListener("keydown", (event) => this.key(event));
    this.inner.addEventListener("focusin", ({target}) => { if (target.dataset.place) this.choose(target); });
  }

  show(rows) {
    if (JSON.stringify(rows) === this.shown) return;
    const focused = this.inner.contains(document.activeElement), most = Math.max(0, ...rows.map((row) => row.length));
    this.shown = JSON.stringify(rows);
    this.rows = rows;
    this.longest = rows.reduce((long, row) => row.reduce((length, text) => Math.max(length, namesOf(text).join(" ").length), long), 3);
    this.pitch = Math.max(38, 7.4 * this.longest + 14) + 3;
    this.line = rows.length > LOW_ROWS ? HIGH + 8 : HIGH + 24;
    Object.assign(this.inner.style, {width: `${LABELS + most * this.pitch + 12}px`, height: `${TOP + rows.length * this.line}px`});
    for (const [name, count] of [["aria-rowcount", rows.length], ["aria-colcount", most]]) this.inner.setAttribute(name, count);
    const rank = Math.max(0, Math.min(this.at[0], rows.length - 1));
    this.at = [rank, Math.min(this.at[1], Math.max(0, (rows[rank] || []).length - 1))];
    for (const each of [this.lines, this.cells, this.wrong]) each.clear();
    this.circle.show([]);
    this.inner.replaceChildren(this.circle.drawing, this.marker);
    this.fill();
    if (focused) this.current?.focus({preventScroll: true});
  }

  left(place) { return LABELS + place * this.pitch; }
  top(rank) { return TOP + rank * this.line; }

  /** Make the cells that are in sight, and let go of the others. */
  fill() {
    const {scrollLeft, scrollTop, clientWidth, clientHeight} = this.host, [rank, place] = this.at, wanted = new Set([`${rank} ${place}`]);
    const span = (from, size, before, each) => [Math.max(0, Math.floor((from - before - BESIDE) / each)), Math.ceil((from + size - before + BESIDE) / each)];
    const [firstRank, endRank] = span(scrollTop, clientHeight, TOP, this.line), [first, end] = span(scrollLeft, clientWidth, LABELS, this.pitch);
    for (let r = firstRank; r < Math.min(endRank, this.rows.length); r++) for (let p = first; p < Math.min(end, this.rows[r].length); p++) wanted.add(`${r} ${p}`);
    for (const [key, cell] of this.cells) if (!wanted.has(key)) { cell.remove(); this.cells.delete(key); }
    for (const [r, line] of this.lines) if (r !== rank && (r < firstRank || r >= endRank)) { line.remove(); this.lines.delete(r); }
    for (let r = firstRank; r < Math.min(endRank, this.rows.length); r++) this.row(r);
    for (const key of wanted) if (!this.cells.has(key)) this.make(...key.split(" ").map(Number));
  }

  row(rank) {
    if (!this.lines.has(rank)) {
      const line = element("div", {role: "row", class: "row", "aria-rowindex": rank + 1}, element("span", {role: "rowheader", class: "rank"}, `rank ${rank}`));
      line.style.top = `${this.top(rank)}px`;
      this.lines.set(rank, line);
      this.inner.insertBefore(line, this.marker);
    }
    return this.lines.get(rank);
  }

  make(rank, place) {
    const text = this.rows[rank]?.[place];
    if (text === undefined) return;
    const names = namesOf(text), [kind, other] = names.map((name) => (/[FBIW]/.exec(name) || ["F"])[0]);
    const cell = element("button", {
      type: "button", role: "gridcell", tabindex: rank === this.at[0] && place === this.at[1] ? 0 : -1, class: `cell paint-${kind}`, "aria-colindex": place + 1,
      "data-rank": rank, "data-place": place, "data-names": names.join(" "), "aria-label": `${names.join(" with ")}, place ${place + 1} of rank ${rank}`,
    }, ...(other ? [element("span", {class: `paint-${kind}`}, `${names[0]} `), element("span", {class: `paint-${other}`}, names[1])] : names)); // a pair may overlap
    Object.assign(cell.style, {left: `${this.left(place)}px`, width: `${this.pitch - 3}px`});
    cell.classList.toggle("wrong", names.some((name) => this.wrong.has(name)));
    this.cells.set(`${rank} ${place}`, cell);
    this.row(rank).append(cell);
  }

  get current() { return this.cells.get(this.at.join(" ")); }

  choose(cell) {
    if (this.current) this.current.tabIndex = -1;
    this.at = [Number(cell.dataset.rank), Number(cell.dataset.place)];
    cell.tabIndex = 0;
    this.told.chosen(cell.dataset.names.split(" ")[0]);
  }

  /** Go to the cell at a place, which may be out of sight. */
  go(rank, place) {
    const row = this.rows[rank];
    if (!row?.length) return;
    const to = Math.min(Math.max(place, 0), row.length - 1);
    this.reveal(rank, to);
    if (!this.cells.has(`${rank} ${to}`)) this.make(rank, to);
    this.cells.get(`${rank} ${to}`).focus({preventScroll: true});
  }

  /** Put the selected action `by` places further. */
  shift(by) {
    const [rank, place] = this.at, to = Math.min(Math.max(place + by, 0), this.rows[rank].length - 1);
    if (to !== place) this.move(rank, place, to);
  }

  move(rank, from, to) {
    this.at = [rank, to];
    this.told.moved(rank, from, to);
    this.reveal(rank, to);
  }

  /** Bring a cell into sight inside the table: the page stays where it is. */
  reveal(rank, place) {
    const {host} = this, left = this.left(place), top = this.top(rank);
    if (left - LABELS - 2 < host.scrollLeft) host.scrollLeft = left - LABELS - 2;
    else if (left + this.pitch + 12 > host.scrollLeft + host.clientWidth) host.scrollLeft = left + this.pitch + 12 - host.clientWidth;
    if (top < host.scrollTop) host.scrollTop = top - TOP;
    else if (top + this.line > host.scrollTop + host.clientHeight) host.scrollTop = top + this.line - host.clientHeight;
    this.fill();
  }

  // ---- pointer

  press(event) {
    const cell = event.target.closest(".cell");
    if (!cell || event.button !== 0 || event.pointerType === "touch") return; // fingers scroll; they select and use the buttons
    this.drag = {cell, x: event.clientX, rank: Number(cell.dataset.rank), from: Number(cell.dataset.place), to: null};
    this.inner.setPointerCapture(event.pointerId);
    cell.focus({preventScroll: true});
    event.preventDefault();
  }

  pull(event) {
    const {drag} = this;
    if (!drag || (drag.to === null && Math.abs(event.clientX - drag.x) < 4)) return;
    const box = this.host.getBoundingClientRect();
    if (event.clientX > box.right - 24) this.host.scrollLeft += 14;
    if (event.clientX < box.left + 80) this.host.scrollLeft -= 14;
    const x = event.clientX - this.inner.getBoundingClientRect().left - LABELS, count = this.rows[drag.rank].length;
    const gap = Math.min(Math.max(Math.round(x / this.pitch), 0), count); // it goes before the cell at this place
    drag.to = gap > drag.from ? gap - 1 : gap;
    drag.cell.classList.add("held");
    Object.assign(this.marker.style, {left: `${this.left(gap) - 2}px`, top: `${this.top(drag.rank) - 3}px`, height: `${HIGH + 6}px`});
    this.marker.hidden = false;
  }

  let() {
    this.drag?.cell.classList.remove("held");
    this.marker.hidden = true;
    this.drag = null;
  }

  drop() {
    const {drag} = this;
    this.let();
    if (drag && drag.to !== null && drag.to !== drag.from) this.move(drag.rank, drag.from, drag.to);
  }

  // ---- keyboard

  key(event) {
    const [rank, place] = this.at, by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape" && this.drag) this.let();
    else if (event.ctrlKey || event.metaKey) return;
    else if (event.altKey && by) this.shift(by);
    else if (event.altKey) return;
    else if (by) this.go(rank, place + by);
    else if (event.key === "Home") this.go(rank, 0);
    else if (event.key === "End") this.go(rank, Infinity);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.go(rank + (event.key === "ArrowUp" ? -1 : 1), place);
    else return;
    event.preventDefault();
  }

  // ---- what the proof says

  /** Mark the actions that the proof names, and draw an arrow from each that waits to what it waits for. */
  mark({actions, waits}) {
    this.wrong = new Set(actions);
    const found = new Map();
    if (actions.length) this.rows.forEach((row, rank) => row.forEach((text, place) => {
      for (const name of namesOf(text)) if (this.wrong.has(name)) found.set(name, [rank, place]);
    }));
    for (const cell of this.cells.values()) cell.classList.toggle("wrong", cell.dataset.names.split(" ").some((name) => this.wrong.has(name)));
    const middle = (name) => { const [rank, place] = found.get(name); return [this.left(place) + (this.pitch - 3) / 2, this.top(rank) + HIGH / 2]; };
    this.circle.show(waits.filter((pair) => pair.every((name) => found.has(name))).map(([awaited, waiting]) => [middle(waiting), middle(awaited)]));
    const first = actions.map((name) => found.get(name)).find(Boolean);
    if (first && !this.inner.contains(document.activeElement)) this.reveal(...first);
  }
}

/** The actions that a cell of the table names: one, or the two of a pair that may overlap. */
function namesOf(text) { return text.startsWith("(") ? text.match(/\d+[FBIW]\d+(?:\.\d+)?/g) || [text] : [text]; }
