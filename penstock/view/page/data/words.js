// Numbers as people read them.

function scaleOf(seconds) {
  if (seconds >= 1) return [1, "s"];
  return seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

/** Memory as people read it: `12.3 MB` where it is in bytes, else the bare number and its unit, if it has one. */
function amount(held, unit) {
  if (unit !== "bytes") return unit ? `${short(held)} ${unit}` : short(held);
  const [size, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([least]) => held >= least) || [1, "bytes"];
  return `${short(held / size)} ${name}`;
}

function short(value) { return String(Number(value.toPrecision(4))).replace("-", "−"); }

function percent(share) { return `${(100 * share).toFixed(1)} %`; }

/** One number a rank; if all are the same that one, if there are many from where to where they lie. */
function counts(numbers) {
  if (numbers.length > 1 && new Set(numbers).size === 1) return `${short(numbers[0])} on every rank`;
  return numbers.length <= 8 ? numbers.map(short).join("/") : `${short(Math.min(...numbers))} to ${short(Math.max(...numbers))}`;
}

function ranksTold(ranks) { return ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${runs(ranks)}`; }

/** Whole numbers as runs of them: `0-3,7`. */
function runs(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number; else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? from : `${from}-${to}`)).join(",");
}
