// One record: its steps, its planned timeline, and its largest deviations and waits.

/** The steps of a record, each prepared on first use, and the planned timeline. */
class TimelineRecord {
  constructor(data) {
    this.name = data.name;
    this.unit = data.unit;
    this.labels = data.steps.map((step) => step.label);
    this.stepData = data.steps.map((step) => step.timeline);
    this.timelines = new Map();
    this.planned = data.planned && new Timeline(data.planned);
    this.verdict = data.verdict;
    this.step = data.usual ?? this.stepData.length - 1;
    this.makespan = Math.max(data.planned ? data.planned.makespan : 0, ...this.stepData.map((step) => step.makespan));
  }

  get timeline() {
    if (!this.timelines.has(this.step)) this.timelines.set(this.step, new Timeline(this.stepData[this.step]));
    return this.timelines.get(this.step);
  }

  /** The label of the main lane of each rank. */
  get timesLabel() { return this.unit === "s" && this.labels[this.step] !== "planned" ? "measured" : "planned"; }

  /** Format a time: `12.3 ms` if the unit is a second, else the number. */
  formatTime(value, signed = false) {
    const sign = signed && value > 0 ? "+" : "";
    if (this.unit !== "s") return sign + formatNumber(value);
    const [factor, unit] = timeScale(Math.abs(value));
    return `${sign}${roundDigits(value * factor)} ${unit}`;
  }

  /** Return the `count` actions whose duration differs most from the planned one. */
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

  /** Return the `count` actions before which their rank was idle longest. */
  waits(count) {
    const waiting = [...this.timeline.blocks.values()].filter((block) => block.waited > 0);
    return waiting.sort((a, b) => b.waited - a.waited).slice(0, count);
  }
}
