//! `doctor-node profile learn`: derives a profile from a machine that is known to be good.
//!
//! Only metrics that some rule compares with a profile are learnt: other current values (temperatures, free space) are
//! no expectation. The command refuses a machine that fails a check. What is learnt is measured: `[expect.measured]`.

use std::{collections::BTreeMap, fmt::Write as _};

use doctor_core::{
    ids::Sku,
    observation::Observation,
    policy::{Rule, When},
    profile::{Expected, ProfileFile, Signs},
    sku_detection::MachineFacts,
    time::Timestamp,
};

use crate::check::CheckObservation;

/// A new profile.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnedProfile {
    pub file: ProfileFile,
    /// What could not be learnt, and why.
    pub missing: Vec<String>,
}

/// Extracts all metrics that the rules would compare with a profile. `chip` is that of this machine's GPUs, if known.
pub fn learn(
    sku: Sku,
    chip: Option<Sku>,
    facts: &MachineFacts,
    observations: &[CheckObservation],
    rules: &[Rule],
    at: Timestamp,
) -> LearnedProfile {
    let mut expect = BTreeMap::new();
    let mut missing = Vec::new();
    for rule in rules {
        let (name, exact) = match &rule.when {
            When::NotProfile { metric } => (metric, true),
            When::BelowProfile { metric, of: None, .. } => (metric, false),
            _ => continue,
        };
        let Some(observed) = observations.iter().find(|observed| observed.check == rule.check) else { continue };
        let values = match &observed.observation {
            Observation::Measured { metrics, .. } => {
                metrics.iter().filter(|metric| metric.name == *name).map(|metric| metric.value).collect::<Vec<_>>()
            }
            Observation::NotApplicable(reason) => {
                missing.push(format!("{name}: {} does not apply here: {}", rule.check, reason.text));
                continue;
            }
            Observation::Failed(failure) => {
                missing.push(format!("{name}: {} could not measure: {}", rule.check, failure.text));
                continue;
            }
        };
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if values.is_empty() || !min.is_finite() || !max.is_finite() {
            missing.push(format!("{name}: {} measured no value", rule.check));
        } else if exact && max - min > max.abs() * 1e-9 {
            missing.push(format!("{name}: components differ ({min} to {max}), a profile needs one value"));
        } else {
            expect.insert(name.clone(), Expected::measured(min));
        }
    }
    let source = format!("learnt from a machine at {at}");
    let file = ProfileFile { chip, source, expect, detect: signs(facts), ..ProfileFile::machine(sku) };
    LearnedProfile { file, missing }
}

/// Returns the most specific signs of this machine, and its GPUs.
fn signs(facts: &MachineFacts) -> Signs {
    let mut ids = facts.gpu_ids.clone();
    ids.sort_unstable();
    ids.dedup();
    // All virtual machines of a cloud share one product name.
    let product = facts.product.clone().filter(|_| facts.cloud().is_none());
    Signs {
        instance_types: facts.instance_type.iter().cloned().collect(),
        products: product.into_iter().collect(),
        gpus: u32::try_from(facts.gpu_ids.len()).ok().filter(|count| *count > 0),
        gpu_ids: ids,
        gpu_names: Vec::new(),
    }
}

impl LearnedProfile {
    /// Returns the file's text, with the missing metrics as comments.
    ///
    /// # Errors
    /// If it cannot be serialised as TOML, which a profile always can.
    pub fn text(&self) -> Result<String, toml::ser::Error> {
        let mut text = String::from("# A profile of Cluster Doctor, learnt from one machine. Review it before use.\n");
        for missing in &self.missing {
            let _infallible = writeln!(text, "# Not learnt: {}", missing.replace('\n', " "));
        }
        text.push_str(&toml::to_string(&self.file)?);
        Ok(text)
    }
}

/// Returns the default name of a machine type: the cloud's or the firmware's, in lower case.
pub fn default_name(facts: &MachineFacts) -> Option<Sku> {
    let called = facts.instance_type.as_ref().or(facts.product.as_ref())?;
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_') { c.to_ascii_lowercase() } else { '-' };
    let name: String = called.trim().chars().map(plain).collect();
    Sku::new(name.trim_matches(['-', '.', '_'])).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{
        ids::CheckId,
        observation::{Entity, EntityKind, Metric},
        policy::Policy,
        time::Span,
    };

    fn seen(check: &str, metrics: Vec<Metric>) -> CheckObservation {
        let observation = Observation::measured(metrics, Vec::new());
        CheckObservation { check: CheckId::new(check).unwrap(), observation, duration: Span::ZERO }
    }

    fn rule(check: &str, metric: &str, how: &str) -> Rule {
        let text = format!(
            "[[rules]]\nid = \"r-{metric}\"\ncheck = \"{check}\"\nmetric = \"{metric}\"\n{how}\nseverity = \"monitor\"\n\
             reason = \"x\"\ntext = \"x\"\n"
        );
        Policy::with_site_settings(&text).unwrap().rules.remove(0)
    }

    #[test]
    fn only_metrics_that_rules_compare_are_learned() {
        let rules = [
            rule("a", "gpu_count", "not_as_profile = true"),
            rule("a", "mem", "below_percent_of_profile = 98.0"),
            rule("a", "rate", "below_percent_of_profile = 33.3\nprofile_metric = \"peak\""),
            rule("a", "heat", "above = 90.0"),
            rule("b", "links", "not_as_profile = true"),
        ];
        let gpu = |id: &str, value| Metric::count("links", Entity::new(EntityKind::Gpu, id), value);
        let observations = [
            seen(
                "a",
                vec![
                    Metric::count("gpu_count", Entity::node(), 8.0),
                    Metric::count("mem", Entity::node(), 100.0),
                    Metric::count("heat", Entity::node(), 40.0),
                    Metric::count("rate", Entity::node(), 7.0),
                ],
            ),
            seen("b", vec![gpu("0", 18.0), gpu("1", 17.0)]),
        ];
        let facts = MachineFacts {
            product: Some("Rack Server 9".to_owned()),
            gpu_ids: vec!["10de:2330".to_owned(); 8],
            ..MachineFacts::default()
        };
        let name = default_name(&facts).unwrap();
        assert_eq!(name.as_str(), "rack-server-9");
        let chip = Sku::new("h100-sxm").unwrap();
        let learned = learn(name, Some(chip), &facts, &observations, &rules, Timestamp::from_secs(0));
        assert_eq!(learned.file.expect.keys().collect::<Vec<_>>(), ["gpu_count", "mem"]);
        assert_eq!(learned.file.expect["mem"], Expected::measured(100.0));
        assert!(learned.missing[0].contains("17 to 18"), "{:?}", learned.missing);
        let text = learned.text().unwrap();
        assert!(text.contains("chip = \"h100-sxm\"") && text.contains("[expect.measured]"), "{text}");
        let read_back = ProfileFile::read(&text).unwrap();
        assert_eq!(read_back, learned.file);
        assert_eq!((read_back.detect.products.len(), read_back.detect.gpus), (1, Some(8)));
    }
}
