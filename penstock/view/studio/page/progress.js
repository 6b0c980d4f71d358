// The notice of a running computation: its time, its progress, and a button that stops it.

const SHOW_AFTER_MS = 300; // shorter computations have no notice

class Progress {
  constructor(host) {
    this.text = element("span");
    this.host = host;
    host.append(this.text, element("button", {type: "button", id: "stop", click: () => this.stop()}, "Stop"));
  }

  /** Start the notice of a computation. `stop` is called by the button. */
  start(name, stop) {
    clearInterval(this.clock);
    Object.assign(this, {name, stop, details: "", since: performance.now()});
    this.clock = setInterval(() => this.render(), 100);
  }

  /** Show the progress of a search. */
  update({share}, bestTime) { this.details = `, ${Math.round(100 * share)} %, best so far ${bestTime}`; }

  render() {
    const milliseconds = performance.now() - this.since;
    if (milliseconds < SHOW_AFTER_MS) return;
    if (this.host.hidden) document.getElementById("announcement").textContent = this.name;
    this.host.hidden = false;
    this.text.textContent = `${this.name}${this.details}: ${(milliseconds / 1000).toFixed(1)} s`;
  }

  end() {
    clearInterval(this.clock);
    this.host.hidden = true;
  }
}
