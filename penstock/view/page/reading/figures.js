// The step in numbers: figures, where the time went, what the critical path is made of, the verdict.

const IDLE = "the share of the time of all ranks in which they ran no action: what the causes add up to";
const BUBBLE = "the idle share of the busiest rank: what waiting would leave if every rank had as much work as that one";
const BETWEEN = "from the end of the step before to the beginning of this one: the optimizer, the next batch, what else the loop does";

function figures(record) {
  const {data} = record.timeline, planned = record.planned && record.planned.data;
  const beside = (value) => (planned ? [element("dd", {class: "beside"}, `planned ${value(planned)}`)] : []);
  const figure = (term, value, title = "") => element("div", title ? {title} : {}, element("dt", {}, term), element("dd", {}, value(data)), ...beside(value));
  return element("dl", {class: "figures"},
    figure("makespan", (each) => record.time(each.makespan)),
    figure("idle, of all ranks' time", (each) => percent(each.idle_share), IDLE),
    figure("bubble, idle of the busiest rank", (each) => percent(each.bubble), BUBBLE),
    figure("busiest rank", busiest),
    figure("in flight, most at once", (each) => counts(each.peak_in_flight)),
    ...(data.memory_unit ? [figure("memory of activations, at most", (each) => amount(Math.max(...each.peak_memory), each.memory_unit || "activations"))] : []),
    ...(Math.max(0, ...data.between) ? [between(record)] : []));
}

function busiest({busy}) {
  const most = Math.max(...busy);
  return busy.length > 1 && most - Math.min(...busy) <= 1e-6 * most ? "all alike" : `rank ${busy.indexOf(most)}`;
}

/** For how long the ranks were at something else before the step. */
function between(record) {
  const times = record.timeline.data.between, most = Math.max(...times), least = Math.min(...times);
  return element("div", {title: BETWEEN},
    element("dt", {}, "between steps, before this one"), element("dd", {}, record.time(most)),
    ...(least < most ? [element("dd", {class: "beside"}, `at least ${record.time(least)}`)] : []));
}

/** The share of the ranks' time, from the end of one step to the end of the next, that lay before the step. */
function betweenShare({data}) {
  const apart = data.between.reduce((sum, time) => sum + time, 0);
  return apart / (apart + data.ranks.length * data.makespan) || 0;
}

/** Busy shares by kind; the time of a pair counts half for each of its two. */
function kindShares({blocks, data}) {
  if (data.kinds) return Object.entries(data.kinds);
  const total = data.ranks.length * data.makespan || 1, shares = {};
  for (const {kind, start, end, half} of blocks.values()) {
    shares[kind] = (shares[kind] || 0) + ((end - start) * (half === null ? 1 : 0.5)) / total;
  }
  return Object.keys(KINDS).filter((kind) => kind in shares).map((kind) => [kind, shares[kind]]);
}

function busyShare(timeline) { return kindShares(timeline).reduce((sum, [, share]) => sum + share, 0); }

function piece(paint, share, title) {
  const part = element("i", {class: `paint-${paint}`, title});
  part.style.flex = `${share} 0 0`;
  return part;
}

/** Where the time of all ranks went, as bars as long as the steps; `whole` is the time of the longest one, if others stand beside. */
function shares(record, whole = 0) {
  const {timeline} = record, bars = [[record.kindOfTimes, timeline, ""]];
  if (record.planned) bars.push(["planned", record.planned, " thin"]);
  const longest = Math.max(whole, ...bars.map(([, each]) => each.data.makespan)) || 1;
  const parts = (each) => [...kindShares(each), ...each.causes.map((cause) => [cause, each.data.causes[cause]])];
  const told = (what) => KINDS[what] || `idle by ${what}`;
  const bar = ([name, each, thin]) => {
    const track = element("div", {class: `track${thin}`}, ...parts(each).filter(([, share]) => share > 0).map(([what, share]) => piece(what, share, `${told(what)} ${percent(share)}`)));
    track.style.flex = `${each.data.makespan / longest} 0 0`;
    const rest = element("div");
    rest.style.flex = `${1 - each.data.makespan / longest} 0 0`;
    return element("div", {class: "bar", role: "img", "aria-label": `${name}: ${parts(each).map(([what, share]) => `${told(what)} ${percent(share)}`).join(", ")}`}, element("span", {}, name), track, rest);
  };
  const apart = betweenShare(timeline), loop = (share) => `between steps ${percent(share)} of the time from step to step`;
  const before = apart ? [element("div", {class: "bar", role: "img", "aria-label": loop(apart)}, element("span", {}, "loop"),
    element("div", {class: "track thin"}, piece("between", apart, loop(apart)), piece("step", 1 - apart, `the step ${percent(1 - apart)}`)))] : [];
  return element("div", {class: "shares"},
    element("h3", {}, `Where the time of all ranks went: busy ${percent(busyShare(timeline))}, idle ${percent(timeline.data.idle_share)}`), ...bars.map(bar), ...before);
}

/** What is drawn how, and how much of the time it took. */
function legend(record) {
  const {timeline} = record, apart = betweenShare(timeline);
  const item = (paint, text, more, title) => element("li", title ? {title} : {}, element("span", {class: `swatch paint-${paint}`}), text, ...more);
  return element("ul", {class: "legend"},
    ...kindShares(timeline).map(([kind, share]) => item(kind, KINDS[kind], [element("b", {}, percent(share))])),
    ...timeline.causes.filter((cause) => timeline.data.causes[cause] > 0).map((cause) => item(cause, `idle by ${cause}`, [element("b", {}, percent(timeline.data.causes[cause]))], CAUSES[cause])),
    ...(apart ? [item("between", "between steps, of all time", [element("b", {}, percent(apart))], BETWEEN)] : []),
    ...(timeline.path.length ? [item("path", "critical path", [])] : []),
    item("hues", "microbatches, each in its hue; lighter and darker are the kinds", []),
    ...(timeline.blocks.size ? [item("memory", `${timeline.data.memory_unit ? "memory of activations" : "activations held"}${record.planned ? " (dashed: planned)" : ""}`, [])] : []));
}

/** What the critical path is made of: by kind of action, by rank, and what lies between. */
function pathTotals(record) {
  const {timeline} = record, {path, data} = timeline, kinds = new Map(), ranks = new Map(), sum = (map, key, time) => map.set(key, (map.get(key) || 0) + time);
  path.forEach((block, place) => {
    const before = path[place - 1], gap = before ? block.start - before.end : 0;
    sum(kinds, KINDS[block.kind], block.end - block.start);
    sum(ranks, `rank ${block.rank}`, block.end - block.start);
    if (gap > 0) sum(kinds, before.rank === block.rank ? "engine" : "messages", gap);
  });
  const told = (map) => [...map].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([name, time]) => `${name} (${record.time(time)}, ${percent(time / data.makespan)})`).join(" · ");
  return path.length ? element("p", {class: "path muted"}, element("b", {}, "The critical path"), ` is ${told(kinds)}. Its actions are on ${told(ranks)}.`) : "";
}

/** The verdict on a run: its sentences, each a link to what it is about. */
function verdict(chart, page) {
  const {verdict: said} = chart.record;
  if (!said) return "";
  const link = (finding) => element("button", {type: "button", class: "finding", "aria-pressed": "false", click: ({currentTarget}) => page.showFinding(chart, finding, currentTarget)}, finding.text);
  const basis = said.basis ? [element("span", {class: "muted"}, `(${said.basis})`)] : [];
  return element("p", {class: "verdict"}, ...(said.findings.length ? [...said.findings.map(link), ...basis] : [said.text]));
}
