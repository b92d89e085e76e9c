//! One suite for every kind of store: in memory, in a file, on PostgreSQL.

#[path = "store_suite/agents.rs"]
mod agents;
#[path = "store_suite/api_queries.rs"]
mod api_queries;
mod bed;
#[path = "store_suite/cases.rs"]
mod cases;
#[path = "store_suite/counts.rs"]
mod counts;
#[path = "store_suite/events.rs"]
mod events;
#[path = "store_suite/failed_work.rs"]
mod failed_work;
#[path = "store_suite/files.rs"]
mod files;
#[path = "store_suite/history.rs"]
mod history;
#[path = "store_suite/ingest_queue.rs"]
mod ingest_queue;
#[path = "store_suite/job_outputs.rs"]
mod job_outputs;
#[path = "store_suite/lease.rs"]
mod lease;
#[path = "store_suite/outbox.rs"]
mod outbox;
#[path = "store_suite/property.rs"]
mod property;
#[path = "store_suite/released.rs"]
mod released;
#[path = "store_suite/upgrades.rs"]
mod upgrades;

use bed::{StoreTestbed, hardware, node, retry, test};
use doctor_core::{
    finding::Verdict,
    ids::{HardwareId, JobId},
    node::Hold,
    plan::{Action, Conclusion, SkipReason},
    reason::WithReason,
    run::{CancelReason, IncompleteReason, NotStartedReason, RunEnd, RunState},
    time::Span,
};
use doctor_store::{
    LeaseError, Store, StoreError,
    records::{Accepted, HistoryFilter},
};

