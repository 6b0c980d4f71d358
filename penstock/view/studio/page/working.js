// That something is computed: for how long already, how far it has come, and a button that stops it.

const SOON = 300; // milliseconds that nothing is said of

class Working {
  constructor(host) {
    this.told = element("span");
    this.host = host;
    host.append(this.told, element("button", {type: "button", id: "stop", click: () => this.stop()}, "Stop"));
  }

  /** From now on `what` goes on; `stop` is called by the button. */
  begin(what, stop) {
    clearInterval(this.clock);
    Object.assign(this, {what, stop, more: "", since: performance.now()});
    this.clock = setInterval(() => this.say(), 100);
  }

  /** How far a search has come. */
  hear({share}, best) { this.more = `, ${Math.round(100 * share)} %, best so far ${best}`; }

  say() {
    const seconds = (performance.now() - this.since) / 1000;
    if (1000 * seconds < SOON) return;
    if (this.host.hidden) document.getElementById("announcement").textContent = this.what;
    this.host.hidden = false;
    this.told.textContent = `${this.what}${this.more}: ${seconds.toFixed(1)} s`;
  }

  end() {
    clearInterval(this.clock);
    this.host.hidden = true;
  }
}
