// Simulate the step again with other times for some actions, by the rule of penstock/timing/simulate.py.
// An action starts when its rank is free and its messages have arrived; further delays of a measured rank are kept.

class Replay {
  constructor(timeline) {
    this.timeline = timeline;
    this.channels = 0;
    const latencies = medianLatencies(timeline), channelNumbers = new Map(), cellOf = new Map();
    this.rows = timeline.ranks.map(({blocks}, rank) => {
      const cells = [];
      for (const block of blocks) {
        if (block.half === 1) cells.at(-1).blocks.push(block); else cells.push({blocks: [block], rank, index: cells.length, needs: [], sends: [], delay: 0});
        cellOf.set(block, cells.at(-1));
      }
      return cells;
    });
    for (const cell of this.rows.flat()) {
      cell.duration = cell.blocks[0].end - cell.blocks[0].start;
      for (const block of cell.blocks) {
        for (const need of block.receives) {
          const source = timeline.blocks.get(need.action), ends = `${source.rank} ${cell.rank}`;
          if (!channelNumbers.has(ends)) channelNumbers.set(ends, this.channels++);
          const message = {channel: channelNumbers.get(ends), source: cellOf.get(source), receiver: cell, ...this.messageCost(source, block, need, latencies)};
          cell.needs.push(message);
          message.source.sends.push(message);
        }
      }
    }
    for (const {sends} of this.rows.flat()) sends.sort((a, b) => a.receiver.blocks[0].stage - b.receiver.blocks[0].stage);
    this.order = this.dependencyOrder();
    this.computeDelays();
  }

  /** Return {transmission, latency} of a message: as predicted; else as measured, if waited for; else the border's median at most. */
  messageCost(source, receiver, {arrived}, latencies) {
    const {borders, skips, microbatch_factors: factors} = this.timeline.data, low = Math.min(source.stage, receiver.stage), high = Math.max(source.stage, receiver.stage);
    if (borders.length) {
      const [transmission, latency] = high > low + 1 ? skips.find((skip) => skip[0] === low && skip[1] === high).slice(2) : borders[low];
      return {transmission: transmission * (factors?.length ? factors[source.microbatch] : 1), latency};
    }
    const waited = receiver.waitedFor === source.text && arrived > source.end;
    return {transmission: 0, latency: waited ? arrived - source.end : Math.min(latencies.get(low) || 0, Math.max(0, receiver.start - source.end))};
  }

  /** Return all cells in an order in which each follows what it needs. */
  dependencyOrder() {
    const order = [], next = this.rows.map(() => 0), done = new Set(), waiting = new Map(), ready = this.rows.map((_, rank) => rank);
    while (ready.length) {
      const rank = ready.pop();
      while (next[rank] < this.rows[rank].length) {
        const cell = this.rows[rank][next[rank]], missing = cell.needs.find(({source}) => !done.has(source));
        if (missing) {
          pushTo(waiting, missing.source, rank);
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

  /** Set for each cell its delay beyond waiting, by running the step as it was. */
  computeDelays() {
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

  /** Return the makespan and the times of all actions. `duration(cell)`: of a cell; `sendFactor`: on the costs of messages. */
  run(duration = (cell) => cell.duration, sendFactor = 1) {
    const free = this.rows.map(() => 0), channels = new Array(this.channels).fill(-Infinity), times = new Map();
    let makespan = 0;
    for (const cell of this.order) {
      let start = free[cell.rank];
      for (const {arrival} of cell.needs) start = Math.max(start, arrival);
      start += Math.max(0, cell.delay - (1 - sendFactor) * sendTime(cell, this.rows));
      const end = start + duration(cell);
      free[cell.rank] = end;
      makespan = Math.max(makespan, end);
      for (const message of cell.sends) {
        channels[message.channel] = Math.max(channels[message.channel], end) + sendFactor * message.transmission;
        message.arrival = channels[message.channel] + sendFactor * message.latency;
      }
      for (const block of cell.blocks) times.set(block, [start, end]);
    }
    return {makespan, times};
  }

  /** For each action, how much longer it may take before the step does: a Map, in the unit of the timeline. */
  get slack() {
    if (!this._slack) {
      this.run(); // sets arrivals to those of the step as it was
      const latestStart = new Map(), makespan = this.order.reduce((last, {blocks}) => Math.max(last, blocks[0].end), 0), latestSend = new Array(this.channels).fill(Infinity);
      this._slack = new Map();
      for (const cell of [...this.order].reverse()) {
        const next = this.rows[cell.rank][cell.index + 1];
        let end = next ? latestStart.get(next) : makespan;
        for (const {channel, receiver, transmission, latency} of [...cell.sends].reverse()) {
          latestSend[channel] = Math.min(latestSend[channel], latestStart.get(receiver) - latency) - transmission;
          end = Math.min(end, latestSend[channel]);
        }
        latestStart.set(cell, end - cell.duration - cell.delay);
        for (const block of cell.blocks) this._slack.set(block, Math.max(0, end - block.end));
      }
    }
    return this._slack;
  }
}

/** Return how long the rank sent the output of its last action: part of the message's cost, if measured. */
function sendTime(cell, rows) {
  const previous = rows[cell.rank][cell.index - 1]?.blocks[0];
  return previous?.sent ? previous.sent - previous.end : 0;
}

/** Return border -> the median latency of the messages that a rank waited for. */
function medianLatencies(timeline) {
  const latencies = new Map();
  for (const block of timeline.blocks.values()) {
    const source = timeline.blocks.get(block.waitedFor), message = block.receives.find(({action}) => action === block.waitedFor);
    if (!source || !(message.arrived > source.end)) continue;
    const border = Math.min(source.stage, block.stage);
    pushTo(latencies, border, message.arrived - source.end);
  }
  return new Map([...latencies].map(([border, values]) => [border, median(values)]));
}

function pushTo(lists, key, value) {
  if (lists.has(key)) lists.get(key).push(value); else lists.set(key, [value]);
}

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