/// Runs every function once on each kind of store.
macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod in_memory { $(#[test] fn $name() { super::$name(&mut super::StoreTestbed::memory()) })* }
        mod in_a_file { $(#[test] fn $name() { super::$name(&mut super::StoreTestbed::file()) })* }
        mod on_postgres { $(#[test] fn $name() { if let Some(mut bed) = super::StoreTestbed::postgres() { super::$name(&mut bed) } })* }
    };
}

pub(crate) use suite;

/// Runs these functions of the suite over TLS too: each kind of statement, the copy format, and many sessions at once.
macro_rules! over_tls {
    ($($name:ident),* $(,)?) => {
        mod on_postgres_over_tls {
            $(#[test] fn $name() { if let Some(mut bed) = super::StoreTestbed::postgres_over_tls() { super::$name(&mut bed) } })*
        }
    };
}

pub(crate) use over_tls;

over_tls!(
    a_run_is_active_until_its_result_arrives_and_then_its_key_is_deleted,
    a_result_is_stored_once,
    the_database_rejects_a_plan_with_a_second_run_on_a_node,
    a_lease_is_held_until_it_expires_is_released_or_its_process_dies,
    nodes_load_with_all_stored_data,
);

suite!(
    a_run_is_active_until_its_result_arrives_and_then_its_key_is_deleted,
    a_result_is_stored_once,
    a_result_of_an_unknown_run_or_another_node_is_rejected,
    a_partial_result_leaves_the_run_open_and_its_end_fills_the_gap,
    a_run_over_several_nodes_ends_with_the_last_of_them,
    a_started_run_without_results_leaves_incomplete_rows,
    a_run_that_did_not_start_leaves_no_row_and_its_node_backs_off_exponentially,
    a_rejected_job_backs_off_until_a_job_starts,
    rejected_documents_are_counted_with_the_time_of_the_last,
    a_node_taken_by_other_work_does_not_back_off,
    the_database_rejects_a_plan_with_a_second_run_on_a_node,
    a_result_that_arrived_before_the_conclusion_stays,
    a_controller_without_the_lease_cannot_write,
    a_lease_is_held_until_it_expires_is_released_or_its_process_dies,
    node_hours_count_from_the_start_to_the_end_of_each_run,
    skip_reasons_are_stored_until_they_change_or_a_run_starts,
    nodes_load_with_all_stored_data,
    observed_hardware_is_stored_with_its_node,
);

fn a_run_is_active_until_its_result_arrives_and_then_its_key_is_deleted(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk", "memory"]);
    let active = bed.store.active_runs().unwrap();
    assert_eq!(active.len(), 1);
    assert_eq!(active[0].run.state, RunState::Planned);
    assert_eq!(active[0].run.tests.to_vec(), [test("disk"), test("memory")]);

    let at = bed.wait(Span::from_secs(5));
    bed.store.record_submitted(&bed.lease, run, &JobId("job-1".to_owned()), at).unwrap();
    let at = bed.wait(Span::from_secs(5));
    bed.store.record_running(&bed.lease, run, at).unwrap();
    let active = bed.store.active_runs().unwrap();
    assert_eq!(active[0].run.state, RunState::Running { job: JobId("job-1".to_owned()), since: at });
    assert_eq!(active[0].started, Some(at));

    bed.wait(Span::minutes(3));
    let outcomes = vec![bed.outcome("n1", "disk", Verdict::Pass), bed.outcome("n1", "memory", Verdict::Fail)];
    assert_eq!(bed.accept(&[bed.result(run, "n1", outcomes)]), [Accepted::Stored]);
    assert!(bed.store.active_runs().unwrap().is_empty());
    let record = bed.store.run(run).unwrap().unwrap();
    assert_eq!(record.ended, Some(bed.now));
    let RunState::Ended(RunEnd::Completed(report)) = record.run.state else { panic!("{:?}", record.run.state) };
    assert_eq!(
        report.outcomes.iter().map(|outcome| outcome.verdict).collect::<Vec<_>>(),
        [Verdict::Pass, Verdict::Fail]
    );
    bed.assert_sound();
}

fn a_result_is_stored_once(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk"]);
    let result = bed.result(run, "n1", vec![bed.outcome("n1", "disk", Verdict::Pass)]);
    // Twice in one batch, and once more after it.
    assert_eq!(bed.accept(&[result.clone(), result.clone()]), [Accepted::Stored, Accepted::Duplicate]);
    assert_eq!(bed.accept(&[result]), [Accepted::Duplicate]);
    assert_eq!(bed.store.history(&HistoryFilter::default()).unwrap().len(), 1);
    let counters = bed.store.counters().unwrap();
    assert_eq!((counters.results_stored, counters.results_duplicate), (1, 2));
    bed.assert_sound();
}

fn a_result_of_an_unknown_run_or_another_node_is_rejected(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk"]);
    bed.plan("n2", &["disk"]);
    let stranger = bed.result(run, "n2", vec![bed.outcome("n2", "disk", Verdict::Fail)]);
    let never_heard_of = bed.result(run, "n3", vec![bed.outcome("n3", "disk", Verdict::Fail)]);
    let mut no_run = bed.result(run, "n1", vec![bed.outcome("n1", "disk", Verdict::Fail)]);
    no_run.run = bed.ids.run();
    assert_eq!(bed.accept(&[stranger, never_heard_of, no_run]), [Accepted::UnknownRun; 3]);
    assert!(bed.store.history(&HistoryFilter::default()).unwrap().is_empty());
    assert_eq!(bed.store.active_runs().unwrap().len(), 2);
    bed.assert_sound();
}

fn a_partial_result_leaves_the_run_open_and_its_end_fills_the_gap(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk", "memory"]);
    let mut partial = bed.result(run, "n1", vec![bed.outcome("n1", "disk", Verdict::Pass)]);
    partial.complete = false;
    assert_eq!(bed.accept(&[partial.clone()]), [Accepted::Stored]);
    assert_eq!(bed.store.active_runs().unwrap().len(), 1);
    assert_eq!(bed.accept(&[partial]), [Accepted::Duplicate]);
    bed.wait(Span::minutes(1));
    bed.conclude(run, Conclusion::Incomplete(IncompleteReason::Crashed));
    let latest = bed.store.latest_of(&node("n1")).unwrap();
    let verdicts: Vec<_> =
        latest.iter().map(|row| (row.test.to_string(), row.verdict, row.reason.to_string())).collect();
    assert_eq!(
        verdicts,
        [
            ("disk".to_owned(), Verdict::Pass, "within-limits".to_owned()),
            ("memory".to_owned(), Verdict::Inconclusive, "crashed".to_owned())
        ]
    );
    bed.assert_sound();
}

fn a_run_over_several_nodes_ends_with_the_last_of_them(bed: &mut StoreTestbed) {
    let run = bed.run_on(&["n1", "n2"], &["nccl"]);
    let id = run.id;
    bed.commit(&[WithReason::new(Action::Submit(run), "due", "never tested")]);
    bed.accept(&[bed.result(id, "n1", vec![bed.outcome("n1", "nccl", Verdict::Pass)])]);
    assert_eq!(bed.store.active_runs().unwrap().len(), 1);
    bed.accept(&[bed.result(id, "n2", vec![bed.outcome("n2", "nccl", Verdict::Pass)])]);
    assert!(bed.store.active_runs().unwrap().is_empty());
    assert_eq!(bed.store.counters().unwrap().runs_ended, 1);
    bed.assert_sound();
}

fn a_started_run_without_results_leaves_incomplete_rows(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk", "memory"]);
    let started = bed.wait(Span::from_secs(10));
    bed.store.record_running(&bed.lease, run, started).unwrap();
    bed.wait(Span::minutes(2));
    bed.commit(&[WithReason::new(
        Action::Cancel { run, why: CancelReason::NodeTaken },
        "node-taken",
        "wanted by a user",
    )]);
    let cancelling = bed.store.active_runs().unwrap()[0].cancelling.unwrap();
    assert_eq!((cancelling.why, cancelling.since), (CancelReason::NodeTaken, bed.now));
    bed.wait(Span::from_secs(30));
    bed.conclude(run, Conclusion::Incomplete(IncompleteReason::NodeTaken));
    let rows = bed.store.history(&HistoryFilter { node: Some(node("n1")), ..HistoryFilter::default() }).unwrap();
    assert_eq!(rows.len(), 2);
    for row in &rows {
        assert_eq!((row.verdict, row.reason.as_str(), row.run), (Verdict::Inconclusive, "node-taken", Some(run)));
        assert_eq!((row.at, row.duration), (bed.now, Span::from_secs(150)));
    }
    // A user took the node, which says nothing about the tests: none has a latest result, and none backs off.
    assert!(bed.store.latest_of(&node("n1")).unwrap().is_empty());
    let run = bed.plan("n1", &["disk", "memory"]);
    let started = bed.wait(Span::from_secs(10));
    bed.store.record_running(&bed.lease, run, started).unwrap();
    bed.wait(Span::minutes(2));
    bed.conclude(run, Conclusion::Incomplete(IncompleteReason::NodeDied));
    let latest = &bed.store.latest_of(&node("n1")).unwrap()[0];
    assert_eq!((latest.misses, latest.conclusive), (1, None));
    bed.assert_sound();
}

fn a_run_that_did_not_start_leaves_no_row_and_its_node_backs_off_exponentially(bed: &mut StoreTestbed) {
    let first = retry().not_started;
    for expected in [first, first.times(2), first.times(4)] {
        let run = bed.plan("n1", &["disk"]);
        bed.wait(Span::minutes(5));
        bed.conclude(run, Conclusion::NotStarted(NotStartedReason::PendingTooLong));
        let backoff = bed.store.load_nodes().unwrap()[&node("n1")].backoff.unwrap();
        assert_eq!(backoff.until, bed.now.plus(expected.min(retry().not_started_cap)));
        bed.wait(Span::hours(1));
    }
    assert!(bed.store.history(&HistoryFilter::default()).unwrap().is_empty());
    assert!(bed.store.latest_all().unwrap().is_empty());
    bed.assert_sound();
}

fn a_rejected_job_backs_off_until_a_job_starts(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk"]);
    bed.store.record_rejected(&bed.lease, run, "no such partition", bed.now, &retry()).unwrap();
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].backoff.unwrap().sightings, 1);
    let record = bed.store.run(run).unwrap().unwrap();
    assert_eq!(record.run.state, RunState::Ended(RunEnd::NotStarted(NotStartedReason::Rejected)));
    assert_eq!(bed.store.audit(1, None).unwrap()[0].text, "no such partition");
    let ends = bed.store.last_run_ends(10).unwrap();
    assert_eq!((ends[0].run, &ends[0].nodes[..]), (run, &[node("n1")][..]));
    assert_eq!(ends[0].end, Some(Conclusion::NotStarted(NotStartedReason::Rejected)));
    assert_eq!(ends[0].text.as_deref(), Some("no such partition"));

    bed.wait(Span::hours(1));
    let run = bed.plan("n1", &["disk"]);
    bed.store.record_running(&bed.lease, run, bed.now).unwrap();
    assert_eq!(bed.store.last_run_ends(10).unwrap(), ends, "a run that has not ended is not among them");
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].backoff, None);
    bed.assert_sound();
}

fn rejected_documents_are_counted_with_the_time_of_the_last(bed: &mut StoreTestbed) {
    assert_eq!((bed.store.counters().unwrap().documents_rejected, bed.store.last_rejection().unwrap()), (0, None));
    for documents in [2, 1] {
        bed.wait(Span::hours(1));
        bed.store.count_rejected(&bed.lease, documents, bed.now).unwrap();
    }
    let (count, last) = (bed.store.counters().unwrap().documents_rejected, bed.store.last_rejection().unwrap());
    assert_eq!((count, last), (3, Some(bed.now)));
    bed.assert_sound();
}

fn a_node_taken_by_other_work_does_not_back_off(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk"]);
    bed.conclude(run, Conclusion::NotStarted(NotStartedReason::NodeTaken));
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].backoff, None);
    assert!(bed.store.active_runs().unwrap().is_empty());
    bed.assert_sound();
}

