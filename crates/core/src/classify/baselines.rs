//! Baselines for classification: the time of the observation, the node's earlier results and the results of other nodes
//! of its type.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    hardware_class::HardwareClass,
    ids::CheckId,
    measured_count::GPU_COUNT,
    observation::{Entity, Observation},
    policy::{Rule, When},
    time::Timestamp,
};

/// Earlier results of one check. A rule that needs a value missing here decides nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Baselines {
    /// Time of the observation, by the clock that dated its events.
    pub at: Option<Timestamp>,
    /// By metric and part: earlier values on this machine, newest first.
    pub own_values: BTreeMap<(String, Entity), Vec<f64>>,
    /// By metric: the newest value of each other node of the same type; for a node with several parts, their median.
    pub peer_values: BTreeMap<String, Vec<f64>>,
    /// By metric: the count or size on which other nodes of the same machine type agree. Not zero.
    pub agreed: BTreeMap<String, f64>,
    /// By metric: the count or size that the node had when it was last accepted, including by this observation: a
    /// higher value is accepted at once. See [`crate::measured_count`].
    pub accepted: BTreeMap<String, f64>,
}

impl Baselines {
    /// Baselines with only the time known.
    pub fn at(at: Timestamp) -> Self {
        Self { at: Some(at), ..Self::default() }
    }

    /// Returns the counts and sizes in an observation: each metric that a rule of this check compares for equality
    /// (`not_as_profile`), for several parts their median. A check that found nothing of its hardware class (a code
    /// such as `no-nvme`) measured zero. A part that could not be read makes all of them unknown.
    pub fn counts_in(rules: &[Rule], check: &CheckId, observation: &Observation) -> Vec<(String, f64)> {
        let names: BTreeSet<&str> =
            rules.iter().filter(|rule| rule.check == *check).filter_map(|rule| count_metric(&rule.when)).collect();
        let value = |name: &str| match observation {
            Observation::Measured { metrics, failures, .. } if failures.is_empty() => {
                let values: Vec<f64> =
                    metrics.iter().filter(|metric| metric.name == name).map(|metric| metric.value).collect();
                median(&values)
            }
            Observation::NotApplicable(why) => HardwareClass::from_code(why.code.as_str()).map(|_| 0.0),
            Observation::Measured { .. } | Observation::Failed(_) => None,
        };
        names.into_iter().filter_map(|name| Some((name.to_owned(), value(name)?))).collect()
    }

    /// Returns whether the node is known to have had GPUs.
    pub fn remembers_gpus(&self) -> bool {
        self.accepted.get(GPU_COUNT).is_some_and(|count| *count > 0.0)
    }

    pub(super) fn own_values_of(&self, metric: &str, entity: &Entity) -> &[f64] {
        self.own_values.get(&(metric.to_owned(), entity.clone())).map_or(&[], Vec::as_slice)
    }

    pub(super) fn peer_values_of(&self, metric: &str) -> &[f64] {
        self.peer_values.get(metric).map_or(&[], Vec::as_slice)
    }
}

/// The baselines that rules need, so that nothing else is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BaselineNeeds {
    /// Number of earlier results of the node; zero if none.
    pub own_results: u32,
    /// Metrics for which the newest values of other nodes are needed.
    pub peer_metrics: BTreeSet<String>,
    /// Whether a rule compares a count or a size (`not_as_profile`).
    pub counts: bool,
}

/// Earlier results over which the node's own median is taken.
const OWN_WINDOW: u32 = 20;

impl BaselineNeeds {
    /// Returns the baselines that the rules of this check need.
    pub fn for_check(rules: &[Rule], check: &CheckId) -> Self {
        let mut needs = Self::default();
        for rule in rules.iter().filter(|rule| rule.check == *check) {
            needs.add(&rule.when);
        }
        needs
    }

    /// Returns the baselines that the rules of any check need.
    pub fn for_all_checks(rules: &[Rule]) -> Self {
        let mut needs = Self::default();
        for rule in rules {
            needs.add(&rule.when);
        }
        needs
    }

    fn add(&mut self, when: &When) {
        match when {
            When::BelowPeers { metric, .. } => {
                self.peer_metrics.insert(metric.clone());
            }
            When::BelowOwn { at_least, .. } => self.own_results = self.own_results.max((*at_least).max(OWN_WINDOW)),
            When::NOfLastM { when, last, .. } => {
                self.own_results = self.own_results.max(last - 1);
                self.add(when);
            }
            When::NotProfile { .. } => self.counts = true,
            When::Above { .. }
            | When::Below { .. }
            | When::BelowProfile { .. }
            | When::Event(_)
            | When::EventsWithin { .. } => {}
        }
    }

