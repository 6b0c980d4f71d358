// One record: its steps, its predicted timeline, and its largest deviations and waits.

/** The steps of a record, each prepared on first use, and the predicted timeline. */
class TimelineRecord {
  constructor(data) {
    this.name = data.name;
    this.unit = data.unit;
    this.labels = data.steps.map((step) => step.label);
    this.stepData = data.steps.map((step) => step.timeline);
    this.timelines = new Map();
    this.predicted = data.predicted && new Timeline(data.predicted);
    this.verdict = data.verdict;
    this.step = data.usual ?? this.stepData.length - 1;
    this.makespan = Math.max(data.predicted ? data.predicted.makespan : 0, ...this.stepData.map((step) => step.makespan));
  }

  get timeline() {
    if (!this.timelines.has(this.step)) this.timelines.set(this.step, new Timeline(this.stepData[this.step]));
    return this.timelines.get(this.step);
  }

  /** The label of the main lane of each rank. */
  get timesLabel() {
    const label = this.labels[this.step];
    if (this.unit === "s") return ["planned", "predicted"].includes(label) ? label : "measured";
    return "planned";
  }

  /** Format a time: `12.3 ms` if the unit is a second, else the number. */
  formatTime(value, signed = false) {
    const sign = signed && value > 0 ? "+" : "";
    if (this.unit !== "s") return sign + formatNumber(value);
    const [factor, unit] = timeScale(Math.abs(value));
    return `${sign}${roundDigits(value * factor)} ${unit}`;
  }

  /** Return the `count` actions whose duration differs most from the predicted one. */
  deviations(count) {
    const found = [];
    for (const block of this.timeline.blocks.values()) {
      const predicted = this.predicted && this.predicted.blocks.get(block.text);
      if (predicted) {
        const longer = block.end - block.start - (predicted.end - predicted.start);
        found.push({block, predicted, longer, later: block.start - predicted.start});
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
