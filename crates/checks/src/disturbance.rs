//! What disturbs a deep test: another process on its GPUs, load on the processors, load on the mount.
//!
//! Wrong values fail beside any other process. Rates do not: those of a GPU that another process uses are renamed, so
//! that no rule reads them, and the result is inconclusive. Load on processors or on a mount is recorded as an event;
//! classification then does not judge rates that are too low.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, Metric, ProbeFailure, Unit};
use serde::{Deserialize, Serialize};

use crate::document::Measurements;

/// A process that holds less memory of a GPU than this, and uses less of its time than [`MIN_GPU_PERCENT`], is no
/// disturbance: monitoring holds none, an idle display server a few MiB, and the smallest CUDA context more than 100.
pub const MIN_GPU_BYTES: u64 = 16 << 20;
pub const MIN_GPU_PERCENT: u32 = 2;

/// GPU memory in use before the test, where the driver does not show whose it is.
pub const MIN_UNLISTED_GPU_BYTES: u64 = 512 << 20;

/// The share of all processors that other processes may use.
pub const MAX_HOST_PERCENT: f64 = 20.0;

/// Limits for other processes on a mount: the share of time in which its disk is busy before the test, the bytes per
/// second before and during the test, and their share of all bytes during the test.
pub const MAX_DISK_BUSY_PERCENT: f64 = 30.0;
pub const MAX_MOUNT_BYTES_PER_S: f64 = 10e6;
pub const MAX_MOUNT_SHARE_PERCENT: f64 = 10.0;

/// How long the load on processors and mounts is measured before a test.
pub const WINDOW_MILLIS: u64 = 500;

/// Precedes the names of rates that are not judged.
pub const WITHHELD_PREFIX: &str = "disturbed_";

/// Counts that depend on what else runs on the GPU. All other counts are of values.
const WITHHELD_COUNTS: [&str; 1] = ["layers_multiprocessors_missed"];

/// Events that are about time and not about values.
const WITHHELD_EVENTS: [&str; 2] = ["multiprocessor-slow", "collective-hung"];

/// One part that another process used while it was tested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disturbance {
    /// A GPU, a mount, or the node for its processors.
    pub entity: Entity,
    /// Program and owner, the same in every run.
    pub disturber: String,
    /// The process and its owner, for people.
    pub by: String,
    /// What it did, for people.
    pub text: String,
}

/// When a part was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Before,
    During,
}

impl Phase {
    pub const fn word(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::During => "during",
        }
    }
}

/// Whose rates a test measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RatesOf {
    /// Each GPU by itself, and links between two.
    EachGpu,
    /// All GPUs together.
    AllGpus,
}

impl Disturbance {
    pub fn event(&self) -> Event {
        Event::disturbed(self.entity.clone(), &self.disturber, self.text.clone())
    }

    fn is_of_gpu(&self) -> bool {
        self.entity.kind == EntityKind::Gpu
    }
}

/// Adds disturbances to the measurements of a test, and withholds the rates of disturbed GPUs.
pub fn apply(measurements: &mut Measurements, disturbances: &[Disturbance], rates: RatesOf) {
    let tested = match rates {
        RatesOf::EachGpu => tested_gpus(measurements),
        RatesOf::AllGpus => Vec::new(),
    };
    let concerns = |disturbance: &&Disturbance| {
        !disturbance.is_of_gpu() || tested.is_empty() || tested.contains(&disturbance.entity)
    };
    let disturbances: Vec<&Disturbance> = disturbances.iter().filter(concerns).collect();
    measurements.events.extend(disturbances.iter().map(|disturbance| disturbance.event()));
    let of_gpus: Vec<&Disturbance> = disturbances.into_iter().filter(|disturbance| disturbance.is_of_gpu()).collect();
    if of_gpus.is_empty() {
        return;
    }
    withhold(measurements, |entity| {
        rates == RatesOf::AllGpus || of_gpus.iter().any(|disturbance| is_part_of(entity, &disturbance.entity))
    });
    // It comes first, because it explains other failures, such as too little memory.
    measurements.failures.insert(0, failure(&of_gpus));
}

