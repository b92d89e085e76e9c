//! The latest check results of this node, in a file. The agent and a scheduler's hooks are separate processes; a hook
//! that finds a fresh verdict need not run the checks again.
//!
//! As in the controller, a finding stays open until its check concludes without it, and a rule may require several
//! consecutive sightings before an action. The count is therefore kept here too.

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

/// All check results since the node booted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdicts {
    /// Results of another boot are discarded.
    boot: String,
    /// When all fast checks last ran.
    all_checked_at: Option<Timestamp>,
    checks: BTreeMap<CheckId, StoredResult>,
}

/// The latest result of one check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredResult {
    pub at: Timestamp,
    pub verdict: Verdict,
    /// Open findings, with their current counts.
    pub findings: Vec<StoredFinding>,
    /// Why the check was inconclusive, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The parts of a finding that are needed to act on it and to report it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredFinding {
    pub rule: RuleId,
    pub entity: Entity,
    pub severity: Severity,
    pub reason: ReasonCode,
    pub text: String,
    /// Consecutive sightings, and how many the rule requires.
    pub sightings: u32,
    pub confirm: u32,
}

impl StoredFinding {
    pub const fn is_confirmed(&self) -> bool {
        self.sightings >= self.confirm
    }
}

impl Verdicts {
    /// Reads the results of this boot from `directory`. Returns an empty set if there are none.
    pub fn read(directory: &Path) -> Self {
        let text = fs::read(directory.join(FILE)).ok();
        let stored: Option<Self> = text.and_then(|text| serde_json::from_slice(&text).ok());
        stored.filter(|stored| stored.boot == boot_id()).unwrap_or_else(Self::none)
    }

    /// An empty set for this boot.
    pub fn none() -> Self {
        Self { boot: boot_id(), all_checked_at: None, checks: BTreeMap::new() }
    }

    /// Writes the file atomically. It is not synced: after a reboot its content is discarded anyway.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let temporary = directory.join(format!(".{FILE}.{}.tmp", std::process::id()));
        let text = serde_json::to_vec(self).map_err(io::Error::from)?;
        fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, directory.join(FILE)))
    }

    /// Records one check's result. `text` is kept as the reason if the check was inconclusive.
    pub fn record(&mut self, check: &CheckId, verdict: Verdict, findings: &[Finding], text: &str, at: Timestamp) {
        let before = self.checks.remove(check).map_or_else(Vec::new, |result| result.findings);
        let findings = if verdict.is_conclusive() {
            let failing = findings.iter().filter(|finding| finding.verdict == Verdict::Fail);
            failing.map(|finding| to_stored_finding(finding, &before)).collect()
        } else {
            before
        };
        let reason = (verdict == Verdict::Inconclusive).then(|| text.to_owned());
        self.checks.insert(check.clone(), StoredResult { at, verdict, findings, why: reason });
    }

    /// Drops results from before `cutoff`: the fault may have been repaired since.
    pub fn forget_before(&mut self, cutoff: Timestamp) {
        self.checks.retain(|_, result| result.at >= cutoff);
    }

    /// Records that all fast checks ran at this time.
    pub fn mark_all_checked(&mut self, at: Timestamp) {
        self.all_checked_at = Some(at);
    }

    /// Returns the age of the last run of all fast checks; `None` if there was none or it is in the future.
    pub fn age(&self, now: Timestamp) -> Option<Span> {
        self.all_checked_at.filter(|last_run| *last_run <= now).map(|last_run| now.since(last_run))
    }

    pub fn get(&self, check: &CheckId) -> Option<&StoredResult> {
        self.checks.get(check)
    }

    /// Returns current failures with their check, the worst first. Findings of checks that have been inconclusive since
    /// are left out.
    pub fn failing(&self) -> Vec<(&CheckId, &StoredFinding)> {
        let now = self.checks.iter().filter(|(_, result)| result.verdict == Verdict::Fail);
        let mut failing: Vec<_> =
            now.flat_map(|(check, result)| result.findings.iter().map(move |finding| (check, finding))).collect();
        failing.sort_by_key(|(_, finding)| std::cmp::Reverse((finding.severity, finding.is_confirmed())));
        failing
    }

    /// Returns the number of inconclusive checks.
    pub fn inconclusive(&self) -> usize {
        self.checks.values().filter(|result| result.verdict == Verdict::Inconclusive).count()
    }

    /// Returns the most frequent reason of inconclusive checks: one hang blocks many checks for the same reason.
    pub fn why_inconclusive(&self) -> Option<&str> {
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in self.checks.values().filter_map(|result| result.why.as_deref()) {
            *times.entry(reason).or_default() += 1;
        }
        times.into_iter().max_by_key(|(_, times)| *times).map(|(reason, _)| reason)
    }
}

