//! What a check is: its page, its figures, its rules, its probes and its reading of them.

use std::collections::BTreeMap;

use doctor_core::{
    ids::CheckId,
    observation::Observation,
    policy::{Policy, Rule, TestPolicy, TestSettings},
    time::Span,
};

use crate::probe::{Probe, ProbeOutput};

/// Parameters of a check from the policy file, as written there.
pub type Params = BTreeMap<String, toml::Value>;

/// A check, entirely as data and pure functions.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    pub spec: Spec,
    /// The page for operators: what, why it matters, what to do.
    pub page: &'static str,
    /// Default rules, as `[[rules]]` of the policy file's form.
    pub rules: &'static str,
    pub probes: fn(&Params) -> Vec<Probe>,
    /// Outputs stand in the order of the probes. Pure.
    pub interpret: fn(&Params, &[ProbeOutput]) -> Observation,
}

/// The figures of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    pub id: &'static str,
    /// One line for tables.
    pub title: &'static str,
    pub depth: Depth,
    /// Whether it needs the node to itself.
    pub exclusive: bool,
    /// A conclusive result is good for this long.
    pub cutoff: Span,
    pub limit: Span,
    pub usual: Span,
    /// Shared things it loads by default.
    pub shares: &'static [&'static str],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Reads only; may run at any time.
    Quick,
    /// Loads the node.
    Deep,
}

/// The checks in force, with the site's settings laid over: what the planner, the classifier and the pages use.
#[derive(Debug, Clone)]
pub struct Catalogue {
    checks: Vec<Check>,
}

impl Catalogue {
    pub fn new(checks: impl IntoIterator<Item = Check>) -> Self {
        let mut checks: Vec<_> = checks.into_iter().collect();
        checks.sort_by_key(|check| check.spec.id);
        checks.dedup_by_key(|check| check.spec.id);
        Self { checks }
    }

    /// All checks built into this program.
    pub fn built_in() -> Self {
        Self::new(crate::CHECKS.iter().copied())
    }

    pub fn iter(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter()
    }

    pub fn get(&self, id: &CheckId) -> Option<&Check> {
        self.checks.iter().find(|check| check.spec.id == id.as_str())
    }

    /// Parameters of a check under this policy.
    pub fn params<'a>(&self, policy: &'a Policy, id: &CheckId) -> std::borrow::Cow<'a, Params> {
        policy.tests.get(id).map_or_else(Default::default, |settings| std::borrow::Cow::Borrowed(&settings.params))
    }

    /// What the planner may plan, in the order of names.
    pub fn tests(&self, policy: &Policy) -> Vec<TestPolicy> {
        self.checks
            .iter()
            .filter_map(|check| {
                let id = CheckId::new(check.spec.id).ok()?;
                let none = TestSettings::default();
                let site = policy.tests.get(&id).unwrap_or(&none);
                site.enabled.unwrap_or(true).then(|| TestPolicy {
                    cutoff: site.cutoff.unwrap_or(check.spec.cutoff),
                    limit: site.limit.unwrap_or(check.spec.limit),
                    usual: check.spec.usual,
                    exclusive: check.spec.exclusive,
                    at_once: site.at_once,
                    shares: site
                        .shares
                        .clone()
                        .unwrap_or_else(|| check.spec.shares.iter().map(|&share| share.to_owned()).collect()),
                    pools: site.pools.clone(),
                    id,
                })
            })
            .collect()
    }

    /// The rules in force: each check's own, with the policy's laid over by id.
    ///
    /// # Errors
    /// If a check's own rules do not parse, which its tests would have shown.
    pub fn rules(&self, policy: &Policy) -> Result<Vec<Rule>, toml::de::Error> {
        #[derive(serde::Deserialize)]
        struct Own {
            #[serde(default)]
            rules: Vec<Rule>,
        }
        let mut rules = Vec::new();
        for check in &self.checks {
            rules.extend(toml::from_str::<Own>(check.rules)?.rules);
        }
        for rule in &policy.rules {
            match rules.iter_mut().find(|own| own.id == rule.id) {
                Some(own) => *own = rule.clone(),
                None => rules.push(rule.clone()),
            }
        }
        Ok(rules)
    }
}