    /// Returns whether no earlier result is needed.
    pub fn is_empty(&self) -> bool {
        self.own_results == 0 && self.peer_metrics.is_empty()
    }
}

/// Returns the metric of a rule that compares a count or a size.
fn count_metric(when: &When) -> Option<&str> {
    match when {
        When::NotProfile { metric } => Some(metric),
        When::NOfLastM { when, .. } => count_metric(when),
        When::Above { .. }
        | When::Below { .. }
        | When::BelowProfile { .. }
        | When::BelowPeers { .. }
        | When::BelowOwn { .. }
        | When::Event(_)
        | When::EventsWithin { .. } => None,
    }
}

/// Returns the median of the finite values; `None` if there are none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        observation::{CodedReason, FailureKind, Metric, ProbeFailure},
        reason::ReasonCode,
    };

    fn rules() -> Vec<Rule> {
        let rule = |id: &str, check: &str, condition: &str| {
            let text = format!(
                "id = \"{id}\"\ncheck = \"{check}\"\nmetric = \"{id}\"\n{condition}\nseverity = \"monitor\"\n\
                 reason = \"bad\"\ntext = \"x\"\n"
            );
            toml::from_str::<Rule>(&text).unwrap()
        };
        vec![
            rule("gpu_count", "gpu-count", "not_as_profile = true"),
            rule("cpu_cores", "cpu-count", "not_as_profile = true"),
            rule("cpu_sockets", "cpu-count", "not_as_profile = true\nn_of_last_m = [2, 3]"),
            rule("cpu_mhz", "cpu-count", "below_percent_of_profile = 90.0"),
            rule("nvlink_count", "nvlink-count", "not_as_profile = true"),
        ]
    }

    #[test]
    fn counts_are_the_metrics_that_rules_compare_for_equality() {
        let counts = |check: &str, observation: Observation| {
            let found = Baselines::counts_in(&rules(), &CheckId::new(check).unwrap(), &observation);
            found.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
        };
        let node = |name: &str, value| Metric::count(name, Entity::node(), value);
        let gpu = |id: &str, value| Metric::count("nvlink_count", format!("gpu:{id}").parse().unwrap(), value);
        let measured = |metrics| Observation::measured(metrics, Vec::new());
        let absent =
            |code| Observation::NotApplicable(CodedReason { code: ReasonCode::fixed(code), text: "none".to_owned() });
        let cpu = vec![node("cpu_cores", 96.0), node("cpu_sockets", 2.0), node("cpu_mhz", 3_000.0)];
        assert_eq!(counts("cpu-count", measured(cpu)), "cpu_cores 96, cpu_sockets 2");
        assert_eq!(counts("cpu-count", measured(vec![node("cpu_cores", 96.0)])), "cpu_cores 96");
        assert_eq!(counts("gpu-count", measured(vec![node("gpu_count", 0.0)])), "gpu_count 0");
        // One GPU with fewer links does not change what the machine has.
        let links = measured(vec![gpu("0", 18.0), gpu("1", 17.0), gpu("2", 18.0)]);
        assert_eq!(counts("nvlink-count", links), "nvlink_count 18");
        assert_eq!(counts("gpu-count", absent("no-gpu")), "gpu_count 0");
        assert_eq!(counts("gpu-count", absent("not-configured")), "");
        let failed = ProbeFailure::new(FailureKind::TimedOut, "no answer");
        assert_eq!(counts("gpu-count", Observation::Failed(failed.clone())), "");
        let metrics = vec![gpu("0", 18.0)];
        let partly = Observation::Measured { metrics, events: Vec::new(), failures: vec![failed] };
        assert_eq!(counts("nvlink-count", partly), "");
        assert_eq!(counts("other", measured(vec![node("gpu_count", 8.0)])), "");
    }

    #[test]
    fn a_node_is_remembered_to_have_had_gpus() {
        let accepted =
            |count: f64| Baselines { accepted: [(GPU_COUNT.to_owned(), count)].into(), ..Baselines::default() };
        assert!(accepted(8.0).remembers_gpus());
        assert!(!accepted(0.0).remembers_gpus() && !Baselines::default().remembers_gpus());
    }
}
