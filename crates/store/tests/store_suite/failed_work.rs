//! Failed user jobs are stored once, however often they are reported, and are deleted with the machine they failed on.

use doctor_core::{
    failed_work::{FailedWork, HowFailed, Label},
    ids::{HardwareId, NodeName},
    plan::Action,
    reason::{Because, ReasonCode},
    time::Span,
};
use doctor_store::records::RetentionPolicy;

use crate::{
    bed::{Bed, node},
    suite,
};

suite!(failed_work_is_kept_once_and_as_it_was_told_last, failed_work_is_forgotten_with_its_machine_and_with_time,);

fn failed(bed: &Bed, id: &str, on: &str, how: HowFailed) -> (NodeName, FailedWork) {
    let [id, name, owner] = [id, "train", "ann"].map(Label::new);
    (node(on), FailedWork { id, name, owner, at: bed.now, how })
}

fn failed_work_is_kept_once_and_as_it_was_told_last(bed: &mut Bed) {
    let begin = bed.now;
    let first = failed(bed, "7", "n1", HowFailed::Exit { code: 1 });
    bed.store
        .keep_failed_work(&bed.lease, &[first.clone(), failed(bed, "7", "n2", HowFailed::Untold)], bed.now)
        .unwrap();
    bed.store.keep_failed_work(&bed.lease, &[first], bed.now).unwrap();
    assert_eq!(bed.store.failed_work_since(begin).unwrap().len(), 2);
    bed.wait(Span::minutes(5));
    let again = failed(bed, "7", "n1", HowFailed::OutOfMemory);
    bed.store.keep_failed_work(&bed.lease, std::slice::from_ref(&again), bed.now).unwrap();
    let all = bed.store.failed_work_since(begin).unwrap();
    assert_eq!((all.len(), &all[0]), (2, &again));
    assert_eq!(bed.store.failed_work_since(bed.now).unwrap(), [again]);
}

fn failed_work_is_forgotten_with_its_machine_and_with_time(bed: &mut Bed) {
    let begin = bed.now;
    let told = [failed(bed, "7", "n1", HowFailed::Untold), failed(bed, "8", "n2", HowFailed::NodeFailed)];
    bed.store.keep_failed_work(&bed.lease, &told, bed.now).unwrap();
    bed.wait(Span::minutes(5));
    let hardware = HardwareId::new("board-another").unwrap();
    let what = Action::Rename { node: node("n1"), hardware };
    bed.commit(&[Because { what, code: ReasonCode::fixed("another-machine"), text: String::new() }]);
    let left = bed.store.failed_work_since(begin).unwrap();
    assert_eq!(left, [told[1].clone()]);
    bed.wait(Span::days(40));
    let keep = RetentionPolicy { history: Span::days(30), evidence: Span::days(30), logs: Span::days(30) };
    bed.store.retention(&bed.lease, bed.now, keep).unwrap();
    assert!(bed.store.failed_work_since(begin).unwrap().is_empty());
}
