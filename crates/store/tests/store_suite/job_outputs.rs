//! The last output of jobs without a result: kept by node, quoted for the newest run, deleted with its run, and in a backup.

use doctor_core::{
    finding::Verdict,
    ids::RunId,
    last_output::LastOutput,
    plan::{Action, Conclusion},
    reason::WithReason,
    run::{IncompleteReason, NotStartedReason, RunEnd},
    time::Span,
};
use doctor_store::{Earlier, Store, StoreUrl, records::RetentionPolicy};

use crate::{
    bed::{StoreTestbed, node, test},
    suite,
};

suite!(
    the_output_of_a_job_is_kept_by_node_and_that_of_an_earlier_attempt_is_replaced,
    the_newest_run_of_a_node_without_a_result_is_found_with_its_output,
    job_output_is_deleted_with_its_run,
    a_backup_has_the_output_of_jobs,
);

const CRASHED: Conclusion = Conclusion::Incomplete(IncompleteReason::Crashed);

fn output(on: &str, ending: Option<&str>, text: &str) -> LastOutput {
    LastOutput { node: node(on), ending: ending.map(str::to_owned), text: text.to_owned() }
}

fn record(bed: &StoreTestbed, run: RunId, outputs: &[LastOutput], earlier: Earlier) {
    bed.store.record_job_output(&bed.lease, run, outputs, earlier, bed.now).unwrap();
}

fn the_output_of_a_job_is_kept_by_node_and_that_of_an_earlier_attempt_is_replaced(bed: &mut StoreTestbed) {
    let run = bed.run_on(&["n1", "n2"], &["gpu"]);
    let id = run.id;
    bed.commit(&[WithReason::new(Action::Submit(run), "due", "x")]);
    bed.plan("n3", &["gpu"]);
    let rejected = [output("n1", Some("submit: no answer"), "")];
    record(bed, id, &rejected, Earlier::Replace);
    assert_eq!(bed.store.job_output(id).unwrap(), rejected);

    let died = [output("n1", Some("OOMKilled"), "line\nüber\n"), output("n2", None, "exec: not found")];
    record(bed, id, &died, Earlier::Replace);
    assert_eq!(bed.store.job_output(id).unwrap(), died);
    let later = [output("n1", Some("cancelled"), ""), output("n3", None, "of another run's node")];
    record(bed, id, &later, Earlier::Keep);
    assert_eq!(bed.store.job_output(id).unwrap(), died, "what was taken before the cancellation stays");
    bed.assert_sound();
}

fn the_newest_run_of_a_node_without_a_result_is_found_with_its_output(bed: &mut StoreTestbed) {
    let begin = bed.now;
    assert_eq!(bed.store.last_without_result(&node("n1")).unwrap(), None);
    let first = bed.plan("n1", &["gpu", "memory"]);
    record(bed, first, &[output("n1", None, "first")], Earlier::Replace);
    assert_eq!(bed.store.last_without_result(&node("n1")).unwrap(), None, "it has not ended");
    bed.conclude(first, CRASHED);
    bed.wait(Span::minutes(5));
    let second = bed.plan("n2", &["gpu"]);
    record(bed, second, &[output("n2", Some("ErrImagePull"), "")], Earlier::Replace);
    bed.conclude(second, Conclusion::NotStarted(NotStartedReason::PendingTooLong));
    bed.wait(Span::minutes(5));
    // A refused submission is no output of a run that completed in the end.
    let good = bed.plan("n3", &["gpu"]);
    record(bed, good, &[output("n3", Some("submit: no answer"), "")], Earlier::Replace);
    let outcome = bed.outcome("n3", "gpu", Verdict::Pass);
    bed.accept(&[bed.result(good, "n3", vec![outcome])]);
    assert_eq!(bed.store.last_without_result(&node("n3")).unwrap(), None);

    let of_n1 = bed.store.last_without_result(&node("n1")).unwrap().unwrap();
    assert_eq!((of_n1.run, &of_n1.tests[..]), (first, &[test("gpu"), test("memory")][..]));
    assert!(matches!(of_n1.end, RunEnd::Incomplete { why: IncompleteReason::Crashed, .. }), "{of_n1:?}");
    assert_eq!((of_n1.ended, of_n1.output.text.as_str()), (begin, "first"));
    let runs = |since| {
        let found = bed.store.without_result_since(since, 10).unwrap();
        found.into_iter().map(|one| one.run).collect::<Vec<_>>()
    };
    assert_eq!(runs(begin), [second, first]);
    assert_eq!(runs(begin.plus(Span::minutes(1))), [second]);
    assert_eq!(bed.store.without_result_since(begin, 1).unwrap().len(), 1);
}

fn job_output_is_deleted_with_its_run(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["gpu"]);
    record(bed, run, &[output("n1", Some("submit: refused"), "")], Earlier::Replace);
    bed.conclude(run, Conclusion::NotStarted(NotStartedReason::Rejected));
    let keep = RetentionPolicy { history: Span::days(30), evidence: Span::days(30), logs: Span::days(30) };
    bed.wait(Span::days(20));
    bed.store.apply_retention(&bed.lease, bed.now, keep).unwrap();
    assert_eq!(bed.store.job_output(run).unwrap().len(), 1, "it is young");
    bed.wait(Span::days(20));
    assert_eq!(bed.store.apply_retention(&bed.lease, bed.now, keep).unwrap().run_rows, 1);
    assert_eq!(bed.store.run(run).unwrap(), None);
    assert!(bed.store.job_output(run).unwrap().is_empty());
    bed.assert_sound();
}

fn a_backup_has_the_output_of_jobs(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["gpu"]);
    let died = [output("n1", Some("exit code 127"), "exec: not found\n")];
    record(bed, run, &died, Earlier::Replace);
    bed.conclude(run, CRASHED);
    let (backup, restored) = (bed.path("backup.db"), bed.path("restored.db"));
    bed.store.backup(&backup).unwrap();
    let store = Store::open(&StoreUrl::Sqlite(restored)).unwrap();
    store.restore(&backup).unwrap();
    assert_eq!(store.job_output(run).unwrap(), died);
    assert!(store.verify().unwrap().is_consistent());
}
