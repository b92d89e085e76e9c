//! Classification of an observation: a pure function of the evidence, the rules, the profile and earlier results.
//!
//! The precedence is fixed. Any failing rule makes the verdict `Fail`; otherwise anything that could not be measured
//! makes it `Inconclusive`; it is `Pass` only if every metric that was compared is within its limit. A metric without an
//! expected value is not judged: nothing is wrong with the node, and nothing is known to be right. If no metric was
//! compared, the check is not applicable (`no-expectation`, or `no-hardware` if it counted none); if some were, it
//! passes as `partly-judged`, and the others are listed.

mod baselines;
mod clock;
mod disturbed;
mod expectations;
mod multi_node;

use std::collections::BTreeMap;

use crate::{
    finding::{Evidence, Finding, Severity, Verdict},
    hardware_class::HardwareClass,
    ids::CheckId,
    observation::{CodedReason, Entity, Event, FailureKind, Metric, Observation, Unit},
    policy::{Rule, When},
    profile::Profile,
    reason::{ReasonCode, coded},
    time::Span,
};

pub use baselines::{BaselineNeeds, Baselines, median};
pub use clock::{CLOCK_TOLERANCE, check_clock};
pub use disturbed::{DISTURBED_LIMIT, DISTURBED_REPEATEDLY, disturbed_repeatedly};
pub use expectations::{Expectation, ExpectationSource, ExpectationSources};
pub use multi_node::remove_shared_findings;

/// A verdict with its reason and all findings.
#[derive(Debug, Clone, PartialEq)]
pub struct Classification {
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub text: String,
    /// Failures only, worst first.
    pub findings: Vec<Finding>,
    /// Metrics without an expected value, each once.
    pub not_judged: Vec<String>,
}

coded! {
    /// Reasons of a result that no rule provides.
    pub enum ClassificationReason {
        WithinLimits => "within-limits",
        /// Everything that was compared is within its limit; other metrics have no expected value.
        PartlyJudged => "partly-judged",
        /// Nothing that was measured has an expected value.
        NoExpectation => "no-expectation",
        /// Nothing of this kind was found, and nothing expects it.
        NoHardware => "no-hardware",
        /// Nothing of this kind was found, and it is expected.
        HardwareMissing => "hardware-missing",
        NothingMeasured => "nothing-measured",
        MetricMissing => "metric-missing",
        NotANumber => "not-a-number",
        NoHistory => "no-past",
        /// The nodes of a run failed together, and no result attributes the failure to one of them.
        FailedTogether => "failed-together",
        Booting => "booting",
    }
}

const WITHIN_LIMITS: ReasonCode = ReasonCode::fixed(ClassificationReason::WithinLimits.code());
const NOTHING_MEASURED: ReasonCode = ReasonCode::fixed(ClassificationReason::NothingMeasured.code());
const PARTLY_JUDGED: ReasonCode = ReasonCode::fixed(ClassificationReason::PartlyJudged.code());
const NO_EXPECTATION: ReasonCode = ReasonCode::fixed(ClassificationReason::NoExpectation.code());
const NO_HARDWARE: ReasonCode = ReasonCode::fixed(ClassificationReason::NoHardware.code());
const HARDWARE_MISSING: ReasonCode = ReasonCode::fixed(ClassificationReason::HardwareMissing.code());
const METRIC_MISSING: ReasonCode = ReasonCode::fixed(ClassificationReason::MetricMissing.code());
const NOT_A_NUMBER: ReasonCode = ReasonCode::fixed(ClassificationReason::NotANumber.code());
const NO_HISTORY: ReasonCode = ReasonCode::fixed(ClassificationReason::NoHistory.code());
const BOOTING: ReasonCode = ReasonCode::fixed(ClassificationReason::Booting.code());
const DISTURBED: ReasonCode = ReasonCode::fixed(FailureKind::Disturbed.code());

impl Classification {
    fn inconclusive(reason: ReasonCode, text: String) -> Self {
        Self { verdict: Verdict::Inconclusive, reason, text, findings: Vec::new(), not_judged: Vec::new() }
    }

    /// A failure with these findings, worst first.
    fn failed(findings: Vec<Finding>, worst: &Finding, not_judged: Vec<String>) -> Self {
        let (reason, text) = (worst.reason.clone(), worst.text.clone());
        Self { verdict: Verdict::Fail, reason, text, findings, not_judged }
    }
}

/// Returns whether a result with this reason has measurements without an expected value.
pub fn is_not_judged(reason: &ReasonCode) -> bool {
    *reason == NO_EXPECTATION || *reason == PARTLY_JUDGED
}

/// Classifies the observation of one check with a profile alone.
pub fn classify(
    rules: &[Rule],
    profile: Option<&Profile>,
    check: &CheckId,
    observation: &Observation,
) -> Classification {
    let baselines = Baselines::default();
    classify_with(rules, ExpectationSources::of_profile(profile, &baselines), check, observation)
}

