// How the playground asks: a worker of this page, which runs Penstock's own Python, in the place of a server.

const ANSWER_WITHIN = 30; // seconds for an answer; then Python is started anew
const BYTES = Number(document.body.dataset.bytes);
const FROM_A_FILE = "A browser starts no Python from a file: run `python -m http.server` in the site's folder, and open http://localhost:8000/playground/.";

class Python {
  constructor() {
    this.waiting = new Map(); // path -> the latest question there, and how to tell its answer
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
    this.worker.onmessage = ({data}) => this.hear(data);
    this.worker.onerror = ({message}) => this.stop(message || "its files could not be loaded");
  }

  hear({bytes, ready, failed, answer}) {
    const all = this.megabytes(BYTES);
    if (bytes) this.say(bytes < BYTES ? `Python and Penstock come to this browser: ${this.megabytes(bytes)} of ${all} MB.` : "Python starts.");
    if (ready) {
      this.ready = true;
      this.say(`Python runs in this browser (${all} MB). What you do here leaves it only in a link that you pass on.`);
      this.next();
    }
    if (failed) this.stop(failed);
    if (answer) this.tell(JSON.parse(answer));
  }

  megabytes(bytes) { return (bytes / 1e6).toFixed(1); }

  say(text) { this.line.textContent = text; }

  /** The promise of an answer. Who asks at a path where a question still waits takes its place. */
  ask(path, question) {
    if (this.failed) return Promise.resolve({error: this.failed});
    return new Promise((tell) => {
      this.waiting.get(path)?.tell({error: "Another question came after this one."});
      this.waiting.set(path, {question, tell});
      this.next();
    });
  }

  next() {
    const [first] = this.waiting;
    if (!first || !this.ready || this.asked) return;
    const [path, asked] = first;
    this.waiting.delete(path);
    this.asked = asked;
    this.timer = setTimeout(() => this.stop(`no answer in ${ANSWER_WITHIN} seconds (does the schedule's function end?)`), 1000 * ANSWER_WITHIN);
    this.worker.postMessage(JSON.stringify(asked.question));
  }

  tell(answer) {
    const {tell} = this.asked;
    clearTimeout(this.timer);
    this.asked = null;
    tell(answer);
    this.next();
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
    for (const {tell} of this.waiting.values()) tell({error: this.failed});
    this.waiting.clear();
  }
}

const python = new Python();

/** The answer to `question` at `path`; {error}, a sentence, where there is none. */
function ask(path, question) { return python.ask(path, question); }
