// What there is to say of an action, or of a time in which a rank was idle.

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
  if (block.critical) rows.push(["critical path", "yes"]);
  else if (record.timeline.blocks.size <= 50000 && record.timeline.blocks.get(block.text) === block) rows.push(["slack", `${record.time(record.timeline.replay.slack.get(block) ?? 0)}: how much longer it may take before the step does`]);
  const title = element("h3", {}, element("span", {class: `swatch paint-${block.kind}`}), `${block.text} ${KINDS[block.kind]}`);
  const place = `stage ${block.stage}, microbatch ${block.microbatch}, rank ${block.rank}`;
  return element("div", {}, title, element("div", {class: "muted"}, place), described(rows));
}

function describeIdle(record, [start, end, cause], rank) {
  const title = element("h3", {}, element("span", {class: `swatch paint-${cause}`}), `idle by ${cause}`);
  return element("div", {}, title, element("div", {class: "muted"}, CAUSES[cause]),
    described([["rank", String(rank)], ["time", interval(record, {start, end})]]));
}