/// Classifies the observation of one check. Rules of other checks are ignored.
pub fn classify_with(
    rules: &[Rule],
    sources: ExpectationSources<'_>,
    check: &CheckId,
    observation: &Observation,
) -> Classification {
    let (metrics, events, unread) = match observation {
        Observation::NotApplicable(why) => return classify_absence(sources, why),
        Observation::Failed(failure) => {
            return Classification::inconclusive(ReasonCode::fixed(failure.kind.code()), failure.text.clone());
        }
        Observation::Measured { metrics, events, failures: unread } => (metrics, events, unread),
    };
    if metrics.is_empty() && events.is_empty() {
        return match unread.first() {
            Some(failure) => Classification::inconclusive(ReasonCode::fixed(failure.kind.code()), failure.text.clone()),
            None => Classification::inconclusive(NOTHING_MEASURED, "the check ran and measured nothing".to_owned()),
        };
    }

    let past = sources.baselines;
    let mut findings = Vec::new();
    let mut undecided = Undecided::default();
    for rule in rules.iter().filter(|rule| rule.check == *check) {
        match &rule.when {
            When::Event(code) => {
                undecided.any_classified = true;
                findings.extend(events.iter().filter(|event| event.code == *code).map(|event| {
                    let evidence = event_evidence(event);
                    let text = fill(&rule.text, &event.entity, &event.text, "");
                    finding(rule, event.entity.clone(), text, evidence)
                }));
            }
            When::EventsWithin { code, times, within } => {
                let matching: Vec<&Event> = events.iter().filter(|event| event.code == *code).collect();
                classify_events(rule, (*times, *within), past, &matching, &mut findings, &mut undecided);
            }
            _ => classify_metric(rule, sources, metrics, &mut findings, &mut undecided),
        }
    }
    findings.sort_by(|a, b| b.severity.cmp(&a.severity).then_with(|| a.rule.cmp(&b.rule)));
    let withheld = disturbed::withhold(&mut findings, events);
    match (findings.first().cloned(), unread.first(), withheld) {
        (Some(worst), ..) => Classification::failed(findings, &worst, undecided.not_judged()),
        (None, Some(failure), _) => {
            Classification::inconclusive(ReasonCode::fixed(failure.kind.code()), failure.text.clone())
        }
        (None, None, Some(text)) => Classification::inconclusive(DISTURBED, text),
        (None, None, None) => undecided.settle(metrics),
    }
}

/// Classifies a check that found nothing of its kind: missing hardware where it is expected, otherwise not applicable.
fn classify_absence(sources: ExpectationSources<'_>, why: &CodedReason) -> Classification {
    let class = HardwareClass::from_code(why.code.as_str());
    let expected = class.and_then(|class| Some((class, sources.of_count(class.count_metric())?)));
    if let Some((class, expected)) = expected.filter(|(_, expected)| expected.value > 0.0) {
        let note = expected.source.note().map_or_else(String::new, |note| format!(" ({note})"));
        let text = format!("no {} found, expected {}{note}: {}", class.label(), number(expected.value), why.text);
        return Classification::inconclusive(HARDWARE_MISSING, text);
    }
    Classification {
        verdict: Verdict::NotApplicable,
        reason: why.code.clone(),
        text: why.text.clone(),
        findings: Vec::new(),
        not_judged: Vec::new(),
    }
}

/// Collects what kept rules from deciding.
#[derive(Default)]
struct Undecided {
    any_classified: bool,
    classified: Vec<(String, Entity)>,
    unclassified: Vec<Unclassified>,
}

struct Unclassified {
    /// The metric, or the rule whose events could not be counted.
    what: String,
    /// None: all parts.
    entity: Option<Entity>,
    reason: ReasonCode,
    text: String,
}

impl Undecided {
    fn add_unclassified(&mut self, what: impl Into<String>, of: Option<Entity>, reason: ReasonCode, text: String) {
        self.unclassified.push(Unclassified { what: what.into(), entity: of, reason, text });
    }

    fn add_not_judged(&mut self, metric: &str, of: Entity, text: String) {
        self.add_unclassified(metric, Some(of), NO_EXPECTATION, text);
    }

    /// Returns what no rule decided. A metric that one rule could not compare is still classified if another rule has a
    /// limit for it.
    fn open(&self) -> impl Iterator<Item = &Unclassified> {
        self.unclassified.iter().filter(|missing| {
            let same = |entity: &Entity| missing.entity.as_ref().is_none_or(|of| of == entity);
            !self.classified.iter().any(|(metric, entity)| *metric == missing.what && same(entity))
        })
    }

    /// Returns the metrics without an expected value, each once.
    fn not_judged(&self) -> Vec<String> {
        let mut metrics: Vec<String> = self
            .open()
            .filter(|missing| missing.reason == NO_EXPECTATION)
            .map(|missing| missing.what.clone())
            .collect();
        metrics.sort();
        metrics.dedup();
        metrics
    }

