//! Jobs and calls: how they begin, end and go wrong.

use super::*;

#[test]
fn a_job_starts_ends_and_leaves_one_signed_result() {
    let mut bench = Bench::quiet(3);
    let run = bench.submit("node001", &["storage", "gpu-health"]);
    assert!(matches!(bench.seen(run), ObservedJobState::Pending { .. }));
    bench.pass(Span::minutes(1));
    assert!(matches!(bench.seen(run), ObservedJobState::Running { .. }));
    assert!(bench.occupancy("node001").is_free(), "our own job does not make it busy");
    bench.pass(Span::minutes(15));
    let ObservedJobState::Ended { started: Some(_), how: JobEnd::Exited, .. } = bench.seen(run) else { panic!() };
    let document = Document::open(&bench.documents(run)[0], &key()).unwrap();
    assert_eq!((document.run, document.node.as_str(), document.tests.len()), (run, "node001", 2));
    assert_eq!(document.hardware.gpu_uuids.len(), 8);
    assert_eq!(document.hardware.id(), bench.observed_node("node001").unwrap().hardware.unwrap().id());
    bench.pass(Span::days(3));
    let later = bench.submit("node002", &["dl"]);
    bench.pass(Span::hours(1));
    assert!(bench.documents(run).is_empty(), "results are not kept for ever");
    assert!(
        matches!(bench.seen(run), ObservedJobState::Ended { .. })
            && matches!(bench.seen(later), ObservedJobState::Ended { .. })
    );
}

#[test]
fn a_node_taken_by_a_user_is_busy_until_our_job_leaves() {
    let mut bench = Bench::quiet(2);
    let run = bench.submit("node001", &["dl"]);
    bench.pass(Span::minutes(1));
    bench.inject(Incident::UserJob { nodes: vec![node("node001"), node("node002")], length: Span::hours(1) });
    assert!(matches!(bench.occupancy("node001"), Occupancy::Busy { .. }));
    assert!(matches!(bench.seen(run), ObservedJobState::Running { .. }));
    bench.pass(Span::minutes(1));
    bench.sim.cancel(run).unwrap();
    bench.pass(Span::minutes(1));
    assert!(matches!(bench.seen(run), ObservedJobState::Ended { how: JobEnd::Killed, .. }));
    let world = bench.sim.world();
    let waited = world.effects().entries().iter().find_map(|effect| match effect.what {
        EffectKind::UserStarted { after, .. } => Some(after),
        _ => None,
    });
    assert_eq!(waited, Some(Span::from_secs(65)));
    assert_eq!(world.truth().users.jobs_disturbed, 0, "a minute does not count as a disturbance");
    drop(world);
    bench.pass(Span::hours(2));
    assert!(bench.occupancy("node001").is_free() && bench.occupancy("node002").is_free());
}

#[test]
fn a_user_who_waits_too_long_counts_as_disturbed() {
    let mut bench = Bench::quiet(1);
    bench.submit("node001", &["dl"]);
    bench.pass(Span::minutes(1));
    bench.inject(Incident::UserJob { nodes: vec![node("node001")], length: Span::hours(1) });
    bench.pass(Span::hours(1));
    assert_eq!(bench.sim.world().truth().users.jobs_disturbed, 1);
}

#[test]
fn a_job_that_cannot_start_stays_pending_until_it_can() {
    let mut bench = Bench::quiet(2);
    let cordon = ForeignMark { by: "ops".into(), text: "cordon".into(), blocks: true };
    bench.inject(Incident::ForeignMark { node: node("node001"), mark: cordon });
    let run = bench.submit("node001", &["dl"]);
    bench.pass(Span::hours(1));
    assert!(matches!(bench.seen(run), ObservedJobState::Pending { .. }));
    bench.inject(Incident::ForeignUnmark { node: node("node001"), by: "ops".into() });
    bench.pass(Span::minutes(1));
    assert!(matches!(bench.seen(run), ObservedJobState::Running { .. }));
}

