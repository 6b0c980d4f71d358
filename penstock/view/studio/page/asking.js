// How the page asks: over HTTP. The playground, which has no server, has an `ask` of its own in the place of this file.

/** What is answered to `question` at `path`, or to none there; {error}, a sentence, where nothing answers; null once `signal` drops it.
 * `told` hears what is said on the way: {share, makespan} of a search. */
async function ask(path, question, {signal, told = () => {}} = {}) {
  try {
    const asked = question && {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(question), signal};
    const response = await fetch(path, asked), kind = response.headers.get("Content-Type");
    if (kind.startsWith("application/x-ndjson")) return await lastOf(response.body, told);
    return kind.startsWith("application/json") ? await response.json() : {error: await response.text()};
  } catch {
    return signal?.aborted ? null : {error: "The studio does not answer: is `penstock studio` still running?"};
  }
}

/** Of lines of JSON the one that is the answer; empty ones say that there is more to come. */
async function lastOf(body, told) {
  let parts = [], answer = null;
  const end = () => {
    const line = parts.join(""), said = line && JSON.parse(line);
    parts = [];
    if (said && "share" in said) told(said); else if (said) answer = said;
  };
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let {done, value} = await reader.read(); !done; {done, value} = await reader.read()) {
    const [first, ...more] = value.split("\n");
    parts.push(first);
    for (const part of more) { end(); parts.push(part); }
  }
  return answer;
}
