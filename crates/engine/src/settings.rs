//! The settings of the engine: one consistent set, replaced as a whole when the configuration changes.

use std::{collections::BTreeSet, sync::Arc};

use doctor_checks::Catalogue;
use doctor_core::{
    access::Access,
    ids::{CheckId, TestId},
    policy::{Policy, Rule, TestPolicy},
    profile::Profiles,
};

/// The suite for nodes that an operator quarantines, if the policy lists no tests.
const QUARANTINE_SUITE: &str = "quarantine";

#[derive(Debug, Clone)]
pub struct Settings {
    pub policy: Arc<Policy>,
    /// The tests that the planner may plan, sorted by name.
    pub tests: Arc<[TestPolicy]>,
    /// Sorted by check.
    pub rules: Arc<[Rule]>,
    pub profiles: Arc<Profiles>,
    pub catalogue: Arc<Catalogue>,
}

/// A configuration that parses but cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadSettings {
    #[error("cannot parse the rules of a check: {0}")]
    Rules(#[from] toml::de::Error),
    #[error("the policy sets `tests.{0}`, but there is no such test; known: {1}")]
    UnknownTest(String, String),
    #[error("the policy sets `tests.{0}` as a form of `{1}`, which is not a test or is a form itself; known: {2}")]
    UnknownBase(String, String, String),
    #[error("{0} names `{1}`, but there is no such test; known: {2}")]
    UnknownName(String, String, String),
    #[error("there is a test `{0}`; give the suite another name")]
    SuiteNameTaken(String),
    #[error("rule `{0}` is for `{1}`, but there is no such check; known: {2}")]
    UnknownCheck(String, String, String),
}

impl Settings {
    /// Returns the same checks and profiles under another policy. Site checks are taken from the new policy.
    ///
    /// # Errors
    /// If the policy names something that does not exist.
    pub fn with_policy(&self, policy: Policy) -> Result<Self, BadSettings> {
        let site_checks = doctor_checks::site_checks::site_checks(&policy);
        Self::new(policy, self.catalogue.with_checks(site_checks), (*self.profiles).clone())
    }

    /// Validates a policy and combines it with checks and profiles.
    ///
    /// # Errors
    /// If the policy names something that does not exist.
    pub fn new(mut policy: Policy, catalogue: Catalogue, profiles: Profiles) -> Result<Self, BadSettings> {
        let catalogue = catalogue.with_policy(&policy);
        let known = || catalogue.iter().map(|check| check.spec.id).collect::<Vec<_>>().join(", ");
        check_names(&policy, &catalogue, &known)?;
        // The planner knows tests, but no suites.
        policy.repair.requalification = catalogue.expand(&policy.repair.requalification);
        policy.repair.examine = match policy.repair.examine.as_slice() {
            [] => catalogue.suites().get(QUARANTINE_SUITE).map_or_else(Vec::new, |suite| suite.tests.clone()),
            names => catalogue.expand(names),
        };
        if let Some(id) = policy.tests.keys().find(|id| catalogue.get(id).is_none()) {
            return Err(BadSettings::UnknownTest(id.to_string(), known()));
        }
        let mut rules = catalogue.rules(&policy)?;
        rules.sort_by(|a, b| a.check.cmp(&b.check));
        if let Some(rule) = rules.iter().find(|rule| catalogue.get(&rule.check).is_none()) {
            return Err(BadSettings::UnknownCheck(rule.id.to_string(), rule.check.to_string(), known()));
        }
        let tests = catalogue.tests(&policy);
        Ok(Self {
            policy: Arc::new(policy),
            tests: tests.into(),
            rules: rules.into(),
            profiles: Arc::new(profiles),
            catalogue: Arc::new(catalogue),
        })
    }

    /// Returns whether a test runs on several nodes together.
    pub fn is_multi_node(&self, test: &CheckId) -> bool {
        self.tests.iter().any(|policy| policy.multi_node && policy.id == *test)
    }

    /// Returns the access to a node that these tests need, in a fixed order.
    pub fn access_of(&self, tests: &[TestId]) -> Vec<Access> {
        let of_test = |test: &TestId| {
            let check = self.catalogue.get(test);
            check.map_or_else(Vec::new, |check| check.access(&self.catalogue.params(&self.policy, test)))
        };
        let needed: BTreeSet<Access> = tests.iter().flat_map(of_test).collect();
        needed.into_iter().collect()
    }

    /// Returns the rules of one check, so that classification need not scan the hundreds of others.
    pub fn rules_of(&self, check: &CheckId) -> &[Rule] {
        let first = self.rules.partition_point(|rule| rule.check < *check);
        let count = self.rules[first..].partition_point(|rule| rule.check == *check);
        &self.rules[first..first + count]
    }
}

/// Checks that variants, suites, `repair.requalification` and `repair.examine` name existing tests.
fn check_names(policy: &Policy, catalogue: &Catalogue, known: &dyn Fn() -> String) -> Result<(), BadSettings> {
    for (id, settings) in &policy.tests {
        if let Some(of) = settings.of.as_ref().filter(|of| catalogue.base_test(id) != Some(*of)) {
            return Err(BadSettings::UnknownBase(id.to_string(), of.to_string(), known()));
        }
    }
    for (name, suite) in catalogue.suites() {
        if catalogue.get(name).is_some() {
            return Err(BadSettings::SuiteNameTaken(name.to_string()));
        }
        if let Some(test) = suite.tests.iter().find(|test| catalogue.get(test).is_none()) {
            return Err(BadSettings::UnknownName(format!("suite `{name}`"), test.to_string(), known()));
        }
    }
    for (key, names) in
        [("`repair.requalification`", &policy.repair.requalification), ("`repair.examine`", &policy.repair.examine)]
    {
        if let Some(test) = catalogue.expand(names).iter().find(|test| catalogue.get(test).is_none()) {
            return Err(BadSettings::UnknownName(key.to_owned(), test.to_string(), known()));
        }
    }
    Ok(())
}
