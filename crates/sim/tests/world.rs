//! The world keeps its word: reproducible, as full and as broken as assumed, and loyal to the backend seam.

use doctor_checks::document::{AgentReport, Document, RunKey};
use doctor_control::{
    backend::{Backend, Change, Effect, JobOutput, JobRequest, NodeOp},
    clock::Clock,
};
use doctor_core::{
    ids::{IdSource, NodeName, RunId, TestId},
    node::{ForeignMark, MarkKind, Occupancy, OurMark},
    run::{JobEnd, JobSeen, NonEmpty},
    time::{Span, Timestamp},
};
use doctor_sim::{
    Assumptions, Call, CallTrouble, FaultKind, Happened, Incident, JobTrouble, SimBackend, World, WorldConfig,
};

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn key() -> RunKey {
    RunKey::new([7; 32])
}

fn job(run: RunId, name: &str, tests: &[&str]) -> JobRequest {
    JobRequest {
        run,
        nodes: NonEmpty::one(node(name)),
        tests: NonEmpty::new(tests.iter().map(|test| TestId::new(test).unwrap()).collect()).unwrap(),
        limit: Span::hours(1),
        key: key(),
        outputs: vec![JobOutput {
            node: node(name),
            logs: vec![format!("{}/{name}/{run}.log", tests[0]).into()],
            document: format!("{}/{name}/{run}.json", tests[0]).into(),
        }],
    }
}

/// A quiet world with somebody to ask for things.
struct Bench {
    sim: SimBackend,
    ids: IdSource,
}

impl Bench {
    fn new(config: WorldConfig) -> Self {
        let sim = SimBackend::new(config).unwrap();
        let mut ids = IdSource::new(1);
        ids.at(sim.clock().now());
        Self { sim, ids }
    }

    fn quiet(nodes: u32) -> Self {
        Self::new(WorldConfig::quiet(nodes))
    }

    fn pass(&self, span: Span) {
        let now = self.sim.clock().now();
        self.sim.clock().sleep_until(now.plus(span));
    }

    fn submit(&mut self, name: &str, tests: &[&str]) -> RunId {
        let run = self.ids.run();
        self.sim.submit(&job(run, name, tests)).unwrap();
        run
    }

    fn seen(&self, run: RunId) -> JobSeen {
        self.sim.poll(&[run]).unwrap().remove(0).seen
    }

    fn documents(&self, run: RunId) -> Vec<Vec<u8>> {
        self.sim.poll(&[run]).unwrap().remove(0).documents
    }

    fn occupancy(&self, name: &str) -> Occupancy {
        self.shown(name).unwrap().occupancy
    }

    fn shown(&self, name: &str) -> Option<doctor_core::node::Node> {
        self.sim
            .snapshot()
            .unwrap()
            .into_iter()
            .map(|seen| std::sync::Arc::unwrap_or_clone(seen.node))
            .find(|shown| shown.name == node(name))
    }

    fn apply(&mut self, name: &str, what: Change) {
        let op = self.ids.op();
        self.sim.apply(&node(name), &NodeOp { op, what }).unwrap();
    }

    #[expect(clippy::needless_pass_by_value, reason = "a story reads better without references")]
    fn inject(&self, incident: Incident) {
        assert!(self.sim.world().inject(&incident), "{incident}");
    }
}

const UNHEALTHY: Change = Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: None });

/// Something like a controller: tests free nodes in turn, and marks and resets what fails now and then.
fn drive(config: WorldConfig, days: i64) -> SimBackend {
    let mut bench = Bench::new(config);
    let mut turn = 0;
    let end = bench.sim.clock().now().plus(Span::days(days));
    while bench.sim.clock().now() < end {
        bench.ids.at(bench.sim.clock().now());
        if let Ok(nodes) = bench.sim.snapshot() {
            let free: Vec<_> = nodes.iter().filter(|seen| seen.node.occupancy.is_free()).collect();
            if !free.is_empty() {
                let name = free[turn % free.len()].node.name.clone();
                let run = bench.ids.run();
                let _ = bench.sim.submit(&job(run, name.as_str(), &["dl", "nccl"]));
                turn += 7;
                if turn % 5 == 0 {
                    let op = bench.ids.op();
                    let _ = bench.sim.apply(&name, &NodeOp { op, what: Change::Reset });
                }
            }
        }
        bench.pass(Span::minutes(30));
    }
    bench.sim
}

