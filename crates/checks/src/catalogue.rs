//! The checks and suites in force: the built-in ones with the policy's settings applied. The planner, the classifier
//! and the documentation pages use it.
//!
//! The policy can define a variant of a test under a second name with its own parameters (`of`), such as a longer run
//! for quarantined nodes. A variant has its own results; it shares the page and the rules of its base test.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{LazyLock, Mutex, PoisonError},
};

use doctor_core::{
    ids::{CheckId, TestId},
    observation::Observation,
    policy::{Policy, Rule, SuiteSettings, TestPolicy, TestSettings},
    time::Span,
};
use serde::Deserialize;

use crate::{
    default_rules,
    spec::{Check, Depth, Params, Spec},
};

#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    checks: Vec<Check>,
    variants: BTreeMap<CheckId, TestSettings>,
    suites: BTreeMap<TestId, Suite>,
}

/// A named set of tests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Suite {
    pub tests: Vec<TestId>,
    /// How old a result may become before the controller reruns the test. `None`: only on request.
    pub every: Option<Span>,
    /// Whether the controller sets its maintenance mark on the nodes while the suite's tests run.
    pub maintenance: bool,
}

/// The built-in suites and variants of `suites.toml`, which has the format of the policy file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SuitesFile {
    suites: BTreeMap<TestId, SuiteSettings>,
    tests: BTreeMap<TestId, TestSettings>,
}

impl Catalogue {
    /// The text of the built-in suites, with comments.
    pub const SUITES_TEXT: &'static str = include_str!("suites.toml");

    pub fn new(checks: impl IntoIterator<Item = Check>) -> Self {
        let mut checks: Vec<_> = checks.into_iter().collect();
        checks.sort_by_key(|check| check.spec.id);
        checks.dedup_by_key(|check| check.spec.id);
        Self { checks, ..Self::default() }
    }

    /// All checks built into this program, without suites.
    pub fn built_in() -> Self {
        Self::new(crate::CHECKS.iter().copied())
    }

    /// The built-in checks and suites with the policy's additions: site checks (commands), variants and suites.
    ///
    /// # Panics
    /// If the compiled-in suites do not parse, which a unit test rules out.
    pub fn with_site_checks(policy: &Policy) -> Self {
        let checks = crate::CHECKS.iter().copied().chain(crate::site_checks::site_checks(policy));
        Self::with_built_in_suites(checks).with_policy(policy)
    }

    /// These checks with the built-in suites and variants.
    ///
    /// # Panics
    /// If the compiled-in suites do not parse, which a unit test rules out.
    pub fn with_built_in_suites(checks: impl IntoIterator<Item = Check>) -> Self {
        static OURS: LazyLock<SuitesFile> =
            LazyLock::new(|| toml::from_str(Catalogue::SUITES_TEXT).expect("the compiled-in suites parse"));
        let mut catalogue = Self::new(checks);
        catalogue.apply(&OURS.suites, &OURS.tests);
        catalogue
    }

    /// Applies the policy's variants and suites.
    #[must_use]
    pub fn with_policy(mut self, policy: &Policy) -> Self {
        self.apply(&policy.suites, &policy.tests);
        self
    }

    fn apply(&mut self, suites: &BTreeMap<TestId, SuiteSettings>, tests: &BTreeMap<TestId, TestSettings>) {
        for (id, settings) in tests {
            // Skip a variant of an unknown test or of another variant: the validation of the settings reports it.
            let base = settings.of.as_ref().filter(|of| !self.variants.contains_key(*of)).and_then(|of| self.get(of));
            if let Some(form) = base.map(|base| form_of(base, id)) {
                self.checks.retain(|check| check.spec.id != form.spec.id);
                self.checks.push(form);
                self.variants.insert(id.clone(), settings.clone());
            }
        }
        self.checks.sort_by_key(|check| check.spec.id);
        for (name, settings) in suites {
            let suite = self.suites.entry(name.clone()).or_default();
            if let Some(tests) = &settings.tests {
                suite.tests.clone_from(tests);
            }
            suite.every = settings.every.or(suite.every).filter(|every| *every > Span::ZERO);
            suite.maintenance = settings.maintenance.unwrap_or(suite.maintenance);
        }
    }

