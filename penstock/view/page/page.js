// The page around the charts: figures, legend, tools, tables, tooltip; one view in time that all charts share.

/** An element with attributes and children; texts go in as text, so a name is never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function described(rows) { return element("dl", {}, ...rows.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)])); }

function interval(record, {start, end}) { return `${record.time(end - start)}, from ${record.time(start)} to ${record.time(end)}`; }

function more(record, time, above, below) { return time === 0 ? "as planned" : `${record.time(Math.abs(time))} ${time > 0 ? above : below}`; }

/** What there is to say of an action. */
function describe(record, block) {
  const planned = record.planned && record.planned.blocks.get(block.text), rows = [[record.kindOfTimes, interval(record, block)]];
  if (planned) {
    rows.push(["planned", interval(record, planned)]);
    const longer = block.end - block.start - (planned.end - planned.start);
    rows.push(["difference", `${more(record, longer, "longer", "shorter")}, starts ${more(record, block.start - planned.start, "later", "earlier")}`]);
  }
  if (block.waited > 0) {
    const source = record.timeline.blocks.get(block.waitedFor);
    rows.push(["waited", record.time(block.waited) + (source ? ` for ${source.text} of rank ${source.rank}` : "")]);
  } else if (block.receives.length) {
    rows.push(["received", block.receives.map(({action, rank}) => `${action} of rank ${rank}`).join(", ")]);
  }
  if (record.timeline.data.memory_unit) rows.push(["memory held", `${record.timeline.amount(block.held)} once it has ended`]);
  if (block.critical) rows.push(["critical path", "yes"]);
  const title = element("h3", {}, element("span", {class: `swatch paint-${block.kind}`}), `${block.text} ${KINDS[block.kind]}`);
  const place = `stage ${block.stage}, microbatch ${block.microbatch}, rank ${block.rank}`;
  return element("div", {}, title, element("div", {class: "muted"}, place), described(rows));
}

function describeIdle(record, [start, end, cause], rank) {
  const title = element("h3", {}, element("span", {class: `swatch paint-${cause}`}), `idle by ${cause}`);
  return element("div", {}, title, element("div", {class: "muted"}, CAUSES[cause]),
    described([["rank", String(rank)], ["time", interval(record, {start, end})]]));
}

class Page {
  constructor(records) {
    this.records = records;
    this.options = {planned: true, memory: true, path: true};
    this.whole = Math.max(...records.map((record) => record.makespan)) || 1;
    this.view = {from: 0, to: this.whole};
    this.tip = document.getElementById("tip");
    this.charts = records.map((record) => new Chart(record, this));
    this.slots = records.map(() => ({figures: element("div"), table: element("div", {class: "below"})}));
    this.subtitle();
    const main = document.getElementById("page");
    this.differences = element("div");
    if (records.length > 1) {
      this.differences.append(differences(records));
      main.append(this.differences, this.tools());
    }
    main.append(...this.charts.map((chart, place) => this.section(chart, place)));
    document.getElementById("theme").addEventListener("click", () => this.switchTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    new ResizeObserver(() => this.arrange()).observe(main);
    addEventListener("resize", () => this.arrange());
    addEventListener("scroll", () => this.redraw(), {passive: true});
    this.paint();
    this.arrange();
  }

  subtitle() {
    const {timeline} = this.records[0], count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
    const counts = [count(timeline.ranks.length, "rank"), count(timeline.stages, "stage"), count(timeline.microbatches, "microbatch").replace("batchs", "batches")];
    document.getElementById("subtitle").textContent = this.records.length > 1
      ? "one above the other, on one time axis" : [...counts, count(timeline.blocks.size, "action")].join(" · ");
  }

  section(chart, place) {
    const {record} = chart, section = element("section", {class: "record"}), {figures, table} = this.slots[place];
    section.setAttribute("aria-label", record.name);
    if (this.records.length > 1) section.append(element("h2", {}, record.name));
    section.append(figures);
    const slider = record.raw.length > 1 ? [this.slider(chart, place)] : [];
    section.append(...(this.records.length > 1 ? slider : [this.tools(slider)]));
    section.append(chart.host, table);
    listen(chart, this);
    this.fill(chart, place);
    return section;
  }

  /** What depends on the step that is shown. */
  fill(chart, place) {
    const alone = this.records.length === 1; // else the table of differences has the figures
    this.slots[place].figures.replaceChildren(...(alone ? [figures(chart.record)] : []), shares(chart.record));
    if (alone) this.slots[place].table.replaceChildren(...tableBelow(chart, this));
  }

  tools(more = []) {
    const button = (text, label, click) => element("button", {type: "button", "aria-label": label, title: label, click}, text);
    const check = (name, text) => element("label", {class: "chip"}, element("input", {
      type: "checkbox", checked: "", id: `show-${name}`, change: ({target}) => { this.options[name] = target.checked; this.arrange(); },
    }), text);
    const zooms = element("span", {class: "group"}, button("−", "Zoom out", () => this.zoom(1 / 0.6)),
      button("+", "Zoom in", () => this.zoom(0.6)), button("All", "Show all", () => this.fit()));
    const checks = [["memory", "Memory"], ["path", "Critical path"]];
    if (this.records.some((record) => record.planned)) checks.unshift(["planned", "Planned"]);
    const hint = "Drag to pan; Ctrl and wheel to zoom, or the wheel alone once the chart is clicked; arrow keys walk over the actions.";
    return element("div", {class: "tools"}, zooms, ...checks.map((each) => check(...each)), ...more, element("span", {class: "hint muted"}, hint));
  }

  slider(chart, place) {
    const {record} = chart, shown = element("output", {}, record.labels[record.step]);
    const range = element("input", {
      type: "range", min: 0, max: record.raw.length - 1, value: record.step, id: `step-${place}`, "aria-valuetext": record.labels[record.step],
      input: ({target}) => {
        record.step = Number(target.value);
        shown.textContent = record.labels[record.step];
        target.setAttribute("aria-valuetext", record.labels[record.step]);
        chart.selected = chart.hovered = null;
        this.fill(chart, place);
        if (this.records.length > 1) this.differences.replaceChildren(differences(this.records));
        this.arrange();
      },
    });
    return element("div", {class: "step"}, element("label", {for: `step-${place}`}, "Step"), range, shown);
  }

  /** Read the colours of the theme: a canvas knows no variables. */
  paint() {
    const probe = document.body.appendChild(element("i")), names = ["ground", "panel", "ink", "muted", "line", "grid", "accent", "letter", "shade"];
    this.colors = Object.fromEntries([...names, ...Object.keys(KINDS), ...Object.keys(CAUSES)].map((name) => {
      probe.style.color = `var(--${name})`;
      return [name, getComputedStyle(probe).color];
    }));
    probe.remove();
    const {panel} = this.colors, tints = Object.keys(CAUSES).map((cause) => [cause, pixelOf(this.colors[cause], panel)]);
    this.pixels = Object.fromEntries([...tints, ...Object.keys(KINDS).map((kind) => [kind, pixelOf(this.colors[kind])])]);
    this.redraw();
  }

  switchTheme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    this.paint();
  }

