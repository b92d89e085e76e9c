//! When each test is due on a node: by its cut-off, sooner while a finding is open, and immediately after work of
//! several users failed there.

use super::test_set::TestSet;
use crate::{
    job_failures::{NodeJobFailures, Weight},
    policy::TestPolicy,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::{Span, Timestamp},
};

/// Longest interval between tests of a confirmed finding that is only watched.
const WATCH_EVERY: Span = Span::days(1);

/// The tests that are due on one node.
pub(super) struct DueTests {
    pub(super) tests: TestSet,
    pub(super) age: Timestamp,
    /// When the next test becomes due.
    pub(super) next: Timestamp,
}

pub(super) fn due_tests(snapshot: &Snapshot, record: &NodeRecord, applies: &TestSet) -> DueTests {
    let mut due = DueTests { tests: TestSet::default(), age: Timestamp::MAX, next: Timestamp::MAX };
    for (index, (test, known)) in snapshot.tests.iter().zip(&record.test_records).enumerate() {
        if !applies.contains(index) {
            continue;
        }
        let due_time = due_at(snapshot, record, test, known);
        if due_time <= snapshot.at {
            due.tests.insert(index);
            due.age = due.age.min(known.age_key());
        } else {
            due.next = due.next.min(due_time);
        }
    }
    due
}

/// Returns when a test is due on this node. `Timestamp::MIN`: it never ran.
pub(crate) fn due_at(snapshot: &Snapshot, record: &NodeRecord, test: &TestPolicy, known: &TestRecord) -> Timestamp {
    let retry = &snapshot.policy.retry;
    let moment = match test.routine {
        true => {
            let stale = known.due(test.cutoff, retry.inconclusive, retry.inconclusive_cap);
            record.job_failures.as_ref().map_or(stale, |failed| stale.min(retest(snapshot, failed, known)))
        }
        false => Timestamp::MAX,
    };
    // The lookup is needed only for nodes with open findings.
    if record.findings.is_empty() { moment } else { moment.min(recheck(snapshot, record, test, known)) }
}

/// Returns when a test with an open finding is repeated: soon while it is unconfirmed, daily afterwards. After
/// inconclusive results the interval grows.
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

/// Returns when a test is repeated because user work failed on the node. A test that ran since the failure is not
/// repeated.
fn retest(snapshot: &Snapshot, failed: &NodeJobFailures, known: &TestRecord) -> Timestamp {
    let threshold = snapshot.policy.user_work.retest;
    let enabled = threshold > 0.0 && failed.weight >= Weight::from_owners(threshold);
    let since = failed.newest().filter(|newest| enabled && known.attempt().is_none_or(|attempt| attempt < *newest));
    since.unwrap_or(Timestamp::MAX)
}
