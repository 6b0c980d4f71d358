// The row of tools above the charts, and the slider of the steps.

const HINT = "Drag to pan, with Shift to select; Ctrl and wheel to zoom, or the wheel alone once the chart is clicked, until Escape. Keys: arrows, W A S D, M marks, F follows, / finds.";
const MOST_TOLD = 8; // ranks
const ORDERS = {rank: "by rank", idle: "most idle first", stage: "by stage"};

function toolsOf(page, more = []) {
  const ranks = Math.max(...page.charts.map((chart) => chart.record.timeline.ranks.length));
  const button = (text, label, click) => element("button", {type: "button", "aria-label": label, title: label, click}, text);
  const zooms = element("span", {class: "group"}, button("−", "Zoom out", () => page.zoom(1 / 0.6)),
    button("+", "Zoom in", () => page.zoom(0.6)), button("All", "Show all", () => page.fit()));
  const check = (name, text, title = text) => element("label", {class: "chip", title}, element("input", {
    type: "checkbox", ...(page.options[name] && {checked: ""}), id: `show-${name}`, change: ({target}) => page.set(name, target.checked),
  }), text);
  const sort = element("select", {id: "sort", "aria-label": "Order of the ranks", change: () => { page.set("sort", sort.value); page.finder.say(sort.value === "idle" ? idlest(page.charts[0]) : ""); }},
    ...Object.entries(ORDERS).map(([value, text]) => element("option", {value}, text)));
  const checks = [
    ...(page.records.some((record) => record.planned) ? [check("planned", "Planned")] : []),
    ...(page.records.some(({timeline}) => timeline.blocks.size) ? [check("memory", "Memory"), check("path", "Critical path"),
      check("hued", "Microbatches", "Each microbatch has a hue; how light it is tells the kind")] : []),
    check("select", "Select", "Drag selects time and ranks, as with Shift"),
    ...(ranks > 4 ? [check("fit", "All ranks in sight")] : []),
  ];
  return element("div", {class: "tools"}, zooms, ...checks, ...(ranks > 1 ? [sort] : []), ...more, page.finder.field, page.finder.told, element("span", {class: "hint muted"}, HINT));
}

/** Which ranks are idle most. */
function idlest({record: {timeline: {data}}, order}) {
  const shares = order.map((rank) => percent(1 - data.busy[rank] / data.makespan)), told = order.slice(0, MOST_TOLD).map((rank, place) => `rank ${rank} ${shares[place]}`);
  return new Set(shares).size === 1 ? `all ranks are idle for ${shares[0]} of the step` : `idle, of the step: ${told.join(", ")}${order.length > MOST_TOLD ? " .." : ""}`;
}

function stepSlider(page, chart, place) {
  const {record} = chart, shown = element("output", {}, record.labels[record.step]);
  const range = element("input", {
    type: "range", min: 0, max: record.raw.length - 1, value: record.step, id: `step-${place}`, "aria-valuetext": record.labels[record.step],
    input: ({target}) => {
      record.step = Number(target.value);
      shown.textContent = record.labels[record.step];
      target.setAttribute("aria-valuetext", record.labels[record.step]);
      chart.selected = chart.hovered = null;
      page.fill(chart, place);
      if (page.records.length > 1) page.differences.replaceChildren(differences(page.records));
      page.arrange();
    },
  });
  return element("div", {class: "step"}, element("label", {for: `step-${place}`}, "Step"), range, shown);
}
