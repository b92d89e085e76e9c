//! Findings: what was concluded from an observation, its severity and its remedy.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{
    ids::{CheckId, RuleId, RunId},
    observation::{Entity, EventKey},
    reason::{ReasonCode, coded},
    time::Timestamp,
};

coded! {
    /// The four results of a check. There is deliberately no default: a missing result is none of them.
    pub enum Verdict {
        Pass => "pass",
        Fail => "fail",
        /// The check could not run, timed out, was unparseable, had no limit to compare with, or reported nothing.
        Inconclusive => "inconclusive",
        NotApplicable => "not-applicable",
    }
}

impl Verdict {
    /// Returns whether the verdict is about the node: only pass and fail are.
    pub const fn is_conclusive(self) -> bool {
        matches!(self, Self::Pass | Self::Fail)
    }

    /// Returns the seed's word for the published copy of the results. `None`: no result in the seed's sense, so no row
    /// there.
    pub const fn seed_word(self) -> Option<&'static str> {
        match self {
            Self::Pass => Some("pass"),
            Self::Fail => Some("fail"),
            Self::Inconclusive => Some("incomplete"),
            Self::NotApplicable => None,
        }
    }
}

coded! {
    /// Severity of a finding. The worst of a node's findings determines the action; all are kept.
    pub enum Severity {
        /// Needs watching; the node stays in service.
        Monitor => "monitor",
        /// A GPU reset is expected to fix it.
        Reset => "reset",
        /// A reboot is expected to fix it.
        Reboot => "reboot",
        /// No restart fixes it: the node leaves service.
        Isolate => "isolate",
    }
}

coded! {
    /// The action that a finding calls for.
    pub enum Remedy {
        Watch => "watch",
        Reset => "reset",
        Reboot => "reboot",
        Quarantine => "quarantine",
        Replace => "replace",
        HandOver => "hand-over",
    }
}

impl Severity {
    /// Returns the remedy that applies if the rule names none.
    pub const fn default_remedy(self) -> Remedy {
        match self {
            Self::Monitor => Remedy::Watch,
            Self::Reset => Remedy::Reset,
            Self::Reboot => Remedy::Reboot,
            Self::Isolate => Remedy::HandOver,
        }
    }

    /// Returns what a finding of this severity requires, for people: the code alone is the name of a remedy. The
    /// dashboard has the same table (`format.js`, compared by a test). Without commas and semicolons, because it is
    /// part of lists.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Monitor => "keep the node in service and watch it",
            Self::Reset => "GPU reset needed",
            Self::Reboot => "node reboot needed",
            Self::Isolate => "keep the node out of service until repaired",
        }
    }

    /// Returns the code with its meaning, such as "reset: GPU reset needed".
    pub fn described(self) -> String {
        format!("{}: {}", self.code(), self.meaning())
    }

    /// Describes each of these severities once, in one line, the worst first. `None` if there are none.
    pub fn legend(severities: impl IntoIterator<Item = Self>) -> Option<String> {
        let distinct: BTreeSet<Self> = severities.into_iter().collect();
        let described: Vec<String> = distinct.into_iter().rev().map(Self::described).collect();
        (!described.is_empty()).then(|| described.join("; "))
    }
}

/// One problem, or one part that could not be classified, with the rule that produced it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub check: CheckId,
    pub entity: Entity,
    pub verdict: Verdict,
    pub severity: Severity,
    pub remedy: Remedy,
    pub reason: ReasonCode,
    /// For people: the measured and the expected value.
    pub text: String,
    pub rule: RuleId,
    pub evidence: Evidence,
    /// How many consecutive failing runs it takes before the finding is acted on.
    pub confirm: u32,
}

/// The measurement or event behind a finding. The raw output is kept with the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evidence {
    Measured {
        metric: String,
        value: f64,
        limit: f64,
    },
    Event {
        text: String,
        at: Option<Timestamp>,
        /// The kind of event and its unique key, if the source provides one. They identify an acknowledged event when
        /// it is reported again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        known_by: Option<(ReasonCode, EventKey)>,
    },
    /// Nothing could be measured; the finding's text has the reason.
    Nothing,
}

/// A failing finding that no later conclusive result of the same check has cleared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpenFinding {
    pub finding: Finding,
    /// The newest run that showed it; none if an agent reported it.
    pub run: Option<RunId>,
    pub first_seen: Timestamp,
    pub last_seen: Timestamp,
    /// Consecutive failing results.
    pub sightings: u32,
}

impl OpenFinding {
    /// Returns whether the finding was seen often enough to act on.
    pub fn is_confirmed(&self) -> bool {
        self.finding.verdict == Verdict::Fail && self.sightings >= self.finding.confirm
    }
}

/// Returns the worst severity among the confirmed findings.
pub(crate) fn worst_confirmed(findings: &[&OpenFinding]) -> Option<Severity> {
    findings.iter().filter(|open| open.is_confirmed()).map(|open| open.finding.severity).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn severities_are_ordered_and_every_code_reads_back() {
        assert!(Severity::Monitor < Severity::Reset && Severity::Reboot < Severity::Isolate);
        for verdict in Verdict::ALL {
            assert_eq!(Verdict::from_code(verdict.code()), Some(*verdict));
        }
        for severity in Severity::ALL {
            assert_eq!(Severity::from_code(severity.code()), Some(*severity));
        }
        for remedy in Remedy::ALL {
            assert_eq!(Remedy::from_code(remedy.code()), Some(*remedy));
        }
    }

    #[test]
    fn each_severity_has_a_meaning_and_the_legend_lists_each_once_worst_first() {
        let table = [
            (Severity::Monitor, "monitor: keep the node in service and watch it"),
            (Severity::Reset, "reset: GPU reset needed"),
            (Severity::Reboot, "reboot: node reboot needed"),
            (Severity::Isolate, "isolate: keep the node out of service until repaired"),
        ];
        assert_eq!(table.map(|(severity, _)| severity), Severity::ALL);
        for (severity, described) in table {
            assert_eq!(severity.described(), described);
            assert!(!severity.meaning().contains([',', ';', '"']), "{described}");
        }
        let legend = Severity::legend([Severity::Monitor, Severity::Reset, Severity::Monitor]);
        assert_eq!(legend.as_deref(), Some("reset: GPU reset needed; monitor: keep the node in service and watch it"));
        assert_eq!(Severity::legend([]), None);
    }

    #[test]
    fn not_applicable_is_not_a_pass_in_the_published_copy() {
        assert_eq!(Verdict::NotApplicable.seed_word(), None);
        assert_eq!(Verdict::Inconclusive.seed_word(), Some("incomplete"));
    }
}
