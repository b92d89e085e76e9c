//! From an observation to a verdict: a function of evidence, rules and profile, and of nothing else.
//!
//! The order of doubt is fixed: anything that fails makes the verdict `Fail`; else anything that could not be judged
//! makes it `Inconclusive`; only when every rule had its number and every number kept its limit is it `Pass`.

use crate::{
    finding::{Evidence, Finding, Severity, Verdict},
    ids::{CheckId, RuleId},
    observation::{Entity, Metric, Observation},
    policy::{Rule, When},
    profile::Profile,
    reason::ReasonCode,
    time::{Span, Timestamp},
};

/// A verdict with its reason and everything that is wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub text: String,
    /// Only what fails. The worst comes first; all are kept.
    pub findings: Vec<Finding>,
}

const WITHIN_LIMITS: ReasonCode = ReasonCode::fixed("within-limits");
const NOTHING_MEASURED: ReasonCode = ReasonCode::fixed("nothing-measured");
const NO_LIMIT: ReasonCode = ReasonCode::fixed("no-limit");
const METRIC_MISSING: ReasonCode = ReasonCode::fixed("metric-missing");
const NOT_A_NUMBER: ReasonCode = ReasonCode::fixed("not-a-number");

impl Judgement {
    fn inconclusive(reason: ReasonCode, text: String) -> Self {
        Self { verdict: Verdict::Inconclusive, reason, text, findings: Vec::new() }
    }
}

/// Judges one check's observation. `rules` may hold rules of other checks; they are passed by.
pub fn judge(rules: &[Rule], profile: Option<&Profile>, check: &CheckId, observation: &Observation) -> Judgement {
    let (metrics, events, unread) = match observation {
        Observation::NotApplicable(why) => {
            return Judgement {
                verdict: Verdict::NotApplicable,
                reason: why.code.clone(),
                text: why.text.clone(),
                findings: Vec::new(),
            };
        }
        Observation::CouldNot(failure) => {
            return Judgement::inconclusive(ReasonCode::fixed(failure.kind.code()), failure.text.clone());
        }
        Observation::Measured { metrics, events, unread } => (metrics, events, unread),
    };
    if metrics.is_empty() && events.is_empty() {
        return Judgement::inconclusive(NOTHING_MEASURED, "the check ran and measured nothing".to_owned());
    }

    let mut findings = Vec::new();
    let mut doubt = Doubt::default();
    for rule in rules.iter().filter(|rule| rule.check == *check) {
        if let When::Event(code) = &rule.when {
            doubt.judged_any = true;
            findings.extend(events.iter().filter(|event| event.code == *code).map(|event| {
                let key = event.key.as_deref().and_then(|key| key.parse().ok());
                let known_by = key.map(|key| (event.code.clone(), key));
                let evidence = Evidence::Event { text: event.text.clone(), at: event.at, known_by };
                let text = fill(&rule.text, &event.entity, &event.text, "");
                finding(rule, event.entity.clone(), text, evidence)
            }));
        } else {
            judge_metric(rule, profile, metrics, &mut findings, &mut doubt);
        }
    }
    findings.sort_by(|a, b| b.severity.cmp(&a.severity).then_with(|| a.rule.cmp(&b.rule)));
    match findings.first() {
        Some(worst) => {
            Judgement { verdict: Verdict::Fail, reason: worst.reason.clone(), text: worst.text.clone(), findings }
        }
        None => match unread.first() {
            Some(failure) => Judgement::inconclusive(ReasonCode::fixed(failure.kind.code()), failure.text.clone()),
            None => doubt.settle(),
        },
    }
}

/// What kept a rule from judging.
#[derive(Default)]
struct Doubt {
    judged_any: bool,
    judged: Vec<String>,
    unjudged: Vec<(String, ReasonCode, String)>,
}

impl Doubt {
    fn settle(self) -> Judgement {
        // A metric without a profile to hold it against is judged all the same if another rule has a limit for it.
        let open = self.unjudged.into_iter().find(|(metric, _, _)| !self.judged.contains(metric));
        match open {
            Some((_, reason, text)) => Judgement::inconclusive(reason, text),
            None if !self.judged_any => {
                Judgement::inconclusive(NO_LIMIT, "no rule says what to make of these measurements".to_owned())
            }
            None => Judgement {
                verdict: Verdict::Pass,
                reason: WITHIN_LIMITS,
                text: "every measurement keeps its limit".to_owned(),
                findings: Vec::new(),
            },
        }
    }
}

