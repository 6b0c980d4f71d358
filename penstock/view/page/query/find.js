// One field to find and to ask: `2F3`, `m5`, `rank 7`, or what if: `2F3 as fast as the others`, `no send cost`, `zb-v`.

const EXAMPLES = "2F3, m5, rank 7, or what if: 2F3 as fast as the others, no send cost, rank 1 at the mean";
const MAX_QUOTED_CHARACTERS = 40; // of the text in an error

class Finder {
  constructor(page) {
    this.page = page;
    this.field = element("input", {
      type: "search", id: "find", placeholder: "Find or ask: 2F3, m5, no send cost", "aria-label": `Find or ask: ${EXAMPLES}`, title: EXAMPLES, autocomplete: "off", spellcheck: "false",
      input: () => this.onInput(), keydown: (event) => this.onKey(event),
    });
    this.output = element("output", {for: "find", class: "answer", "aria-live": "polite"});
  }

  onKey(event) {
    event.stopPropagation();
    if (event.key === "Enter") this.submit();
    if (event.key === "Escape") { this.page.clear(); this.field.blur(); }
  }

  /** Highlight a microbatch while its name is typed; clear the page once the field is empty. */
  onInput() {
    const microbatch = /^m(\d+)$/i.exec(this.field.value.trim());
    this.page.follow(microbatch ? Number(microbatch[1]) : null);
    if (!this.field.value) this.page.clear();
  }

  submit() {
    const {page} = this, [chart] = page.charts, {timeline, verdict} = chart.record, text = this.field.value.trim();
    const block = timeline.blocks.get(text.toUpperCase()), rank = /^rank (\d+)$/i.exec(text), schedules = new Map(Object.entries(verdict?.others || {}));
    if (block) return page.select(chart, block);
    if (/^m\d+$/i.test(text)) return this.onInput();
    if (rank) return timeline.ranks[Number(rank[1])] ? page.setSelection({from: 0, to: timeline.data.makespan, ranks: [Number(rank[1])]}) : this.say(`there is no rank ${rank[1]}`);
    if (schedules.has(text.toLowerCase())) return this.say(schedules.get(text.toLowerCase()));
    if (text && timeline.data.counts) return this.say("this page has the sums of the step, not its actions: ask for a rank, as in: rank 7");
    const answer = timeline.blocks.size ? whatIf(chart.record, text) : null;
    if (answer && !answer.problem) return page.showAlternative(answer);
    const quoted = text.length > MAX_QUOTED_CHARACTERS ? `${text.slice(0, MAX_QUOTED_CHARACTERS)}…` : text;
    return this.say(answer?.problem || (text ? `“${quoted}” is none of ${EXAMPLES}` : ""));
  }

  say(message) { this.output.textContent = message; }
}
