//! The policy of a site: rules, periods, limits and permissions, all as data.
//!
//! The commented default is `policy.toml` beside this file and is compiled in. A site's file overrides it key by key,
//! and rules by id. Unknown keys are errors with line and column.

mod breaker_limits;
mod job_limit;
mod rule;
mod suite;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    access::Place,
    case::{RepairStep, StepKind},
    finding::Severity,
    ids::{PoolName, TestId},
    reason::coded,
    time::{Span, Timestamp},
    toml_text::{self, Limit, TomlError},
};

pub use breaker_limits::BreakerLimits;
pub use job_limit::{InvalidJobLimit, JobLimit};
pub use rule::{Rule, When};
pub use suite::SuiteSettings;

coded! {
    /// How far the controller may act on its own.
    pub enum Mode {
        /// Record only. Nothing in the cluster is changed.
        Observe => "observe",
        /// Mark bad nodes, propose the rest.
        Recommend => "recommend",
        /// Do what `[allow]` permits, propose the rest.
        Act => "act",
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Recorded with every verdict, so that a verdict can be replayed.
    pub version: u32,
    pub mode: Mode,
    pub allow: Allow,
    pub limits: Limits,
    pub retry: Retry,
    pub breaker: BreakerLimits,
    pub repair: Repair,
    pub agents: AgentPolicy,
    pub user_work: UserWork,
    #[serde(default)]
    pub windows: Vec<Window>,
    /// Settings of tests, by name. They override each test's own defaults.
    #[serde(default)]
    pub tests: BTreeMap<TestId, TestSettings>,
    /// Named sets of tests. They override the built-in suites.
    #[serde(default)]
    pub suites: BTreeMap<TestId, SuiteSettings>,
    /// Rules added to the checks' own rules, or replacing them by id.
    #[serde(default)]
    pub rules: Vec<Rule>,
}

/// Actions that need no operator. Marking only keeps new work away; the others are disruptive, so each is off by
/// default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allow {
    pub mark: bool,
    pub drain: bool,
    pub evict: bool,
    pub reset: bool,
    pub reboot: bool,
    pub replace: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Concurrent validation jobs in the whole cluster.
    pub jobs: JobLimit,
    /// A job that has not started after this long is cancelled.
    pub pending: Span,
    /// Concurrent validation jobs per pool; a pool that is not listed has no limit of its own.
    #[serde(default)]
    pub pools: BTreeMap<PoolName, u32>,
    /// Concurrent jobs that use one shared resource, such as a mount (`tests.NAME.shares`).
    pub per_share: u32,
    /// Validation node-hours per day (UTC); absent means no limit.
    #[serde(default)]
    pub node_hours_per_day: Option<f64>,
    /// How long the result of a finished job may take to appear on the share.
    pub result_grace: Span,
    /// On a free node, with a slot to spare, a result is renewed this long before its period ends. Zero: not before.
    pub renew_ahead: Span,
}

/// A result younger than a sixth of its period is not renewed, however early `renew_ahead` is.
const YOUNGEST_PART: i64 = 6;

impl Limits {
    /// Returns the age from which a result that is valid for `cutoff` is renewed on a free node. `None`: not before it
    /// is due. With a daily budget, only due tests run.
    pub fn renewal_age(&self, cutoff: Span) -> Option<Span> {
        let ahead = self.renew_ahead.millis();
        let early = self.node_hours_per_day.is_none() && ahead > 0;
        early.then(|| Span::from_millis((cutoff.millis() - ahead).max(cutoff.millis() / YOUNGEST_PART)))
    }
}

/// Exponential back-offs: each doubles from its first value up to its cap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retry {
    /// After an inconclusive result, per node and test.
    pub inconclusive: Span,
    pub inconclusive_cap: Span,
    /// After a job that did not start, per node.
    pub not_started: Span,
    pub not_started_cap: Span,
    /// Delay before a failing test is repeated, until it is confirmed or passes.
    pub confirm: Span,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {
    /// How long the remedies tried on a machine are remembered.
    pub memory: Span,
    /// A suspicion ends after this long without a new finding.
    pub watch: Span,
    pub drain_deadline: Span,
    pub reset_deadline: Span,
    pub reboot_deadline: Span,
    pub requalification_deadline: Span,
    /// Tries of one step before the next escalation level.
    pub attempts: u32,
    /// Tests of a requalification run, in addition to those that had failed. Empty: every routine test that applies.
    #[serde(default)]
    pub requalification: Vec<TestId>,
    /// Tests of a node that an operator has quarantined. The engine replaces an empty list by the suite `quarantine`;
    /// the planner reads an empty list as every routine test that applies.
    #[serde(default)]
    pub examine: Vec<TestId>,
    /// Steps by severity.
    pub steps: BTreeMap<Severity, Vec<StepKind>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentPolicy {
    /// How often an agent runs its checks. A check with a longer period of its own keeps it.
    pub check_every: Span,
    /// An agent that has not reported for this long is silent.
    pub silent_after: Span,
    /// From this share of all agents on, silence is an incident of Cluster Doctor itself and no node becomes suspect.
    pub incident_percent: f64,
    /// For this long after a boot, measurements fail nothing: the node may still be starting up.
    pub boot_grace: Span,
}

/// How failed user work is taken into account.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserWork {
    /// Work that failed longer ago is ignored.
    pub window: Span,
    /// If work of this many owners failed on a node and nowhere else, its tests are due immediately. 0: never.
    pub retest: f64,
}

