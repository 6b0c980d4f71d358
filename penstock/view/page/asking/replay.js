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
          const source = timeline.blocks.get(need.action), ends = `${source.rank} ${cell.rank}`;
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
    const {borders, skips, microbatch_factors: factors} = this.timeline.data, low = Math.min(source.stage, taker.stage), high = Math.max(source.stage, taker.stage);
    if (borders.length) {
      const [transmission, latency] = high > low + 1 ? skips.find((skip) => skip[0] === low && skip[1] === high).slice(2) : borders[low];
      return {transmission: transmission * (factors?.length ? factors[source.microbatch] : 1), latency};
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
