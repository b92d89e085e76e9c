// Cases: one fault of one machine each, from the first finding to return or replacement. The list, and the details of one.

import { all, get } from "../api.js";
import { badge, severityLegend } from "../colours.js";
import { el, link, nodeLink, prose, swap } from "../dom.js";
import { Part, choice, section } from "../frame.js";
import { table } from "../table.js";
import { figure, moment, severityRank, severityText, title } from "../words.js";

// The evidence of a finding as text: a measurement against its limit, an observed line, or any other form.
export function evidence(of) {
  if (!of || typeof of === "string") return of ?? "";
  if (of.measured)
    return `${of.measured.metric} = ${figure(of.measured.value)}${of.measured.limit === null || of.measured.limit === undefined ? "" : `, limit ${figure(of.measured.limit)}`}`;
  if (of.event) return of.event.text;
  return JSON.stringify(of);
}

const lastStep = (one) => one.steps.at(-1);
const action = (one) => (lastStep(one) ? `${title(lastStep(one).what)}: ${lastStep(one).state}` : "none yet");
const finding = (one) => one.findings.map((each) => each.text).join("; ");

function list(page) {
  const place = el("section", { class: "card" });
  let part = null;
  swap(
    page.main,
    el("h1", {}, "Cases"),
    el(
      "div",
      { class: "controls" },
      choice(
        page,
        "state",
        "Show",
        [
          ["open", "Open"],
          ["all", "All"],
        ],
        "open",
        () => part.now(),
      ),
    ),
    place,
  );
  part = new Part(page, place, {
    kinds: ["cases"],
    read: (signal) => all(["cases"], { state: page.query.get("state") ?? "open" }, signal),
    draw: ({ items }) => [
      table(page, {
        name: "cases",
        caption: "Cases",
        rows: items,
        usual: "-severity",
        nothing: "No open cases.",
        columns: [
          {
            key: "severity",
            title: "Severity",
            value: (one) => severityRank(one.severity),
            cell: (one) => badge(one.severity),
          },
          { key: "node", title: "Node", value: (one) => one.node, cell: (one) => nodeLink(one.node) },
          {
            key: "finding",
            title: "What is wrong",
            wide: true,
            value: finding,
            cell: (one) => link(["cases", one.id], prose(finding(one) || "no finding")),
          },
          {
            key: "evidence",
            title: "Evidence",
            wide: true,
            value: (one) => one.findings.map((each) => evidence(each.evidence)).join("; "),
          },
          { key: "opened", title: "Open since", value: (one) => one.opened, cell: (one) => moment(one.opened) },
          {
            key: "action",
            title: "Last step",
            value: action,
            cell: (one) => [action(one), lastStep(one) && el("div", { class: "dim" }, prose(lastStep(one).text))],
          },
          {
            key: "state",
            title: "State",
            value: (one) => one.state.how ?? one.state.is,
            cell: (one) => badge(one.state.is, title(one.state.how ?? one.state.is)),
          },
        ],
      }),
      severityLegend(items.map((one) => one.severity)),
    ],
  });
}

function one(page, id) {
  const place = el("div", {});
  swap(page.main, place);
  new Part(page, place, {
    kinds: [(kind, data) => kind === "cases" && (data.more > 0 || data.cases?.includes(id))],
    read: (signal) => get(["cases", id], {}, signal),
    draw: (of) => [
      el("h1", {}, `Case of ${of.node}`, " ", badge(of.state.is, title(of.state.how ?? of.state.is)), " ", badge(of.severity)),
      el(
        "p",
        { class: "facts" },
        // A closed case requires nothing any more.
        el("span", {}, `severity ${of.state.is === "open" ? severityText(of.severity) : of.severity}`),
        el("span", {}, "node ", nodeLink(of.node)),
        el("span", {}, "opened ", moment(of.opened)),
        el("span", {}, `hardware ${of.hardware}`),
        el("span", {}, `repair step: ${of.rung}`),
        el("span", {}, of.id),
        of.advice && el("span", {}, `advice: ${typeof of.advice === "string" ? of.advice : JSON.stringify(of.advice)}`),
      ),
      section(
        "Findings",
        table(page, {
          name: "findings",
          caption: "Findings",
          rows: of.findings,
          columns: [
            { key: "severity", title: "Severity", value: (each) => each.severity, cell: (each) => badge(each.severity) },
            {
              key: "entity",
              title: "Where",
              value: (each) => (typeof each.entity === "string" ? each.entity : JSON.stringify(each.entity)),
            },
            { key: "text", title: "What", wide: true, value: (each) => each.text },
            { key: "evidence", title: "Evidence", wide: true, value: (each) => evidence(each.evidence) },
            { key: "rule", title: "Check and rule", value: (each) => `${each.check} / ${each.rule}` },
            { key: "remedy", title: "Remedy", value: (each) => each.remedy },
          ],
        }),
        severityLegend(of.findings.map((each) => each.severity)),
      ),
      section(
        "Steps taken",
        table(page, {
          name: "steps",
          caption: "Steps",
          rows: of.steps,
          nothing: "No steps yet.",
          columns: [
            { key: "at", title: "When", value: (each) => each.at, cell: (each) => moment(each.at) },
            { key: "what", title: "Step", value: (each) => title(each.what) },
            { key: "state", title: "State", value: (each) => each.state },
            { key: "text", title: "Why", wide: true, value: (each) => each.text },
            { key: "tries", title: "Tries", right: true, value: (each) => each.tries },
          ],
        }),
      ),
      (of.failed_work ?? []).length > 0 &&
        section(
          "Failed user work",
          table(page, {
            name: "work",
            caption: "Failed user work",
            rows: of.failed_work,
            columns: [
              { key: "at", title: "When", value: (each) => each.at, cell: (each) => moment(each.at) },
              { key: "name", title: "Work", value: (each) => each.name },
              { key: "owner", title: "Owner", value: (each) => each.owner },
              { key: "how", title: "How", value: (each) => Object.values(each.how ?? {}).join(" ") },
            ],
          }),
        ),
    ],
  });
}

export const show = (page) => (page.parts[1] ? one(page, page.parts[1]) : list(page));