#[test]
fn each_job_fault_has_its_effect() {
    for (fault, ended, documents, opens) in [
        (JobFault::NeverStarts, None, 0, false),
        (JobFault::Lost, Some(JobEnd::Lost), 0, false),
        (JobFault::Hung, None, 0, false),
        (JobFault::Crashes, Some(JobEnd::Failed), 0, false),
        (JobFault::NoResult, Some(JobEnd::Exited), 0, false),
        (JobFault::Twice, Some(JobEnd::Exited), 2, true),
        (JobFault::Truncated, Some(JobEnd::Exited), 1, false),
        (JobFault::WronglySigned, Some(JobEnd::Exited), 1, false),
        (JobFault::OtherNode, Some(JobEnd::Exited), 1, true),
    ] {
        let mut bench = Bench::quiet(2);
        bench.inject(Incident::Jobs { trouble: fault, times: 1 });
        let run = bench.submit("node001", &["dl"]);
        bench.pass(Span::hours(5));
        let how = match bench.seen(run) {
            ObservedJobState::Ended { how, .. } => Some(how),
            _ => None,
        };
        assert_eq!(how, ended, "{fault:?}");
        let left = bench.documents(run);
        assert_eq!(left.len(), documents, "{fault:?}");
        for bytes in left {
            let opened = Document::open(&bytes, &key());
            assert_eq!(opened.is_ok(), opens, "{fault:?}");
            if fault == JobFault::OtherNode {
                assert_eq!(opened.unwrap().node, node("node002"));
            }
        }
        bench.sim.cancel(run).unwrap();
        bench.pass(Span::minutes(1));
        assert!(matches!(bench.seen(run), ObservedJobState::Ended { .. }), "{fault:?}");
        let next = bench.submit("node001", &["dl"]);
        bench.pass(Span::hours(1));
        assert!(
            matches!(bench.seen(next), ObservedJobState::Ended { how: JobEnd::Exited, .. }),
            "only one job was to fail"
        );
    }
}

#[test]
fn calls_fail_with_and_without_effect() {
    let mut bench = Bench::quiet(1);
    for (failure, effect, jobs) in [
        (CallFailure::Refused, Effect::NotAppliedRetry, 0),
        (CallFailure::RefusedForGood, Effect::NotAppliedPermanent, 0),
        (CallFailure::Unanswered, Effect::Unknown, 1),
    ] {
        bench.inject(Incident::Calls { call: Call::Submit, trouble: failure, times: 1 });
        let run = bench.ids.run();
        assert_eq!(bench.sim.submit(&job(run, "node001", &["dl"])).unwrap_err().effect, effect);
        bench.pass(Span::minutes(1));
        assert_eq!(bench.sim.world().jobs_started(run), jobs, "{failure:?}");
        bench.sim.submit(&job(run, "node001", &["dl"])).unwrap();
        bench.pass(Span::minutes(1));
        assert_eq!(bench.sim.world().jobs_started(run), 1, "asking again gives the same job");
        bench.sim.cancel(run).unwrap();
        bench.pass(Span::minutes(1));
    }
    bench.inject(Incident::Calls { call: Call::Change, trouble: CallFailure::Unanswered, times: 1 });
    let op = NodeOp { op: bench.ids.op(), what: UNHEALTHY };
    assert_eq!(bench.sim.apply(&node("node001"), &op).unwrap_err().effect, Effect::Unknown);
    assert!(bench.observed_node("node001").unwrap().marks.has_ours(MarkKind::Unhealthy));
    bench.sim.apply(&node("node001"), &op).unwrap();
    assert_eq!(bench.observed_node("node001").unwrap().marks.ours.len(), 1);
}

#[test]
fn calls_fail_during_an_outage_and_succeed_after_it() {
    let mut bench = Bench::quiet(1);
    bench.inject(Incident::Outage { length: Span::minutes(10) });
    assert_eq!(bench.sim.snapshot().unwrap_err().effect, Effect::NotAppliedRetry);
    assert!(bench.sim.poll(&[]).is_err());
    let run = bench.ids.run();
    assert!(bench.sim.submit(&job(run, "node001", &["dl"])).is_err());
    assert!(bench.sim.cancel(run).is_err());
    bench.pass(Span::minutes(10));
    assert!(bench.sim.snapshot().is_ok());
}
