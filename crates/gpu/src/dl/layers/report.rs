//! What a run of the layers found.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    compare::{Deviation, WrongNumber},
    passes::Pass,
};

#[derive(Debug, Clone, PartialEq)]
pub struct LayersReport {
    /// In the order of [`Pass::ALL`].
    pub passes: Vec<PassReport>,
    /// Of each pass in each repeat.
    pub replicas: usize,
    pub repeats: u32,
    /// That the device has.
    pub multiprocessors: usize,
    /// Whether each planted error changed anything: a lost zero is none.
    pub planted_changed: Vec<bool>,
}

impl LayersReport {
    pub fn is_right(&self) -> bool {
        self.passes.iter().all(PassReport::is_right)
    }

    /// How many multiprocessors ran every pass.
    pub fn covered(&self) -> usize {
        let every = self.passes.iter().map(|pass| pass.multiprocessors.clone()).reduce(|every, one| &every & &one);
        every.map_or(0, |every| every.len())
    }

    /// For the comparison with other GPUs: one number for each pass.
    pub fn fingerprints(&self) -> Vec<u64> {
        self.passes.iter().map(|pass| pass.fingerprint).collect()
    }

    /// Seconds on the device, all passes and repeats.
    pub fn seconds(&self) -> f64 {
        self.passes.iter().map(|pass| pass.seconds).sum()
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct PassReport {
    pub pass: Pass,
    /// That most replicas have.
    pub fingerprint: u64,
    /// Of the first replica in the first repeat from the reference.
    pub deviation: Deviation,
    /// On the device, over all repeats, of the kernel alone.
    pub seconds: f64,
    /// That ran it, as they number themselves.
    pub multiprocessors: BTreeSet<u32>,
    /// Over all repeats, how many replicas have not the known fingerprint.
    pub wrong_replicas: usize,
    /// Which ones, in any repeat.
    pub flagged: BTreeSet<usize>,
    /// The first of them.
    pub wrong: Vec<WrongReplica>,
}

impl PassReport {
    pub fn is_right(&self) -> bool {
        self.wrong_replicas == 0 && self.deviation.is_allowed()
    }
}

/// A replica whose bits are not the right ones.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongReplica {
    pub repeat: u32,
    pub replica: usize,
    /// The one that computed it, as it numbers itself.
    pub multiprocessor: u32,
    pub fingerprint: u64,
    /// How many of its outputs are wrong. None says that the outputs are right and their fingerprint was not: the
    /// fingerprint was computed wrongly, or the error was gone when the outputs were read.
    pub numbers: usize,
    pub first: Option<WrongNumber>,
}

/// The value that came up most often; of several such, the smallest.
pub(super) fn most_common(counts: BTreeMap<u64, usize>) -> u64 {
    counts.into_iter().max_by_key(|(value, count)| (*count, Reverse(*value))).map_or(0, |(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right() -> PassReport {
        PassReport {
            pass: Pass::GeluForward,
            fingerprint: Pass::GeluForward.known().fingerprint,
            deviation: Deviation { error: 1e-7, of_tolerance: 0.2, place: 3 },
            seconds: 1e-4,
            multiprocessors: BTreeSet::from([0, 1]),
            wrong_replicas: 0,
            flagged: BTreeSet::new(),
            wrong: Vec::new(),
        }
    }

    #[test]
    fn one_wrong_replica_or_one_output_out_of_bounds_makes_a_pass_wrong() {
        assert!(right().is_right());
        assert!(!PassReport { wrong_replicas: 1, ..right() }.is_right());
        let deviation = Deviation { of_tolerance: f64::INFINITY, ..right().deviation };
        assert!(!PassReport { deviation, ..right() }.is_right());
    }

    #[test]
    fn the_most_common_value_wins_and_a_tie_has_one_answer() {
        assert_eq!(most_common(BTreeMap::from([(3, 1), (7, 1), (9, 2)])), 9);
        assert_eq!(most_common(BTreeMap::from([(7, 1), (9, 1)])), 7);
    }

    #[test]
    fn a_multiprocessor_that_missed_a_pass_is_not_covered() {
        let missed = PassReport { multiprocessors: BTreeSet::from([1]), ..right() };
        let passes = vec![right(), missed];
        let report = LayersReport { passes, replicas: 4, repeats: 1, multiprocessors: 2, planted_changed: vec![] };
        assert_eq!(report.covered(), 1);
    }
}