fn the_database_rejects_a_plan_with_a_second_run_on_a_node(bed: &mut StoreTestbed) {
    bed.plan("n1", &["disk"]);
    let cycles = bed.store.cycles(10).unwrap().len();
    let fine = bed.run_on(&["n2"], &["disk"]);
    let second = bed.run_on(&["n1"], &["memory"]);
    let actions = [fine, second].map(|run| WithReason::new(Action::Submit(run), "due", "never tested"));
    bed.try_commit(&actions, &[]).unwrap_err();
    assert_eq!(bed.store.active_runs().unwrap().len(), 1);
    assert_eq!(bed.store.cycles(10).unwrap().len(), cycles);
    // The names that the failed plan added were rolled back and can be added again.
    bed.run_test("n2", "memory", Verdict::Pass);
    bed.run_test("n3", "other", Verdict::Pass);
    let latest = bed.store.latest_all().unwrap();
    assert_eq!(latest.iter().map(|row| row.node.to_string()).collect::<Vec<_>>(), ["n2", "n3"]);
    bed.assert_sound();
}

fn a_result_that_arrived_before_the_conclusion_stays(bed: &mut StoreTestbed) {
    let run = bed.run_test("n1", "disk", Verdict::Pass);
    // The plan was based on an older state, without the result.
    bed.conclude(run, Conclusion::Incomplete(IncompleteReason::NoResult));
    assert_eq!(bed.store.latest_of(&node("n1")).unwrap()[0].verdict, Verdict::Pass);
    assert!(matches!(bed.store.run(run).unwrap().unwrap().run.state, RunState::Ended(RunEnd::Completed(_))));
    bed.assert_sound();
}

