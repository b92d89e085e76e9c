//! Findings that agents report outside of any run.

use doctor_checks::document::Dropped;

use super::{
    Store,
    audit::{self, Line},
    db::{Tx, vals},
    error::Result,
    findings::{Changes, Open, Shown},
    lease::Lease,
    ledger,
    nodes::{self, Spoke},
    records::{Accepted, AgentFindings},
};

impl Store {
    /// Replaces the open findings of each check that an agent reports on. Writes no history row, because no test ran.
    /// New and cleared findings go into the audit trail.
    ///
    /// An agent resends a report until it is acknowledged; a report that is already stored counts once.
    pub fn accept_agent(&self, lease: &Lease, report: &AgentFindings) -> Result<Accepted> {
        self.write(lease, |tx| {
            let node = tx.node_id(&report.node, report.received)?;
            if !note_report(tx, node, report)? {
                return Ok(Accepted::Duplicate);
            }
            let before = ledger::before(tx, &[node])?;
            let mut open = Open::load(tx, &before.with_findings())?;
            let mut changes = Changes::default();
            for (check, findings) in &report.by_check {
                let check = tx.test_id(check)?;
                let boot = report.hardware.boot_id.as_deref();
                let shown = Shown { node, check, run: None, at: report.received, findings, proof: false, boot };
                open.show(&shown, &mut changes);
            }
            if let Some(dropped) = &report.dropped {
                changes.lines.push(told_of_drops(node, dropped));
            }
            changes.write(tx)?;
            audit::append(tx, report.received, None, &changes.lines)?;
            let spoke = [Spoke { node, hardware: &report.hardware, at: report.received }];
            nodes::note_hardware(tx, |node| before.hardware(node), &spoke)?;
            Ok(Accepted::Kept)
        })
    }
}

fn told_of_drops(node: i64, dropped: &Dropped) -> Line {
    let checks: Vec<String> = dropped.checks.iter().map(|(check, times)| format!("{check} {times}")).collect();
    Line {
        what: "reports-dropped",
        node: Some(node),
        code: "spool-full".to_owned(),
        words: format!(
            "the agent's spool was full: {} reports from {} to {} were dropped: {}",
            dropped.reports,
            dropped.from,
            dropped.to,
            checks.join(", ")
        ),
        ..Line::default()
    }
}

/// Records the report's number; returns `false` if this report was stored before. A reinstalled agent restarts its
/// numbering, but its reports have a later send time.
fn note_report(tx: &mut Tx<'_>, node: i64, report: &AgentFindings) -> Result<bool> {
    let sql = "UPDATE node SET last_report_number = $2, last_report_sent_at = $3 WHERE id = $1 \
               AND (last_report_number IS NULL OR last_report_number < $2 OR last_report_sent_at < $3)";
    Ok(tx.run("recording a report", sql, vals![node, report.number, report.sent])? > 0)
}
