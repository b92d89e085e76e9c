// The cost of validation against what it found, by day.

import { get } from "../api.js";
import { days } from "../charts.js";
import { el, swap } from "../dom.js";
import { Part, choice, section } from "../frame.js";
import { table } from "../table.js";
import { figure, plural } from "../words.js";

const card = (text, value, more) =>
  el(
    "div",
    { class: "number" },
    el("div", { class: "dim" }, text),
    el("strong", {}, value),
    more && el("div", { class: "dim" }, more),
  );

export function show(page) {
  const place = el("div", {});
  let part = null;
  swap(
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
      choice(
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
        () => part.now(),
      ),
    ),
    place,
  );
  part = new Part(page, place, {
    kinds: ["runs", "cases"],
    read: (signal) => get(["budget"], { since: page.query.get("since") ?? "30d" }, signal),
    draw: (of) => [
      el(
        "div",
        { class: "numbers" },
        card(
          "Spent",
          `${of.node_hours.toFixed(1)} node-hours`,
          of.node_hours_per_day ? `limit: ${figure(of.node_hours_per_day)} per day` : "no daily limit",
        ),
        card("Found", plural(of.faults, "fault")),
        card("Per fault", of.node_hours_per_fault === null ? "–" : `${of.node_hours_per_fault.toFixed(1)} node-hours`),
      ),
      section(
        "By day (UTC)",
        el("p", { class: "dim" }, "Bars: node-hours. ✕: faults found that day."),
        days(of.days, of.node_hours_per_day),
        table(page, {
          name: "budget",
          caption: "By day",
          rows: of.days,
          usual: "-day",
          nothing: "No data in this period.",
          columns: [
            { key: "day", title: "Day", value: (row) => row.day.slice(0, 10) },
            { key: "hours", title: "Node-hours", right: true, value: (row) => Number(row.node_hours.toFixed(2)) },
            { key: "faults", title: "Faults found", right: true, value: (row) => row.faults },
            { key: "closed", title: "Cases closed", right: true, value: (row) => row.closed },
          ],
        }),
      ),
    ],
  });
}
