//! The output of simulated tests: values around the machine's profile, worse for detected faults.

use doctor_checks::{
    document::{Measurements, TestEvidence},
    probe::ProbeOutput,
};
use doctor_core::{
    observation::{Entity, EntityKind, Event, Metric},
    reason::ReasonCode,
    time::Timestamp,
};

use crate::{
    assumptions::Assumptions,
    fault::{Fault, Symptom},
    random::Stream,
    simulated_tests::{GPU_HEALTH, MetricRow, PARTS, metrics_of},
};

/// The metric that several nodes have in common.
const SHARED: &str = "allreduce_bandwidth";

/// Prints one test's measurements. `detected` are the machine's faults that this run of this test detects.
pub(crate) fn print(
    test: &str,
    detected: &[&Fault],
    at: Timestamp,
    noise: &mut Stream,
    assumptions: &Assumptions,
) -> ProbeOutput {
    let mut metrics = Vec::new();
    for row in metrics_of(test) {
        for part in 0..parts_of(row.entity) {
            let healthy = if row.noisy { deviating(row.expect, noise, assumptions) } else { row.expect };
            let value = detected.iter().fold(healthy, |value, fault| affected(value, test, row, part, fault));
            metrics.push(Metric { name: row.name.to_owned(), entity: entity_of(row, part), value, unit: row.unit });
        }
    }
    let events =
        if test == GPU_HEALTH { detected.iter().filter_map(|fault| event_of(fault, at)).collect() } else { vec![] };
    let stdout = serde_json::to_string(&Measurements { metrics, events, failures: Vec::new() })
        .expect("finite numbers and plain words have a JSON form");
    ProbeOutput::Ran { exit: Some(0), stdout, stderr: String::new() }
}

/// Replaces a shared measurement of several nodes with that of the slowest.
pub(crate) fn share<'a>(evidence: impl Iterator<Item = &'a mut TestEvidence>) {
    let read = |evidence: &'a mut TestEvidence| {
        let (_, ProbeOutput::Ran { stdout, .. }) = evidence.probes.first_mut()? else { return None };
        let measured = serde_json::from_str::<Measurements>(stdout).ok()?;
        Some((stdout, measured))
    };
    let mut all: Vec<(&mut String, Measurements)> = evidence.filter_map(read).collect();
    if all.len() < 2 {
        return;
    }
    let shared = |metric: &&Metric| metric.name == SHARED;
    let values = all.iter().flat_map(|(_, measured)| measured.metrics.iter().filter(shared)).map(|metric| metric.value);
    let Some(slowest) = values.reduce(f64::min) else { return };
    for (stdout, measured) in &mut all {
        for metric in measured.metrics.iter_mut().filter(|metric| metric.name == SHARED) {
            metric.value = slowest;
        }
        **stdout = serde_json::to_string(measured).expect("finite numbers and plain words have a JSON form");
    }
}

/// Prints the output of a test that cannot run because of this fault.
pub(crate) fn print_broken(fault: &Fault) -> ProbeOutput {
    ProbeOutput::Ran {
        exit: Some(1),
        stdout: String::new(),
        stderr: format!("simulated: cannot initialise device {}\n", fault.part),
    }
}

const fn parts_of(kind: EntityKind) -> u8 {
    match kind {
        EntityKind::Gpu | EntityKind::Nic => PARTS,
        EntityKind::Node
        | EntityKind::Link
        | EntityKind::Switch
        | EntityKind::Mount
        | EntityKind::Disk
        | EntityKind::Dimm
        | EntityKind::Service => 1,
    }
}

fn entity_of(row: &MetricRow, part: u8) -> Entity {
    match row.entity {
        EntityKind::Gpu | EntityKind::Nic => Entity::new(row.entity, part.to_string()),
        kind => Entity::new(kind, row.id),
    }
}

fn deviating(expect: f64, noise: &mut Stream, assumptions: &Assumptions) -> f64 {
    let value = expect * (1.0 + assumptions.noise * noise.normal());
    if noise.chance(assumptions.outlier) {
        value * (1.0 - noise.between(assumptions.outlier_depth / 3.0, assumptions.outlier_depth))
    } else {
        value
    }
}

