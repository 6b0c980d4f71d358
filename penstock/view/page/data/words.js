// Numbers as people read them.

function scaleOf(seconds) {
  if (seconds >= 1) return [1, "s"];
  return seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

/** Memory as people read it: `12.3 MB` where it is in bytes, else the bare number and its unit, if it has one. */
function amount(held, unit) {
  if (unit !== "bytes") return unit ? `${bare(held)} ${unit}` : bare(held);
  const [size, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([least]) => held >= least) || [1, "bytes"];
  return `${short(held / size)} ${name}`;
}

function short(value, digits = 4) { return String(Number(value.toPrecision(digits))).replace("-", "−"); }

/** A number without a unit, as the terminal has it. */
function bare(value) { return short(value, 6); }

/** One digit behind the point; a tie goes to the even one, as in the terminal: 6.25 is 6.2. */
function tenths(value) { return (Math.abs(value) % 1 === 0.25 ? Math.trunc(10 * value) / 10 : value).toFixed(1); }

function percent(share) { return `${tenths(100 * share)} %`; }

/** One number a rank; if all are the same that one, if there are many from where to where they lie. */
function counts(numbers) {
  if (numbers.length > 1 && new Set(numbers).size === 1) return `${bare(numbers[0])} on every rank`;
  return numbers.length <= 8 ? numbers.map(bare).join("/") : `${bare(Math.min(...numbers))} to ${bare(Math.max(...numbers))}`;
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
