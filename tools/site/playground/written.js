// A schedule of the reader's own, written or pasted: a Python function, or a table as CSV.

const EXAMPLE = `# What each rank does, in order: stage, kind, microbatch. This is GPipe. What if a B came earlier?
def schedule(rank, ranks, microbatches):
    for m in range(microbatches):
        yield f"{rank}F{m}"
    for m in range(microbatches):
        yield f"{rank}B{m}"
`;

class Written {
  constructor() {
    const size = (id, value) => element("input", {id, inputmode: "numeric", value}), {ranks, microbatches} = studio.state;
    Object.assign(this, {ranks: size("written-ranks", ranks), microbatches: size("written-microbatches", microbatches)});
    this.text = element("textarea", {id: "source", rows: 9, spellcheck: "false", "aria-label": "A Python function, or a table as CSV", keydown: (event) => this.key(event)});
    this.text.value = EXAMPLE;
    this.host = element("details", {id: "written"},
      element("summary", {}, "A schedule of your own"),
      element("p", {class: "muted small"}, "A Python function that yields what a rank does, or a table as CSV with a line for each rank. It runs here, in your browser."),
      this.text,
      element("div", {class: "tools"}, element("label", {for: "written-ranks"}, "P ranks"), this.ranks,
        element("label", {for: "written-microbatches"}, "M microbatches"), this.microbatches,
        element("button", {type: "button", id: "show-written", title: "Ctrl+Enter", click: () => this.show()}, "Prove and draw it")));
    this.host.open = location.hash === "#written";
    document.getElementById("run").before(this.host);
  }

  /** Keys belong to the text, but for the one that shows it. */
  key(event) {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.show();
  }

  show() {
    const {value} = this.text, table = /^[\s,"(]*\d+[A-Z]/m.test(value);
    studio.load(table ? {csv: value, file: "your table"} : {python: value, ranks: typed(this.ranks.value), microbatches: typed(this.microbatches.value)});
  }
}

new Written();
