"use strict";
// The records that the page shows, as penstock/view/record.py writes them, prepared for drawing.

const KINDS = {F: "forward", B: "backward", I: "backward to the input", W: "backward to the weights"};
const CAUSES = {
  fill: "before the rank's first backward: the pipeline is not full yet",
  imbalance: "in between: another rank still computes what this one needs next",
  drain: "after the rank's last forward: the pipeline runs empty",
  communication: "what the rank needs next is computed and on its way",
  sending: "the rank hands over what its last action made",
};

/** One step: for every rank its blocks (the actions, in order), its idle times and its memory curve; of a huge one sums alone. */
class Timeline {
  constructor(data) {
    this.data = data;
    this.blocks = new Map();
    const path = new Set(data.critical_path);
    this.ranks = data.ranks.map((row, rank) => {
      const blocks = row.events.map((event, index) => this.block(event, rank, index, path));
      const stages = [...new Set(blocks.map((block) => block.stage))].sort((a, b) => a - b);
      for (const block of blocks) block.chunk = stages.indexOf(block.stage);
      return {blocks, ends: blocks.map((block) => block.end), idle: row.idle, idleEnds: row.idle.map((idle) => idle[1]), memory: row.memory, stages, sums: row.sums};
    });
    for (const pair of data.overlaps) pair.forEach((text, half) => { this.blocks.get(text).half = half; });
    this.path = data.critical_path.map((text) => this.blocks.get(text));
    this.pathEnds = this.path.map((block) => block.end);
  }

  block(event, rank, index, path) {
    const [, stage, kind, microbatch] = /^(\d+)([FBIW])(\d+)$/.exec(event.action);
    const block = {
      text: event.action, stage: Number(stage), kind, microbatch: Number(microbatch), rank, index,
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

/** The steps of one record, each prepared when it is first looked at, and what was planned. */
class TimelineRecord {
  constructor(data) {
    this.name = data.name;
    this.unit = data.unit;
    this.labels = data.steps.map((step) => step.label);
    this.raw = data.steps.map((step) => step.timeline);
    this.ready = new Map();
    this.planned = data.planned && new Timeline(data.planned);
    this.verdict = data.verdict;
    this.step = this.raw.length - 1;
    this.makespan = Math.max(data.planned ? data.planned.makespan : 0, ...this.raw.map((each) => each.makespan));
  }

  get timeline() {
    if (!this.ready.has(this.step)) this.ready.set(this.step, new Timeline(this.raw[this.step]));
    return this.ready.get(this.step);
  }

  /** What the main lane of every rank is called. */
  get kindOfTimes() { return this.unit === "s" && this.labels[this.step] !== "planned" ? "measured" : "planned"; }

  /** Times as people read them: `12.3 ms` where the unit is a second, else the bare number. */
  time(value, signed = false) {
    const sign = signed && value > 0 ? "+" : "";
    if (this.unit !== "s") return sign + short(value);
    const [factor, unit] = scaleOf(Math.abs(value));
    return `${sign}${short(value * factor)} ${unit}`;
  }

  /** The `count` actions whose time differs most from the planned one. */
  deviations(count) {
    const found = [];
    for (const block of this.timeline.blocks.values()) {
      const planned = this.planned && this.planned.blocks.get(block.text);
      if (planned) {
        const longer = block.end - block.start - (planned.end - planned.start);
        found.push({block, planned, longer, later: block.start - planned.start});
      }
    }
    return found.sort((a, b) => Math.abs(b.longer) - Math.abs(a.longer)).slice(0, count);
  }

  /** The `count` actions before which their rank was idle longest. */
  waits(count) {
    const waited = [...this.timeline.blocks.values()].filter((block) => block.waited > 0);
    return waited.sort((a, b) => b.waited - a.waited).slice(0, count);
  }
}

function scaleOf(seconds) {
  if (seconds >= 1) return [1, "s"];
  return seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

/** Memory as people read it: `12.3 MB` where it is in bytes, else the bare number and its unit, if it has one. */
function amount(held, unit) {
  if (unit !== "bytes") return unit ? `${short(held)} ${unit}` : short(held);
  const [size, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([least]) => held >= least) || [1, "bytes"];
  return `${short(held / size)} ${name}`;
}

function short(value) { return String(Number(value.toPrecision(4))).replace("-", "−"); }

function percent(share) { return `${(100 * share).toFixed(1)} %`; }

/** The first place in `ascending` whose value is greater than `value`. */
function firstAfter(ascending, value) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}
