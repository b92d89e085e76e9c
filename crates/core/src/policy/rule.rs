//! Rules: how a measurement or an event becomes a finding.

use serde::{Deserialize, Serialize};

use crate::{
    finding::{Remedy, Severity},
    ids::{CheckId, RuleId},
    reason::ReasonCode,
    time::Span,
};

/// How a measurement or an event becomes a finding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RuleText", into = "RuleText")]
pub struct Rule {
    pub id: RuleId,
    pub check: CheckId,
    pub when: When,
    pub severity: Severity,
    pub remedy: Option<Remedy>,
    pub reason: ReasonCode,
    /// For people. `{value}`, `{limit}` and `{entity}` are substituted.
    pub text: String,
    /// Consecutive failing runs before the finding is acted on.
    pub confirm: u32,
    /// The check itself knows where there is nothing to measure, so a missing metric does not make the result
    /// inconclusive.
    pub where_measured: bool,
    /// In a run over several nodes, a violation means that they fail together, without attributing the fault to one of
    /// them.
    pub of_all: bool,
    /// The limit is one that any hardware of the kind keeps. Beyond it the part is broken; within it the metric is not
    /// judged yet.
    pub backstop: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum When {
    Above {
        metric: String,
        limit: f64,
    },
    Below {
        metric: String,
        limit: f64,
    },
    /// Below a percentage of the value that the profile expects for this metric, or for another one: the metric `of`,
    /// such as the chip's published peak.
    BelowProfile {
        metric: String,
        percent: f64,
        of: Option<String>,
    },
    /// Different from the value in the machine type's profile.
    NotProfile {
        metric: String,
    },
    /// Below a percentage of the median of other nodes of the same machine type, if at least `at_least` are known.
    BelowPeers {
        metric: String,
        percent: f64,
        at_least: u32,
    },
    /// Below a percentage of the median of this part's own earlier results, if at least `at_least` are known.
    BelowOwn {
        metric: String,
        percent: f64,
        at_least: u32,
    },
    /// Another metric condition that held in `times` of the `last` results, including this one.
    NOfLastM {
        when: Box<Self>,
        times: u32,
        last: u32,
    },
    /// An event of this code was seen.
    Event(ReasonCode),
    /// At least `times` events with this code about one part, within `within` before the observation.
    EventsWithin {
        code: ReasonCode,
        times: u32,
        within: Span,
    },
}

impl When {
    /// Returns the metric of the condition; none for events.
    pub fn metric(&self) -> Option<&str> {
        match self {
            Self::Above { metric, .. }
            | Self::Below { metric, .. }
            | Self::BelowProfile { metric, .. }
            | Self::NotProfile { metric }
            | Self::BelowPeers { metric, .. }
            | Self::BelowOwn { metric, .. } => Some(metric),
            Self::NOfLastM { when, .. } => when.metric(),
            Self::Event(_) | Self::EventsWithin { .. } => None,
        }
    }
}

/// Default of `peers_at_least`.
const PEERS: u32 = 8;
/// Default of `own_at_least`.
const OWN_RESULTS: u32 = 5;
/// Largest number of earlier results that a rule may refer to.
const MAX_EARLIER_RESULTS: u32 = 50;

/// A rule as written in a file: flat, with exactly one kind of condition.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    id: RuleId,
    check: CheckId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metric: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    above: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    below: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    below_percent_of_profile: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    profile_metric: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    not_as_profile: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    below_percent_of_peers: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peers_at_least: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    below_percent_of_own: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own_at_least: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    n_of_last_m: Option<[u32; 2]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    event: Option<ReasonCode>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    times: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    within: Option<Span>,
    severity: Severity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    remedy: Option<Remedy>,
    reason: ReasonCode,
    text: String,
    #[serde(default = "once")]
    confirm: u32,
    #[serde(default, skip_serializing_if = "is_false")]
    where_measured: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    of_all: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    backstop: bool,
}

const fn once() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

impl TryFrom<RuleText> for Rule {
    type Error = String;
    fn try_from(written: RuleText) -> Result<Self, String> {
        let when = written.condition().map_err(|why| format!("rule `{}` {why}", written.id))?;
        if written.confirm == 0 {
            return Err(format!("rule `{}`: `confirm` must be at least 1", written.id));
        }
        Ok(Self {
            id: written.id,
            check: written.check,
            when,
            severity: written.severity,
            remedy: written.remedy,
            reason: written.reason,
            text: written.text,
            confirm: written.confirm,
            where_measured: written.where_measured,
            of_all: written.of_all,
            backstop: written.backstop,
        })
    }
}

