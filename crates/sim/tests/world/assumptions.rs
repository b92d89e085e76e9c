//! The same seed gives the same world, with the assumed utilisation and fault rates.

use super::*;

#[test]
fn the_same_seed_and_the_same_calls_make_the_same_world() {
    let story = |seed| {
        let mut config = WorldConfig::of(60).with_seed(seed);
        config.disruptions = doctor_sim::Disruptions::typical();
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
fn utilisation_and_fault_rates_match_the_assumptions() {
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
fn tests_detect_faults_at_about_the_assumed_rate() {
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
        let (mut detected, mut runs_done) = (0, 0);
        for _ in 0..10 {
            let runs: Vec<_> = (1..=60).map(|number| bench.submit(&format!("node{number:03}"), tests)).collect();
            bench.pass(Span::hours(2));
            for run in runs {
                let document = Document::open(&bench.documents(run)[0], &key()).unwrap();
                let healthy = if kind == FaultKind::SlowNic { "nic_bandwidth" } else { "wrong_values" };
                let text = format!("{:?}", document.tests.last().unwrap().probes);
                runs_done += 1;
                detected += u32::from(is_detected(kind, &text, healthy));
            }
        }
        let rate = f64::from(detected) / f64::from(runs_done);
        assert!((rate - chance).abs() < 0.06, "{kind} by {tests:?}: {rate} instead of {chance}");
    }
}

/// Whether a test's output shows the fault, without our classification.
fn is_detected(kind: FaultKind, text: &str, metric: &str) -> bool {
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
