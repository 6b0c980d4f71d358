// How the playground asks: a worker of this page, which runs Penstock's own Python, in the place of a server.

const ANSWER_WITHIN = 60; // seconds without a word; then Python is started anew
const STOP_WITHIN = 2; // seconds for what nobody waits for any more: about what a new start takes
const BYTES = Number(document.body.dataset.bytes);
const FROM_A_FILE = "A browser starts no Python from a file: run `python -m http.server` in the site's folder, and open http://localhost:8000/playground/.";

class Python {
  constructor() {
    this.waiting = []; // questions, and how to tell what comes of them
    this.line = element("p", {id: "python", class: "muted small", role: "status"});
    document.getElementById("proof").before(this.line);
    this.start();
  }

  start() {
    Object.assign(this, {ready: false, asked: null, failed: null});
    try {
      this.worker = new Worker("worker.mjs", {type: "module"});
    } catch {
      return this.stop("its worker could not be started");
    }
    const {worker} = this;
    worker.onmessage = ({data}) => { if (worker === this.worker) this.hear(data); };
    worker.onerror = ({message}) => this.stop(message || "its files could not be loaded");
  }

  hear({bytes, ready, failed, told, answer}) {
    const all = this.megabytes(BYTES);
    if (bytes) this.say(bytes < BYTES ? `Python and Penstock come to this browser: ${this.megabytes(bytes)} of ${all} MB.` : "Python starts.");
    if (ready) {
      this.ready = true;
      this.say(`Python runs in this browser (${all} MB). What you do here leaves it only in a link that you pass on.`);
      this.next();
    }
    if (failed) this.stop(failed);
    if (told && !this.asked.dropped) {
      this.asked.told(JSON.parse(told));
      this.within(ANSWER_WITHIN);
    }
    if (answer) this.tell(JSON.parse(answer));
  }

  megabytes(bytes) { return (bytes / 1e6).toFixed(1); }

  say(text) { this.line.textContent = text; }

  ask(question, {signal, told = () => {}} = {}) {
    if (this.failed) return Promise.resolve({error: this.failed});
    return new Promise((tell) => {
      const asked = {question, told, tell, dropped: false};
      signal?.addEventListener("abort", () => this.drop(asked));
      this.waiting.push(asked);
      this.next();
    });
  }

  next() {
    if (!this.ready || this.asked || !this.waiting.length) return;
    this.asked = this.waiting.shift();
    this.within(ANSWER_WITHIN);
    this.worker.postMessage(JSON.stringify(this.asked.question));
  }

  within(seconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.stop(`no word for ${seconds} seconds (does the schedule's function end?)`), 1000 * seconds);
  }

  tell(answer) {
    const {tell} = this.asked;
    clearTimeout(this.timer);
    this.asked = null;
    tell(answer);
    this.next();
  }

  /** Nobody waits for it any more. */
  drop(asked) {
    this.waiting = this.waiting.filter((other) => other !== asked);
    asked.dropped = true;
    asked.tell(null);
    if (asked === this.asked) this.within(STOP_WITHIN);
  }

  /** Python is started anew after a question that it could not answer; if it never ran, nothing can be answered. */
  stop(why) {
    const {ready, asked} = this;
    clearTimeout(this.timer);
    this.worker?.terminate();
    if (ready) {
      this.start();
      asked?.tell({error: `Python was stopped, and starts anew: ${why}.`});
      return;
    }
    this.failed = location.protocol === "file:" ? FROM_A_FILE : `Python did not start: ${why}.`;
    this.say(this.failed);
    for (const {tell} of this.waiting.splice(0)) tell({error: this.failed});
  }
}

const python = new Python();

/** The answer to `question`; {error}, a sentence, where there is none; null once `signal` drops it. `told` hears of the way. */
function ask(path, question, how) { return python.ask(question, how); }