fn judge_metric(
    rule: &Rule,
    profile: Option<&Profile>,
    metrics: &[Metric],
    findings: &mut Vec<Finding>,
    doubt: &mut Doubt,
) {
    let expected = |metric| profile.and_then(|profile| profile.expect.get(metric)).copied();
    let above: fn(f64, f64) -> bool = |value, limit| value > limit;
    let below: fn(f64, f64) -> bool = |value, limit| value < limit;
    let other: fn(f64, f64) -> bool = |value, limit| (value - limit).abs() > limit.abs() * 1e-9;
    let (name, limit, is_bad) = match &rule.when {
        When::Above { metric, limit } => (metric, Some(*limit), above),
        When::Below { metric, limit } => (metric, Some(*limit), below),
        When::BelowProfile { metric, percent } => {
            (metric, expected(metric).map(|value| value * percent / 100.0), below)
        }
        When::NotProfile { metric } => (metric, expected(metric), other),
        When::Event(_) => return,
    };
    let mut found = false;
    for metric in metrics.iter().filter(|metric| metric.name == *name) {
        found = true;
        let Some(limit) = limit else {
            let text = format!("no profile says what `{name}` should be on this machine type");
            doubt.unjudged.push((name.clone(), NO_LIMIT, text));
            continue;
        };
        if !metric.value.is_finite() {
            let text = format!("`{name}` of {} is not a number", metric.entity);
            doubt.unjudged.push((format!("{name} of {}", metric.entity), NOT_A_NUMBER, text));
            continue;
        }
        doubt.judged_any = true;
        doubt.judged.push(name.clone());
        if is_bad(metric.value, limit) {
            let evidence = Evidence::Measured { metric: name.clone(), value: metric.value, limit };
            let text = fill(&rule.text, &metric.entity, &number(metric.value), &number(limit));
            findings.push(finding(rule, metric.entity.clone(), text, evidence));
        }
    }
    if !found {
        doubt.unjudged.push((name.clone(), METRIC_MISSING, format!("the check did not report `{name}`")));
    }
}

fn finding(rule: &Rule, entity: Entity, text: String, evidence: Evidence) -> Finding {
    Finding {
        check: rule.check.clone(),
        entity,
        verdict: Verdict::Fail,
        severity: rule.severity,
        remedy: rule.remedy.unwrap_or_else(|| rule.severity.usual_remedy()),
        reason: rule.reason.clone(),
        text,
        rule: rule.id.clone(),
        evidence,
        confirm: rule.confirm,
    }
}

fn fill(template: &str, entity: &Entity, value: &str, limit: &str) -> String {
    template.replace("{entity}", &entity.to_string()).replace("{value}", value).replace("{limit}", limit)
}

