// How an answer is shown: the picture, the proof, what was found, and how it compares with a run or another table.

class Showing {
  /** `moved(rank, from, to)` is told of an action that was put elsewhere in the picture. */
  constructor(moved) {
    this.proof = document.getElementById("proof");
    this.found = document.getElementById("found");
    this.picture = new Picture(page.charts[0], page, moved);
    document.querySelector(".tools .hint").textContent = "Drag an action to another place, or beside one to pan; Ctrl and wheel to zoom, or the wheel alone once the picture is clicked, until Escape.";
  }

  /** Show `answer`, and `other`, the answer for the table that it is compared with; `measured` is a run, `limit` that on memory. */
  show(answer, other, {measured, max_in_flight: limit}) {
    this.showProof(answer);
    this.showFound(answer, limit);
    this.showRun(answer, measured);
    this.subtitle(answer);
    this.draw(answer, other, beside(answer, measured));
  }

  showProof({proof, stopped}) {
    this.proof.textContent = proof.text + (stopped ? ". The picture shows what runs before that, and dashed what never does." : "");
    this.proof.classList.toggle("fails", !proof.holds);
  }

  /** What a search has come to. */
  showFound({found, unit}, limit) {
    this.found.hidden = !found;
    if (!found) return;
    const time = timesIn(unit), {makespan, before, bound, because, proven} = found, memory = limit !== null ? `with ${limit} in flight on a rank` : before === null ? "with any memory" : "in the memory that it took";
    const better = before === null ? `The best that was found ${memory} takes ${time(makespan)}` : makespan < before * (1 - 1e-9)
      ? `Found: ${time(makespan)} alternative of ${time(before)}, ${memory}` : `Nothing shorter than ${time(before)} was found ${memory}`;
    this.found.textContent = `${better}. ${proven ? "No table is shorter" : `No table takes less than ${time(bound)}`}: ${because}.`;
  }

  /** What the table would gain on the ranks of the run, or why the run is not drawn beside it. */
  showRun(answer, measured) {
    const told = document.getElementById("run"), {ranks, microbatches, name, timeline, stopped} = answer;
    told.hidden = !measured || !timeline || stopped;
    if (told.hidden) return;
    const time = timesIn("s"), gain = timeline.makespan / measured.planned - 1;
    told.textContent = beside(answer, measured)
      ? `At the ${measured.source}'s costs ${name} takes ${time(timeline.makespan)}, the ${measured.source}'s table, ${measured.name}, ${time(measured.planned)}: ${Math.abs(gain) < 5e-4 ? "the same" : `${gain > 0 ? "+" : "−"}${percent(Math.abs(gain))}`}.`
      : `${name} takes ${time(timeline.makespan)} at the costs of the ${measured.source}'s layers. The ${measured.source} had ${measured.ranks} ranks and ${measured.microbatches} microbatches, this table has ${ranks} and ${microbatches}: it is drawn alone.`;
  }

  subtitle({ranks, stages, microbatches, rows}) {
    const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;
    const actions = rows.reduce((sum, row) => row.reduce((here, text) => here + (text.startsWith("(") ? 2 : 1), sum), 0);
    document.getElementById("subtitle").textContent = [count(ranks, "rank"), count(stages, "stage"),
      count(microbatches, "microbatch", "microbatches"), count(actions, "action")].join(" · ");
  }

  draw(answer, other, measured) {
    const {name, unit, timeline, stopped, ranks} = answer, alone = stopped && !measured, [chart] = page.charts;
    document.querySelector(".shown").classList.toggle("stopped", alone || !timeline);
    this.picture.answer = null;
    if (!timeline) return; // the last picture stays, pale
    if (stopped) timeline.critical_path = []; // a step that never ends has none
    const recorded = (data) => new TimelineRecord({name: data.name, unit, planned: null, steps: [{label: "planned", timeline: data.timeline}]});
    const record = measured ? new TimelineRecord({...measured, planned: timeline}) : recorded(answer), held = other?.timeline && !other.stopped && recorded(other);
    const all = page.view.to - page.view.from >= page.duration * (1 - 1e-9), selected = chart.selected?.text;
    Object.assign(page, {canResizeBlocks: false, durationBefore: null, records: [record]}); // actions are dragged to another place here
    Object.assign(chart, {record, hovered: null, selected: record.timeline.blocks.get(selected) || null});
    chart.alternative = held && !measured && other.ranks === ranks ? {name: held.name, timeline: held.timeline} : null; // one lane below, not two
    this.picture.show(answer);
    const more = chart.alternative ? ", which is drawn below each rank" : other?.stopped ? ", which never ends" : "";
    document.getElementById("against").replaceChildren(...(other ? [element("h3", {}, `Beside ${other.name}${more}`)] : []), ...(held ? [differencesTable([held, recorded(answer)])] : []));
    page.duration = Math.max(record.makespan, this.picture.end, chart.alternative ? held.makespan : 0) || 1;
    if (all) page.showAll(); else page.setView(page.view.from, page.view.to);
    page.fillPanels(chart, 0);
    if (alone) for (const number of document.querySelectorAll(".figures dd, .legend b")) number.textContent = "–";
    if (alone) document.querySelector(".shares h3").textContent = "Where the time of all ranks went";
    chart.host.setAttribute("aria-label", chart.host.getAttribute("aria-label").replace(/^Timeline of .*?\. Arrow/, `Timeline of ${name}. Arrow`));
    page.hideTip();
    page.layout();
  }
}

/** The run to draw above what is planned: one of as many ranks and microbatches. */
function beside({ranks, microbatches}, measured) {
  return measured && measured.ranks === ranks && measured.microbatches === microbatches ? measured.record : null;
}

/** How times in `unit` are told. */
function timesIn(unit) {
  const record = new TimelineRecord({name: "", unit, planned: null, steps: []});
  return (value) => record.formatTime(value);
}
