//! The tests of the simulated cluster: three deep ones, and the readings of the nodes' agents.
//!
//! They are checks like any other. The output of a simulated node passes through the production parsing and
//! classification; only the numbers are simulated.

use doctor_checks::{Catalogue, Check, Depth, Params, Spec, interpret_measurements, probe::Probe};
use doctor_core::{
    ids::{CheckId, Sku},
    observation::{EntityKind, Unit},
    profile::{Profile, ProfileFile, Profiles},
    time::Span,
};

pub(crate) const STORAGE: &str = "storage";
pub(crate) const DL: &str = "dl";
pub(crate) const NCCL: &str = "nccl";
pub(crate) const GPU_HEALTH: &str = "gpu-health";

/// The number of GPUs, and of network cards, of a simulated node.
pub(crate) const PARTS: u8 = 8;

/// One metric of a simulated test.
#[derive(Debug)]
pub(crate) struct MetricRow {
    pub(crate) name: &'static str,
    /// The entity it is about; GPUs and network cards are measured one by one.
    pub(crate) entity: EntityKind,
    pub(crate) id: &'static str,
    pub(crate) unit: Unit,
    /// The mean value on a healthy machine.
    pub(crate) expect: f64,
    /// Whether the value has noise; a count of errors has none.
    pub(crate) noisy: bool,
}

const fn row(name: &'static str, entity: EntityKind, unit: Unit, expect: f64) -> MetricRow {
    MetricRow { name, entity, id: "", unit, expect, noisy: true }
}

const fn errors(name: &'static str, entity: EntityKind) -> MetricRow {
    MetricRow { name, entity, id: "", unit: Unit::Count, expect: 0.0, noisy: false }
}

const fn mount(name: &'static str, unit: Unit, expect: f64) -> MetricRow {
    MetricRow { name, entity: EntityKind::Mount, id: "/data", unit, expect, noisy: true }
}

static STORAGE_METRICS: [MetricRow; 3] = [
    mount("storage_read", Unit::BytesPerSecond, 5.0e9),
    mount("storage_write", Unit::BytesPerSecond, 3.0e9),
    mount("storage_operations", Unit::OperationsPerSecond, 4.0e5),
];
static DL_METRICS: [MetricRow; 4] = [
    row("gemm_rate", EntityKind::Gpu, Unit::FlopPerSecond, 7.8e14),
    row("hbm_bandwidth", EntityKind::Gpu, Unit::BytesPerSecond, 4.3e12),
    row("gpu_temperature", EntityKind::Gpu, Unit::Celsius, 66.0),
    errors("wrong_values", EntityKind::Gpu),
];
static NCCL_METRICS: [MetricRow; 3] = [
    row("allreduce_bandwidth", EntityKind::Node, Unit::BytesPerSecond, 4.8e11),
    row("nic_bandwidth", EntityKind::Nic, Unit::BytesPerSecond, 4.6e10),
    errors("wrong_sums", EntityKind::Node),
];
static GPU_HEALTH_METRICS: [MetricRow; 2] = [
    MetricRow { name: "gpus", entity: EntityKind::Node, id: "", unit: Unit::Count, expect: 8.0, noisy: false },
    errors("ecc_uncorrected", EntityKind::Node),
];

/// Returns the metrics of a test; none if the test is unknown.
pub(crate) fn metrics_of(test: &str) -> &'static [MetricRow] {
    match test {
        STORAGE => &STORAGE_METRICS,
        DL => &DL_METRICS,
        NCCL => &NCCL_METRICS,
        GPU_HEALTH => &GPU_HEALTH_METRICS,
        _ => &[],
    }
}

/// Returns the checks of the simulated cluster, which replace those built into the program.
pub fn catalogue() -> Catalogue {
    Catalogue::new(CHECKS)
}

/// Returns the machine type of the simulated nodes.
pub fn sku() -> Sku {
    Sku::new("sim-8gpu").expect("a fixed name that the type accepts")
}

/// Returns the profile of a healthy simulated machine of this type.
pub fn profile(sku: Sku) -> Profile {
    let expect = [STORAGE, DL, NCCL, GPU_HEALTH]
        .into_iter()
        .flat_map(metrics_of)
        .filter(|metric| metric.expect > 0.0)
        .map(|metric| (metric.name.to_owned(), metric.expect.into()))
        .collect();
    Profile { sku, version: 1, expect }
}

/// Returns the profile as a file. It has no detection rules: simulated machines name their type.
pub fn profile_file() -> ProfileFile {
    let Profile { sku, version, expect } = profile(sku());
    ProfileFile { version, expect, ..ProfileFile::machine(sku) }
}

/// Returns the profiles of a world with the standard machine type only.
pub fn profiles() -> Profiles {
    Profiles::new([profile(sku())])
}

/// Returns the usual duration of a test.
pub(crate) fn typical_value(test: &CheckId) -> Option<Span> {
    CHECKS.iter().find(|check| check.spec.id == test.as_str()).map(|check| check.spec.typical_duration)
}