fn a_controller_without_the_lease_cannot_write(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk"]);
    let old = bed.lease.clone();
    // Its lease expired while it was suspended, and another controller took over.
    let later = bed.now.plus(Span::days(40_000));
    let new = bed.store.acquire("other", later, Span::minutes(1)).unwrap();
    assert!(new.fence > old.fence);
    let result = bed.result(run, "n1", vec![bed.outcome("n1", "disk", Verdict::Pass)]);
    let error = bed.store.accept(&old, std::slice::from_ref(&result)).unwrap_err();
    assert!(error.is_lease_lost() && error.to_string().contains("other"), "{error}");
    assert!(bed.try_commit(&[], &[]).unwrap_err().is_lease_lost());
    assert!(bed.store.holds_lease(&old, bed.now).unwrap_err().is_lease_lost());
    assert!(bed.store.renew(&old, bed.now).unwrap_err().is_lease_lost());
    assert!(bed.store.record_running(&old, run, bed.now).unwrap_err().is_lease_lost());
    bed.store.release(&old).unwrap();
    bed.store.holds_lease(&new, later).unwrap();
    assert_eq!(bed.store.accept(&new, &[result]).unwrap(), [Accepted::Stored]);
}

fn a_lease_is_held_until_it_expires_is_released_or_its_process_dies(bed: &mut StoreTestbed) {
    let (store, now) = (&bed.store, bed.now);
    store.release(&bed.lease).unwrap();
    assert_eq!(store.leader().unwrap(), None);
    let first = store.acquire("host-a:17:99", now, Span::minutes(1)).unwrap();
    let held = store.acquire("host-b:17:99", now.plus(Span::from_secs(59)), Span::minutes(1)).unwrap_err();
    assert!(
        matches!(&held, LeaseError::Held { by, until } if by == "host-a:17:99" && *until == now.plus(Span::minutes(1)))
    );
    store.holds_lease(&first, now.plus(Span::from_secs(59))).unwrap();
    let expired = store.holds_lease(&first, now.plus(Span::minutes(1))).unwrap_err();
    assert!(matches!(expired, StoreError::LeaseExpired { .. }));
    store.renew(&first, now.plus(Span::from_secs(59))).unwrap();
    store.holds_lease(&first, now.plus(Span::minutes(1))).unwrap();
    let second = store.acquire("host-b:17:99", now.plus(Span::minutes(2)), Span::minutes(1)).unwrap();
    store.release(&second).unwrap();

    // A process of this host that has exited: no process has its start time.
    let us = doctor_store::this_process();
    let (host_and_pid, _) = us.rsplit_once(':').unwrap();
    store.acquire(&format!("{host_and_pid}:1"), now, Span::hours(1)).unwrap();
    store.acquire(&us, now, Span::hours(1)).unwrap();
    let busy = store.acquire("host-b:17:99", now, Span::hours(1)).unwrap_err();
    assert!(busy.to_string().contains("holds the lease until"), "{busy}");
}