    fn settle(self, metrics: &[Metric]) -> Classification {
        if let Some(missing) = self.open().find(|missing| missing.reason != NO_EXPECTATION) {
            return Classification::inconclusive(missing.reason.clone(), missing.text.clone());
        }
        let not_judged = self.not_judged();
        let (verdict, reason, text) = match (self.any_classified, not_judged.is_empty()) {
            (true, true) => (Verdict::Pass, WITHIN_LIMITS, "all measurements within limits".to_owned()),
            (true, false) => {
                let text = format!("within limits; not judged, no expected value: {}", not_judged.join(", "));
                (Verdict::Pass, PARTLY_JUDGED, text)
            }
            (false, _) if is_count_of_none(metrics) => {
                (Verdict::NotApplicable, NO_HARDWARE, "none found and none expected".to_owned())
            }
            (false, _) => {
                let text =
                    self.open().next().map_or("no rule has a limit for these measurements", |missing| &missing.text);
                (Verdict::NotApplicable, NO_EXPECTATION, text.to_owned())
            }
        };
        Classification { verdict, reason, text, findings: Vec::new(), not_judged }
    }
}

/// Returns whether everything that was measured is a count of zero.
fn is_count_of_none(metrics: &[Metric]) -> bool {
    metrics.iter().all(|metric| metric.unit == Unit::Count && metric.value == 0.0)
}

/// A limit, and what it is based on.
struct RuleLimit {
    value: f64,
    expectation: Option<Expectation>,
}

impl From<f64> for RuleLimit {
    fn from(value: f64) -> Self {
        Self { value, expectation: None }
    }
}

impl RuleLimit {
    fn is_declared(&self) -> bool {
        self.expectation.is_some_and(|expectation| expectation.source == ExpectationSource::Scheduler)
    }

    fn of(expectation: Expectation, percent: f64) -> Self {
        Self { value: expectation.value * percent / 100.0, expectation: Some(expectation) }
    }
}

impl ExpectationSources<'_> {
    /// Returns the limit of a condition for one part, or why there is none.
    fn limit(self, when: &When, entity: &Entity) -> Result<RuleLimit, String> {
        let none = |metric: &str| format!("no profile has an expected `{metric}` for this machine type");
        let of_median = |values: &[f64], at_least: u32, percent: f64| {
            let enough = values.len() as u64 >= u64::from(at_least.max(1));
            enough.then(|| median(values)).flatten().map(|value| RuleLimit::from(value * percent / 100.0))
        };
        match when {
            When::Above { limit, .. } | When::Below { limit, .. } => Ok(RuleLimit::from(*limit)),
            When::BelowProfile { metric, percent, of } => {
                let metric = of.as_ref().unwrap_or(metric);
                self.in_profile(metric).map(|expected| RuleLimit::of(expected, *percent)).ok_or_else(|| none(metric))
            }
            When::NotProfile { metric } => {
                self.of_count(metric).map(|expected| RuleLimit::of(expected, 100.0)).ok_or_else(|| none(metric))
            }
            When::BelowPeers { metric, percent, at_least } => {
                let peers = self.baselines.peer_values_of(metric);
                of_median(peers, *at_least, *percent).ok_or_else(|| {
                    format!("`{metric}` is known for {} other nodes of this type, {at_least} are needed", peers.len())
                })
            }
            When::BelowOwn { metric, percent, at_least } => {
                let own = self.baselines.own_values_of(metric, entity);
                of_median(own, *at_least, *percent).ok_or_else(|| {
                    format!("`{metric}` of {entity} has {} earlier results, {at_least} are needed", own.len())
                })
            }
            When::NOfLastM { when, .. } => self.limit(when, entity),
            When::Event(_) | When::EventsWithin { .. } => Err("an event has no limit".to_owned()),
        }
    }
}

fn violates(when: &When, value: f64, limit: f64) -> bool {
    match when {
        When::Above { .. } => value > limit,
        When::NotProfile { .. } => (value - limit).abs() > limit.abs() * 1e-9,
        When::NOfLastM { when, .. } => violates(when, value, limit),
        _ => value < limit,
    }
}

/// Whether a condition held, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConditionResult {
    Yes,
    No,
    /// Too few earlier results are known to decide.
    Unknown,
}

/// For `n` of the last `m` results, unknown ones may have gone either way.
fn evaluate_condition(when: &When, metric: &Metric, limit: f64, past: &Baselines) -> ConditionResult {
    let When::NOfLastM { when, times, last } = when else {
        return if violates(when, metric.value, limit) { ConditionResult::Yes } else { ConditionResult::No };
    };
    let earlier = past.own_values_of(&metric.name, &metric.entity);
    let last = usize::try_from(*last).unwrap_or(usize::MAX);
    let known = std::iter::once(&metric.value).chain(earlier).take(last);
    let bad = known.clone().filter(|value| violates(when, **value, limit)).count() as u64;
    let unknown = (last - known.count()) as u64;
    if bad >= u64::from(*times) {
        ConditionResult::Yes
    } else if bad + unknown < u64::from(*times) {
        ConditionResult::No
    } else {
        ConditionResult::Unknown
    }
}

