//! Decides which results to report: changed ones only. A failure is repeated a few times, because a rule may require
//! confirmation; all results are repeated at intervals, because the controller may have lost its state.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use doctor_core::{classify::Judgement, finding::Verdict, ids::CheckId, observation::Observation};

/// How often the same failure is reported in a row. Rules require fewer confirmations.
const TELL_FAILURE: u8 = 4;

#[derive(Debug, Default)]
pub struct Said {
    by_check: BTreeMap<CheckId, Told>,
}

#[derive(Debug, Clone, Copy)]
struct Told {
    answer: u64,
    times: u8,
}

impl Said {
    /// Returns whether to report this result, and records it as reported if so.
    pub fn is_news(&mut self, check: &CheckId, observation: &Observation, judgement: &Judgement) -> bool {
        let answer = digest(observation, judgement);
        let most = if judgement.verdict == Verdict::Fail { TELL_FAILURE } else { 1 };
        let told = self.by_check.entry(check.clone()).or_insert(Told { answer, times: 0 });
        if told.answer != answer {
            *told = Told { answer, times: 0 };
        }
        let news = told.times < most;
        told.times = told.times.saturating_add(u8::from(news));
        news
    }

    /// Makes every result reportable again.
    pub fn forget(&mut self) {
        self.by_check.clear();
    }
}

/// Hashes the essence of a result. Measurements that move within their limits do not change it.
fn digest(observation: &Observation, judgement: &Judgement) -> u64 {
    let mut hasher = DefaultHasher::new();
    judgement.verdict.code().hash(&mut hasher);
    judgement.reason.as_str().hash(&mut hasher);
    for finding in &judgement.findings {
        (finding.entity.to_string(), finding.rule.as_str(), finding.severity.code()).hash(&mut hasher);
    }
    if let Observation::Measured { events, unread, .. } = observation {
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

    fn seen(value: f64, key: Option<&str>) -> Observation {
        let event = key.map(|key| Event { key: Some(key.to_owned()), ..Event::seen("xid-79", Entity::node(), "bus") });
        Observation::measured(vec![Metric::count("errors", Entity::node(), value)], event.into_iter().collect())
    }

    fn judged(verdict: Verdict) -> Judgement {
        let reason = ReasonCode::fixed(if verdict == Verdict::Pass { "within-limits" } else { "too-many" });
        Judgement { verdict, reason, text: String::new(), findings: Vec::new() }
    }

    #[test]
    fn only_a_changed_answer_is_news_and_a_number_within_its_limits_is_not() {
        let (mut said, check) = (Said::default(), CheckId::new("memory").unwrap());
        let mut news = |value, key, verdict| said.is_news(&check, &seen(value, key), &judged(verdict));
        assert!(news(1.0, None, Verdict::Pass), "the first result");
        assert!(!news(2.0, None, Verdict::Pass));
        assert!(news(2.0, Some("boot:1"), Verdict::Pass), "an event");
        assert!(!news(2.0, Some("boot:1"), Verdict::Pass), "the same event");
        assert!(news(2.0, Some("boot:2"), Verdict::Pass), "another of its kind");
        assert!(news(9.0, None, Verdict::Inconclusive), "inconclusive");
    }

    #[test]
    fn a_failure_is_told_until_any_rule_has_it_confirmed() {
        let (mut said, check) = (Said::default(), CheckId::new("memory").unwrap());
        let mut fails = || said.is_news(&check, &seen(9.0, None), &judged(Verdict::Fail));
        assert_eq!((0..10).filter(|_| fails()).count(), usize::from(TELL_FAILURE));
        said.forget();
        assert!(said.is_news(&check, &seen(9.0, None), &judged(Verdict::Fail)));
    }
}
