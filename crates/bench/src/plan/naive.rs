//! The queue of due nodes in the simplest form: evaluate everything, sort.

use doctor_core::{
    ids::{NodeName, TestId},
    lifecycle::NodeState,
    policy::TestPolicy,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::Timestamp,
};

/// Returns due nodes with their due tests: suspects first, then by the age of the oldest due test, then by name.
pub(crate) fn queue(snapshot: &Snapshot) -> Vec<(NodeName, Vec<TestId>)> {
    let mut queue: Vec<(bool, Timestamp, NodeName, Vec<TestId>)> = snapshot
        .nodes
        .iter()
        .filter(|record| is_open(snapshot, record))
        .filter_map(|record| {
            let due: Vec<(&TestPolicy, &TestRecord)> = snapshot
                .tests
                .iter()
                .zip(&record.test_records)
                .filter(|(test, known)| is_due(snapshot, record, test, known))
                .collect();
            let oldest = due.iter().map(|(_, known)| known.age_key()).min()?;
            let calm = record.state != NodeState::Suspect && record.findings.is_empty();
            let tests = due.iter().map(|(test, _)| test.id.clone()).collect();
            Some((calm, oldest, record.node.name.clone(), tests))
        })
        .collect();
    queue.sort();
    queue.into_iter().map(|(_, _, name, tests)| (name, tests)).collect()
}

fn is_open(snapshot: &Snapshot, record: &NodeRecord) -> bool {
    record.node.occupancy.is_free()
        && matches!(record.state, NodeState::InService | NodeState::Suspect)
        && record.hold.is_none()
        && record.node.marks.foreign.is_empty()
        && record.backoff.is_none_or(|backoff| backoff.until <= snapshot.at)
        && !snapshot.runs.iter().any(|active| active.run.nodes.contains(&record.node.name))
}

/// Returns whether a test is stale, or failed once and is to be repeated. All findings of this fleet are unconfirmed.
fn is_due(snapshot: &Snapshot, record: &NodeRecord, test: &TestPolicy, known: &TestRecord) -> bool {
    let retry = &snapshot.policy.retry;
    let failing = record.findings.iter().any(|open| open.finding.check == test.id);
    let again = known.attempt().filter(|_| failing).map(|attempt| attempt.plus(retry.confirm));
    known.due(test.cutoff, retry.inconclusive, retry.inconclusive_cap) <= snapshot.at
        || again.is_some_and(|moment| moment <= snapshot.at)
}
