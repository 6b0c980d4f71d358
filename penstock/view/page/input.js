// Mouse, wheel, touch and keyboard on a chart.

const GRIP_PIXELS = 5; // how close to the end of a block a drag changes its duration
const MIN_RESIZABLE_PIXELS = 24; // the least width of such a block

/** Add the listeners of `chart`: the pointer drags, zooms, selects and hovers; the keyboard moves between actions. */
function addListeners(chart, page) {
  const {host} = chart, fingers = new Map();
  let spread = 0, drag = null;

  host.addEventListener("pointerdown", (event) => {
    host.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event);
    drag = fingers.size === 1 ? startDrag(chart, page, event) : null;
    host.classList.toggle("dragging", !drag);
    spread = distance(fingers);
  });
  host.addEventListener("pointermove", (event) => {
    const previous = fingers.get(event.pointerId);
    if (!previous) {
      hover(chart, page, event);
      return;
    }
    fingers.set(event.pointerId, event);
    if (fingers.size === 2) {
      const now = distance(fingers), [first, second] = fingers.values();
      page.zoom(spread / Math.max(now, 1), timeUnder(chart, (first.clientX + second.clientX) / 2));
      spread = now;
    } else if (drag) {
      drag.move(event);
    } else {
      page.pan((previous.clientX - event.clientX) * chart.timePerPixel);
    }
    page.hideTip();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    host.addEventListener(name, (event) => {
      fingers.delete(event.pointerId);
      host.classList.toggle("dragging", fingers.size > 0);
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
  host.addEventListener("click", (event) => click(chart, page, event));
  host.addEventListener("dblclick", (event) => page.zoom(0.5, timeUnder(chart, event.clientX)));
  host.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === host; // otherwise the page scrolls
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) page.pan(sideways * chart.timePerPixel);
    else if (zooms) page.zoom(1.0015 ** event.deltaY, timeUnder(chart, event.clientX));
    else return;
    event.preventDefault();
  }, {passive: false});
  host.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && handleKey(chart, page, event)) event.preventDefault();
  });
  host.addEventListener("focus", () => page.redraw());
  host.addEventListener("blur", () => page.hideTip());
}

/** Return the drag that a press begins: of a selection, or of a block's end; null to pan. */
function startDrag(chart, page, event) {
  const found = chart.hitTest(event.clientX, event.clientY);
  if (event.shiftKey || page.options.select || found.axis) return selectionDrag(chart, page, event, Boolean(found.axis));
  const block = event.pointerType === "touch" ? null : blockWithEndAt(chart, found, event.clientX);
  return block && resizeDrag(chart, page, event, block);
}

function selectionDrag(chart, page, {clientX: x, clientY: y}, allRanks) {
  const time = (clientX) => Math.min(Math.max(timeUnder(chart, clientX), 0), page.duration), row = (clientY) => chart.rowAt(clientY - chart.host.getBoundingClientRect().top).rank;
  const drag = {moved: false, move(event) {
    if (Math.abs(event.clientX - x) < 4) return;
    drag.moved = true;
    const [from, to] = [time(x), time(event.clientX)].sort((a, b) => a - b);
    const [first, last] = [row(y), row(event.clientY)].map((rank) => chart.order.indexOf(rank)).sort((a, b) => a - b);
    page.setSelection({from, to, ranks: allRanks ? [...chart.order] : chart.order.slice(first, last + 1)});
  }};
  return drag;
}

/** Return the block whose end is under the pointer, or null; always null in the studio, where blocks are dragged. */
function blockWithEndAt(chart, {block, main}, clientX) {
  if (!block || !main || !chart.page.canResizeBlocks) return null;
  const end = chart.x(block.end), x = clientX - chart.host.getBoundingClientRect().left;
  return end - x <= GRIP_PIXELS && end - chart.x(block.start) >= MIN_RESIZABLE_PIXELS ? block : null;
}

function resizeDrag(chart, page, {clientX: begin}, block) {
  const drag = {moved: false, move({clientX}) {
    if (!drag.moved && Math.abs(clientX - begin) < 3) return;
    drag.moved = true;
    page.showAlternative(whatIfDuration(chart.record, block, Math.max(0, block.end - block.start + (clientX - begin) * chart.timePerPixel)));
  }};
  return drag;
}