fn node_hours_count_from_the_start_to_the_end_of_each_run(bed: &mut StoreTestbed) {
    let midnight = bed.now;
    let run = bed.run_on(&["n1", "n2"], &["nccl"]);
    let id = run.id;
    bed.commit(&[WithReason::new(Action::Submit(run), "due", "x")]);
    let started = bed.wait(Span::minutes(10));
    bed.store.record_running(&bed.lease, id, started).unwrap();
    bed.wait(Span::minutes(30));
    bed.conclude(id, Conclusion::Incomplete(IncompleteReason::OverTimeLimit));
    let never = bed.plan("n3", &["disk"]);
    bed.wait(Span::minutes(10));
    bed.conclude(never, Conclusion::NotStarted(NotStartedReason::Withdrawn));
    assert_eq!(bed.store.node_time_since(midnight).unwrap(), Span::hours(1));
    assert_eq!(bed.store.node_time_since(started.plus(Span::minutes(20))).unwrap(), Span::minutes(20));
    assert_eq!(bed.store.node_time_since(bed.now).unwrap(), Span::ZERO);
    // Without an observed start, a result counts for the duration of its tests.
    bed.run_test("n4", "disk", Verdict::Pass);
    assert_eq!(bed.store.node_time_since(bed.now.minus(Span::minutes(5))).unwrap(), Span::from_secs(90));
}

