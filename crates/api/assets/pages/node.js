// One node: its state and the reasons, its timeline, its measurements compared with its peers and over time, and the logs of its tests.

import { nodeActionButtons } from "../actions.js";
import { download, get } from "../api.js";
import { histogram, historyChart, timelineChart } from "../charts.js";
import { badge, severityLegend } from "../colours.js";
import { LiveSection, SEVERITY_COLUMN, emptyView, errorView, nodesLink, section } from "../components.js";
import { el, inlineCode, link, replaceContent } from "../dom.js";
import { codeLabel, formatMeasurement, plural, setClusterTime, shortDuration, timeElement } from "../format.js";
import { logViewer } from "../log-viewer.js";
import { table } from "../table.js";

const dueText = (due) => (due.is === "now" ? "now" : [due.is === "retry" ? "retry " : "", timeElement(due.at)]);

function agentText(agent) {
  const lastReport = agent.last_contact ? [agent.silent ? "no report since " : "last report ", timeElement(agent.last_contact)] : [];
  const version = agent.program ? [`, doctor-node ${agent.program}`] : [];
  const skew = agent.skew.length > 0 ? [` (${agent.skew.join("; ")})`] : [];
  return [...lastReport, ...version, ...skew];
}

function renderState(page, why, reload) {
  const fact = (name, ...value) => el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, ...value));
  return [
    el("h1", {}, why.node, " ", nodesLink("state", why.state, badge(why.state)), " ", why.occupancy && badge(why.occupancy)),
    el("p", { class: "strong" }, inlineCode(why.headline)),
    nodeActionButtons(page, () => [why.node], reload),
    el(
      "dl",
      { class: "card fact-list" },
      fact("Pool", why.pool ? nodesLink("pool", why.pool, why.pool) : "–"),
      fact("Hardware", why.hardware ?? "unknown"),
      fact("In this state since", why.since ? timeElement(why.since) : "–"),
      fact("In use by", inlineCode(why.occupancy_text ?? "–")),
      fact("Marks set by Cluster Doctor", why.our_marks.join(", ") || "none"),
      fact("Other marks", why.foreign_marks.join(", ") || "none"),
      fact("Case", why.case ? link(["cases", why.case], why.case) : "none"),
      why.agent && fact("Agent", badge(why.agent.state), " ", ...agentText(why.agent)),
      why.hold &&
        fact("Held", inlineCode(`by ${why.hold.by}: ${why.hold.why}`), why.hold.until ? [", until ", timeElement(why.hold.until)] : ""),
      why.run
        ? fact("Running test", inlineCode(why.run.because))
        : fact("Not tested because", inlineCode(why.skipped?.text ?? "–")),
    ),
    why.next.length > 0 && section("What to do next", el("ul", {}, ...why.next.map((line) => el("li", {}, inlineCode(line))))),
    section(
      "Findings",
      table(page, {
        name: "findings",
        caption: "Open findings",
        rows: why.open_findings,
        emptyText: "No open findings.",
        columns: [
          SEVERITY_COLUMN,
          { key: "entity", title: "Component", value: (row) => row.entity },
          { key: "text", title: "Finding", wide: true, value: (row) => row.text },
          { key: "evidence", title: "Evidence", wide: true, value: (row) => row.evidence },
          {
            key: "rule",
            title: "Check and rule",
            value: (row) => `${row.check} / ${row.rule}`,
            cell: (row) => [nodesLink("check", row.check, row.check), ` / ${row.rule}`],
          },
          { key: "reason", title: "Reason", value: (row) => row.reason, cell: (row) => nodesLink("reason", row.reason, codeLabel(row.reason)) },
          {
            key: "times",
            title: "Occurrences",
            value: (row) => row.sightings,
            cell: (row) => (row.confirmed ? `${plural(row.sightings, "time")}, confirmed` : `${row.sightings} of ${row.confirm} to confirm`),
          },
          { key: "first", title: "First seen", value: (row) => row.first_seen, cell: (row) => timeElement(row.first_seen) },
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
        emptyText: "No regular tests.",
        columns: [
          { key: "test", title: "Test", value: (row) => row.test, cell: (row) => link(["tests", row.test], row.test) },
          { key: "status", title: "Status", value: (row) => row.status, cell: (row) => badge(row.status) },
          {
            key: "last",
            title: "Last result",
            value: (row) => row.last?.at ?? "",
            cell: (row) => (row.last ? [codeLabel(row.last.verdict), " ", timeElement(row.last.at)] : "never"),
          },
          { key: "reason", title: "Reason", value: (row) => row.last?.reason ?? "" },
          { key: "cutoff", title: "Period", value: (row) => row.cutoff, cell: (row) => shortDuration(row.cutoff) },
          { key: "due", title: "Due", value: (row) => row.due.at ?? row.due.is, cell: (row) => dueText(row.due) },
        ],
      }),
    ),
  ];
}

const renderTimeline = (page, entries) =>
  entries.length === 0
    ? emptyView("No events yet.")
    : [
        timelineChart(entries),
        table(page, {
          name: "timeline",
          caption: "Events",
          rows: entries,
          pageSize: 15,
          columns: [
            { key: "at", title: "When", value: (row) => row.at, cell: (row) => timeElement(row.at) },
            {
              key: "kind",
              title: "Kind",
              value: (row) => row.kind,
              cell: (row) => (row.kind === "results" ? badge(row.what) : codeLabel(row.kind === "act" ? row.what : row.kind)),
            },
            { key: "text", title: "What", wide: true, value: (row) => row.text },
            { key: "by", title: "By", value: (row) => row.by ?? "" },
            { key: "code", title: "Reason", value: (row) => row.code ?? "" },
          ],
        }),
      ];

