// The controls: schedule, sizes, costs for all stages or for one, memory limit. Each change takes effect at once.

const COST_LABELS = {forward: "F forward", backward_input: "I to the input", backward_weight: "W to the weights", send: "send a message"};

class Controls {
  /** Controls change `state` in place, then call `onChange(change, control)`; `change` is "table" for another schedule, else "costs". */
  constructor(form, state, {families, most: limits}, onChange) {
    Object.assign(this, {form, state, families, onChange});
    form.addEventListener("submit", (event) => event.preventDefault());
    const option = ([name]) => element("option", {value: name}, name);
    this.select = element("select", {id: "schedule", change: () => this.changeTable({schedule: this.select.value})}, ...Object.entries(families).map(option));
    this.summary = element("p", {class: "muted small"});
    this.unit = element("span", {class: "muted"});
    this.sliders = {
      ranks: this.slider("ranks", "P ranks", 1, 16, 1, (value) => this.changeTable({ranks: value}), limits.ranks),
      stages_per_rank: this.slider("stages_per_rank", "V stages on each", 1, limits.stages_per_rank, 1, (value) => this.changeTable({stages_per_rank: value})),
      microbatches: this.slider("microbatches", "M microbatches", 1, 64, 1, (value) => this.changeTable({microbatches: value}), limits.microbatches),
    };
    for (const [name, text] of Object.entries(COST_LABELS)) {
      this.sliders[name] = this.slider(name, text, 0, 5, 0.1, (value) => this.setCommonCost(name, value));
    }
    this.sliders.max_in_flight = this.slider("max_in_flight", "in flight", 0, 1, 1, (value) => {
      state.max_in_flight = value || null;
      onChange("costs", "max_in_flight");
    });
    this.sliders.max_in_flight.field.placeholder = "none";
    this.stages = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Costs of single stages"});
    this.ranks = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Factors on the times of single ranks"});
    this.microbatches = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Factors on the sizes of single microbatches"});
    const {ranks, stages_per_rank: stages, microbatches, max_in_flight: memoryLimit, ...costs} = this.sliders;
    form.append(
      this.group("Schedule", element("label", {for: "schedule", class: "visually-hidden"}, "Schedule"), this.select, this.summary, ranks.line, stages.line, microbatches.line),
      this.group("Costs", this.unit, ...Object.values(costs).map(({line}) => line),
        element("details", {id: "own"}, element("summary", {}, "Costs of single stages"), this.stages,
          element("button", {type: "button", id: "same", click: () => { state.costs.stages = {}; this.costsChanged(); }}, "The same for all")),
        element("details", {id: "slow"}, element("summary", {}, "Single ranks, slower or faster"), this.ranks),
        element("details", {id: "sizes"}, element("summary", {}, "Single microbatches, larger or smaller"), this.microbatches)),
      this.group("Memory limit", memoryLimit.line));
  }

  group(title, ...children) { return element("fieldset", {}, element("legend", {}, title), ...children); }

  /** Return a slider with a field for exact values. A slider that is dragged to its end extends, up to `limit`. */
  slider(name, text, min, max, step, set, limit = max) {
    const range = element("input", {type: "range", id: name, min, max, step});
    const field = element("input", {inputmode: "decimal", "aria-label": `${text}, exactly`, title: `${min} to ${limit}`});
    const show = (value) => { field.value = value; set(value); };
    range.addEventListener("input", () => show(Number(range.value)));
    range.addEventListener("change", () => { if (range.value === range.max) range.max = Math.max(range.max, Math.min(2 * range.max, limit)); });
    field.addEventListener("input", () => { if (field.value !== "" || name === "max_in_flight") { range.value = field.value; set(parseField(field.value)); } });
    field.addEventListener("blur", () => { if (field.value === "") field.value = field.dataset.used; }); // restore the value in use
    return {range, field, limit, line: element("div", {class: "slide"}, element("label", {for: name}, text), range, field)};
  }

  setSlider(name, value) {
    const {range, field, limit} = this.sliders[name];
    if (value > Number(range.max)) range.max = name in COST_LABELS ? Number((2 * value).toPrecision(1)) : Math.min(2 * value, Math.max(limit, value));
    range.value = value || range.min;
    field.dataset.used = formatField(value);
    if (document.activeElement !== field) field.value = formatField(value);
  }

  /** Set a cost of all stages. A run's stages have their own: they are scaled so that this is their mean. */
  setCommonCost(name, value) {
    const {costs} = this.state, stages = Object.values(costs.stages);
    if (costs.measured && name !== "send" && value >= 0) {
      const mean = meanOf(stages, name);
      for (const stage of stages) stage[name] = mean ? stage[name] * value / mean : value;
    }
    costs[name] = value;
    this.costsChanged(name);
  }

  changeTable(changes) {
    Object.assign(this.state, changes);
    if ("schedule" in changes) this.state.stages_per_rank = null;
    this.onChange("table", Object.keys(changes)[0]);
  }

