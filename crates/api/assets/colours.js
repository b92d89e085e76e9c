// Colours, symbols and shapes of node states, test statuses, occupancies and severities. No meaning depends on colour alone, and the
// colours are distinguishable with red-green and blue-yellow colour blindness.

import { el } from "./dom.js";
import { SEVERITIES, codeLabel, severityRank, severityText } from "./format.js";

// tone: a class and a variable of the style sheet; symbol: shown in badges; shape: drawn on the map.
export const STATUS_STYLES = {
  pass: { tone: "good", symbol: "✓", shape: "solid" },
  fail: { tone: "bad", symbol: "✕", shape: "cross" },
  unknown: { tone: "dim", symbol: "?", shape: "hollow" },
  inconclusive: { tone: "warn", symbol: "~", shape: "half" },
  stale: { tone: "warn", symbol: "◷", shape: "half" },
  "never-tested": { tone: "dim", symbol: "∅", shape: "hollow" },
  "not-applicable": { tone: "dim", symbol: "–", shape: "hollow" },
  "not-judged": { tone: "dim", symbol: "·", shape: "hollow" },
  "in-service": { tone: "good", symbol: "✓", shape: "solid" },
  suspect: { tone: "warn", symbol: "!", shape: "half" },
  quarantined: { tone: "bad", symbol: "✕", shape: "cross" },
  repairing: { tone: "info", symbol: "↻", shape: "dot" },
  requalifying: { tone: "info", symbol: "…", shape: "bar" },
  out: { tone: "bad", symbol: "⊘", shape: "bar" },
  held: { tone: "held", symbol: "⏸", shape: "frame" },
  free: { tone: "good", symbol: "○", shape: "solid" },
  busy: { tone: "info", symbol: "●", shape: "dot" },
  gone: { tone: "dim", symbol: "–", shape: "hollow" },
  none: { tone: "good", symbol: "✓", shape: "solid" },
  monitor: { tone: "info", symbol: "i", shape: "dot" },
  reset: { tone: "warn", symbol: "!", shape: "half" },
  reboot: { tone: "warn", symbol: "!!", shape: "bar" },
  isolate: { tone: "bad", symbol: "✕", shape: "cross" },
  critical: { tone: "bad", symbol: "✕", shape: "cross" },
  warning: { tone: "warn", symbol: "!", shape: "half" },
  notice: { tone: "info", symbol: "i", shape: "dot" },
  open: { tone: "bad", symbol: "●", shape: "cross" },
  closed: { tone: "good", symbol: "✓", shape: "solid" },
};

const DEFAULT_STYLE = { tone: "dim", symbol: "·", shape: "hollow" };
export const statusStyle = (code) => STATUS_STYLES[code] ?? DEFAULT_STYLE;

// A code as text with its symbol. The badge of a severity has its meaning as a tooltip.
export function badge(code, text = codeLabel(code)) {
  const { tone, symbol } = statusStyle(code);
  return el("span", { class: `badge ${tone}`, title: SEVERITIES[code] }, el("span", { "aria-hidden": "true" }, symbol), ` ${text}`);
}

// A line with the meaning of each severity in `codes`, most severe first; false if there are none.
export function severityLegend(codes) {
  const sorted = [...new Set(codes)].filter((code) => severityRank(code) >= 0).sort((a, b) => severityRank(b) - severityRank(a));
  return sorted.length > 0 && el("p", { class: "dim" }, sorted.map(severityText).join("; "));
}

// Colours for low to high values, in even steps of lightness, so that they can be ordered without hues.
const RAMP = ["#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878"];
export const RAMP_STEPS = RAMP.length;
export function rampColour(fraction) {
  return RAMP[Math.min(RAMP_STEPS - 1, Math.max(0, Math.floor(fraction * RAMP_STEPS)))];
}

// Returns the colours of the current theme.
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["good", "bad", "warn", "info", "held", "dim", "text", "surface"].map((name) => [name, read(name)]));
}
