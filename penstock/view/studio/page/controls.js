// What can be chosen: schedule, sizes, costs for all stages or one, the memory limit. Each change is told at once.

const COSTS = {forward: "F forward", backward_input: "I to the input", backward_weight: "W to the weights", send: "send a message"};

class Controls {
  /** `state` is changed in place; `changed(what, by)` is told "table" when the schedule is another one, else "costs", and by which control. */
  constructor(form, state, {families, most}, changed) {
    Object.assign(this, {form, state, families, changed});
    form.addEventListener("submit", (event) => event.preventDefault());
    const option = ([name]) => element("option", {value: name}, name);
    this.select = element("select", {id: "schedule", change: () => this.table({schedule: this.select.value})}, ...Object.entries(families).map(option));
    this.summary = element("p", {class: "muted small"});
    this.unit = element("span", {class: "muted"});
    this.sliders = {
      ranks: this.slider("ranks", "P ranks", 1, 16, 1, (value) => this.table({ranks: value}), most.ranks),
      stages_per_rank: this.slider("stages_per_rank", "V stages on each", 1, most.stages_per_rank, 1, (value) => this.table({stages_per_rank: value})),
      microbatches: this.slider("microbatches", "M microbatches", 1, 64, 1, (value) => this.table({microbatches: value}), most.microbatches),
    };
    for (const [name, text] of Object.entries(COSTS)) {
      this.sliders[name] = this.slider(name, text, 0, 5, 0.1, (value) => this.priceAll(name, value));
    }
    this.sliders.max_in_flight = this.slider("max_in_flight", "in flight", 0, 1, 1, (value) => {
      state.max_in_flight = value || null;
      changed("costs", "max_in_flight");
    });
    this.sliders.max_in_flight.field.placeholder = "none";
    this.stages = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Costs of single stages"});
    this.ranks = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "How many times as long single ranks take"});
    this.microbatches = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "How many times as large single microbatches are"});
    const {ranks, stages_per_rank: stages, microbatches, max_in_flight: limit, ...costs} = this.sliders;
    form.append(
      this.group("Schedule", element("label", {for: "schedule", class: "visually-hidden"}, "Schedule"), this.select, this.summary, ranks.line, stages.line, microbatches.line),
      this.group("Costs", this.unit, ...Object.values(costs).map(({line}) => line),
        element("details", {id: "own"}, element("summary", {}, "Costs of single stages"), this.stages,
          element("button", {type: "button", id: "same", click: () => { state.costs.stages = {}; this.price(); }}, "The same for all")),
        element("details", {id: "slow"}, element("summary", {}, "Single ranks, slower or faster"), this.ranks),
        element("details", {id: "sizes"}, element("summary", {}, "Single microbatches, larger or smaller"), this.microbatches)),
      this.group("Memory limit", limit.line));
  }

  group(title, ...children) { return element("fieldset", {}, element("legend", {}, title), ...children); }

  /** A slider with a field for exact numbers beside it; one that is pulled to its end grows up to `most`. */
  slider(name, text, min, max, step, set, most = max) {
    const range = element("input", {type: "range", id: name, min, max, step});
    const field = element("input", {inputmode: "decimal", "aria-label": `${text}, exactly`, title: `${min} to ${most}`});
    const show = (value) => { field.value = value; set(value); };
    range.addEventListener("input", () => show(Number(range.value)));
    range.addEventListener("change", () => { if (range.value === range.max) range.max = Math.max(range.max, Math.min(2 * range.max, most)); });
    field.addEventListener("input", () => { if (field.value !== "" || name === "max_in_flight") { range.value = field.value; set(typed(field.value)); } });
    field.addEventListener("blur", () => { if (field.value === "") field.value = field.dataset.used; }); // no field is empty that is used
    return {range, field, most, line: element("div", {class: "slide"}, element("label", {for: name}, text), range, field)};
  }

  put(name, value) {
    const {range, field, most} = this.sliders[name];
    if (value > Number(range.max)) range.max = name in COSTS ? Number((2 * value).toPrecision(1)) : Math.min(2 * value, Math.max(most, value));
    range.value = value || range.min;
    field.dataset.used = readable(value);
    if (document.activeElement !== field) field.value = readable(value);
  }

  /** What holds for all stages; of a run, whose stages each have their own, the mean: they change with it. */
  priceAll(name, value) {
    const {costs} = this.state, own = Object.values(costs.stages);
    if (costs.measured && name !== "send" && value >= 0) {
      const mean = meanOf(own, name);
      for (const stage of own) stage[name] = mean ? stage[name] * value / mean : value;
    }
    costs[name] = value;
    this.price(name);
  }

  table(changes) {
    Object.assign(this.state, changes);
    if ("schedule" in changes) this.state.stages_per_rank = null;
    this.changed("table", Object.keys(changes)[0]);
  }

  price(by = null) { this.changed("costs", by); }

  /** Show what the state is, once the table of `answer` is known. */
  show({ranks, stages, microbatches}) {
    const {state, families} = this, loaded = state.loaded !== null, family = families[state.schedule];
    this.select.querySelector("[data-loaded]")?.remove();
    if (loaded) this.select.append(element("option", {value: "", "data-loaded": "", selected: ""}, state.loaded));
    this.select.value = loaded ? "" : state.schedule;
    this.summary.textContent = loaded ? `${state.base?.found ? "found by a search" : "a table of its own"}; choose a schedule to leave it` : family.summary;
    this.put("ranks", ranks);
    this.put("microbatches", microbatches);
    this.sliders.stages_per_rank.range.min = loaded ? 1 : family.least;
    this.put("stages_per_rank", Math.round(stages / ranks));
    for (const name of ["ranks", "microbatches", "stages_per_rank"]) {
      const {range, field} = this.sliders[name];
      range.disabled = field.disabled = loaded || (name === "stages_per_rank" && !family.open);
    }
    for (const name of Object.keys(COSTS)) this.put(name, state.costs[name]);
    this.unit.textContent = state.costs.measured
      ? "of the loaded stages, their mean, in milliseconds; other stages take their layers' part; B = I + W" : "of one stage, in any unit; B = I + W";
    this.sliders.max_in_flight.range.max = Math.max(microbatches * Math.ceil(stages / ranks), state.max_in_flight || 0);
    this.put("max_in_flight", state.max_in_flight ?? "");
    this.showStages(state.costs.measured ? state.costs.measured.placement.length : stages);
    this.showFactors(this.ranks, state.costs.ranks, ranks, "rank", "times as long");
    this.showFactors(this.microbatches, state.costs.microbatches, microbatches, "microbatch", "times as large");
  }

  /** A field for each stage and kind; an empty one takes what holds for all. */
  showStages(count) {
    const {state} = this, kinds = Object.keys(COSTS).slice(0, 3), key = `${count} ${state.loaded} ${state.unit}`;
    if (this.stageKey !== key) {
      this.stageKey = key;
      const field = (stage, name) => element("input", {inputmode: "decimal", "data-stage": stage, "data-cost": name,
        "aria-label": `${COSTS[name]} on stage ${stage}`, input: (event) => this.own(stage, name, event.target)});
      this.stages.replaceChildren(element("table", {},
        element("thead", {}, element("tr", {}, ...["stage", "F", "I", "W"].map((head) => element("th", {scope: "col"}, head)))),
        element("tbody", {}, ...Array.from({length: count}, (_, stage) => element("tr", {}, element("th", {scope: "row"}, String(stage)),
          ...kinds.map((name) => element("td", {}, field(stage, name))))))));
    }
    for (const field of this.stages.querySelectorAll("input")) {
      const {stage, cost} = field.dataset;
      field.placeholder = readable(state.costs[cost]);
      if (document.activeElement !== field) field.value = readable(state.costs.stages[stage]?.[cost] ?? "");
    }
  }

  own(stage, name, field) {
    const {costs} = this.state, own = costs.stages;
    own[stage] ??= {};
    if (field.value === "") delete own[stage][name]; else own[stage][name] = typed(field.value);
    if (costs.measured) costs[name] = meanOf(Object.values(own), name) || 0;
    this.price(`${name} of ${stage}`);
  }

  /** A field for each rank or microbatch, `unit`: how many times the costs its actions take; an empty one is 1. */
  showFactors(region, factors, count, unit, meaning) {
    const field = (index) => element("input", {inputmode: "decimal", placeholder: 1, "data-index": index, "aria-label": `${unit} ${index}, ${meaning}`});
    if (region.querySelectorAll("input").length !== count) {
      region.replaceChildren(element("table", {}, element("tbody", {}, ...Array.from({length: count}, (_, index) => element("tr", {},
        element("th", {scope: "row"}, `${unit} ${index}`), element("td", {}, field(index)))))));
    }
    region.oninput = ({target: {value, dataset: {index}}}) => {
      if (value === "") delete factors[index]; else factors[index] = typed(value);
      this.price(`${unit} ${index}`);
    };
    for (const input of region.querySelectorAll("input")) if (document.activeElement !== input) input.value = readable(factors[input.dataset.index] ?? "");
  }
}

/** What stands in a field: a number, or the text as it is, which the server answers with a sentence. */
function typed(text) { return text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text); }

function readable(value) { return typeof value === "number" ? Number(value.toPrecision(4)) : value; }

function meanOf(stages, name) {
  const times = stages.map((stage) => stage[name]).filter((time) => typeof time === "number");
  return times.length ? times.reduce((sum, time) => sum + time, 0) / times.length : 0;
}
