//! Failed user work: queried from the cluster each cycle, kept in the store, and weighed for the planner.
//!
//! The cluster may report the same failure repeatedly; the store keeps it once. Stored failures are read back after a
//! restart, so that a new controller knows what the previous one learned.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use doctor_backend::{ObservedJobFailure, ObservedNode};
use doctor_core::{
    ids::NodeName,
    job_failures::{JobFailure, Label, MAX_JOB_NODES, NodeJobFailures, weigh},
    time::{Span, Timestamp},
};
use doctor_store::{Lease, Store, StoreError};
use tracing::field::Empty;

use crate::{
    cycle_report::CycleReport,
    deps::EngineDeps,
    spans::{in_span, span},
};

/// Each query overlaps the previous one by this much: the cluster may learn late how work ended.
const OVERLAP: Span = Span::minutes(10);

/// Largest number of new failures stored per cycle, the newest ones.
const MAX_NEW_PER_CYCLE: usize = 2000;

/// Largest number of failures kept and weighed, the newest ones. With more failures in the window, the nodes are not
/// the cause.
const MAX_KNOWN: usize = 10_000;

/// Recent failures by node.
pub(crate) type FailuresByNode = BTreeMap<NodeName, Arc<NodeJobFailures>>;

/// By work id and node.
type KnownFailures = BTreeMap<(Label, NodeName), JobFailure>;

/// Recent failures, kept between cycles.
#[derive(Debug, Default)]
pub(crate) struct JobFailures {
    /// All failures within the window; `None`: to be read from the store.
    known: Option<KnownFailures>,
    last_query: Option<Timestamp>,
    pub(crate) by_node: FailuresByNode,
}

impl JobFailures {
    /// Queries the cluster, stores new failures, and weighs those within the window.
    pub(crate) fn update(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        observed: &[ObservedNode],
        report: &mut CycleReport,
    ) -> Result<(), StoreError> {
        let (now, window) = (deps.clock.now(), deps.settings.policy.user_work.window);
        if window <= Span::ZERO {
            *self = Self::default();
            return Ok(());
        }
        let begin = now.minus(window);
        let mut changed = self.known.is_none();
        let known = match &mut self.known {
            Some(known) => known,
            none => none.insert(newest(by_work_and_node(deps.store.job_failures_since(begin)?), MAX_KNOWN)),
        };
        let since = self.last_query.map_or(begin, |last| last.minus(OVERLAP).max(begin));
        let span = span!("backend.job_failures", otel.kind = "client", backend = deps.backend.name(), failed = Empty);
        deps.progress.enter("ask for failed user work");
        match in_span(&span, || deps.backend.job_failures(since)) {
            Ok(reported) => {
                self.last_query = Some(now);
                let new = new_failures(known, reported, observed, dropped_before(known, MAX_KNOWN).max(begin), now);
                if !new.is_empty() {
                    deps.store.add_job_failures(lease, &new, now)?;
                    known.extend(by_work_and_node(new));
                    *known = newest(std::mem::take(known), MAX_KNOWN);
                    changed = true;
                }
            }
            Err(error) => report.problems.push(error.to_string()),
        }
        let count_before = known.len();
        known.retain(|_, work| work.at >= begin);
        if changed || known.len() != count_before {
            let failed: Vec<_> = known.iter().map(|((_, node), work)| (node.clone(), work.clone())).collect();
            self.by_node = weigh_by_node(&failed);
        }
        Ok(())
    }

    pub(crate) fn for_node(&self, node: &NodeName) -> Option<Arc<NodeJobFailures>> {
        if self.by_node.is_empty() { None } else { self.by_node.get(node).cloned() }
    }

    /// Discards the copy; the next update reads the store again.
    pub(crate) fn forget(&mut self) {
        self.known = None;
    }
}

/// Returns the recent failures for a process that is not the leader.
///
/// # Errors
/// If the store fails.
pub(crate) fn stored(store: &Store, window: Span, now: Timestamp) -> Result<FailuresByNode, StoreError> {
    Ok(weigh_by_node(&store.job_failures_since(now.minus(window))?))
}

fn weigh_by_node(failed: &[(NodeName, JobFailure)]) -> FailuresByNode {
    weigh(failed).into_iter().map(|(node, failures)| (node, Arc::new(failures))).collect()
}

fn by_work_and_node(failed: Vec<(NodeName, JobFailure)>) -> KnownFailures {
    failed.into_iter().map(|(node, work)| ((work.id.clone(), node), work)).collect()
}

/// Keeps the newest `most` failures; among those of the same moment, the first by name.
fn newest(mut known: KnownFailures, most: usize) -> KnownFailures {
    if known.len() > most {
        let mut times: Vec<Timestamp> = known.values().map(|work| work.at).collect();
        times.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
        let last = times[most - 1];
        let mut remaining = most - times.partition_point(|at| *at > last);
        known.retain(|_, work| {
            let keep = work.at > last || work.at == last && remaining > 0;
            remaining -= usize::from(keep && work.at == last);
            keep
        });
    }
    known
}

/// Returns the time before which failures were dropped for lack of room: they are not new when reported again.
fn dropped_before(known: &KnownFailures, most: usize) -> Timestamp {
    let oldest = known.values().map(|work| work.at).min().filter(|_| known.len() >= most);
    oldest.map_or(Timestamp::MIN, |oldest| oldest.plus(Span::from_millis(1)))
}

