//! Builds one scrape from the cluster state and the store.

use std::net::SocketAddr;

use doctor_core::{
    finding::Severity,
    snapshot::NodeRecord,
    time::{Span, Timestamp},
    view::{self, BreakerState, CoverageRow, Facts, LeaderView, StatusView},
};
use doctor_engine::{cluster_state, spans::ExportCounts};
use doctor_store::{Store, StoreError};
use serde::{Deserialize, Serialize};

use super::Scrape;

/// The section `[metrics]` of the service's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSettings {
    /// Listen address of the Prometheus endpoint. Without it, the endpoint is disabled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Whether nodes have their own series.
    pub per_node: bool,
    /// With more nodes than this, none has.
    pub max_nodes: usize,
}

impl Default for MetricsSettings {
    fn default() -> Self {
        Self { listen: None, per_node: false, max_nodes: 2000 }
    }
}

/// Prometheus uses seconds.
const HOUR: f64 = 3600.0;

/// Returns all series as of now. A cluster that was never observed has no nodes; the age of its state shows that.
///
/// # Errors
/// If the store fails.
pub fn gather(store: &Store, facts: &Facts, settings: &MetricsSettings) -> Result<Scrape, StoreError> {
    let now = facts.now;
    let status = view::status(facts, &cluster_state::ledger(store, now)?);
    let mut scrape = Scrape::new();
    scrape.add("doctor_build_info", &[env!("CARGO_PKG_VERSION")], 1.0);
    cluster(&mut scrape, &status);
    status.coverage.iter().for_each(|row| coverage(&mut scrape, row));
    cases(&mut scrape, store, facts)?;
    runs(&mut scrape, store, &status, now)?;
    service(&mut scrape, &status, facts);
    counters(&mut scrape, store)?;
    alerts(&mut scrape, store)?;
    nodes(&mut scrape, facts, settings);
    if let Some(bytes) = resident_memory() {
        scrape.add("doctor_process_resident_memory_bytes", &[], bytes);
    }
    Ok(scrape)
}

fn cluster(scrape: &mut Scrape, status: &StatusView) {
    let nodes = &status.nodes;
    for (used, count) in [("free", nodes.free), ("busy", nodes.busy), ("unknown", nodes.unknown)] {
        scrape.add("doctor_nodes", &[used], f64::from(count));
    }
    scrape.add("doctor_nodes_gone", &[], f64::from(nodes.gone));
    for (state, count) in &nodes.states {
        scrape.add("doctor_nodes_by_state", &[state], f64::from(*count));
    }
    scrape.add("doctor_nodes_overdue", &[], f64::from(nodes.overdue));
    scrape.add("doctor_agents", &[], f64::from(status.silent.agents));
    scrape.add("doctor_agents_silent", &[], float(status.silent.silent.len()));
}

fn coverage(scrape: &mut Scrape, row: &CoverageRow) {
    let test = row.test.as_str();
    let statuses = [
        ("pass", row.pass),
        ("fail", row.fail),
        ("inconclusive", row.inconclusive),
        ("stale", row.stale),
        ("never-tested", row.never_tested),
        ("not-applicable", row.not_applicable),
        ("not-judged", row.not_judged),
    ];
    for (status, count) in statuses {
        scrape.add("doctor_test_nodes", &[test, status], f64::from(count));
    }
    if let Some(percent) = row.percent {
        scrape.add("doctor_test_coverage_ratio", &[test], percent / 100.0);
    }
}

fn cases(scrape: &mut Scrape, store: &Store, facts: &Facts) -> Result<(), StoreError> {
    let open: Vec<_> = facts.snapshot.cases.iter().filter(|case| case.is_open()).collect();
    let findings = || facts.nodes().flat_map(|(record, _)| &record.findings);
    for severity in Severity::ALL {
        let cases = open.iter().filter(|case| case.severity == *severity).count();
        scrape.add("doctor_cases_open", &[severity.code()], float(cases));
        let findings = findings().filter(|open| open.finding.severity == *severity).count();
        scrape.add("doctor_findings_open", &[severity.code()], float(findings));
    }
    let waiting = open.iter().filter(|case| case.waits_for_operator()).count();
    scrape.add("doctor_cases_waiting_for_operator", &[], float(waiting));
    let muted = store.mutes()?;
    let muted = open.iter().filter(|case| muted.contains_key(&case.id)).count();
    scrape.add("doctor_cases_muted", &[], float(muted));
    Ok(())
}

fn runs(scrape: &mut Scrape, store: &Store, status: &StatusView, now: Timestamp) -> Result<(), StoreError> {
    let running = &status.running;
    for (state, count) in [("planned", running.planned), ("pending", running.pending), ("running", running.running)] {
        scrape.add("doctor_runs_active", &[state], f64::from(count));
    }
    let day = now.minus(Span::days(1));
    for (outcome, count) in store.run_outcomes(day)? {
        scrape.add("doctor_runs_last_day", &[outcome], float_u64(count));
    }
    for rate in store.failure_rates(day)? {
        let verdicts = [
            ("pass", rate.pass),
            ("fail", rate.fail),
            ("inconclusive", rate.inconclusive),
            ("not-applicable", rate.not_applicable),
        ];
        for (verdict, count) in verdicts {
            scrape.add("doctor_results_last_day", &[rate.test.as_str(), verdict], float_u64(count));
        }
    }
    scrape.add("doctor_validation_node_seconds_today", &[], status.spent_today_hours * HOUR);
    Ok(())
}

