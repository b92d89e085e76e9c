// One node: its state and why, its timeline, its measurements beside those of its peers and its own past, and the logs of its tests.

import { nodeActions } from "../actions.js";
import { download, get } from "../api.js";
import { lanes, past, spread } from "../charts.js";
import { badge, severityLegend } from "../colours.js";
import { el, link, prose, swap } from "../dom.js";
import { Part, empty, failed, section } from "../frame.js";
import { follow } from "../log.js";
import { table } from "../table.js";
import { figure, moment, plural, span, tellTime, title } from "../words.js";

const due = (of) => (of.is === "now" ? "now" : [of.is === "retry" ? "retry " : "", moment(of.at)]);

function agentWords(agent) {
  const heard = agent.heard ? [agent.silent ? "no report since " : "last report ", moment(agent.heard)] : [];
  const runs = agent.program ? [`, doctor-node ${agent.program}`] : [];
  const differs = agent.skew.length > 0 ? [` (${agent.skew.join("; ")})`] : [];
  return [...heard, ...runs, ...differs];
}

function state(page, why, again) {
  const word = why.life_state?.is ?? why.life;
  const fact = (name, ...value) => el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, ...value));
  return [
    el("h1", {}, why.node, " ", badge(word), " ", why.used && badge(why.used)),
    el("p", { class: "strong" }, prose(why.headline)),
    nodeActions(page, () => [why.node], again),
    el(
      "dl",
      { class: "card factlist" },
      fact("Pool", why.pool ?? "–"),
      fact("Hardware", why.hardware ?? "unknown"),
      fact("In this state since", why.since ? moment(why.since) : "–"),
      fact("In use by", why.used_text ?? "–"),
      fact("Marks of Cluster Doctor", why.our_marks.join(", ") || "none"),
      fact("Other marks", why.foreign_marks.join(", ") || "none"),
      fact("Case", why.case ? link(["cases", why.case], why.case) : "none"),
      why.agent && fact("Agent", badge(why.agent.state), " ", ...agentWords(why.agent)),
      why.hold &&
        fact("Held", `by ${why.hold.by}: ${why.hold.why}`, why.hold.until ? [", until ", moment(why.hold.until)] : ""),
      why.run
        ? fact("Running test", prose(why.run.because))
        : fact("Not tested now because", prose(why.passed_over?.text ?? "–")),
    ),
    why.next.length > 0 && section("What to do next", el("ul", {}, ...why.next.map((line) => el("li", {}, prose(line))))),
    section(
      "Findings",
      table(page, {
        name: "findings",
        caption: "Open findings",
        rows: why.open_findings,
        nothing: "No open findings.",
        columns: [
          { key: "severity", title: "Severity", value: (row) => row.severity, cell: (row) => badge(row.severity) },
          { key: "entity", title: "Where", value: (row) => row.entity },
          { key: "text", title: "What", wide: true, value: (row) => row.text },
          { key: "evidence", title: "Evidence", wide: true, value: (row) => row.evidence },
          { key: "rule", title: "Check and rule", value: (row) => `${row.check} / ${row.rule}` },
          {
            key: "times",
            title: "Seen",
            value: (row) => row.times,
            cell: (row) => (row.confirmed ? `${plural(row.times, "time")}, confirmed` : `${row.times} of ${row.confirm} to confirm`),
          },
          { key: "first", title: "Since", value: (row) => row.first_seen, cell: (row) => moment(row.first_seen) },
        ],
      }),
      severityLegend(why.open_findings.map((row) => row.severity)),
    ),
    section(
      "Tests",
      table(page, {
        name: "tests",
        caption: "Status of each test",
        rows: why.test_lines,
        nothing: "No regular tests.",
        columns: [
          { key: "test", title: "Test", value: (row) => row.test, cell: (row) => link(["tests", row.test], row.test) },
          { key: "standing", title: "Status", value: (row) => row.standing, cell: (row) => badge(row.standing) },
          {
            key: "last",
            title: "Last result",
            value: (row) => row.last?.at ?? "",
            cell: (row) => (row.last ? [title(row.last.verdict), " ", moment(row.last.at)] : "never"),
          },
          { key: "reason", title: "Reason", value: (row) => row.last?.reason ?? "" },
          { key: "cutoff", title: "Period", value: (row) => row.cutoff, cell: (row) => span(row.cutoff) },
          { key: "due", title: "Due", value: (row) => row.due.at ?? row.due.is, cell: (row) => due(row.due) },
        ],
      }),
    ),
  ];
}

const timeline = (page, moments) =>
  moments.length === 0
    ? empty("No events yet.")
    : [
        lanes(moments),
        table(page, {
          name: "timeline",
          caption: "Events",
          rows: moments,
          size: 15,
          columns: [
            { key: "at", title: "When", value: (row) => row.at, cell: (row) => moment(row.at) },
            {
              key: "kind",
              title: "Kind",
              value: (row) => row.kind,
              cell: (row) => (row.kind === "results" ? badge(row.what) : title(row.kind === "act" ? row.what : row.kind)),
            },
            { key: "text", title: "What", wide: true, value: (row) => row.text },
            { key: "by", title: "By", value: (row) => row.by ?? "" },
            { key: "code", title: "Reason", value: (row) => row.code ?? "" },
          ],
        }),
      ];