fn classify_metric(
    rule: &Rule,
    sources: ExpectationSources<'_>,
    metrics: &[Metric],
    findings: &mut Vec<Finding>,
    undecided: &mut Undecided,
) {
    let Some(name) = rule.when.metric() else { return };
    let mut found = false;
    for metric in metrics.iter().filter(|metric| metric.name == name) {
        found = true;
        let entity = &metric.entity;
        let limit = match sources.limit(&rule.when, entity) {
            Ok(limit) => limit,
            Err(text) => {
                undecided.add_not_judged(name, entity.clone(), text);
                continue;
            }
        };
        if !metric.value.is_finite() {
            let text = format!("`{name}` of {entity} is not a number");
            undecided.add_unclassified(format!("{name} as a number"), None, NOT_A_NUMBER, text);
            continue;
        }
        // A scheduler may offer less than the machine has.
        let is_above_declared = limit.is_declared() && metric.value > limit.value;
        match evaluate_condition(&rule.when, metric, limit.value, sources.baselines) {
            _ if is_above_declared => {
                undecided.any_classified = true;
                undecided.classified.push((name.to_owned(), entity.clone()));
            }
            ConditionResult::Unknown => {
                let text = format!("`{name}` of {entity} has too few earlier results");
                undecided.add_unclassified(name, Some(entity.clone()), NO_HISTORY, text);
            }
            ConditionResult::No if rule.backstop => {}
            ConditionResult::No => {
                undecided.any_classified = true;
                undecided.classified.push((name.to_owned(), entity.clone()));
            }
            ConditionResult::Yes => findings.push(metric_finding(rule, metric, &limit)),
        }
    }
    if !found && !rule.where_measured {
        undecided.add_unclassified(name, None, METRIC_MISSING, format!("the check did not report `{name}`"));
    }
}

/// Returns the finding about a metric beyond its limit. Its severity is at most what the expected value supports.
fn metric_finding(rule: &Rule, metric: &Metric, limit: &RuleLimit) -> Finding {
    let evidence = Evidence::Measured { metric: metric.name.clone(), value: metric.value, limit: limit.value };
    let mut text = fill(&rule.text, &metric.entity, &number(metric.value), &number(limit.value));
    if let Some(note) = limit.expectation.and_then(|expectation| expectation.source.note()) {
        text = format!("{text} ({note})");
    }
    let mut finding = finding(rule, metric.entity.clone(), text, evidence);
    let severity_limit = limit.expectation.and_then(|expectation| expectation.severity_limit);
    if let Some(most) = severity_limit.filter(|most| *most < finding.severity) {
        finding.severity = most;
        finding.remedy = Severity::default_remedy(most);
    }
    finding
}

/// Counts events about one part within a period before the observation. An event without a time counts as happening
/// now.
fn classify_events(
    rule: &Rule,
    (times, within): (u32, Span),
    past: &Baselines,
    matching: &[&Event],
    findings: &mut Vec<Finding>,
    undecided: &mut Undecided,
) {
    if matching.is_empty() {
        undecided.any_classified = true;
        return;
    }
    let Some(at) = past.at else {
        let text =
            format!("rule `{}` counts events within {within}, but the time of the observation is unknown", rule.id);
        undecided.add_unclassified(rule.id.as_str(), None, NO_HISTORY, text);
        return;
    };
    undecided.any_classified = true;
    let since = at.minus(within);
    let mut by_part: BTreeMap<&Entity, Vec<&Event>> = BTreeMap::new();
    for event in matching.iter().filter(|event| event.at.is_none_or(|moment| moment > since)) {
        let seen = by_part.entry(&event.entity).or_default();
        // Events with the same key are one event.
        if event.key.is_none() || seen.iter().all(|other| other.key != event.key) {
            seen.push(event);
        }
    }
    for (entity, seen) in by_part.into_iter().filter(|(_, seen)| seen.len() as u64 >= u64::from(times)) {
        let Some(newest) = seen.iter().max_by_key(|event| event.at) else { continue };
        let evidence = event_evidence(newest);
        let text = fill(&rule.text, entity, &format!("{} times: {}", seen.len(), newest.text), &times.to_string());
        findings.push(finding(rule, entity.clone(), text, evidence));
    }
}

/// How long a machine has been up, and what that means for the results of one check.
#[derive(Debug, Clone, Copy)]
pub struct BootGrace {
    /// `None`: unknown, so that no failure is suspended.
    pub up: Option<Span>,
    pub grace: Span,
    /// It is a deep test: what it saw go wrong, such as a wrong sum, did happen while it ran.
    pub is_deep: bool,
}

