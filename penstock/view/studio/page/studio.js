// The studio: what was chosen goes to the server as a question, its answer becomes the picture, the proof and the table.

const CHOICES = JSON.parse(document.getElementById("choices").textContent), PAUSE = 30, IN_A_ROW = 800, LOOK = 1000; // milliseconds: before a question; between what is one change; between two looks at a file

class Studio {
  constructor() {
    this.state = {
      ...CHOICES.start, stages_per_rank: null, max_in_flight: null, unit: "", loaded: null, base: null, table: null, measured: null, against: null,
      costs: structuredClone(COSTLESS), ...stateOf(location.search),
    };
    Object.assign(this, {past: [], future: [], present: this.snapshot(), latest: {}}); // states, to undo to and to redo
    this.asked = 0;
    this.proof = document.getElementById("proof");
    this.problem = document.getElementById("problem");
    this.controls = new Controls(document.getElementById("controls"), this.state, CHOICES, (what, by) => this.changed(what, by));
    this.buildEditor(document.getElementById("editor"));
    document.getElementById("waits").append(page.slots[0].table);
    addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.target.closest("input:not([type=range])")) return;
      const key = event.key.toLowerCase(), redo = key === "y" || (key === "z" && event.shiftKey);
      if (redo || key === "z") { event.preventDefault(); if (redo) this.redo(); else this.undo(); }
    });
    this.show(CHOICES.first, null);
    if (location.search) this.ask();
    if (CHOICES.opened) this.follow();
  }

  buildEditor(section) {
    const button = (id, text, click, title = "") => element("button", {type: "button", id, click, ...(title && {title})}, text);
    this.undoes = button("undo", "Undo", () => this.undo(), "Ctrl+Z");
    this.redoes = button("redo", "Redo", () => this.redo(), "Ctrl+Shift+Z");
    this.resets = button("reset", "Reset", () => this.put(this.state.base));
    this.removes = button("remove-run", "Remove run", () => {
      Object.assign(this.state, {measured: null, unit: "", costs: this.state.chosen || structuredClone(COSTLESS)});
      this.changed("costs");
    });
    this.keeps = button("keep", "Compare with this", () => this.keep(), "Keep this table, and see how the next ones differ from it");
    this.verdict = element("p", {class: "proof fails", "aria-hidden": "true"});
    const host = element("div", {class: "scroll table"});
    section.append(
      element("h3", {}, "The table"),
      element("p", {class: "muted small"}, "The order of each rank's actions. Drag one to another place, here or in the picture, or select it here and press Alt with an arrow key."),
      element("div", {class: "tools"},
        element("span", {class: "group"}, button("earlier", "← Earlier", () => this.table.shift(-1)), button("later", "Later →", () => this.table.shift(1))),
        this.undoes, this.redoes, this.resets, this.keeps, this.opener("load-csv", "Load CSV", ".csv,text/csv", (text, file) => this.load({csv: text, file})),
        button("save-csv", "Save CSV", () => this.save()), this.opener("load-run", "Load run", ".json,application/json", (text, file) => this.load({run: text, file}),
          "the timeline.json of a measured run, to lay over what is planned"), this.removes),
      host, this.verdict);
    this.table = new Table(host, {
      moved: (rank, from, to) => this.move(rank, from, to),
      chosen: (name) => {
        page.charts[0].selected = page.records[0].timeline.blocks.get(name) || null;
        page.redraw();
      },
    });
    this.picture = new Picture(page.charts[0], page, (rank, from, to) => this.table.move(rank, from, to));
    document.querySelector(".tools .hint").textContent = "Drag an action to another place, or beside one to pan; Ctrl and wheel to zoom.";
  }

  /** A button that reads a file. */
  opener(id, text, accept, read, title = "") {
    const input = element("input", {type: "file", id: `${id}-file`, accept, class: "unseen", tabindex: -1, "aria-hidden": "true", change: async () => {
      const [file] = input.files;
      if (file) read(await file.text(), file.name);
      input.value = "";
    }});
    return element("span", {}, element("button", {type: "button", id, click: () => input.click(), ...(title && {title})}, text), input);
  }

  // ---- changes

  /** The state was changed. What was before can be come back to; what one control does in a row is one change. */
  changed(what, by = null) {
    if (what === "table") Object.assign(this.state, {table: null, base: null, loaded: null});
    const at = performance.now();
    if (by === null || by !== this.latest.by || at - this.latest.at > IN_A_ROW) this.past.push(this.present);
    Object.assign(this, {latest: {by, at}, future: [], present: this.snapshot()});
    this.ask();
  }

  snapshot() { return {...this.state, costs: structuredClone(this.state.costs)}; }

  undo() { this.step(this.past, this.future); }
  redo() { this.step(this.future, this.past); }

  step(from, to) {
    if (!from.length) return;
    to.push(this.present);
    this.present = from.pop();
    Object.assign(this.state, this.present, {costs: structuredClone(this.present.costs)});
    this.latest = {};
    this.ask();
  }

  move(rank, from, to) {
    const rows = this.answer.rows.map((row) => [...row]), [cell] = rows[rank].splice(from, 1);
    rows[rank].splice(to, 0, cell);
    const {placement, name} = this.answer;
    document.getElementById("said").textContent = `${cell} is at place ${to + 1} of rank ${rank}`;
    this.answer = {...this.answer, rows};
    this.table.show(rows);
    this.put({rows, placement, name: name.replace(/( \(edited\))?$/, " (edited)")});
  }

  put(table) {
    this.state.table = table;
    this.changed("costs");
  }

  /** Hold this table, to see how what follows differs from it; or no longer. */
  keep() {
    const {schedule, ranks, microbatches, stages_per_rank, table, against} = this.state;
    this.state.against = against ? null : {...(table || {schedule, ranks, microbatches, stages_per_rank}), stages: this.answer.stages};
    this.changed("costs");
  }

  // ---- questions and answers

  question() {
    const {schedule, ranks, microbatches, stages_per_rank, table, costs, max_in_flight, unit} = this.state;
    return {...(table || {schedule, ranks, microbatches, stages_per_rank}), costs, max_in_flight, unit};
  }

  /** The same for the table that is held: at costs of the same model, whose stages are larger where it has fewer. */
  questionAgainst() {
    const {against, costs, unit} = this.state;
    return {...against, costs: {...costs, share: this.answer.stages / against.stages}, unit};
  }

  ask() {
    document.body.dataset.busy = "";
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const number = ++this.asked, answer = await this.fetch(this.question(), number);
      if (!answer) return;
      this.answer = answer;
      const other = this.state.against && (await this.fetch(this.questionAgainst(), number));
      if (number === this.asked) this.show(answer, other);
    }, PAUSE);
  }

  /** The answer to `question`, or null if it was refused or another one was asked since. */
  async fetch(question, number) {
    document.body.dataset.busy = "";
    const answer = await ask("answer", question);
    if (number !== this.asked) return null;
    delete document.body.dataset.busy;
    this.problem.hidden = !answer.error;
    this.problem.textContent = answer.error || "";
    document.querySelector(".shown").classList.toggle("stale", Boolean(answer.error));
    return answer.error ? null : answer;
  }

  async load(source) {
    clearTimeout(this.timer);
    const {costs, max_in_flight, unit, measured} = this.state, answer = await this.fetch({...source, costs, max_in_flight, unit}, ++this.asked);
    if (!answer) return;
    const {rows, placement, name, ranks, microbatches} = answer, table = {rows, placement, name};
    Object.assign(this.state, {loaded: source.run ? `${name} (run)` : name, base: table, table, ranks, microbatches}); // the next schedule is as large
    if (answer.measured) {
      const run = {record: answer.measured, ranks, microbatches, name, planned: answer.timeline.makespan};
      Object.assign(this.state, {unit: "ms", costs: answer.costs, measured: run, ...(!measured && {chosen: costs})}); // to come back to
    }
    this.changed("costs");
  }

  /** Show the file that the studio was opened with, now and whenever it has changed. */
  async follow() {
    for (let known = null; ; await new Promise((done) => setTimeout(done, LOOK))) {
      const told = await ask("opened");
      if (told.changed === known) continue;
      const {changed, error, ...source} = told;
      known = changed;
      if (!error) await this.load(source);
      else Object.assign(this.problem, {hidden: false, textContent: error});
    }
  }

  save() {
    const address = URL.createObjectURL(new Blob([this.answer.csv], {type: "text/csv"}));
    element("a", {href: address, download: `${this.answer.name.replace(/[^\w.-]+/g, "-").replace(/-$|\.csv/g, "")}.csv`}).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  show(answer, other) {
    this.answer = answer;
    this.controls.show(answer);
    this.table.show(answer.rows);
    this.table.mark(answer.proof);
    this.showProof(answer);
    this.showRun(answer);
    this.subtitle(answer);
    this.draw(answer, other);
    const {state} = this, address = addressOf(state);
    history.replaceState(null, "", (address.length < LONGEST ? address : location.pathname) + location.hash);
    this.undoes.disabled = !this.past.length;
    this.redoes.disabled = !this.future.length;
    this.resets.disabled = state.table === state.base;
    this.removes.hidden = state.unit !== "ms";
    this.keeps.textContent = state.against ? "Compare no longer" : "Compare with this";
  }

  /** What the table would gain on the ranks of the run, or why the run is not drawn beside it. */
  showRun({ranks, microbatches, name, timeline, stopped}) {
    const told = document.getElementById("run"), {measured} = this.state;
    told.hidden = !measured || !timeline || stopped;
    if (told.hidden) return;
    const time = (seconds) => new TimelineRecord({...measured.record, planned: null}).time(seconds);
    const gain = timeline.makespan / measured.planned - 1;
    told.textContent = this.beside(this.answer)
      ? `At the run's costs ${name} takes ${time(timeline.makespan)}, the run's table, ${measured.name}, ${time(measured.planned)}: ${Math.abs(gain) < 5e-4 ? "the same" : `${gain > 0 ? "+" : "−"}${percent(Math.abs(gain))}`}.`
      : `${name} takes ${time(timeline.makespan)} at the costs of the run's layers. The run had ${measured.ranks} ranks and ${measured.microbatches} microbatches, this table has ${ranks} and ${microbatches}: it is drawn alone.`;
  }

  /** The run to draw above what is planned: one of as many ranks and microbatches. */
  beside({ranks, microbatches}) {
    const {measured} = this.state;
    return measured && measured.ranks === ranks && measured.microbatches === microbatches ? measured.record : null;
  }

  showProof({proof, stopped}) {
    const more = stopped ? ". The picture shows what runs before that, and dashed what never does." : "";
    this.proof.textContent = proof.text + more;
    this.proof.classList.toggle("fails", !proof.holds);
    this.verdict.textContent = proof.text;
    this.verdict.hidden = proof.holds;
  }

  subtitle({ranks, stages, microbatches, rows}) {
    const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`, actions = rows.flat().join(" ").match(/\d[FBIW]\d/g) || [];
    document.getElementById("subtitle").textContent = [count(ranks, "rank"), count(stages, "stage"),
      count(microbatches, "microbatch", "microbatches"), count(actions.length, "action")].join(" · ");
  }

  draw({name, unit, timeline, stopped, ranks}, other) {
    const shown = document.querySelector(".shown"), measured = this.beside(this.answer);
    shown.classList.toggle("stopped", (stopped && !measured) || !timeline);
    this.picture.answer = null;
    if (!timeline) return; // the last picture stays, pale
    if (stopped) timeline.critical_path = []; // a step that never ends has none
    const record = new TimelineRecord(measured ? {...measured, planned: timeline} : {name, unit, planned: null, steps: [{label: "planned", timeline}]});
    Object.assign(page, {pulls: false, before: null}); // actions are dragged to another place here
    page.charts[0].instead = null;
    const [chart] = page.charts, all = page.view.to - page.view.from >= page.whole * (1 - 1e-9), selected = chart.selected?.text;
    chart.record = record;
    chart.hovered = null;
    chart.selected = record.timeline.blocks.get(selected) || null;
    page.records = [record];
    this.picture.show(this.answer);
    const held = other?.timeline && new TimelineRecord({name: other.name, unit, planned: null, steps: [{label: "planned", timeline: other.timeline}]});
    const planned = new TimelineRecord({name, unit, planned: null, steps: [{label: "planned", timeline}]});
    document.getElementById("against").replaceChildren(...(held ? [element("h3", {}, `Beside ${held.name}, which is drawn below each rank`), differences([held, planned])] : []));
    chart.instead = held && !measured && other.ranks === ranks ? {name: held.name, timeline: held.timeline} : null; // one lane below, not two
    page.whole = Math.max(record.makespan, this.picture.end, chart.instead ? held.makespan : 0) || 1;
    if (all) page.fit(); else page.show(page.view.from, page.view.to);
    page.fill(chart, 0);
    if (stopped && !measured) for (const number of document.querySelectorAll(".figures dd, .legend b")) number.textContent = "–";
    if (stopped && !measured) document.querySelector(".shares h3").textContent = "Where the time of all ranks went";
    chart.host.setAttribute("aria-label", chart.host.getAttribute("aria-label").replace(/^Timeline of .*?\. Arrow/, `Timeline of ${name}. Arrow`));
    page.hideTip();
    page.arrange();
  }
}

const studio = new Studio();
