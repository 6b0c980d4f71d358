// The state of the studio as the address says it: a link opens what was chosen, priced, edited and compared.

const COSTLESS = {forward: 1, backward_input: 1, backward_weight: 1, send: 0, stages: {}, ranks: {}, microbatches: {}};
const LONGEST = 60000; // characters of an address

/** What the address says of `state`; a measured run is none of it, but what its actions cost is. */
function addressOf({schedule, ranks, microbatches, stages_per_rank, max_in_flight, unit, costs, table, against}) {
  const said = new URLSearchParams(), say = (name, value) => { if (value !== null && value !== "") said.set(name, value); };
  if (table) for (const [name, value] of Object.entries({name: table.name, rows: packed(table.rows), placement: table.placement.join(".")})) say(name, value);
  else for (const [name, value] of Object.entries({schedule, ranks, microbatches, stages_per_rank})) say(name, value);
  say("max_in_flight", max_in_flight);
  say("unit", unit);
  if (JSON.stringify(costs) !== JSON.stringify(COSTLESS)) say("costs", JSON.stringify(costs));
  if (against) say("against", JSON.stringify(against));
  return `?${said}`;
}

/** What an address says: names and values to put into the state, none where it says nothing that can be read. */
function stateOf(address) {
  const said = new URLSearchParams(address), found = {}, number = (text) => (text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text));
  try {
    if (said.has("schedule")) found.schedule = said.get("schedule");
    if (said.has("unit")) found.unit = said.get("unit");
    for (const name of ["ranks", "microbatches", "stages_per_rank", "max_in_flight"]) if (said.has(name)) found[name] = number(said.get(name));
    if (said.has("costs")) found.costs = {...structuredClone(COSTLESS), ...JSON.parse(said.get("costs"))};
    if (said.has("against")) found.against = JSON.parse(said.get("against"));
    if (said.has("rows")) {
      found.table = {name: said.get("name") || "table", rows: unpacked(said.get("rows")), placement: said.get("placement").split(".").map(Number)};
      Object.assign(found, {base: found.table, loaded: found.table.name});
    }
    return found;
  } catch {
    return {};
  }
}

// A row for each rank, a dot between two cells; a pair that may overlap is joined.

function packed(rows) { return rows.map((row) => row.map((cell) => (cell.match(/\d+[FBIW]\d+(?:\.\d+)?/g) || []).join("~")).join(".")).join("_"); }

function unpacked(text) {
  const cell = (name) => (name.includes("~") ? `(${name.replace("~", ";")})OVERLAP_F_B` : name);
  return text.split("_").map((row) => row.split(".").filter(Boolean).map(cell));
}
