//! Decides which results to report: changed ones only. A failure is repeated a few times, because a rule may require
//! confirmation; all results are repeated at intervals, because the controller may have lost its state.
//!
//! Counts and sizes are part of a result, even if the agent has no expected value for them: the controller compares them
//! with sources that the agent does not have.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use doctor_core::{
    classify::Classification,
    finding::Verdict,
    ids::CheckId,
    observation::Observation,
    policy::{Rule, When},
};

/// How often the same failure is reported in a row. Rules require fewer confirmations.
const MAX_FAILURE_REPORTS: u8 = 4;

#[derive(Debug, Default)]
pub struct ReportDedup {
    by_check: BTreeMap<CheckId, LastReport>,
}

#[derive(Debug, Clone, Copy)]
struct LastReport {
    digest: u64,
    repeats: u8,
}

impl ReportDedup {
    /// Returns whether to report this result, and records it as reported if so.
    pub fn should_report(
        &mut self,
        check: &CheckId,
        rules: &[Rule],
        observation: &Observation,
        judgement: &Classification,
    ) -> bool {
        let digest = result_digest(rules, observation, judgement);
        let max_reports = if judgement.verdict == Verdict::Fail { MAX_FAILURE_REPORTS } else { 1 };
        let last = self.by_check.entry(check.clone()).or_insert(LastReport { digest, repeats: 0 });
        if last.digest != digest {
            *last = LastReport { digest, repeats: 0 };
        }
        let is_new = last.repeats < max_reports;
        last.repeats = last.repeats.saturating_add(u8::from(is_new));
        is_new
    }

    /// Makes every result reportable again.
    pub fn clear(&mut self) {
        self.by_check.clear();
    }

    /// Makes the result of one check reportable again: another program has reported one since.
    pub fn forget(&mut self, check: &CheckId) {
        self.by_check.remove(check);
    }
}

/// Hashes the essence of a result. Measurements that move within their limits do not change it; counts and sizes do.
fn result_digest(rules: &[Rule], observation: &Observation, judgement: &Classification) -> u64 {
    let mut hasher = DefaultHasher::new();
    judgement.verdict.code().hash(&mut hasher);
    judgement.reason.as_str().hash(&mut hasher);
    for finding in &judgement.findings {
        (finding.entity.to_string(), finding.rule.as_str(), finding.severity.code()).hash(&mut hasher);
    }
    if let Observation::Measured { metrics, events, failures: unread } = observation {
        let is_count =
            |name: &str| rules.iter().any(|rule| matches!(&rule.when, When::NotProfile { metric } if metric == name));
        for metric in metrics.iter().filter(|metric| is_count(&metric.name)) {
            (&metric.name, metric.entity.to_string(), metric.value.to_bits()).hash(&mut hasher);
        }
        for event in events {
            (event.code.as_str(), event.entity.to_string(), &event.key).hash(&mut hasher);
        }
        for failure in unread {
            (failure.kind.code(), &failure.text).hash(&mut hasher);
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{
        observation::{Entity, Event, Metric},
        policy::Policy,
        reason::ReasonCode,
    };

    fn observation(value: f64, key: Option<&str>) -> Observation {
        let event = key.map(|key| Event { key: Some(key.to_owned()), ..Event::seen("xid-79", Entity::node(), "bus") });
        Observation::measured(vec![Metric::count("errors", Entity::node(), value)], event.into_iter().collect())
    }

    fn rules() -> Vec<Rule> {
        let policy = Policy::built_in();
        let catalogue = doctor_checks::Catalogue::with_site_checks(&policy);
        let check = catalogue.get(&CheckId::new("gpu-count").unwrap()).copied().unwrap();
        catalogue.rule_book(&policy).rules_of(&check).unwrap()
    }

    fn judged(verdict: Verdict) -> Classification {
        let reason = ReasonCode::fixed(if verdict == Verdict::Pass { "within-limits" } else { "too-many" });
        Classification { verdict, reason, text: String::new(), findings: Vec::new(), not_judged: Vec::new() }
    }

    #[test]
    fn only_a_changed_result_is_reported_and_a_value_within_its_limits_is_no_change() {
        let (mut dedup, check) = (ReportDedup::default(), CheckId::new("memory").unwrap());
        let mut reports =
            |value, key, verdict| dedup.should_report(&check, &[], &observation(value, key), &judged(verdict));
        assert!(reports(1.0, None, Verdict::Pass), "the first result");
        assert!(!reports(2.0, None, Verdict::Pass));
        assert!(reports(2.0, Some("boot:1"), Verdict::Pass), "an event");
        assert!(!reports(2.0, Some("boot:1"), Verdict::Pass), "the same event");
        assert!(reports(2.0, Some("boot:2"), Verdict::Pass), "another of its kind");
        assert!(reports(9.0, None, Verdict::Inconclusive), "inconclusive");
        assert!(!reports(9.0, None, Verdict::Inconclusive), "still inconclusive");
        assert!(reports(9.0, None, Verdict::NotApplicable), "it does not apply any more");
    }

    #[test]
    fn a_changed_count_is_reported_even_if_nothing_says_what_it_should_be() {
        let (mut dedup, check, rules) = (ReportDedup::default(), CheckId::new("gpu-count").unwrap(), rules());
        let mut reports = |metric: &str, count| {
            let metrics = vec![Metric::count(metric, Entity::node(), count)];
            let measured = Observation::measured(metrics, Vec::new());
            dedup.should_report(&check, &rules, &measured, &judged(Verdict::NotApplicable))
        };
        assert!(reports("gpu_count", 8.0) && !reports("gpu_count", 8.0));
        assert!(reports("gpu_count", 7.0) && !reports("gpu_count", 7.0));
        assert!(reports("gpu_temperature", 41.0) && !reports("gpu_temperature", 42.0), "not a count");
    }

    #[test]
    fn a_result_that_another_program_reported_is_reported_again() {
        let (mut dedup, check) = (ReportDedup::default(), CheckId::new("memory").unwrap());
        let reports =
            |dedup: &mut ReportDedup| dedup.should_report(&check, &[], &observation(1.0, None), &judged(Verdict::Pass));
        assert!(reports(&mut dedup) && !reports(&mut dedup));
        dedup.forget(&check);
        assert!(reports(&mut dedup));
    }

    #[test]
    fn a_failure_is_reported_until_any_rule_confirms_it() {
        let (mut dedup, check) = (ReportDedup::default(), CheckId::new("memory").unwrap());
        let mut reports_failure = || dedup.should_report(&check, &[], &observation(9.0, None), &judged(Verdict::Fail));
        assert_eq!((0..10).filter(|_| reports_failure()).count(), usize::from(MAX_FAILURE_REPORTS));
        dedup.clear();
        assert!(dedup.should_report(&check, &[], &observation(9.0, None), &judged(Verdict::Fail)));
    }
}