  costsChanged(control = null) { this.onChange("costs", control); }

  /** Update the controls to the state and to the table of an answer. */
  show({ranks, stages, microbatches}) {
    const {state, families} = this, isLoaded = state.loaded !== null, family = families[state.schedule];
    this.select.querySelector("[data-loaded]")?.remove();
    if (isLoaded) this.select.append(element("option", {value: "", "data-loaded": "", selected: ""}, state.loaded));
    this.select.value = isLoaded ? "" : state.schedule;
    this.summary.textContent = isLoaded ? `${state.base?.found ? "found by a search" : "an edited or loaded table"}; choose a schedule to replace it` : family.summary;
    this.setSlider("ranks", ranks);
    this.setSlider("microbatches", microbatches);
    this.sliders.stages_per_rank.range.min = isLoaded ? 1 : family.least;
    this.setSlider("stages_per_rank", Math.round(stages / ranks));
    for (const name of ["ranks", "microbatches", "stages_per_rank"]) {
      const {range, field} = this.sliders[name];
      range.disabled = field.disabled = isLoaded || (name === "stages_per_rank" && !family.open);
    }
    for (const name of Object.keys(COST_LABELS)) this.setSlider(name, state.costs[name]);
    this.unit.textContent = state.costs.measured
      ? "mean of the loaded stages, in milliseconds; other stages take their share of the layers; B = I + W" : "of one stage, in any unit; B = I + W";
    this.sliders.max_in_flight.range.max = Math.max(microbatches * Math.ceil(stages / ranks), state.max_in_flight || 0);
    this.setSlider("max_in_flight", state.max_in_flight ?? "");
    this.showStages(state.costs.measured ? state.costs.measured.placement.length : stages);
    this.showFactors(this.ranks, state.costs.ranks, ranks, "rank", "times as long");
    this.showFactors(this.microbatches, state.costs.microbatches, microbatches, "microbatch", "times as large");
  }

  /** Show a field for each stage and kind; an empty one takes the common cost. */
  showStages(count) {
    const {state} = this, kinds = Object.keys(COST_LABELS).slice(0, 3), key = `${count} ${state.loaded} ${state.unit}`;
    if (this.stageKey !== key) {
      this.stageKey = key;
      const field = (stage, name) => element("input", {inputmode: "decimal", "data-stage": stage, "data-cost": name,
        "aria-label": `${COST_LABELS[name]} on stage ${stage}`, input: (event) => this.setStageCost(stage, name, event.target)});
      this.stages.replaceChildren(element("table", {},
        element("thead", {}, element("tr", {}, ...["stage", "F", "I", "W"].map((head) => element("th", {scope: "col"}, head)))),
        element("tbody", {}, ...Array.from({length: count}, (_, stage) => element("tr", {}, element("th", {scope: "row"}, String(stage)),
          ...kinds.map((name) => element("td", {}, field(stage, name))))))));
    }
    for (const field of this.stages.querySelectorAll("input")) {
      const {stage, cost} = field.dataset;
      field.placeholder = formatField(state.costs[cost]);
      if (document.activeElement !== field) field.value = formatField(state.costs.stages[stage]?.[cost] ?? "");
    }
  }

  setStageCost(stage, name, field) {
    const {costs} = this.state, {stages} = costs;
    stages[stage] ??= {};
    if (field.value === "") delete stages[stage][name]; else stages[stage][name] = parseField(field.value);
    if (costs.measured) costs[name] = meanOf(Object.values(stages), name) || 0;
    this.costsChanged(`${name} of ${stage}`);
  }

  /** Show a field for the factor of each rank or microbatch (`unit`); an empty one is 1. */
  showFactors(region, factors, count, unit, meaning) {
    const field = (index) => element("input", {inputmode: "decimal", placeholder: 1, "data-index": index, "aria-label": `${unit} ${index}, ${meaning}`});
    if (region.querySelectorAll("input").length !== count) {
      region.replaceChildren(element("table", {}, element("tbody", {}, ...Array.from({length: count}, (_, index) => element("tr", {},
        element("th", {scope: "row"}, `${unit} ${index}`), element("td", {}, field(index)))))));
    }
    region.oninput = ({target: {value, dataset: {index}}}) => {
      if (value === "") delete factors[index]; else factors[index] = parseField(value);
      this.costsChanged(`${unit} ${index}`);
    };
    for (const input of region.querySelectorAll("input")) if (document.activeElement !== input) input.value = formatField(factors[input.dataset.index] ?? "");
  }
}

/** Return the number in a field; a text that is no number as it is, which the server refuses with a sentence. */
function parseField(text) { return text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text); }

function formatField(value) { return typeof value === "number" ? Number(value.toPrecision(4)) : value; }

function meanOf(stages, name) {
  const times = stages.map((stage) => stage[name]).filter((time) => typeof time === "number");
  return times.length ? times.reduce((sum, time) => sum + time, 0) / times.length : 0;
}