#[test]
fn the_same_seed_and_the_same_calls_make_the_same_world() {
    let story = |seed| {
        let mut config = WorldConfig::of(60).with_seed(seed);
        config.hostile = doctor_sim::Hostile::rough();
        let sim = drive(config, 10);
        let world = sim.world();
        (world.effects().digest(), serde_json::to_string(&world.truth()).unwrap())
    };
    let first = story(1);
    assert_eq!(first, story(1));
    assert_ne!(first.0, story(2).0);
}

#[test]
fn faults_and_user_jobs_do_not_depend_on_what_we_do() {
    let config = || {
        let mut config = WorldConfig::of(80);
        config.repairs = false;
        config.tickets = false;
        config
    };
    let onsets = |sim: &SimBackend| {
        let truth = sim.world().truth();
        truth.faults.iter().map(|fault| (fault.onset, fault.kind, fault.node.clone())).collect::<Vec<_>>()
    };
    let idle = SimBackend::new(config()).unwrap();
    idle.world().advance_to(config().start.plus(Span::days(20)));
    let mut watching = Bench::new(config());
    for _ in 0..20 * 24 {
        if let Some(free) = watching.sim.snapshot().unwrap().into_iter().find(|seen| seen.node.occupancy.is_free()) {
            let name = free.node.name.as_str().to_owned();
            watching.submit(&name, &["storage"]);
        }
        watching.pass(Span::hours(1));
    }
    assert!(!onsets(&idle).is_empty());
    assert_eq!(onsets(&idle), onsets(&watching.sim));
}

#[test]
fn the_cluster_is_as_full_and_as_broken_as_assumed() {
    let config = WorldConfig { tickets: true, ..WorldConfig::of(400) };
    let sim = SimBackend::new(config.clone()).unwrap();
    sim.world().advance_to(config.start.plus(Span::days(30)));
    let truth = sim.world().truth();
    assert!((truth.users.utilisation - 0.84).abs() < 0.05, "{:?}", truth.users);
    let per_node_day = truth.faults.len() as f64 / (400.0 * 30.0);
    assert!((0.6..2.0).contains(&(per_node_day / 5.4e-3)), "{per_node_day}");
    assert!(truth.users.jobs_crashed_by_faults > 0 && truth.users.node_hours_lost > 0.0);
    assert!(truth.faults.iter().any(|fault| fault.ticket.is_some() && fault.cured.is_some()));
    assert_eq!(truth.users.jobs_disturbed, 0);
}

#[test]
fn bad_nodes_are_more_often_free_than_good_ones() {
    let mut config = WorldConfig::of(100);
    config.assumptions = Assumptions {
        hard_per_node_day: 0.0,
        gray_per_node_day: 0.0,
        sdc_per_node_day: 0.0,
        crash_per_hour_bad: 0.5,
        ..Assumptions::default()
    };
    (config.tickets, config.repairs) = (false, false);
    let sim = SimBackend::new(config.clone()).unwrap();
    let bad: Vec<_> = (1..=20).map(|number| node(&format!("node{number:03}"))).collect();
    for name in &bad {
        assert!(sim.world().inject(&Incident::Fault { node: name.clone(), kind: FaultKind::FailSlow }));
    }
    let (mut free_bad, mut free_good) = (0.0, 0.0);
    for hour in 24..24 * 30 {
        sim.world().advance_to(config.start.plus(Span::hours(hour)));
        for seen in sim.snapshot().unwrap().iter().filter(|seen| seen.node.occupancy.is_free()) {
            if bad.contains(&seen.node.name) { free_bad += 1.0 / 20.0 } else { free_good += 1.0 / 80.0 }
        }
    }
    assert!(free_bad > 1.2 * free_good, "{free_bad} against {free_good}");
}

