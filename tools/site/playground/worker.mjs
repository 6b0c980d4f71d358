// Python in a worker: Pyodide with Penstock's own files. It answers one question after the other.

import {loadPyodide} from "./pyodide/pyodide.mjs";

const fetched = self.fetch;
let bytes = 0;

/** What is fetched is counted, so that the page can say how much has come. */
self.fetch = async (...asked) => {
  const response = await fetched(...asked);
  const count = new TransformStream({transform(piece, out) {
    postMessage({bytes: bytes += piece.length});
    out.enqueue(piece);
  }});
  return new Response(response.body.pipeThrough(count), response);
};

async function start() {
  const [python, files] = await Promise.all([loadPyodide(), fetch("penstock.zip").then((response) => response.arrayBuffer())]);
  python.unpackArchive(files, "zip");
  const {answer_json} = python.pyimport("answering");
  const tell = (told) => postMessage({told});
  self.onmessage = ({data}) => {
    try {
      postMessage({answer: answer_json(data, tell)});
    } catch (error) {
      postMessage({failed: error.message.trim().split("\n").at(-1)});
    }
  };
  postMessage({ready: true});
}

start().catch((error) => postMessage({failed: error.message}));
