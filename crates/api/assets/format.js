// Formats times, durations, measurements and severities.

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

// Difference between the controller's clock and the browser's. A simulated cluster runs faster than real time.
let clockOffset = 0;
export function setClusterTime(at) {
  clockOffset = Date.parse(at) - Date.now();
}
export const clusterNow = () => Date.now() + clockOffset;

// Formats milliseconds, such as "3 h 20 min".
export function formatDuration(ms) {
  const duration = Math.max(0, ms);
  if (duration < MINUTE) return "under 1 min";
  if (duration < HOUR) return `${Math.floor(duration / MINUTE)} min`;
  if (duration < 2 * DAY) {
    const [hours, minutes] = [Math.floor(duration / HOUR), Math.floor((duration % HOUR) / MINUTE)];
    return hours < 10 && minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  }
  const [days, hours] = [Math.floor(duration / DAY), Math.floor((duration % DAY) / HOUR)];
  return days < 10 && hours ? `${days} d ${hours} h` : `${days} d`;
}

// Formats a time in milliseconds relative to the cluster's time, such as "5 min ago" or "in 2 h".
export function formatAge(ms) {
  const age = clusterNow() - ms;
  if (Math.abs(age) < MINUTE) return "just now";
  return age < 0 ? `in ${formatDuration(-age)}` : `${formatDuration(age)} ago`;
}

const pad2 = (number) => String(number).padStart(2, "0");
export function formatTimestamp(at) {
  const date = new Date(at);
  const day = `${date.getUTCFullYear()}-${pad2(date.getUTCMonth() + 1)}-${pad2(date.getUTCDate())}`;
  return `${day} ${pad2(date.getUTCHours())}:${pad2(date.getUTCMinutes())} UTC`;
}

// A <time> element that displays an age. `updateAges` keeps it current.
export function timeElement(at) {
  if (!at) return "";
  const time = document.createElement("time");
  time.dateTime = at;
  time.title = formatTimestamp(at);
  time.textContent = formatAge(Date.parse(at));
  return time;
}

export function updateAges(root = document) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const text = formatAge(Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}

// Parses "7d", "1h 30m", "9m 23s 815ms" into milliseconds.
export function parseDuration(text) {
  const units = { ms: 1, s: 1000, m: MINUTE, h: HOUR, d: DAY, w: 7 * DAY };
  let total = 0;
  for (const [, amount, unit] of String(text ?? "").matchAll(/([\d.]+)\s*(ms|[smhdw])/g)) total += Number(amount) * units[unit];
  return total;
}

// Formats a duration string of the controller: without seconds from one minute on.
export const shortDuration = (text) => (parseDuration(text) >= MINUTE ? formatDuration(parseDuration(text)) : String(text ?? ""));

const SI_PREFIXES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];
// Units that take an SI prefix, and units that do not.
const PREFIXED_UNITS = { bytes: "B", "bytes/s": "B/s", "bits/s": "bit/s", "flop/s": "flop/s", "ops/s": "op/s", watts: "W", hertz: "Hz" };
const PLAIN_UNITS = { count: "", ratio: "", percent: " %", celsius: " °C", s: " s", "1/h": " /h", "1/s": " /s" };
export function formatMeasurement(value, unit = "count", digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!(unit in PREFIXED_UNITS))
    return `${value.toLocaleString("en", { maximumSignificantDigits: digits })}${PLAIN_UNITS[unit] ?? ` ${unit}`}`;
  const [divisor, prefix] = SI_PREFIXES.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${Number((value / divisor).toPrecision(digits))} ${prefix}${PREFIXED_UNITS[unit]}`;
}
// The unit without a prefix, as the title of an axis.
export const unitName = (unit) => PREFIXED_UNITS[unit] ?? (PLAIN_UNITS[unit]?.trim() || unit);

export const formatPercent = (value) => (value === null || value === undefined ? "–" : `${Number(value.toFixed(1))} %`);
// Without toLocaleString, whose first call takes a tenth of a second.
export const formatCount = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
export const plural = (count, singular, pluralForm = `${singular}s`) => `${formatCount(count)} ${count === 1 ? singular : pluralForm}`;

// What a finding of each severity requires, least severe first. A Rust test compares this table with Severity::meaning.
export const SEVERITIES = {
  monitor: "keep the node in service and watch it",
  reset: "GPU reset needed",
  reboot: "node reboot needed",
  isolate: "keep the node out of service until repaired",
};
export const severityRank = (code) => Object.keys(SEVERITIES).indexOf(code);
// A severity with its meaning, such as "reset: GPU reset needed".
export const severityText = (code) => (SEVERITIES[code] ? `${code}: ${SEVERITIES[code]}` : (code ?? ""));

// Terms with capitals that a plain first letter would get wrong.
const TERMS = Object.fromEntries(
  "ACS BMC CPU CUDA DCGM ECC EFA GPU GPUs HBM IB MIG NCCL NIC NTP NUMA NVLink NVMe NVML PCIe RDMA RoCE SXid TLS XFS Xid"
    .split(" ")
    .map((term) => [term.toLowerCase(), term]),
);
// A code as a label: "never-tested" becomes "Never tested", "gpu-off-bus" becomes "GPU off bus".
export const codeLabel = (code) => {
  const words = (code ?? "").split("-").map((word) => TERMS[word] ?? word);
  const [first = "", ...rest] = words;
  return [TERMS[first.toLowerCase()] ? first : first.charAt(0).toUpperCase() + first.slice(1), ...rest].join(" ");
};
