// Runs Penstock's Python in Pyodide, and answers one question after the other.

import {loadPyodide} from "./pyodide/pyodide.mjs";

const fetchUncounted = self.fetch;
let bytes = 0;

/** Fetch, and report the number of bytes loaded so far. */
self.fetch = async (...options) => {
  const response = await fetchUncounted(...options);
  const counter = new TransformStream({transform(chunk, out) {
    postMessage({bytes: bytes += chunk.length});
    out.enqueue(chunk);
  }});
  return new Response(response.body.pipeThrough(counter), response);
};

async function start() {
  const [python, files] = await Promise.all([loadPyodide(), fetch("penstock.zip").then((response) => response.arrayBuffer())]);
  python.unpackArchive(files, "zip");
  const {answer_json: answerJson} = python.pyimport("answering");
  const report = (progress) => postMessage({progress});
  self.onmessage = ({data}) => {
    try {
      postMessage({answer: answerJson(data, report)});
    } catch (error) {
      postMessage({failure: error.message.trim().split("\n").at(-1)});
    }
  };
  postMessage({ready: true});
}

start().catch((error) => postMessage({failure: error.message}));
