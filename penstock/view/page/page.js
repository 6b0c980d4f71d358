// The page around the charts: what is chosen, and one view in time that all charts share.

const TOO_MANY = ", too many to show one by one: of each rank its sums, for 256 slices of the step";

class Page {
  constructor(records) {
    this.records = records;
    this.options = {planned: true, memory: true, path: true, fit: true, select: false, hued: false, sort: "rank"};
    this.whole = Math.max(...records.map((record) => record.makespan)) || 1;
    this.view = {from: 0, to: this.whole};
    this.followed = null; // a microbatch
    this.lit = null; // of which blocks the others are dimmed
    this.selection = null;
    this.pulls = true; // a block's end can be pulled, to ask what if
    this.tip = document.getElementById("tip");
    this.charts = records.map((record) => new Chart(record, this));
    this.slots = records.map(() => Object.fromEntries(["verdict", "figures", "legend", "below", "table"].map((name) => [name, element("div", {class: `slot-${name}`})])));
    this.selected = element("section", {class: "below", "aria-label": "Selection"});
    this.finder = new Finder(this);
    this.overview = new Overview(this);
    this.subtitle();
    const main = document.getElementById("page");
    this.differences = element("div");
    if (records.length > 1) {
      this.differences.append(differences(records));
      main.append(this.differences, toolsOf(this), this.overview.host);
    }
    main.append(...this.charts.map((chart, place) => this.section(chart, place)));
    document.getElementById("theme").addEventListener("click", () => this.switchTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    new ResizeObserver(() => this.arrange()).observe(main);
    addEventListener("resize", () => this.arrange());
    addEventListener("scroll", () => this.redraw(), {passive: true});
    addEventListener("hashchange", () => this.readAddress());
    for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) addEventListener(name, () => this.print(printing));
    this.paint();
    this.arrange();
    this.readAddress();
  }

  subtitle() {
    const {timeline} = this.records[0], count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
    const counts = [count(timeline.ranks.length, "rank"), count(timeline.stages, "stage"), count(timeline.microbatches, "microbatch").replace("batchs", "batches")];
    document.getElementById("subtitle").textContent = this.records.length > 1
      ? "one above the other, on one time axis" : [...counts, count(timeline.actions, "action")].join(" · ") + (timeline.data.counts ? TOO_MANY : "");
  }

  section(chart, place) {
    const {record} = chart, section = element("section", {class: "record"}), slot = this.slots[place], alone = this.records.length === 1;
    section.setAttribute("aria-label", record.name);
    if (!alone) section.append(element("h2", {}, record.name));
    const slider = record.raw.length > 1 ? [stepSlider(this, chart, place)] : [];
    section.append(slot.verdict, slot.figures, ...(alone ? [toolsOf(this, slider)] : slider), slot.legend);
    if (alone) section.append(this.overview.host);
    section.append(chart.host, ...(place === 0 ? [this.selected] : []), slot.below, slot.table);
    listen(chart, this);
    this.fill(chart, place);
    return section;
  }

  /** What depends on the step that is shown. */
  fill(chart, place) {
    const alone = this.records.length === 1, slot = this.slots[place], {record} = chart; // else the table of differences has the figures
    slot.verdict.replaceChildren(verdict(chart, this));
    slot.figures.replaceChildren(...(alone ? [figures(record)] : []));
    slot.legend.replaceChildren(legend(record));
    slot.below.replaceChildren(pathTotals(record), shares(record, alone ? 0 : Math.max(...this.records.map(({makespan}) => makespan))));
    if (alone) slot.table.replaceChildren(...tableBelow(chart, this));
  }

  /** Read the colours of the theme, and draw in them. */
  paint() {
    const {hued} = this.options, kinds = [...Object.keys(KINDS), ...(hued ? Object.values(HUED).flat() : Object.values(SECOND))], causes = Object.keys(CAUSES);
    document.body.classList.toggle("hued", hued);
    this.colors = themeColors(hued);
    this.parts = Object.fromEntries([...kinds, ...causes].map((name) => [name, partsOf(this.colors[name])]));
    this.patterns = Object.fromEntries(causes.map((cause) => [cause, patternOf(cause, this.colors[`${cause} ink`])]));
    this.redraw();
  }

