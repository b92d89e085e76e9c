//! What judging may know beside the observation itself: when it was made, what this node measured before, and what
//! others of its type measure.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    ids::CheckId,
    observation::Entity,
    policy::{Rule, When},
    time::Timestamp,
};

/// The past of one check on one node. What is not in it is not known, and a rule that needs it judges nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Past {
    /// When the look was, by the clock that dated its events.
    pub at: Option<Timestamp>,
    /// By metric and part: earlier values on this machine, newest first.
    pub own: BTreeMap<(String, Entity), Vec<f64>>,
    /// By metric: the newest value of each other node of the same type. Of a node with several parts, their median.
    pub peers: BTreeMap<String, Vec<f64>>,
}

impl Past {
    /// Nothing but the moment.
    pub fn at(at: Timestamp) -> Self {
        Self { at: Some(at), ..Self::default() }
    }

    pub(super) fn own_of(&self, metric: &str, entity: &Entity) -> &[f64] {
        self.own.get(&(metric.to_owned(), entity.clone())).map_or(&[], Vec::as_slice)
    }

    pub(super) fn peers_of(&self, metric: &str) -> &[f64] {
        self.peers.get(metric).map_or(&[], Vec::as_slice)
    }
}

/// What rules want to know of the past, so that nothing else is looked up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// How many earlier results of the node; zero if none.
    pub own: u32,
    /// Metrics of which others' newest values are wanted.
    pub peers: BTreeSet<String>,
}

/// Earlier results that a median of one's own is taken over.
const OWN_WINDOW: u32 = 20;

impl Wanted {
    /// What the rules of this check want.
    pub fn of(rules: &[Rule], check: &CheckId) -> Self {
        let mut wanted = Self::default();
        for rule in rules.iter().filter(|rule| rule.check == *check) {
            wanted.add(&rule.when);
        }
        wanted
    }

    /// What any check's rules want.
    pub fn of_all(rules: &[Rule]) -> Self {
        let mut wanted = Self::default();
        for rule in rules {
            wanted.add(&rule.when);
        }
        wanted
    }

    fn add(&mut self, when: &When) {
        match when {
            When::BelowPeers { metric, .. } => {
                self.peers.insert(metric.clone());
            }
            When::BelowOwn { at_least, .. } => self.own = self.own.max((*at_least).max(OWN_WINDOW)),
            When::OftenOf { when, last, .. } => {
                self.own = self.own.max(last - 1);
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

    pub fn is_nothing(&self) -> bool {
        self.own == 0 && self.peers.is_empty()
    }
}

/// The middle of these numbers; what is none is left out.
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
