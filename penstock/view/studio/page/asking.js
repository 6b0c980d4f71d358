// How the page asks: over HTTP. The playground, which has no server, has an `ask` of its own in the place of this file.

/** What is answered to `question` at `path`, or to none there; {error}, a sentence, where nothing answers. */
async function ask(path, question) {
  try {
    const asked = question && {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(question)};
    const response = await fetch(path, asked);
    return response.headers.get("Content-Type").startsWith("application/json") ? await response.json() : {error: await response.text()};
  } catch {
    return {error: "The studio does not answer: is `penstock studio` still running?"};
  }
}
