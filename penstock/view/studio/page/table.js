// The table under the picture: a row for each rank, a cell for each action, to be moved by pointer or keyboard.

const SVG = "http://www.w3.org/2000/svg";

class Table {
  /** `moved(rank, from, to)` is told of an action that was put elsewhere, `chosen(action)` of one that was selected. */
  constructor(host, {moved, chosen}) {
    this.host = host;
    this.told = {moved, chosen};
    this.at = [0, 0]; // rank and place of the cell that the Tab key leads to
    this.drag = null;
    this.inner = element("div", {class: "grid", role: "grid", "aria-label": "Actions of every rank, in order. Arrow keys select, Alt with an arrow moves."});
    this.marker = element("i", {class: "marker", hidden: ""});
    this.lines = document.createElementNS(SVG, "svg");
    this.lines.setAttribute("class", "circle");
    this.lines.setAttribute("aria-hidden", "true");
    this.inner.append(this.lines, this.marker);
    host.append(this.inner);
    this.inner.addEventListener("pointerdown", (event) => this.press(event));
    this.inner.addEventListener("pointermove", (event) => this.pull(event));
    this.inner.addEventListener("pointerup", () => this.drop());
    this.inner.addEventListener("pointercancel", () => this.let());
    this.inner.addEventListener("keydown", (event) => this.key(event));
    this.inner.addEventListener("focusin", ({target}) => { if (target.dataset.place) this.choose(target); });
  }

  show(rows) {
    if (JSON.stringify(rows) === this.shown) return;
    const focused = this.inner.contains(document.activeElement);
    this.shown = JSON.stringify(rows);
    this.rows = rows.map((row, rank) => {
      const cells = row.map((text, place) => this.cell(text, rank, place));
      return {cells, line: element("div", {role: "row", class: "row"}, element("span", {role: "rowheader", class: "rank"}, `rank ${rank}`), ...cells)};
    });
    this.lines.replaceChildren();
    this.inner.replaceChildren(this.lines, ...this.rows.map(({line}) => line), this.marker);
    const rank = Math.min(this.at[0], rows.length - 1), place = Math.min(this.at[1], Math.max(0, (rows[rank] || []).length - 1));
    this.at = [Math.max(0, rank), place];
    const cell = this.current;
    if (cell) cell.tabIndex = 0;
    if (cell && focused) cell.focus({preventScroll: true});
  }

  cell(text, rank, place) {
    const names = text.match(/\d+[FBIW]\d+/g) || [text], kind = (/[FBIW]/.exec(names[0]) || ["F"])[0];
    const cell = element("button", {
      type: "button", role: "gridcell", tabindex: -1, class: `cell paint-${kind}`, "data-rank": rank, "data-place": place,
      "data-names": names.join(" "), "aria-label": `${names.join(" with ")}, place ${place + 1} of rank ${rank}`,
    }, names.join(" "));
    if (names.length > 1) { // a pair that may overlap
      const other = /[FBIW]/.exec(names[1])[0];
      cell.style.background = `linear-gradient(90deg, var(--${kind}) 50%, var(--${other}) 50%) border-box`;
    }
    return cell;
  }

  get current() { return this.rows?.[this.at[0]]?.cells[this.at[1]]; }

  choose(cell) {
    if (this.current) this.current.tabIndex = -1;
    this.at = [Number(cell.dataset.rank), Number(cell.dataset.place)];
    cell.tabIndex = 0;
    this.told.chosen(cell.dataset.names.split(" ")[0]);
  }

  /** Put the selected action `by` places further. */
  shift(by) {
    const [rank, place] = this.at, to = Math.min(Math.max(place + by, 0), this.rows[rank].cells.length - 1);
    if (to !== place) this.move(rank, place, to);
  }

  move(rank, from, to) {
    this.at = [rank, to];
    this.told.moved(rank, from, to);
    this.reveal(this.current);
  }

