// One field to find things and to ask: `2F3`, `m5`, `rank 7`, or what if: `2F3 as fast as the others`, `no send cost`, `zb-v`.

const EXAMPLES = "2F3, m5, rank 7, or what if: 2F3 as fast as the others, no send cost, rank 1 at the mean";
const LONGEST_QUOTED = 40; // characters of what was typed

class Finder {
  constructor(page) {
    this.page = page;
    this.field = element("input", {
      type: "search", id: "find", placeholder: "Find or ask: 2F3, m5, no send cost", "aria-label": `Find or ask: ${EXAMPLES}`, title: EXAMPLES, autocomplete: "off", spellcheck: "false",
      input: () => this.typed(), keydown: (event) => this.key(event),
    });
    this.told = element("output", {for: "find", class: "answer", "aria-live": "polite"});
  }

  key(event) {
    event.stopPropagation();
    if (event.key === "Enter") this.asked();
    if (event.key === "Escape") { this.page.leave(); this.field.blur(); }
  }

  /** While it is typed a microbatch lights up and what was lit goes out. */
  typed() {
    const microbatch = /^m(\d+)$/i.exec(this.field.value.trim());
    this.page.follow(microbatch ? Number(microbatch[1]) : null);
    if (!this.field.value) this.page.leave();
  }

  asked() {
    const {page} = this, [chart] = page.charts, {timeline, verdict} = chart.record, words = this.field.value.trim();
    const block = timeline.blocks.get(words.toUpperCase()), rank = /^rank (\d+)$/i.exec(words), others = new Map(Object.entries(verdict?.others || {}));
    if (block) return page.select(chart, block);
    if (/^m\d+$/i.test(words)) return this.typed();
    if (rank) return timeline.ranks[Number(rank[1])] ? page.choose({from: 0, to: timeline.data.makespan, ranks: [Number(rank[1])]}) : this.say(`there is no rank ${rank[1]}`);
    if (others.has(words.toLowerCase())) return this.say(others.get(words.toLowerCase()));
    if (words && timeline.data.counts) return this.say("this page has the sums of the step, not its actions: ask for a rank, as in: rank 7");
    const answer = timeline.blocks.size ? whatIf(chart.record, words) : null;
    if (answer && !answer.problem) return page.instead(answer);
    const quoted = words.length > LONGEST_QUOTED ? `${words.slice(0, LONGEST_QUOTED)}…` : words;
    return this.say(answer?.problem || (words ? `“${quoted}” is none of ${EXAMPLES}` : ""));
  }

  say(text) { this.told.textContent = text; }
}