fn to_stored_finding(finding: &Finding, before: &[StoredFinding]) -> StoredFinding {
    let same = before.iter().find(|old| old.rule == finding.rule && old.entity == finding.entity);
    StoredFinding {
        rule: finding.rule.clone(),
        entity: finding.entity.clone(),
        severity: finding.severity,
        reason: finding.reason.clone(),
        text: finding.text.clone(),
        sightings: same.map_or(0, |old| old.sightings).saturating_add(1),
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
            remedy: severity.default_remedy(),
            reason: ReasonCode::new(reason).unwrap(),
            text: format!("{check} is wrong"),
            rule: RuleId::new(reason).unwrap(),
            evidence: Evidence::Nothing,
            confirm,
        }
    }

    #[test]
    fn a_finding_is_counted_while_it_lasts_and_an_inconclusive_check_neither_counts_nor_clears_it() {
        let (mut verdicts, check) = (Verdicts::none(), CheckId::new("gpu-xid").unwrap());
        let findings = [finding("gpu-xid", "xid-79", Severity::Isolate, 2)];
        let at = Timestamp::from_secs(1000);
        let times = |verdicts: &Verdicts| {
            verdicts.get(&check).unwrap().findings.iter().map(|one| one.sightings).collect::<Vec<_>>()
        };
        verdicts.record(&check, Verdict::Fail, &findings, "", at);
        assert!(!verdicts.failing()[0].1.is_confirmed());
        verdicts.record(&check, Verdict::Inconclusive, &[], "the driver hangs", at);
        assert_eq!(verdicts.why_inconclusive(), Some("the driver hangs"));
        assert_eq!((times(&verdicts), verdicts.failing().len(), verdicts.inconclusive()), (vec![1], 0, 1));
        verdicts.record(&check, Verdict::Fail, &findings, "", at);
        assert!(verdicts.failing()[0].1.is_confirmed());
        verdicts.record(&check, Verdict::Pass, &[], "", at);
        assert!(verdicts.failing().is_empty());
        verdicts.record(&check, Verdict::Fail, &findings, "", at);
        assert_eq!(times(&verdicts), [1], "the count restarts");
        verdicts.forget_before(at);
        assert_eq!(verdicts.failing().len(), 1);
        verdicts.forget_before(at.plus(Span::from_secs(1)));
        assert!(verdicts.failing().is_empty(), "not checked since");
    }

    #[test]
    fn stored_verdicts_are_read_back_unless_they_are_of_another_boot() {
        let directory = tempfile::tempdir().unwrap();
        let mut verdicts = Verdicts::none();
        let (check, at) = (CheckId::new("memory").unwrap(), Timestamp::from_secs(1000));
        verdicts.record(&check, Verdict::Pass, &[], "", at);
        verdicts.mark_all_checked(at);
        verdicts.write(directory.path()).unwrap();
        assert_eq!(Verdicts::read(directory.path()), verdicts);
        assert_eq!(verdicts.age(at.plus(Span::minutes(5))), Some(Span::minutes(5)));
        assert_eq!(verdicts.age(at.minus(Span::minutes(5))), None, "the clock went back");
        verdicts.boot = "another".to_owned();
        verdicts.write(directory.path()).unwrap();
        assert_eq!(Verdicts::read(directory.path()), Verdicts::none());
    }
}
