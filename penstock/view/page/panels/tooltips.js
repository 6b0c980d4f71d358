// Descriptions of an action, of a microbatch, and of an idle time.

const MAX_REPLAYED_ACTIONS = 50000;

function definitionList(rows) { return element("dl", {}, ...rows.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)])); }

function formatInterval(record, {start, end}) { return `${record.formatTime(end - start)}, from ${record.formatTime(start)} to ${record.formatTime(end)}`; }

function formatDifference(record, time, longer, shorter) { return time === 0 ? "as predicted" : `${record.formatTime(Math.abs(time))} ${time > 0 ? longer : shorter}`; }

/** Describe an action: its times, waits, messages, memory and slack. */
function describeBlock(record, block) {
  const predicted = record.predicted && record.predicted.blocks.get(block.text), rows = [[record.timesLabel, formatInterval(record, block)]];
  if (predicted) {
    rows.push(["predicted", formatInterval(record, predicted)]);
    const longer = block.end - block.start - (predicted.end - predicted.start);
    rows.push(["difference", `${formatDifference(record, longer, "longer", "shorter")}, starts ${formatDifference(record, block.start - predicted.start, "later", "earlier")}`]);
  }
  if (block.waited > 0) {
    const source = record.timeline.blocks.get(block.waitedFor);
    rows.push(["waited", record.formatTime(block.waited) + (source ? ` for ${source.text} of rank ${source.rank}` : "")]);
  } else if (block.receives.length) {
    rows.push(["received", block.receives.map(({action}) => `${action} of rank ${record.timeline.blocks.get(action).rank}`).join(", ")]);
  }
  if (record.timeline.data.memory_unit) rows.push(["memory held", `${record.timeline.formatMemory(block.held)} once it has ended`]);
  if (block.critical) rows.push(["critical path", "yes"], ["slack", "none: if it takes longer, so does the step"]);
  else if (record.timeline.blocks.get(block.text) === block) rows.push(["slack", slackText(record, block)]);
  const title = element("h3", {}, element("span", {class: `swatch paint-${block.isTeacher ? "teacher" : block.kind}`}), `${block.text} ${KIND_NAMES[block.kind]}${block.isTeacher ? " of the teacher" : ""}`);
  const place = `stage ${block.stage}, microbatch ${block.part.replace(".", ", slice ")}, rank ${block.rank}`;
  return element("div", {}, title, element("div", {class: "muted"}, place), definitionList(rows));
}

/** Return the slack of an action as text; computed only for steps small enough to replay at once. */
function slackText(record, block) {
  if (record.timeline.blocks.size > MAX_REPLAYED_ACTIONS) return `not computed for more than ${MAX_REPLAYED_ACTIONS} actions; ask what if, as in: ${block.text} = 2`;
  return `${record.formatTime(record.timeline.replay.slack.get(block) ?? 0)}: how much longer it may take before the step does`;
}

/** Return a sentence on the actions of a microbatch. */
function describeMicrobatch(record, microbatch) {
  const blocks = record.timeline.blocksOfMicrobatch(microbatch);
  if (!blocks.length) return `there is no microbatch ${microbatch}`;
  let busy = 0, idle = 0, end = blocks[0].start;
  for (const block of blocks) {
    busy += block.end - block.start;
    idle += Math.max(0, block.start - end);
    end = Math.max(end, block.end);
  }
  const [from, to, work, gaps] = [blocks[0].start, end, busy, idle].map((time) => record.formatTime(time));
  return `m${microbatch}: ${blocks.length} actions, from ${from} to ${to}; they take ${work}, and for ${gaps} none of them ran`;
}

/** Describe an idle time: its cause, the action after it, and what that one waited for. */
function describeIdle(record, {idle: [start, end, cause], rank, next, timeline}) {
  const title = element("h3", {}, element("span", {class: `swatch paint-${cause}`}), `idle by ${cause}`), rows = [["rank", String(rank)], ["time", formatInterval(record, {start, end})]];
  const source = next && timeline.blocks.get(next.waitedFor), arrival = source && next.receives.find(({action}) => action === source.text).arrived;
  rows.push(["next", next ? `${next.text} ${KIND_NAMES[next.kind]}` : "nothing: the rank has done its part of the step"]);
  if (source) rows.push(source.end < start ? ["needs", `${source.text} of rank ${source.rank}, which ended before, at ${record.formatTime(source.end)}`]
    : ["waits for", `${source.text} of rank ${source.rank}, which ends at ${record.formatTime(source.end)}${arrival > source.end ? `, and whose message arrives at ${record.formatTime(arrival)}` : ""}`]);
  return element("div", {}, title, element("div", {class: "muted"}, CAUSE_TEXTS[cause]), definitionList(rows));
}
