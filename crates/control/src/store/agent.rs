//! What agents report on their own, outside of any run.

use super::{
    Store, audit,
    error::Result,
    findings::{Changes, Open, Shown},
    lease::Lease,
    nodes,
    records::AgentFindings,
};

impl Store {
    /// Takes an agent's word for what fails now, check by check. It leaves no history row: nothing was tested. What is
    /// new and what is gone goes into the audit trail.
    pub fn accept_agent(&self, lease: &Lease, report: &AgentFindings) -> Result<()> {
        self.write(lease, |tx| {
            let node = tx.node_id(&report.node, report.received)?;
            let mut open = Open::load(tx, &[node])?;
            let mut changes = Changes::default();
            for (check, findings) in &report.by_check {
                let check = tx.test_id(check)?;
                open.show(&Shown { node, check, run: None, at: report.received, findings }, &mut changes);
            }
            changes.write(tx)?;
            audit::append(tx, report.received, None, &changes.lines)?;
            let known = nodes::known_hardware(tx, &[node])?.remove(&node).unwrap_or_default();
            nodes::note_hardware(tx, node, &known, &report.hardware, report.received)
        })
    }
}
