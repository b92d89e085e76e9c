//! Comparison of a node's clock with the controller's.

use crate::{
    finding::{Evidence, Finding, Severity, Verdict},
    ids::{CheckId, RuleId},
    observation::Entity,
    reason::ReasonCode,
    time::{Span, Timestamp},
};

/// How far a node's clock may be off before it is a finding.
pub const CLOCK_TOLERANCE: Span = Span::minutes(5);

/// Returns a finding if a node's clock is wrong: its work began before it was requested, or ended after the controller
/// received the result.
pub fn check_clock(
    check: &CheckId,
    requested: Timestamp,
    started: Timestamp,
    ended: Timestamp,
    received: Timestamp,
) -> Option<Finding> {
    let (off, direction) = if started < requested.minus(CLOCK_TOLERANCE) {
        (requested.since(started), "behind")
    } else if ended > received.plus(CLOCK_TOLERANCE) {
        (ended.since(received), "ahead of")
    } else {
        return None;
    };
    Some(Finding {
        check: check.clone(),
        entity: Entity::node(),
        verdict: Verdict::Fail,
        severity: Severity::Monitor,
        remedy: Severity::Monitor.default_remedy(),
        reason: ReasonCode::fixed("clock-off"),
        text: format!("the node's clock is at least {} {direction} the controller's", Span::from_secs(off.secs())),
        rule: RuleId::new("clock-off").expect("a plain word is a rule name"),
        evidence: Evidence::Nothing,
        confirm: 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_reported_wrong_only_if_no_delay_explains_it() {
        let at = |minutes: i64| Timestamp::from_secs(1_000_000 + minutes * 60);
        let judge = |started, ended, received| {
            check_clock(&CheckId::new("disk").unwrap(), at(0), at(started), at(ended), at(received))
        };
        assert_eq!(judge(1, 10, 10), None);
        assert_eq!(judge(1, 10, 600), None, "a result may be read hours after it was written");
        assert_eq!(judge(-5, 3, 10), None);
        assert!(judge(-6, 3, 10).unwrap().text.contains("6m behind"));
        assert!(judge(1, 16, 10).unwrap().text.contains("6m ahead"));
    }
}
