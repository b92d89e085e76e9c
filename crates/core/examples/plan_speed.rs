//! How long planning takes: from scratch, and after one event. Run it in release mode.
//!
//! `cargo run --release -p doctor-core --example plan_speed [NODES [TESTS]]`

#![expect(clippy::disallowed_methods, reason = "this measures time; it is no part of the pure crate")]

use std::time::{Duration, Instant};

use doctor_core::{
    ids::IdSource,
    node::Occupancy,
    plan::{Planner, fleet, plan},
    time::Span,
};

fn main() {
    let mut arguments = std::env::args().skip(1).map_while(|text| text.parse().ok());
    let (nodes, tests) = (arguments.next().unwrap_or(100_000), arguments.next().unwrap_or(10));
    let snapshot = fleet::snapshot(nodes, tests);

    let cold: Vec<Duration> = (0..15)
        .map(|_| {
            let mut ids = IdSource::new(1);
            let begin = Instant::now();
            let plan = plan(&snapshot, &mut ids);
            let took = begin.elapsed();
            assert!(!plan.actions.is_empty() && plan.passed_over.len() + plan.actions.len() >= nodes);
            took
        })
        .collect();

    let mut planner = Planner::new(snapshot.clone());
    let mut ids = IdSource::new(1);
    planner.plan(snapshot.at, &mut ids);
    let events: Vec<Duration> = (0..1000_usize)
        .map(|n| {
            let mut record = planner.snapshot().nodes[n * 7919 % nodes].clone();
            record.node.occupancy = match record.node.occupancy {
                Occupancy::Free => Occupancy::Busy { by: "user job".into() },
                _ => Occupancy::Free,
            };
            let at = snapshot.at.plus(Span::from_millis(n as i64));
            let begin = Instant::now();
            planner.set_node(record);
            let plan = planner.plan(at, &mut ids);
            let took = begin.elapsed();
            assert!(plan.passed_over.len() < 1000 + nodes / 10);
            took
        })
        .collect();

    report("from scratch", cold);
    report("after one event", events);
}

fn report(what: &str, mut took: Vec<Duration>) {
    took.sort();
    let (middle, worst) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{what}: median {:.3} ms, worst {:.3} ms", ms(middle), ms(worst));
}

fn ms(took: Duration) -> f64 {
    took.as_secs_f64() * 1000.0
}
