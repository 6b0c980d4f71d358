// What if: a question in words, or a block whose end is dragged, answered by a sentence and the hypothetical step.

const DURATION_QUESTION = /^(\d+)([FBIW])(\d+(?:\.\d+)?)?\s*(?:is |at |=|as fast as )\s*(?:the )?(others|mean|[-+]?[\d.]+(?:e[-+]?\d+)?)\s*(s|ms|µs|us)?$/i, ACTION_NAME = /^\d+[FBIW]\d+(?:\.\d+)?$/i;

/** Answer a question in words: {text, timeline, makespan}; {problem} if it cannot be answered; null if it is no question. */
function whatIf(record, words) {
  const {timeline} = record, {replay} = timeline, cells = replay.rows.flat(), text = words.trim().replace(/^what if:?\s*/i, "");
  const rank = /^rank (\d+) (?:at|as fast as|=)\s*(?:the )?(?:mean|others)$/i.exec(text), match = DURATION_QUESTION.exec(text);
  if (/^(no send cost|send\s*=\s*0|no messages?)$/i.test(text)) return answer(record, "messages that cost nothing", replay.run(undefined, 0));
  if (rank) {
    const number = Number(rank[1]);
    if (!timeline.ranks[number]?.blocks.length) return {problem: `there is no rank ${number}`};
    const means = new Map(), kindsOf = (cell) => cell.blocks.map(({kind}) => kind).join("");
    for (const cell of cells) if (cell.rank !== number) pushTo(means, kindsOf(cell), cell.duration);
    const mean = new Map([...means].map(([kinds, times]) => [kinds, times.reduce((a, b) => a + b, 0) / times.length]));
    return answer(record, `rank ${number} as fast as the mean of the others`, replay.run((cell) => (cell.rank === number ? mean.get(kindsOf(cell)) ?? cell.duration : cell.duration)));
  }
  if (ACTION_NAME.test(text)) return {problem: `there is no ${text.toUpperCase()}`};
  if (!match) return null;
  const [, stage, kindText, microbatch, amount, unit] = match, kind = kindText.toUpperCase(), name = `${stage}${kind}${microbatch ?? ""}`;
  const sameKind = cells.filter(({blocks}) => blocks.some((block) => block.stage === Number(stage) && block.kind === kind));
  const changed = new Set(sameKind.filter(({blocks}) => microbatch === undefined || blocks.some((block) => block.text === name)));
  if (!changed.size) return {problem: `there is no ${name}`};
  const others = sameKind.filter((cell) => microbatch === undefined || !changed.has(cell)), relative = /others|mean/i.test(amount);
  const scale = record.unit === "s" ? {s: 1, ms: 1e-3, "µs": 1e-6, us: 1e-6}[unit?.toLowerCase() || "ms"] : 1;
  if (relative && !others.length) return {problem: `there is no other ${stage}${kind}`};
  const time = relative ? median(others.map(({duration}) => duration)) : Number(amount) * scale;
  if (!(time >= 0 && time < Infinity)) return {problem: `${amount} is no time`};
  const assumption = `${name} ${relative ? "as fast as the others" : "at"} ${relative ? `(${record.formatTime(time)})` : record.formatTime(time)}`;
  return answer(record, assumption, replay.run((cell) => (changed.has(cell) ? time : cell.duration)));
}

/** Answer what happens if one action takes `duration`. */
function whatIfDuration(record, block, duration) {
  const run = record.timeline.replay.run((cell) => (cell.blocks.includes(block) ? duration : cell.duration));
  return answer(record, `${block.text} at ${record.formatTime(duration)}`, run);
}

/** Compare a simulated step with the record's. */
function answer(record, assumption, {makespan, times}) {
  const now = record.timeline.data.makespan, gain = now - makespan, percentage = percent(Math.abs(gain) / now);
  const change = Math.abs(gain) < 5e-5 * now ? "the step takes the same" : `the step takes ${record.formatTime(Math.abs(gain))} ${gain > 0 ? "less" : "more"} (${percentage}): ${record.formatTime(makespan)}`;
  return {text: `${assumption}: ${change}`, makespan, timeline: new HypotheticalStep(record.timeline, times, makespan)};
}

/** A simulated step: its blocks, without causes of idle time or memory. */
class HypotheticalStep {
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
