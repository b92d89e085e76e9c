//! Decides which results to report: changed ones only. A failure is repeated a few times, because a rule may require
//! confirmation; all results are repeated at intervals, because the controller may have lost its state.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use doctor_core::{classify::Classification, finding::Verdict, ids::CheckId, observation::Observation};

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
    pub fn should_report(&mut self, check: &CheckId, observation: &Observation, judgement: &Classification) -> bool {
        let digest = result_digest(observation, judgement);
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
}

/// Hashes the essence of a result. Measurements that move within their limits do not change it.
fn result_digest(observation: &Observation, judgement: &Classification) -> u64 {
    let mut hasher = DefaultHasher::new();
    judgement.verdict.code().hash(&mut hasher);
    judgement.reason.as_str().hash(&mut hasher);
    for finding in &judgement.findings {
        (finding.entity.to_string(), finding.rule.as_str(), finding.severity.code()).hash(&mut hasher);
    }
    if let Observation::Measured { events, failures: unread, .. } = observation {
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
        reason::ReasonCode,
    };

    fn observation(value: f64, key: Option<&str>) -> Observation {
        let event = key.map(|key| Event { key: Some(key.to_owned()), ..Event::seen("xid-79", Entity::node(), "bus") });
        Observation::measured(vec![Metric::count("errors", Entity::node(), value)], event.into_iter().collect())
    }

    fn judged(verdict: Verdict) -> Classification {
        let reason = ReasonCode::fixed(if verdict == Verdict::Pass { "within-limits" } else { "too-many" });
        Classification { verdict, reason, text: String::new(), findings: Vec::new() }
    }

    #[test]
    fn only_a_changed_result_is_reported_and_a_value_within_its_limits_is_no_change() {
        let (mut dedup, check) = (ReportDedup::default(), CheckId::new("memory").unwrap());
        let mut reports = |value, key, verdict| dedup.should_report(&check, &observation(value, key), &judged(verdict));
        assert!(reports(1.0, None, Verdict::Pass), "the first result");
        assert!(!reports(2.0, None, Verdict::Pass));
        assert!(reports(2.0, Some("boot:1"), Verdict::Pass), "an event");
        assert!(!reports(2.0, Some("boot:1"), Verdict::Pass), "the same event");
        assert!(reports(2.0, Some("boot:2"), Verdict::Pass), "another of its kind");
        assert!(reports(9.0, None, Verdict::Inconclusive), "inconclusive");
    }

    #[test]
    fn a_failure_is_reported_until_any_rule_confirms_it() {
        let (mut dedup, check) = (ReportDedup::default(), CheckId::new("memory").unwrap());
        let mut reports_failure = || dedup.should_report(&check, &observation(9.0, None), &judged(Verdict::Fail));
        assert_eq!((0..10).filter(|_| reports_failure()).count(), usize::from(MAX_FAILURE_REPORTS));
        dedup.clear();
        assert!(dedup.should_report(&check, &observation(9.0, None), &judged(Verdict::Fail)));
    }
}
