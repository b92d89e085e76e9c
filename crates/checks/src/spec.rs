//! What a check is: its page, its figures, its rules, its probes and its reading of them.

use std::collections::BTreeMap;

use doctor_core::{
    ids::CheckId,
    observation::{FailureKind, Observation, ProbeFailure},
    policy::{Policy, Rule, TestPolicy, TestSettings},
    time::Span,
};

use crate::{
    compiled::CompiledRules,
    document::TestEvidence,
    probe::{Probe, ProbeOutput},
};

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

impl Check {
    /// What a node's evidence says. Evidence of other probes than the ones this policy asks for (another list of
    /// mounts, say) would be read as what it is not, so it is refused.
    pub fn observe(&self, params: &Params, evidence: &TestEvidence) -> Observation {
        let wanted = (self.probes)(params);
        if wanted.iter().ne(evidence.probes.iter().map(|(probe, _)| probe)) {
            return Observation::CouldNot(ProbeFailure::new(
                FailureKind::Unparseable,
                "the node ran other probes than this policy asks for; give both the same policy file",
            ));
        }
        let outputs: Vec<_> = evidence.probes.iter().map(|(_, output)| output.clone()).collect();
        (self.interpret)(params, &outputs)
    }

    /// The operators' page as plain text.
    pub fn page_text(&self) -> String {
        let lines = self.page.lines().map(|line| {
            let text = line.strip_prefix("//!").unwrap_or(line);
            text.strip_prefix(' ').unwrap_or(text)
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// The `//!` lines at the top of a check's own file: its page is written once, where the code is.
pub const fn page_of(source: &'static str) -> &'static str {
    let bytes = source.as_bytes();
    let mut end = 0;
    // Each turn takes one line that begins with `//!`.
    while end + 2 < bytes.len() && bytes[end] == b'/' && bytes[end + 1] == b'/' && bytes[end + 2] == b'!' {
        while end < bytes.len() && bytes[end] != b'\n' {
            end += 1;
        }
        if end < bytes.len() {
            end += 1;
        }
    }
    source.split_at(end).0
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
    /// How often an agent looks. A quick check that starts a program is not so quick and says a longer time.
    pub every: Span,
    /// A conclusive result is good for this long.
    pub cutoff: Span,
    pub limit: Span,
    pub usual: Span,
    /// Shared things it loads by default.
    pub shares: &'static [&'static str],
    /// The parameter that lists what it loads and what others may share, where there is one.
    pub loads: Option<&'static str>,
    /// Whether it waits for the policy to switch it on: it runs a program of somebody else, which may do more than look.
    pub opt_in: bool,
}

impl Spec {
    /// Of a check that only reads, takes milliseconds and may run at any time.
    pub const fn quick(id: &'static str, title: &'static str) -> Self {
        Self {
            id,
            title,
            depth: Depth::Quick,
            exclusive: false,
            every: Span::minutes(5),
            cutoff: Span::days(1),
            limit: Span::minutes(1),
            usual: Span::from_secs(1),
            shares: &[],
            loads: None,
            opt_in: false,
        }
    }

    /// Of a test that loads the node and needs it to itself. It ends by itself well within `limit`.
    pub const fn deep(id: &'static str, title: &'static str, usual: Span, limit: Span) -> Self {
        Self { depth: Depth::Deep, exclusive: true, cutoff: Span::days(7), limit, usual, ..Self::quick(id, title) }
    }

    /// The same, only where the policy says `enabled = true`, or when named.
    #[must_use]
    pub const fn opt_in(mut self) -> Self {
        self.opt_in = true;
        self
    }

    /// The same, which loads what this parameter lists.
    #[must_use]
    pub const fn loads(mut self, parameter: &'static str) -> Self {
        self.loads = Some(parameter);
        self
    }

    /// What it loads that others may share, as far as the parameters say.
    fn shared(&self, params: &Params) -> Vec<String> {
        let listed = self.loads.and_then(|name| params.get(name)).and_then(toml::Value::as_array);
        let listed = listed.into_iter().flatten().filter_map(toml::Value::as_str);
        self.shares.iter().copied().chain(listed).map(str::to_owned).collect()
    }

    /// The same, looked at less often.
    #[must_use]
    pub const fn every(mut self, every: Span) -> Self {
        self.every = every;
        self
    }
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

    /// Those, and the commands that this site's policy names as checks of its own.
    pub fn with_site_checks(policy: &Policy) -> Self {
        Self::new(crate::CHECKS.iter().copied().chain(crate::site::site_checks(policy)))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter()
    }

    pub fn get(&self, id: &CheckId) -> Option<&Check> {
        let place = self.checks.binary_search_by_key(&id.as_str(), |check| check.spec.id).ok()?;
        Some(&self.checks[place])
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
                site.enabled.unwrap_or(!check.spec.opt_in).then(|| TestPolicy {
                    cutoff: site.cutoff.unwrap_or(check.spec.cutoff),
                    limit: site.limit.unwrap_or(check.spec.limit),
                    usual: check.spec.usual,
                    exclusive: check.spec.exclusive,
                    at_once: site.at_once,
                    shares: site.shares.clone().unwrap_or_else(|| check.spec.shared(&site.params)),
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
        let compiled = CompiledRules::new();
        let mut rules = Vec::new();
        for check in &self.checks {
            rules.extend(match compiled.of(check) {
                Some(own) => own,
                None => rules_as_written(check)?,
            });
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

/// A check's own rules, from the text that people read.
pub(crate) fn rules_as_written(check: &Check) -> Result<Vec<Rule>, toml::de::Error> {
    #[derive(serde::Deserialize)]
    struct Own {
        #[serde(default)]
        rules: Vec<Rule>,
    }
    toml::from_str::<Own>(check.rules).map(|own| own.rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::time::Timestamp;

    #[test]
    fn every_check_has_its_page_and_rules_that_parse() {
        let catalogue = Catalogue::built_in();
        let rules = catalogue.rules(&Policy::standard()).unwrap();
        for check in catalogue.iter() {
            let id = CheckId::new(check.spec.id).unwrap();
            assert!(rules.iter().any(|rule| rule.check == id), "{id} has no rule");
            let page = check.page_text();
            assert!(page.starts_with(&format!("{id}: ")), "{id}: {page}");
            assert!(page.contains("\nWhy it matters: ") && page.contains("\nWhat to do:"), "{id}: {page}");
            assert!(!page.contains("//!") && !page.contains("use doctor_core"), "{id}: {page}");
            assert!(!(check.probes)(&Params::new()).is_empty(), "{id} looks at nothing");
        }
        assert!(rules.iter().all(|rule| catalogue.get(&rule.check).is_some()));
        assert_eq!(catalogue.iter().count(), crate::CHECKS.len(), "two checks have the same id");
    }

    #[test]
    fn evidence_of_other_probes_is_not_read_as_something_else() {
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
        assert!(matches!(observe("/etc/passwd"), Observation::CouldNot(_)));
    }
}
