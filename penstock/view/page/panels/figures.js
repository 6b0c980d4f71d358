// The step in numbers: figures, shares of time, the critical path, the verdict.

const IDLE_TEXT = "the share of all ranks' time in which they ran no action: the sum of its causes";
const BUBBLE_TEXT = "the idle share of the busiest rank: what would remain if every rank had as much work as that one";
const BETWEEN_TEXT = "from the end of the step before to the start of this one: the optimizer, the next batch, other work of the loop";

function figureList(record) {
  const {data} = record.timeline, predicted = record.predicted && record.predicted.data;
  const comparison = (value) => (predicted ? [element("dd", {class: "comparison"}, `predicted ${value(predicted)}`)] : []);
  const figure = (term, value, title = "") => element("div", title ? {title} : {}, element("dt", {}, term), element("dd", {}, value(data)), ...comparison(value));
  return element("dl", {class: "figures"},
    figure("makespan", ({makespan}) => record.formatTime(makespan)),
    figure("idle, of all ranks' time", (data) => percent(data.idle_share), IDLE_TEXT),
    figure("bubble, idle of the busiest rank", ({bubble}) => percent(bubble), BUBBLE_TEXT),
    figure("busiest rank", busiestRank),
    figure("in flight, most at once", (data) => formatPerRank(data.peak_in_flight)),
    ...(data.memory_unit ? [figure("memory of activations, at most", (data) => formatMemory(Math.max(...data.peak_memory), data.memory_unit || "activations"))] : []),
    ...(Math.max(0, ...data.between) ? [betweenFigure(record)] : []));
}

function busiestRank({busy}) {
  const most = Math.max(...busy);
  return busy.length > 1 && most - Math.min(...busy) <= 1e-6 * most ? "all alike" : `rank ${busy.indexOf(most)}`;
}

/** Return the figure of the time that the ranks spent on other work before the step. */
function betweenFigure(record) {
  const times = record.timeline.data.between, longest = Math.max(...times), shortest = Math.min(...times);
  return element("div", {title: BETWEEN_TEXT},
    element("dt", {}, "between steps, before this one"), element("dd", {}, record.formatTime(longest)),
    ...(shortest < longest ? [element("dd", {class: "comparison"}, `at least ${record.formatTime(shortest)}`)] : []));
}

/** Return the share of the ranks' time between steps, from the end of one step to the end of the next. */
function betweenShare({data}) {
  const total = data.between.reduce((sum, time) => sum + time, 0);
  return total / (total + data.ranks.length * data.makespan) || 0;
}

/** Return [kind, its share of all ranks' time]; the time of a pair counts half for each of its two actions. */
function kindShares({blocks, data}) {
  if (data.kinds) return Object.entries(data.kinds);
  const total = data.ranks.length * data.makespan || 1, shares = {};
  for (const {kind, start, end, half} of blocks.values()) {
    shares[kind] = (shares[kind] || 0) + ((end - start) * (half === null ? 1 : 0.5)) / total;
  }
  return Object.keys(KIND_NAMES).filter((kind) => kind in shares).map((kind) => [kind, shares[kind]]);
}

function busyShare(timeline) { return kindShares(timeline).reduce((sum, [, share]) => sum + share, 0); }

/** Return a part of a bar, `share` of its length. */
function barPart(paint, share, title) {
  const part = element("i", {class: `paint-${paint}`, title});
  part.style.flex = `${share} 0 0`;
  return part;
}

