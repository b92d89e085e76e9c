//! Nodes in service of which too little is known, and nodes that an operator or another party keeps out.

use super::{
    AttentionItem, AttentionKind, Urgency,
    grouping::{NextCommand, NodeTrouble, grouped, subject},
};
use crate::{
    node::Occupancy,
    snapshot::NodeRecord,
    view::{Facts, format_time, formatting::short_duration, service_state::SilentAgentsView},
};

pub(super) fn items(facts: &Facts, silent: &SilentAgentsView) -> Vec<AttentionItem> {
    let mut items: Vec<AttentionItem> = silent_agents(facts, silent).into_iter().collect();
    // While the cluster does not answer, no occupancy is known, and that is one item of the service.
    let is_observed = facts.observed_at.is_some() && facts.cycle_at <= facts.observed_at;
    let mut troubles: Vec<NodeTrouble> = Vec::new();
    for record in &facts.snapshot.nodes {
        troubles.extend(held(facts, record));
        if !record.state.is_out_of_service() {
            troubles.extend(unknown_occupancy(record).filter(|_| is_observed));
            troubles.extend(foreign_mark(record));
        }
    }
    items.extend(grouped(facts, troubles));
    items
}

fn silent_agents(facts: &Facts, silent: &SilentAgentsView) -> Option<AttentionItem> {
    let last_reports = silent.silent.iter().filter_map(|node| facts.node(node)?.0.last_report);
    let since = last_reports.min()?;
    let (count, agents) = (silent.silent.len(), silent.agents);
    let ago = short_duration(facts.now.since(since));
    let item = match silent.incident {
        true => {
            let text = format!(
                "{count} of {agents} agents are silent, up to {ago}: check the network first; no node is blamed"
            );
            AttentionItem::new(AttentionKind::AgentsSilent, Urgency::Critical, text)
        }
        false => {
            let text = format!("{}: agent silent for {ago}", subject(&silent.silent));
            AttentionItem::new(AttentionKind::AgentSilent, Urgency::Warning, text)
        }
    };
    Some(item.about(silent.silent.clone()).since(since).next("doctor agent list"))
}

fn trouble(kind: AttentionKind, urgency: Urgency, record: &NodeRecord, what: &str, why: &str) -> NodeTrouble {
    NodeTrouble {
        kind,
        urgency,
        node: record.name(),
        since: None,
        case: None,
        what: what.to_owned(),
        why: why.to_owned(),
        why_code: why.to_owned(),
        next: NextCommand::Why,
    }
}

/// A node that is being repaired often does not answer; its case is shown instead.
fn unknown_occupancy(record: &NodeRecord) -> Option<NodeTrouble> {
    let Occupancy::Unknown { why } = &record.node.occupancy else { return None };
    let what = "occupancy unknown, not tested";
    Some(trouble(AttentionKind::OccupancyUnknown, Urgency::Warning, record, what, why))
}

fn foreign_mark(record: &NodeRecord) -> Option<NodeTrouble> {
    let mark = record.node.marks.foreign.iter().find(|mark| mark.blocks)?;
    let what = format!("kept out of service by {}, not tested", mark.by);
    Some(trouble(AttentionKind::ForeignMark, Urgency::Notice, record, &what, &mark.text))
}

fn held(facts: &Facts, record: &NodeRecord) -> Option<NodeTrouble> {
    let hold = record.hold_at(facts.now)?;
    let until = hold.until.map_or_else(String::new, |until| format!(" until {} UTC", format_time(until)));
    let what = format!("held by {}{until}", hold.by);
    let held = trouble(AttentionKind::Held, Urgency::Notice, record, &what, &hold.why);
    Some(NodeTrouble { since: Some(hold.since), next: NextCommand::with_reason("doctor release"), ..held })
}
