// Node-hours of validation and the faults found, by day.

import { get } from "../api.js";
import { dailyChart } from "../charts.js";
import { LiveSection, section, selectField } from "../components.js";
import { el, replaceContent } from "../dom.js";
import { formatMeasurement, plural } from "../format.js";
import { table } from "../table.js";

const statCard = (title, value, note) =>
  el(
    "div",
    { class: "stat" },
    el("div", { class: "dim" }, title),
    el("strong", {}, value),
    note && el("div", { class: "dim" }, note),
  );

export function render(page) {
  const container = el("div", {});
  let content = null;
  replaceContent(
    page.main,
    el("h1", {}, "Budget"),
    el(
      "p",
      { class: "dim" },
      "Node-hours of validation, and faults found. A fault is a case with findings.",
    ),
    el(
      "div",
      { class: "controls" },
      selectField(
        page,
        "since",
        "Period",
        [
          ["7d", "7 days"],
          ["30d", "30 days"],
          ["90d", "90 days"],
          ["365d", "365 days"],
        ],
        "30d",
        () => content.reload(),
      ),
    ),
    container,
  );
  content = new LiveSection(page, container, {
    events: ["runs", "cases"],
    load: (signal) => get(["budget"], { since: page.query.get("since") ?? "30d" }, signal),
    render: (budget) => [
      el(
        "div",
        { class: "stats" },
        statCard(
          "Spent",
          `${budget.node_hours.toFixed(1)} node-hours`,
          budget.node_hours_per_day ? `limit: ${formatMeasurement(budget.node_hours_per_day)} per day` : "no daily limit",
        ),
        statCard("Found", plural(budget.faults, "fault")),
        statCard("Per fault", budget.node_hours_per_fault === null ? "–" : `${budget.node_hours_per_fault.toFixed(1)} node-hours`),
      ),
      section(
        "By day (UTC)",
        el("p", { class: "dim" }, "Bars: node-hours. ✕: faults found that day."),
        dailyChart(budget.days, budget.node_hours_per_day),
        table(page, {
          name: "budget",
          caption: "By day",
          rows: budget.days,
          defaultSort: "-day",
          emptyText: "No data in this period.",
          columns: [
            { key: "day", title: "Day", value: (row) => row.day.slice(0, 10) },
            { key: "hours", title: "Node-hours", alignRight: true, value: (row) => Number(row.node_hours.toFixed(2)) },
            { key: "faults", title: "Faults found", alignRight: true, value: (row) => row.faults },
            { key: "closed", title: "Cases closed", alignRight: true, value: (row) => row.closed },
          ],
        }),
      ),
    ],
  });
}
