// What there is to say of an action, or of a time in which a rank was idle.

const MOST_REPLAYED = 50000; // actions

function described(rows) { return element("dl", {}, ...rows.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)])); }

function interval(record, {start, end}) { return `${record.time(end - start)}, from ${record.time(start)} to ${record.time(end)}`; }

function more(record, time, above, below) { return time === 0 ? "as planned" : `${record.time(Math.abs(time))} ${time > 0 ? above : below}`; }

/** What there is to say of an action. */
function describe(record, block) {
  const planned = record.planned && record.planned.blocks.get(block.text), rows = [[record.kindOfTimes, interval(record, block)]];
  if (planned) {
    rows.push(["planned", interval(record, planned)]);
    const longer = block.end - block.start - (planned.end - planned.start);
    rows.push(["difference", `${more(record, longer, "longer", "shorter")}, starts ${more(record, block.start - planned.start, "later", "earlier")}`]);
  }
  if (block.waited > 0) {
    const source = record.timeline.blocks.get(block.waitedFor);
    rows.push(["waited", record.time(block.waited) + (source ? ` for ${source.text} of rank ${source.rank}` : "")]);
  } else if (block.receives.length) {
    rows.push(["received", block.receives.map(({action}) => `${action} of rank ${record.timeline.blocks.get(action).rank}`).join(", ")]);
  }
  if (record.timeline.data.memory_unit) rows.push(["memory held", `${record.timeline.amount(block.held)} once it has ended`]);
  if (block.critical) rows.push(["critical path", "yes"], ["slack", "none: the step takes as much longer as it does"]);
  else if (record.timeline.blocks.get(block.text) === block) rows.push(["slack", slack(record, block)]);
  const title = element("h3", {}, element("span", {class: `swatch paint-${block.kind}`}), `${block.text} ${KINDS[block.kind]}`);
  const place = `stage ${block.stage}, microbatch ${block.part.replace(".", ", slice ")}, rank ${block.rank}`;
  return element("div", {}, title, element("div", {class: "muted"}, place), described(rows));
}

/** How much longer an action may take, worked out for steps that are run again in a moment. */
function slack(record, block) {
  if (record.timeline.blocks.size > MOST_REPLAYED) return `not worked out for more than ${MOST_REPLAYED} actions; ask what if, as in: ${block.text} = 2`;
  return `${record.time(record.timeline.replay.slack.get(block) ?? 0)}: how much longer it may take before the step does`;
}

/** What there is to say of a microbatch. */
function journeyTold(record, microbatch) {
  const blocks = record.timeline.journey(microbatch);
  if (!blocks.length) return `there is no microbatch ${microbatch}`;
  let took = 0, apart = 0, until = blocks[0].start;
  for (const {start, end} of blocks) {
    took += end - start;
    apart += Math.max(0, start - until);
    until = Math.max(until, end);
  }
  const [from, to, work, gaps] = [blocks[0].start, until, took, apart].map((each) => record.time(each));
  return `m${microbatch}: ${blocks.length} actions, from ${from} to ${to}; they take ${work}, and for ${gaps} none of them ran`;
}

/** What there is to say of a time in which a rank was idle: why, before which action, and what that one needed. */
function describeIdle(record, {idle: [start, end, cause], rank, next, timeline}) {
  const title = element("h3", {}, element("span", {class: `swatch paint-${cause}`}), `idle by ${cause}`), rows = [["rank", String(rank)], ["time", interval(record, {start, end})]];
  const source = next && timeline.blocks.get(next.waitedFor), came = source && next.receives.find(({action}) => action === source.text).arrived;
  rows.push(["next", next ? `${next.text} ${KINDS[next.kind]}` : "nothing: the rank has done its part of the step"]);
  if (source) rows.push(source.end < start ? ["needs", `${source.text} of rank ${source.rank}, which ended before, at ${record.time(source.end)}`]
    : ["waits for", `${source.text} of rank ${source.rank}, which ends at ${record.time(source.end)}${came > source.end ? ` and is there at ${record.time(came)}` : ""}`]);
  return element("div", {}, title, element("div", {class: "muted"}, CAUSES[cause]), described(rows));
}