fn affected(value: f64, test: &str, row: &MetricRow, part: u8, fault: &Fault) -> f64 {
    let here = parts_of(row.entity) == 1 || part == fault.part;
    match fault.kind.profile().symptom {
        Symptom::Slower { test: named, metric, factor: [low, high] } if here && named == test && metric == row.name => {
            value * (low + (high - low) * fault.depth)
        }
        Symptom::Higher { test: named, metric, by: [low, high] } if here && named == test && metric == row.name => {
            value + (low + (high - low) * fault.depth).round()
        }
        Symptom::Agent { event: "xid-79", .. } if row.name == "gpus" => value - 1.0,
        Symptom::Agent { event: "xid-48", .. } if row.name == "ecc_uncorrected" => value + 1.0,
        _ => value,
    }
}

fn event_of(fault: &Fault, at: Timestamp) -> Option<Event> {
    match fault.kind.profile().symptom {
        Symptom::Agent { event, entity, text } => Some(Event {
            code: ReasonCode::fixed(event),
            entity: Entity::new(entity, fault.part.to_string()),
            at: Some(at),
            text: text.to_owned(),
            key: None,
        }),
        Symptom::Slower { .. } | Symptom::Higher { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use doctor_checks::{Catalogue, Params};
    use doctor_core::{
        classify::classify,
        finding::Verdict,
        ids::{CheckId, NodeName},
        policy::{Policy, Rule},
    };

    use super::*;
    use crate::{
        fault::{Cure, FaultKind},
        random::{Purpose, Seed},
        simulated_tests::{catalogue, profile, sku},
    };

    fn fault(kind: FaultKind, depth: f64) -> Fault {
        Fault {
            kind,
            machine: 0,
            nth: 0,
            node: NodeName::new("n1").unwrap(),
            onset: Timestamp::from_secs(0),
            out_at_onset: false,
            cure: Cure::Repair,
            depth,
            part: 3,
            detection_draws: 0,
            shown: None,
            marked: None,
            ticket: None,
            cured: None,
            lost_node_hours: 0.0,
        }
    }

    fn verdict(catalogue: &Catalogue, rules: &[Rule], test: &str, output: ProbeOutput) -> Verdict {
        let id = CheckId::new(test).unwrap();
        let observation = (catalogue.get(&id).unwrap().interpret)(&Params::new(), &[output]);
        classify(rules, Some(&profile(sku())), &id, &observation).verdict
    }

    #[test]
    fn production_rules_pass_healthy_machines_and_fail_every_detected_fault() {
        let catalogue = catalogue();
        let rules = catalogue.rules(&Policy::built_in()).unwrap();
        let assumptions = Assumptions { outlier: 0.0, ..Assumptions::default() };
        let mut noise = Seed(1).stream(Purpose::Noise, 0, 0);
        let at = Timestamp::from_secs(0);
        for check in catalogue.iter() {
            for _ in 0..50 {
                let output = print(check.spec.id, &[], at, &mut noise, &assumptions);
                assert_eq!(verdict(&catalogue, &rules, check.spec.id, output), Verdict::Pass, "{}", check.spec.id);
            }
        }
        for kind in FaultKind::ALL {
            for depth in [0.0, 0.5, 1.0] {
                let fault = fault(*kind, depth);
                let output = print(kind.detecting_test(), &[&fault], at, &mut noise, &assumptions);
                assert_eq!(
                    verdict(&catalogue, &rules, kind.detecting_test(), output),
                    Verdict::Fail,
                    "{kind} at {depth}"
                );
            }
        }
    }

    #[test]
    fn a_test_that_cannot_run_is_inconclusive() {
        let catalogue = catalogue();
        let rules = catalogue.rules(&Policy::built_in()).unwrap();
        let output = print_broken(&fault(FaultKind::GpuOffBus, 0.5));
        assert_eq!(verdict(&catalogue, &rules, "dl", output), Verdict::Inconclusive);
    }
}
