// The table below the chart, and the buttons for the whole table.

class Editor {
  /** The buttons call methods of `studio`. */
  constructor(section, studio) {
    const button = (id, text, click, title = "") => element("button", {type: "button", id, click, ...(title && {title})}, text);
    this.undoButton = button("undo", "Undo", () => studio.undo(), "Ctrl+Z");
    this.redoButton = button("redo", "Redo", () => studio.redo(), "Ctrl+Shift+Z");
    this.resetButton = button("reset", "Reset", () => studio.setTable(studio.state.base), "Return to the table as it was chosen or loaded");
    this.compareButton = button("keep", "Compare with this", () => studio.toggleComparison(), "Keep this table, and show how the next ones differ from it");
    this.fitButton = button("fit-limit", "Make it fit my memory limit", () => studio.improve(), "Search for a table that keeps the memory limit");
    this.improveButton = button("better", "Find a better table", () => studio.improve());
    this.removeButton = button("remove-run", "Remove run", () => studio.removeRun());
    this.verdict = element("p", {class: "proof fails", "aria-hidden": "true"});
    const host = element("div", {class: "scroll table"});
    section.append(
      element("h3", {}, "The table"),
      element("p", {class: "muted small"}, "The order of each rank's actions. Drag one, here or in the chart, or select it here and press Alt with an arrow key."),
      element("div", {class: "tools"},
        element("span", {class: "group"}, button("earlier", "← Earlier", () => this.table.moveSelected(-1)), button("later", "Later →", () => this.table.moveSelected(1))),
        this.undoButton, this.redoButton, this.resetButton, this.compareButton, this.improveButton, this.fitButton,
        fileButton("load-csv", "Load CSV", ".csv,text/csv", (text, file) => studio.load({csv: text, file})),
        button("save-csv", "Save CSV", () => saveCsv(studio.answer)),
        fileButton("load-run", "Load run", ".json,application/json", (text, file) => studio.load({run: text, file}),
          "the timeline.json of a measured run, to draw above the plan"), this.removeButton),
      element("p", {id: "found", class: "proof", role: "status", hidden: ""}), host, this.verdict);
    this.table = new Table(host, {
      onMove: (rank, from, to) => studio.move(rank, from, to),
      onSelect: (name) => {
        page.charts[0].selected = page.records[0].timeline.blocks.get(name) || null;
        page.redraw();
      },
    });
  }

  /** Show the table of `answer`, the actions that its proof names, and which buttons are enabled. */
  show({rows, proof}, {state, past, future}) {
    this.table.show(rows);
    this.table.mark(proof);
    this.verdict.textContent = proof.text;
    this.verdict.hidden = proof.holds;
    this.undoButton.disabled = !past.length;
    this.redoButton.disabled = !future.length;
    this.resetButton.disabled = state.table === state.base;
    this.removeButton.hidden = state.unit !== "ms";
    this.compareButton.textContent = state.against ? "Stop comparing" : "Compare with this";
    this.fitButton.hidden = state.max_in_flight === null || proof.holds;
    this.improveButton.disabled = !this.fitButton.hidden;
    this.improveButton.title = state.max_in_flight === null ? "Search for a shorter step in the memory that each rank takes now" : "Search for a shorter step within the memory limit";
  }
}

/** Return a button that lets the user choose a file, and calls `read(text, name)`. */
function fileButton(id, text, accept, read, title = "") {
  const input = element("input", {type: "file", id: `${id}-file`, accept, class: "visually-hidden", tabindex: -1, "aria-hidden": "true", change: async () => {
    const [file] = input.files;
    if (file) read(await file.text(), file.name);
    input.value = "";
  }});
  return element("span", {}, element("button", {type: "button", id, click: () => input.click(), ...(title && {title})}, text), input);
}

function saveCsv({csv, name}) {
  const url = URL.createObjectURL(new Blob([csv], {type: "text/csv"}));
  element("a", {href: url, download: `${name.replace(/[^\w.-]+/g, "-").replace(/-$|\.csv/g, "")}.csv`}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
