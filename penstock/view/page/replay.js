// What if: the step run once more with other times for some actions, by the rule of penstock/schedule/timing/simulate.py.
// An action starts once its rank is free and what it needs has arrived; what a measured rank spent beyond that is kept.

class Replay {
  constructor(timeline) {
    this.timeline = timeline;
    this.channels = 0;
    const usual = usualLags(timeline), numbers = new Map(), cellOf = new Map();
    this.rows = timeline.ranks.map(({blocks}, rank) => {
      const cells = [];
      for (const block of blocks) {
        if (block.half === 1) cells.at(-1).blocks.push(block); else cells.push({blocks: [block], rank, place: cells.length, needs: [], sends: [], delay: 0});
        cellOf.set(block, cells.at(-1));
      }
      return cells;
    });
    for (const cell of this.rows.flat()) {
      cell.took = cell.blocks[0].end - cell.blocks[0].start;
      for (const block of cell.blocks) {
        for (const need of block.receives) {
          const source = timeline.blocks.get(need.action), ends = `${need.rank} ${cell.rank}`;
          if (!numbers.has(ends)) numbers.set(ends, this.channels++);
          const message = {channel: numbers.get(ends), source: cellOf.get(source), taker: cell, ...this.cost(source, block, need, usual)};
          cell.needs.push(message);
          message.source.sends.push(message);
        }
      }
    }
    for (const {sends} of this.rows.flat()) sends.sort((a, b) => a.taker.blocks[0].stage - b.taker.blocks[0].stage);
    this.order = this.inOrder();
    this.keepDelays();
  }

  /** What a message costs: as planned, or as it was measured, where it held up nobody what is usual, as far as there was time. */
  cost(source, taker, {arrived}, usual) {
    const {borders, skips} = this.timeline.data, low = Math.min(source.stage, taker.stage), high = Math.max(source.stage, taker.stage);
    if (borders.length) {
      const [transmission, latency] = high > low + 1 ? skips.find((skip) => skip[0] === low && skip[1] === high).slice(2) : borders[low];
      return {transmission, latency};
    }
    const waited = taker.waitedFor === source.text && arrived > source.end;
    return {transmission: 0, latency: waited ? arrived - source.end : Math.min(usual.get(low) || 0, Math.max(0, taker.start - source.end))};
  }

  /** All cells, each after what it needs. */
  inOrder() {
    const order = [], next = this.rows.map(() => 0), done = new Set(), waiting = new Map(), ready = this.rows.map((_, rank) => rank);
    while (ready.length) {
      const rank = ready.pop();
      while (next[rank] < this.rows[rank].length) {
        const cell = this.rows[rank][next[rank]], missing = cell.needs.find(({source}) => !done.has(source));
        if (missing) {
          putInto(waiting, missing.source, rank);
          break;
        }
        order.push(cell);
        done.add(cell);
        next[rank] += 1;
        ready.push(...(waiting.get(cell) || []));
        waiting.delete(cell);
      }
    }
    return order;
  }

  /** What each rank spent before an action beyond waiting: found by running the step as it was. */
  keepDelays() {
    const free = this.rows.map(() => 0), channels = new Array(this.channels).fill(-Infinity);
    for (const cell of this.order) {
      const {start, end} = cell.blocks[0];
      cell.delay = Math.max(0, start - cell.needs.reduce((latest, {arrival}) => Math.max(latest, arrival), free[cell.rank]));
      free[cell.rank] = end;
      for (const message of cell.sends) {
        channels[message.channel] = Math.max(channels[message.channel], end) + message.transmission;
        message.arrival = channels[message.channel] + message.latency;
      }
    }
  }

  /** When every action would run; `took(cell)` is how long it takes, `sends` what part of what messages cost is left. */
  run(took = (cell) => cell.took, sends = 1) {
    const free = this.rows.map(() => 0), channels = new Array(this.channels).fill(-Infinity), times = new Map();
    let makespan = 0;
    for (const cell of this.order) {
      let start = free[cell.rank];
      for (const {arrival} of cell.needs) start = Math.max(start, arrival);
      start += Math.max(0, cell.delay - (1 - sends) * handedOver(cell, this.rows));
      const end = start + took(cell);
      free[cell.rank] = end;
      makespan = Math.max(makespan, end);
      for (const message of cell.sends) {
        channels[message.channel] = Math.max(channels[message.channel], end) + sends * message.transmission;
        message.arrival = channels[message.channel] + sends * message.latency;
      }
      for (const block of cell.blocks) times.set(block, [start, end]);
    }
    return {makespan, times};
  }

  /** For every action how much longer it may take before the step does. */
  get slack() {
    if (!this._slack) {
      this.run(); // so that arrivals are those of the step as it was
      const late = new Map(), makespan = this.order.reduce((last, {blocks}) => Math.max(last, blocks[0].end), 0), leaves = new Array(this.channels).fill(Infinity);
      this._slack = new Map();
      for (const cell of [...this.order].reverse()) {
        const next = this.rows[cell.rank][cell.place + 1];
        let end = next ? late.get(next) : makespan;
        for (const {channel, taker, transmission, latency} of [...cell.sends].reverse()) {
          leaves[channel] = Math.min(leaves[channel], late.get(taker) - latency) - transmission;
          end = Math.min(end, leaves[channel]);
        }
        late.set(cell, end - cell.took - cell.delay);
        for (const block of cell.blocks) this._slack.set(block, Math.max(0, end - block.end));
      }
    }
    return this._slack;
  }
}

/** How long the rank handed over what it had made, before an action: part of what messages cost, where that was measured. */
function handedOver(cell, rows) {
  const before = rows[cell.rank][cell.place - 1]?.blocks[0];
  return before?.sent ? before.sent - before.end : 0;
}

/** Border -> the middle of what messages took that somebody waited for. */
function usualLags(timeline) {
  const seen = new Map();
  for (const block of timeline.blocks.values()) {
    const source = timeline.blocks.get(block.waitedFor), message = block.receives.find(({action}) => action === block.waitedFor);
    if (!source || !(message.arrived > source.end)) continue;
    const border = Math.min(source.stage, block.stage);
    putInto(seen, border, message.arrived - source.end);
  }
  return new Map([...seen].map(([border, lags]) => [border, middleOf(lags)]));
}

function putInto(lists, key, value) {
  if (lists.has(key)) lists.get(key).push(value); else lists.set(key, [value]);
}

function middleOf(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// ---- the questions

const MORE = /^(\d+)([FBIW])(\d+)?\s*(?:is |at |=|as fast as )\s*(?:the )?(others|mean|[\d.]+)\s*(s|ms|µs|us)?$/i;

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
  if (!one) return null;
  const [, stage, letter, microbatch, amount, unit] = one, kind = letter.toUpperCase(), name = `${stage}${kind}${microbatch ?? ""}`;
  const alike = all.filter(({blocks}) => blocks.some((block) => block.stage === Number(stage) && block.kind === kind));
  const chosen = new Set(alike.filter(({blocks}) => microbatch === undefined || blocks.some((block) => block.text === name)));
  if (!chosen.size) return {problem: `there is no ${name}`};
  const others = alike.filter((cell) => microbatch === undefined || !chosen.has(cell)), relative = /others|mean/i.test(amount);
  const scale = record.unit === "s" ? {s: 1, ms: 1e-3, "µs": 1e-6, us: 1e-6}[unit || "ms"] : 1;
  if (relative && !others.length) return {problem: `there is no other ${stage}${kind}`};
  const time = relative ? middleOf(others.map(({took}) => took)) : Number(amount) * scale;
  if (!Number.isFinite(time)) return {problem: `${amount} is no time`};
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