  arrange() {
    for (const chart of this.charts) chart.layout();
    this.redraw();
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const chart of this.charts) chart.draw();
      performance.mark("drawn");
    });
  }

  show(from, to) {
    const wide = Math.min(Math.max(to - from, this.whole * 1e-6), this.whole), middle = (from + to) / 2;
    const start = Math.min(Math.max(middle - wide / 2, 0), this.whole - wide);
    this.view = {from: start, to: start + wide};
    this.redraw();
  }

  pan(by) { this.show(this.view.from + by, this.view.to + by); }
  fit() { this.show(0, this.whole); }

  /** Change the width of the view by `factor`, around a time that stays where it is. */
  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    const {from, to} = this.view, limited = Math.min(factor, this.whole / (to - from));
    this.show(around - (around - from) * limited, around + (to - around) * limited);
  }

  /** Go to an action: bring it into sight, mark it, describe it, say it. */
  select(chart, block, tell = true) {
    if (!block) return;
    for (const each of this.charts) each.selected = null;
    chart.selected = block;
    const {from, to} = this.view, wide = to - from;
    if (block.start < from || block.end > to) {
      const left = block.end > to ? block.end - 0.8 * wide : block.start - 0.2 * wide;
      this.show(left, left + wide);
    }
    this.redraw();
    if (!tell) return;
    const description = describe(chart.record, block), box = chart.host.getBoundingClientRect(), top = box.top + chart.topOf(block);
    if (top < 40 || top + 60 > innerHeight) scrollBy(0, top - innerHeight / 2);
    const x = Math.min(Math.max(chart.x(block.start), chart.gutter), chart.width - 20);
    this.showTip(description, box.left + x, chart.host.getBoundingClientRect().top + chart.topOf(block) + MAIN);
    const lines = [...description.querySelectorAll("dt")].map((term) => `${term.textContent} ${term.nextSibling.textContent}`);
    document.getElementById("said").textContent = [...[...description.children].slice(0, 2).map((each) => each.textContent), ...lines].join(", ");
  }

  unselect(chart) {
    chart.selected = null;
    this.hideTip();
    this.redraw();
  }

  get tipShown() { return !this.tip.hidden; }

  showTip(content, x, y) {
    this.tip.replaceChildren(content);
    this.tip.hidden = false;
    const {offsetWidth: wide, offsetHeight: high} = this.tip;
    const left = x + 14 + wide > innerWidth ? x - 14 - wide : x + 14;
    const top = y + 16 + high > innerHeight ? y - 16 - high : y + 16;
    this.tip.style.left = `${Math.min(Math.max(left, 8), Math.max(8, innerWidth - wide - 8))}px`;
    this.tip.style.top = `${Math.max(top, 8)}px`;
  }

  hideTip() { this.tip.hidden = true; }
}

const page = new Page(JSON.parse(document.getElementById("records").textContent).map((data) => new TimelineRecord(data)));