/// Returns the probe of a simulated test.
pub(crate) fn probe_of(test: &str) -> Option<Probe> {
    let check = CHECKS.iter().find(|check| check.spec.id == test)?;
    (check.probes)(&Params::new()).into_iter().next()
}

/// Returns a simulated test.
///
/// # Panics
/// If there is no such test.
pub(crate) fn check(id: &'static str) -> &'static Check {
    CHECKS.iter().find(|check| check.spec.id == id).expect("one of the constants of this module")
}

const CUTOFF: Span = Span::days(7);

static CHECKS: [Check; 4] = [
    Check {
        spec: Spec {
            id: STORAGE,
            title: "throughput of shared storage (simulated)",
            depth: Depth::Deep,
            exclusive: true,
            every: Span::minutes(5),
            cutoff: CUTOFF,
            limit: Span::minutes(30),
            typical_duration: Span::minutes(10),
            usual_by: None,
            shares: &["/data"],
            shared_param: None,
            opt_in: false,
            access: &[],
        },
        page: include_str!("pages/storage.md"),
        rules: include_str!("pages/storage.toml"),
        probes: |_| vec![builtin(STORAGE)],
        interpret: interpret_measurements,
    },
    Check {
        spec: Spec {
            id: DL,
            title: "speed and correctness of GPU computation (simulated)",
            depth: Depth::Deep,
            exclusive: true,
            every: Span::minutes(5),
            cutoff: CUTOFF,
            limit: Span::minutes(30),
            typical_duration: Span::minutes(10),
            usual_by: None,
            shares: &[],
            shared_param: None,
            opt_in: false,
            access: &[],
        },
        page: include_str!("pages/dl.md"),
        rules: include_str!("pages/dl.toml"),
        probes: |_| vec![builtin(DL)],
        interpret: interpret_measurements,
    },
    Check {
        spec: Spec {
            id: NCCL,
            title: "bandwidth and correctness of GPU and network traffic (simulated)",
            depth: Depth::Deep,
            exclusive: true,
            every: Span::minutes(5),
            cutoff: CUTOFF,
            limit: Span::minutes(30),
            typical_duration: Span::minutes(10),
            usual_by: None,
            shares: &[],
            shared_param: None,
            opt_in: false,
            access: &[],
        },
        page: include_str!("pages/nccl.md"),
        rules: include_str!("pages/nccl.toml"),
        probes: |_| vec![builtin(NCCL)],
        interpret: interpret_measurements,
    },
    Check {
        spec: Spec {
            id: GPU_HEALTH,
            title: "errors of GPUs, links and memory that the agent reads (simulated)",
            depth: Depth::Quick,
            exclusive: false,
            every: Span::minutes(5),
            cutoff: CUTOFF,
            limit: Span::minutes(2),
            typical_duration: Span::from_secs(5),
            usual_by: None,
            shares: &[],
            shared_param: None,
            opt_in: false,
            access: &[],
        },
        page: include_str!("pages/gpu-health.md"),
        rules: include_str!("pages/gpu-health.toml"),
        probes: |_| vec![builtin(GPU_HEALTH)],
        interpret: interpret_measurements,
    },
];

fn builtin(test: &str) -> Probe {
    Probe::Builtin { test: test.to_owned(), args: Vec::new(), timeout: Span::minutes(30) }
}

#[cfg(test)]
mod proofs {
    use doctor_core::policy::{Policy, When};

    use super::*;

    #[test]
    fn every_rule_parses_and_refers_to_an_existing_metric_or_event() {
        let rules = catalogue().rules(&Policy::built_in()).unwrap();
        assert!(rules.len() >= 12, "{}", rules.len());
        for rule in rules {
            let metrics = metrics_of(rule.check.as_str());
            match &rule.when {
                // The planner creates the events of multi-node trials.
                When::Event(code) if code.as_str().ends_with("-by-trials") => {}
                When::Event(code) | When::EventsWithin { code, .. } => assert!(
                    crate::FaultKind::ALL.iter().any(|kind| matches!(
                        kind.profile().symptom,
                        crate::fault::Symptom::Agent { event, .. } if event == code.as_str()
                    )),
                    "{code}"
                ),
                of_metric => {
                    let metric = of_metric.metric().unwrap();
                    assert!(metrics.iter().any(|row| row.name == metric), "{metric}");
                }
            }
        }
    }

    #[test]
    fn every_metric_and_every_event_has_a_rule() {
        let rules = catalogue().rules(&Policy::built_in()).unwrap();
        for test in [STORAGE, DL, NCCL, GPU_HEALTH] {
            for metric in metrics_of(test) {
                let judged = rules.iter().any(|rule| {
                    matches!(&rule.when, When::Above { metric: name, .. } | When::Below { metric: name, .. }
                        | When::BelowProfile { metric: name, .. } if name == metric.name)
                });
                assert!(judged, "{}", metric.name);
            }
        }
        for kind in crate::FaultKind::ALL {
            if let crate::fault::Symptom::Agent { event, .. } = kind.profile().symptom {
                assert!(rules.iter().any(|rule| matches!(&rule.when, When::Event(code) if code.as_str() == event)));
            }
        }
    }
}