/// A weekly time window. Times have a fixed offset from UTC: with daylight saving, a plan would depend on time zone
/// tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    pub kind: WindowKind,
    /// Absent: every pool.
    #[serde(default)]
    pub pool: Option<PoolName>,
    #[serde(default = "Day::every")]
    pub days: Vec<Day>,
    pub from: TimeOfDay,
    /// At or before `from`: the window extends past midnight.
    pub to: TimeOfDay,
    #[serde(default)]
    pub utc_offset_minutes: i32,
}

coded! {
    pub enum WindowKind {
        /// No validation starts inside.
        Quiet => "quiet",
        /// Disruptive steps (drain, reset, reboot, replace) happen only inside, if the pool has any such window.
        Maintenance => "maintenance",
    }
}

coded! {
    pub enum Day {
        Monday => "mon",
        Tuesday => "tue",
        Wednesday => "wed",
        Thursday => "thu",
        Friday => "fri",
        Saturday => "sat",
        Sunday => "sun",
    }
}

impl Day {
    fn every() -> Vec<Self> {
        Self::ALL.to_vec()
    }
}

/// Minutes since midnight, written `22:30`.
#[derive(Debug, Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TimeOfDay(pub u16);

impl TryFrom<String> for TimeOfDay {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let bad = || format!("`{text}` is not a time of day such as \"22:30\"");
        let (hours, minutes) = text.split_once(':').ok_or_else(bad)?;
        let hours: u16 = hours.parse().map_err(|_| bad())?;
        let minutes: u16 = minutes.parse().map_err(|_| bad())?;
        if hours > 23 || minutes > 59 {
            return Err(bad());
        }
        Ok(Self(hours * 60 + minutes))
    }
}

impl From<TimeOfDay> for String {
    fn from(time: TimeOfDay) -> Self {
        format!("{:02}:{:02}", time.0 / 60, time.0 % 60)
    }
}

/// What a site may change about one test.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TestSettings {
    /// The test that this is a variant of: the same check under another name, with its own parameters and results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<TestId>,
    pub enabled: Option<bool>,
    pub cutoff: Option<Span>,
    pub limit: Option<Span>,
    /// Usual duration, for budgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub typical_duration: Option<Span>,
    pub max_concurrent: Option<u32>,
    pub shares: Option<Vec<String>>,
    pub pools: Option<Vec<PoolName>>,
    /// Whether it runs on several nodes together, and only on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multi_node: Option<bool>,
    /// Passed to the check unchanged, such as `percent = 90` or `mounts = ["/"]`.
    #[serde(default)]
    pub params: BTreeMap<String, toml::Value>,
}

/// A test as the planner sees it: its own defaults with the site's settings applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TestPolicy {
    pub id: TestId,
    /// The suite under which views count it: of several, the one that runs it most often. It decides nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suite: Option<TestId>,
    /// A conclusive result is valid for this long (the seed's `Z`).
    pub cutoff: Span,
    /// A run of this test that takes longer is cancelled.
    pub limit: Span,
    /// Expected duration, for budgets.
    pub typical_duration: Span,
    /// Whether it needs the node for itself. Other tests run along with it.
    pub exclusive: bool,
    /// Where it normally runs.
    #[serde(default = "in_a_job")]
    pub place: Place,
    /// Whether the controller runs it when its result is stale. Other tests run on request or in a requalification run.
    pub routine: bool,
    /// Whether the node has our maintenance mark while the test runs.
    #[serde(default)]
    pub maintenance: bool,
    /// Whether it runs on several nodes together. Such a test never runs on a single node.
    #[serde(default)]
    pub multi_node: bool,
    /// Concurrent runs of this test in the whole cluster.
    pub max_concurrent: Option<u32>,
    /// Shared resources that it loads, such as mounts.
    pub shares: Vec<String>,
    /// Absent: every pool.
    pub pools: Option<Vec<PoolName>>,
}

/// The place of a test that was stored by a version without places.
const fn in_a_job() -> Place {
    Place::Job
}

impl Window {
    /// Returns whether `at` is inside the window.
    pub fn contains(&self, at: Timestamp) -> bool {
        let local = at.secs() + i64::from(self.utc_offset_minutes) * 60;
        let minute = u16::try_from(local.rem_euclid(86_400) / 60).unwrap_or(0);
        // 1970-01-01 was a Thursday: day 3 of a week that begins on Monday.
        let day = (local.div_euclid(86_400) + 3).rem_euclid(7) as usize;
        let on = |day: usize| self.days.contains(&Day::ALL[day % 7]);
        if self.from < self.to {
            on(day) && (self.from.0..self.to.0).contains(&minute)
        } else {
            (on(day) && minute >= self.from.0) || (on(day + 6) && minute < self.to.0)
        }
    }