    /// Returns the catalogue with these checks added.
    #[must_use]
    pub fn with_checks(&self, more: impl IntoIterator<Item = Check>) -> Self {
        let checks = Self::new(self.checks.iter().copied().chain(more)).checks;
        Self { checks, ..self.clone() }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter()
    }

    pub fn get(&self, id: &CheckId) -> Option<&Check> {
        self.checks.iter().find(|check| check.spec.id == id.as_str())
    }

    /// Returns the base test if this test is a variant.
    pub fn base_test(&self, id: &CheckId) -> Option<&CheckId> {
        self.variants.get(id)?.of.as_ref()
    }

    pub fn suites(&self) -> &BTreeMap<TestId, Suite> {
        &self.suites
    }

    /// Expands names to tests: a suite to its tests, and `quick` to all checks that only read. Removes duplicates.
    pub fn expand(&self, names: &[TestId]) -> Vec<TestId> {
        let mut all: Vec<TestId> = Vec::new();
        for name in names {
            let some = match self.suites.get(name) {
                Some(suite) => suite.tests.clone(),
                None if name.as_str() == QUICK_SUITE && self.get(name).is_none() => self.quick_tests(),
                None => vec![name.clone()],
            };
            for test in some {
                if !all.contains(&test) {
                    all.push(test);
                }
            }
        }
        all
    }

    fn quick_tests(&self) -> Vec<TestId> {
        let quick = self.checks.iter().filter(|check| check.spec.depth == Depth::Quick && !check.spec.opt_in);
        quick.filter_map(|check| TestId::new(check.spec.id).ok()).collect()
    }

    /// Returns the parameters of a check under this policy. A variant inherits those of its base test and overrides
    /// them with its own.
    pub fn params<'a>(&self, policy: &'a Policy, id: &CheckId) -> Cow<'a, Params> {
        let site = |id: &CheckId| policy.tests.get(id).map(|settings| &settings.params);
        let Some(form) = self.variants.get(id) else {
            return site(id).map_or_else(Default::default, Cow::Borrowed);
        };
        let layers = [form.of.as_ref().and_then(site), Some(&form.params), site(id)];
        Cow::Owned(layers.into_iter().flatten().flat_map(Params::clone).collect())
    }

    /// Returns the tests that the planner may schedule, ordered by name.
    pub fn tests(&self, policy: &Policy) -> Vec<TestPolicy> {
        let ids = self.checks.iter().filter_map(|check| Some((CheckId::new(check.spec.id).ok()?, check)));
        ids.filter_map(|(id, check)| self.test(policy, id, check)).collect()
    }

    /// Returns the test if the policy lets it run: routinely, or because a suite or the requalification of a repaired
    /// node names it.
    fn test(&self, policy: &Policy, id: CheckId, check: &Check) -> Option<TestPolicy> {
        let spec = &check.spec;
        let params = self.params(policy, &id);
        let none = TestSettings::default();
        let site = policy.tests.get(&id).unwrap_or(&none);
        let form = self.variants.get(&id).unwrap_or(&none);
        let base = form.of.as_ref().and_then(|of| policy.tests.get(of)).unwrap_or(&none);
        let suites = || self.suites.values().filter(|suite| suite.tests.contains(&id));
        let every = suites().filter_map(|suite| suite.every).min();
        let maintenance = suites().any(|suite| suite.maintenance && suite.every.is_some());
        let together = site.multi_node.or(form.multi_node).unwrap_or(false);
        // Where a test is disabled, so are its variants: `[tests.dcgm] enabled = false` on a fleet without DCGM. A run over
        // several nodes starts only on request.
        let enabled = site.enabled.or(base.enabled.filter(|enabled| !enabled && !together));
        let routine = enabled.unwrap_or(!spec.opt_in || every.is_some()) && !together;
        let named = together || suites().next().is_some() || self.expand(&policy.repair.requalification).contains(&id);
        (routine || (named && enabled != Some(false))).then(|| TestPolicy {
            cutoff: site.cutoff.or(every).or(form.cutoff).unwrap_or(spec.cutoff),
            limit: site.limit.or(form.limit).unwrap_or_else(|| check.limit(&params)),
            typical_duration: site
                .typical_duration
                .or(form.typical_duration)
                .unwrap_or_else(|| spec.usual_duration(&params)),
            exclusive: spec.exclusive,
            place: spec.place(),
            routine,
            maintenance,
            multi_node: together,
            max_concurrent: site.max_concurrent.or(base.max_concurrent),
            shares: site
                .shares
                .clone()
                .or_else(|| base.shares.clone())
                .unwrap_or_else(|| spec.shared_resources(&params)),
            pools: site.pools.clone().or_else(|| base.pools.clone()),
            suite: self.suite_of(&id, spec.depth),
            id,
        })
    }

    /// Returns the suite of a test: the one that runs it most often, then one that runs on request, then `quick`.
    fn suite_of(&self, id: &TestId, depth: Depth) -> Option<TestId> {
        let named = self.suites.iter().filter(|(_, suite)| suite.tests.contains(id));
        let named = named.min_by_key(|(_, suite)| (suite.every.is_none(), suite.every)).map(|(name, _)| name.clone());
        named.or_else(|| (depth == Depth::Quick).then(|| TestId::new(QUICK_SUITE).ok()).flatten())
    }

    /// Returns the rules in force, check by check.
    ///
    /// # Errors
    /// If a check's built-in rules do not parse, which unit tests rule out.
    pub fn rules(&self, policy: &Policy) -> Result<Vec<Rule>, toml::de::Error> {
        let book = self.rule_book(policy);
        let mut rules = Vec::new();
        for check in &self.checks {
            rules.extend(book.rules_of(check)?);
        }
        Ok(rules)
    }

    /// Gives access to the rules per check, for callers that need a few checks only: parsing all rules takes
    /// milliseconds.
    pub fn rule_book<'a>(&'a self, policy: &'a Policy) -> RuleBook<'a> {
        RuleBook { catalogue: self, policy }
    }
}