#[test]
fn tests_catch_faults_about_as_often_as_stated() {
    for (kind, tests, chance) in [
        (FaultKind::SlowNic, &["nccl"][..], 0.9),
        (FaultKind::SilentCorruption, &["dl"][..], 0.3),
        (FaultKind::SilentCorruption, &["nccl", "dl"][..], 0.7),
    ] {
        let mut config = WorldConfig::quiet(60);
        config.assumptions =
            Assumptions { catch_gray: 0.9, catch_sdc_cold: 0.3, catch_sdc_hot: 0.7, ..Assumptions::quiet() };
        let mut bench = Bench::new(config);
        for number in 1..=60 {
            let name = format!("node{number:03}");
            bench.inject(Incident::Fault { node: node(&name), kind });
        }
        let (mut shown, mut looks) = (0, 0);
        for _ in 0..10 {
            let runs: Vec<_> = (1..=60).map(|number| bench.submit(&format!("node{number:03}"), tests)).collect();
            bench.pass(Span::hours(2));
            for run in runs {
                let document = Document::open(&bench.documents(run)[0], &key()).unwrap();
                let healthy = if kind == FaultKind::SlowNic { "nic_bandwidth" } else { "wrong_values" };
                let text = format!("{:?}", document.tests.last().unwrap().probes);
                looks += 1;
                shown += u32::from(is_shown(kind, &text, healthy));
            }
        }
        let rate = f64::from(shown) / f64::from(looks);
        assert!((rate - chance).abs() < 0.06, "{kind} by {tests:?}: {rate} instead of {chance}");
    }
}

/// Whether a test's own words show the fault, read without our judgement.
fn is_shown(kind: FaultKind, text: &str, metric: &str) -> bool {
    let values = text.split(metric).skip(1).filter_map(|rest| {
        let value = rest.split("value\\\":").nth(1)?;
        value.split([',', '}']).next()?.parse::<f64>().ok()
    });
    let worst: Vec<f64> = values.collect();
    assert_eq!(worst.len(), 8, "{text}");
    match kind {
        FaultKind::SlowNic => worst.iter().any(|value| *value < 0.9 * 4.6e10),
        _ => worst.iter().any(|value| *value > 0.0),
    }
}

#[test]
fn a_job_starts_ends_and_leaves_one_signed_result() {
    let mut bench = Bench::quiet(3);
    let run = bench.submit("node001", &["storage", "gpu-health"]);
    assert!(matches!(bench.seen(run), JobSeen::Pending { .. }));
    bench.pass(Span::minutes(1));
    assert!(matches!(bench.seen(run), JobSeen::Running { .. }));
    assert!(bench.occupancy("node001").is_free(), "our own job does not make it busy");
    bench.pass(Span::minutes(15));
    let JobSeen::Ended { started: Some(_), how: JobEnd::Exited, .. } = bench.seen(run) else { panic!() };
    let document = Document::open(&bench.documents(run)[0], &key()).unwrap();
    assert_eq!((document.run, document.node.as_str(), document.tests.len()), (run, "node001", 2));
    assert_eq!(document.hardware.gpu_uuids.len(), 8);
    assert_eq!(document.hardware.id(), bench.shown("node001").unwrap().hardware.unwrap().id());
    bench.pass(Span::days(3));
    let later = bench.submit("node002", &["dl"]);
    bench.pass(Span::hours(1));
    assert!(bench.documents(run).is_empty(), "results are not carried for ever");
    assert!(matches!(bench.seen(run), JobSeen::Ended { .. }) && matches!(bench.seen(later), JobSeen::Ended { .. }));
}

#[test]
fn a_node_that_a_user_wants_is_busy_and_waits_for_our_job_to_leave() {
    let mut bench = Bench::quiet(2);
    let run = bench.submit("node001", &["dl"]);
    bench.pass(Span::minutes(1));
    bench.inject(Incident::UserJob { nodes: vec![node("node001"), node("node002")], length: Span::hours(1) });
    assert!(matches!(bench.occupancy("node001"), Occupancy::Busy { .. }));
    assert!(matches!(bench.seen(run), JobSeen::Running { .. }));
    bench.pass(Span::minutes(1));
    bench.sim.cancel(run).unwrap();
    bench.pass(Span::minutes(1));
    assert!(matches!(bench.seen(run), JobSeen::Ended { how: JobEnd::Killed, .. }));
    let world = bench.sim.world();
    let waited = world.effects().entries().iter().find_map(|effect| match effect.what {
        Happened::WantedGot { after, .. } => Some(after),
        _ => None,
    });
    assert_eq!(waited, Some(Span::from_secs(65)));
    assert_eq!(world.truth().users.jobs_disturbed, 0, "a minute is bearable");
    drop(world);
    bench.pass(Span::hours(2));
    assert!(bench.occupancy("node001").is_free() && bench.occupancy("node002").is_free());
}