  /** Bring a cell into sight, sideways only: the page stays where it is. */
  reveal(cell) {
    const left = cell.offsetLeft - 70, right = cell.offsetLeft + cell.offsetWidth + 12, {scrollLeft, clientWidth} = this.host;
    if (left < scrollLeft) this.host.scrollLeft = left;
    else if (right > scrollLeft + clientWidth) this.host.scrollLeft = right - clientWidth;
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
    const {cells} = this.rows[drag.rank], boxes = cells.map((cell) => cell.getBoundingClientRect());
    const gap = boxes.filter(({left, width}) => event.clientX > left + width / 2).length; // it goes before the cell at this place
    drag.to = gap > drag.from ? gap - 1 : gap;
    drag.cell.classList.add("held");
    const edge = gap < cells.length ? cells[gap].offsetLeft - 2 : cells.at(-1).offsetLeft + cells.at(-1).offsetWidth + 1;
    Object.assign(this.marker.style, {left: `${edge}px`, top: `${drag.cell.offsetTop - 3}px`, height: `${drag.cell.offsetHeight + 6}px`});
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
    const [rank, place] = this.at, row = this.rows[rank], last = row.cells.length - 1, by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape" && this.drag) this.let();
    else if (event.ctrlKey || event.metaKey) return;
    else if (event.altKey && by) this.shift(by);
    else if (event.altKey) return;
    else if (by) row.cells[Math.min(Math.max(place + by, 0), last)].focus();
    else if (event.key === "Home") row.cells[0].focus();
    else if (event.key === "End") row.cells[last].focus();
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const next = this.rows[rank + (event.key === "ArrowUp" ? -1 : 1)];
      next?.cells[Math.min(place, next.cells.length - 1)]?.focus();
    } else return;
    event.preventDefault();
  }

  // ---- what the proof says

  /** Mark the actions that the proof names, and draw an arrow from each that waits to what it waits for. */
  mark({actions, waits}) {
    const named = new Set(actions), found = new Map();
    for (const {cells} of this.rows) {
      for (const cell of cells) {
        const names = cell.dataset.names.split(" ");
        cell.classList.toggle("wrong", names.some((name) => named.has(name)));
        for (const name of names) if (named.has(name)) found.set(name, cell);
      }
    }
    this.lines.setAttribute("width", this.inner.offsetWidth);
    this.lines.setAttribute("height", this.inner.offsetHeight);
    this.lines.replaceChildren(...waits.filter((pair) => pair.every((name) => found.has(name))).flatMap(([awaited, waiting]) =>
      this.arrow(found.get(waiting), found.get(awaited))));
    const first = actions.map((name) => found.get(name)).find(Boolean);
    if (first && !this.inner.contains(document.activeElement)) this.reveal(first);
  }

  arrow(from, to) {
    const middle = (cell) => [cell.offsetLeft + cell.offsetWidth / 2, cell.offsetTop + cell.offsetHeight / 2];
    const [[x, y], [toX, toY]] = [middle(from), middle(to)], same = y === toY, half = from.offsetHeight / 2;
    const start = same ? y - half : y + Math.sign(toY - y) * half, end = same ? toY - half : toY - Math.sign(toY - y) * half;
    const line = document.createElementNS(SVG, "path"), tip = document.createElementNS(SVG, "path");
    const [bendX, bendY] = same ? [(x + toX) / 2, start - 16] : [(x + toX) / 2, (start + end) / 2];
    line.setAttribute("d", `M${x} ${start}Q${bendX} ${bendY} ${toX} ${end}`);
    const angle = Math.atan2(end - bendY, toX - bendX), at = (turn) => `${toX - 8 * Math.cos(angle + turn)} ${end - 8 * Math.sin(angle + turn)}`;
    tip.setAttribute("d", `M${at(0.45)}L${toX} ${end}L${at(-0.45)}`);
    return [line, tip];
  }
}
