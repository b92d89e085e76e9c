//! What the last looks at this node came to, in a file: the agent and the hooks of a scheduler are processes of their own,
//! and a hook that finds a fresh verdict need not look again.
//!
//! As with the controller, a finding stays until its check has a conclusive answer without it, and a rule may want a
//! finding seen several times in a row before anything is done about it. So the count is kept here too.

use std::{collections::BTreeMap, fs, io, path::Path};

use doctor_core::{
    finding::{Finding, Severity, Verdict},
    ids::{CheckId, RuleId},
    observation::Entity,
    reason::ReasonCode,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::runner::boot_id;

const FILE: &str = "verdict.json";

/// All that is known of this node since it booted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdicts {
    /// Of another boot they say nothing about this one.
    boot: String,
    /// When every fast check was last looked at.
    whole: Option<Timestamp>,
    checks: BTreeMap<CheckId, Held>,
}

/// One check's newest answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    pub at: Timestamp,
    pub verdict: Verdict,
    /// What is open against the node, newest count included.
    pub findings: Vec<HeldFinding>,
    /// Why it could not be judged, if it could not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What of a finding is needed to act on it and to tell of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldFinding {
    pub rule: RuleId,
    pub entity: Entity,
    pub severity: Severity,
    pub reason: ReasonCode,
    pub text: String,
    /// Seen so often in a row, and so often it has to be.
    pub times: u32,
    pub confirm: u32,
}

impl HeldFinding {
    pub const fn is_confirmed(&self) -> bool {
        self.times >= self.confirm
    }
}

impl Verdicts {
    /// What was kept in this directory since the boot; nothing, where nothing was.
    pub fn read(directory: &Path) -> Self {
        let text = fs::read(directory.join(FILE)).ok();
        let kept: Option<Self> = text.and_then(|text| serde_json::from_slice(&text).ok());
        kept.filter(|kept| kept.boot == boot_id()).unwrap_or_else(Self::none)
    }

    /// Nothing is known.
    pub fn none() -> Self {
        Self { boot: boot_id(), whole: None, checks: BTreeMap::new() }
    }

    /// Keeps it, whole or not at all. It is not made durable: after a crash of the machine it counts for nothing.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let beside = directory.join(format!(".{FILE}.{}.tmp", std::process::id()));
        let text = serde_json::to_vec(self).map_err(io::Error::from)?;
        fs::write(&beside, text).and_then(|()| fs::rename(&beside, directory.join(FILE)))
    }

    /// One check answered. `text` says why, where it could not be judged.
    pub fn note(&mut self, check: &CheckId, verdict: Verdict, findings: &[Finding], text: &str, at: Timestamp) {
        let before = self.checks.remove(check).map_or_else(Vec::new, |held| held.findings);
        let findings = if verdict.is_conclusive() {
            let failing = findings.iter().filter(|finding| finding.verdict == Verdict::Fail);
            failing.map(|finding| held(finding, &before)).collect()
        } else {
            before
        };
        let why = (verdict == Verdict::Inconclusive).then(|| text.to_owned());
        self.checks.insert(check.clone(), Held { at, verdict, findings, why });
    }

    /// Nothing is said any more of what was last looked at before this moment: it may have been cured since.
    pub fn forget_before(&mut self, moment: Timestamp) {
        self.checks.retain(|_, held| held.at >= moment);
    }

    /// Every fast check was among those of this moment.
    pub fn looked_at_all(&mut self, at: Timestamp) {
        self.whole = Some(at);
    }

    /// How old the last look at everything is; `None` if there was none, or if it lies ahead of the clock.
    pub fn age(&self, now: Timestamp) -> Option<Span> {
        self.whole.filter(|whole| *whole <= now).map(|whole| now.since(whole))
    }

    pub fn of(&self, check: &CheckId) -> Option<&Held> {
        self.checks.get(check)
    }

    /// What fails now, by its check, the worst first. What only failed before, and could not be looked at since, is left out.
    pub fn failing(&self) -> Vec<(&CheckId, &HeldFinding)> {
        let now = self.checks.iter().filter(|(_, held)| held.verdict == Verdict::Fail);
        let mut failing: Vec<_> =
            now.flat_map(|(check, held)| held.findings.iter().map(move |finding| (check, finding))).collect();
        failing.sort_by_key(|(_, finding)| std::cmp::Reverse((finding.severity, finding.is_confirmed())));
        failing
    }

    /// Checks that had no answer.
    pub fn inconclusive(&self) -> usize {
        self.checks.values().filter(|held| held.verdict == Verdict::Inconclusive).count()
    }

    /// Why most of them had none: what hangs keeps many checks from an answer, for the same reason.
    pub fn why_inconclusive(&self) -> Option<&str> {
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for why in self.checks.values().filter_map(|held| held.why.as_deref()) {
            *times.entry(why).or_default() += 1;
        }
        times.into_iter().max_by_key(|(_, times)| *times).map(|(why, _)| why)
    }
}

