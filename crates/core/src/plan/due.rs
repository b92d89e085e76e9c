//! When each test is due on a node: by its cut-off, sooner while something is open against the node, and at once when the
//! work of several users failed there since.

use super::test_set::TestSet;
use crate::{
    failed_work::{FailedHere, Weight},
    policy::TestPolicy,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::{Span, Timestamp},
};

/// A watched but confirmed trouble is looked at again at least this often.
const WATCH_EVERY: Span = Span::days(1);

/// What is due on one node.
pub(super) struct Due {
    pub(super) tests: TestSet,
    pub(super) age: Timestamp,
    /// When the next test becomes due.
    pub(super) next: Timestamp,
}

pub(super) fn due_tests(snapshot: &Snapshot, record: &NodeRecord, applies: &TestSet) -> Due {
    let mut due = Due { tests: TestSet::default(), age: Timestamp::MAX, next: Timestamp::MAX };
    for (place, (test, known)) in snapshot.tests.iter().zip(&record.records).enumerate() {
        if !applies.contains(place) {
            continue;
        }
        let moment = due_at(snapshot, record, test, known);
        if moment <= snapshot.at {
            due.tests.insert(place);
            due.age = due.age.min(known.age_key());
        } else {
            due.next = due.next.min(moment);
        }
    }
    due
}

/// When a test is due on this node (again). `Timestamp::MIN`: it never ran.
pub(crate) fn due_at(snapshot: &Snapshot, record: &NodeRecord, test: &TestPolicy, known: &TestRecord) -> Timestamp {
    let retry = &snapshot.policy.retry;
    let moment = match test.routine {
        true => {
            let stale = known.due(test.cutoff, retry.inconclusive, retry.inconclusive_cap);
            record.failed.as_ref().map_or(stale, |failed| stale.min(retest(snapshot, failed, known)))
        }
        false => Timestamp::MAX,
    };
    // Only nodes with something open pay for looking it up.
    if record.findings.is_empty() { moment } else { moment.min(recheck(snapshot, record, test, known)) }
}

/// When a test with something open against this node is to be repeated: soon while it is unconfirmed, daily after. A
/// try that said nothing is followed by the next, at a growing distance.
fn recheck(snapshot: &Snapshot, record: &NodeRecord, test: &TestPolicy, known: &TestRecord) -> Timestamp {
    let retry = &snapshot.policy.retry;
    let open = record.findings.iter().filter(|open| open.finding.check == test.id);
    let wait = open.map(|open| if open.is_confirmed() { WATCH_EVERY } else { retry.confirm }).min();
    match (wait, known.attempt()) {
        (Some(wait), Some(attempt)) => {
            attempt.plus(wait.max(known.backoff(retry.inconclusive, retry.inconclusive_cap)))
        }
        _ => Timestamp::MAX,
    }
}

/// When a test is to be repeated because user work failed here since. What was tried after that has had its say.
fn retest(snapshot: &Snapshot, failed: &FailedHere, known: &TestRecord) -> Timestamp {
    let enough = snapshot.policy.user_work.retest;
    let asked = enough > 0.0 && failed.weight >= Weight::of_owners(enough);
    let since = failed.newest().filter(|newest| asked && known.attempt().is_none_or(|attempt| attempt < *newest));
    since.unwrap_or(Timestamp::MAX)
}