/// Withholds all rates, because another node of the same run was disturbed.
pub fn apply_from_other_node(measurements: &mut Measurements, node: &str, disturbances: &[Disturbance]) {
    let of_gpus: Vec<&Disturbance> = disturbances.iter().filter(|disturbance| disturbance.is_of_gpu()).collect();
    if !of_gpus.is_empty() {
        withhold(measurements, |_| true);
        let ProbeFailure { kind, text } = failure(&of_gpus);
        measurements.failures.insert(0, ProbeFailure::new(kind, format!("node {node}: {text}")));
    }
    let others = disturbances.iter().filter(|disturbance| !disturbance.is_of_gpu());
    measurements.events.extend(others.map(|disturbance| Event {
        text: format!("node {node}: {}", disturbance.text),
        // It is repeated only on its own node.
        key: None,
        ..disturbance.event()
    }));
}

/// Returns the GPUs that appear in measurements: a process on another one does not matter.
fn tested_gpus(measurements: &Measurements) -> Vec<Entity> {
    let entities = measurements.metrics.iter().map(|metric| &metric.entity);
    let entities = entities.chain(measurements.events.iter().map(|event| &event.entity));
    entities.filter(|entity| entity.kind == EntityKind::Gpu).cloned().collect()
}

/// Whether a part is this GPU or a link to it.
fn is_part_of(entity: &Entity, gpu: &Entity) -> bool {
    entity == gpu || (entity.kind == EntityKind::Link && entity.id.contains(&gpu.id))
}

fn withhold(measurements: &mut Measurements, concerns: impl Fn(&Entity) -> bool) {
    for metric in measurements.metrics.iter_mut().filter(|metric| concerns(&metric.entity)) {
        if is_rate(metric) && !metric.name.starts_with(WITHHELD_PREFIX) {
            metric.name = format!("{WITHHELD_PREFIX}{}", metric.name);
        }
    }
    let is_withheld = |event: &Event| WITHHELD_EVENTS.contains(&event.code.as_str()) && concerns(&event.entity);
    measurements.events.retain(|event| !is_withheld(event));
}

fn is_rate(metric: &Metric) -> bool {
    metric.unit != Unit::Count || WITHHELD_COUNTS.contains(&metric.name.as_str())
}

