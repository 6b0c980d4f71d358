// The page around the charts: options, selection, and one view in time that all charts share.

const TOO_MANY_ACTIONS = ", too many to show one by one: the sums of each rank, for 256 time bins";

class Page {
  constructor(records) {
    this.records = records;
    this.options = {predicted: true, memory: true, path: true, fit: true, select: false, hues: false, sort: "rank"};
    this.duration = Math.max(...records.map((record) => record.makespan)) || 1;
    this.view = {from: 0, to: this.duration};
    this.followedMicrobatch = null; // its number
    this.isHighlighted = null; // (block) => boolean; blocks for which it is false are dimmed
    this.selection = null;
    this.canResizeBlocks = true; // dragging the end of a block asks what if
    this.tip = document.getElementById("tip");
    this.charts = records.map((record) => new Chart(record, this));
    this.slots = records.map(() => Object.fromEntries(["verdict", "figures", "legend", "below", "table"].map((name) => [name, element("div", {class: `slot-${name}`})])));
    this.selectionSection = element("section", {class: "below", "aria-label": "Selection"});
    this.finder = new Finder(this);
    this.overview = new Overview(this);
    this.showSubtitle();
    const main = document.getElementById("page");
    this.differences = element("div");
    if (records.length > 1) {
      this.differences.append(differencesTable(records));
      main.append(this.differences, toolbar(this), this.overview.host);
    }
    main.append(...this.charts.map((chart, index) => this.section(chart, index)));
    document.getElementById("theme").addEventListener("click", () => this.toggleTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.applyTheme());
    new ResizeObserver(() => this.layout()).observe(main);
    addEventListener("resize", () => this.layout());
    addEventListener("scroll", () => this.redraw(), {passive: true});
    addEventListener("hashchange", () => this.readHash());
    for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) addEventListener(name, () => this.print(printing));
    this.applyTheme();
    this.layout();
    this.readHash();
  }

  showSubtitle() {
    const {timeline} = this.records[0], count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
    const counts = [count(timeline.ranks.length, "rank"), count(timeline.stages, "stage"), count(timeline.microbatches, "microbatch").replace("batchs", "batches")];
    document.getElementById("subtitle").textContent = this.records.length > 1
      ? "one above the other, on one time axis" : [...counts, count(timeline.actions, "action")].join(" · ") + (timeline.data.counts ? TOO_MANY_ACTIONS : "");
  }

  section(chart, index) {
    const {record} = chart, section = element("section", {class: "record"}), slot = this.slots[index], isAlone = this.records.length === 1;
    section.setAttribute("aria-label", record.name);
    if (!isAlone) section.append(element("h2", {}, record.name));
    const slider = record.stepData.length > 1 ? [stepSlider(this, chart, index)] : [];
    section.append(slot.verdict, slot.figures, ...(isAlone ? [toolbar(this, slider)] : slider), slot.legend);
    if (isAlone) section.append(this.overview.host);
    section.append(chart.host, ...(index === 0 ? [this.selectionSection] : []), slot.below, slot.table);
    addListeners(chart, this);
    this.fillPanels(chart, index);
    return section;
  }

  /** Fill the panels that depend on the shown step. */
  fillPanels(chart, index) {
    const isAlone = this.records.length === 1, slot = this.slots[index], {record} = chart; // otherwise the table of differences has the figures
    slot.verdict.replaceChildren(verdictLine(chart, this));
    slot.figures.replaceChildren(...(isAlone ? [figureList(record)] : []));
    slot.legend.replaceChildren(legend(record));
    slot.below.replaceChildren(pathSummary(record), timeShares(record, isAlone ? 0 : Math.max(...this.records.map(({makespan}) => makespan))));
    if (isAlone) slot.table.replaceChildren(...stepTable(chart, this));
  }

  /** Read the colours of the theme, and redraw. */
  applyTheme() {
    const {hues} = this.options, kinds = hues ? [...Object.keys(KIND_NAMES), ...Object.values(HUE_PAINTS).flat()] : [...Object.values(SHADES).flat(), "teacher"], causes = Object.keys(CAUSE_TEXTS);
    document.body.classList.toggle("hues", hues);
    this.colors = themeColors(hues);
    this.paintColors = Object.fromEntries([...kinds, ...causes].map((name) => [name, rgbOf(this.colors[name])]));
    this.patterns = Object.fromEntries(causes.map((cause) => [cause, hatchPattern(cause, this.colors[`${cause} ink`])]));
    this.redraw();
  }

  toggleTheme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    this.applyTheme();
  }

  /** Lay out all ranks on one sheet of paper at high resolution, or return to the screen. */
  print(printing) {
    this.printing = printing;
    this.layout();
    for (const chart of this.charts) chart.draw(); // at once: the browser does not wait
    this.overview.draw();
  }

  /** Return the height in pixels at which all ranks of a chart are in sight. */
  heightFor({host}) {
    if (this.printing) return 500 / this.charts.length;
    const above = Math.min(360, host.getBoundingClientRect().top + scrollY);
    return Math.max(320, innerHeight - (this.charts.length > 1 ? 120 : above) - 12) / this.charts.length;
  }

  /** Change an option, and draw accordingly. */
  setOption(option, value) {
    this.options[option] = value;
    this.applyTheme();
    this.layout();
  }

  layout() {
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

  setView(from, to) {
    const width = Math.min(Math.max(to - from, this.duration * 1e-6), this.duration), middle = (from + to) / 2;
    const start = Math.min(Math.max(middle - width / 2, 0), this.duration - width);
    this.view = {from: start, to: start + width};
    this.redraw();
  }

  pan(by) { this.setView(this.view.from + by, this.view.to + by); }
  showAll() { this.setView(0, this.duration); }

  /** Change the width of the view by `factor`, around a time that keeps its position. */
  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    const {from, to} = this.view, limited = Math.min(factor, this.duration / (to - from));
    this.setView(around - (around - from) * limited, around + (to - around) * limited);
  }

  /** Select an action and bring it into sight; describe it if `describe`. */
  select(chart, block, describe = true) {
    if (!block) return;
    for (const other of this.charts) other.selected = null;
    chart.selected = block;
    const {from, to} = this.view, width = to - from;
    if (block.start < from || block.end > to) {
      const left = block.end > to ? block.end - 0.8 * width : block.start - 0.2 * width;
      this.setView(left, left + width);
    }
    this.redraw();
    if (!describe) return;
    const description = describeBlock(chart.record, block), box = chart.host.getBoundingClientRect(), top = box.top + chart.topOf(block);
    if (top < 40 || top + 60 > innerHeight) scrollBy(0, top - innerHeight / 2);
    const x = Math.min(Math.max(chart.x(block.start), chart.gutter), chart.width - 20);
    this.showDescription(description, box.left + x, chart.host.getBoundingClientRect().top + chart.topOf(block) + chart.heightOf(block));
  }

  /** Describe an idle time, and select the action after it, so that Enter goes to what that waited for. */
  selectIdle(chart, found, {clientX, clientY}) {
    chart.selected = (found.next && chart.record.timeline.blocks.get(found.next.text)) || null;
    this.redraw();
    this.showDescription(describeIdle(chart.record, found), clientX, clientY);
  }

  /** Show a description as a tooltip, and announce it to screen readers. */
  showDescription(description, x, y) {
    this.showTip(description, x, y);
    const lines = [...description.querySelectorAll("dt")].map((term) => `${term.textContent} ${term.nextSibling.textContent}`);
    document.getElementById("announcement").textContent = [...[...description.children].slice(0, 2).map((child) => child.textContent), ...lines].join(", ");
  }

  /** Clear the tooltip, the selected action, the followed microbatch, the selection and the alternative. */
  clear() {
    for (const chart of this.charts) Object.assign(chart, {selected: null, alternative: null});
    for (const pressed of document.querySelectorAll("[aria-pressed=true]")) pressed.setAttribute("aria-pressed", "false");
    Object.assign(this, {followedMicrobatch: null, isHighlighted: null, duration: this.durationBefore ?? this.duration, durationBefore: null});
    this.setView(this.view.from, this.view.to);
    this.finder.say("");
    this.hideTip();
    this.setSelection(null);
    this.layout();
  }

  /** Highlight the actions and messages of a microbatch; null: of none. */
  follow(microbatch) {
    this.followedMicrobatch = microbatch;
    this.isHighlighted = microbatch === null ? null : (block) => block.microbatch === microbatch;
    if (microbatch !== null) {
      this.finder.say(describeMicrobatch(this.charts[0].record, microbatch));
    }
    this.redraw();
  }

  /** Draw an alternative step below the shown one, at the same scale. */
  showAlternative({text, timeline}, name = "what if") {
    const [chart] = this.charts;
    chart.alternative = {name, timeline};
    this.finder.say(text);
    this.durationBefore ??= this.duration; // restored by clear()
    this.duration = Math.max(this.durationBefore, timeline.data.makespan);
    this.layout();
  }

  /** Highlight the rank of a finding, and draw the step without it below; hide it if it was shown. */
  showFinding(chart, finding, button) {
    const shown = button.getAttribute("aria-pressed") === "true";
    this.clear();
    if (shown) return;
    button.setAttribute("aria-pressed", "true");
    finding.prepared ??= new Timeline(finding.timeline);
    const rank = finding.rank === null ? null : finding.rank;
    this.isHighlighted = rank === null ? null : (block) => block.rank === rank;
    const name = {straggler: "what if", cut: "even cut"}[finding.about] || finding.name.replace(/, predicted$/, "");
    this.showAlternative({text: `${finding.text} (drawn below each rank, at the same scale)`, timeline: finding.prepared}, name);
    this.showAll();
    chart.host.scrollIntoView({block: "nearest"});
  }

  /** Fold or pin a rank, or undo that. */
  toggle(chart, ranks, rank) {
    if (!ranks.delete(rank)) ranks.add(rank);
    this.layout();
  }

  /** Set the selection, or null, and put it into the address. */
  setSelection(selection) {
    this.selection = selection;
    this.selectionSection.replaceChildren(...(selection ? selectionPanel(this.charts[0], this) : []));
    const address = selectionToHash(selection);
    if (address !== location.hash && (address || selectionFromHash(location.hash, Infinity))) history.replaceState(null, "", address || location.pathname + location.search);
    this.redraw();
  }

  readHash() {
    const found = selectionFromHash(location.hash, this.charts[0].record.timeline.ranks.length);
    if (!found) return;
    const width = found.to - found.from;
    this.setView(found.from - width / 2, found.to + width / 2);
    this.setSelection(found);
  }

  get tipShown() { return !this.tip.hidden; }

  showTip(content, x, y) {
    this.tip.replaceChildren(content);
    this.tip.hidden = false;
    const {offsetWidth: width, offsetHeight: height} = this.tip;
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    const top = y + 16 + height > innerHeight ? y - 16 - height : y + 16;
    this.tip.style.left = `${Math.min(Math.max(left, 8), Math.max(8, innerWidth - width - 8))}px`;
    this.tip.style.top = `${Math.max(top, 8)}px`;
  }

  hideTip() { this.tip.hidden = true; }
}

const page = new Page(JSON.parse(document.getElementById("records").textContent).map((data) => new TimelineRecord(data)));
