// The table under the picture, and the buttons above it: what is done with a table as a whole.

class Editor {
  /** `studio` does what the buttons say. */
  constructor(section, studio) {
    const button = (id, text, click, title = "") => element("button", {type: "button", id, click, ...(title && {title})}, text);
    this.undoes = button("undo", "Undo", () => studio.undo(), "Ctrl+Z");
    this.redoes = button("redo", "Redo", () => studio.redo(), "Ctrl+Shift+Z");
    this.resets = button("reset", "Reset", () => studio.put(studio.state.base), "Back to the table as it was chosen or loaded");
    this.keeps = button("keep", "Compare with this", () => studio.keep(), "Keep this table, and see how the next ones differ from it");
    this.fits = button("fit-limit", "Make it fit my memory limit", () => studio.improve(), "Search for a table that keeps the memory limit");
    this.betters = button("better", "Find a better table", () => studio.improve());
    this.removes = button("remove-run", "Remove run", () => studio.removeRun());
    this.verdict = element("p", {class: "proof fails", "aria-hidden": "true"});
    const host = element("div", {class: "scroll table"});
    section.append(
      element("h3", {}, "The table"),
      element("p", {class: "muted small"}, "The order of each rank's actions. Drag one to another place, here or in the picture, or select it here and press Alt with an arrow key."),
      element("div", {class: "tools"},
        element("span", {class: "group"}, button("earlier", "← Earlier", () => this.table.shift(-1)), button("later", "Later →", () => this.table.shift(1))),
        this.undoes, this.redoes, this.resets, this.keeps, this.betters, this.fits,
        opener("load-csv", "Load CSV", ".csv,text/csv", (text, file) => studio.load({csv: text, file})),
        button("save-csv", "Save CSV", () => save(studio.answer)),
        opener("load-run", "Load run", ".json,application/json", (text, file) => studio.load({run: text, file}),
          "the timeline.json of a measured run, to lay over what is planned"), this.removes),
      element("p", {id: "found", class: "proof", role: "status", hidden: ""}), host, this.verdict);
    this.table = new Table(host, {
      moved: (rank, from, to) => studio.move(rank, from, to),
      chosen: (name) => {
        page.charts[0].selected = page.records[0].timeline.blocks.get(name) || null;
        page.redraw();
      },
    });
  }

  /** Show the table of `answer`, what the proof says of it, and which buttons do something. */
  show({rows, proof}, {state, past, future}) {
    this.table.show(rows);
    this.table.mark(proof);
    this.verdict.textContent = proof.text;
    this.verdict.hidden = proof.holds;
    this.undoes.disabled = !past.length;
    this.redoes.disabled = !future.length;
    this.resets.disabled = state.table === state.base;
    this.removes.hidden = state.unit !== "ms";
    this.keeps.textContent = state.against ? "Compare no longer" : "Compare with this";
    this.fits.hidden = state.max_in_flight === null || proof.holds;
    this.betters.disabled = !this.fits.hidden;
    this.betters.title = state.max_in_flight === null ? "Search for a shorter step in the memory that each rank takes now" : "Search for a shorter step within the memory limit";
  }
}

/** A button that reads a file. */
function opener(id, text, accept, read, title = "") {
  const input = element("input", {type: "file", id: `${id}-file`, accept, class: "visually-hidden", tabindex: -1, "aria-hidden": "true", change: async () => {
    const [file] = input.files;
    if (file) read(await file.text(), file.name);
    input.value = "";
  }});
  return element("span", {}, element("button", {type: "button", id, click: () => input.click(), ...(title && {title})}, text), input);
}

function save({csv, name}) {
  const address = URL.createObjectURL(new Blob([csv], {type: "text/csv"}));
  element("a", {href: address, download: `${name.replace(/[^\w.-]+/g, "-").replace(/-$|\.csv/g, "")}.csv`}).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
