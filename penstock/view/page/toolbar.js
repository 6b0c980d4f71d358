// The toolbar above the charts, and the slider of the steps.

const HINT = "Drag to pan, with Shift to select; Ctrl and wheel to zoom, or the wheel alone after a click on the chart, until Escape. Keys: arrows, W A S D, M selects an action, F follows a microbatch, / finds.";
const MAX_LISTED_RANKS = 8;
const ORDERS = {rank: "by rank", idle: "most idle first", stage: "by stage"};

function toolbar(page, extraTools = []) {
  const ranks = Math.max(...page.charts.map((chart) => chart.record.timeline.ranks.length));
  const button = (text, label, click) => element("button", {type: "button", "aria-label": label, title: label, click}, text);
  const zooms = element("span", {class: "group"}, button("−", "Zoom out", () => page.zoom(1 / 0.6)),
    button("+", "Zoom in", () => page.zoom(0.6)), button("All", "Show all", () => page.showAll()));
  const check = (name, text, title = text) => element("label", {class: "chip", title}, element("input", {
    type: "checkbox", ...(page.options[name] && {checked: ""}), id: `show-${name}`, change: ({target}) => page.setOption(name, target.checked),
  }), text);
  const sort = element("select", {id: "sort", "aria-label": "Order of the ranks", change: () => { page.setOption("sort", sort.value); page.finder.say(sort.value === "idle" ? listIdleShares(page.charts[0]) : ""); }},
    ...Object.entries(ORDERS).map(([value, text]) => element("option", {value}, text)));
  const checks = [
    ...(page.records.some((record) => record.predicted) ? [check("predicted", "Predicted")] : []),
    ...(page.records.some(({timeline}) => timeline.blocks.size) ? [check("memory", "Memory"), check("path", "Critical path"),
      check("hues", "Microbatches", "Each microbatch has a hue; lightness shows the kind")] : []),
    check("select", "Select", "Drag selects time and ranks, as with Shift"),
    ...(ranks > 4 ? [check("fit", "All ranks in sight")] : []),
  ];
  return element("div", {class: "tools"}, zooms, ...checks, ...(ranks > 1 ? [sort] : []), ...extraTools, page.finder.field, page.finder.output, element("span", {class: "hint muted"}, HINT));
}

/** Return a sentence with the idle share of each rank, or of the first eight. */
function listIdleShares({record: {timeline: {data}}, order}) {
  const shares = order.map((rank) => percent(1 - data.busy[rank] / data.makespan)), texts = order.slice(0, MAX_LISTED_RANKS).map((rank, index) => `rank ${rank} ${shares[index]}`);
  return new Set(shares).size === 1 ? `all ranks are idle for ${shares[0]} of the step` : `idle, of the step: ${texts.join(", ")}${order.length > MAX_LISTED_RANKS ? " .." : ""}`;
}

function stepSlider(page, chart, index) {
  const {record} = chart, output = element("output", {}, record.labels[record.step]);
  const range = element("input", {
    type: "range", min: 0, max: record.stepData.length - 1, value: record.step, id: `step-${index}`, "aria-valuetext": record.labels[record.step],
    input: ({target}) => {
      record.step = Number(target.value);
      output.textContent = record.labels[record.step];
      target.setAttribute("aria-valuetext", record.labels[record.step]);
      chart.selected = chart.hovered = null;
      page.fillPanels(chart, index);
      if (page.records.length > 1) page.differences.replaceChildren(differencesTable(page.records));
      page.layout();
    },
  });
  return element("div", {class: "step"}, element("label", {for: `step-${index}`}, "Step"), range, output);
}