#[test]
fn a_user_who_is_kept_waiting_too_long_counts_as_disturbed() {
    let mut bench = Bench::quiet(1);
    bench.submit("node001", &["dl"]);
    bench.pass(Span::minutes(1));
    bench.inject(Incident::UserJob { nodes: vec![node("node001")], length: Span::hours(1) });
    bench.pass(Span::hours(1));
    assert_eq!(bench.sim.world().truth().users.jobs_disturbed, 1);
}

#[test]
fn what_cannot_start_stays_pending_until_it_can() {
    let mut bench = Bench::quiet(2);
    let cordon = ForeignMark { by: "ops".into(), text: "cordon".into(), blocks: true };
    bench.inject(Incident::ForeignMark { node: node("node001"), mark: cordon });
    let run = bench.submit("node001", &["dl"]);
    bench.pass(Span::hours(1));
    assert!(matches!(bench.seen(run), JobSeen::Pending { .. }));
    bench.inject(Incident::ForeignUnmark { node: node("node001"), by: "ops".into() });
    bench.pass(Span::minutes(1));
    assert!(matches!(bench.seen(run), JobSeen::Running { .. }));
}

#[test]
fn each_trouble_of_jobs_shows_as_itself() {
    for (trouble, ended, documents, opens) in [
        (JobTrouble::NeverStarts, None, 0, false),
        (JobTrouble::Lost, Some(JobEnd::Lost), 0, false),
        (JobTrouble::Hung, None, 0, false),
        (JobTrouble::Crashes, Some(JobEnd::Failed), 0, false),
        (JobTrouble::NoResult, Some(JobEnd::Exited), 0, false),
        (JobTrouble::Twice, Some(JobEnd::Exited), 2, true),
        (JobTrouble::Truncated, Some(JobEnd::Exited), 1, false),
        (JobTrouble::WronglySigned, Some(JobEnd::Exited), 1, false),
        (JobTrouble::OtherNode, Some(JobEnd::Exited), 1, true),
    ] {
        let mut bench = Bench::quiet(2);
        bench.inject(Incident::Jobs { trouble, times: 1 });
        let run = bench.submit("node001", &["dl"]);
        bench.pass(Span::hours(5));
        let how = match bench.seen(run) {
            JobSeen::Ended { how, .. } => Some(how),
            _ => None,
        };
        assert_eq!(how, ended, "{trouble:?}");
        let left = bench.documents(run);
        assert_eq!(left.len(), documents, "{trouble:?}");
        for bytes in left {
            let opened = Document::open(&bytes, &key());
            assert_eq!(opened.is_ok(), opens, "{trouble:?}");
            if trouble == JobTrouble::OtherNode {
                assert_eq!(opened.unwrap().node, node("node002"));
            }
        }
        bench.sim.cancel(run).unwrap();
        bench.pass(Span::minutes(1));
        assert!(matches!(bench.seen(run), JobSeen::Ended { .. }), "{trouble:?}");
        let next = bench.submit("node001", &["dl"]);
        bench.pass(Span::hours(1));
        assert!(matches!(bench.seen(next), JobSeen::Ended { how: JobEnd::Exited, .. }), "only one was to go wrong");
    }
}

#[test]
fn calls_go_wrong_with_and_without_effect() {
    let mut bench = Bench::quiet(1);
    for (trouble, effect, jobs) in [
        (CallTrouble::Refused, Effect::NoneTryAgain, 0),
        (CallTrouble::RefusedForGood, Effect::NoneGiveUp, 0),
        (CallTrouble::Unanswered, Effect::Unknown, 1),
    ] {
        bench.inject(Incident::Calls { call: Call::Submit, trouble, times: 1 });
        let run = bench.ids.run();
        assert_eq!(bench.sim.submit(&job(run, "node001", &["dl"])).unwrap_err().effect, effect);
        bench.pass(Span::minutes(1));
        assert_eq!(bench.sim.world().jobs_started(run), jobs, "{trouble:?}");
        bench.sim.submit(&job(run, "node001", &["dl"])).unwrap();
        bench.pass(Span::minutes(1));
        assert_eq!(bench.sim.world().jobs_started(run), 1, "asking again gives the same job");
        bench.sim.cancel(run).unwrap();
        bench.pass(Span::minutes(1));
    }
    bench.inject(Incident::Calls { call: Call::Change, trouble: CallTrouble::Unanswered, times: 1 });
    let op = NodeOp { op: bench.ids.op(), what: UNHEALTHY };
    assert_eq!(bench.sim.apply(&node("node001"), &op).unwrap_err().effect, Effect::Unknown);
    assert!(bench.shown("node001").unwrap().marks.has_ours(MarkKind::Unhealthy));
    bench.sim.apply(&node("node001"), &op).unwrap();
    assert_eq!(bench.shown("node001").unwrap().marks.ours.len(), 1);
}

