// The colours and patterns of the theme, by the names of the style sheet: a canvas knows no variables.

const THEMED = ["ground", "panel", "ink", "muted", "line", "grid", "accent", "shade", ...Object.keys(KINDS).map((kind) => `letter-${kind}`)];
const PAINTS = [...Object.keys(KINDS), ...Object.keys(CAUSES)];
const SECOND = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, `${kind} second`]));
const HUES = 12; // of microbatches
const HUED = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, Array.from({length: HUES}, (_, hue) => `${kind} ${hue}`)]));

/** What a block is painted with: its kind's colour or its second shade, for a rank's second stage; or the hue of its microbatch. */
function paintOf({kind, microbatch, chunk}, hued) {
  if (hued) return HUED[kind][microbatch % HUES];
  return chunk % 2 ? SECOND[kind] : kind;
}

/** Name -> `rgb(1, 2, 3)`; `F second` is the shade of a rank's second stage, `fill ink` what the pattern of a cause is drawn in. */
function themeColors(hued) {
  const probe = document.body.appendChild(element("i")), pen = element("canvas", {width: 1, height: 1}).getContext("2d", {willReadFrequently: true}), colors = {};
  const add = (name, color) => {
    probe.style.color = color;
    pen.fillStyle = getComputedStyle(probe).color;
    pen.fillRect(0, 0, 1, 1);
    colors[name] = `rgb(${pen.getImageData(0, 0, 1, 1).data.slice(0, 3).join(", ")})`;
  };
  const addKind = (name, color) => {
    add(name, color);
    add(`${name} second`, `color-mix(in srgb, ${color}, var(--letter) 10%)`);
  };
  for (const name of THEMED) add(name, `var(--${name})`);
  for (const kind of Object.keys(KINDS)) {
    addKind(kind, `var(--${kind})`);
    if (hued) HUED[kind].forEach((name, hue) => addKind(name, `oklch(from var(--${kind}) calc(l - 0.03) 0.11 ${(360 / HUES) * hue})`));
  }
  for (const cause of Object.keys(CAUSES)) {
    add(cause, `var(--${cause})`);
    add(`${cause} ink`, `color-mix(in srgb, var(--${cause}), var(--ink) 35%)`);
  }
  probe.remove();
  return colors;
}

/** A colour `rgb(1, 2, 3)` as its three numbers. */
function partsOf(color) { return color.match(/\d+/g).map(Number); }

/** How the idle times of a cause are drawn where there is room: each differently, for eyes and paper without colours. */
function patternOf(cause, color) {
  const tile = element("canvas", {width: 8, height: 8}), c = tile.getContext("2d");
  const lines = {fill: [], drain: [[0, 4, 8, 4]], imbalance: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]], communication: [[-2, -2, 10, 10], [-2, 6, 2, 10], [6, -2, 10, 2]], sending: [[4, 0, 4, 8]]}[cause];
  c.strokeStyle = c.fillStyle = color;
  c.globalAlpha = 0.75;
  c.lineWidth = 1;
  if (cause === "fill") c.fillRect(3, 3, 1.5, 1.5);
  for (const [x, y, toX, toY] of lines) {
    c.beginPath();
    c.moveTo(x, y);
    c.lineTo(toX, toY);
    c.stroke();
  }
  return c.createPattern(tile, "repeat");
}
