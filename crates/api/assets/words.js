// Formats times, durations, measurements and severities.

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

// Offset of the cluster's time, which runs ahead of ours in a demonstration, as last reported.
let ahead = 0;
export function tellTime(at) {
  ahead = Date.parse(at) - Date.now();
}
export const now = () => Date.now() + ahead;

export function length(ms) {
  const of = Math.max(0, ms);
  if (of < MINUTE) return "under 1 min";
  if (of < HOUR) return `${Math.floor(of / MINUTE)} min`;
  if (of < 2 * DAY) {
    const [hours, minutes] = [Math.floor(of / HOUR), Math.floor((of % HOUR) / MINUTE)];
    return hours < 10 && minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  }
  const [days, hours] = [Math.floor(of / DAY), Math.floor((of % DAY) / HOUR)];
  return days < 10 && hours ? `${days} d ${hours} h` : `${days} d`;
}

export function ago(ms) {
  const past = now() - ms;
  if (Math.abs(past) < MINUTE) return "just now";
  return past < 0 ? `in ${length(-past)}` : `${length(past)} ago`;
}

const two = (number) => String(number).padStart(2, "0");
export function stamp(at) {
  const of = new Date(at);
  const day = `${of.getUTCFullYear()}-${two(of.getUTCMonth() + 1)}-${two(of.getUTCDate())}`;
  return `${day} ${two(of.getUTCHours())}:${two(of.getUTCMinutes())} UTC`;
}

// A time as an element whose displayed age is updated.
export function moment(at) {
  if (!at) return "";
  const time = document.createElement("time");
  time.dateTime = at;
  time.title = stamp(at);
  time.textContent = ago(Date.parse(at));
  return time;
}

export function ageMoments(root = document) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const text = ago(Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}

// Parses "7d", "1h 30m", "9m 23s 815ms" into milliseconds.
export function spanMs(text) {
  const units = { ms: 1, s: 1000, m: MINUTE, h: HOUR, d: DAY, w: 7 * DAY };
  let sum = 0;
  for (const [, many, unit] of String(text ?? "").matchAll(/([\d.]+)\s*(ms|[smhdw])/g)) sum += Number(many) * units[unit];
  return sum;
}

export const span = (text) => (spanMs(text) >= MINUTE ? length(spanMs(text)) : String(text ?? ""));

const STEPS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];
// Units that take a prefix, and the symbols of those that do not.
const SIGNS = { bytes: "B", "bytes/s": "B/s", "bits/s": "bit/s", "flop/s": "flop/s", "ops/s": "op/s", watts: "W", hertz: "Hz" };
const PLAIN = { count: "", ratio: "", percent: " %", celsius: " °C", s: " s", "1/h": " /h", "1/s": " /s" };
export function figure(value, unit = "count") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!(unit in SIGNS)) return `${Number(value.toPrecision(4)).toLocaleString("en")}${PLAIN[unit] ?? ` ${unit}`}`;
  const [step, sign] = STEPS.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${Number((value / step).toPrecision(4))} ${sign}${SIGNS[unit]}`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Number(share.toFixed(1))} %`);
// By hand: a browser's first locale-aware number takes a tenth of a second.
export const whole = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

// What a finding of each severity requires, the least severe first. A test compares this table with Severity::meaning of the controller.
export const SEVERITIES = {
  monitor: "keep the node in service and watch it",
  reset: "GPU reset needed",
  reboot: "node reboot needed",
  isolate: "keep the node out of service until repaired",
};
export const severityRank = (code) => Object.keys(SEVERITIES).indexOf(code);
// A severity with its meaning, such as "reset: GPU reset needed".
export const severityText = (code) => (SEVERITIES[code] ? `${code}: ${SEVERITIES[code]}` : (code ?? ""));

export const title = (code) => (code ? code[0].toUpperCase() + code.slice(1).replaceAll("-", " ") : "");
