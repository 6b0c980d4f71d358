// Format numbers for people.

/** Return the factor from seconds to a readable unit, and the unit. */
function timeScale(seconds) {
  if (seconds >= 1) return [1, "s"];
  return seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

/** Format memory: `12.3 MB` if the unit is bytes, else the number, with its unit if it has one. */
function formatMemory(held, unit) {
  if (unit !== "bytes") return unit ? `${formatNumber(held)} ${unit}` : formatNumber(held);
  const [size, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([least]) => held >= least) || [1, "bytes"];
  return `${roundDigits(held / size)} ${name}`;
}

/** Round to significant digits. */
function roundDigits(value, digits = 4) { return String(Number(value.toPrecision(digits))).replace("-", "−"); }

/** Format a number without a unit, as the terminal does. */
function formatNumber(value) { return roundDigits(value, 6); }

/** Round to one decimal; a tie goes to the even digit, as in the terminal: 6.25 becomes 6.2. */
function oneDecimal(value) { return (Math.abs(value) % 1 === 0.25 ? Math.trunc(10 * value) / 10 : value).toFixed(1); }

function percent(share) { return `${oneDecimal(100 * share)} %`; }

/** Format one number for each rank: a single one if all are equal, the range if there are more than eight ranks. */
function formatPerRank(numbers) {
  if (numbers.length > 1 && new Set(numbers).size === 1) return `${formatNumber(numbers[0])} on every rank`;
  return numbers.length <= 8 ? numbers.map(formatNumber).join("/") : `${formatNumber(Math.min(...numbers))} to ${formatNumber(Math.max(...numbers))}`;
}

function formatRanks(ranks) { return ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${formatRanges(ranks)}`; }

/** Format whole numbers as ranges: `0-3,7`. */
function formatRanges(numbers) {
  const ranges = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (ranges.length && ranges.at(-1)[1] === number - 1) ranges.at(-1)[1] = number; else ranges.push([number, number]);
  }
  return ranges.map(([from, to]) => (from === to ? from : `${from}-${to}`)).join(",");
}
