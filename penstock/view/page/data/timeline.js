// One timeline, prepared for drawing; its data is described in penstock/view/data/__init__.py.

const KIND_NAMES = {F: "forward", B: "backward", I: "backward to the input", W: "backward to the weights"};
const CAUSE_TEXTS = {
  fill: "before the rank's first backward: the pipeline is not full yet",
  order: "in between: the table has the rank wait for another one, and would also if all stages took the same time",
  imbalance: "in between: another rank still computes what this one needs next; with even stages it would have ended earlier",
  drain: "after the rank's last forward: the pipeline runs empty",
  communication: "the message that the rank needs next is on its way",
  sending: "the rank sends the output of its last action",
};

/** Return the events of a rank as objects. A page has them as columns (see penstock/view/html.py), the studio as objects. */
function unpackEvents(events) {
  if (Array.isArray(events)) return events;
  const {actions, start, end, held, sent, waited, waited_for: waitedFor, messages, arrived} = events, from = events.from.split(" ");
  let next = 0;
  return (actions ? actions.split(" ") : []).map((action, i) => {
    const receives = [];
    for (const end = next + messages[i]; next < end; next++) receives.push({action: from[next], arrived: arrived[next]});
    return {action, start: start[i], end: end[i], held: held[i], sent: sent[i], waited: waited[i], waited_for: receives[waitedFor[i]]?.action, receives};
  });
}

/** One step: for each rank its blocks (actions, in order), idle times and memory curve; only sums if the step is huge. */
class Timeline {
  constructor(data) {
    this.data = data;
    this.blocks = new Map();
    const path = new Set(data.critical_path);
    this.ranks = data.ranks.map((row, rank) => {
      const blocks = unpackEvents(row.events).map((event, index) => this.addBlock(event, rank, index, path));
      const stages = [...new Set(blocks.map((block) => block.stage))].sort((a, b) => a - b);
      for (const block of blocks) block.chunk = stages.indexOf(block.stage); // index of its stage on the rank
      return {blocks, ends: blocks.map((block) => block.end), idle: row.idle, idleEnds: row.idle.map((idle) => idle[1]), memory: row.memory, stages, sums: row.sums};
    });
    for (const pair of data.overlaps) pair.forEach((text, half) => { this.blocks.get(text).half = half; });
    this.path = data.critical_path.map((text) => this.blocks.get(text));
    this.pathEnds = this.path.map((block) => block.end);
  }

  addBlock(event, rank, index, path) {
    const [, stage, kind, part, microbatch] = /^(\d+)([FBIW])((\d+)(?:\.\d+)?)$/.exec(event.action); // part: a microbatch, or a slice of it
    const block = {
      text: event.action, stage: Number(stage), kind, part, microbatch: Number(microbatch), rank, index,
      start: event.start, end: event.end, sent: event.sent, held: event.held, waited: event.waited || 0, waitedFor: event.waited_for,
      receives: event.receives || [], critical: path.has(event.action), half: null, isTeacher: Number(stage) >= this.firstTeacherStage,
    };
    this.blocks.set(block.text, block);
    return block;
  }

  /** The stage with which a second, frozen model begins; infinity without one. */
  get firstTeacherStage() { return this.data.chains?.teacher ?? Infinity; }
  get stages() { return this.data.counts ? this.data.counts.stages : 1 + Math.max(-1, ...this.ranks.flatMap(({stages}) => stages)); }
  get microbatches() { return this.data.counts ? this.data.counts.microbatches : 1 + Math.max(-1, ...new Set([...this.blocks.values()].map((block) => block.microbatch))); }
  get actions() { return this.data.counts ? this.data.counts.actions : this.blocks.size; }
  get hasSeveralStages() { return this.ranks.some(({stages}) => stages.length > 1); }

  /** Return the other action of an overlapped pair; undefined for an action that is not in a pair. */
  partner(block) { return block.half === null ? undefined : this.ranks[block.rank].blocks[block.index + (block.half ? -1 : 1)]; }

  /** Return the action or its partner, if it has one, whichever received its last message later. */
  lastReceiver(block) {
    const partner = block && this.partner(block), lastArrival = ({receives}) => Math.max(-Infinity, ...receives.map(({arrived}) => arrived));
    return partner && lastArrival(partner) > lastArrival(block) ? partner : block;
  }

  /** Return the actions of a microbatch, in order of their starts. */
  blocksOfMicrobatch(microbatch) {
    if (this._microbatchBlocks?.microbatch !== microbatch) {
      this._microbatchBlocks = {microbatch, blocks: [...this.blocks.values()].filter((block) => block.microbatch === microbatch).sort((a, b) => a.start - b.start)};
    }
    return this._microbatchBlocks.blocks;
  }

  /** The simulation of this step with other times, made on first use. */
  get replay() { return (this._replay ??= new Replay(this)); }
  get peak() { return Math.max(0, ...this.data.peak_memory); }

  formatMemory(held) { return formatMemory(held, this.data.memory_unit); }

  /** The causes of idle time to list; `sending` only if it was measured. */
  get causes() { return Object.keys(CAUSE_TEXTS).filter((cause) => cause !== "sending" || this.data.causes.sending > 0); }
}

/** Return the first index in `ascending` whose value is greater than `value`. */
function firstAfter(ascending, value) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}
