// The list of cases, and one case. A case is a fault of one machine, from the first finding until the node returns or is replaced.

import { get, getAll } from "../api.js";
import { badge, severityLegend } from "../colours.js";
import { LiveSection, SEVERITY_COLUMN, nodesLink, section, selectField } from "../components.js";
import { el, inlineCode, link, nodeLink, replaceContent } from "../dom.js";
import { codeLabel, formatMeasurement, severityText, timeElement } from "../format.js";
import { table } from "../table.js";

// Formats the evidence of a finding: a measurement with its limit, a log line, or JSON for any other kind.
function evidenceText(evidence) {
  if (!evidence || evidence === "nothing") return "";
  if (typeof evidence === "string") return evidence;
  if (evidence.measured) {
    const { metric, value, limit } = evidence.measured;
    const limitText = limit === null || limit === undefined ? "" : `, limit ${formatMeasurement(limit)}`;
    return `${metric} = ${formatMeasurement(value)}${limitText}`;
  }
  if (evidence.event) return evidence.event.text;
  return JSON.stringify(evidence);
}

const lastStep = (item) => item.steps.at(-1);
const lastStepText = (item) => (lastStep(item) ? `${codeLabel(lastStep(item).what)}: ${lastStep(item).state}` : "none yet");
const findingText = (item) => item.findings.map((finding) => finding.text).join("; ");

const stateBadge = (item) => badge(item.state.is, codeLabel(item.state.how ?? item.state.is));

function renderList(page) {
  const container = el("section", { class: "card" });
  let content = null;
  replaceContent(
    page.main,
    el("h1", {}, "Cases"),
    el(
      "div",
      { class: "controls" },
      selectField(
        page,
        "state",
        "Show",
        [
          ["open", "Open"],
          ["all", "All"],
        ],
        "open",
        () => content.reload(),
      ),
    ),
    container,
  );
  content = new LiveSection(page, container, {
    events: ["cases"],
    load: (signal) => getAll(["cases"], { state: page.query.get("state") ?? "open" }, signal),
    render: ({ items }) => [
      table(page, {
        name: "cases",
        caption: "Cases",
        rows: items,
        defaultSort: "-severity",
        emptyText: "No open cases.",
        columns: [
          SEVERITY_COLUMN,
          { key: "node", title: "Node", value: (item) => item.node, cell: (item) => nodeLink(item.node) },
          {
            key: "finding",
            title: "Findings",
            wide: true,
            value: findingText,
            cell: (item) => link(["cases", item.id], inlineCode(findingText(item) || "no finding")),
          },
          {
            key: "evidence",
            title: "Evidence",
            wide: true,
            value: (item) => item.findings.map((finding) => evidenceText(finding.evidence)).join("; "),
          },
          { key: "opened", title: "Open since", value: (item) => item.opened, cell: (item) => timeElement(item.opened) },
          {
            key: "action",
            title: "Last step",
            value: lastStepText,
            cell: (item) => [lastStepText(item), lastStep(item) && el("div", { class: "dim" }, inlineCode(lastStep(item).text))],
          },
          {
            key: "state",
            title: "State",
            value: (item) => item.state.how ?? item.state.is,
            cell: stateBadge,
          },
        ],
      }),
      severityLegend(items.map((item) => item.severity)),
    ],
  });
}

function renderCase(page, id) {
  const container = el("div", {});
  replaceContent(page.main, container);
  new LiveSection(page, container, {
    events: [(name, data) => name === "cases" && (data.more > 0 || data.cases?.includes(id))],
    load: (signal) => get(["cases", id], {}, signal),
    render: (item) => [
      el("h1", {}, `Case of ${item.node}`, " ", stateBadge(item), " ", badge(item.severity)),
      el(
        "p",
        { class: "facts" },
        // A closed case requires no action.
        el("span", {}, `severity ${item.state.is === "open" ? severityText(item.severity) : item.severity}`),
        el("span", {}, "node ", nodeLink(item.node)),
        el("span", {}, "opened ", timeElement(item.opened)),
        el("span", {}, `hardware ${item.hardware}`),
        el("span", {}, `repair step: ${item.repair_step}`),
        el("span", {}, item.id),
        item.advice && el("span", {}, `advice: ${typeof item.advice === "string" ? item.advice : JSON.stringify(item.advice)}`),
      ),
      section(
        "Findings",
        table(page, {
          name: "findings",
          caption: "Findings",
          rows: item.findings,
          columns: [
            SEVERITY_COLUMN,
            {
              key: "entity",
              title: "Component",
              value: (row) => (typeof row.entity === "string" ? row.entity : JSON.stringify(row.entity)),
            },
            { key: "text", title: "Finding", wide: true, value: (row) => row.text },
            { key: "evidence", title: "Evidence", wide: true, value: (row) => evidenceText(row.evidence) },
            {
              key: "rule",
              title: "Check and rule",
              value: (row) => `${row.check} / ${row.rule}`,
              cell: (row) => [nodesLink("check", row.check, row.check), ` / ${row.rule}`],
            },
            { key: "reason", title: "Reason", value: (row) => row.reason, cell: (row) => nodesLink("reason", row.reason, codeLabel(row.reason)) },
            { key: "remedy", title: "Remedy", value: (row) => row.remedy },
          ],
        }),
        severityLegend(item.findings.map((row) => row.severity)),
      ),
      section(
        "Steps taken",
        table(page, {
          name: "steps",
          caption: "Steps",
          rows: item.steps,
          emptyText: "No steps yet.",
          columns: [
            { key: "at", title: "When", value: (row) => row.at, cell: (row) => timeElement(row.at) },
            { key: "what", title: "Step", value: (row) => codeLabel(row.what) },
            { key: "state", title: "State", value: (row) => row.state },
            { key: "text", title: "Why", wide: true, value: (row) => row.text },
            { key: "attempts", title: "Attempts", alignRight: true, value: (row) => row.attempts },
          ],
        }),
      ),
      (item.job_failures ?? []).length > 0 &&
        section(
          "Job failures",
          table(page, {
            name: "job-failures",
            caption: "Job failures",
            rows: item.job_failures,
            columns: [
              { key: "at", title: "When", value: (row) => row.at, cell: (row) => timeElement(row.at) },
              { key: "name", title: "Job", value: (row) => row.name },
              { key: "owner", title: "Owner", value: (row) => row.owner },
              { key: "how", title: "How", value: (row) => Object.values(row.how ?? {}).join(" ") },
            ],
          }),
        ),
    ],
  });
}

export const render = (page) => (page.parts[1] ? renderCase(page, page.parts[1]) : renderList(page));
