// Colours and hatches of the theme. A canvas cannot use variables of the style sheet, so they are read from it by name.

const THEME_COLORS = ["ground", "panel", "ink", "muted", "line", "grid", "accent", "shade", "teacher", ...Object.keys(KIND_NAMES).map((kind) => `letter-${kind}`)];
const NUM_SHADES = 8; // of a kind, for the stages of a rank; they repeat after the eighth
const SHADES = Object.fromEntries(Object.keys(KIND_NAMES).map((kind) => [kind, Array.from({length: NUM_SHADES}, (_, shade) => (shade ? `${kind} shade ${shade}` : kind))]));
const FIRST_DARK_SHADES = {F: 3, B: 0, I: 0, W: 4}; // on which names are white
const NUM_HUES = 12; // of microbatches
const HUE_PAINTS = Object.fromEntries(Object.keys(KIND_NAMES).map((kind) => [kind, Array.from({length: NUM_HUES}, (_, hue) => `${kind} ${hue}`)]));

/** Return the name of a block's colour: a teacher's; of its kind, in a shade for each stage of a rank; or the hue of its microbatch. */
function paintOf({kind, microbatch, chunk, isTeacher}, hues) {
  if (hues) return HUE_PAINTS[kind][microbatch % NUM_HUES];
  if (isTeacher) return "teacher";
  return SHADES[kind][chunk % NUM_SHADES];
}

/** Return the name of the colour of a block's text. */
function letterOf({kind, chunk, isTeacher}, hues) { return !hues && !isTeacher && chunk % NUM_SHADES >= FIRST_DARK_SHADES[kind] ? "letter-B" : `letter-${kind}`; }

/** Return name -> `rgb(1, 2, 3)`. `F shade 1` is for a rank's second stage, `F 3 second` for that in a hue, `fill ink` for a cause's hatch. */
function themeColors(hues) {
  const probe = document.body.appendChild(element("i")), context = element("canvas", {width: 1, height: 1}).getContext("2d", {willReadFrequently: true}), colors = {};
  const add = (name, color) => {
    probe.style.color = color;
    context.fillStyle = getComputedStyle(probe).color;
    context.fillRect(0, 0, 1, 1);
    colors[name] = `rgb(${context.getImageData(0, 0, 1, 1).data.slice(0, 3).join(", ")})`;
  };
  for (const name of THEME_COLORS) add(name, `var(--${name})`);
  for (const kind of Object.keys(KIND_NAMES)) {
    SHADES[kind].forEach((name, shade) => add(name, `color-mix(in srgb, var(--${kind}), var(--letter) ${10 * shade}%)`));
    if (hues) HUE_PAINTS[kind].forEach((name, number) => {
      const hue = `oklch(from var(--${kind}) calc(l - 0.03) 0.11 ${(360 / NUM_HUES) * number})`;
      add(name, hue);
      add(`${name} second`, `color-mix(in srgb, ${hue}, var(--letter) 10%)`);
    });
  }
  for (const cause of Object.keys(CAUSE_TEXTS)) {
    add(cause, `var(--${cause})`);
    add(`${cause} ink`, `color-mix(in srgb, var(--${cause}), var(--ink) 35%)`);
  }
  probe.remove();
  return colors;
}

/** Return the three numbers of a colour `rgb(1, 2, 3)`. */
function rgbOf(color) { return color.match(/\d+/g).map(Number); }

/** Return the hatch of a cause of idle time. Each cause has its own, for readers and printers without colours. */
function hatchPattern(cause, color) {
  const tile = element("canvas", {width: 8, height: 8}), c = tile.getContext("2d");
  const lines = {fill: [], drain: [[0, 4, 8, 4]], order: [[-2, 10, 10, -2], [-2, -2, 10, 10]], imbalance: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]], communication: [[-2, -2, 10, 10], [-2, 6, 2, 10], [6, -2, 10, 2]], sending: [[4, 0, 4, 8]]}[cause];
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
