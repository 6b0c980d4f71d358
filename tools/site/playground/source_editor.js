// An editor for the reader's own schedule: a Python function, or a table as CSV.

const EXAMPLE = `# Yield the actions of a rank in order: stage, kind, microbatch. This is GPipe. What if a B came earlier?
def schedule(rank, ranks, microbatches):
    for m in range(microbatches):
        yield f"{rank}F{m}"
    for m in range(microbatches):
        yield f"{rank}B{m}"
`;

class SourceEditor {
  constructor() {
    const size = (id, value) => element("input", {id, inputmode: "numeric", value}), {ranks, microbatches} = studio.state;
    Object.assign(this, {ranks: size("written-ranks", ranks), microbatches: size("written-microbatches", microbatches)});
    this.text = element("textarea", {id: "source", rows: 9, spellcheck: "false", "aria-label": "A Python function, or a table as CSV", keydown: (event) => this.onKey(event)});
    this.text.value = EXAMPLE;
    this.host = element("details", {id: "written"},
      element("summary", {}, "A schedule of your own"),
      element("p", {class: "muted small"}, "A Python function that yields a rank's actions, or a table as CSV with a line for each rank. It runs here, in your browser."),
      this.text,
      element("div", {class: "tools"}, element("label", {for: "written-ranks"}, "P ranks"), this.ranks,
        element("label", {for: "written-microbatches"}, "M microbatches"), this.microbatches,
        element("button", {type: "button", id: "show-written", title: "Ctrl+Enter", click: () => this.show()}, "Prove and draw it")));
    this.host.open = location.hash === "#written";
    document.getElementById("run").before(this.host);
  }

  /** Keep keys from the page's shortcuts; Ctrl+Enter shows the schedule. */
  onKey(event) {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.show();
  }

  show() {
    const {value} = this.text, isTable = /^[\s,"(]*\d+[A-Z]/m.test(value);
    studio.load(isTable ? {csv: value, file: "your table"} : {python: value, ranks: parseField(this.ranks.value), microbatches: parseField(this.microbatches.value)});
  }
}

new SourceEditor();
