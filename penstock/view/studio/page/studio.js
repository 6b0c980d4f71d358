// The studio: sends the chosen table and costs as a question, and shows the answer as chart, proof and table.

const CHOICES = JSON.parse(document.getElementById("choices").textContent);
const DEBOUNCE_MS = 30; // without a change, before a question is sent
const SAME_CHANGE_MS = 800; // changes by one control that follow sooner are undone together
const POLL_MS = 1000; // between looks at the opened file

class Studio {
  constructor() {
    this.state = {
      ...CHOICES.start, stages_per_rank: null, max_in_flight: null, unit: "", loaded: null, base: null, table: null, measured: null, against: null,
      costs: structuredClone(DEFAULT_COSTS), ...stateFromAddress(location.search),
    };
    Object.assign(this, {past: [], future: [], present: this.snapshot(), latest: {}}); // states for undo and redo
    this.problem = document.getElementById("problem");
    this.progress = new Progress(document.getElementById("working"));
    this.controls = new Controls(document.getElementById("controls"), this.state, CHOICES, (change, control) => this.changed(change, control));
    this.editor = new Editor(document.getElementById("editor"), this);
    this.table = this.editor.table;
    document.getElementById("waits").append(page.slots[0].table);
    this.answerView = new AnswerView((rank, from, to) => this.table.move(rank, from, to));
    this.chartEditor = this.answerView.chartEditor;
    addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.target.closest("input:not([type=range])")) return;
      const key = event.key.toLowerCase(), redo = key === "y" || (key === "z" && event.shiftKey);
      if (redo || key === "z") { event.preventDefault(); if (redo) this.redo(); else this.undo(); }
    });
    this.show(CHOICES.first, null);
    if (location.search) this.ask();
    if (CHOICES.opened) this.followFile();
  }

  // ---- changes

  /** Record a change of the state for undo, and ask anew. `change`: "table" or "costs"; `control`: what made it, or null. */
  changed(change, control = null) {
    if (change === "table") Object.assign(this.state, {table: null, base: null, loaded: null});
    const time = performance.now();
    if (control === null || control !== this.latest.control || time - this.latest.time > SAME_CHANGE_MS) this.past.push(this.present);
    Object.assign(this, {latest: {control, time}, future: [], present: this.snapshot()});
    this.ask();
  }

  snapshot() { return {...this.state, costs: structuredClone(this.state.costs)}; }

  undo() { this.restore(this.past, this.future); }
  redo() { this.restore(this.future, this.past); }

  restore(from, to) {
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
    document.getElementById("announcement").textContent = `${cell} is at place ${to + 1} of rank ${rank}`;
    this.answer = {...this.answer, rows};
    this.table.show(rows);
    this.setTable({rows, placement, name: name.replace(/( \(edited\))?$/, " (edited)")});
  }

  setTable(table) {
    this.state.table = table;
    this.changed("costs");
  }

  /** Compare later tables with the shown one, or stop comparing. */
  toggleComparison() {
    this.state.against = this.state.against ? null : this.shownTable();
    this.changed("costs");
  }

  /** Return the shown table, to compare others with. */
  shownTable() {
    const {schedule, ranks, microbatches, stages_per_rank, table} = this.state;
    return {...(table || {schedule, ranks, microbatches, stages_per_rank}), stages: this.answer.stages};
  }

  removeRun() {
    Object.assign(this.state, {measured: null, unit: "", costs: this.state.costsBeforeRun || structuredClone(DEFAULT_COSTS)});
    this.changed("costs");
  }

  // ---- questions and answers

  question() {
    const {schedule, ranks, microbatches, stages_per_rank, table, costs, max_in_flight, unit} = this.state;
    return {...(table || {schedule, ranks, microbatches, stages_per_rank}), costs, max_in_flight, unit};
  }

  /** Return the question for the table to compare with, at costs of the same model: fewer stages are larger. */
  comparisonQuestion(stages) {
    const {against, costs, unit} = this.state;
    return {...against, costs: {...costs, share: stages / against.stages}, unit};
  }

  /** Send the question once nothing has changed for a moment; stop earlier computations. */
  ask() {
    const signal = this.startComputation("Computing", () => (this.past.length ? this.undo() : this.endComputation()));
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const answer = await this.fetch(this.question(), signal);
      if (!answer) return;
      const comparison = this.state.against && (await this.fetch(this.comparisonQuestion(answer.stages), signal));
      if (signal.aborted) return;
      this.show(answer, comparison);
      this.endComputation();
    }, DEBOUNCE_MS);
  }

  /** Stop the running computation, and start another. Returns its AbortSignal. `stop` is called by the button. */
  startComputation(name, stop) {
    clearTimeout(this.timer);
    this.abortController?.abort();
    this.abortController = new AbortController();
    document.body.dataset.busy = "";
    this.progress.start(name, stop);
    return this.abortController.signal;
  }

  endComputation() {
    this.abortController.abort();
    this.progress.end();
    delete document.body.dataset.busy;
  }

  /** Return the answer to `question`, or null if it is refused or aborted. */
  async fetch(question, signal) {
    const onProgress = (data) => this.progress.update(data, timeFormatter(this.answer.unit)(data.makespan));
    const answer = await ask("answer", question, {signal, onProgress});
    if (signal.aborted) return null;
    this.problem.hidden = !answer.error;
    this.problem.textContent = answer.error || "";
    document.querySelector(".shown").classList.toggle("stale", Boolean(answer.error));
    if (!answer.error) return answer;
    this.endComputation();
    return null;
  }

  async load(source) {
    const {costs, max_in_flight, unit} = this.state;
    const answer = await this.fetch({costs, max_in_flight, unit, ...source}, this.startComputation(`Reading ${source.file || "the file"}`, () => this.endComputation()));
    if (!answer) return;
    const {rows, placement, name, ranks, microbatches} = answer, table = {rows, placement, name};
    Object.assign(this.state, {loaded: source.run ? `${name} (${answer.source})` : name, base: table, table, ranks, microbatches}); // the controls keep this size
    if (answer.measured) {
      const run = {record: answer.measured, source: answer.source, ranks, microbatches, name, predicted: answer.timeline.makespan};
      Object.assign(this.state, {unit: "ms", costs: answer.costs, measured: run, ...(unit !== "ms" && {costsBeforeRun: costs})}); // restored when the run is removed
    }
    this.changed("costs");
  }

  /** Search for a better table in the memory limit, or else in this table's memory, and compare it with this one. */
  async improve() {
    const {answer, state} = this, before = answer.proof.holds ? answer.timeline.makespan : null;
    const better = await this.fetch({...this.question(), better: true}, this.startComputation("Searching", () => this.endComputation()));
    if (!better) return;
    const {rows, placement, name} = better, found = {...better.found, makespan: better.timeline.makespan, before};
    if (before !== null && found.makespan >= before * (1 - 1e-9)) {
      this.answerView.showFound({...answer, found}, state.max_in_flight);
      this.endComputation();
      return;
    }
    Object.assign(state, {against: this.shownTable(), loaded: name, base: {rows, placement, name, found}});
    this.setTable(state.base);
  }

  /** Show the file that the studio was opened with, now and after each of its changes. */
  async followFile() {
    for (let version = null; ; await new Promise((done) => setTimeout(done, POLL_MS))) {
      const {changed, error, ...source} = await ask("opened");
      if (changed === version) continue;
      version = changed;
      if (!error) await this.load(source);
      else Object.assign(this.problem, {hidden: false, textContent: error});
    }
  }

  show(answer, comparison) {
    const {state} = this, address = addressFromState(state);
    this.answer = answer;
    this.controls.show(answer);
    this.editor.show(answer, this);
    this.answerView.show({...answer, found: state.table?.found}, comparison, state);
    history.replaceState(null, "", (address.length < MAX_ADDRESS_CHARACTERS ? address : location.pathname) + location.hash);
  }
}

const studio = new Studio();
