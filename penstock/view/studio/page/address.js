// The state of the studio in the address: a link restores schedule, costs, edits and comparison.

const DEFAULT_COSTS = {forward: 1, backward_input: 1, backward_weight: 1, send: 0, stages: {}, ranks: {}, microbatches: {}};
const MAX_ADDRESS_CHARACTERS = 60000;

/** Return the query of the address for `state`: without a measured run, but with its costs. */
function addressFromState({schedule, ranks, microbatches, stages_per_rank, max_in_flight, unit, costs, table, against}) {
  const query = new URLSearchParams(), set = (name, value) => { if (value !== null && value !== "") query.set(name, value); };
  if (table) for (const [name, value] of Object.entries({name: table.name, rows: packRows(table.rows), placement: table.placement.join(".")})) set(name, value);
  else for (const [name, value] of Object.entries({schedule, ranks, microbatches, stages_per_rank})) set(name, value);
  set("max_in_flight", max_in_flight);
  set("unit", unit);
  if (JSON.stringify(costs) !== JSON.stringify(DEFAULT_COSTS)) set("costs", JSON.stringify(costs));
  if (against) set("against", JSON.stringify(against));
  return `?${query}`;
}

/** Return the values of the state that an address has; {} if it cannot be read. */
function stateFromAddress(address) {
  const query = new URLSearchParams(address), state = {}, number = (text) => (text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text));
  try {
    if (query.has("schedule")) state.schedule = query.get("schedule");
    if (query.has("unit")) state.unit = query.get("unit");
    for (const name of ["ranks", "microbatches", "stages_per_rank", "max_in_flight"]) if (query.has(name)) state[name] = number(query.get(name));
    if (query.has("costs")) state.costs = {...structuredClone(DEFAULT_COSTS), ...JSON.parse(query.get("costs"))};
    if (query.has("against")) state.against = JSON.parse(query.get("against"));
    if (query.has("rows")) {
      state.table = {name: query.get("name") || "table", rows: unpackRows(query.get("rows")), placement: query.get("placement").split(".").map(Number)};
      Object.assign(state, {base: state.table, loaded: state.table.name});
    }
    return state;
  } catch {
    return {};
  }
}

// Rows are joined by `_`, cells by `.`, the two actions of an overlapped pair by `~`. A cell begins with a stage and a letter:
// an action, of a slice `0F1.2`, or the mark of a frozen stage, `0FROZEN`, or of a teacher's first stage, `4TEACHER` or
// `4TEACHER_AHEAD`, here without its `_`.

function packRows(rows) { return rows.map((row) => row.map((cell) => (cell.match(/\d+(?:FROZEN|TEACHER(?:_AHEAD)?|[FBIW]\d+(?:\.\d+)?)/g) || []).join("~").replace("_", "")).join(".")).join("_"); }

function unpackRows(text) {
  const cell = (name) => (name.includes("~") ? `(${name.replace("~", ";")})OVERLAP_F_B` : name.replace("TEACHERAHEAD", "TEACHER_AHEAD"));
  return text.split("_").map((row) => row.split(/\.(?=\d+[A-Z])/).filter(Boolean).map(cell));
}
