// Arrows over the table, from each waiting action to the one it waits for.

const SVG = "http://www.w3.org/2000/svg";

class WaitArrows {
  constructor() {
    this.drawing = document.createElementNS(SVG, "svg"); // 1 by 1 pixel, with visible overflow
    this.drawing.setAttribute("class", "wait-arrows");
    this.drawing.setAttribute("aria-hidden", "true");
  }

  /** Draw an arrow for each pair of points, the centres of two cells. */
  show(pairs) { this.drawing.replaceChildren(...pairs.flatMap(([from, to]) => this.arrow(from, to))); }

  arrow([x, y], [toX, toY]) {
    const sameRow = y === toY, half = CELL_HEIGHT / 2, down = Math.sign(toY - y);
    const start = sameRow ? y - half : y + down * half, end = sameRow ? toY - half : toY - down * half;
    const line = document.createElementNS(SVG, "path"), tip = document.createElementNS(SVG, "path");
    const [bendX, bendY] = sameRow ? [(x + toX) / 2, start - 16] : [(x + toX) / 2, (start + end) / 2];
    line.setAttribute("d", `M${x} ${start}Q${bendX} ${bendY} ${toX} ${end}`);
    const angle = Math.atan2(end - bendY, toX - bendX), at = (turn) => `${toX - 8 * Math.cos(angle + turn)} ${end - 8 * Math.sin(angle + turn)}`;
    tip.setAttribute("d", `M${at(0.45)}L${toX} ${end}L${at(-0.45)}`);
    return [line, tip];
  }
}
