// The steps of one record, as measured or planned, and what differs most among them.

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
    this.step = data.usual ?? this.raw.length - 1;
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
    if (this.unit !== "s") return sign + bare(value);
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
