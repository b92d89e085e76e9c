//! Machines, their agents, clocks and marks, and the files about them.

use super::*;

#[test]
fn resets_reboots_and_replacements_cure_their_faults_after_their_duration() {
    let mut bench = Bench::quiet(1);
    let hardware = |bench: &Bench| bench.observed_node("node001").unwrap().hardware.unwrap();
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
fn an_agent_reports_hard_faults_within_its_poll_interval_and_their_end_after_the_cure() {
    let bench = Bench::quiet(2);
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::HbmUncorrectable });
    bench.pass(Span::minutes(5));
    let reports = bench.sim.agent_reports();
    assert_eq!(reports, bench.sim.agent_reports(), "until it is acknowledged");
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
    assert_eq!(opened.sequence, 2);
    assert!(bench.sim.drain_agent_reports().is_empty());
}

#[test]
fn a_silent_agent_sends_no_heartbeat_and_reports_when_it_returns() {
    let bench = Bench::quiet(20);
    let oldest_heartbeat =
        |bench: &Bench| bench.sim.snapshot().unwrap().iter().map(|seen| seen.agent_last_seen.unwrap()).min().unwrap();
    bench.pass(Span::minutes(30));
    let before = bench.sim.clock().now();
    assert!(before.since(oldest_heartbeat(&bench)) <= Span::minutes(1));
    bench.inject(Incident::AgentsSilent { percent: 100.0, length: Span::hours(1) });
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::GpuOffBus });
    bench.pass(Span::minutes(30));
    assert!(oldest_heartbeat(&bench) <= before);
    assert!(bench.sim.agent_reports().is_empty());
    bench.pass(Span::minutes(31));
    assert!(bench.sim.clock().now().since(oldest_heartbeat(&bench)) <= Span::minutes(1));
    assert_eq!(bench.sim.agent_reports().len(), 1);
}

#[test]
fn a_renamed_machine_keeps_its_faults_and_loses_its_marks() {
    let mut bench = Bench::quiet(3);
    bench.inject(Incident::Fault { node: node("node001"), kind: FaultKind::GpuOffBus });
    bench.apply("node001", UNHEALTHY);
    let hardware = bench.observed_node("node001").unwrap().hardware.unwrap().id();
    let run = bench.submit("node001", &["dl"]);
    let version = bench.sim.changed_since(0).unwrap().version;
    bench.inject(Incident::Vanish { node: node("node001") });
    assert_eq!(bench.observed_node("node001"), None);
    assert!(matches!(bench.seen(run), ObservedJobState::Ended { started: None, how: JobEnd::Lost, .. }));
    bench.inject(Incident::Return { node: node("node001"), called: node("node077") });
    let back = bench.observed_node("node077").unwrap();
    assert_eq!(back.hardware.unwrap().id(), hardware);
    assert!(back.marks.ours.is_empty());
    let changes = bench.sim.changed_since(version).unwrap();
    assert_eq!(changes.gone, [node("node001")]);
    assert_eq!(changes.nodes.len(), 1);
    bench.pass(Span::minutes(5));
    assert!(bench.sim.drain_agent_reports().iter().any(|report| report.node == node("node077")));
    assert!(!bench.sim.world().inject(&Incident::Heal { node: node("node001") }), "no node has that name any more");
}

#[test]
fn clock_skew_affects_only_its_own_machine() {
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
    assert_eq!(bench.sim.world().now(), now.plus(Span::minutes(1)), "the world's clock is independent");
}

#[test]
fn operators_repair_marked_nodes_and_request_their_release() {
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
fn operators_can_remove_our_marks_and_we_cannot_remove_theirs() {
    let mut bench = Bench::quiet(1);
    let theirs = ForeignMark { by: "ops".into(), text: "rack move".into(), blocks: true };
    bench.inject(Incident::ForeignMark { node: node("node001"), mark: theirs.clone() });
    bench.apply("node001", UNHEALTHY);
    bench.apply("node001", Change::Drain);
    bench.apply("node001", Change::Undrain);
    let marks = bench.observed_node("node001").unwrap().marks;
    assert_eq!((marks.ours.len(), &marks.foreign[..]), (1, &[theirs][..]));
    bench.inject(Incident::OurMarksRemoved { node: node("node001") });
    assert!(bench.observed_node("node001").unwrap().marks.ours.is_empty());
}

#[test]
fn logs_grow_on_the_share_during_a_test_and_the_result_is_written_last() {
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
    assert!(effects.iter().any(|effect| matches!(effect.what, EffectKind::Document { .. })));
}

#[test]
fn an_invalid_config_is_rejected_with_the_accepted_values() {
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
