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

const TEST: (&str, &str) = ("test", "a regular test");
const SEVERITY: (&str, &str) = ("severity", "monitor, reset, reboot, isolate");
const RECEIVER: (&str, &str) = ("receiver", "NAME of `[alerts.receivers.NAME]`");
const NODE: [(&str, &str); 2] = [("node", "its name"), ("pool", "its pool")];

/// All families. The number of series does not grow with the cluster, except those of `per_node`, which are capped.
pub const FAMILIES: &[Family] = &[
    gauge("doctor_build_info", &[("version", "of this program")], "Always 1."),
    gauge("doctor_nodes", &[("use", "free, busy, unknown")], "Nodes by use."),
    gauge("doctor_nodes_gone", &[], "Nodes in the store that are no longer in the cluster."),
    gauge(
        "doctor_nodes_by_state",
        &[("state", "in-service, suspect, quarantined, repairing, requalifying, out, held")],
        "Nodes by state.",
    ),
    gauge("doctor_nodes_overdue", &[], "Nodes on which a test is due."),
    gauge(
        "doctor_test_nodes",
        &[TEST, ("status", "pass, fail, inconclusive, stale, never-tested, not-applicable, not-judged")],
        "Nodes by test status; the values add up to the nodes of the test's pools.",
    ),
    gauge(
        "doctor_test_coverage_ratio",
        &[TEST],
        "Share of the nodes a test applies to that have a pass or fail within its cut-off; absent where it applies to none.",
    ),
    gauge(
        "doctor_results_last_day",
        &[("test", "any test with results"), ("verdict", "pass, fail, inconclusive, not-applicable")],
        "Results of the last 24 hours, in whole hours.",
    ),
    gauge("doctor_runs_active", &[("state", "planned, pending, running")], "Active validation runs."),
    gauge(
        "doctor_runs_last_day",
        &[("outcome", "completed, incomplete, not-started")],
        "Runs planned within the last 24 hours that have ended.",
    ),
    counter("doctor_runs_ended_total", "Runs that have ended."),
    gauge("doctor_validation_node_seconds_today", &[], "Node-seconds of validation since midnight UTC."),
    gauge(
        "doctor_validation_node_seconds_limit",
        &[],
        "Daily limit of validation in node-seconds; absent without a limit.",
    ),
    gauge("doctor_cases_open", &[SEVERITY], "Open cases."),
    gauge("doctor_cases_waiting_for_operator", &[], "Open cases that wait for an operator."),
    gauge("doctor_cases_muted", &[], "Open cases that are acknowledged or snoozed."),
    gauge("doctor_findings_open", &[SEVERITY], "Open findings."),
    gauge("doctor_breaker_open", &[], "1 while the circuit breaker is open: no node is taken out of service."),
    gauge(
        "doctor_nodes_taken_out_last_hour",
        &[],
        "Nodes that the controller took out of service within the last hour, as counted by the breaker.",
    ),
    gauge("doctor_pauses", &[], "Active pauses of validation."),
    gauge("doctor_commands_waiting", &[], "Operator commands that are not done yet."),
    gauge("doctor_agents", &[], "Nodes with an agent that is enrolled or authenticated by a token of the cluster."),
    gauge("doctor_agents_silent", &[], "Agents that have not reported for too long."),
    gauge(
        "doctor_cycle_age_seconds",
        &[],
        "Time since the cluster last answered a cycle; known to within 15 seconds. A cycle that could not observe the cluster does not reset it.",
    ),
    gauge(
        "doctor_cycle_duration_seconds",
        &[],
        "Duration of the last recorded cycle, from its plan to its last action.",
    ),
    gauge("doctor_cycle_failed", &[], "1 if the last recorded cycle had errors."),
    counter("doctor_cycles_total", "Recorded cycles: those with an action, and one every ten minutes."),
    gauge("doctor_leader", &[], "1 while a controller leads."),
    gauge("doctor_lease_remaining_seconds", &[], "Time until the leader's lease expires."),
    counter("doctor_results_stored_total", "Result documents stored."),
    counter("doctor_results_duplicate_total", "Result documents that were stored already."),
    counter("doctor_results_unknown_run_total", "Result documents of unknown runs."),
    counter("doctor_documents_rejected_total", "Documents rejected: unsigned, malformed, or from the wrong node."),
    gauge(
        "doctor_spool_waiting",
        &[("place", "nodes, endpoint, history")],
        "Waiting for ingestion by this process. nodes: reports on nodes, as last reported by their agents; endpoint: messages at the \
         agent endpoint that are not durable yet; history: durable messages not yet in history. nodes and endpoint are absent without an agent endpoint.",
    ),
    gauge("doctor_alert_notes_waiting", &[RECEIVER], "Notifications that are not in a message yet."),
    gauge("doctor_alert_messages_waiting", &[RECEIVER], "Messages that are not delivered yet."),
    counter("doctor_alert_messages_delivered_total", "Messages delivered."),
    counter("doctor_alert_messages_lost_total", "Messages given up."),
    counter(
        "doctor_trace_spans_exported_total",
        "Spans that the collector accepted from this process since it started; absent without `[telemetry]`.",
    ),
    counter(
        "doctor_trace_spans_dropped_total",
        "Spans lost because too many waited for the collector, or because it rejected them.",
    ),
    gauge("doctor_process_resident_memory_bytes", &[], "Resident memory of this process."),
    gauge(
        "doctor_node_series",
        &[("state", "shown, left-out")],
        "Nodes with their own series, and nodes without because there are more than `max_nodes`.",
    ),
    gauge("doctor_node_out_of_service", &NODE, "With `per_node`: 1 if the controller keeps the node out of service."),
    gauge("doctor_node_open_findings", &NODE, "With `per_node`: open findings of the node."),
];
