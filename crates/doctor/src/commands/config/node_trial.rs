//! Completes the trial of one node: what the backend could not try without starting a job is taken from the last report of
//! the node's agent and from the results in the store. What neither tells is unknown, with the reason.

use std::time::Duration;

use doctor_backend::{
    clock::{Clock, SystemClock},
    inspection::{InspectionItem, NodeAspect, NodeTrial},
};
use doctor_core::{
    ids::NodeName,
    time::{Span, Timestamp},
};
use doctor_engine::snapshot;
use doctor_store::{
    Store,
    records::{AgentContact, AgentRow, HistoryFilter},
};

use crate::output::ago;

/// The most that a node's clock may be off: a larger offset corrupts the history.
const MAX_CLOCK_OFFSET: Duration = Duration::from_secs(30);
/// An older report says nothing about the agent of today, and older results nothing about the way of results or about devices:
/// agents report every few minutes, and each routine test runs at least weekly.
const REPORT_VALID: Span = Span::hours(1);
const RESULT_VALID: Span = Span::days(8);
/// How many of a node's last results are searched for one of a job.
const SEARCHED: u32 = 200;

/// Returns one item for each aspect of one node.
pub(super) fn complete(trial: Option<NodeTrial>, store: Option<&Store>) -> Vec<InspectionItem> {
    let agents = store.and_then(|store| store.agents().ok()).unwrap_or_default();
    let Some(mut trial) = trial.or_else(|| Some(NodeTrial::new(choose(&agents, store)?))) else {
        let why = "could not try: the store knows no node yet; the first cycle of `doctor serve` lists them";
        return vec![InspectionItem::unknown("one node", why)];
    };
    let now = SystemClock.now();
    let contact = agents.into_iter().find(|row| row.node == trial.node && row.revoked.is_none());
    let contact = contact.and_then(|row| row.last_contact);
    for aspect in NodeAspect::ALL {
        if !trial.found.contains_key(&aspect) {
            try_aspect(&mut trial, aspect, contact.as_ref(), store, now);
        }
    }
    trial.found.into_values().collect()
}

/// Chooses the node whose agent reported last, or else the first one that was observed.
fn choose(agents: &[AgentRow], store: Option<&Store>) -> Option<NodeName> {
    let reporting = agents.iter().filter(|row| row.revoked.is_none());
    let reporting = reporting.filter_map(|row| Some((row.last_contact.as_ref()?.at, &row.node)));
    if let Some((_, node)) = reporting.max() {
        return Some(node.clone());
    }
    let (_, cluster) = snapshot::last_observed(store?).ok().flatten()?;
    cluster.nodes.into_iter().next().map(|row| row.node)
}

fn try_aspect(
    trial: &mut NodeTrial,
    aspect: NodeAspect,
    contact: Option<&AgentContact>,
    store: Option<&Store>,
    now: Timestamp,
) {
    match (aspect, contact) {
        (NodeAspect::SharedDirectory, _) => try_share(trial, store, now),
        (NodeAspect::Devices, _) => try_devices(trial, store, now),
        (_, Some(contact)) if now.since(contact.at) > REPORT_VALID => {
            trial.could_not(aspect, format!("its agent reported last {}; `doctor agent list`", ago(now, contact.at)));
        }
        (NodeAspect::Program, Some(contact)) => {
            trial.good(aspect, format!("its agent reported {}", ago(now, contact.at)));
        }
        (NodeAspect::Version, Some(contact)) => trial.version(&contact.versions.program),
        (NodeAspect::Clock, Some(contact)) => judge_clock(trial, contact),
        (NodeAspect::Rights, Some(_)) => {
            let why =
                format!("its agent does not report its rights; `doctor why {}` lists inconclusive checks", trial.node);
            trial.could_not(aspect, why);
        }
        (NodeAspect::Program | NodeAspect::Version | NodeAspect::Clock | NodeAspect::Rights, None) => {
            let why =
                format!("no agent reports there, and a job is not started; `doctor test {}` starts one", trial.node);
            trial.could_not(aspect, why);
        }
    }
}

/// Compares the clocks by the last message: it may have waited, so a node that seems behind may only be slow.
fn judge_clock(trial: &mut NodeTrial, contact: &AgentContact) {
    let apart = contact.at.since(contact.sent).to_std().max(contact.sent.since(contact.at).to_std());
    let text = format!("{} s from ours when its agent last reported", apart.as_secs());
    if apart <= MAX_CLOCK_OFFSET {
        trial.good(NodeAspect::Clock, text);
    } else {
        trial.bad(NodeAspect::Clock, text, "run chrony or systemd-timesyncd there and here");
    }
}