impl RuleText {
    fn condition(&self) -> Result<When, String> {
        match (&self.event, &self.metric) {
            (Some(code), None) => self.event_condition(code),
            (None, Some(metric)) => self.metric_condition(metric),
            _ => Err("needs either `event` or `metric`".to_owned()),
        }
    }

    fn event_condition(&self, code: &ReasonCode) -> Result<When, String> {
        if self.conditions("").next().is_some() || self.n_of_last_m.is_some() || self.where_measured {
            return Err("has an `event`: a limit is for a `metric`".to_owned());
        }
        match (self.times, self.within) {
            (None, None) => Ok(When::Event(code.clone())),
            (Some(0), _) => Err("has `times = 0`, expected at least 1".to_owned()),
            (times, Some(within)) if within > Span::ZERO => {
                Ok(When::EventsWithin { code: code.clone(), times: times.unwrap_or(1), within })
            }
            (Some(_), None) => Err("has `times` without `within`; add `within`, such as \"1h\"".to_owned()),
            (_, Some(_)) => Err("has `within = \"0s\"`, expected a duration such as \"1h\"".to_owned()),
        }
    }

    fn metric_condition(&self, metric: &str) -> Result<When, String> {
        if self.times.is_some() || self.within.is_some() {
            return Err("has a `metric`: `times` and `within` are for an `event`".to_owned());
        }
        let mut all = self.conditions(metric);
        let (Some(when), None) = (all.next(), all.next()) else {
            return Err("needs, beside `metric`, exactly one of `above`, `below`, `below_percent_of_profile`, \
                        `not_as_profile`, `below_percent_of_peers`, `below_percent_of_own`"
                .to_owned());
        };
        if self.peers_at_least.is_some_and(|least| least == 0 || self.below_percent_of_peers.is_none()) {
            return Err("has `peers_at_least`, which is at least 1 and goes with `below_percent_of_peers`".to_owned());
        }
        if self.profile_metric.is_some() && self.below_percent_of_profile.is_none() {
            return Err("has `profile_metric`, which goes with `below_percent_of_profile`".to_owned());
        }
        let few = 1..=MAX_EARLIER_RESULTS;
        if self.own_at_least.is_some_and(|least| !few.contains(&least) || self.below_percent_of_own.is_none()) {
            return Err(format!(
                "has `own_at_least`, which is 1 to {MAX_EARLIER_RESULTS} and goes with `below_percent_of_own`"
            ));
        }
        match self.n_of_last_m {
            None => Ok(when),
            Some([times, last]) if times >= 1 && times <= last && last <= MAX_EARLIER_RESULTS => {
                Ok(When::NOfLastM { when: Box::new(when), times, last })
            }
            Some(_) => {
                Err(format!("has an invalid `n_of_last_m`, expected such as [3, 5], at most {MAX_EARLIER_RESULTS}"))
            }
        }
    }

    /// Returns every metric condition that is set; exactly one is valid.
    fn conditions(&self, metric: &str) -> impl Iterator<Item = When> {
        let name = || metric.to_owned();
        let own_at_least = self.own_at_least.unwrap_or(OWN_RESULTS);
        let at_least = self.peers_at_least.unwrap_or(PEERS);
        [
            self.above.map(|limit| When::Above { metric: name(), limit }),
            self.below.map(|limit| When::Below { metric: name(), limit }),
            self.below_percent_of_profile.map(|percent| When::BelowProfile {
                metric: name(),
                percent,
                of: self.profile_metric.clone(),
            }),
            self.not_as_profile.then(|| When::NotProfile { metric: name() }),
            self.below_percent_of_peers.map(|percent| When::BelowPeers { metric: name(), percent, at_least }),
            self.below_percent_of_own.map(|percent| When::BelowOwn { metric: name(), percent, at_least: own_at_least }),
        ]
        .into_iter()
        .flatten()
    }

    fn write_condition(&mut self, when: When) {
        self.metric = when.metric().map(str::to_owned);
        match when {
            When::Above { limit, .. } => self.above = Some(limit),
            When::Below { limit, .. } => self.below = Some(limit),
            When::BelowProfile { percent, of, .. } => {
                (self.below_percent_of_profile, self.profile_metric) = (Some(percent), of);
            }
            When::NotProfile { .. } => self.not_as_profile = true,
            When::BelowPeers { percent, at_least, .. } => {
                (self.below_percent_of_peers, self.peers_at_least) = (Some(percent), Some(at_least));
            }
            When::BelowOwn { percent, at_least, .. } => {
                (self.below_percent_of_own, self.own_at_least) = (Some(percent), Some(at_least));
            }
            When::NOfLastM { when, times, last } => {
                self.write_condition(*when);
                self.n_of_last_m = Some([times, last]);
            }
            When::Event(code) => self.event = Some(code),
            When::EventsWithin { code, times, within } => {
                (self.event, self.times, self.within) = (Some(code), Some(times), Some(within));
            }
        }
    }
}

