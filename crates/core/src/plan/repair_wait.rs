//! A repair that an operator requested and that is not over: what it waits for, and what a release would do to it.

use super::{builder::is_in_service, repair_request::repair_block};
use crate::{
    case::{Case, Repair, RequestedRepair},
    lifecycle::NodeState,
    node::Occupancy,
    snapshot::{CommandKind, NodeRecord, Snapshot},
    time::Timestamp,
};

/// A requested repair that has not begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WaitingRepair {
    pub(crate) what: Repair,
    pub(crate) by: String,
    pub(crate) why: String,
    pub(crate) since: Timestamp,
    /// `None`: it continues in the next cycle.
    pub(crate) cause: Option<WaitCause>,
}

/// What a requested repair waits for, and what ends that: a code to group by, and words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WaitCause {
    pub(crate) code: &'static str,
    pub(crate) text: String,
}

impl WaitingRepair {
    pub(crate) fn text(&self) -> String {
        let Self { what, by, why, cause, .. } = self;
        let cause = cause.as_ref().map_or("the next cycle", |cause| cause.text.as_str());
        format!("{what} requested by {by} ({why}) waits for this: {cause}")
    }
}

/// Returns what a requested repair of this node waits for. `None`: no repair is requested, or it is in progress.
pub(crate) fn waiting_repair(snapshot: &Snapshot, record: &NodeRecord, case: Option<&Case>) -> Option<WaitingRepair> {
    let begun = |repair: &RequestedRepair| case.is_some_and(|case| case.steps.iter().any(|step| step.op == repair.op));
    let asked = case.and_then(Case::requested_repair).filter(|(_, repair)| !begun(repair));
    let pending = snapshot.commands.iter().rev().find_map(|command| match &command.kind {
        CommandKind::Repair { node, step, evict } if *node == record.node.name => Some((*step, *evict, command)),
        _ => None,
    });
    let (what, evict, by, why, since) = match (asked, pending) {
        (_, Some((step, evict, command))) => (step, evict, &command.by, &command.why, command.at),
        (Some((request, repair)), None) => {
            let since = case.and_then(Case::repair_requested_at).unwrap_or(snapshot.at);
            (repair.what, repair.evict, &request.by, &request.why, since)
        }
        (None, None) => return None,
    };
    let cause = cause(snapshot, record, what, evict);
    Some(WaitingRepair { what, by: by.clone(), why: why.clone(), since, cause })
}

fn cause(snapshot: &Snapshot, record: &NodeRecord, what: Repair, evict: bool) -> Option<WaitCause> {
    let node = &record.node.name;
    if let Some(hold) = record.hold_at(snapshot.at) {
        let text = format!("the node is held by {} ({}): `doctor release {node} --why …`", hold.by, hold.why);
        return Some(WaitCause { code: "held", text });
    }
    if let Some(block) = repair_block(snapshot, &record.node.pool) {
        return Some(WaitCause { code: "blocked", text: format!("{}: {}", block.text(), block.ended_by()) });
    }
    if let Some(mark) = record.node.marks.blocking_foreign_mark() {
        let text =
            format!("{} keeps the node out of service ({}); it begins when that mark is gone", mark.by, mark.text);
        return Some(WaitCause { code: "foreign-mark", text });
    }
    let (code, text) = match &record.node.occupancy {
        _ if matches!(record.state, NodeState::Held { .. }) => {
            ("held", "another party keeps the node out of service".to_owned())
        }
        Occupancy::Busy { by } if evict => ("busy", format!("user work ({by}) is being evicted")),
        Occupancy::Busy { by } if !is_in_service(&record.state) => (
            "busy",
            format!("user work ({by}) has to end: `doctor repair {node} --step {what} --drain --why …` evicts it"),
        ),
        Occupancy::Unknown { why } if !evict && !is_in_service(&record.state) => (
            "unknown",
            format!(
                "user work may be running ({why}): `doctor repair {node} --step {what} --drain --why …` gives it up"
            ),
        ),
        _ if snapshot.runs.iter().any(|active| active.run.nodes.contains(node)) => {
            ("test", "a test has to end on the node".to_owned())
        }
        _ => return None,
    };
    Some(WaitCause { code, text })
}

/// A requested repair that is not over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnfinishedRepair<'a> {
    pub what: Repair,
    pub by: &'a str,
    pub why: &'a str,
    /// It may have reached the cluster. Before that, a release withdraws it.
    pub sent: bool,
}

/// Returns the repair that an operator requested for this node, from the command until the case is handed over, released
/// or closed.
pub fn unfinished_repair<'a>(snapshot: &'a Snapshot, record: &NodeRecord) -> Option<UnfinishedRepair<'a>> {
    let pending = snapshot.commands.iter().rev().find_map(|command| match &command.kind {
        CommandKind::Repair { node, step, .. } if *node == record.node.name => {
            Some(UnfinishedRepair { what: *step, by: &command.by, why: &command.why, sent: false })
        }
        _ => None,
    });
    let case = snapshot.cases.iter().find(|case| case.is_open() && Some(case.id) == record.case);
    pending.or_else(|| {
        let (request, repair) = case?.requested_repair()?;
        let sent = repair.sent.is_some();
        Some(UnfinishedRepair { what: repair.what, by: &request.by, why: &request.why, sent })
    })
}
