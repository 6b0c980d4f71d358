// Arrows over the table, from each action that waits to what it waits for.

const SVG = "http://www.w3.org/2000/svg";

class Circle {
  constructor() {
    this.drawing = document.createElementNS(SVG, "svg"); // of no size: what it draws is seen beyond it
    this.drawing.setAttribute("class", "circle");
    this.drawing.setAttribute("aria-hidden", "true");
  }

  /** An arrow for each pair of points, from middle to middle of two cells. */
  show(pairs) { this.drawing.replaceChildren(...pairs.flatMap(([from, to]) => this.arrow(from, to))); }

  arrow([x, y], [toX, toY]) {
    const same = y === toY, half = HIGH / 2, down = Math.sign(toY - y);
    const start = same ? y - half : y + down * half, end = same ? toY - half : toY - down * half;
    const line = document.createElementNS(SVG, "path"), tip = document.createElementNS(SVG, "path");
    const [bendX, bendY] = same ? [(x + toX) / 2, start - 16] : [(x + toX) / 2, (start + end) / 2];
    line.setAttribute("d", `M${x} ${start}Q${bendX} ${bendY} ${toX} ${end}`);
    const angle = Math.atan2(end - bendY, toX - bendX), at = (turn) => `${toX - 8 * Math.cos(angle + turn)} ${end - 8 * Math.sin(angle + turn)}`;
    tip.setAttribute("d", `M${at(0.45)}L${toX} ${end}L${at(-0.45)}`);
    return [line, tip];
  }
}
