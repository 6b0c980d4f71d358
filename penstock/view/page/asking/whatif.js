// What if: questions in words or by pulling a block, answered in a sentence and by the step as it would be.

const MORE = /^(\d+)([FBIW])(\d+(?:\.\d+)?)?\s*(?:is |at |=|as fast as )\s*(?:the )?(others|mean|[-+]?[\d.]+(?:e[-+]?\d+)?)\s*(s|ms|µs|us)?$/i, ONE = /^\d+[FBIW]\d+(?:\.\d+)?$/i;

/** What a question in words comes to: {text, timeline, makespan}, {problem} if it cannot be answered, or null if it is none. */
function whatIf(record, words) {
  const {timeline} = record, {replay} = timeline, all = replay.rows.flat(), text = words.trim().replace(/^what if:?\s*/i, "");
  const rank = /^rank (\d+) (?:at|as fast as|=)\s*(?:the )?(?:mean|others)$/i.exec(text), one = MORE.exec(text);
  if (/^(no send cost|send\s*=\s*0|no messages?)$/i.test(text)) return answered(record, "messages that cost nothing", replay.run(undefined, 0));
  if (rank) {
    const number = Number(rank[1]);
    if (!timeline.ranks[number]?.blocks.length) return {problem: `there is no rank ${number}`};
    const means = new Map(), kindsOf = (cell) => cell.blocks.map(({kind}) => kind).join("");
    for (const cell of all) if (cell.rank !== number) putInto(means, kindsOf(cell), cell.took);
    const mean = new Map([...means].map(([kinds, times]) => [kinds, times.reduce((a, b) => a + b, 0) / times.length]));
    return answered(record, `rank ${number} as fast as the mean of the others`, replay.run((cell) => (cell.rank === number ? mean.get(kindsOf(cell)) ?? cell.took : cell.took)));
  }
  if (ONE.test(text)) return {problem: `there is no ${text.toUpperCase()}`};
  if (!one) return null;
  const [, stage, letter, microbatch, amount, unit] = one, kind = letter.toUpperCase(), name = `${stage}${kind}${microbatch ?? ""}`;
  const alike = all.filter(({blocks}) => blocks.some((block) => block.stage === Number(stage) && block.kind === kind));
  const chosen = new Set(alike.filter(({blocks}) => microbatch === undefined || blocks.some((block) => block.text === name)));
  if (!chosen.size) return {problem: `there is no ${name}`};
  const others = alike.filter((cell) => microbatch === undefined || !chosen.has(cell)), relative = /others|mean/i.test(amount);
  const scale = record.unit === "s" ? {s: 1, ms: 1e-3, "µs": 1e-6, us: 1e-6}[unit?.toLowerCase() || "ms"] : 1;
  if (relative && !others.length) return {problem: `there is no other ${stage}${kind}`};
  const time = relative ? middleOf(others.map(({took}) => took)) : Number(amount) * scale;
  if (!(time >= 0 && time < Infinity)) return {problem: `${amount} is no time`};
  const told = `${name} ${relative ? "as fast as the others" : "at"} ${relative ? `(${record.time(time)})` : record.time(time)}`;
  return answered(record, told, replay.run((cell) => (chosen.has(cell) ? time : cell.took)));
}

/** The same for one action at a time of `took`, as it is pulled with the pointer. */
function whatIfOne(record, block, took) {
  const run = record.timeline.replay.run((cell) => (cell.blocks.includes(block) ? took : cell.took));
  return answered(record, `${block.text} at ${record.time(took)}`, run);
}

function answered(record, told, {makespan, times}) {
  const now = record.timeline.data.makespan, gain = now - makespan, percentage = percent(Math.abs(gain) / now);
  const change = Math.abs(gain) < 5e-5 * now ? "the step takes the same" : `the step takes ${record.time(Math.abs(gain))} ${gain > 0 ? "less" : "more"} (${percentage}): ${record.time(makespan)}`;
  return {text: `${told}: ${change}`, makespan, timeline: new Ghost(record.timeline, times, makespan)};
}

/** A step that was only worked out: its blocks, without causes or memory. */
class Ghost {
  constructor(timeline, times, makespan) {
    this.blocks = new Map();
    this.data = {makespan, ranks: timeline.ranks, memory_unit: "none"};
    this.ranks = timeline.ranks.map(({blocks}) => {
      const moved = blocks.map((block) => ({...block, start: times.get(block)[0], end: times.get(block)[1]}));
      for (const block of moved) this.blocks.set(block.text, block);
      return {blocks: moved, ends: moved.map(({end}) => end), idle: [], idleEnds: [], memory: []};
    });
    this.peak = 0;
  }
}