#[test]
fn an_outage_answers_nothing_and_passes() {
    let mut bench = Bench::quiet(1);
    bench.inject(Incident::Outage { length: Span::minutes(10) });
    assert_eq!(bench.sim.snapshot().unwrap_err().effect, Effect::NoneTryAgain);
    assert!(bench.sim.poll(&[]).is_err());
    let run = bench.ids.run();
    assert!(bench.sim.submit(&job(run, "node001", &["dl"])).is_err());
    assert!(bench.sim.cancel(run).is_err());
    bench.pass(Span::minutes(10));
    assert!(bench.sim.snapshot().is_ok());
}

#[test]
fn resets_reboots_and_replacements_cure_what_they_cure_and_take_their_time() {
    let mut bench = Bench::quiet(1);
    let hardware = |bench: &Bench| bench.shown("node001").unwrap().hardware.unwrap();
    let before = hardware(&bench);
    bench.apply("node001", Change::Reset);
    assert!(matches!(bench.occupancy("node001"), Occupancy::Unknown { .. }));
    bench.pass(Span::minutes(2));
    assert!(bench.occupancy("node001").is_free());
    assert_eq!(hardware(&bench), before);

    bench.apply("node001", Change::Reboot);
    bench.pass(Span::minutes(9));
    assert!(matches!(bench.occupancy("node001"), Occupancy::Unknown { .. }));
    bench.pass(Span::minutes(1));
    assert_eq!(hardware(&bench).id(), before.id());
    assert_ne!(hardware(&bench).boot_id, before.boot_id);

    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::Thermal });
    bench.apply("node001", Change::Reboot);
    bench.pass(Span::minutes(10));
    assert_eq!(bench.sim.world().truth().faults[0].cured, None, "a reboot does not cool a GPU");
    bench.apply("node001", Change::Replace);
    bench.pass(Span::days(14));
    assert_ne!(hardware(&bench).id(), before.id());
    assert!(bench.sim.world().truth().faults[0].cured.is_some());
}

#[test]
fn an_agent_reports_hard_faults_within_its_poll_and_their_end_after_the_cure() {
    let bench = Bench::quiet(2);
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::HbmUncorrectable });
    bench.pass(Span::minutes(5));
    let reports = bench.sim.agent_reports();
    assert_eq!(reports, bench.sim.agent_reports(), "until somebody acknowledges it");
    let [report] = &reports[..] else { panic!("{reports:?}") };
    let opened = AgentReport::open(&report.bytes, &bench.sim.agent_key(&node("node001"))).unwrap();
    assert!(format!("{:?}", opened.checks).contains("xid-48"));
    assert!(AgentReport::open(&report.bytes, &bench.sim.agent_key(&node("node002"))).is_err());
    bench.sim.acknowledge_reports(&[report.number]);
    assert!(bench.sim.agent_reports().is_empty());

    bench.inject(Incident::Heal { node: node("node001") });
    bench.pass(Span::minutes(1));
    let reports = bench.sim.drain_agent_reports();
    let opened = AgentReport::open(&reports[0].bytes, &bench.sim.agent_key(&node("node001"))).unwrap();
    assert!(!format!("{:?}", opened.checks).contains("xid-48"));
    assert_eq!(opened.number, 2);
    assert!(bench.sim.drain_agent_reports().is_empty());
}