function click(chart, page, event) {
  const found = chart.hitTest(event.clientX, event.clientY), {block, idle, label} = found;
  if (chart.dragged) return;
  if (block) page.select(chart, block, event.pointerType === "touch");
  else if (idle) page.selectIdle(chart, found, event);
  else if (label !== undefined) page.toggle(chart, event.shiftKey ? chart.pinned : chart.folded, label);
  else page.hideTip();
}

function timeUnder(chart, clientX) { return chart.timeAt(clientX - chart.host.getBoundingClientRect().left); }

function distance(fingers) {
  const [first, second] = fingers.values();
  return second ? Math.hypot(first.clientX - second.clientX, first.clientY - second.clientY) : 0;
}

function hover(chart, page, event) {
  const found = chart.hitTest(event.clientX, event.clientY), block = found.block || null;
  chart.host.classList.toggle("resizable", Boolean(blockWithEndAt(chart, found, event.clientX)));
  if (block !== chart.hovered) {
    chart.hovered = block;
    page.redraw();
  }
  if (block) page.showTip(describeBlock(chart.record, block), event.clientX, event.clientY);
  else if (found.idle) page.showTip(describeIdle(chart.record, found), event.clientX, event.clientY);
  else if (found.label !== undefined) page.showTip(element("div", {class: "muted"}, `rank ${found.label}: click to fold, Shift and click to pin`), event.clientX, event.clientY);
  else page.hideTip();
}

/** Handle a key of the chart. Returns whether it has a meaning. */
function handleKey(chart, page, {key: name, shiftKey: shift}) {
  const {view} = page, width = view.to - view.from, block = chart.selected, nearest = block || chart.hovered;
  const zoomIn = () => page.zoom(0.7, centre(page, block)), zoomOut = () => page.zoom(1 / 0.7, centre(page, block));
  const actions = {
    ArrowRight: () => (shift ? page.pan(width / 10) : page.select(chart, neighbourOnRank(chart, 1))),
    ArrowLeft: () => (shift ? page.pan(-width / 10) : page.select(chart, neighbourOnRank(chart, -1))),
    ArrowDown: () => page.select(chart, neighbourOnNextRank(chart, 1)),
    ArrowUp: () => page.select(chart, neighbourOnNextRank(chart, -1)),
    Home: () => page.select(chart, rowOf(chart)[0]),
    End: () => page.select(chart, rowOf(chart).at(-1)),
    PageDown: () => page.pan(0.8 * width),
    PageUp: () => page.pan(-0.8 * width),
    "+": zoomIn, "=": zoomIn, w: zoomIn,
    "-": zoomOut, s: zoomOut,
    a: () => page.pan(-width / 5),
    d: () => page.pan(width / 5),
    m: () => nearest && page.setSelection({from: nearest.start, to: nearest.end, ranks: [nearest.rank]}),
    f: () => page.follow(nearest && page.followedMicrobatch !== nearest.microbatch ? nearest.microbatch : null),
    "/": () => page.finder.field.focus(),
    "0": () => page.showAll(),
    Enter: () => page.select(chart, block && chart.record.timeline.blocks.get(block.waitedFor)),
    Escape: () => { page.clear(); chart.host.blur(); },
  };
  const action = actions[name.length === 1 ? name.toLowerCase() : name];
  if (action) action();
  return Boolean(action);
}

function centre(page, block) {
  const {from, to} = page.view;
  return block && block.end > from && block.start < to ? (block.start + block.end) / 2 : (from + to) / 2;
}

function rowOf(chart) { return chart.record.timeline.ranks[chart.selected ? chart.selected.rank : chart.order[0]].blocks; }

/** Return the next action of the same rank, or the previous one; the first visible one if none is selected. */
function neighbourOnRank(chart, step) {
  const row = rowOf(chart);
  if (!chart.selected) return row[firstAfter(chart.record.timeline.ranks[chart.order[0]].ends, chart.page.view.from)];
  return row[Math.min(Math.max(chart.selected.index + step, 0), row.length - 1)];
}

/** Return the action of the next rank that has actions, at about the same time. */
function neighbourOnNextRank(chart, step) {
  if (!chart.selected) return neighbourOnRank(chart, 1);
  const {ranks} = chart.record.timeline, {order} = chart, middle = (chart.selected.start + chart.selected.end) / 2;
  for (let index = order.indexOf(chart.selected.rank) + step; index >= 0 && index < order.length; index += step) {
    const {blocks, ends} = ranks[order[index]];
    if (blocks.length) return blocks[Math.min(firstAfter(ends, middle), blocks.length - 1)];
  }
  return chart.selected;
}
