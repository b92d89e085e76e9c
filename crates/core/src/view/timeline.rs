//! The history of one node: results, boots, steps, operators' actions and the controller's decisions.

use std::collections::BTreeMap;

use serde::Serialize;

use super::AuditLine;
use crate::{
    finding::Verdict,
    ids::{RunId, TestId},
    reason::{ReasonCode, coded},
    time::{Span, Timestamp},
};

coded! {
    /// The kind of an entry.
    pub enum TimelineKind {
        /// A run delivered results.
        Results => "results",
        /// The machine booted.
        Boot => "boot",
        /// An operator's request, or a decision or action of the controller.
        Act => "act",
    }
}

/// One entry of the history.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimelineEntry {
    pub at: Timestamp,
    pub kind: TimelineKind,
    /// One word: the worst verdict of results, the action, or the boot id.
    pub what: String,
    pub text: String,
    pub by: Option<String>,
    pub code: Option<ReasonCode>,
    pub run: Option<RunId>,
}

/// One result of the node.
#[derive(Debug, Clone)]
pub struct ResultFacts {
    pub at: Timestamp,
    pub run: Option<RunId>,
    pub test: TestId,
    pub verdict: Verdict,
}

/// A boot as recorded in a run's evidence.
#[derive(Debug, Clone)]
pub struct BootFacts {
    /// When the node reported it, by its own clock.
    pub seen: Timestamp,
    pub boot: String,
    /// The uptime at that moment.
    pub uptime: Option<Span>,
}

/// Returns the history, newest first. A boot appears once, where the boot id changes; `boots` may be in any order.
pub fn timeline(audit: Vec<AuditLine>, results: &[ResultFacts], mut boots: Vec<BootFacts>) -> Vec<TimelineEntry> {
    let mut moments: Vec<TimelineEntry> = audit.into_iter().map(act).collect();
    moments.extend(by_run(results));
    boots.sort_by_key(|boot| boot.seen);
    let mut known: Option<&str> = None;
    for boot in &boots {
        if known != Some(boot.boot.as_str()) {
            moments.push(started(boot));
            known = Some(&boot.boot);
        }
    }
    moments.sort_by_key(|moment| std::cmp::Reverse(moment.at));
    moments
}

fn act(line: AuditLine) -> TimelineEntry {
    TimelineEntry {
        at: line.at,
        kind: TimelineKind::Act,
        what: line.what,
        text: line.text,
        by: Some(line.by),
        code: Some(line.code),
        run: line.run,
    }
}

fn started(boot: &BootFacts) -> TimelineEntry {
    let (at, text) = match boot.uptime {
        Some(up) => (boot.seen.minus(up), "the machine booted".to_owned()),
        None => (boot.seen, "the machine had rebooted, at an unknown time before this".to_owned()),
    };
    TimelineEntry { at, kind: TimelineKind::Boot, what: boot.boot.clone(), text, by: None, code: None, run: None }
}

/// Returns one entry for each run, and for each result without a run.
fn by_run(results: &[ResultFacts]) -> Vec<TimelineEntry> {
    let mut runs: BTreeMap<(Option<RunId>, Option<usize>), Vec<&ResultFacts>> = BTreeMap::new();
    for (index, result) in results.iter().enumerate() {
        let own_key = result.run.is_none().then_some(index);
        runs.entry((result.run, own_key)).or_default().push(result);
    }
    let moments = runs.into_iter().filter_map(|((run, _), results)| {
        let at = results.iter().map(|result| result.at).max()?;
        let worst = worst(&results)?;
        let describe = |verdict: Verdict| {
            let of = |result: &&&ResultFacts| result.verdict == verdict;
            let tests: Vec<&str> = results.iter().filter(of).map(|result| result.test.as_str()).collect();
            (!tests.is_empty()).then(|| format!("{verdict}: {}", tests.join(", ")))
        };
        let text = [Verdict::Fail, Verdict::Inconclusive, Verdict::Pass, Verdict::NotApplicable].map(describe);
        let text = text.into_iter().flatten().collect::<Vec<_>>().join("; ");
        let what = worst.code().to_owned();
        Some(TimelineEntry { at, kind: TimelineKind::Results, what, text, by: None, code: None, run })
    });
    moments.collect()
}

/// Returns the worst verdict: fail, then inconclusive, then pass.
fn worst(results: &[&ResultFacts]) -> Option<Verdict> {
    let order = [Verdict::Fail, Verdict::Inconclusive, Verdict::Pass, Verdict::NotApplicable];
    order.into_iter().find(|verdict| results.iter().any(|result| result.verdict == *verdict))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_a_run_are_one_entry_with_the_worst_verdict_and_a_boot_is_listed_once() {
        let at = Timestamp::from_secs;
        let result = |run: u64, secs: i64, test: &str, verdict| ResultFacts {
            at: at(secs),
            run: Some(RunId::from_number(run)),
            test: TestId::new(test).unwrap(),
            verdict,
        };
        let results = [
            result(1, 100, "dl", Verdict::Pass),
            result(1, 100, "storage", Verdict::Inconclusive),
            result(2, 200, "dl", Verdict::Pass),
        ];
        let boot = |seen: i64, boot: &str, up: i64| BootFacts {
            seen: at(seen),
            boot: boot.to_owned(),
            uptime: Some(Span::from_secs(up)),
        };
        let line = AuditLine {
            at: at(150),
            by: "ann".to_owned(),
            what: "hold".to_owned(),
            code: ReasonCode::fixed("operator"),
            text: "fan".to_owned(),
            run: None,
        };
        let boots = vec![boot(200, "b", 20), boot(90, "a", 50), boot(100, "a", 60)];
        let timeline_entries = timeline(vec![line], &results, boots);
        let entries: Vec<(i64, &str, &str)> = timeline_entries
            .iter()
            .map(|moment| (moment.at.secs(), moment.kind.code(), moment.what.as_str()))
            .collect();
        let expected = [
            (200, "results", "pass"),
            (180, "boot", "b"),
            (150, "act", "hold"),
            (100, "results", "inconclusive"),
            (40, "boot", "a"),
        ];
        assert_eq!(entries, expected);
        assert_eq!(timeline_entries[3].text, "inconclusive: storage; pass: dl");
    }
}