#[test]
fn a_silent_agent_is_not_heard_and_tells_when_it_speaks_again() {
    let bench = Bench::quiet(20);
    let heard = |bench: &Bench| bench.sim.snapshot().unwrap().iter().map(|seen| seen.heard.unwrap()).min().unwrap();
    bench.pass(Span::minutes(30));
    let before = bench.sim.clock().now();
    assert!(before.since(heard(&bench)) <= Span::minutes(1));
    bench.inject(Incident::AgentsSilent { percent: 100.0, length: Span::hours(1) });
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::GpuOffBus });
    bench.pass(Span::minutes(30));
    assert!(heard(&bench) <= before);
    assert!(bench.sim.agent_reports().is_empty());
    bench.pass(Span::minutes(31));
    assert!(bench.sim.clock().now().since(heard(&bench)) <= Span::minutes(1));
    assert_eq!(bench.sim.agent_reports().len(), 1);
}

#[test]
fn a_machine_comes_back_under_another_name_with_its_faults_and_without_marks() {
    let mut bench = Bench::quiet(3);
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::GpuOffBus });
    bench.apply("node001", UNHEALTHY);
    let hardware = bench.shown("node001").unwrap().hardware.unwrap().id();
    let run = bench.submit("node001", &["dl"]);
    let version = bench.sim.changed_since(0).unwrap().version;
    bench.inject(Incident::Vanish { node: node("node001") });
    assert_eq!(bench.shown("node001"), None);
    assert!(matches!(bench.seen(run), JobSeen::Ended { started: None, how: JobEnd::Lost, .. }));
    bench.inject(Incident::Return { node: node("node001"), called: node("node077") });
    let back = bench.shown("node077").unwrap();
    assert_eq!(back.hardware.unwrap().id(), hardware);
    assert!(back.marks.ours.is_empty());
    let changes = bench.sim.changed_since(version).unwrap();
    assert_eq!(changes.gone, [node("node001")]);
    assert_eq!(changes.nodes.len(), 1);
    bench.pass(Span::minutes(5));
    assert!(bench.sim.drain_agent_reports().iter().any(|report| report.node == node("node077")));
    assert!(!bench.sim.world().inject(&Incident::Heal { node: node("node001") }), "nobody is called that any more");
}

#[test]
fn clocks_that_are_wrong_are_wrong_where_they_are() {
    let mut bench = Bench::quiet(1);
    bench.inject(Incident::NodeClock { node: node("node001"), ahead_secs: -3600 });
    let run = bench.submit("node001", &["dl"]);
    bench.pass(Span::hours(1));
    let now = bench.sim.clock().now();
    let document = Document::open(&bench.documents(run)[0], &key()).unwrap();
    assert!(now.since(document.ended) > Span::hours(1));
    bench.inject(Incident::ControllerClock { by_secs: 7200 });
    assert_eq!(bench.sim.clock().now(), now.plus(Span::hours(2)));
    bench.pass(Span::minutes(1));
    assert_eq!(bench.sim.clock().now(), now.plus(Span::minutes(121)));
    assert_eq!(bench.sim.world().now(), now.plus(Span::minutes(1)), "the world goes its own way");
}

#[test]
fn operators_repair_what_is_marked_and_ask_for_it_back() {
    let mut config = WorldConfig::quiet(1);
    config.repairs = true;
    let mut bench = Bench::new(config);
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::Thermal });
    bench.pass(Span::hours(1));
    bench.apply("node001", UNHEALTHY);
    bench.pass(Span::days(15));
    let truth = bench.sim.world().truth();
    assert_eq!(truth.faults[0].time_to_detect(), Some(Span::hours(1)));
    assert!(truth.faults[0].is_found() && truth.faults[0].cured.is_some());
    let requests = bench.sim.take_operator_requests();
    assert_eq!(requests[0].node, node("node001"));
    assert_eq!(truth.false_marks, 0);
    bench.apply("node001", Change::Unmark(OurMark { kind: MarkKind::Unhealthy, case: None }));
    bench.apply("node001", UNHEALTHY);
    assert_eq!(bench.sim.world().truth().false_marks, 1, "there is nothing wrong any more");
}