fn skip_reasons_are_stored_until_they_change_or_a_run_starts(bed: &mut StoreTestbed) {
    let busy = SkipReason::Busy { by: "job 7".into() };
    let cycle = bed.commit_reasons(&[], &[(node("n1"), busy.clone()), (node("n2"), SkipReason::WaitingForSlot)]);
    let first = bed.now;
    bed.wait(Span::minutes(1));
    bed.commit_reasons(&[], &[(node("n2"), SkipReason::BudgetSpent)]);
    let reason = bed.store.skip_reason(&node("n1")).unwrap().unwrap();
    assert_eq!((reason.reason, reason.since), (busy, first));
    assert_eq!(bed.store.skip_reason(&node("n2")).unwrap().unwrap().since, bed.now);
    assert_eq!(bed.store.skip_reasons().unwrap().len(), 2);
    bed.plan("n2", &["disk"]);
    assert_eq!(bed.store.skip_reason(&node("n2")).unwrap(), None);
    assert_eq!(bed.store.skip_reason(&node("n3")).unwrap(), None);

    bed.store.finish_cycle(&bed.lease, cycle, Span::from_millis(12), Some("the backend was slow")).unwrap();
    let cycles = bed.store.cycles(10).unwrap();
    assert_eq!((cycles.len(), cycles[0].submitted), (3, 1));
    assert_eq!(cycles[2].error.as_deref(), Some("the backend was slow"));
}

fn nodes_load_with_all_stored_data(bed: &mut StoreTestbed) {
    bed.run_test("n1", "gpu", Verdict::Fail);
    bed.run_test("n1", "disk", Verdict::Pass);
    bed.run_test("n2", "disk", Verdict::Inconclusive);
    let nodes = bed.store.load_nodes().unwrap();
    assert_eq!(nodes.len(), 2);
    let n1 = &nodes[&node("n1")];
    assert_eq!(n1.records[&test("gpu")].verdict(), Some(Verdict::Fail));
    assert_eq!(n1.records[&test("disk")].settled(), Some(bed.now));
    assert_eq!((n1.findings.len(), n1.hardware.clone()), (1, hardware("n1").id()));
    let n2 = &nodes[&node("n2")];
    assert_eq!((n2.records[&test("disk")].settled(), n2.records[&test("disk")].misses()), (None, 1));
    let some = bed.store.load_nodes_named(&[node("n2")]).unwrap();
    assert_eq!(some.into_iter().collect::<Vec<_>>(), [(node("n2"), n2.clone())]);

    // Another process sees the same.
    if let Some(url) = &bed.url {
        let other = Store::open(url).unwrap();
        assert_eq!(other.load_nodes().unwrap(), nodes);
        other.hold(&node("n3"), &Hold { by: "x".into(), why: "y".into(), since: bed.now, until: None }).unwrap();
        assert!(bed.store.load_nodes().unwrap().contains_key(&node("n3")));
        bed.run_test("n3", "new-test", Verdict::Pass);
        assert_eq!(other.latest_of(&node("n3")).unwrap()[0].test, test("new-test"));
    }
}

fn observed_hardware_is_stored_with_its_node(bed: &mut StoreTestbed) {
    bed.run_test("n1", "disk", Verdict::Pass);
    bed.wait(Span::hours(3));
    let run = bed.plan("n1", &["disk"]);
    let mut result = bed.result(run, "n1", vec![bed.outcome("n1", "disk", Verdict::Pass)]);
    result.hardware = hardware("stranger");
    bed.accept(&[result]);
    // The node keeps its first machine: the planner decides whether it was replaced.
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].hardware, hardware("n1").id());
    let seen: Vec<_> =
        bed.store.hardware_ids(&node("n1")).unwrap().into_iter().map(|(id, first, _)| (Some(id), first)).collect();
    assert_eq!(seen, [(hardware("stranger").id(), bed.now), (hardware("n1").id(), bed.now.minus(Span::hours(3)))]);
    let board = HardwareId::new("board-x").unwrap();
    bed.commit(&[WithReason::new(
        Action::HardwareIdentified { node: node("n2"), hardware: board.clone() },
        "machine-known",
        "x",
    )]);
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n2")].hardware, Some(board));
}
