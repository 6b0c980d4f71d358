// The studio: what was chosen goes to the server as a question, its answer becomes the picture, the proof and the table.

const CHOICES = JSON.parse(document.getElementById("choices").textContent), PAUSE = 30; // milliseconds, before a question

class Studio {
  constructor() {
    this.state = {
      ...CHOICES.start, stages_per_rank: null, max_in_flight: null, unit: "", loaded: null, base: null, table: null, measured: null,
      costs: {forward: 1, backward_input: 1, backward_weight: 1, send: 0, stages: {}},
    };
    this.before = []; // tables, to undo to
    this.asked = 0;
    this.proof = document.getElementById("proof");
    this.problem = document.getElementById("problem");
    this.controls = new Controls(document.getElementById("controls"), this.state, CHOICES, (what) => this.changed(what));
    this.buildEditor(document.getElementById("editor"));
    document.getElementById("waits").append(page.slots[0].table);
    addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key === "z" && !event.target.closest("input")) { event.preventDefault(); this.undo(); }
    });
    this.show(CHOICES.first);
  }

  buildEditor(section) {
    const button = (id, text, click, title = "") => element("button", {type: "button", id, click, ...(title && {title})}, text);
    this.undoes = button("undo", "Undo", () => this.undo(), "Ctrl+Z");
    this.resets = button("reset", "Reset", () => this.put(this.state.base, []));
    this.removes = button("remove-run", "Remove run", () => {
      Object.assign(this.state, {measured: null, unit: "", costs: this.chosen});
      this.ask();
    });
    this.verdict = element("p", {class: "proof fails", "aria-hidden": "true"});
    const host = element("div", {class: "scroll table"});
    section.append(
      element("h3", {}, "The table"),
      element("p", {class: "muted small"}, "The order of each rank's actions. Drag one to another place, here or in the picture, or select it here and press Alt with an arrow key."),
      element("div", {class: "tools"},
        element("span", {class: "group"}, button("earlier", "← Earlier", () => this.table.shift(-1)), button("later", "Later →", () => this.table.shift(1))),
        this.undoes, this.resets, this.opener("load-csv", "Load CSV", ".csv,text/csv", (text, file) => this.load({csv: text, file})),
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

  changed(what) {
    if (what === "table") {
      Object.assign(this.state, {table: null, base: null, loaded: null});
      this.before = [];
    }
    this.ask();
  }

  move(rank, from, to) {
    const rows = this.answer.rows.map((row) => [...row]), [cell] = rows[rank].splice(from, 1);
    rows[rank].splice(to, 0, cell);
    const {placement, name} = this.answer;
    document.getElementById("said").textContent = `${cell} is at place ${to + 1} of rank ${rank}`;
    this.answer = {...this.answer, rows};
    this.table.show(rows);
    this.put({rows, placement, name: name.replace(/( \(edited\))?$/, " (edited)")}, [...this.before, this.state.table]);
  }

  undo() {
    if (this.before.length) this.put(this.before.at(-1), this.before.slice(0, -1));
  }

  put(table, before) {
    this.state.table = table;
    this.before = before;
    this.ask();
  }

  // ---- questions and answers

  question() {
    const {schedule, ranks, microbatches, stages_per_rank, table, costs, max_in_flight, unit} = this.state;
    return {...(table || {schedule, ranks, microbatches, stages_per_rank}), costs, max_in_flight, unit};
  }

  ask() {
    document.body.dataset.busy = "";
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const answer = await this.fetch(this.question());
      if (answer) this.show(answer);
    }, PAUSE);
  }

  /** The answer to `question`, or null if it was refused or another one was asked since. */
  async fetch(question) {
    const number = ++this.asked;
    document.body.dataset.busy = "";
    let answer;
    try {
      const response = await fetch("/answer", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(question)});
      answer = response.headers.get("Content-Type").startsWith("application/json") ? await response.json() : {error: await response.text()};
    } catch {
      answer = {error: "The studio does not answer: is `penstock studio` still running?"};
    }
    if (number !== this.asked) return null;
    delete document.body.dataset.busy;
    this.problem.hidden = !answer.error;
    this.problem.textContent = answer.error || "";
    document.querySelector(".shown").classList.toggle("stale", Boolean(answer.error));
    return answer.error ? null : answer;
  }

  async load(source) {
    clearTimeout(this.timer);
    const {costs, max_in_flight, unit} = this.state, answer = await this.fetch({...source, costs, max_in_flight, unit});
    if (!answer) return;
    const {rows, placement, name} = answer, table = {rows, placement, name};
    Object.assign(this.state, {loaded: source.run ? `${name} (run)` : name, base: table, table});
    if (answer.measured && !this.state.measured) this.chosen = this.state.costs; // to come back to
    if (answer.measured) Object.assign(this.state, {unit: "ms", costs: answer.costs, measured: answer.measured});
    this.before = [];
    this.show(answer);
  }

  save() {
    const address = URL.createObjectURL(new Blob([this.answer.csv], {type: "text/csv"}));
    element("a", {href: address, download: `${this.answer.name.replace(/[^\w.-]+/g, "-").replace(/-$|\.csv/g, "")}.csv`}).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  show(answer) {
    this.answer = answer;
    this.controls.show(answer);
    this.table.show(answer.rows);
    this.table.mark(answer.proof);
    this.showProof(answer);
    this.subtitle(answer);
    this.draw(answer);
    this.undoes.disabled = this.before.length === 0;
    this.resets.disabled = this.before.length === 0;
    this.removes.hidden = !this.state.measured;
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

  draw({name, unit, timeline, stopped}) {
    const shown = document.querySelector(".shown"), {measured} = this.state;
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
    page.whole = Math.max(record.makespan, this.picture.end) || 1;
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
