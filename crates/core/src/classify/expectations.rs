//! What measured values are compared with.
//!
//! An expected value comes from the first source that has one: the profile (the site's file, the machine type, the
//! chip), what the scheduler declares, the value on which peers of the machine type agree, the node's own accepted
//! past. Peers and the past are asked only for counts and sizes, which are equal on healthy machines of one type;
//! a rate is not. Both are inferred, and so is a derived figure of a profile: none of them takes a node out of service.

use super::Baselines;
use crate::{
    finding::Severity,
    node::Declared,
    profile::{Basis, Profile},
    reason::coded,
};

/// The sources of expected values for one node.
#[derive(Debug, Clone, Copy)]
pub struct ExpectationSources<'a> {
    pub profile: Option<&'a Profile>,
    pub declared: Option<&'a Declared>,
    pub baselines: &'a Baselines,
}

coded! {
    /// Where an expected value comes from.
    pub enum ExpectationSource {
        Profile => "profile",
        Scheduler => "scheduler",
        Peers => "peers",
        AcceptedPast => "accepted-past",
    }
}

/// An expected value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expectation {
    pub value: f64,
    pub source: ExpectationSource,
    /// The worst severity that a finding based on it may have; `None`: that of the rule.
    pub severity_limit: Option<Severity>,
}

impl ExpectationSource {
    /// Returns an addition to a finding's text, for values that the machine type's profile does not give.
    pub(super) const fn note(self) -> Option<&'static str> {
        match self {
            Self::Profile => None,
            Self::Scheduler => Some("as the scheduler declares"),
            Self::Peers => Some("as on other nodes of this type; no profile has the number"),
            Self::AcceptedPast => Some("as on this node before; no profile has the number"),
        }
    }
}

impl<'a> ExpectationSources<'a> {
    /// Sources with a profile alone.
    pub const fn of_profile(profile: Option<&'a Profile>, baselines: &'a Baselines) -> Self {
        Self { profile, declared: None, baselines }
    }

    /// Returns the value that the profile expects of a metric.
    pub fn in_profile(self, metric: &str) -> Option<Expectation> {
        let expected = self.profile?.expected(metric)?;
        let severity_limit = (expected.basis == Basis::Derived).then_some(Severity::Monitor);
        Some(Expectation { value: expected.value, source: ExpectationSource::Profile, severity_limit })
    }

    /// Returns the expected value of a count or a size, from the first source that has one.
    pub fn of_count(self, metric: &str) -> Option<Expectation> {
        let inferred = |values: &std::collections::BTreeMap<String, f64>, source| {
            let value = *values.get(metric)?;
            Some(Expectation { value, source, severity_limit: Some(Severity::Monitor) })
        };
        let declared = || {
            let value = self.declared?.value(metric)?;
            Some(Expectation { value, source: ExpectationSource::Scheduler, severity_limit: None })
        };
        self.in_profile(metric)
            .or_else(declared)
            .or_else(|| inferred(&self.baselines.agreed, ExpectationSource::Peers))
            .or_else(|| inferred(&self.baselines.accepted, ExpectationSource::AcceptedPast))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ids::Sku, profile::Expected};

    fn profile(basis: Basis) -> Profile {
        let expect = [("gpu_count".to_owned(), Expected { value: 8.0, basis })].into();
        Profile { sku: Sku::new("hgx").unwrap(), version: 1, expect }
    }

    #[test]
    fn the_first_source_with_a_value_decides_and_inferred_values_only_raise_monitor() {
        let counts = |value: f64| [("gpu_count".to_owned(), value)].into();
        let past = Baselines { agreed: counts(4.0), accepted: counts(2.0), ..Baselines::default() };
        let own = Baselines { accepted: counts(2.0), ..Baselines::default() };
        let (nothing, declared) = (Baselines::default(), Declared { gpus: Some(6) });
        let (measured, derived) = (profile(Basis::Measured), profile(Basis::Derived));
        let monitor = Some(Severity::Monitor);
        let cases = [
            (Some(&measured), Some(&declared), &past, Some((8.0, "profile", None))),
            (Some(&derived), Some(&declared), &past, Some((8.0, "profile", monitor))),
            (None, Some(&declared), &past, Some((6.0, "scheduler", None))),
            (None, None, &past, Some((4.0, "peers", monitor))),
            (None, None, &own, Some((2.0, "accepted-past", monitor))),
            (None, None, &nothing, None),
        ];
        for (profile, declared, baselines, expected) in cases {
            let found = ExpectationSources { profile, declared, baselines }.of_count("gpu_count");
            assert_eq!(found.map(|found| (found.value, found.source.code(), found.severity_limit)), expected);
        }
        let sources = ExpectationSources { profile: None, declared: Some(&declared), baselines: &past };
        assert_eq!(sources.in_profile("gpu_count"), None);
        assert_eq!(sources.of_count("nvme_disks"), None);
    }

    #[test]
    fn every_code_reads_back() {
        for source in ExpectationSource::ALL {
            assert_eq!(ExpectationSource::from_code(source.code()), Some(*source));
        }
    }
}
