// The studio: what was chosen goes to the server as a question, its answer becomes the picture, the proof and the table.

const CHOICES = JSON.parse(document.getElementById("choices").textContent), PAUSE = 30, IN_A_ROW = 800, LOOK = 1000; // milliseconds: before a question; between what is one change; between two looks at a file

class Studio {
  constructor() {
    this.state = {
      ...CHOICES.start, stages_per_rank: null, max_in_flight: null, unit: "", loaded: null, base: null, table: null, measured: null, against: null,
      costs: structuredClone(COSTLESS), ...stateOf(location.search),
    };
    Object.assign(this, {past: [], future: [], present: this.snapshot(), latest: {}}); // states, to undo to and to redo
    this.problem = document.getElementById("problem");
    this.working = new Working(document.getElementById("working"));
    this.controls = new Controls(document.getElementById("controls"), this.state, CHOICES, (what, by) => this.changed(what, by));
    this.editor = new Editor(document.getElementById("editor"), this);
    this.table = this.editor.table;
    document.getElementById("waits").append(page.slots[0].table);
    this.showing = new Showing((rank, from, to) => this.table.move(rank, from, to));
    this.picture = this.showing.picture;
    addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.target.closest("input:not([type=range])")) return;
      const key = event.key.toLowerCase(), redo = key === "y" || (key === "z" && event.shiftKey);
      if (redo || key === "z") { event.preventDefault(); if (redo) this.redo(); else this.undo(); }
    });
    this.show(CHOICES.first, null);
    if (location.search) this.ask();
    if (CHOICES.opened) this.follow();
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
    document.getElementById("announcement").textContent = `${cell} is at place ${to + 1} of rank ${rank}`;
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
    this.state.against = this.state.against ? null : this.held();
    this.changed("costs");
  }

  /** The table that is shown, to be held against others. */
  held() {
    const {schedule, ranks, microbatches, stages_per_rank, table} = this.state;
    return {...(table || {schedule, ranks, microbatches, stages_per_rank}), stages: this.answer.stages};
  }

  removeRun() {
    Object.assign(this.state, {measured: null, unit: "", costs: this.state.chosen || structuredClone(COSTLESS)});
    this.changed("costs");
  }

  // ---- questions and answers

  question() {
    const {schedule, ranks, microbatches, stages_per_rank, table, costs, max_in_flight, unit} = this.state;
    return {...(table || {schedule, ranks, microbatches, stages_per_rank}), costs, max_in_flight, unit};
  }

  /** The same for the table that is held: at costs of the same model, whose stages are larger where it has fewer. */
  questionAgainst(stages) {
    const {against, costs, unit} = this.state;
    return {...against, costs: {...costs, share: stages / against.stages}, unit};
  }

  /** Ask what the state is, once nothing has changed for a moment; whatever is computed for an older one is stopped. */
  ask() {
    const signal = this.begin("Computing", () => (this.past.length ? this.undo() : this.idle()));
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const answer = await this.fetch(this.question(), signal);
      if (!answer) return;
      const other = this.state.against && (await this.fetch(this.questionAgainst(answer.stages), signal));
      if (signal.aborted) return;
      this.show(answer, other);
      this.idle();
    }, PAUSE);
  }

  /** Stop what is computed; what is asked from now on is for another purpose. */
  begin(what, stop) {
    clearTimeout(this.timer);
    this.asking?.abort();
    this.asking = new AbortController();
    document.body.dataset.busy = "";
    this.working.begin(what, stop);
    return this.asking.signal;
  }

  idle() {
    this.asking.abort();
    this.working.end();
    delete document.body.dataset.busy;
  }

  /** The answer to `question`, or null if it was refused or nobody waits for it any more. */
  async fetch(question, signal) {
    const told = (said) => this.working.hear(said, timesIn(this.answer.unit)(said.makespan));
    const answer = await ask("answer", question, {signal, told});
    if (signal.aborted) return null;
    this.problem.hidden = !answer.error;
    this.problem.textContent = answer.error || "";
    document.querySelector(".shown").classList.toggle("stale", Boolean(answer.error));
    if (!answer.error) return answer;
    this.idle();
    return null;
  }

  async load(source) {
    const {costs, max_in_flight, unit} = this.state;
    const answer = await this.fetch({costs, max_in_flight, unit, ...source}, this.begin(`Reading ${source.file || "the file"}`, () => this.idle()));
    if (!answer) return;
    const {rows, placement, name, ranks, microbatches} = answer, table = {rows, placement, name};
    Object.assign(this.state, {loaded: source.run ? `${name} (${answer.source})` : name, base: table, table, ranks, microbatches}); // the next schedule is as large
    if (answer.measured) {
      const run = {record: answer.measured, source: answer.source, ranks, microbatches, name, planned: answer.timeline.makespan};
      Object.assign(this.state, {unit: "ms", costs: answer.costs, measured: run, ...(unit !== "ms" && {chosen: costs})}); // to come back to
    }
    this.changed("costs");
  }

  /** Search for a better table within the memory limit, else in the memory that this one takes, and hold it against this one. */
  async improve() {
    const {answer, state} = this, before = answer.proof.holds ? answer.timeline.makespan : null;
    const better = await this.fetch({...this.question(), better: true}, this.begin("Searching", () => this.idle()));
    if (!better) return;
    const {rows, placement, name} = better, found = {...better.found, makespan: better.timeline.makespan, before};
    if (before !== null && found.makespan >= before * (1 - 1e-9)) {
      this.showing.showFound({...answer, found}, state.max_in_flight);
      this.idle();
      return;
    }
    Object.assign(state, {against: this.held(), loaded: name, base: {rows, placement, name, found}});
    this.put(state.base);
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

  show(answer, other) {
    const {state} = this, address = addressOf(state);
    this.answer = answer;
    this.controls.show(answer);
    this.editor.show(answer, this);
    this.showing.show({...answer, found: state.table?.found}, other, state);
    history.replaceState(null, "", (address.length < LONGEST ? address : location.pathname) + location.hash);
  }
}

const studio = new Studio();