fn held(finding: &Finding, before: &[HeldFinding]) -> HeldFinding {
    let same = before.iter().find(|old| old.rule == finding.rule && old.entity == finding.entity);
    HeldFinding {
        rule: finding.rule.clone(),
        entity: finding.entity.clone(),
        severity: finding.severity,
        reason: finding.reason.clone(),
        text: finding.text.clone(),
        times: same.map_or(0, |old| old.times).saturating_add(1),
        confirm: finding.confirm,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use doctor_core::finding::Evidence;

    pub(crate) fn finding(check: &str, reason: &str, severity: Severity, confirm: u32) -> Finding {
        Finding {
            check: CheckId::new(check).unwrap(),
            entity: Entity::node(),
            verdict: Verdict::Fail,
            severity,
            remedy: severity.usual_remedy(),
            reason: ReasonCode::new(reason).unwrap(),
            text: format!("{check} is wrong"),
            rule: RuleId::new(reason).unwrap(),
            evidence: Evidence::Nothing,
            confirm,
        }
    }

    #[test]
    fn a_finding_is_counted_while_it_lasts_and_not_knowing_neither_counts_nor_clears_it() {
        let (mut kept, check) = (Verdicts::none(), CheckId::new("gpu-xid").unwrap());
        let found = [finding("gpu-xid", "xid-79", Severity::Isolate, 2)];
        let at = Timestamp::from_secs(1000);
        let times = |kept: &Verdicts| kept.of(&check).unwrap().findings.iter().map(|one| one.times).collect::<Vec<_>>();
        kept.note(&check, Verdict::Fail, &found, "", at);
        assert!(!kept.failing()[0].1.is_confirmed());
        kept.note(&check, Verdict::Inconclusive, &[], "the driver hangs", at);
        assert_eq!(kept.why_inconclusive(), Some("the driver hangs"));
        assert_eq!((times(&kept), kept.failing().len(), kept.inconclusive()), (vec![1], 0, 1));
        kept.note(&check, Verdict::Fail, &found, "", at);
        assert!(kept.failing()[0].1.is_confirmed());
        kept.note(&check, Verdict::Pass, &[], "", at);
        assert!(kept.failing().is_empty());
        kept.note(&check, Verdict::Fail, &found, "", at);
        assert_eq!(times(&kept), [1], "it begins anew");
        kept.forget_before(at);
        assert_eq!(kept.failing().len(), 1);
        kept.forget_before(at.plus(Span::from_secs(1)));
        assert!(kept.failing().is_empty(), "nobody has looked since");
    }

    #[test]
    fn what_is_kept_is_read_back_and_of_another_boot_it_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let mut kept = Verdicts::none();
        let (check, at) = (CheckId::new("memory").unwrap(), Timestamp::from_secs(1000));
        kept.note(&check, Verdict::Pass, &[], "", at);
        kept.looked_at_all(at);
        kept.write(directory.path()).unwrap();
        assert_eq!(Verdicts::read(directory.path()), kept);
        assert_eq!(kept.age(at.plus(Span::minutes(5))), Some(Span::minutes(5)));
        assert_eq!(kept.age(at.minus(Span::minutes(5))), None, "the clock went back");
        kept.boot = "another".to_owned();
        kept.write(directory.path()).unwrap();
        assert_eq!(Verdicts::read(directory.path()), Verdicts::none());
    }
}
