// The records that the page shows, as penstock/view/data has them, prepared for drawing.

const KINDS = {F: "forward", B: "backward", I: "backward to the input", W: "backward to the weights"};
const CAUSES = {
  fill: "before the rank's first backward: the pipeline is not full yet",
  imbalance: "in between: another rank still computes what this one needs next",
  drain: "after the rank's last forward: the pipeline runs empty",
  communication: "what the rank needs next is computed and on its way",
  sending: "the rank hands over what its last action made",
};

/** The events of a rank: a page has them as columns (penstock/view/html.py), what the studio asks for one by one. */
function eventsOf(events) {
  if (Array.isArray(events)) return events;
  const {actions, start, end, held, sent, waited, waited_for: last, messages, arrived} = events, from = events.from.split(" ");
  let next = 0;
  return (actions ? actions.split(" ") : []).map((action, i) => {
    const receives = [];
    for (const until = next + messages[i]; next < until; next++) receives.push({action: from[next], arrived: arrived[next]});
    return {action, start: start[i], end: end[i], held: held[i], sent: sent[i], waited: waited[i], waited_for: receives[last[i]]?.action, receives};
  });
}

/** One step: for every rank its blocks (the actions, in order), its idle times and its memory curve; of a huge one sums alone. */
class Timeline {
  constructor(data) {
    this.data = data;
    this.blocks = new Map();
    const path = new Set(data.critical_path);
    this.ranks = data.ranks.map((row, rank) => {
      const blocks = eventsOf(row.events).map((event, index) => this.block(event, rank, index, path));
      const stages = [...new Set(blocks.map((block) => block.stage))].sort((a, b) => a - b);
      for (const block of blocks) block.chunk = stages.indexOf(block.stage);
      return {blocks, ends: blocks.map((block) => block.end), idle: row.idle, idleEnds: row.idle.map((idle) => idle[1]), memory: row.memory, stages, sums: row.sums};
    });
    for (const pair of data.overlaps) pair.forEach((text, half) => { this.blocks.get(text).half = half; });
    this.path = data.critical_path.map((text) => this.blocks.get(text));
    this.pathEnds = this.path.map((block) => block.end);
  }

  block(event, rank, index, path) {
    const [, stage, kind, part, microbatch] = /^(\d+)([FBIW])((\d+)(?:\.\d+)?)$/.exec(event.action); // a part: a microbatch, or a slice of it
    const block = {
      text: event.action, stage: Number(stage), kind, part, microbatch: Number(microbatch), rank, index,
      start: event.start, end: event.end, sent: event.sent, held: event.held, waited: event.waited || 0, waitedFor: event.waited_for,
      receives: event.receives || [], critical: path.has(event.action), half: null,
    };
    this.blocks.set(block.text, block);
    return block;
  }

  get stages() { return this.data.counts ? this.data.counts.stages : 1 + Math.max(-1, ...this.ranks.flatMap(({stages}) => stages)); }
  get microbatches() { return this.data.counts ? this.data.counts.microbatches : 1 + Math.max(-1, ...new Set([...this.blocks.values()].map((block) => block.microbatch))); }
  get actions() { return this.data.counts ? this.data.counts.actions : this.blocks.size; }
  get severalStages() { return this.ranks.some(({stages}) => stages.length > 1); }

  /** The other action of an overlapped pair; undefined for one that has none. */
  partner(block) { return block.half === null ? undefined : this.ranks[block.rank].blocks[block.index + (block.half ? -1 : 1)]; }

  /** Of an action and its partner, if it has one, the one that what it received came last to. */
  last(block) {
    const partner = block && this.partner(block), arrival = ({receives}) => Math.max(-Infinity, ...receives.map(({arrived}) => arrived));
    return partner && arrival(partner) > arrival(block) ? partner : block;
  }

  /** All actions of a microbatch, in the order in which they began. */
  journey(microbatch) {
    if (this._journey?.microbatch !== microbatch) {
      this._journey = {microbatch, blocks: [...this.blocks.values()].filter((block) => block.microbatch === microbatch).sort((a, b) => a.start - b.start)};
    }
    return this._journey.blocks;
  }

  /** What the actions allow to ask: what if some took another time, and how much longer each may take. */
  get replay() { return (this._replay ??= new Replay(this)); }
  get peak() { return Math.max(0, ...this.data.peak_memory); }

  amount(held) { return amount(held, this.data.memory_unit); }

  /** The causes of idle time there can be; `sending` only where it was measured. */
  get causes() { return Object.keys(CAUSES).filter((cause) => cause !== "sending" || this.data.causes.sending > 0); }
}

/** The first place in `ascending` whose value is greater than `value`. */
function firstAfter(ascending, value) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}