// Each measurement of the newest results beside those of all nodes, and over the node's own past.
function figures(page, rows) {
  if (!rows.length) return empty("No measurements yet.");
  const draw = ({ test, figures: known }) => {
    const box = el("div", {});
    const paint = (peers) =>
      swap(
        box,
        el(
          "div",
          { class: "figures" },
          ...known.map((one) => {
            const of = peers?.figures.find((each) => each.name === one.name && each.unit === one.unit)?.spread;
            const last = one.values.at(-1).value;
            return el(
              "div",
              { class: "figurebox" },
              el("h4", {}, one.name, el("span", { class: "dim" }, ` ${figure(last, one.unit)}`)),
              el(
                "div",
                { class: "pair" },
                el(
                  "div",
                  {},
                  el("div", { class: "dim" }, "Compared with peers"),
                  of ? spread(of, one.unit, last) : el("p", { class: "dim" }, peers ? "No peer has this measurement." : "Loading …"),
                ),
                el("div", {}, el("div", { class: "dim" }, "History of this node"), past(one.values, one.unit, of)),
              ),
            );
          }),
        ),
      );
    paint(null);
    const details = el("details", { open: true }, el("summary", {}, test), box);
    // The controller reads the measurements of thousands of nodes in steps: show what it has, and ask again.
    const compare = async () => {
      try {
        const peers = await get(["tests", test], {}, page.signal);
        paint(peers);
        if (!peers.complete && box.isConnected) setTimeout(compare, 2000);
      } catch (error) {
        if (error.name !== "AbortError") box.append(failed(error));
      }
    };
    compare();
    return details;
  };
  return rows.map(draw);
}

// Runs, and the log of the selected one; an active run is selected by default.
function runs(page, node, rows) {
  const log = el("div", {});
  const open = (run, test) => swap(log, el("h3", {}, `${test} of ${run.run}`), follow(page, { run: run.run, node, test }));
  const get_ = async (run) => {
    try {
      await download(["runs", run.run, "evidence", node], `${run.run}_${node}.json`);
    } catch (error) {
      swap(log, failed(error));
    }
  };
  const under = rows.find((run) => run.state === "running");
  const choose = (run, test) => {
    page.say("log", `${run.run}/${test}`);
    open(run, test);
    log.scrollIntoView({ block: "nearest" });
  };
  const chosen = page.query.get("log")?.split("/");
  const wanted = rows.find((run) => run.run === chosen?.[0]);
  if (wanted?.tests.includes(chosen[1])) open(wanted, chosen[1]);
  else if (under) open(under, under.tests[0]);
  return [
    table(page, {
      name: "runs",
      caption: "Runs",
      rows,
      nothing: "No runs yet.",
      columns: [
        { key: "planned", title: "Planned", value: (row) => row.planned, cell: (row) => moment(row.planned) },
        {
          key: "state",
          title: "State",
          value: (row) => row.state,
          cell: (row) => [title(row.state), row.end && el("div", { class: "dim" }, row.end)],
        },
        { key: "tests", title: "Tests", value: (row) => row.tests.join(" ") },
        { key: "because", title: "Why", wide: true, value: (row) => row.because },
        {
          key: "log",
          title: "Logs",
          value: (row) => row.run,
          cell: (row) =>
            row.tests.map((test) =>
              el(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "data-key": `log-${row.run}-${test}`,
                  on: { click: () => choose(row, test) },
                },
                test,
              ),
            ),
        },
        {
          key: "evidence",
          title: "Evidence",
          value: () => "",
          cell: (row) =>
            row.ended
              ? el(
                  "button",
                  {
                    type: "button",
                    class: "quiet",
                    "aria-label": `Save the evidence of run ${row.run}`,
                    on: { click: () => get_(row) },
                  },
                  "Save",
                )
              : "",
        },
      ],
    }),
    log,
  ];
}

export function show(page) {
  const node = page.parts[1];
  const [head, when, measured, ran] = Array.from({ length: 4 }, () => el("div", {}));
  const rest = el("div", {}, section("Timeline", when), section("Measurements", measured), section("Runs and logs", ran));
  swap(page.main, head, rest);
  const mine = (kind, data) => kind === "nodes" && (data.more > 0 || data.nodes?.includes(node));
  const first = new Part(page, head, {
    kinds: [mine, "cases"],
    read: async (signal) => {
      const asked = get(["nodes", node], {}, signal);
      // An unknown node is reported once.
      asked.then(
        () => (rest.hidden = false),
        (error) => (rest.hidden = error.status === 404),
      );
      const why = await asked;
      tellTime(why.at);
      // A new response time alone is no reason to redraw.
      return { ...why, at: null };
    },
    draw: (why) => state(page, why, () => first.soon()),
  });
  new Part(page, when, {
    kinds: [mine],
    read: (signal) => get(["nodes", node, "timeline"], { limit: 200 }, signal),
    draw: (rows) => timeline(page, rows),
  });
  new Part(page, measured, {
    kinds: [mine],
    read: (signal) => get(["nodes", node, "figures"], {}, signal),
    draw: (rows) => figures(page, rows),
  });
  new Part(page, ran, {
    kinds: [mine, "runs"],
    read: async (signal) => (await get(["runs"], { node, limit: 50 }, signal)).items,
    draw: (rows) => runs(page, node, rows),
  });
}
