// Sends questions to a worker of this page, which runs Penstock's own Python, in place of a server.

const ANSWER_TIMEOUT_SECONDS = 60; // without a message from Python, which is then restarted
const ABORT_TIMEOUT_SECONDS = 2; // for an answer that is no longer wanted: about the time of a restart
const TOTAL_BYTES = Number(document.body.dataset.bytes);
const OPENED_AS_FILE = "A browser starts no Python from a file: run `python -m http.server` in the site's folder, and open http://localhost:8000/playground/.";

class Python {
  constructor() {
    this.queue = []; // requests: {question, onProgress, resolve, aborted}
    this.line = element("p", {id: "python", class: "muted small", role: "status"});
    document.getElementById("proof").before(this.line);
    this.start();
  }

  start() {
    Object.assign(this, {ready: false, request: null, failure: null});
    try {
      this.worker = new Worker("worker.mjs", {type: "module"});
    } catch {
      return this.stop("its worker could not be started");
    }
    const {worker} = this;
    worker.onmessage = ({data}) => { if (worker === this.worker) this.onMessage(data); };
    worker.onerror = ({message}) => this.stop(message || "its files could not be loaded");
  }

  onMessage({bytes, ready, failure, progress, answer}) {
    const total = this.megabytes(TOTAL_BYTES);
    if (bytes) this.say(bytes < TOTAL_BYTES ? `Loading Python and Penstock: ${this.megabytes(bytes)} of ${total} MB.` : "Python starts.");
    if (ready) {
      this.ready = true;
      this.say(`Python runs in this browser (${total} MB). Your work leaves it only in a link that you share.`);
      this.sendNext();
    }
    if (failure) this.stop(failure);
    if (progress && !this.request.aborted) {
      this.request.onProgress(JSON.parse(progress));
      this.startTimer(ANSWER_TIMEOUT_SECONDS);
    }
    if (answer) this.finish(JSON.parse(answer));
  }

  megabytes(bytes) { return (bytes / 1e6).toFixed(1); }

  say(text) { this.line.textContent = text; }

  ask(question, {signal, onProgress = () => {}} = {}) {
    if (this.failure) return Promise.resolve({error: this.failure});
    return new Promise((resolve) => {
      const request = {question, onProgress, resolve, aborted: false};
      signal?.addEventListener("abort", () => this.abort(request));
      this.queue.push(request);
      this.sendNext();
    });
  }

  sendNext() {
    if (!this.ready || this.request || !this.queue.length) return;
    this.request = this.queue.shift();
    this.startTimer(ANSWER_TIMEOUT_SECONDS);
    this.worker.postMessage(JSON.stringify(this.request.question));
  }

  startTimer(seconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.stop(`no answer for ${seconds} seconds (does the schedule's function end?)`), 1000 * seconds);
  }

  finish(answer) {
    const {resolve} = this.request;
    clearTimeout(this.timer);
    this.request = null;
    resolve(answer);
    this.sendNext();
  }

  abort(request) {
    this.queue = this.queue.filter((queued) => queued !== request);
    request.aborted = true;
    request.resolve(null);
    if (request === this.request) this.startTimer(ABORT_TIMEOUT_SECONDS);
  }

  /** Restart Python after a question that it could not answer; if it never ran, refuse all questions. */
  stop(why) {
    const {ready, request} = this;
    clearTimeout(this.timer);
    this.worker?.terminate();
    if (ready) {
      this.start();
      request?.resolve({error: `Python was stopped, and starts again: ${why}.`});
      return;
    }
    this.failure = location.protocol === "file:" ? OPENED_AS_FILE : `Python did not start: ${why}.`;
    this.say(this.failure);
    for (const {resolve} of this.queue.splice(0)) resolve({error: this.failure});
  }
}

const python = new Python();

/** Return the answer to `question`; {error}, a sentence, if there is none; null once `signal` aborts. See the studio's client.js. */
function ask(path, question, options) { return python.ask(question, options); }
