// Signs and colours of states. Each state also has its own shape, so that no meaning depends on colour alone; the colours are
// distinguishable with red-green and blue-yellow colour blindness.

import { el } from "./dom.js";
import { SEVERITIES, severityRank, severityText, title } from "./words.js";

// tone: a class and a variable of the style sheet; sign: a letter used where no shape is drawn; mark: the shape on the map.
export const STATES = {
  pass: { tone: "good", sign: "✓", mark: "solid" },
  fail: { tone: "bad", sign: "✕", mark: "cross" },
  unknown: { tone: "dim", sign: "?", mark: "hollow" },
  inconclusive: { tone: "warn", sign: "~", mark: "half" },
  stale: { tone: "warn", sign: "◷", mark: "half" },
  "never-tested": { tone: "dim", sign: "∅", mark: "hollow" },
  "not-applicable": { tone: "dim", sign: "–", mark: "hollow" },
  "in-service": { tone: "good", sign: "✓", mark: "solid" },
  suspect: { tone: "warn", sign: "!", mark: "half" },
  quarantined: { tone: "bad", sign: "✕", mark: "cross" },
  repairing: { tone: "info", sign: "↻", mark: "dot" },
  proving: { tone: "info", sign: "…", mark: "bar" },
  out: { tone: "bad", sign: "⊘", mark: "bar" },
  held: { tone: "held", sign: "⏸", mark: "frame" },
  free: { tone: "good", sign: "○", mark: "solid" },
  busy: { tone: "info", sign: "●", mark: "dot" },
  gone: { tone: "dim", sign: "–", mark: "hollow" },
  none: { tone: "good", sign: "✓", mark: "solid" },
  monitor: { tone: "info", sign: "i", mark: "dot" },
  reset: { tone: "warn", sign: "!", mark: "half" },
  reboot: { tone: "warn", sign: "!!", mark: "bar" },
  isolate: { tone: "bad", sign: "✕", mark: "cross" },
  open: { tone: "bad", sign: "●", mark: "cross" },
  closed: { tone: "good", sign: "✓", mark: "solid" },
};

const PLAIN = { tone: "dim", sign: "·", mark: "hollow" };
export const state = (code) => STATES[code] ?? PLAIN;

// A state as text with its sign; a severity also has its meaning as a tooltip.
export function badge(code, text = title(code)) {
  const { tone, sign } = state(code);
  return el("span", { class: `badge ${tone}`, title: SEVERITIES[code] }, el("span", { "aria-hidden": "true" }, sign), ` ${text}`);
}

// The meaning of each severity that occurs in a table, the worst first; nothing if there are none.
export function severityLegend(codes) {
  const known = [...new Set(codes)].filter((code) => severityRank(code) >= 0).sort((a, b) => severityRank(b) - severityRank(a));
  return known.length > 0 && el("p", { class: "dim" }, known.map(severityText).join("; "));
}

// From low to high, in even steps of lightness: readable without hues. Reversed on dark pages.
const RAMP = ["#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878"];
export const STEPS = RAMP.length;
export function ramp(share) {
  return RAMP[Math.min(STEPS - 1, Math.max(0, Math.floor(share * STEPS)))];
}

// The current tones of the style sheet.
export function tones() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["good", "bad", "warn", "info", "held", "dim", "ink", "paper"].map((name) => [name, read(name)]));
}
