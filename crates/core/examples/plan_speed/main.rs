//! Measures planning: from scratch, and after one event. Run it in release mode. On Linux it also prints the CPU time
//! of one plan, which is the steadier number on a shared machine.
//!
//! `cargo run --release -p doctor-core --example plan_speed [NODES [TESTS]]`

#![expect(clippy::disallowed_methods, reason = "this measures time and is not part of the pure crate")]

mod fleet;

use std::time::{Duration, Instant};

use doctor_core::{
    ids::IdSource,
    node::Occupancy,
    plan::{Planner, plan},
    time::Span,
};

fn main() {
    let mut arguments = std::env::args().skip(1).map_while(|text| text.parse().ok());
    let (nodes, tests) = (arguments.next().unwrap_or(100_000), arguments.next().unwrap_or(10));
    let snapshot = fleet::snapshot(nodes, tests);

    let started = processor_time();
    let cold: Vec<Duration> = (0..15)
        .map(|_| {
            let mut ids = IdSource::new(1);
            let begin = Instant::now();
            let plan = plan(&snapshot, &mut ids);
            let elapsed = begin.elapsed();
            assert!(!plan.actions.is_empty() && plan.skipped.len() + plan.actions.len() >= nodes);
            elapsed
        })
        .collect();
    report("from scratch", cold, started);

    let mut planner = Planner::new(snapshot.clone());
    let mut ids = IdSource::new(1);
    planner.plan(snapshot.at, &mut ids);
    let started = processor_time();
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
            let elapsed = begin.elapsed();
            assert!(plan.skipped.len() < 1000 + nodes / 10);
            elapsed
        })
        .collect();

    report("after one event", events, started);
}

/// Returns the CPU time of this thread, if the system reports it.
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

fn report(what: &str, mut durations: Vec<Duration>, started: Option<Duration>) {
    let processor = processor_time().zip(started).map(|(now, started)| (now - started) / durations.len() as u32);
    let processor = processor.map_or_else(|| "unknown".to_owned(), |each| format!("{:.3} ms", ms(each)));
    durations.sort();
    let (best, middle, worst) = (durations[0], durations[durations.len() / 2], durations[durations.len() - 1]);
    let [best, middle, worst] = [best, middle, worst].map(ms);
    println!("{what}: best {best:.3} ms, median {middle:.3} ms, worst {worst:.3} ms; processor {processor}");
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