/// The rules of each check: the built-in ones, overridden by the policy's rules with the same id. A variant's rules are
/// those of its base test, renamed `VARIANT-RULE`.
#[derive(Debug)]
pub struct RuleBook<'a> {
    catalogue: &'a Catalogue,
    policy: &'a Policy,
}

impl RuleBook<'_> {
    /// Returns the rules of one check.
    ///
    /// # Errors
    /// If the check's built-in rules do not parse, which unit tests rule out.
    pub fn rules_of(&self, check: &Check) -> Result<Vec<Rule>, toml::de::Error> {
        self.read(check, &default_rules::all_rules)
    }

    /// Returns the rules that can match this observation. Most of a check's rules may be about events that did not
    /// occur.
    ///
    /// # Errors
    /// If the check's built-in rules do not parse, which unit tests rule out.
    pub fn rules_for(&self, check: &Check, seen: &Observation) -> Result<Vec<Rule>, toml::de::Error> {
        match seen {
            Observation::Measured { events, .. } => {
                self.read(check, &|check| default_rules::rules_for_events(check, events))
            }
            Observation::NotApplicable(_) | Observation::Failed(_) => Ok(Vec::new()),
        }
    }

    fn read(
        &self,
        check: &Check,
        own: &dyn Fn(&Check) -> Result<Vec<Rule>, toml::de::Error>,
    ) -> Result<Vec<Rule>, toml::de::Error> {
        let base = CheckId::new(check.spec.id).ok().and_then(|id| Some((self.catalogue.base_test(&id)?.clone(), id)));
        let own = match base.as_ref().and_then(|(of, id)| Some((self.catalogue.get(of)?, id))) {
            Some((base, id)) => variant_rules(self.read(base, own)?, id),
            None => own(check)?,
        };
        let site = self.policy.rules.iter();
        let added = site.clone().filter(|rule| rule.check.as_str() == check.spec.id);
        // A policy rule replaces the built-in rule with the same id, even if it is about another check.
        let retained = own.into_iter().filter(|own| !site.clone().any(|rule| rule.id == own.id));
        Ok(retained.chain(added.cloned()).collect())
    }
}

/// The implicit suite of all checks that only read.
const QUICK_SUITE: &str = "quick";