    pub fn applies_to(&self, pool: &PoolName) -> bool {
        self.pool.as_ref().is_none_or(|named| named == pool)
    }
}

impl Policy {
    /// The commented defaults, as written by `doctor config init`.
    pub const DEFAULT_TEXT: &'static str = include_str!("policy.toml");

    /// Returns the compiled-in defaults.
    ///
    /// # Panics
    /// If the compiled-in file is not a valid policy; a test parses it.
    pub fn built_in() -> Self {
        toml::from_str(Self::DEFAULT_TEXT).expect("the compiled-in policy is tested")
    }

    /// Returns the defaults overridden key by key by a site's text. Rules are added or replaced by id where they are
    /// used.
    ///
    /// # Errors
    /// With line, column and what is accepted.
    pub fn with_site_settings(site: &str) -> Result<Self, TomlError> {
        const LIMITS: [Limit; 4] = [
            Limit { key: &["breaker", "percent_of_pool"], min: 0.0, max: 100.0, accepted: "0 to 100 percent" },
            Limit { key: &["agents", "incident_percent"], min: 0.0, max: 100.0, accepted: "0 to 100 percent" },
            Limit {
                key: &["limits", "node_hours_per_day"],
                min: 0.0,
                max: f64::MAX,
                accepted: "node-hours, 0 or more",
            },
            Limit {
                key: &["user_work", "retest"],
                min: 0.0,
                max: 60.0,
                accepted: "owners of failed work, 0 (never) to 60",
            },
        ];
        toml_text::read_merged(Self::DEFAULT_TEXT, site, &LIMITS)
    }

    /// Returns the escalation level at which a severity begins.
    pub fn first_repair_step(severity: Severity) -> RepairStep {
        match severity {
            Severity::Monitor | Severity::Reset => RepairStep::Reset,
            Severity::Reboot => RepairStep::Reboot,
            Severity::Isolate => RepairStep::Replace,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_match_the_documentation() {
        let policy = Policy::built_in();
        assert_eq!(policy.mode, Mode::Recommend);
        assert_eq!([1, 500].map(|nodes| policy.limits.jobs.for_nodes(nodes)), [5, 20]);
        assert_eq!(policy.limits.pending, Span::minutes(5));
        assert_eq!(policy.limits.per_share, 1);
        assert_eq!(policy.breaker.nodes_per_hour, 3);
        assert!((policy.breaker.percent_of_pool - 10.0).abs() < f64::EPSILON);
        let off = Allow { mark: true, drain: false, evict: false, reset: false, reboot: false, replace: false };
        assert_eq!(policy.allow, off);
    }

    #[test]
    fn a_window_may_span_midnight() {
        let window = Window {
            kind: WindowKind::Quiet,
            pool: None,
            days: vec![Day::Friday],
            from: TimeOfDay(22 * 60),
            to: TimeOfDay(6 * 60),
            utc_offset_minutes: 0,
        };
        // 2026-11-13 is a Friday.
        for (moment, inside) in [
            ("2026-11-13T21:59:59Z", false),
            ("2026-11-13T22:00:00Z", true),
            ("2026-11-14T05:59:59Z", true),
            ("2026-11-14T06:00:00Z", false),
            ("2026-11-14T23:00:00Z", false),
            ("2026-11-13T05:00:00Z", false),
        ] {
            assert_eq!(window.contains(moment.parse().unwrap()), inside, "{moment}");
        }
    }

    #[test]
    fn an_unknown_key_or_a_negative_number_is_an_error_with_its_location() {
        let text = Policy::DEFAULT_TEXT.replacen("jobs = \"5 or 4%\"", "jobs = -5", 1);
        let error = toml::from_str::<Policy>(&text).unwrap_err().to_string();
        assert!(error.contains("line ") && error.contains("jobs = -5"), "{error}");
        let text = Policy::DEFAULT_TEXT.replacen("jobs = ", "job = ", 1);
        let error = toml::from_str::<Policy>(&text).unwrap_err().to_string();
        assert!(error.contains("unknown field `job`") && error.contains("expected one of"), "{error}");
    }

    #[test]
    fn a_result_is_renewed_a_day_ahead_but_never_in_the_first_sixth_of_its_period() {
        let mut limits = Policy::built_in().limits;
        assert_eq!(limits.renewal_age(Span::days(7)), Some(Span::days(6)));
        assert_eq!(limits.renewal_age(Span::hours(6)), Some(Span::hours(1)));
        limits.node_hours_per_day = Some(48.0);
        assert_eq!(limits.renewal_age(Span::days(7)), None, "a daily budget is for due tests");
        limits = Limits { node_hours_per_day: None, renew_ahead: Span::ZERO, ..limits };
        assert_eq!(limits.renewal_age(Span::days(7)), None);
    }

    #[test]
    fn every_code_reads_back() {
        for mode in Mode::ALL {
            assert_eq!(Mode::from_code(mode.code()), Some(*mode));
        }
        for day in Day::ALL {
            assert_eq!(Day::from_code(day.code()), Some(*day));
        }
        for kind in WindowKind::ALL {
            assert_eq!(WindowKind::from_code(kind.code()), Some(*kind));
        }
    }
}
