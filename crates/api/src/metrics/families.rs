//! Every metric family, in output order.

/// A metric family: all series of one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub help: &'static str,
    /// Label names and their values.
    pub labels: &'static [(&'static str, &'static str)],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Gauge,
    Counter,
}

impl Kind {
    pub const fn word(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

const fn gauge(name: &'static str, labels: &'static [(&'static str, &'static str)], help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, help, labels }
}

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Counter, help, labels: &[] }
}

const TEST: (&str, &str) = ("test", "a test that is run regularly");
const SEVERITY: (&str, &str) = ("severity", "monitor, reset, reboot, isolate");
const RECEIVER: (&str, &str) = ("receiver", "as `[alerts.receivers.NAME]` names it");
const NODE: [(&str, &str); 2] = [("node", "its name"), ("pool", "where the cluster has it")];

/// All families. The number of series does not grow with the cluster, except those of `per_node`, which are capped.
pub const FAMILIES: &[Family] = &[
    gauge("doctor_build_info", &[("version", "of this program")], "Always 1."),
    gauge("doctor_nodes", &[("use", "free, busy, unknown")], "Nodes by whether users have them."),
    gauge("doctor_nodes_gone", &[], "Nodes that the store knows and the cluster does not name any more."),
    gauge(
        "doctor_nodes_by_life",
        &[("life", "in-service, suspect, quarantined, repairing, proving, out, held")],
        "Nodes by where they stand between in service and out.",
    ),
    gauge("doctor_nodes_overdue", &[], "Nodes on which a test is due."),
    gauge(
        "doctor_test_nodes",
        &[TEST, ("standing", "pass, fail, inconclusive, stale, never-tested, not-applicable")],
        "Nodes by where they stand with a test; the standings add up to the nodes it is meant for.",
    ),
    gauge(
        "doctor_test_coverage_ratio",
        &[TEST],
        "Share of the nodes a test applies to that have a pass or fail within its cut-off; absent where it applies to none.",
    ),
    gauge(
        "doctor_results_last_day",
        &[("test", "any test with results"), ("verdict", "pass, fail, inconclusive, not-applicable")],
        "Results of the last 24 hours, counted by whole hours.",
    ),
    gauge("doctor_runs_active", &[("state", "planned, pending, running")], "Validation runs under way."),
    gauge(
        "doctor_runs_last_day",
        &[("outcome", "completed, incomplete, not-started")],
        "Runs that were planned within the last 24 hours and have ended.",
    ),
    counter("doctor_runs_ended_total", "Runs that have ended, ever."),
    gauge("doctor_validation_node_seconds_today", &[], "Node-seconds of validation since midnight UTC."),
    gauge(
        "doctor_validation_node_seconds_limit",
        &[],
        "Node-seconds of validation that a day may have; absent without a limit.",
    ),
    gauge("doctor_cases_open", &[SEVERITY], "Open cases."),
    gauge("doctor_cases_waiting_for_person", &[], "Open cases that wait for a person."),
    gauge("doctor_cases_muted", &[], "Open cases that are acknowledged or snoozed."),
    gauge("doctor_findings_open", &[SEVERITY], "Findings that are open against nodes."),
    gauge("doctor_breaker_open", &[], "1 while the circuit breaker lets no node be taken out."),
    gauge(
        "doctor_nodes_taken_out_last_hour",
        &[],
        "Nodes taken out by the doctor within the last hour, which the breaker counts.",
    ),
    gauge("doctor_pauses", &[], "Pauses of validation that are in force."),
    gauge("doctor_requests_waiting", &[], "Requests of operators that have not been seen to."),
    gauge("doctor_agents", &[], "Nodes whose agent speaks, or should."),
    gauge("doctor_agents_silent", &[], "Agents that have not been heard for too long."),
    gauge(
        "doctor_cycle_age_seconds",
        &[],
        "Since a cycle last left a picture of the cluster, which happens every 15 seconds.",
    ),
    gauge(
        "doctor_cycle_duration_seconds",
        &[],
        "Of the last cycle that was written down, from its plan to its last effect.",
    ),
    gauge("doctor_cycle_trouble", &[], "1 if the last cycle that was written down could not see or do everything."),
    counter("doctor_cycles_total", "Cycles that were written down: those that did something, and one in ten minutes."),
    gauge("doctor_leader", &[], "1 while some controller leads."),
    gauge("doctor_lease_remaining_seconds", &[], "Until the lease of the controller that leads runs out."),
    counter("doctor_results_kept_total", "Result documents that were kept."),
    counter("doctor_results_duplicate_total", "Result documents that had been kept already."),
    counter("doctor_results_unknown_run_total", "Result documents of runs that nobody knows."),
    counter(
        "doctor_documents_rejected_total",
        "Documents that were turned away at the door: unsigned, unreadable, of the wrong node.",
    ),
    gauge(
        "doctor_spool_waiting",
        &[("place", "nodes, door, history")],
        "What waits to be taken in by the process that is asked: reports on nodes, as their agents last said; reports at its door; \
         results that are kept and not entered in history. `nodes` and `door` are absent without a door for agents.",
    ),
    gauge("doctor_alert_notes_waiting", &[RECEIVER], "Notes to people that are in no message yet."),
    gauge("doctor_alert_messages_waiting", &[RECEIVER], "Messages to people that have not arrived."),
    counter("doctor_alert_messages_delivered_total", "Messages to people that arrived."),
    counter("doctor_alert_messages_lost_total", "Messages to people that were given up."),
    counter(
        "doctor_trace_spans_exported_total",
        "Spans that the collector took from the process that is asked, since it began; absent without `[telemetry]`.",
    ),
    counter(
        "doctor_trace_spans_dropped_total",
        "Spans that were lost because too many waited for the collector, or because it refused them.",
    ),
    gauge("doctor_process_resident_memory_bytes", &[], "Memory of the process that is asked."),
    gauge(
        "doctor_node_series",
        &[("state", "shown, left-out")],
        "Nodes that have series of their own, and nodes that have none because there are more than `most_nodes`.",
    ),
    gauge("doctor_node_out_of_service", &NODE, "With `per_node`: 1 if the doctor keeps the node out of service."),
    gauge("doctor_node_open_findings", &NODE, "With `per_node`: findings that are open against the node."),
];
