//! Baselines for classification: the time of the observation, the node's earlier results and the results of other nodes
//! of its type.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    ids::CheckId,
    observation::Entity,
    policy::{Rule, When},
    time::Timestamp,
};

/// Earlier results of one check. A rule that needs a value missing here decides nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Baselines {
    /// Time of the observation, by the clock that dated its events.
    pub at: Option<Timestamp>,
    /// By metric and part: earlier values on this machine, newest first.
    pub own_values: BTreeMap<(String, Entity), Vec<f64>>,
    /// By metric: the newest value of each other node of the same type; for a node with several parts, their median.
    pub peer_values: BTreeMap<String, Vec<f64>>,
}

impl Baselines {
    /// Baselines with only the time known.
    pub fn at(at: Timestamp) -> Self {
        Self { at: Some(at), ..Self::default() }
    }

    pub(super) fn own_values_of(&self, metric: &str, entity: &Entity) -> &[f64] {
        self.own_values.get(&(metric.to_owned(), entity.clone())).map_or(&[], Vec::as_slice)
    }

    pub(super) fn peer_values_of(&self, metric: &str) -> &[f64] {
        self.peer_values.get(metric).map_or(&[], Vec::as_slice)
    }
}

/// The baselines that rules need, so that nothing else is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BaselineNeeds {
    /// Number of earlier results of the node; zero if none.
    pub own_results: u32,
    /// Metrics for which the newest values of other nodes are needed.
    pub peer_metrics: BTreeSet<String>,
}

/// Earlier results over which the node's own median is taken.
const OWN_WINDOW: u32 = 20;

impl BaselineNeeds {
    /// Returns the baselines that the rules of this check need.
    pub fn for_check(rules: &[Rule], check: &CheckId) -> Self {
        let mut needs = Self::default();
        for rule in rules.iter().filter(|rule| rule.check == *check) {
            needs.add(&rule.when);
        }
        needs
    }

    /// Returns the baselines that the rules of any check need.
    pub fn for_all_checks(rules: &[Rule]) -> Self {
        let mut needs = Self::default();
        for rule in rules {
            needs.add(&rule.when);
        }
        needs
    }

    fn add(&mut self, when: &When) {
        match when {
            When::BelowPeers { metric, .. } => {
                self.peer_metrics.insert(metric.clone());
            }
            When::BelowOwn { at_least, .. } => self.own_results = self.own_results.max((*at_least).max(OWN_WINDOW)),
            When::NOfLastM { when, last, .. } => {
                self.own_results = self.own_results.max(last - 1);
                self.add(when);
            }
            When::Above { .. }
            | When::Below { .. }
            | When::BelowProfile { .. }
            | When::NotProfile { .. }
            | When::Event(_)
            | When::EventsWithin { .. } => {}
        }
    }

    pub fn is_empty(&self) -> bool {
        self.own_results == 0 && self.peer_metrics.is_empty()
    }
}

/// Returns the median of the finite values; `None` if there are none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}