/// A job's result that arrived proves the way that results take.
fn try_share(trial: &mut NodeTrial, store: Option<&Store>, now: Timestamp) {
    let filter = HistoryFilter { node: Some(trial.node.clone()), limit: Some(SEARCHED), ..HistoryFilter::default() };
    let rows = store.and_then(|store| store.history(&filter).ok()).unwrap_or_default();
    match rows.iter().find(|row| row.run.is_some() && !row.by_agent && !row.untrusted) {
        Some(row) if now.since(row.at) > RESULT_VALID => {
            let (node, at) = (trial.node.clone(), ago(now, row.at));
            let why = format!("the result of its last job arrived {at}; `doctor test {node}` starts one");
            trial.could_not(NodeAspect::SharedDirectory, why);
        }
        Some(row) => {
            trial.good(NodeAspect::SharedDirectory, format!("the result of its last job arrived {}", ago(now, row.at)));
        }
        None => {
            let node = trial.node.clone();
            let why = format!(
                "only a job sees it as jobs do, and none has brought a result; `doctor test {node}` starts one"
            );
            trial.could_not(NodeAspect::SharedDirectory, why);
        }
    }
}

fn try_devices(trial: &mut NodeTrial, store: Option<&Store>, now: Timestamp) {
    let history = store.and_then(|store| store.hardware_history(&trial.node).ok()).unwrap_or_default();
    match history.first() {
        Some((_, _, seen, _)) if now.since(*seen) > RESULT_VALID => {
            trial.could_not(NodeAspect::Devices, format!("the last report from there came {}", ago(now, *seen)));
        }
        Some((_, _, seen, hardware)) if !hardware.gpu_uuids.is_empty() => {
            let text = format!("{} GPUs were read there {}", hardware.gpu_uuids.len(), ago(now, *seen));
            trial.good(NodeAspect::Devices, text);
        }
        _ => trial.could_not(NodeAspect::Devices, "no report from there names a GPU yet"),
    }
}

#[cfg(test)]
mod tests {
    use doctor_backend::inspection::InspectionStatus;
    use doctor_core::time::Span;

    use super::*;

    #[test]
    fn without_a_store_the_reason_is_given_and_nothing_is_good() {
        let found = complete(None, None);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].status, InspectionStatus::Unknown);
        assert!(found[0].text.starts_with("could not try: "), "{found:?}");
    }

    #[test]
    fn every_aspect_of_a_node_without_an_agent_is_unknown_with_what_would_tell() {
        let store = Store::open_in_memory().unwrap();
        let found = complete(Some(NodeTrial::new(NodeName::new("n1").unwrap())), Some(&store));
        assert_eq!(found.len(), NodeAspect::ALL.len());
        for item in &found {
            assert_eq!(item.status, InspectionStatus::Unknown, "{item:?}");
            assert!(item.subject.starts_with("n1: ") && item.text.starts_with("could not try: "), "{item:?}");
        }
    }

    #[test]
    fn the_last_message_of_an_agent_tells_its_version_and_clock() {
        let contact = |behind: Span| AgentContact {
            at: Timestamp::from_secs(1_800_000_000),
            number: 1,
            sent: Timestamp::from_secs(1_800_000_000).minus(behind),
            versions: doctor_checks::document::Versions {
                program: "0.0.1".to_owned(),
                schema: doctor_checks::document::Schema::CURRENT,
                policy: 1,
                queued: 0,
            },
        };
        let tried_after = |behind: Span, age: i64| {
            let mut trial = NodeTrial::new(NodeName::new("n1").unwrap());
            for aspect in NodeAspect::ALL {
                try_aspect(&mut trial, aspect, Some(&contact(behind)), None, Timestamp::from_secs(1_800_000_000 + age));
            }
            [NodeAspect::Program, NodeAspect::Version, NodeAspect::Rights, NodeAspect::Clock]
                .map(|aspect| trial.found[&aspect].status)
        };
        let tried = |behind| tried_after(behind, 9);
        let (good, unknown, bad) = (InspectionStatus::Good, InspectionStatus::Unknown, InspectionStatus::Bad);
        assert_eq!(tried(Span::from_secs(2)), [good, bad, unknown, good]);
        assert_eq!(tried(Span::minutes(2)), [good, bad, unknown, bad]);
        assert_eq!(tried_after(Span::from_secs(2), 3601), [unknown; 4], "an old report says nothing about today");
    }
}
