// Mouse, wheel, fingers and keyboard over a chart.

const GRIP = 5; // pixels: how close to the end of a block it can be pulled
const PULLED = 24; // pixels a block must have for that

/** Let the pointer drag, zoom, select and hover, and the keyboard walk over `chart`. */
function listen(chart, page) {
  const {host} = chart, fingers = new Map();
  let spread = 0, drag = null;

  host.addEventListener("pointerdown", (event) => {
    host.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event);
    drag = fingers.size === 1 ? begun(chart, page, event) : null;
    host.classList.toggle("held", !drag);
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
    } else if (drag) {
      drag.move(event);
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
      chart.dragged = Boolean(drag?.moved);
      drag = null;
    });
  }
  host.addEventListener("pointerleave", () => {
    chart.hovered = null;
    page.hideTip();
    page.redraw();
  });
  host.addEventListener("click", (event) => clicked(chart, page, event));
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

/** What a press begins, if not to pan: with Shift, on the axis or where Select is on a selection, at a block's end what if. */
function begun(chart, page, event) {
  const found = chart.at(event.clientX, event.clientY);
  if (event.shiftKey || page.options.select || found.axis) return selecting(chart, page, event, Boolean(found.axis));
  const block = event.pointerType === "touch" ? null : gripped(chart, found, event.clientX);
  return block && pulling(chart, page, event, block);
}

function selecting(chart, page, {clientX: x, clientY: y}, allRanks) {
  const time = (clientX) => Math.min(Math.max(timeUnder(chart, clientX), 0), page.whole), row = (clientY) => chart.rowAt(clientY - chart.host.getBoundingClientRect().top).rank;
  const drag = {moved: false, move(event) {
    if (Math.abs(event.clientX - x) < 4) return;
    drag.moved = true;
    const [from, to] = [time(x), time(event.clientX)].sort((a, b) => a - b);
    const [first, last] = [row(y), row(event.clientY)].map((rank) => chart.order.indexOf(rank)).sort((a, b) => a - b);
    page.choose({from, to, ranks: allRanks ? [...chart.order] : chart.order.slice(first, last + 1)});
  }};
  return drag;
}

/** The block whose end is under the pointer; the studio has a use of its own for dragging. */
function gripped(chart, {block, main}, clientX) {
  if (!block || !main || !chart.page.pulls) return null;
  const end = chart.x(block.end), x = clientX - chart.host.getBoundingClientRect().left;
  return end - x <= GRIP && end - chart.x(block.start) >= PULLED ? block : null;
}

function pulling(chart, page, {clientX: begin}, block) {
  const drag = {moved: false, move({clientX}) {
    if (!drag.moved && Math.abs(clientX - begin) < 3) return;
    drag.moved = true;
    page.instead(whatIfOne(chart.record, block, Math.max(0, block.end - block.start + (clientX - begin) * chart.perPixel)));
  }};
  return drag;
}

function clicked(chart, page, event) {
  const found = chart.at(event.clientX, event.clientY), {block, idle, label} = found;
  if (chart.dragged) return;
  if (block) page.select(chart, block, event.pointerType === "touch");
  else if (idle) page.selectIdle(chart, found, event);
  else if (label !== undefined) page.mark(chart, event.shiftKey ? chart.pinned : chart.folded, label);
  else page.hideTip();
}

function timeUnder(chart, clientX) { return chart.timeAt(clientX - chart.host.getBoundingClientRect().left); }

function distance(fingers) {
  const [one, other] = fingers.values();
  return other ? Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY) : 0;
}

function hover(chart, page, event) {
  const found = chart.at(event.clientX, event.clientY), block = found.block || null;
  chart.host.classList.toggle("grips", Boolean(gripped(chart, found, event.clientX)));
  if (block !== chart.hovered) {
    chart.hovered = block;
    page.redraw();
  }
  if (block) page.showTip(describe(chart.record, block), event.clientX, event.clientY);
  else if (found.idle) page.showTip(describeIdle(chart.record, found), event.clientX, event.clientY);
  else if (found.label !== undefined) page.showTip(element("div", {class: "muted"}, `rank ${found.label}: click folds, Shift and click pins`), event.clientX, event.clientY);
  else page.hideTip();
}

/** Do what a key stands for; whether it stands for anything. */
function key(chart, page, {key: name, shiftKey: shift}) {
  const {view} = page, wide = view.to - view.from, block = chart.selected, nearest = block || chart.hovered;
  const closer = () => page.zoom(0.7, centre(page, block)), away = () => page.zoom(1 / 0.7, centre(page, block));
  const does = {
    ArrowRight: () => (shift ? page.pan(wide / 10) : page.select(chart, along(chart, 1))),
    ArrowLeft: () => (shift ? page.pan(-wide / 10) : page.select(chart, along(chart, -1))),
    ArrowDown: () => page.select(chart, across(chart, 1)),
    ArrowUp: () => page.select(chart, across(chart, -1)),
    Home: () => page.select(chart, rowOf(chart)[0]),
    End: () => page.select(chart, rowOf(chart).at(-1)),
    PageDown: () => page.pan(0.8 * wide),
    PageUp: () => page.pan(-0.8 * wide),
    "+": closer, "=": closer, w: closer,
    "-": away, s: away,
    a: () => page.pan(-wide / 5),
    d: () => page.pan(wide / 5),
    m: () => nearest && page.choose({from: nearest.start, to: nearest.end, ranks: [nearest.rank]}),
    f: () => page.follow(nearest && page.followed !== nearest.microbatch ? nearest.microbatch : null),
    "/": () => page.finder.field.focus(),
    "0": () => page.fit(),
    Enter: () => page.select(chart, block && chart.record.timeline.blocks.get(block.waitedFor)),
    Escape: () => { page.leave(); chart.host.blur(); },
  }[name.length === 1 ? name.toLowerCase() : name];
  if (does) does();
  return Boolean(does);
}

function centre(page, block) {
  const {from, to} = page.view;
  return block && block.end > from && block.start < to ? (block.start + block.end) / 2 : (from + to) / 2;
}

function rowOf(chart) { return chart.record.timeline.ranks[chart.selected ? chart.selected.rank : chart.order[0]].blocks; }

/** The next action of the same rank, or the one before; at first the first in sight. */
function along(chart, by) {
  const row = rowOf(chart);
  if (!chart.selected) return row[firstAfter(chart.record.timeline.ranks[chart.order[0]].ends, chart.page.view.from)];
  return row[Math.min(Math.max(chart.selected.index + by, 0), row.length - 1)];
}

/** What the next rank that has actions runs at about the same time. */
function across(chart, by) {
  if (!chart.selected) return along(chart, 1);
  const {ranks} = chart.record.timeline, {order} = chart, middle = (chart.selected.start + chart.selected.end) / 2;
  for (let place = order.indexOf(chart.selected.rank) + by; place >= 0 && place < order.length; place += by) {
    const {blocks, ends} = ranks[order[place]];
    if (blocks.length) return blocks[Math.min(firstAfter(ends, middle), blocks.length - 1)];
  }
  return chart.selected;
}
