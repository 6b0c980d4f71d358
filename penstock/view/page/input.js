// Mouse, wheel, fingers and keyboard over a chart.

/** Let the pointer drag, zoom and hover, and the keyboard walk over `chart`. */
function listen(chart, page) {
  const {host} = chart, fingers = new Map();
  let spread = 0;

  host.addEventListener("pointerdown", (event) => {
    host.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event);
    host.classList.add("held");
    spread = distance(fingers);
  });
  host.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) {
      hover(chart, page, event);
      return;
    }
    fingers.set(event.pointerId, event);
    if (fingers.size === 2) {
      const now = distance(fingers), [one, other] = fingers.values();
      page.zoom(spread / Math.max(now, 1), timeUnder(chart, (one.clientX + other.clientX) / 2));
      spread = now;
    } else {
      page.pan((before.clientX - event.clientX) * chart.perPixel);
    }
    page.hideTip();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    host.addEventListener(name, (event) => {
      fingers.delete(event.pointerId);
      host.classList.toggle("held", fingers.size > 0);
      spread = distance(fingers);
    });
  }
  host.addEventListener("pointerleave", () => {
    chart.hovered = null;
    page.hideTip();
    page.redraw();
  });
  host.addEventListener("click", (event) => {
    const {block} = chart.at(event.clientX, event.clientY);
    if (block) page.select(chart, block, false);
  });
  host.addEventListener("dblclick", (event) => page.zoom(0.5, timeUnder(chart, event.clientX)));
  host.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === host; // else the page scrolls
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) page.pan(sideways * chart.perPixel);
    else if (zooms) page.zoom(1.0015 ** event.deltaY, timeUnder(chart, event.clientX));
    else return;
    event.preventDefault();
  }, {passive: false});
  host.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && key(chart, page, event)) event.preventDefault();
  });
  host.addEventListener("focus", () => page.redraw());
  host.addEventListener("blur", () => page.hideTip());
}

function timeUnder(chart, clientX) { return chart.timeAt(clientX - chart.host.getBoundingClientRect().left); }

function distance(fingers) {
  const [one, other] = fingers.values();
  return other ? Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY) : 0;
}

function hover(chart, page, event) {
  const found = chart.at(event.clientX, event.clientY), block = found.block || null;
  if (block !== chart.hovered) {
    chart.hovered = block;
    page.redraw();
  }
  if (block) page.showTip(describe(chart.record, block), event.clientX, event.clientY);
  else if (found.idle) page.showTip(describeIdle(chart.record, found.idle, found.rank), event.clientX, event.clientY);
  else page.hideTip();
}

/** Do what a key stands for; whether it stands for anything. */
function key(chart, page, {key: name, shiftKey: shift}) {
  const {view} = page, wide = view.to - view.from, block = chart.selected;
  const does = {
    ArrowRight: () => (shift ? page.pan(wide / 10) : page.select(chart, along(chart, 1))),
    ArrowLeft: () => (shift ? page.pan(-wide / 10) : page.select(chart, along(chart, -1))),
    ArrowDown: () => page.select(chart, across(chart, 1)),
    ArrowUp: () => page.select(chart, across(chart, -1)),
    Home: () => page.select(chart, rowOf(chart)[0]),
    End: () => page.select(chart, rowOf(chart).at(-1)),
    PageDown: () => page.pan(0.8 * wide),
    PageUp: () => page.pan(-0.8 * wide),
    "+": () => page.zoom(0.7, centre(page, block)),
    "=": () => page.zoom(0.7, centre(page, block)),
    "-": () => page.zoom(1 / 0.7, centre(page, block)),
    "0": () => page.fit(),
    Enter: () => page.select(chart, block && chart.record.timeline.blocks.get(block.waitedFor)),
    Escape: () => (block || page.tipShown ? page.unselect(chart) : chart.host.blur()),
  }[name];
  if (does) does();
  return Boolean(does);
}

function centre(page, block) {
  const {from, to} = page.view;
  return block && block.end > from && block.start < to ? (block.start + block.end) / 2 : (from + to) / 2;
}

function rowOf(chart) { return chart.record.timeline.ranks[chart.selected ? chart.selected.rank : 0].blocks; }

/** The next action of the same rank, or the one before; at first the first in sight. */
function along(chart, by) {
  const row = rowOf(chart);
  if (!chart.selected) return row[firstAfter(chart.record.timeline.ranks[0].ends, chart.page.view.from)];
  return row[Math.min(Math.max(chart.selected.index + by, 0), row.length - 1)];
}

/** What the next rank that has actions runs at about the same time. */
function across(chart, by) {
  if (!chart.selected) return along(chart, 1);
  const {ranks} = chart.record.timeline, middle = (chart.selected.start + chart.selected.end) / 2;
  for (let rank = chart.selected.rank + by; rank >= 0 && rank < ranks.length; rank += by) {
    const {blocks, ends} = ranks[rank];
    if (blocks.length) return blocks[Math.min(firstAfter(ends, middle), blocks.length - 1)];
  }
  return chart.selected;
}
