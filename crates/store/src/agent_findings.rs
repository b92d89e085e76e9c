//! Findings that agents report outside of any run.

use doctor_checks::document::DroppedReports;
use doctor_core::view::plural;

use super::{
    Store,
    audit::{self, NewAuditLine},
    db::{Tx, vals},
    error::Result,
    fencing::Lease,
    findings::{CheckFindings, FindingChanges, OpenFindings},
    nodes::{self, HardwareReport},
    records::{Accepted, AgentFindings},
    result_writer,
};

impl Store {
    /// Replaces the open findings of each check that an agent reports on. Writes no history row, because no test ran.
    /// New and cleared findings go into the audit trail.
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
            for (check, findings) in &report.by_check {
                let check = tx.test_id(check)?;
                let boot = report.hardware.boot_id.as_deref();
                let reported = CheckFindings {
                    node,
                    check,
                    run: None,
                    at: report.received,
                    findings,
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
