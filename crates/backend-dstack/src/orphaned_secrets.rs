//! Secrets with the keys of runs that an earlier controller process left behind. Pure.

use std::collections::{BTreeMap, BTreeSet};

use doctor_core::{
    ids::RunId,
    time::{Span, Timestamp},
};

/// The interval between searches.
const SEARCH_INTERVAL: Span = Span::minutes(5);
/// A key exists before its run does, and a controller needs seconds to submit. A key without a run for this long was left behind.
const ORPHANED_AFTER: Span = Span::minutes(30);

/// Keys that another process created.
#[derive(Debug, Default)]
pub(super) struct OrphanedSecrets {
    last_search: Option<Timestamp>,
    /// Those of active runs.
    pub(super) in_use: BTreeSet<RunId>,
    /// Those without an active run, and since when.
    unused_since: BTreeMap<RunId, Timestamp>,
}

impl OrphanedSecrets {
    /// Returns whether a search is due, and records it.
    pub(super) fn is_due(&mut self, now: Timestamp) -> bool {
        let is_time = self.last_search.is_none_or(|last_search| now.since(last_search) >= SEARCH_INTERVAL);
        if is_time {
            self.last_search = Some(now);
        }
        is_time
    }

    /// Returns the keys that no run uses any more.
    pub(super) fn expired(
        &mut self,
        existing: &BTreeSet<RunId>,
        required: &BTreeSet<RunId>,
        now: Timestamp,
    ) -> Vec<RunId> {
        self.unused_since.retain(|run, _| existing.contains(run) && !required.contains(run));
        for run in existing.difference(required) {
            self.unused_since.entry(*run).or_insert(now);
        }
        let old = self.unused_since.iter().filter(|(_, since)| now.since(**since) >= ORPHANED_AFTER);
        old.map(|(run, _)| *run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_orphaned_only_after_a_long_time_without_its_run() {
        let at = |minutes: i64| Timestamp::from_secs(minutes * 60);
        let set = |runs: &[u64]| runs.iter().map(|run| RunId::from_number(*run)).collect::<BTreeSet<_>>();
        let mut left = OrphanedSecrets::default();
        let mut old = |existing: &[u64], required: &[u64], minutes| {
            left.expired(&set(existing), &set(required), at(minutes)).into_iter().collect::<BTreeSet<_>>()
        };
        // Another controller creates the key of run 2 and has not submitted it yet; run 3 is active.
        assert_eq!(old(&[1, 2, 3], &[3], 0), set(&[]));
        assert_eq!(old(&[1, 2, 3], &[2, 3], 29), set(&[]));
        assert_eq!(old(&[1, 2, 3], &[3], 30), set(&[1]), "run 2 was under way in between");
        assert_eq!(old(&[2, 3], &[], 59), set(&[]));
        assert_eq!(old(&[2, 3], &[], 60), set(&[2]));
        assert_eq!(old(&[3], &[], 89), set(&[3]));
    }

    #[test]
    fn orphaned_secrets_are_searched_periodically() {
        let mut left = OrphanedSecrets::default();
        let due: Vec<bool> = [0, 60, 299, 300, 301].map(|secs| left.is_due(Timestamp::from_secs(secs))).to_vec();
        assert_eq!(due, [true, false, false, true, false]);
    }
}