/** Return bars of the shares of all ranks' time, as long as the steps; `longestStep`: the makespan that fills the width, if given. */
function timeShares(record, longestStep = 0) {
  const {timeline} = record, bars = [[record.timesLabel, timeline, ""]];
  if (record.predicted) bars.push(["predicted", record.predicted, " thin"]);
  const longest = Math.max(longestStep, ...bars.map(([, step]) => step.data.makespan)) || 1;
  const parts = (step) => [...kindShares(step), ...step.causes.map((cause) => [cause, step.data.causes[cause]])];
  const partName = (part) => KIND_NAMES[part] || `idle by ${part}`;
  const bar = ([name, step, thin]) => {
    const track = element("div", {class: `track${thin}`}, ...parts(step).filter(([, share]) => share > 0).map(([part, share]) => barPart(part, share, `${partName(part)} ${percent(share)}`)));
    track.style.flex = `${step.data.makespan / longest} 0 0`;
    const rest = element("div");
    rest.style.flex = `${1 - step.data.makespan / longest} 0 0`;
    return element("div", {class: "bar", role: "img", "aria-label": `${name}: ${parts(step).map(([part, share]) => `${partName(part)} ${percent(share)}`).join(", ")}`}, element("span", {}, name), track, rest);
  };
  const betweenSteps = betweenShare(timeline), loopText = (share) => `between steps ${percent(share)} of the time from step to step`;
  const loopBar = betweenSteps ? [element("div", {class: "bar", role: "img", "aria-label": loopText(betweenSteps)}, element("span", {}, "loop"),
    element("div", {class: "track thin"}, barPart("between", betweenSteps, loopText(betweenSteps)), barPart("step", 1 - betweenSteps, `the step ${percent(1 - betweenSteps)}`)))] : [];
  return element("div", {class: "shares"},
    element("h3", {}, `Where the time of all ranks went: busy ${percent(busyShare(timeline))}, idle ${percent(timeline.data.idle_share)}`), ...bars.map(bar), ...loopBar);
}

/** Return the legend: colours and hatches, and the share of time of each. */
function legend(record) {
  const {timeline} = record, betweenSteps = betweenShare(timeline);
  const item = (paint, text, more, title) => element("li", title ? {title} : {}, element("span", {class: `swatch paint-${paint}`}), text, ...more);
  return element("ul", {class: "legend"},
    ...kindShares(timeline).map(([kind, share]) => item(kind, KIND_NAMES[kind], [element("b", {}, percent(share))])),
    ...(timeline.firstTeacherStage < Infinity ? [item("teacher", "forward of the teacher", [])] : []),
    ...timeline.causes.filter((cause) => timeline.data.causes[cause] > 0).map((cause) => item(cause, `idle by ${cause}`, [element("b", {}, percent(timeline.data.causes[cause]))], CAUSE_TEXTS[cause])),
    ...(betweenSteps ? [item("between", "between steps, of all time", [element("b", {}, percent(betweenSteps))], BETWEEN_TEXT)] : []),
    ...(timeline.path.length ? [item("path", "critical path", [])] : []),
    item("hues", "microbatches, each in its hue; lightness shows the kind", []),
    ...(timeline.blocks.size ? [item("memory", `${timeline.data.memory_unit ? "memory of activations" : "activations held"}${record.predicted ? " (dashed: predicted)" : ""}`, [])] : []));
}

/** Return a sentence on the critical path: its time by kind, between actions, and by rank. */
function pathSummary(record) {
  const {timeline} = record, {path, data} = timeline, kinds = new Map(), ranks = new Map(), add = (map, key, time) => map.set(key, (map.get(key) || 0) + time);
  path.forEach((block, index) => {
    const previous = path[index - 1], gap = previous ? block.start - previous.end : 0;
    add(kinds, KIND_NAMES[block.kind], block.end - block.start);
    add(ranks, `rank ${block.rank}`, block.end - block.start);
    if (gap > 0) add(kinds, previous.rank === block.rank ? "engine" : "messages", gap);
  });
  const listTotals = (map) => [...map].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([name, time]) => `${name} (${record.formatTime(time)}, ${percent(time / data.makespan)})`).join(" · ");
  return path.length ? element("p", {class: "path muted"}, element("b", {}, "The critical path"), ` is ${listTotals(kinds)}. Its actions are on ${listTotals(ranks)}.`) : "";
}

/** Return the verdict on a run: a button for each sentence, which shows what it is about. */
function verdictLine(chart, page) {
  const {verdict} = chart.record;
  if (!verdict) return "";
  const link = (finding) => element("button", {type: "button", class: "finding", "aria-pressed": "false", click: ({currentTarget}) => page.showFinding(chart, finding, currentTarget)}, finding.text);
  const basis = verdict.basis ? [element("span", {class: "muted"}, `(${verdict.basis})`)] : [];
  return element("p", {class: "verdict"}, ...(verdict.findings.length ? [...verdict.findings.map(link), ...basis] : [verdict.text]));
}
