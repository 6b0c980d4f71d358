// Send questions over HTTP. The playground, which has no server, has its own `ask` in place of this file.

/** Return the answer to `question` at `path`, or to a GET without a question; {error}, a sentence, if it fails; null once `signal` aborts.
 * `onProgress` is called with the progress of a search, {share, makespan}. */
async function ask(path, question, {signal, onProgress = () => {}} = {}) {
  try {
    const options = question && {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(question), signal};
    const response = await fetch(path, options), contentType = response.headers.get("Content-Type");
    if (contentType.startsWith("application/x-ndjson")) return await readAnswer(response.body, onProgress);
    return contentType.startsWith("application/json") ? await response.json() : {error: await response.text()};
  } catch {
    return signal?.aborted ? null : {error: "The studio does not answer: is `penstock studio` still running?"};
  }
}

/** Read lines of JSON: progress, then the answer, which is returned; empty lines only keep the connection. */
async function readAnswer(body, onProgress) {
  let parts = [], answer = null;
  const endLine = () => {
    const line = parts.join(""), data = line && JSON.parse(line);
    parts = [];
    if (data && "share" in data) onProgress(data); else if (data) answer = data;
  };
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let {done, value} = await reader.read(); !done; {done, value} = await reader.read()) {
    const [first, ...more] = value.split("\n");
    parts.push(first);
    for (const part of more) { endLine(); parts.push(part); }
  }
  return answer;
}