  switchTheme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    this.paint();
  }

  /** All ranks on one sheet of paper, sharp. */
  print(printing) {
    this.printing = printing;
    this.arrange();
    for (const chart of this.charts) chart.draw(); // now: the browser waits for nothing
    this.overview.draw();
  }

  /** How high a chart may be for all ranks to be in sight. */
  roomFor({host}) {
    if (this.printing) return 500 / this.charts.length;
    const above = Math.min(360, host.getBoundingClientRect().top + scrollY);
    return Math.max(320, innerHeight - (this.charts.length > 1 ? 120 : above) - 12) / this.charts.length;
  }

  /** Change an option of what is drawn. */
  set(option, value) {
    this.options[option] = value;
    this.paint();
    this.arrange();
  }

  arrange() {
    for (const chart of this.charts) chart.layout();
    this.redraw();
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const chart of this.charts) chart.draw();
      this.overview.draw();
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
    this.tell(description, box.left + x, chart.host.getBoundingClientRect().top + chart.topOf(block) + chart.heightOf(block));
  }

  /** Tell why a rank was idle, and light up what it waited for; Enter goes there. */
  selectIdle(chart, found, {clientX, clientY}) {
    chart.selected = (found.next && chart.record.timeline.blocks.get(found.next.text)) || null;
    this.redraw();
    this.tell(describeIdle(chart.record, found), clientX, clientY);
  }

  /** Show a description, and say it. */
  tell(description, x, y) {
    this.showTip(description, x, y);
    const lines = [...description.querySelectorAll("dt")].map((term) => `${term.textContent} ${term.nextSibling.textContent}`);
    document.getElementById("said").textContent = [...[...description.children].slice(0, 2).map((each) => each.textContent), ...lines].join(", ");
  }

  /** Leave all that was chosen: a tooltip, an action, a microbatch, a selection, what was asked. */
  leave() {
    for (const chart of this.charts) Object.assign(chart, {selected: null, instead: null});
    for (const pressed of document.querySelectorAll("[aria-pressed=true]")) pressed.setAttribute("aria-pressed", "false");
    Object.assign(this, {followed: null, lit: null, whole: this.before ?? this.whole, before: null});
    this.show(this.view.from, this.view.to);
    this.finder.say("");
    this.hideTip();
    this.choose(null);
    this.arrange();
  }

  /** Light up a microbatch, or none: its actions and its messages. */
  follow(microbatch) {
    this.followed = microbatch;
    this.lit = microbatch === null ? null : (block) => block.microbatch === microbatch;
    if (microbatch !== null) {
      this.finder.say(journeyTold(this.charts[0].record, microbatch));
    }
    this.redraw();
  }

  /** Draw what would have been below what was, at the same scale. */
  instead({text, timeline}, name = "what if") {
    const [chart] = this.charts;
    chart.instead = {name, timeline};
    this.finder.say(text);
    this.before ??= this.whole; // to come back to
    this.whole = Math.max(this.before, timeline.data.makespan);
    this.arrange();
  }

  /** What a sentence of the verdict is about: its blocks light up, and the step without it is drawn below. */
  showFinding(chart, finding, button) {
    const shown = button.getAttribute("aria-pressed") === "true";
    this.leave();
    if (shown) return;
    button.setAttribute("aria-pressed", "true");
    finding.prepared ??= new Timeline(finding.timeline);
    const rank = finding.rank === null ? null : finding.rank;
    this.lit = rank === null ? null : (block) => block.rank === rank;
    const name = {straggler: "what if", cut: "even cut"}[finding.about] || finding.name.replace(/, predicted$/, "");
    this.instead({text: `${finding.text} (below each rank, at the same scale)`, timeline: finding.prepared}, name);
    this.fit();
    chart.host.scrollIntoView({block: "nearest"});
  }

  /** Fold or pin a rank, or no longer. */
  mark(chart, ranks, rank) {
    if (!ranks.delete(rank)) ranks.add(rank);
    this.arrange();
  }

  /** Select some time on some ranks, or nothing; the address says it too. */
  choose(selection) {
    this.selection = selection;
    this.selected.replaceChildren(...(selection ? selectionBelow(this.charts[0], this) : []));
    const address = toAddress(selection);
    if (address !== location.hash && (address || fromAddress(location.hash, Infinity))) history.replaceState(null, "", address || location.pathname + location.search);
    this.redraw();
  }

  readAddress() {
    const found = fromAddress(location.hash, this.charts[0].record.timeline.ranks.length);
    if (!found) return;
    const wide = found.to - found.from;
    this.show(found.from - wide / 2, found.to + wide / 2);
    this.choose(found);
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