#[test]
fn somebody_else_can_remove_our_marks_and_we_cannot_remove_theirs() {
    let mut bench = Bench::quiet(1);
    let theirs = ForeignMark { by: "ops".into(), text: "rack move".into(), blocks: true };
    bench.inject(Incident::ForeignMark { node: node("node001"), mark: theirs.clone() });
    bench.apply("node001", UNHEALTHY);
    bench.apply("node001", Change::Drain);
    bench.apply("node001", Change::Undrain);
    let marks = bench.shown("node001").unwrap().marks;
    assert_eq!((marks.ours.len(), &marks.foreign[..]), (1, &[theirs][..]));
    bench.inject(Incident::OurMarksRemoved { node: node("node001") });
    assert!(bench.shown("node001").unwrap().marks.ours.is_empty());
}

#[test]
fn logs_grow_on_the_share_while_the_test_runs_and_the_result_comes_last() {
    let folder = tempfile::tempdir().unwrap();
    let config = WorldConfig {
        share: Some(folder.path().to_owned()),
        effects: Some(folder.path().join("effects.jsonl")),
        ..WorldConfig::quiet(1)
    };
    let mut bench = Bench::new(config);
    let run = bench.submit("node001", &["dl"]);
    let output = job(run, "node001", &["dl"]).outputs.remove(0);
    let lines = || std::fs::read_to_string(folder.path().join(&output.logs[0])).map_or(0, |text| text.lines().count());
    bench.pass(Span::minutes(1));
    assert_eq!(lines(), 1);
    bench.pass(Span::minutes(6));
    assert_eq!(lines(), 2);
    assert!(!folder.path().join(&output.document).exists());
    bench.pass(Span::minutes(10));
    assert_eq!(lines(), 3);
    let bytes = std::fs::read(folder.path().join(&output.document)).unwrap();
    assert_eq!(Document::open(&bytes, &key()).unwrap().run, run);
    let effects = doctor_sim::read_effects(&folder.path().join("effects.jsonl")).unwrap();
    assert_eq!(effects, bench.sim.world().effects().entries());
    assert!(effects.iter().any(|effect| matches!(effect.what, Happened::Document { .. })));
}

#[test]
fn a_world_that_cannot_be_is_refused_with_what_is_accepted() {
    let mut two = WorldConfig::of(3);
    two.pools.push(two.pools[0].clone());
    assert!(World::new(two).unwrap_err().to_string().contains("another prefix"));
    assert!(World::new(WorldConfig::of(0)).unwrap_err().to_string().contains("at least one"));
    let mut odd = WorldConfig::of(1);
    odd.assumptions.catch_gray = 1.5;
    assert!(World::new(odd).unwrap_err().to_string().contains("0 to 1 is accepted"));
    let read: WorldConfig = toml::from_str("seed = 3\n[assumptions]\nutilisation = 0.5").unwrap();
    assert_eq!((read.seed, read.assumptions.utilisation), (3, 0.5));
    assert!(toml::from_str::<WorldConfig>("sed = 3").is_err());
    assert_eq!(WorldConfig::of(1).start, "2026-11-01T00:00:00Z".parse::<Timestamp>().unwrap());
}

mod any_story {
    use doctor_sim::{Patience, judge::Broken, judge_effects};
    use proptest::prelude::*;

    use super::*;

    /// One step of somebody who knows no restraint.
    #[derive(Debug, Clone)]
    enum Step {
        Submit(u8),
        SubmitAgain(u8),
        Cancel(u8),
        Change(u8, u8),
        ChangeAgain(u8),
        Befall(u8, u8),
        Pass(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => any::<u8>().prop_map(Step::Submit),
            1 => any::<u8>().prop_map(Step::SubmitAgain),
            1 => any::<u8>().prop_map(Step::Cancel),
            2 => (any::<u8>(), any::<u8>()).prop_map(|(node, what)| Step::Change(node, what)),
            1 => any::<u8>().prop_map(Step::ChangeAgain),
            3 => (any::<u8>(), any::<u8>()).prop_map(|(node, what)| Step::Befall(node, what)),
            4 => (0..2000_u16).prop_map(Step::Pass),
        ]
    }

    fn change(what: u8) -> Change {
        let mark = OurMark { kind: MarkKind::Unhealthy, case: None };
        match what % 7 {
            0 => Change::Mark(mark),
            1 => Change::Unmark(mark),
            2 => Change::Drain,
            3 => Change::Undrain,
            4 => Change::Reset,
            5 => Change::Reboot,
            _ => Change::Replace,
        }
    }

