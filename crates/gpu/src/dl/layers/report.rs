//! The results of a run of the layers.

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
    /// Replicas of each pass in each repeat.
    pub replicas: usize,
    pub repeats: u32,
    /// Multiprocessors of the device.
    pub multiprocessors: usize,
    /// Whether each injected error changed a value: replacing a zero by zero does not.
    pub injected_changed: Vec<bool>,
}

impl LayersReport {
    pub fn is_right(&self) -> bool {
        self.passes.iter().all(PassReport::is_right)
    }

    /// Returns how many multiprocessors ran every pass.
    pub fn covered(&self) -> usize {
        let every = self.passes.iter().map(|pass| pass.multiprocessors.clone()).reduce(|every, one| &every & &one);
        every.map_or(0, |every| every.len())
    }

    /// Returns one number per pass, for comparison with other GPUs.
    pub fn fingerprints(&self) -> Vec<u64> {
        self.passes.iter().map(|pass| pass.fingerprint).collect()
    }

    /// Returns the seconds on the device for all passes and repeats.
    pub fn seconds(&self) -> f64 {
        self.passes.iter().map(|pass| pass.seconds).sum()
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct PassReport {
    pub pass: Pass,
    /// The fingerprint of most replicas.
    pub fingerprint: u64,
    /// The deviation of the first replica in the first repeat from the reference.
    pub deviation: Deviation,
    /// Seconds on the device, over all repeats, of the kernel alone.
    pub seconds: f64,
    /// The multiprocessors that ran it, by their own ids.
    pub multiprocessors: BTreeSet<u32>,
    /// How many replicas, over all repeats, have another than the known fingerprint.
    pub wrong_replicas: usize,
    /// Their indices, in any repeat.
    pub flagged_replicas: BTreeSet<usize>,
    /// Details of the first of them.
    pub wrong: Vec<WrongReplica>,
}

impl PassReport {
    pub fn is_right(&self) -> bool {
        self.wrong_replicas == 0 && self.deviation.is_allowed()
    }
}

/// A replica with wrong bits.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongReplica {
    pub repeat: u32,
    pub replica: usize,
    /// The multiprocessor that computed it, by its own id.
    pub multiprocessor: u32,
    pub fingerprint: u64,
    /// How many of its outputs are wrong. Zero: the outputs are right and their fingerprint was not. Either the
    /// fingerprint was computed wrongly, or the error was gone when the outputs were read.
    pub numbers: usize,
    pub first: Option<WrongNumber>,
}

/// Returns the most frequent value; of several, the smallest.
pub(super) fn most_common(counts: BTreeMap<u64, usize>) -> u64 {
    counts.into_iter().max_by_key(|(value, count)| (*count, Reverse(*value))).map_or(0, |(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right() -> PassReport {
        PassReport {
            pass: Pass::GeluForward,
            fingerprint: Pass::GeluForward.spec().fingerprint,
            deviation: Deviation { error: 1e-7, of_tolerance: 0.2, place: 3 },
            seconds: 1e-4,
            multiprocessors: BTreeSet::from([0, 1]),
            wrong_replicas: 0,
            flagged_replicas: BTreeSet::new(),
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
    fn the_most_common_value_wins_and_a_tie_is_deterministic() {
        assert_eq!(most_common(BTreeMap::from([(3, 1), (7, 1), (9, 2)])), 9);
        assert_eq!(most_common(BTreeMap::from([(7, 1), (9, 1)])), 7);
    }

    #[test]
    fn a_multiprocessor_that_missed_a_pass_is_not_covered() {
        let missed = PassReport { multiprocessors: BTreeSet::from([1]), ..right() };
        let passes = vec![right(), missed];
        let report = LayersReport { passes, replicas: 4, repeats: 1, multiprocessors: 2, injected_changed: vec![] };
        assert_eq!(report.covered(), 1);
    }
}