/// Suspends failures shortly after a boot: a measurement may still be settling (links train, daemons start) and fails
/// nothing yet. An event with a recorded time did happen, and still fails; so does an event of a deep test.
#[must_use]
pub fn apply_boot_grace(judgement: Classification, boot: BootGrace) -> Classification {
    let BootGrace { up, grace, is_deep } = boot;
    let Some(up) = up.filter(|up| *up < grace && judgement.verdict == Verdict::Fail) else { return judgement };
    let (stand, wait): (Vec<_>, Vec<_>) = judgement
        .findings
        .into_iter()
        .partition(|finding| matches!(finding.evidence, Evidence::Event { at, .. } if is_deep || at.is_some()));
    match (stand.first(), wait.first()) {
        (Some(worst), _) => Classification::failed(stand.clone(), worst, judgement.not_judged),
        (None, waiting) => {
            let what = waiting.map_or(judgement.text.as_str(), |finding| finding.text.as_str());
            let text = format!("up for {up}, measurements do not count in the first {grace} after a boot: {what}");
            Classification::inconclusive(BOOTING, text)
        }
    }
}

fn event_evidence(event: &Event) -> Evidence {
    let key = event.key.as_deref().and_then(|key| key.parse().ok());
    let known_by = key.map(|key| (event.code.clone(), key));
    Evidence::Event { text: event.text.clone(), at: event.at, known_by }
}

