//! Rates that are too low while another process used the measured part, and a process that does so repeatedly.

use crate::{
    finding::{Evidence, Finding, Severity, Verdict},
    ids::{CheckId, RuleId},
    observation::Event,
    reason::ReasonCode,
};

/// How many consecutive results one program has to disturb before that is a finding.
pub const DISTURBED_LIMIT: usize = 3;

/// The reason and the rule of that finding.
pub const DISTURBED_REPEATEDLY: &str = "disturbed-repeatedly";

/// Removes findings about values below their limits on parts that another process used meanwhile. Such use lowers a
/// rate and never raises it: a rate within its limit counts, one below is not judged. Returns a text about the first
/// removed finding.
pub(super) fn withhold(findings: &mut Vec<Finding>, events: &[Event]) -> Option<String> {
    let mut withheld = None;
    findings.retain(|finding| {
        let is_low = matches!(finding.evidence, Evidence::Measured { value, limit, .. } if value < limit);
        let cause = events.iter().find(|event| is_low && event.is_disturbance_of(&finding.entity));
        if let Some(cause) = cause {
            withheld.get_or_insert_with(|| format!("{}; not judged: {}", cause.text, finding.text));
        }
        cause.is_none()
    });
    withheld
}

/// Returns the finding about a program that disturbed the newest [`DISTURBED_LIMIT`] results of a test. `event` is the
/// newest disturbance by it.
pub fn disturbed_repeatedly(check: &CheckId, event: &Event) -> Finding {
    let disturber = event.key.as_deref().unwrap_or("the same program");
    Finding {
        check: check.clone(),
        entity: event.entity.clone(),
        verdict: Verdict::Fail,
        severity: Severity::Monitor,
        remedy: Severity::Monitor.default_remedy(),
        reason: ReasonCode::fixed(DISTURBED_REPEATEDLY),
        text: format!("{check} disturbed {DISTURBED_LIMIT} times in a row by {disturber}: {}", event.text),
        rule: RuleId::new(DISTURBED_REPEATEDLY).expect("a plain word is a rule name"),
        evidence: Evidence::Event { text: event.text.clone(), at: event.at, known_by: None },
        confirm: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observation::{Entity, EntityKind};

    fn mount(path: &str) -> Entity {
        Entity::new(EntityKind::Mount, path)
    }

    fn finding(entity: Entity, evidence: Evidence) -> Finding {
        let event = Event::disturbed(entity, "x", "");
        Finding { evidence, text: "2 MB/s".into(), ..disturbed_repeatedly(&CheckId::new("storage").unwrap(), &event) }
    }

    #[test]
    fn low_rates_of_disturbed_parts_are_withheld_and_wrong_values_are_not() {
        let measured = |value, limit| Evidence::Measured { metric: "rate".into(), value, limit };
        let wrong = || Evidence::Event { text: "got 0".into(), at: None, known_by: None };
        let all = || {
            vec![
                finding(mount("/a"), measured(1.0, 2.0)),
                finding(mount("/a"), measured(3.0, 2.0)),
                finding(mount("/a"), wrong()),
                finding(mount("/b"), measured(1.0, 2.0)),
            ]
        };
        let left = |events: &[Event]| {
            let mut findings = all();
            let text = withhold(&mut findings, events);
            (findings.len(), text)
        };
        assert_eq!(left(&[]), (4, None));
        assert_eq!(left(&[Event::seen("other", mount("/a"), "")]), (4, None));
        let (count, text) = left(&[Event::disturbed(mount("/a"), "dd of uid 0", "used by dd")]);
        assert_eq!((count, text.as_deref()), (3, Some("used by dd; not judged: 2 MB/s")));
        assert_eq!(left(&[Event::disturbed(Entity::node(), "make of uid 1", "busy")]).0, 2);
    }

    #[test]
    fn a_repeated_disturbance_names_the_program_and_is_only_watched() {
        let event = Event::disturbed(mount("/a"), "dd of uid 0", "used by dd (pid 7, root)");
        let finding = disturbed_repeatedly(&CheckId::new("storage").unwrap(), &event);
        assert_eq!(finding.text, "storage disturbed 3 times in a row by dd of uid 0: used by dd (pid 7, root)");
        assert_eq!(
            (finding.severity, finding.confirm, finding.rule.as_str()),
            (Severity::Monitor, 1, DISTURBED_REPEATEDLY)
        );
    }
}