impl From<Rule> for RuleText {
    fn from(rule: Rule) -> Self {
        let mut written = Self {
            id: rule.id,
            check: rule.check,
            metric: None,
            above: None,
            below: None,
            below_percent_of_profile: None,
            profile_metric: None,
            not_as_profile: false,
            below_percent_of_peers: None,
            peers_at_least: None,
            below_percent_of_own: None,
            own_at_least: None,
            n_of_last_m: None,
            event: None,
            times: None,
            within: None,
            severity: rule.severity,
            remedy: rule.remedy,
            reason: rule.reason,
            text: rule.text,
            confirm: rule.confirm,
            where_measured: rule.where_measured,
            of_all: rule.of_all,
            backstop: rule.backstop,
        };
        written.write_condition(rule.when);
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(condition: &str) -> Result<Rule, String> {
        let text = format!(
            "id = \"r\"\ncheck = \"c\"\n{condition}\nseverity = \"monitor\"\nreason = \"bad\"\ntext = \"{{value}}\"\n"
        );
        toml::from_str(&text).map_err(|error| error.to_string())
    }

    #[test]
    fn every_kind_of_condition_reads_and_reads_back() {
        for condition in [
            "metric = \"m\"\nabove = 1.0",
            "metric = \"m\"\nbelow = 1.0",
            "metric = \"m\"\nbelow_percent_of_profile = 93.0",
            "metric = \"m\"\nbelow_percent_of_profile = 33.3\nprofile_metric = \"peak_m\"",
            "metric = \"m\"\nnot_as_profile = true",
            "metric = \"m\"\nbelow_percent_of_peers = 90.0",
            "metric = \"m\"\nbelow_percent_of_peers = 90.0\npeers_at_least = 3",
            "metric = \"m\"\nbelow_percent_of_own = 90.0\nown_at_least = 4",
            "metric = \"m\"\nabove = 1.0\nn_of_last_m = [3, 5]",
            "metric = \"m\"\nbelow_percent_of_peers = 90.0\nn_of_last_m = [2, 2]",
            "event = \"e\"",
            "event = \"e\"\nwithin = \"1h\"",
            "event = \"e\"\nwithin = \"1h\"\ntimes = 3",
        ] {
            let read = rule(condition).unwrap_or_else(|error| panic!("{condition}: {error}"));
            let again: Rule = toml::from_str(&toml::to_string(&read).unwrap()).unwrap();
            assert_eq!(again, read, "{condition}");
        }
    }

    #[test]
    fn an_impossible_rule_is_rejected_with_the_accepted_form() {
        for (condition, says) in [
            ("", "either `event` or `metric`"),
            ("metric = \"m\"\nevent = \"e\"", "either `event` or `metric`"),
            ("metric = \"m\"", "exactly one of"),
            ("metric = \"m\"\nabove = 1.0\nbelow = 0.0", "exactly one of"),
            ("event = \"e\"\nabove = 1.0", "for a `metric`"),
            ("event = \"e\"\ntimes = 3", "add `within`"),
            ("event = \"e\"\ntimes = 0\nwithin = \"1h\"", "at least 1"),
            ("event = \"e\"\nwithin = \"0s\"", "such as"),
            ("metric = \"m\"\nabove = 1.0\nwithin = \"1h\"", "for an `event`"),
            ("metric = \"m\"\nabove = 1.0\nn_of_last_m = [6, 5]", "[3, 5]"),
            ("metric = \"m\"\nabove = 1.0\nn_of_last_m = [0, 5]", "[3, 5]"),
            ("metric = \"m\"\nabove = 1.0\npeers_at_least = 3", "goes with `below_percent_of_peers`"),
            ("metric = \"m\"\nabove = 1.0\nprofile_metric = \"n\"", "goes with `below_percent_of_profile`"),
            ("metric = \"m\"\nbelow_percent_of_own = 9.0\nown_at_least = 900", "1 to 50"),
        ] {
            let error = rule(condition).unwrap_err();
            assert!(error.contains(says) && error.contains("rule `r`"), "{condition}: {error}");
        }
    }
}