fn service(scrape: &mut Scrape, status: &StatusView, facts: &Facts) {
    if let Some(hours) = facts.snapshot.policy.limits.node_hours_per_day {
        scrape.add("doctor_validation_node_seconds_limit", &[], hours * HOUR);
    }
    scrape.add("doctor_breaker_open", &[], flag(status.breaker.state == BreakerState::Open));
    scrape.add("doctor_nodes_taken_out_last_hour", &[], float(status.breaker.taken_out.len()));
    scrape.add("doctor_pauses", &[], float(status.pauses.len()));
    scrape.add("doctor_commands_waiting", &[], float(status.commands));
    if let Some(observed_at) = facts.observed_at {
        scrape.add("doctor_cycle_age_seconds", &[], seconds(facts.now.since(observed_at)));
    }
    if let Some(cycle) = &status.last_cycle {
        if let Some(duration) = cycle.duration {
            scrape.add("doctor_cycle_duration_seconds", &[], seconds(duration));
        }
        scrape.add("doctor_cycle_failed", &[], flag(cycle.problem.is_some()));
    }
    let lease = match &status.leader {
        LeaderView::Leads { until, .. } => Some(until.since(facts.now)),
        LeaderView::Lost { .. } | LeaderView::NoLeader => None,
    };
    scrape.add("doctor_leader", &[], flag(lease.is_some()));
    scrape.add("doctor_lease_remaining_seconds", &[], lease.map_or(0.0, seconds));
}

fn counters(scrape: &mut Scrape, store: &Store) -> Result<(), StoreError> {
    let counters = store.counters()?;
    for (name, count) in [
        ("doctor_runs_ended_total", counters.runs_ended),
        ("doctor_cycles_total", counters.cycles),
        ("doctor_results_stored_total", counters.results_stored),
        ("doctor_results_duplicate_total", counters.results_duplicate),
        ("doctor_results_unknown_run_total", counters.results_of_unknown_runs),
        ("doctor_documents_rejected_total", counters.documents_rejected),
        ("doctor_alert_messages_delivered_total", counters.alerts_delivered),
        ("doctor_alert_messages_lost_total", counters.alerts_given_up),
    ] {
        scrape.add(name, &[], float_u64(count));
    }
    Ok(())
}

/// Adds metrics of this process: waiting messages by place, and span counters.
pub(crate) fn add_process_metrics(scrape: &mut Scrape, waiting: &[(&str, u64)], traces: Option<&ExportCounts>) {
    for (location, count) in waiting {
        scrape.add("doctor_spool_waiting", &[*location], float_u64(*count));
    }
    if let Some(counts) = traces {
        scrape.add("doctor_trace_spans_exported_total", &[], float_u64(counts.exported()));
        scrape.add("doctor_trace_spans_dropped_total", &[], float_u64(counts.dropped()));
    }
}

fn alerts(scrape: &mut Scrape, store: &Store) -> Result<(), StoreError> {
    for (receiver, waiting) in store.pending_alerts()? {
        scrape.add("doctor_alert_notes_waiting", &[&receiver], float_u64(waiting.notes));
        scrape.add("doctor_alert_messages_waiting", &[&receiver], float_u64(waiting.messages));
    }
    Ok(())
}

/// Adds series of all nodes or none: a subset would be read as all.
fn nodes(scrape: &mut Scrape, facts: &Facts, settings: &MetricsSettings) {
    let records = &facts.snapshot.nodes;
    let exported: &[NodeRecord] = if settings.per_node && records.len() <= settings.max_nodes { records } else { &[] };
    let omitted = if settings.per_node { records.len() - exported.len() } else { 0 };
    scrape.add("doctor_node_series", &["shown"], float(exported.len()));
    scrape.add("doctor_node_series", &["left-out"], float(omitted));
    for record in exported {
        let labels = [record.node.name.as_str(), record.node.pool.as_str()];
        scrape.add("doctor_node_out_of_service", &labels, flag(record.state.is_out_of_service()));
        scrape.add("doctor_node_open_findings", &labels, float(record.findings.len()));
    }
}

fn flag(yes: bool) -> f64 {
    if yes { 1.0 } else { 0.0 }
}

/// Integers are exact up to 2^53, which these counts do not reach.
fn float(count: usize) -> f64 {
    count as f64
}

fn float_u64(count: u64) -> f64 {
    count as f64
}

fn seconds(span: Span) -> f64 {
    span.millis() as f64 / 1000.0
}

fn resident_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse::<f64>().ok().map(|kib| kib * 1024.0)
}
