//! When a job has to run each test on a node: by its cut-off, sooner while a finding is open, and immediately after work
//! of several users failed there. On a free node, a result may be renewed before it is due. A test that the node's agent
//! runs is due in no job.

use super::test_set::TestSet;
use crate::{
    access::Place,
    job_failures::{NodeJobFailures, Weight},
    policy::TestPolicy,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::{Span, Timestamp},
};

/// Longest interval between tests of a confirmed finding that is only watched.
const WATCH_EVERY: Span = Span::days(1);

/// The tests that are due on one node, and those that may be renewed.
pub(super) struct DueTests {
    pub(super) tests: TestSet,
    /// Tests that are not due and whose result may be renewed.
    pub(super) early: TestSet,
    /// The age key of the oldest due test; of the oldest early test if none is due.
    pub(super) age: Timestamp,
    /// When the next test becomes due.
    pub(super) next_due: Timestamp,
    /// When one of the sets next grows.
    pub(super) next: Timestamp,
}

pub(super) fn due_tests(snapshot: &Snapshot, record: &NodeRecord, applies: &TestSet) -> DueTests {
    let never = Timestamp::MAX;
    let mut due =
        DueTests { tests: TestSet::default(), early: TestSet::default(), age: never, next_due: never, next: never };
    let mut early_age = never;
    for (index, (test, known)) in snapshot.tests.iter().zip(&record.test_records).enumerate() {
        if !applies.contains(index) || is_run_by_agent(snapshot, record, test) {
            continue;
        }
        let due_time = due_at(snapshot, record, test, known);
        if due_time <= snapshot.at {
            due.tests.insert(index);
            due.age = due.age.min(known.age_key());
            continue;
        }
        due.next_due = due.next_due.min(due_time);
        match renewable_at(snapshot, test, known) {
            Some(at) if at <= snapshot.at => {
                due.early.insert(index);
                early_age = early_age.min(known.age_key());
                due.next = due.next.min(due_time);
            }
            at => due.next = due.next.min(at.unwrap_or(due_time)).min(due_time),
        }
    }
    if due.tests.is_empty() {
        due.age = early_age;
    }
    due
}

/// Returns from when on a free node may renew the result. Only a pass or fail of a routine test is renewed: a test that
/// does not apply or gave no result waits until it is due.
fn renewable_at(snapshot: &Snapshot, test: &TestPolicy, known: &TestRecord) -> Option<Timestamp> {
    let judged = known.judged().filter(|_| test.routine && known.misses() == 0)?;
    Some(judged.plus(snapshot.policy.limits.renewal_age(test.cutoff)?))
}

/// Returns when a job has to run a test on this node. `Timestamp::MIN`: it never ran. `Timestamp::MAX`: never, for
/// example because a live agent runs it.
pub(crate) fn due_at(snapshot: &Snapshot, record: &NodeRecord, test: &TestPolicy, known: &TestRecord) -> Timestamp {
    if is_run_by_agent(snapshot, record, test) {
        return Timestamp::MAX;
    }
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

/// Returns whether a live agent runs this test, so that no routine job does. While the agent is silent, jobs do: its
/// last results become stale like any others.
pub(crate) fn is_run_by_agent(snapshot: &Snapshot, record: &NodeRecord, test: &TestPolicy) -> bool {
    test.place == Place::Agent && record.has_live_agent(snapshot.at, snapshot.policy.agents.silent_after)
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