/// As few digits as tell the story: 99.5, 4096, 21.4 G.
fn number(value: f64) -> String {
    const SCALES: [(f64, &str); 4] = [(1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")];
    let scale = SCALES.iter().find(|(scale, _)| value.abs() >= *scale);
    let (value, suffix) = scale.map_or((value, ""), |(scale, suffix)| (value / scale, *suffix));
    let rounded = if value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    let short = match rounded.split_once('.') {
        Some(_) => rounded.trim_end_matches('0').trim_end_matches('.'),
        None => &rounded,
    };
    format!("{short}{suffix}")
}

/// How far a node's clock may be off before that itself is a finding.
pub const CLOCK_TOLERANCE: Span = Span::minutes(5);

/// A node whose clock cannot be right: its work began before it was asked for, or ended after its result was read.
pub fn judge_clock(
    check: &CheckId,
    asked: Timestamp,
    started: Timestamp,
    ended: Timestamp,
    received: Timestamp,
) -> Option<Finding> {
    let (off, way) = if started < asked.minus(CLOCK_TOLERANCE) {
        (asked.since(started), "behind")
    } else if ended > received.plus(CLOCK_TOLERANCE) {
        (ended.since(received), "ahead")
    } else {
        return None;
    };
    Some(Finding {
        check: check.clone(),
        entity: Entity::node(),
        verdict: Verdict::Fail,
        severity: Severity::Monitor,
        remedy: Severity::Monitor.usual_remedy(),
        reason: ReasonCode::fixed("clock-off"),
        text: format!("the node's clock is at least {} {way} of the controller's", Span::from_secs(off.secs())),
        rule: RuleId::new("clock-off").expect("a plain word is a rule name"),
        evidence: Evidence::Nothing,
        confirm: 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ids::Sku,
        observation::{EntityKind, Event, FailureKind, ProbeFailure, Unit, Why},
    };

    fn rules() -> Vec<Rule> {
        #[derive(serde::Deserialize)]
        struct File {
            rules: Vec<Rule>,
        }
        let text = r#"
            [[rules]]
            id = "full"
            check = "disk"
            metric = "used"
            above = 90.0
            severity = "monitor"
            reason = "disk-full"
            text = "{entity} is {value} % full, the limit is {limit} %"

            [[rules]]
            id = "slow"
            check = "disk"
            metric = "rate"
            below_percent_of_profile = 93.0
            severity = "reset"
            reason = "disk-slow"
            text = "{value} of {limit}"
            confirm = 2

            [[rules]]
            id = "dead"
            check = "disk"
            event = "disk-dead"
            severity = "isolate"
            reason = "disk-dead"
            text = "{value}"
        "#;
        toml::from_str::<File>(text).unwrap().rules
    }

    fn disk() -> CheckId {
        CheckId::new("disk").unwrap()
    }

    fn metric(name: &str, value: f64) -> Metric {
        Metric { name: name.into(), entity: Entity::new(EntityKind::Mount, "/"), value, unit: Unit::Percent }
    }

    fn profile() -> Profile {
        Profile { sku: Sku::new("h200").unwrap(), version: 1, expect: [("rate".to_owned(), 100.0)].into() }
    }

    fn measured(metrics: Vec<Metric>, events: Vec<Event>) -> Observation {
        Observation::measured(metrics, events)
    }

    fn dead() -> Event {
        let code = ReasonCode::fixed("disk-dead");
        Event { code, entity: Entity::node(), at: None, text: "sda is gone".into(), key: None }
    }

    #[test]
    fn each_kind_of_observation_has_its_verdict_and_only_a_full_measurement_passes() {
        let why = Why { code: ReasonCode::fixed("no-disk"), text: String::new() };
        let cases: Vec<(&str, Observation, Option<Profile>, Verdict, &str)> = vec![
            (
                "all kept",
                measured(vec![metric("used", 50.0), metric("rate", 99.0)], vec![]),
                Some(profile()),
                Verdict::Pass,
                "within-limits",
            ),
            (
                "over",
                measured(vec![metric("used", 90.1), metric("rate", 99.0)], vec![]),
                Some(profile()),
                Verdict::Fail,
                "disk-full",
            ),
            (
                "at the limit",
                measured(vec![metric("used", 90.0), metric("rate", 93.0)], vec![]),
                Some(profile()),
                Verdict::Pass,
                "within-limits",
            ),
            (
                "no profile",
                measured(vec![metric("used", 50.0), metric("rate", 99.0)], vec![]),
                None,
                Verdict::Inconclusive,
                "no-limit",
            ),
            (
                "fails although something is unjudged",
                measured(vec![metric("used", 95.0), metric("rate", 1.0)], vec![]),
                None,
                Verdict::Fail,
                "disk-full",
            ),
            (
                "one number missing",
                measured(vec![metric("used", 50.0)], vec![]),
                Some(profile()),
                Verdict::Inconclusive,
                "metric-missing",
            ),
            (
                "not a number",
                measured(vec![metric("used", f64::NAN), metric("rate", 99.0)], vec![]),
                Some(profile()),
                Verdict::Inconclusive,
                "not-a-number",
            ),
            ("nothing", measured(vec![], vec![]), Some(profile()), Verdict::Inconclusive, "nothing-measured"),
            (
                "an event",
                measured(vec![metric("used", 5.0), metric("rate", 99.0)], vec![dead()]),
                Some(profile()),
                Verdict::Fail,
                "disk-dead",
            ),
            (
                "timed out",
                Observation::CouldNot(ProbeFailure::new(FailureKind::TimedOut, "")),
                None,
                Verdict::Inconclusive,
                "timed-out",
            ),
            ("not here", Observation::NotApplicable(why), None, Verdict::NotApplicable, "no-disk"),
        ];
        for (name, observation, profile, verdict, reason) in cases {
            let judgement = judge(&rules(), profile.as_ref(), &disk(), &observation);
            assert_eq!((judgement.verdict, judgement.reason.as_str()), (verdict, reason), "{name}");
            assert_eq!(judgement.findings.is_empty(), verdict != Verdict::Fail, "{name}");
        }
    }

    #[test]
    fn a_check_without_any_rule_is_never_a_pass() {
        let judgement = judge(&[], None, &disk(), &measured(vec![metric("used", 1.0)], vec![]));
        assert_eq!(judgement.verdict, Verdict::Inconclusive);
    }

    #[test]
    fn the_worst_finding_speaks_first_and_none_is_lost() {
        let observation = measured(vec![metric("used", 99.0), metric("rate", 10.0)], vec![dead()]);
        let judgement = judge(&rules(), Some(&profile()), &disk(), &observation);
        let severities: Vec<_> = judgement.findings.iter().map(|finding| finding.severity).collect();
        assert_eq!(severities, [Severity::Isolate, Severity::Reset, Severity::Monitor]);
        assert_eq!(judgement.findings[2].text, "mount:/ is 99 % full, the limit is 90 %");
        assert_eq!(judgement.findings[1].confirm, 2);
    }

    #[test]
    fn numbers_are_written_as_people_read_them() {
        for (value, text) in
            [(99.0, "99"), (0.5, "0.5"), (4096.0, "4096"), (21_379_052_162.0, "21.38 G"), (6.38e14, "638 T")]
        {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_clock_is_off_only_when_no_honest_delay_explains_it() {
        let at = |minutes: i64| Timestamp::from_secs(1_000_000 + minutes * 60);
        let judge = |started, ended, received| judge_clock(&disk(), at(0), at(started), at(ended), at(received));
        assert_eq!(judge(1, 10, 10), None);
        assert_eq!(judge(1, 10, 600), None, "a result may be read hours after it was written");
        assert_eq!(judge(-5, 3, 10), None);
        assert!(judge(-6, 3, 10).unwrap().text.contains("6m behind"));
        assert!(judge(1, 16, 10).unwrap().text.contains("6m ahead"));
    }
}