// Each measurement compared with the values of all nodes, and over time.
function renderMeasurements(page, rows) {
  if (!rows.length) return emptyView("No measurements yet.");
  const renderTest = ({ test, measurements }) => {
    const body = el("div", {});
    const renderBody = (peers) =>
      replaceContent(
        body,
        el(
          "div",
          { class: "measurements" },
          ...measurements.map((measurement) => {
            const distribution = peers?.measurements.find((peer) => peer.name === measurement.name && peer.unit === measurement.unit)?.distribution;
            const last = measurement.values.at(-1).value;
            return el(
              "div",
              { class: "measurement" },
              el("h3", {}, measurement.name, el("span", { class: "dim" }, ` ${formatMeasurement(last, measurement.unit)}`)),
              el(
                "div",
                { class: "two-columns" },
                el(
                  "div",
                  {},
                  el("div", { class: "dim" }, "Compared with peers"),
                  distribution
                    ? histogram(distribution, measurement.unit, last)
                    : el("p", { class: "dim" }, peers ? "No peer has this measurement." : "Loading …"),
                ),
                el(
                  "div",
                  {},
                  el("div", { class: "dim" }, "History of this node"),
                  historyChart(measurement.values, measurement.unit, distribution),
                ),
              ),
            );
          }),
        ),
      );
    renderBody(null);
    const details = el("details", { open: true }, el("summary", {}, test), body);
    // The controller reads the measurements of thousands of nodes in steps: show the partial result and repeat the request.
    const loadPeers = async () => {
      try {
        const peers = await get(["tests", test], {}, page.signal);
        renderBody(peers);
        if (!peers.complete && body.isConnected) setTimeout(loadPeers, 2000);
      } catch (error) {
        if (error.name !== "AbortError") body.append(errorView(error));
      }
    };
    loadPeers();
    return details;
  };
  return rows.map(renderTest);
}

// The runs, and the log of the selected run; by default that of the active run.
function renderRuns(page, node, rows) {
  const log = el("div", {});
  const openLog = (run, test) => replaceContent(log, el("h3", {}, `${test} of ${run.run}`), logViewer(page, { run: run.run, node, test }));
  const saveEvidence = async (run) => {
    try {
      await download(["runs", run.run, "evidence", node], `${run.run}_${node}.json`);
    } catch (error) {
      replaceContent(log, errorView(error));
    }
  };
  const activeRun = rows.find((run) => run.state === "running");
  const selectLog = (run, test) => {
    page.setParam("log", `${run.run}/${test}`);
    openLog(run, test);
    log.scrollIntoView({ block: "nearest" });
  };
  const selection = page.query.get("log")?.split("/");
  const selectedRun = rows.find((run) => run.run === selection?.[0]);
  if (selectedRun?.tests.includes(selection[1])) openLog(selectedRun, selection[1]);
  else if (activeRun) openLog(activeRun, activeRun.tests[0]);
  return [
    table(page, {
      name: "runs",
      caption: "Runs",
      rows,
      emptyText: "No runs yet.",
      columns: [
        { key: "planned", title: "Planned", value: (row) => row.planned, cell: (row) => timeElement(row.planned) },
        {
          key: "state",
          title: "State",
          value: (row) => row.state,
          cell: (row) => [codeLabel(row.state), row.end && el("div", { class: "dim" }, row.end)],
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
                  on: { click: () => selectLog(row, test) },
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
                    on: { click: () => saveEvidence(row) },
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

export function render(page) {
  const node = page.parts[1];
  const [stateContainer, timelineContainer, measurementsContainer, runsContainer] = Array.from({ length: 4 }, () => el("div", {}));
  const details = el(
    "div",
    {},
    section("Timeline", timelineContainer),
    section("Measurements", measurementsContainer),
    section("Runs and logs", runsContainer),
  );
  replaceContent(page.main, stateContainer, details);
  const isThisNode = (name, data) => name === "nodes" && (data.more > 0 || data.nodes?.includes(node));
  const stateSection = new LiveSection(page, stateContainer, {
    events: [isThisNode, "cases"],
    load: async (signal) => {
      const pending = get(["nodes", node], {}, signal);
      // Report an unknown node once: hide the other sections.
      pending.then(
        () => (details.hidden = false),
        (error) => (details.hidden = error.status === 404),
      );
      const why = await pending;
      setClusterTime(why.at);
      // A new timestamp alone must not cause a re-render.
      return { ...why, at: null };
    },
    render: (why) => renderState(page, why, () => stateSection.scheduleReload()),
  });
  new LiveSection(page, timelineContainer, {
    events: [isThisNode],
    load: (signal) => get(["nodes", node, "timeline"], { limit: 200 }, signal),
    render: (rows) => renderTimeline(page, rows),
  });
  new LiveSection(page, measurementsContainer, {
    events: [isThisNode],
    load: (signal) => get(["nodes", node, "measurements"], {}, signal),
    render: (rows) => renderMeasurements(page, rows),
  });
  new LiveSection(page, runsContainer, {
    events: [isThisNode, "runs"],
    load: async (signal) => (await get(["runs"], { node, limit: 50 }, signal)).items,
    render: (rows) => renderRuns(page, node, rows),
  });
}
