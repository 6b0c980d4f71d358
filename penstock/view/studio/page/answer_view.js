// Shows an answer: chart, proof, result of a search, and comparison with a run or another table.

class AnswerView {
  /** `onMove(rank, from, to)` is called when an action is moved in the chart. */
  constructor(onMove) {
    this.proof = document.getElementById("proof");
    this.found = document.getElementById("found");
    this.chartEditor = new ChartEditor(page.charts[0], page, onMove);
    document.querySelector(".tools .hint").textContent = "Drag an action to move it, or the background to pan; Ctrl and wheel to zoom, or the wheel alone after a click on the chart, until Escape.";
  }

  /** Show `answer`. `comparison`: the answer for the table to compare it with; `measured`: a run; `limit`: the memory limit. */
  show(answer, comparison, {measured, max_in_flight: limit}) {
    this.showProof(answer);
    this.showFound(answer, limit);
    this.showRun(answer, measured);
    this.showSubtitle(answer);
    this.draw(answer, comparison, matchingRun(answer, measured));
  }

  showProof({proof, stopped}) {
    this.proof.textContent = proof.text + (stopped ? ". The chart shows the actions that run before that, and dashed those that never run." : "");
    this.proof.classList.toggle("fails", !proof.holds);
  }

  /** Show the result of a search. */
  showFound({found, unit}, limit) {
    this.found.hidden = !found;
    if (!found) return;
    const time = timeFormatter(unit), {makespan, before, bound, because, proven} = found, memory = limit !== null ? `with ${limit} in flight on a rank` : before === null ? "with any memory" : "in the memory that it took";
    const better = before === null ? `The best that was found ${memory} takes ${time(makespan)}` : makespan < before * (1 - 1e-9)
      ? `Found: ${time(makespan)} instead of ${time(before)}, ${memory}` : `Nothing shorter than ${time(before)} was found ${memory}`;
    this.found.textContent = `${better}. ${proven ? "No table is shorter" : `No table takes less than ${time(bound)}`}: ${because}.`;
  }

  /** Show what the table would gain on the ranks of the run, or why the run is not drawn with it. */
  showRun(answer, measured) {
    const line = document.getElementById("run"), {ranks, microbatches, name, timeline, stopped} = answer;
    line.hidden = !measured || !timeline || stopped;
    if (line.hidden) return;
    const time = timeFormatter("s"), gain = timeline.makespan / measured.predicted - 1;
    line.textContent = matchingRun(answer, measured)
      ? `At the ${measured.source}'s costs ${name} takes ${time(timeline.makespan)}, the ${measured.source}'s table, ${measured.name}, ${time(measured.predicted)}: ${Math.abs(gain) < 5e-4 ? "the same" : `${gain > 0 ? "+" : "−"}${percent(Math.abs(gain))}`}.`
      : `${name} takes ${time(timeline.makespan)} at the costs of the ${measured.source}'s layers. The ${measured.source} had ${measured.ranks} ranks and ${measured.microbatches} microbatches, this table has ${ranks} and ${microbatches}: it is drawn alone.`;
  }

  showSubtitle({ranks, stages, microbatches, rows}) {
    const count = (number, noun, plural = `${noun}s`) => `${number} ${number === 1 ? noun : plural}`;
    const actions = rows.reduce((sum, row) => row.reduce((total, text) => total + (text.startsWith("(") ? 2 : 1), sum), 0);
    document.getElementById("subtitle").textContent = [count(ranks, "rank"), count(stages, "stage"),
      count(microbatches, "microbatch", "microbatches"), count(actions, "action")].join(" · ");
  }

  draw(answer, comparison, measured) {
    const {name, unit, timeline, stopped, ranks} = answer, isIncomplete = stopped && !measured, [chart] = page.charts;
    document.querySelector(".shown").classList.toggle("stopped", isIncomplete || !timeline);
    this.chartEditor.answer = null;
    if (!timeline) return; // the last chart stays, pale
    if (stopped) timeline.critical_path = []; // an incomplete step has none
    const recordOf = (data) => new TimelineRecord({name: data.name, unit, predicted: null, steps: [{label: "planned", timeline: data.timeline}]});
    const record = measured ? new TimelineRecord({...measured, predicted: timeline}) : recordOf(answer), compared = comparison?.timeline && !comparison.stopped && recordOf(comparison);
    const showsAll = page.view.to - page.view.from >= page.duration * (1 - 1e-9), selected = chart.selected?.text;
    Object.assign(page, {canResizeBlocks: false, durationBefore: null, records: [record]}); // actions are moved here
    Object.assign(chart, {record, hovered: null, selected: record.timeline.blocks.get(selected) || null});
    chart.alternative = compared && !measured && comparison.ranks === ranks ? {name: compared.name, timeline: compared.timeline} : null; // one lane below at most
    this.chartEditor.show(answer);
    const more = chart.alternative ? ", which is drawn below each rank" : comparison?.stopped ? ", which never ends" : "";
    document.getElementById("against").replaceChildren(...(comparison ? [element("h3", {}, `Compared with ${comparison.name}${more}`)] : []), ...(compared ? [differencesTable([compared, recordOf(answer)])] : []));
    page.duration = Math.max(record.makespan, this.chartEditor.end, chart.alternative ? compared.makespan : 0) || 1;
    if (showsAll) page.showAll(); else page.setView(page.view.from, page.view.to);
    page.fillPanels(chart, 0);
    if (isIncomplete) for (const number of document.querySelectorAll(".figures dd, .legend b")) number.textContent = "–";
    if (isIncomplete) document.querySelector(".shares h3").textContent = "Where the time of all ranks went";
    chart.host.setAttribute("aria-label", chart.host.getAttribute("aria-label").replace(/^Timeline of .*?\. Arrow/, `Timeline of ${name}. Arrow`));
    page.hideTip();
    page.layout();
  }
}

/** Return the record of the run if it has as many ranks and microbatches as the table; else null. */
function matchingRun({ranks, microbatches}, measured) {
  return measured && measured.ranks === ranks && measured.microbatches === microbatches ? measured.record : null;
}

/** Return a function that formats times in `unit`. */
function timeFormatter(unit) {
  const record = new TimelineRecord({name: "", unit, predicted: null, steps: []});
  return (value) => record.formatTime(value);
}