fn finding(rule: &Rule, entity: Entity, text: String, evidence: Evidence) -> Finding {
    Finding {
        check: rule.check.clone(),
        entity,
        verdict: Verdict::Fail,
        severity: rule.severity,
        remedy: rule.remedy.unwrap_or_else(|| rule.severity.default_remedy()),
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

/// Formats a number with few digits: 99.5, 4096, 21.4 G.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::{
        finding::Severity,
        ids::Sku,
        node::Declared,
        observation::{EntityKind, FailureKind, ProbeFailure},
        profile::{Basis, Expected},
        time::Timestamp,
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
        Profile::stated(Sku::new("h200").unwrap(), [("rate", 100.0)])
    }

    fn measured(metrics: Vec<Metric>, events: Vec<Event>) -> Observation {
        Observation::measured(metrics, events)
    }

    fn dead() -> Event {
        let code = ReasonCode::fixed("disk-dead");
        Event { code, entity: Entity::node(), at: None, text: "sda is gone".into(), key: None }
    }

    fn disturbed(mount: &str) -> Event {
        Event::disturbed(Entity::new(EntityKind::Mount, mount), "dd of uid 0", "used by dd")
    }

    #[test]
    fn each_kind_of_observation_has_its_verdict_and_only_a_full_measurement_passes() {
        let why = CodedReason { code: ReasonCode::fixed("no-disk"), text: String::new() };
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
                Verdict::Pass,
                "partly-judged",
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
                Observation::Failed(ProbeFailure::new(FailureKind::TimedOut, "")),
                None,
                Verdict::Inconclusive,
                "timed-out",
            ),
            (
                "a low rate while another process used it",
                measured(vec![metric("used", 5.0), metric("rate", 9.0)], vec![disturbed("/")]),
                Some(profile()),
                Verdict::Inconclusive,
                "disturbed",
            ),
            (
                "a good rate although another process used it",
                measured(vec![metric("used", 5.0), metric("rate", 99.0)], vec![disturbed("/")]),
                Some(profile()),
                Verdict::Pass,
                "within-limits",
            ),
            (
                "a fault while another process used it",
                measured(vec![metric("used", 5.0), metric("rate", 9.0)], vec![disturbed("/"), dead()]),
                Some(profile()),
                Verdict::Fail,
                "disk-dead",
            ),
            (
                "a low rate while another part was used",
                measured(vec![metric("used", 5.0), metric("rate", 9.0)], vec![disturbed("/other")]),
                Some(profile()),
                Verdict::Fail,
                "disk-slow",
            ),
            ("not here", Observation::NotApplicable(why), None, Verdict::NotApplicable, "no-disk"),
        ];
        for (name, observation, profile, verdict, reason) in cases {
            let judgement = classify(&rules(), profile.as_ref(), &disk(), &observation);
            assert_eq!((judgement.verdict, judgement.reason.as_str()), (verdict, reason), "{name}");
            assert_eq!(judgement.findings.is_empty(), verdict != Verdict::Fail, "{name}");
        }
    }

    #[test]
    fn every_code_reads_back() {
        for why in ClassificationReason::ALL {
            assert_eq!(ClassificationReason::from_code(why.code()), Some(*why));
        }
    }

    #[test]
    fn a_check_without_any_rule_is_never_a_pass() {
        let judgement = classify(&[], None, &disk(), &measured(vec![metric("used", 1.0)], vec![]));
        assert_eq!((judgement.verdict, judgement.reason.as_str()), (Verdict::NotApplicable, "no-expectation"));
    }

    #[test]
    fn a_metric_without_an_expected_value_is_not_judged_and_blocks_nothing() {
        let count = |value| measured(vec![Metric::count("disks", Entity::node(), value)], vec![]);
        let rules = [rule("metric = \"disks\"\nnot_as_profile = true")];
        let judged = |value, past: &Baselines, declared: Option<&Declared>| {
            let sources = ExpectationSources { profile: None, declared, baselines: past };
            let result = classify_with(&rules, sources, &disk(), &count(value));
            (result.verdict, result.reason.to_string(), result.not_judged)
        };
        let none = Baselines::default();
        let expected = (Verdict::NotApplicable, "no-expectation".to_owned(), vec!["disks".to_owned()]);
        assert_eq!(judged(8.0, &none, None), expected);
        assert_eq!(judged(0.0, &none, None).1, "no-hardware");
        let accepted = Baselines { accepted: [("disks".to_owned(), 8.0)].into(), ..Baselines::default() };
        assert_eq!(judged(8.0, &accepted, None).0, Verdict::Pass);
        let sources = ExpectationSources { profile: None, declared: None, baselines: &accepted };
        let fewer = classify_with(&rules, sources, &disk(), &count(6.0));
        assert_eq!((fewer.verdict, fewer.findings[0].severity), (Verdict::Fail, Severity::Monitor));
        assert!(fewer.text.contains("as on this node before"), "{}", fewer.text);
    }

    #[test]
    fn hardware_that_is_expected_and_not_found_is_inconclusive() {
        let absent = Observation::NotApplicable(CodedReason { code: ReasonCode::fixed("no-gpu"), text: "none".into() });
        let baselines = Baselines::default();
        let verdict = |gpus| {
            let declared = Declared { gpus };
            let sources = ExpectationSources { profile: None, declared: Some(&declared), baselines: &baselines };
            let result = classify_with(&rules(), sources, &disk(), &absent);
            (result.verdict, result.reason.to_string())
        };
        assert_eq!(verdict(Some(8)), (Verdict::Inconclusive, "hardware-missing".to_owned()));
        assert_eq!(verdict(None), (Verdict::NotApplicable, "no-gpu".to_owned()));
        assert_eq!(verdict(Some(0)), (Verdict::NotApplicable, "no-gpu".to_owned()));
    }

    #[test]
    fn a_derived_figure_raises_monitor_at_most() {
        let mut derived = profile();
        derived.expect.insert("rate".to_owned(), Expected { value: 100.0, basis: Basis::Derived });
        let slow = measured(vec![metric("used", 1.0), metric("rate", 10.0)], vec![]);
        let finding = |profile: &Profile| classify(&rules(), Some(profile), &disk(), &slow).findings.remove(0);
        assert_eq!(finding(&profile()).severity, Severity::Reset);
        let weaker = finding(&derived);
        assert_eq!((weaker.severity, weaker.remedy), (Severity::Monitor, crate::finding::Remedy::Watch));
    }

    #[test]
    fn within_a_backstop_a_metric_is_not_judged_and_beyond_it_the_part_fails() {
        let rules = [
            rule("metric = \"rate\"\nbelow = 10.0\nbackstop = true"),
            Rule { id: "p".parse().unwrap(), ..rule("metric = \"rate\"\nbelow_percent_of_profile = 93.0") },
        ];
        let judged = |value, profile: Option<&Profile>| {
            classify(&rules, profile, &disk(), &measured(vec![metric("rate", value)], vec![])).reason.to_string()
        };
        assert_eq!(judged(50.0, None), "no-expectation");
        assert_eq!(judged(5.0, None), "bad");
        assert_eq!(judged(99.0, Some(&profile())), "within-limits");
        assert_eq!(judged(50.0, Some(&profile())), "bad");
    }

    #[test]
    fn the_worst_finding_speaks_first_and_none_is_lost() {
        let observation = measured(vec![metric("used", 99.0), metric("rate", 10.0)], vec![dead()]);
        let judgement = classify(&rules(), Some(&profile()), &disk(), &observation);
        let severities: Vec<_> = judgement.findings.iter().map(|finding| finding.severity).collect();
        assert_eq!(severities, [Severity::Isolate, Severity::Reset, Severity::Monitor]);
        assert_eq!(judgement.findings[2].text, "mount:/ is 99 % full, the limit is 90 %");
        assert_eq!(judgement.findings[1].confirm, 2);
    }

    #[test]
    fn numbers_are_formatted_for_people() {
        for (value, text) in
            [(99.0, "99"), (0.5, "0.5"), (4096.0, "4096"), (21_379_052_162.0, "21.38 G"), (6.38e14, "638 T")]
        {
            assert_eq!(number(value), text);
        }
    }

    fn rule(condition: &str) -> Rule {
        let text = format!(
            "id = \"r\"\ncheck = \"disk\"\n{condition}\nseverity = \"reset\"\nreason = \"bad\"\ntext = \"{{value}} {{limit}}\"\n"
        );
        toml::from_str(&text).unwrap()
    }

    fn with(condition: &str, past: &Baselines, observation: &Observation) -> (Verdict, String) {
        let sources = ExpectationSources { profile: None, declared: None, baselines: past };
        let judgement = classify_with(&[rule(condition)], sources, &disk(), observation);
        (judgement.verdict, judgement.reason.to_string())
    }

    fn before(values: &[f64]) -> Baselines {
        let entity = Entity::new(EntityKind::Mount, "/");
        Baselines { own_values: [(("rate".to_owned(), entity), values.to_vec())].into(), ..Baselines::default() }
    }

    #[test]
    fn slower_than_its_peers_fails_and_with_too_few_peers_nothing_is_judged() {
        let slow = measured(vec![metric("rate", 89.0)], vec![]);
        let fine = measured(vec![metric("rate", 90.0)], vec![]);
        let peers =
            |count| Baselines { peer_values: [("rate".to_owned(), vec![100.0; count])].into(), ..Baselines::default() };
        let condition = "metric = \"rate\"\nbelow_percent_of_peers = 90.0\npeers_at_least = 8";
        assert_eq!(with(condition, &peers(8), &slow), (Verdict::Fail, "bad".into()));
        assert_eq!(with(condition, &peers(8), &fine), (Verdict::Pass, "within-limits".into()));
        assert_eq!(with(condition, &peers(7), &slow), (Verdict::NotApplicable, "no-expectation".into()));
        // An outlier does not move the median.
        let odd = Baselines {
            peer_values: [("rate".to_owned(), [vec![100.0; 8], vec![1e9]].concat())].into(),
            ..Baselines::default()
        };
        assert_eq!(with(condition, &odd, &fine).0, Verdict::Pass);
        // Another rule that classifies the metric suffices.
        let both = [rule(condition), rule("metric = \"rate\"\nbelow = 10.0")];
        let judgement = classify(&both, None, &disk(), &slow);
        assert_eq!(judgement.verdict, Verdict::Pass);
    }

    #[test]
    fn slower_than_its_own_baseline_fails() {
        let slow = measured(vec![metric("rate", 80.0)], vec![]);
        let condition = "metric = \"rate\"\nbelow_percent_of_own = 90.0\nown_at_least = 3";
        assert_eq!(with(condition, &before(&[100.0, 101.0, 99.0]), &slow).0, Verdict::Fail);
        assert_eq!(with(condition, &before(&[81.0, 80.0, 79.0]), &slow).0, Verdict::Pass);
        assert_eq!(with(condition, &before(&[100.0]), &slow), (Verdict::NotApplicable, "no-expectation".into()));
        // One of two parts has earlier results and one is new: the new one is not classified by the other's.
        let two = measured(
            vec![
                metric("rate", 100.0),
                Metric { entity: Entity::new(EntityKind::Mount, "/new"), ..metric("rate", 1.0) },
            ],
            vec![],
        );
        assert_eq!(with(condition, &before(&[100.0; 3]), &two), (Verdict::Pass, "partly-judged".into()));
    }

    #[test]
    fn any_three_of_the_last_five_failures_fail_and_fewer_do_not() {
        let condition = "metric = \"rate\"\nbelow = 90.0\nn_of_last_m = [3, 5]";
        let now = |value| measured(vec![metric("rate", value)], vec![]);
        assert_eq!(with(condition, &before(&[100.0, 1.0, 1.0, 100.0]), &now(1.0)).0, Verdict::Fail);
        assert_eq!(with(condition, &before(&[1.0, 1.0, 1.0, 100.0]), &now(100.0)).0, Verdict::Fail);
        assert_eq!(with(condition, &before(&[100.0, 1.0, 100.0, 100.0, 1.0]), &now(1.0)).0, Verdict::Pass);
        assert_eq!(with(condition, &before(&[]), &now(1.0)), (Verdict::Inconclusive, "no-past".into()));
        assert_eq!(
            with(condition, &before(&[100.0, 100.0]), &now(100.0)).0,
            Verdict::Pass,
            "two more cannot make three"
        );
    }

    #[test]
    fn events_count_once_within_their_window_per_entity() {
        let at = Timestamp::from_secs(100_000);
        let event = |ago: i64, key: &str, gpu: &str| Event {
            at: Some(at.minus(Span::minutes(ago))),
            key: Some(key.to_owned()),
            entity: Entity::new(EntityKind::Gpu, gpu),
            ..dead()
        };
        let condition = "event = \"disk-dead\"\nwithin = \"1h\"\ntimes = 2";
        let judged = |events: Vec<Event>| with(condition, &Baselines::at(at), &measured(vec![], events)).0;
        assert_eq!(judged(vec![event(1, "a", "0"), event(59, "b", "0")]), Verdict::Fail);
        assert_eq!(judged(vec![event(1, "a", "0"), event(61, "b", "0")]), Verdict::Pass, "an old one fails nothing");
        assert_eq!(judged(vec![event(1, "a", "0"), event(1, "a", "0")]), Verdict::Pass, "a repeated event counts once");
        assert_eq!(judged(vec![event(1, "a", "0"), event(1, "b", "1")]), Verdict::Pass, "two parts, one each");
        assert_eq!(judged(vec![dead(), dead()]), Verdict::Fail, "an event without a time counts as now");
        let unknown = with(condition, &Baselines::default(), &measured(vec![], vec![event(1, "a", "0")]));
        assert_eq!(unknown, (Verdict::Inconclusive, "no-past".into()));
    }

    #[test]
    fn measurements_wait_during_boot_grace_and_recorded_events_count() {
        let grace = Span::minutes(5);
        let recorded = Event { at: Some(Timestamp::from_secs(5)), ..dead() };
        let judged = |events: Vec<Event>, used: f64, up: Option<Span>| {
            let observation = measured(vec![metric("used", used), metric("rate", 100.0)], events);
            let boot = BootGrace { up, grace, is_deep: false };
            apply_boot_grace(classify(&rules(), Some(&profile()), &disk(), &observation), boot)
        };
        let soon = Some(Span::minutes(2));
        let waits = judged(vec![], 99.0, soon);
        assert_eq!((waits.verdict, waits.reason.as_str()), (Verdict::Inconclusive, "booting"));
        assert!(waits.text.contains("2m") && waits.text.contains("99 % full"), "{}", waits.text);
        assert_eq!(judged(vec![], 99.0, Some(grace)).verdict, Verdict::Fail);
        assert_eq!(judged(vec![], 99.0, None).verdict, Verdict::Fail, "the uptime is unknown");
        assert_eq!(judged(vec![], 9.0, soon).verdict, Verdict::Pass);
        let stands = judged(vec![recorded], 99.0, soon);
        assert_eq!((stands.verdict, stands.findings.len()), (Verdict::Fail, 1));
        assert_eq!(judged(vec![dead()], 9.0, soon).reason.as_str(), "booting", "found by inspection");
        let wrong = classify(&rules(), Some(&profile()), &disk(), &measured(vec![metric("rate", 100.0)], vec![dead()]));
        let deep = apply_boot_grace(wrong, BootGrace { up: soon, grace, is_deep: true });
        assert_eq!(deep.verdict, Verdict::Fail, "seen while a deep test ran");
    }

    proptest! {
        /// More known results never turn a fail into a pass or a pass into a fail.
        #[test]
        fn a_longer_history_resolves_inconclusive_results_and_changes_no_verdict(
            values in proptest::collection::vec(0.0_f64..100.0, 1..12), known in 0_usize..12, times in 1_u32..6, more in 0_u32..6,
        ) {
            let condition = format!("metric = \"rate\"\nbelow = 50.0\nn_of_last_m = [{times}, {}]", times + more);
            let now = measured(vec![metric("rate", values[0])], vec![]);
            let some = with(&condition, &before(&values[1..known.clamp(1, values.len())]), &now).0;
            let all = with(&condition, &before(&values[1..]), &now).0;
            prop_assert!(some == all || some == Verdict::Inconclusive, "{some} {all}");
        }

        #[test]
        fn the_median_lies_within_its_values_in_any_order(values in proptest::collection::vec(-1e6_f64..1e6, 1..20)) {
            let middle = median(&values).unwrap();
            let below = values.iter().filter(|value| **value <= middle).count();
            let above = values.iter().filter(|value| **value >= middle).count();
            prop_assert!(below * 2 >= values.len() && above * 2 >= values.len());
            let mut turned = values;
            turned.reverse();
            prop_assert_eq!(median(&turned), Some(middle));
        }

        /// Earlier results do not affect a rule that does not refer to them.
        #[test]
        fn history_changes_nothing_for_rules_that_do_not_use_it(
            used in 0.0_f64..200.0, rate in 0.0_f64..200.0, own in proptest::collection::vec(0.0_f64..200.0, 0..6),
        ) {
            let observation = measured(vec![metric("used", used), metric("rate", rate)], vec![]);
            let alone = classify(&rules(), Some(&profile()), &disk(), &observation);
            prop_assert!(BaselineNeeds::for_check(&rules(), &disk()).is_empty());
            let (profile, own) = (profile(), before(&own));
            let sources = ExpectationSources::of_profile(Some(&profile), &own);
            prop_assert_eq!(classify_with(&rules(), sources, &disk(), &observation), alone);
        }
    }
}
