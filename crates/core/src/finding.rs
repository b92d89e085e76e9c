//! What was concluded from an observation, how bad it is, and what to do about it.

use serde::{Deserialize, Serialize};

use crate::{
    ids::{CheckId, RuleId, RunId},
    observation::{Entity, EventKey},
    reason::{ReasonCode, coded},
    time::Timestamp,
};

coded! {
    /// The four different answers a check can give. There is deliberately no default: silence is none of them.
    pub enum Verdict {
        Pass => "pass",
        Fail => "fail",
        /// Could not run, timed out, was unparseable, had no limit to judge by, reported nothing.
        Inconclusive => "inconclusive",
        NotApplicable => "not-applicable",
    }
}

impl Verdict {
    /// Pass and fail say something about the node; the others do not.
    pub const fn is_conclusive(self) -> bool {
        matches!(self, Self::Pass | Self::Fail)
    }

    /// The seed's three words, for the published copy. `None`: not a result in the seed's sense, hence no row there.
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
    /// How bad. The worst of a node's findings sets the action; all are kept.
    pub enum Severity {
        /// Worth watching; the node stays in service.
        Monitor => "monitor",
        /// A GPU reset is expected to cure it.
        Reset => "reset",
        /// A reboot is expected to cure it.
        Reboot => "reboot",
        /// No restart cures it: the node leaves service.
        Isolate => "isolate",
    }
}

coded! {
    /// What a finding asks for.
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
    /// What is done about it where a rule does not say otherwise.
    pub const fn usual_remedy(self) -> Remedy {
        match self {
            Self::Monitor => Remedy::Watch,
            Self::Reset => Remedy::Reset,
            Self::Reboot => Remedy::Reboot,
            Self::Isolate => Remedy::HandOver,
        }
    }
}

/// One thing that is wrong, or could not be judged, with the rule that said so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub check: CheckId,
    pub entity: Entity,
    pub verdict: Verdict,
    pub severity: Severity,
    pub remedy: Remedy,
    pub reason: ReasonCode,
    /// For people: what was measured and what was expected.
    pub text: String,
    pub rule: RuleId,
    pub evidence: Evidence,
    /// How many failing runs in a row it takes before anything is done about it.
    pub confirm: u32,
}

/// The number or event a finding rests on. The raw output is kept with the run.
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
        /// What kind of event, and what makes it this one and no other, where its source says so: an event that has had
        /// its answer is known by these when it is told again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        known_by: Option<(ReasonCode, EventKey)>,
    },
    /// Nothing could be measured; the text says why.
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
    /// Failing results in a row.
    pub times: u32,
}

impl OpenFinding {
    /// Seen often enough to act on.
    pub fn is_confirmed(&self) -> bool {
        self.finding.verdict == Verdict::Fail && self.times >= self.finding.confirm
    }
}

/// The worst severity among findings that are confirmed.
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
    fn not_applicable_is_no_pass_in_the_published_copy() {
        assert_eq!(Verdict::NotApplicable.seed_word(), None);
        assert_eq!(Verdict::Inconclusive.seed_word(), Some("incomplete"));
    }
}
