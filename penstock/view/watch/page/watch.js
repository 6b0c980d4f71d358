"use strict";
// The page of a run: its last step in numbers, its losses as a curve, its last timeline in a frame. It polls the server.

const POLL_MS = 1000;
let shownTimeline = null; // the one in the frame

const FIGURES = {
  "loss": ({loss}) => loss?.toFixed(4) ?? "not finite",
  "tokens or rows a second": ({tokens_per_second: rate}) => Math.round(rate).toLocaleString("en"),
  "idle, of all ranks' time": ({idle_share: idle, idle_share_of_the_table: even}) => shares(idle, even),
  "bubble, idle of the busiest rank": ({bubble, bubble_of_the_table: even}) => shares(bubble, even),
  "memory, fullest rank": ({peak_memory_bytes: bytes}) => `${Math.round(bytes / 1e6).toLocaleString("en")} MB`,
  "a step": ({seconds}) => `${Number((1e3 * seconds).toPrecision(4))} ms`,
};

/** Return a measured share, and that with equal stages. */
function shares(measured, even) { return [percent(measured), `with even stages ${percent(even)}`]; }

function show({name, last, losses, timeline}) {
  document.getElementById("name").textContent = name;
  if (last) {
    document.getElementById("announcement").textContent = `step ${last.step}`;
    document.getElementById("figures").replaceChildren(...Object.entries(FIGURES).map(([term, format]) => {
      const [value, comparison] = [format(last)].flat(), figure = document.createElement("div");
      for (const [tag, text] of [["dt", term], ["dd", value], ["dd", comparison]]) {
        if (text) figure.append(Object.assign(document.createElement(tag), {textContent: text, className: text === comparison ? "comparison" : ""}));
      }
      return figure;
    }));
    draw(losses.filter(([, loss]) => loss !== null));
  }
  if (timeline !== shownTimeline) {
    shownTimeline = timeline;
    const frame = document.getElementById("timeline");
    frame.hidden = timeline === null;
    if (timeline !== null) frame.src = `/timeline?${timeline}`;
  }
}

/** Draw the losses over their steps, scaled from the lowest to the highest. */
function draw(losses) {
  document.getElementById("curve").hidden = losses.length < 2;
  if (losses.length < 2) return;
  const values = losses.map(([, loss]) => loss), low = Math.min(...values), high = Math.max(...values), [[first], [last]] = [losses[0], losses.at(-1)];
  const points = losses.map(([step, loss]) => `${(1000 * (step - first)) / (last - first)},${100 - (100 * (loss - low)) / (high - low || 1)}`);
  document.querySelector("#losses polyline").setAttribute("points", points.join(" "));
  const labels = {highest: high.toFixed(4), lowest: low.toFixed(4), first: `step ${first}`, last: `step ${last}`};
  for (const [id, text] of Object.entries(labels)) document.getElementById(id).textContent = text;
  document.getElementById("losses").setAttribute("aria-label", `Loss from ${labels.first} to ${labels.last}: at most ${labels.highest}, at least ${labels.lowest}`);
}

async function poll() {
  try {
    show(await (await fetch("/state")).json());
  } catch {
    document.getElementById("announcement").textContent = "The run does not answer: it has ended, and `penstock watch` shows it from its folder.";
  }
  setTimeout(poll, POLL_MS);
}

poll();
