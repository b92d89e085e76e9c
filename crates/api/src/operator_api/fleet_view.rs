//! The cluster state that the API serves, and its differences from an earlier one.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use doctor_core::{
    ids::{CaseId, NodeName, RunId},
    snapshot::NodeRecord,
    time::Span,
    view::{Facts, FleetMap, MapRow, fleet_map},
};
use doctor_engine::{agents::AgentBrief, settings::Settings};

use super::events::Change;

/// A state older than this is marked as old: cycles and reads of the store are more frequent.
const STALE_AFTER: Duration = Duration::from_secs(120);
/// Header with the time that a response describes.
const STATE_TIME_HEADER: &str = "x-doctor-state-time";
/// Header with the age of the state, where it is old.
const STATE_AGE_HEADER: &str = "x-doctor-state-age";

/// The served cluster state.
#[derive(Debug)]
pub(super) struct FleetView {
    pub(super) number: u64,
    pub(super) facts: Facts,
    pub(super) settings: Settings,
    pub(super) map: FleetMap,
    pub(super) agents: BTreeMap<NodeName, AgentBrief>,
    /// Hashes of each item, to detect changes.
    fingerprints: Fingerprints,
    created: Instant,
}

/// Each list is sorted by key.
#[derive(Debug, Default)]
struct Fingerprints {
    nodes: Vec<(NodeName, u64)>,
    runs: Vec<(RunId, u64)>,
    cases: Vec<(CaseId, u64)>,
    rest: u64,
}

impl FleetView {
    pub(super) fn new(
        number: u64,
        facts: Facts,
        settings: Settings,
        agents: BTreeMap<NodeName, AgentBrief>,
        rack_before: Option<&str>,
    ) -> Self {
        let map = fleet_map(&facts, rack_before);
        let fingerprints = Fingerprints::compute(&facts, &map, &agents);
        Self { number, facts, settings, map, agents, fingerprints, created: Instant::now() }
    }

    /// Returns its age, if no new one was made for longer than expected.
    pub(super) fn stale_age(&self) -> Option<Span> {
        let age = self.created.elapsed();
        (age > STALE_AFTER).then(|| Span::from_secs(i64::try_from(age.as_secs()).unwrap_or(i64::MAX)))
    }

    /// Adds the time of the state to a response, and its age if it is old.
    pub(super) fn add_headers(&self, headers: &mut HeaderMap) {
        let values = [
            (STATE_TIME_HEADER, Some(self.facts.now.to_string())),
            (STATE_AGE_HEADER, self.stale_age().map(|age| age.to_string())),
        ];
        for (name, value) in values {
            let value = value.and_then(|value| HeaderValue::from_str(&value).ok());
            headers.extend(value.map(|value| (HeaderName::from_static(name), value)));
        }
    }

    /// Returns the differences from an earlier state. `None`: there is no earlier state.
    pub(super) fn changes(&self, before: Option<&Self>) -> Vec<Change> {
        let Some(before) = before.map(|before| &before.fingerprints) else { return vec![Change::Everything] };
        let now = &self.fingerprints;
        let mut changes = Vec::new();
        changes.extend(non_empty(changed_keys(&before.nodes, &now.nodes)).map(Change::Nodes));
        changes.extend(non_empty(changed_keys(&before.runs, &now.runs)).map(Change::Runs));
        changes.extend(non_empty(changed_keys(&before.cases, &now.cases)).map(Change::Cases));
        changes.extend((before.rest != now.rest).then_some(Change::Status));
        changes.extend((!changes.is_empty()).then_some(Change::Plan));
        changes
    }
}

fn non_empty<T>(items: Vec<T>) -> Option<Vec<T>> {
    (!items.is_empty()).then_some(items)
}

/// Returns new, changed and removed keys. Both lists are sorted by key.
fn changed_keys<K: Ord + Clone>(before: &[(K, u64)], now: &[(K, u64)]) -> Vec<K> {
    let (mut before, mut now) = (before.iter().peekable(), now.iter().peekable());
    let mut changed = Vec::new();
    loop {
        let order = match (before.peek(), now.peek()) {
            (None, None) => return changed,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((before, _)), Some((now, _))) => before.cmp(now),
        };
        let (old, new) = (before.next_if(|_| order.is_le()), now.next_if(|_| order.is_ge()));
        if old != new {
            changed.extend(new.or(old).map(|(key, _)| key.clone()));
        }
    }
}

fn sorted<K: Ord>(fingerprints: impl Iterator<Item = (K, u64)>) -> Vec<(K, u64)> {
    let mut all: Vec<(K, u64)> = fingerprints.collect();
    // Nodes are in order already, which takes one pass.
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn fingerprint(parts: impl FnOnce(&mut DefaultHasher)) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts(&mut hasher);
    hasher.finish()
}

impl Fingerprints {
    fn compute(facts: &Facts, map: &FleetMap, agents: &BTreeMap<NodeName, AgentBrief>) -> Self {
        let snapshot = &facts.snapshot;
        let records = facts.nodes().map(|(record, _)| record);
        let nodes = map.nodes.iter().zip(records).map(|(row, record)| {
            // A later heartbeat of the same agent is not a change.
            let agent = agents.get(&row.node).map(|agent| (agent.state, &agent.program));
            (row.node.clone(), fingerprint(|to| (node_fingerprint(row, record), agent).hash(to)))
        });
        let runs =
            snapshot.runs.iter().map(|active| (active.run.id, fingerprint(|to| hash_debug(to, &active.run.state))));
        let cases = snapshot.cases.iter().map(|case| (case.id, fingerprint(|to| hash_debug(to, case))));
        let rest = fingerprint(|to| {
            hash_debug(to, &(&snapshot.breaker, &snapshot.pauses, &snapshot.commands, snapshot.policy.version));
        });
        Self { nodes: sorted(nodes), runs: sorted(runs), cases: sorted(cases), rest }
    }
}

/// Hashes the Debug output, in which every relevant difference shows.
fn hash_debug(to: &mut DefaultHasher, what: &impl std::fmt::Debug) {
    format!("{what:?}").hash(to);
}

fn node_fingerprint(row: &MapRow, record: &NodeRecord) -> u64 {
    fingerprint(|to| {
        row.hash(to);
        record.since.hash(to);
        record.case.hash(to);
        for known in &record.test_records {
            known.attempt().hash(to);
        }
        for open in &record.findings {
            (open.sightings, open.last_seen, open.first_seen).hash(to);
        }
        if !record.node.marks.ours.is_empty() || !record.node.marks.foreign.is_empty() {
            hash_debug(to, &record.node.marks);
        }
        (&record.node.occupancy, &record.hold).hash(to);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(items: &[(&str, u64)]) -> Vec<(NodeName, u64)> {
        items.iter().map(|(name, fingerprint)| (NodeName::new(name).unwrap(), *fingerprint)).collect()
    }

    #[test]
    fn new_changed_and_removed_nodes_are_changes() {
        let before = nodes(&[("a", 1), ("b", 1), ("d", 1), ("f", 1)]);
        let changed = |now| changed_keys(&before, &nodes(now)).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(changed(&[("a", 1), ("b", 1), ("d", 1), ("f", 1)]), [""; 0]);
        assert_eq!(changed(&[("a", 2), ("c", 1), ("d", 1), ("e", 1), ("f", 1), ("g", 1)]), ["a", "b", "c", "e", "g"]);
        assert_eq!(changed(&[]), ["a", "b", "d", "f"]);
    }
}
