//! Failed user jobs are stored once, however often they are reported, and are deleted with the machine they failed on.

use doctor_core::{
    ids::{HardwareId, NodeName},
    job_failures::{JobFailure, JobFailureKind, Label},
    plan::Action,
    reason::{ReasonCode, WithReason},
    time::Span,
};
use doctor_store::records::RetentionPolicy;

use crate::{
    bed::{StoreTestbed, node},
    suite,
};

suite!(
    a_job_failure_is_stored_once_with_its_latest_report,
    job_failures_are_deleted_with_the_hardware_and_by_retention,
);

fn failed(bed: &StoreTestbed, id: &str, on: &str, how: JobFailureKind) -> (NodeName, JobFailure) {
    let [id, name, owner] = [id, "train", "ann"].map(Label::new);
    (node(on), JobFailure { id, name, owner, at: bed.now, how })
}

fn a_job_failure_is_stored_once_with_its_latest_report(bed: &mut StoreTestbed) {
    let begin = bed.now;
    let first = failed(bed, "7", "n1", JobFailureKind::Exit { code: 1 });
    bed.store
        .add_job_failures(&bed.lease, &[first.clone(), failed(bed, "7", "n2", JobFailureKind::Unknown)], bed.now)
        .unwrap();
    bed.store.add_job_failures(&bed.lease, &[first], bed.now).unwrap();
    assert_eq!(bed.store.job_failures_since(begin).unwrap().len(), 2);
    bed.wait(Span::minutes(5));
    let again = failed(bed, "7", "n1", JobFailureKind::OutOfMemory);
    bed.store.add_job_failures(&bed.lease, std::slice::from_ref(&again), bed.now).unwrap();
    let all = bed.store.job_failures_since(begin).unwrap();
    assert_eq!((all.len(), &all[0]), (2, &again));
    assert_eq!(bed.store.job_failures_since(bed.now).unwrap(), [again]);
}

fn job_failures_are_deleted_with_the_hardware_and_by_retention(bed: &mut StoreTestbed) {
    let begin = bed.now;
    let reported =
        [failed(bed, "7", "n1", JobFailureKind::Unknown), failed(bed, "8", "n2", JobFailureKind::NodeFailed)];
    bed.store.add_job_failures(&bed.lease, &reported, bed.now).unwrap();
    bed.wait(Span::minutes(5));
    let hardware = HardwareId::new("board-another").unwrap();
    let what = Action::HardwareReplaced { node: node("n1"), hardware };
    bed.commit(&[WithReason { value: what, code: ReasonCode::fixed("another-machine"), text: String::new() }]);
    let left = bed.store.job_failures_since(begin).unwrap();
    assert_eq!(left, [reported[1].clone()]);
    bed.wait(Span::days(40));
    let keep = RetentionPolicy { history: Span::days(30), evidence: Span::days(30), logs: Span::days(30) };
    bed.store.apply_retention(&bed.lease, bed.now, keep).unwrap();
    assert!(bed.store.job_failures_since(begin).unwrap().is_empty());
}