/// Returns the failure that makes the result inconclusive: each process once, with its GPUs.
fn failure(of_gpus: &[&Disturbance]) -> ProbeFailure {
    let mut by_process: Vec<(&str, Vec<String>)> = Vec::new();
    for disturbance in of_gpus {
        let gpu = disturbance.entity.to_string();
        match by_process.iter_mut().find(|(by, _)| *by == disturbance.by) {
            Some((_, gpus)) => gpus.push(gpu),
            None => by_process.push((&disturbance.by, vec![gpu])),
        }
    }
    let named = by_process.iter().map(|(by, gpus)| format!("{by} used {}", gpus.join(", "))).collect::<Vec<_>>();
    let text = format!("{}; rates measured meanwhile are not judged", named.join("; "));
    ProbeFailure::new(FailureKind::Disturbed, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "0000:18:00.0";
    const SECOND: &str = "0000:28:00.0";

    fn gpu(bus: &str) -> Entity {
        Entity::new(EntityKind::Gpu, bus)
    }

    fn python_on(bus: &str) -> Disturbance {
        Disturbance {
            entity: gpu(bus),
            disturber: "python3 of uid 1000".to_owned(),
            by: "python3 (pid 7, user ann)".to_owned(),
            text: "used by python3 (pid 7, user ann): 3.0 GiB".to_owned(),
        }
    }

    fn busy_host() -> Disturbance {
        Disturbance { entity: Entity::node(), text: "busy".to_owned(), ..python_on(FIRST) }
    }

    fn measured() -> Measurements {
        let rate = |bus: &str| Metric::new("gemm_bf16_flop_per_s", gpu(bus), 1e14, Unit::FlopPerSecond);
        let link = Entity::new(EntityKind::Link, format!("{FIRST}-{SECOND}"));
        let metrics = vec![
            rate(FIRST),
            rate(SECOND),
            Metric::count("gemm_bf16_wrong_rows", gpu(FIRST), 1.0),
            Metric::count("layers_multiprocessors_missed", gpu(FIRST), 1.0),
            Metric::new("p2p_bytes_per_s", link, 1e9, Unit::BytesPerSecond),
        ];
        let events = vec![
            Event::seen("product-wrong", gpu(FIRST), "row 3"),
            Event::seen("multiprocessor-slow", gpu(FIRST), "SM 7"),
            Event::seen("multiprocessor-slow", gpu(SECOND), "SM 9"),
        ];
        Measurements { metrics, events, failures: Vec::new() }
    }

    fn names(measurements: &Measurements) -> Vec<&str> {
        measurements.metrics.iter().map(|metric| metric.name.as_str()).collect()
    }

    #[test]
    fn rates_of_a_disturbed_gpu_and_its_links_are_withheld_and_its_values_are_not() {
        let mut all = measured();
        apply(&mut all, &[python_on(FIRST)], RatesOf::EachGpu);
        assert_eq!(
            names(&all),
            [
                "disturbed_gemm_bf16_flop_per_s",
                "gemm_bf16_flop_per_s",
                "gemm_bf16_wrong_rows",
                "disturbed_layers_multiprocessors_missed",
                "disturbed_p2p_bytes_per_s",
            ]
        );
        let codes: Vec<_> = all.events.iter().map(|event| (event.code.as_str(), event.entity.id.as_str())).collect();
        assert_eq!(codes, [("product-wrong", FIRST), ("multiprocessor-slow", SECOND), ("disturbed", FIRST)]);
        assert_eq!(all.failures[0].kind, FailureKind::Disturbed);
        assert_eq!(
            all.failures[0].text,
            "python3 (pid 7, user ann) used gpu:0000:18:00.0; rates measured meanwhile are not judged"
        );
        assert_eq!(all.events[2].key.as_deref(), Some("python3 of uid 1000"));
    }

    #[test]
    fn a_process_on_several_gpus_is_named_once_and_one_on_an_untested_gpu_not_at_all() {
        let mut all = measured();
        apply(&mut all, &[python_on(FIRST), python_on(SECOND), python_on("0000:99:00.0")], RatesOf::EachGpu);
        assert_eq!(all.failures.len(), 1);
        assert!(all.failures[0].text.starts_with("python3 (pid 7, user ann) used gpu:0000:18:00.0, gpu:0000:28:00.0;"));
        let mut all = measured();
        apply(&mut all, &[python_on("0000:99:00.0")], RatesOf::EachGpu);
        assert_eq!(all, measured());
    }

    #[test]
    fn rates_of_all_gpus_together_are_withheld_for_one_disturbed_gpu() {
        let node = Metric::new("nccl_busbw_bytes_per_s", Entity::node(), 1e9, Unit::BytesPerSecond);
        let mut all = Measurements { metrics: vec![node], ..Measurements::default() };
        apply(&mut all, &[python_on(FIRST)], RatesOf::AllGpus);
        assert_eq!(names(&all), ["disturbed_nccl_busbw_bytes_per_s"]);
    }

    #[test]
    fn load_on_the_host_withholds_nothing_by_itself() {
        let mut all = measured();
        apply(&mut all, &[busy_host()], RatesOf::EachGpu);
        assert_eq!(names(&all), names(&measured()));
        assert!(all.failures.is_empty() && all.events.last().is_some_and(Event::is_disturbance));
    }

    #[test]
    fn a_disturbance_of_another_node_withholds_rates_here_and_is_not_counted_here() {
        let mut all = measured();
        apply_from_other_node(&mut all, "n2", &[python_on(FIRST), busy_host()]);
        assert!(names(&all).iter().filter(|name| name.starts_with(WITHHELD_PREFIX)).count() == 4, "{all:?}");
        assert!(all.failures[0].text.starts_with("node n2: python3"), "{all:?}");
        let disturbed: Vec<_> = all.events.iter().filter(|event| event.is_disturbance()).collect();
        assert_eq!(
            (disturbed.len(), disturbed[0].key.as_deref(), disturbed[0].text.as_str()),
            (1, None, "node n2: busy")
        );
    }
}
