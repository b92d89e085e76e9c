//! Results that agents report outside of any run.

use std::sync::Arc;

use doctor_checks::document::DroppedReports;
use doctor_core::{
    ids::RunId,
    time::{Span, Timestamp},
    view::plural,
};

use super::{
    Store,
    agent_results::{self, CheckTimes, NO_RUN},
    audit::{self, NewAuditLine},
    db::{Tx, vals},
    error::Result,
    fencing::Lease,
    findings::{CheckFindings, FindingChanges, OpenFindings},
    id_cache::OutcomeKind,
    nodes::{self, HardwareReport},
    records::{Accepted, AgentFindings, AgentResult},
    result_writer::{self, StateBefore},
    test_status::{NextResult, StoredTestStatus},
};

impl Store {
    /// Stores the results in an agent's report, and replaces the open findings of each check with a conclusive one.
    /// Changed results go into history, new and cleared findings into the audit trail.
    ///
    /// An agent resends a report until it is acknowledged; a report that is already stored counts once.
    pub fn accept_agent(&self, lease: &Lease, report: &AgentFindings) -> Result<Accepted> {
        self.write(lease, |tx| {
            let node = tx.node_id(&report.node, report.received)?;
            if !record_report(tx, node, report)? {
                return Ok(Accepted::Duplicate);
            }
            let before = result_writer::load_state_before(tx, &[node])?;
            let mut open = OpenFindings::load(tx, &before.nodes_with_findings())?;
            let mut changes = FindingChanges::default();
            write_agent_results(tx, node, &before, report)?;
            for (check, findings) in &report.by_check {
                let check = tx.test_id(check)?;
                let boot = report.hardware.boot_id.as_deref();
                let reported = CheckFindings {
                    node,
                    check,
                    run: None,
                    at: report.received,
                    findings,
                    is_conclusive: true,
                    is_requalification: false,
                    boot,
                };
                open.apply(&reported, &mut changes);
            }
            if let Some(dropped) = &report.dropped {
                changes.audit_lines.push(dropped_reports_line(node, dropped));
            }
            changes.write(tx)?;
            audit::append(tx, report.received, None, &changes.audit_lines)?;
            let hardware_reports = [HardwareReport { node, hardware: &report.hardware, at: report.received }];
            nodes::record_hardware(tx, |node| before.hardware(node), &hardware_reports)?;
            Ok(Accepted::Stored)
        })
    }
}

/// Stores the results in a report.
fn write_agent_results(tx: &mut Tx<'_>, node: i64, before: &StateBefore, report: &AgentFindings) -> Result<()> {
    let mut times = CheckTimes::of_node(tx, node)?;
    let known = agent_results::statuses_of(tx, node, &times)?;
    let at = report.observed_at();
    let mut changed = Vec::new();
    if before.is_current_machine(node, at) {
        for (check, result) in &report.results {
            let (test, outcome) = (tx.test_id(check)?, tx.outcome_id(&result.kind())?);
            let old = known.get(&test).copied();
            if old.is_some_and(|old| old.outcome == outcome) {
                times.add(test, at);
                continue;
            }
            let mut status = old.unwrap_or(StoredTestStatus::EMPTY);
            let next = NextResult {
                at,
                run: NO_RUN,
                outcome,
                verdict: result.verdict,
                not_judged: result.kind().is_not_judged(),
            };
            // An older report that arrives late.
            if !status.precedes(&next) {
                continue;
            }
            status.add(&next);
            changed.push((test, status));
        }
        times.add_rounds(&report.confirmed, &Arc::clone(&tx.ids));
    }
    agent_results::write_statuses(tx, node, &changed)?;
    let results: Vec<(i64, i64)> = changed.iter().map(|(test, status)| (*test, status.outcome)).collect();
    result_writer::write_agent_results(tx, node, report.history_id(), &results)?;
    agent_results::write_times(tx, std::iter::once((node, times)))
}

impl AgentResult {
    fn kind(&self) -> OutcomeKind {
        OutcomeKind::of_agent(self.verdict, self.severity, self.reason.clone())
    }
}

impl AgentFindings {
    /// Returns when the agent made the report, by the controller's clock.
    fn observed_at(&self) -> Timestamp {
        self.received.minus(self.waited.max(Span::ZERO))
    }

    /// Returns what stands in place of a run id in history. Reports of one millisecond differ by their number.
    fn history_id(&self) -> RunId {
        const NUMBER_BITS: u64 = (1 << 21) - 1;
        RunId::from_number(RunId::born_at(self.observed_at()).number() | (self.number & NUMBER_BITS))
    }
}

fn dropped_reports_line(node: i64, dropped: &DroppedReports) -> NewAuditLine {
    let checks: Vec<String> = dropped.checks.iter().map(|(check, times)| format!("{check} {times}")).collect();
    NewAuditLine {
        action: "reports-dropped",
        node: Some(node),
        code: "spool-full".to_owned(),
        text: format!(
            "the agent's spool was full; it dropped {} made from {} to {}: {}",
            plural(usize::try_from(dropped.reports).unwrap_or(usize::MAX), "report"),
            dropped.from,
            dropped.to,
            checks.join(", ")
        ),
        ..NewAuditLine::default()
    }
}

/// Records the report's number; returns `false` if this report was stored before. A reinstalled agent restarts its
/// numbering, but its reports have a later send time.
fn record_report(tx: &mut Tx<'_>, node: i64, report: &AgentFindings) -> Result<bool> {
    let sql = "UPDATE node SET last_report_number = $2, last_report_sent_at = $3 WHERE id = $1 \
               AND (last_report_number IS NULL OR last_report_number < $2 OR last_report_sent_at < $3)";
    Ok(tx.execute("recording a report", sql, vals![node, report.number, report.sent])? > 0)
}