/// Returns the check under another name. The variant runs when it is named, or where a suite runs it regularly. Leaked ids
/// are cached, so that each leaks only once.
fn form_of(base: &Check, id: &CheckId) -> Check {
    static IDS: Mutex<BTreeMap<CheckId, &'static str>> = Mutex::new(BTreeMap::new());
    let mut ids = IDS.lock().unwrap_or_else(PoisonError::into_inner);
    let id = *ids.entry(id.clone()).or_insert_with(|| String::leak(id.to_string()));
    Check { spec: Spec { id, opt_in: true, ..base.spec }, rules: "", ..*base }
}

fn variant_rules(rules: Vec<Rule>, id: &CheckId) -> Vec<Rule> {
    let renamed = rules.into_iter().filter_map(|rule| {
        let name = format!("{id}-{}", rule.id).parse().ok()?;
        Some(Rule { id: name, check: id.clone(), ..rule })
    });
    renamed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        document::TestEvidence,
        probe::{Probe, ProbeOutput},
    };
    use doctor_core::time::Timestamp;

    #[test]
    fn every_check_has_its_page_and_rules_that_parse() {
        let catalogue = Catalogue::built_in();
        let rules = catalogue.rules(&Policy::built_in()).unwrap();
        for check in catalogue.iter() {
            let id = CheckId::new(check.spec.id).unwrap();
            assert!(rules.iter().any(|rule| rule.check == id), "{id} has no rule");
            let page = check.page_text();
            assert!(page.starts_with(&format!("{id}: ")), "{id}: {page}");
            assert!(page.contains("\nWhy it matters: ") && page.contains("\nWhat to do:"), "{id}: {page}");
            assert!(!page.contains("//!") && !page.contains("use doctor_core"), "{id}: {page}");
            assert!(!(check.probes)(&Params::new()).is_empty(), "{id} has no probe");
        }
        assert!(rules.iter().all(|rule| catalogue.get(&rule.check).is_some()));
        assert_eq!(catalogue.iter().count(), crate::CHECKS.len(), "two checks have the same id");
    }

    #[test]
    fn evidence_of_other_probes_is_rejected() {
        let moment = Timestamp::from_secs(1);
        let catalogue = Catalogue::built_in();
        let check = catalogue.get(&CheckId::new("memory").unwrap()).unwrap();
        let text = ProbeOutput::Text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n".to_owned());
        let evidence = |path: &str| TestEvidence {
            test: CheckId::new("memory").unwrap(),
            started: moment,
            ended: moment,
            probes: vec![(Probe::Read { path: path.to_owned() }, text.clone())],
        };
        let observe = |path| check.observe(&Params::new(), &evidence(path));
        assert!(matches!(observe("/proc/meminfo"), Observation::Measured { .. }));
        assert!(matches!(observe("/etc/passwd"), Observation::Failed(_)));
    }

    fn id(text: &str) -> CheckId {
        CheckId::new(text).unwrap()
    }

    fn policy(text: &str) -> Policy {
        Policy::with_site_settings(text).unwrap()
    }

    #[test]
    fn built_in_suites_name_existing_tests() {
        let catalogue = Catalogue::with_site_checks(&Policy::built_in());
        for (name, suite) in catalogue.suites() {
            assert!(catalogue.get(name).is_none(), "{name} is a test too");
            for test in &suite.tests {
                let check = catalogue.get(test).unwrap_or_else(|| panic!("{name} names {test}"));
                assert_eq!(check.spec.depth, Depth::Deep, "{name}: {test}");
            }
        }
        let quick = catalogue.expand(&[id("quick")]);
        assert!(quick.contains(&id("disk-space")) && !quick.contains(&id("dl")), "{quick:?}");
    }

    #[test]
    fn a_suite_expands_to_its_tests_without_duplicates() {
        let policy = policy("[suites.mine]\ntests = [\"dl\", \"storage\"]\n");
        let catalogue = Catalogue::with_site_checks(&policy);
        assert_eq!(
            catalogue.expand(&[id("storage"), id("mine"), id("unheard-of")]),
            [id("storage"), id("dl"), id("unheard-of")]
        );
    }

    #[test]
    fn a_suite_with_a_period_is_scheduled_and_others_run_on_request() {
        let routine = |text: &str, test: &str| {
            let policy = policy(text);
            let tests = Catalogue::with_site_checks(&policy).tests(&policy);
            tests.into_iter().find(|known| known.id.as_str() == test).map(|test| (test.routine, test.cutoff))
        };
        let weekly = "[suites.standard]\nevery = \"3d\"\n";
        assert_eq!(routine("", "dl"), Some((true, Span::days(7))));
        assert_eq!(routine("", "dcgm"), Some((true, Span::hours(6))));
        assert_eq!(routine("", "dl-long"), Some((false, Span::days(7))));
        assert_eq!(routine("[suites.standard]\nevery = \"0s\"\n", "dl"), Some((false, Span::days(7))));
        assert_eq!(routine(weekly, "dl"), Some((true, Span::days(3))));
        assert_eq!(routine(&format!("{weekly}[tests.dl]\ncutoff = \"1d\""), "dl"), Some((true, Span::days(1))));
        assert_eq!(routine(&format!("{weekly}[tests.dl]\nenabled = false"), "dl"), None);
        assert_eq!(routine("", "aznhc"), None, "not in any suite");
        assert_eq!(routine("[repair]\nrequalification = [\"aznhc\"]", "aznhc"), Some((false, Span::days(7))));
    }

    #[test]
    fn the_built_in_suites_run_without_any_setting() {
        let policy = Policy::built_in();
        let catalogue = Catalogue::with_site_checks(&policy);
        let tests = catalogue.tests(&policy);
        let every = |test: &TestPolicy| (test.id.to_string(), test.cutoff, test.maintenance);
        let deep = tests.iter().filter(|test| test.routine && test.exclusive).map(every).collect::<Vec<_>>();
        let expected = [
            ("collective-loopback", Span::days(7), false),
            ("dcgm", Span::hours(6), true),
            ("dl", Span::days(7), false),
            ("fabric", Span::hours(6), true),
            ("storage", Span::days(7), false),
        ];
        assert_eq!(deep, expected.map(|(id, cutoff, maintenance)| (id.to_owned(), cutoff, maintenance)));
    }

    #[test]
    fn disabling_a_test_disables_its_variants_unless_they_are_enabled() {
        let tests = |text: &str| {
            let policy = policy(text);
            let all = Catalogue::with_site_checks(&policy).tests(&policy);
            let of_dcgm = all.into_iter().map(|test| test.id.to_string()).filter(|id| id.starts_with("dcgm-l"));
            of_dcgm.collect::<Vec<_>>()
        };
        assert_eq!(tests(""), ["dcgm-level-4"]);
        assert!(tests("[tests.dcgm]\nenabled = false\n").is_empty());
        let kept = "[tests.dcgm]\nenabled = false\n[tests.dcgm-level-4]\nenabled = true\n";
        assert_eq!(tests(kept), ["dcgm-level-4"]);
    }

    #[test]
    fn a_variant_has_its_own_parameters_and_the_rules_of_its_test() {
        let policy = policy(
            "[tests.dl]\nparams = { trials = 5, heat = \"1s\" }\n[tests.dl-hot]\nof = \"dl\"\nlimit = \"2h\"\n\
             params = { heat = \"1h\" }\n[tests.dl-hotter]\nof = \"dl-hot\"\n[[rules]]\nid = \"dl-gpu-failed\"\n\
             check = \"dl\"\nevent = \"gpu-failed\"\nseverity = \"isolate\"\nreason = \"gpu-failed\"\ntext = \"x\"\n",
        );
        let catalogue = Catalogue::with_site_checks(&policy);
        let params = catalogue.params(&policy, &id("dl-hot"));
        assert_eq!((params["heat"].as_str(), params["trials"].as_integer()), (Some("1h"), Some(5)));
        let rules = catalogue.rules(&policy).unwrap();
        let of = |check: &str| rules.iter().filter(|rule| rule.check.as_str() == check).count();
        assert!(of("dl-hot") > 0 && of("dl-hot") == of("dl"));
        let failed = rules.iter().find(|rule| rule.id.as_str() == "dl-hot-dl-gpu-failed").unwrap();
        assert_eq!(failed.severity, doctor_core::finding::Severity::Isolate, "a test's rules apply to its variants");
        assert!(catalogue.get(&id("dl-hotter")).is_none(), "a variant cannot have variants");
    }
}