    fn incident(name: NodeName, what: u8) -> Incident {
        let length = Span::minutes(i64::from(what) * 3);
        let mark = ForeignMark { by: "ops".into(), text: "cordon".into(), blocks: true };
        match what % 14 {
            0 => Incident::Fault { node: name, kind: FaultKind::ALL[usize::from(what) % FaultKind::ALL.len()] },
            1 => Incident::Heal { node: name },
            2 => Incident::UserJob { nodes: vec![name], length },
            3 => Incident::Jobs { trouble: JobTrouble::ALL[usize::from(what) % JobTrouble::ALL.len()], times: 1 },
            4 => Incident::Calls { call: Call::Submit, trouble: CallTrouble::Unanswered, times: 1 },
            5 => Incident::Outage { length },
            6 => Incident::Unreachable { node: name, length },
            7 => Incident::Vanish { node: name },
            8 => Incident::Return { called: node(&format!("{name}x")), node: name },
            9 => Incident::AgentsSilent { percent: 50.0, length },
            10 => Incident::ForeignMark { node: name, mark },
            11 => Incident::ForeignUnmark { node: name, by: "ops".into() },
            12 => Incident::OurMarksRemoved { node: name },
            _ => Incident::ForeignReboot { node: name },
        }
    }

    fn play(steps: &[Step], seed: u64) -> SimBackend {
        let mut config = WorldConfig::of(6).with_seed(seed);
        config.assumptions.gray_per_node_day = 0.5;
        let mut bench = Bench::new(config);
        let (mut runs, mut ops) = (Vec::new(), Vec::new());
        let name = |number: u8| format!("node{:03}", number % 6 + 1);
        let at = |list: usize, number: u8| usize::from(number) % list.max(1);
        for step in steps {
            bench.ids.at(bench.sim.clock().now());
            match step {
                Step::Submit(number) => {
                    let request = job(bench.ids.run(), &name(*number), &["dl", "storage"]);
                    let _ = bench.sim.submit(&request);
                    runs.push(request);
                }
                Step::SubmitAgain(number) => {
                    if let Some(request) = runs.get(at(runs.len(), *number)) {
                        let _ = bench.sim.submit(request);
                    }
                }
                Step::Cancel(number) => {
                    if let Some(request) = runs.get(at(runs.len(), *number)) {
                        let _ = bench.sim.cancel(request.run);
                    }
                }
                Step::Change(number, what) => {
                    let op = (node(&name(*number)), NodeOp { op: bench.ids.op(), what: change(*what) });
                    let _ = bench.sim.apply(&op.0, &op.1);
                    ops.push(op);
                }
                Step::ChangeAgain(number) => {
                    if let Some((node, op)) = ops.get(at(ops.len(), *number)) {
                        let _ = bench.sim.apply(node, op);
                    }
                }
                Step::Befall(number, what) => {
                    bench.sim.world().inject(&incident(node(&name(*number)), *what));
                }
                Step::Pass(minutes) => bench.pass(Span::minutes(i64::from(*minutes))),
            }
        }
        bench.pass(Span::hours(1));
        bench.sim
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is asked of it: a world contradicts neither itself nor the seam.
        #[test]
        fn the_world_stays_whole(steps in proptest::collection::vec(step(), 1..60), seed in 0..50_u64) {
            let sim = play(&steps, seed);
            sim.world().inject(&Incident::ForeignUnmark { node: node("node001"), by: "ops".into() });
            let world = sim.world();
            for violation in judge_effects(world.effects().entries(), Patience::default()) {
                let asked_for = matches!(
                    violation.what,
                    Broken::TwoRuns { .. }
                        | Broken::SubmittedToTaken { .. }
                        | Broken::SlowToLeave { .. }
                        | Broken::DisturbedUser { .. }
                        | Broken::DisturbedTwice { .. }
                );
                prop_assert!(asked_for, "only whoever asks can break {violation}");
            }
            let truth = world.truth();
            prop_assert!(truth.users.utilisation <= 1.000_001, "{}", truth.users.utilisation);
            let again = play(&steps, seed);
            again.world().inject(&Incident::ForeignUnmark { node: node("node001"), by: "ops".into() });
            prop_assert_eq!(world.effects().digest(), again.world().effects().digest());
        }
    }
}
