// What needs an operator, and the open cases: what, since when, why, what was done, what is next.

import { badge } from "./colours.js";
import { el, inlineCode, link, nodeLink } from "./dom.js";
import { codeLabel, formatCount, plural, severityRank, timeElement } from "./format.js";

// The lists are beside the map: the rest is on their pages.
const MAX_ITEMS = 5;
const MAX_NODES = 6;
const MAX_STEPS = 3;

// Most urgent first.
export const URGENCIES = ["critical", "warning", "notice"];

// A command, and a button that copies it.
export function command(text) {
  const code = el("code", {}, text);
  // Browsers offer the clipboard only to pages of this machine or over TLS.
  if (!navigator.clipboard) return code;
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  });
  return [code, " ", button];
}

// Text in which the names of nodes are links. If it mentions none of them, they follow it.
export function textWithNodes(text, nodes) {
  const left = new Set(nodes);
  const parts = text.split(/([A-Za-z0-9][\w.-]*\w|`[^`]*`)/).map((part) => {
    if (part.startsWith("`")) return inlineCode(part);
    if (!nodes.includes(part)) return part;
    left.delete(part);
    return nodeLink(part);
  });
  const others = [...left];
  if (!others.length || left.size < nodes.length) return parts;
  const shown = others.slice(0, MAX_NODES).flatMap((name, index) => [index ? ", " : "", nodeLink(name)]);
  const more = others.length > MAX_NODES ? ` and ${formatCount(others.length - MAX_NODES)} more` : "";
  return [...parts, el("span", { class: "dim" }, " · "), ...shown, more];
}

function attentionItem({ urgency, nodes, since, text, next, case: caseId }) {
  return el(
    "li",
    { class: `item ${urgency}` },
    el(
      "div",
      {},
      badge(urgency),
      " ",
      ...textWithNodes(text, nodes),
      since && el("span", { class: "dim" }, " · ", timeElement(since)),
      caseId && [el("span", { class: "dim" }, " · "), link(["cases", caseId], "Case")],
    ),
    next && el("div", { class: "next" }, el("span", { class: "dim" }, "Next "), command(next)),
  );
}

// A capped list with a heading, the number of all items, and a link to the rest.
function list(title, { count, items, more, emptyText }) {
  return [
    el("h2", {}, title, " ", count ? el("span", { class: "dim" }, formatCount(count)) : ""),
    count ? el("ul", { class: "items" }, ...items) : el("p", { class: "good" }, `✓ ${emptyText}`),
    count > items.length && el("p", {}, link(more, `and ${formatCount(count - items.length)} more`)),
  ];
}

export function attentionList(attention) {
  const items = attention.slice(0, MAX_ITEMS).map(attentionItem);
  return list("Needs an operator", { count: attention.length, items, more: ["attention"], emptyText: "No open problems." });
}

const isFinished = (step) => step.state === "done" || step.state === "failed";

function stepsTaken(steps) {
  const taken = steps.filter(isFinished).slice(-MAX_STEPS);
  if (!taken.length) return "no step yet";
  return taken.flatMap((step, index) => [
    index ? ", " : "",
    codeLabel(step.what).toLowerCase(),
    step.state === "failed" ? " failed" : "",
    " (",
    timeElement(step.at),
    ")",
  ]);
}

// What is next: the command that waits for an operator, or the step that the controller takes.
function nextStep({ steps, repair_step: repairStep, advice }, attention) {
  if (attention?.next) return command(attention.next);
  const last = steps.at(-1);
  if (last?.state === "proposed") return [`${codeLabel(last.what)}: `, inlineCode(last.text)];
  if (last?.state === "intended") return [`${codeLabel(last.what)} in progress, since `, timeElement(last.at)];
  if (waitsForOperator({ steps })) return ["Waits for an operator: ", inlineCode(last.text)];
  if (advice) return `Advice: ${codeLabel(advice).toLowerCase()}`;
  return `The controller plans the next step; repair step: ${repairStep}`;
}

// The controller has proposed a step that it may not take, or has handed the case over and was not given it back.
function waitsForOperator({ steps }) {
  const last = steps.findLast((step) => ["hand-over", "release"].includes(step.what) && step.state !== "failed");
  return steps.at(-1)?.state === "proposed" || last?.what === "hand-over";
}

function caseItem(item, attention) {
  const [first, ...others] = item.findings;
  const row = (name, ...content) => el("div", {}, el("dt", {}, name), el("dd", {}, ...content));
  return el(
    "li",
    { class: "item" },
    el(
      "div",
      { class: "item-head" },
      badge(item.severity),
      nodeLink(item.node),
      link(["cases", item.id], first ? codeLabel(first.reason) : "Case"),
      el("span", { class: "dim" }, timeElement(item.opened)),
    ),
    el(
      "dl",
      {},
      row("Why", inlineCode(first?.text ?? "an operator's decision"), others.length > 0 && ` and ${plural(others.length, "more finding")}`),
      row("Done", ...[stepsTaken(item.steps)].flat()),
      row("Next", nextStep(item, attention)),
    ),
  );
}

// Kinds of attention that are about cases, of which one may name several nodes.
const CASE_KINDS = ["case-waiting", "proposal", "out-of-service"];

// The open cases: those that wait for an operator first, then the most severe, then the oldest. `complete`: the list has all of them.
export function caseList(cases, attention, complete) {
  const about = (item) =>
    attention.find((wanted) => wanted.case === item.id) ??
    attention.find((wanted) => CASE_KINDS.includes(wanted.kind) && wanted.nodes.includes(item.node));
  const rank = (item) => (waitsForOperator(item) ? 10 : 0) + severityRank(item.severity);
  const sorted = [...cases].sort((a, b) => rank(b) - rank(a) || Date.parse(a.opened) - Date.parse(b.opened));
  const items = sorted.slice(0, MAX_ITEMS).map((item) => caseItem(item, about(item)));
  const content = list("Open cases", { count: cases.length, items, more: ["cases"], emptyText: "No open cases." });
  return complete ? content : [...content, el("p", { class: "dim" }, `These are the newest ${formatCount(cases.length)}.`)];
}
