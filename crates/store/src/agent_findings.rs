//! Results that agents report outside of any run.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

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
    db::{ColumnType, SqlValue, Tx, vals},
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
        let accepted = self.accept_agents(lease, std::slice::from_ref(report))?;
        Ok(accepted.first().copied().unwrap_or(Accepted::Duplicate))
    }

    /// As [`Self::accept_agent`], for many reports in one transaction; several of one node in the order in which they
    /// arrived.
    pub fn accept_agents(&self, lease: &Lease, reports: &[AgentFindings]) -> Result<Vec<Accepted>> {
        if reports.is_empty() {
            return Ok(Vec::new());
        }
        self.write(lease, |tx| enter_reports(tx, reports))
    }
}

/// Enters reports of agents.
pub(super) fn enter_reports(tx: &mut Tx<'_>, reports: &[AgentFindings]) -> Result<Vec<Accepted>> {
    let mut accepted = Vec::with_capacity(reports.len());
    for some in split_by_repeated_node(reports) {
        enter_one_per_node(tx, some, &mut accepted)?;
    }
    Ok(accepted)
}

/// Splits reports, in order, so that no part has two of one node: the second is compared with what the first leaves.
fn split_by_repeated_node(reports: &[AgentFindings]) -> Vec<&[AgentFindings]> {
    let mut parts = Vec::new();
    let (mut first, mut nodes) = (0, HashSet::new());
    for (index, report) in reports.iter().enumerate() {
        if !nodes.insert(&report.node) {
            parts.push(&reports[first..index]);
            first = index;
            nodes = HashSet::from([&report.node]);
        }
    }
    if first < reports.len() {
        parts.push(&reports[first..]);
    }
    parts
}

/// A report that was not stored before.
struct NewReport<'a> {
    node: i64,
    report: &'a AgentFindings,
    times: CheckTimes,
}

fn enter_one_per_node(tx: &mut Tx<'_>, reports: &[AgentFindings], accepted: &mut Vec<Accepted>) -> Result<()> {
    let mut new = record_reports(tx, reports, accepted)?;
    let nodes: Vec<i64> = new.iter().map(|one| one.node).collect();
    let before = result_writer::load_nodes_before(tx, &nodes)?;
    let mut open = OpenFindings::load(tx, &before.nodes_with_findings())?;
    write_agent_results(tx, &before, &mut new)?;
    let mut changes = FindingChanges::default();
    for NewReport { node, report, .. } in &new {
        for (check, findings) in &report.by_check {
            let reported = CheckFindings {
                node: *node,
                check: tx.test_id(check)?,
                run: None,
                at: report.received,
                findings,
                is_conclusive: true,
                is_requalification: false,
                boot: report.hardware.boot_id.as_deref(),
            };
            open.apply(&reported, &mut changes);
        }
        changes.audit_lines.extend(report.dropped.iter().map(|dropped| dropped_reports_line(*node, report, dropped)));
    }
    changes.write(tx)?;
    let at = new.first().map_or(Timestamp::MIN, |one| one.report.received);
    audit::append(tx, at, None, &changes.audit_lines)?;
    let hardware: Vec<HardwareReport<'_>> = new
        .iter()
        .map(|one| HardwareReport { node: one.node, hardware: &one.report.hardware, at: one.report.received })
        .collect();
    nodes::record_hardware(tx, |node| before.hardware(node), &hardware)
}

/// Stores the results in reports.
fn write_agent_results(tx: &mut Tx<'_>, before: &StateBefore, reports: &mut [NewReport<'_>]) -> Result<()> {
    let known = agent_results::statuses_of(tx, reports.iter().map(|one| (one.node, &one.times)))?;
    let mut changed = Vec::new();
    let mut history = Vec::new();
    for NewReport { node, report, times } in reports.iter_mut() {
        let (node, at) = (*node, report.observed_at());
        if !before.is_current_machine(node, at) {
            continue;
        }
        for (check, result) in &report.results {
            let kind = result.kind();
            let (test, outcome) = (tx.test_id(check)?, tx.outcome_id(&kind)?);
            let old = known.get(&(node, test)).copied();
            if old.is_some_and(|old| old.outcome == outcome) {
                times.add(test, at);
                continue;
            }
            let mut status = old.unwrap_or(StoredTestStatus::EMPTY);
            let not_judged = kind.is_not_judged();
            let next = NextResult { at, run: NO_RUN, outcome, verdict: result.verdict, not_judged };
            // An older report that arrives late.
            if !status.precedes(&next) {
                continue;
            }
            status.add(&next);
            changed.push(((node, test), status));
            history.push((node, report.history_id(), test, status.outcome));
        }
        times.add_rounds(&report.confirmed, &Arc::clone(&tx.ids));
    }
    agent_results::write_statuses(tx, &changed)?;
    result_writer::write_agent_results(tx, &history)?;
    agent_results::write_times(tx, reports.iter_mut().map(|one| (one.node, std::mem::take(&mut one.times))))
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

/// Checks that one line of the audit trail names: more than an agent has. A node could name thousands.
const NAMED_CHECKS: usize = 128;

fn dropped_reports_line(node: i64, report: &AgentFindings, dropped: &DroppedReports) -> NewAuditLine {
    let named = dropped.checks.iter().take(NAMED_CHECKS).map(|(check, times)| format!("{check} {times}"));
    let others = dropped.checks.len().saturating_sub(NAMED_CHECKS);
    let checks: Vec<String> = named.chain((others > 0).then(|| format!("and {others} more"))).collect();
    NewAuditLine {
        at: Some(report.received),
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

/// Records the numbers of reports, and returns those that were not stored before. A reinstalled agent restarts its
/// numbering, but its reports have a later send time.
fn record_reports<'a>(
    tx: &mut Tx<'_>,
    reports: &'a [AgentFindings],
    accepted: &mut Vec<Accepted>,
) -> Result<Vec<NewReport<'a>>> {
    let mut ids = Vec::with_capacity(reports.len());
    for report in reports {
        ids.push(tx.node_id(&report.node, report.received)?);
    }
    let mut known: HashMap<i64, (Option<(u64, Timestamp)>, CheckTimes)> = HashMap::new();
    let sql = "SELECT id, last_report_number, last_report_sent_at, agent_checked FROM node WHERE id IN {keys}";
    tx.rows_by_key("reading nodes", sql, &ids, |row| {
        let last = match row.opt_int(1)? {
            None => None,
            Some(number) => Some((number.cast_unsigned(), row.opt_timestamp(2)?.unwrap_or(Timestamp::MIN))),
        };
        known.insert(row.int(0)?, (last, CheckTimes::decode(row.opt_text(3)?)?));
        Ok(())
    })?;
    let mut new = Vec::with_capacity(reports.len());
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(reports.len() * 3);
    for (report, node) in reports.iter().zip(ids) {
        let (last, times) = known.remove(&node).unwrap_or_default();
        let is_new = last.is_none_or(|(number, sent)| number < report.number || sent < report.sent);
        accepted.push(if is_new { Accepted::Stored } else { Accepted::Duplicate });
        if is_new {
            rows.extend_from_slice(vals![node, report.number, report.sent]);
            new.push(NewReport { node, report, times });
        }
    }
    let sqlite = "UPDATE node SET last_report_number = $2, last_report_sent_at = $3 WHERE id = $1";
    let postgres = "UPDATE node SET last_report_number = r.number, last_report_sent_at = r.sent \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[]) AS r (id, number, sent) WHERE node.id = r.id";
    tx.execute_each("recording reports", (sqlite, postgres), &[ColumnType::Int; 3], &rows)?;
    Ok(new)
}