/// Returns the reported failures that are not known yet, on existing nodes, newest first. Work over many nodes is
/// ignored.
fn new_failures(
    known: &KnownFailures,
    reported: Vec<ObservedJobFailure>,
    observed: &[ObservedNode],
    begin: Timestamp,
    now: Timestamp,
) -> Vec<(NodeName, JobFailure)> {
    let is_listed = |node: &NodeName| observed.binary_search_by(|observed| observed.node.name.cmp(node)).is_ok();
    let mut new = KnownFailures::new();
    for ObservedJobFailure { job: mut work, nodes } in reported {
        let nodes: BTreeSet<NodeName> = nodes.into_iter().collect();
        // A cluster whose clock is ahead must not report failures in the future.
        work.at = work.at.min(now);
        if work.at < begin || nodes.len() > MAX_JOB_NODES {
            continue;
        }
        for node in nodes.into_iter().filter(is_listed) {
            let key = (work.id.clone(), node);
            if new.get(&key).or_else(|| known.get(&key)).is_none_or(|before| before.at < work.at) {
                new.insert(key, work.clone());
            }
        }
    }
    let mut new: Vec<_> = new.into_iter().map(|((_, node), work)| (node, work)).collect();
    // The sort is stable: failures of the same moment stay sorted by name.
    new.sort_by_key(|(_, work)| std::cmp::Reverse(work.at));
    new.truncate(MAX_NEW_PER_CYCLE);
    new
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        ids::PoolName,
        job_failures::JobFailureKind,
        node::{Marks, Node, Occupancy},
    };

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn observed_nodes(names: &[&str]) -> Vec<ObservedNode> {
        let (pool, occupancy) = (PoolName::new("gpu").unwrap(), Occupancy::Free);
        let one = |name: &&str| Node {
            name: node(name),
            pool: pool.clone(),
            occupancy: occupancy.clone(),
            marks: Marks::default(),
            hardware: None,
            sku: None,
            declared: None,
            overrides: None,
        };
        names
            .iter()
            .map(|name| ObservedNode { node: one(name).into(), agent_last_seen: None, jobs: Vec::new() })
            .collect()
    }

    fn reported_failure(id: &str, nodes: &[&str], ago: Span) -> ObservedJobFailure {
        let [id, name, owner] = [id, "train", "ann"].map(Label::new);
        let work = JobFailure { id, name, owner, at: NOW.minus(ago), how: JobFailureKind::Unknown };
        ObservedJobFailure { job: work, nodes: nodes.iter().map(|name| node(name)).collect() }
    }

    fn new(known: &[(NodeName, JobFailure)], reported: Vec<ObservedJobFailure>) -> Vec<String> {
        let known = by_work_and_node(known.to_vec());
        let new = new_failures(&known, reported, &observed_nodes(&["a", "b"]), NOW.minus(Span::hours(6)), NOW);
        new.into_iter().map(|(node, work)| format!("{node} {} {}", work.id, NOW.since(work.at).millis())).collect()
    }

    #[test]
    fn only_new_recent_failures_on_listed_nodes_are_returned() {
        let hour = Span::hours(1);
        let known = reported_failure("1", &["a"], hour);
        let known = vec![(node("a"), known.job)];
        assert!(new(&known, vec![reported_failure("1", &["a"], hour)]).is_empty(), "already reported");
        assert_eq!(new(&known, vec![reported_failure("1", &["a", "b", "elsewhere"], hour)]), ["b 1 3600000"]);
        assert_eq!(new(&known, vec![reported_failure("1", &["a"], Span::ZERO)]), ["a 1 0"], "it failed again");
        assert!(new(&[], vec![reported_failure("2", &["a"], Span::hours(7))]).is_empty(), "too long ago");
        assert_eq!(
            new(&[], vec![reported_failure("2", &["a"], Span::hours(-1))]),
            ["a 2 0"],
            "a time in the future counts as now"
        );
        let twice = vec![
            reported_failure("2", &["a"], hour),
            reported_failure("2", &["a"], Span::minutes(1)),
            reported_failure("2", &["a"], hour),
        ];
        assert_eq!(new(&[], twice), ["a 2 60000"]);
    }

    #[test]
    fn the_newest_failures_are_kept_and_dropped_ones_are_not_new_again() {
        let ages = [("1", 50), ("2", 20), ("3", 20), ("4", 10), ("5", 20)];
        let all = || ages.map(|(id, ago)| reported_failure(id, &["a"], Span::from_secs(ago)));
        let known = by_work_and_node(all().map(|failure| (node("a"), failure.job)).to_vec());
        let ids = |known: &KnownFailures| known.keys().map(|(id, _)| id.to_string()).collect::<Vec<_>>();
        assert_eq!(ids(&newest(known.clone(), 5)), ["1", "2", "3", "4", "5"]);
        let retained = newest(known, 3);
        assert_eq!(ids(&retained), ["2", "3", "4"]);
        let from = dropped_before(&retained, 3);
        assert!(new_failures(&retained, all().to_vec(), &observed_nodes(&["a"]), from, NOW).is_empty());
        let later = vec![reported_failure("6", &["a"], Span::from_secs(19))];
        assert_eq!(new_failures(&retained, later, &observed_nodes(&["a"]), from, NOW).len(), 1);
        assert_eq!(dropped_before(&retained, 4), Timestamp::MIN, "below the limit");
    }

    #[test]
    fn failures_of_jobs_over_many_nodes_are_ignored() {
        let names: Vec<String> = (0..=MAX_JOB_NODES).map(|number| format!("n{number}")).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        names[0] = "a";
        assert!(new(&[], vec![reported_failure("1", &names, Span::ZERO)]).is_empty());
    }
}
