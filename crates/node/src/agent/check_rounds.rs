//! The checks that have run since the controller was last told, and whose results it has.
//!
//! Unchanged results are not reported again. A message names the checks that ran instead, so that the controller knows
//! that their results are not old.

use std::time::Instant;

use doctor_checks::document::{AgentReport, CheckRound, ConfirmedResults};
use doctor_core::{ids::CheckId, time::Span};

#[derive(Debug, Default)]
pub(super) struct CheckRounds {
    /// Number of the last report with results.
    through: u64,
    /// The oldest first. Each check is in one of them.
    rounds: Vec<Round>,
}

#[derive(Debug)]
struct Round {
    at: Instant,
    checks: Vec<CheckId>,
}

/// What a message confirms, and up to when.
#[derive(Debug)]
pub(super) struct Confirmation {
    pub(super) results: ConfirmedResults,
    newest: Instant,
}

impl CheckRounds {
    /// Adds checks that ran together. Their results have been reported, now or before.
    pub(super) fn add(&mut self, at: Instant, checks: Vec<CheckId>) {
        self.remove(&checks);
        if !checks.is_empty() {
            self.rounds.push(Round { at, checks });
        }
    }

    /// Records a report: earlier rounds of its checks confirm other results than those that it has.
    pub(super) fn record_report(&mut self, report: &AgentReport) {
        if !report.checks.is_empty() {
            self.through = report.sequence;
            let checks: Vec<CheckId> = report.checks.iter().map(|evidence| evidence.test.clone()).collect();
            self.remove(&checks);
        }
    }

    /// Forgets everything: reports were lost, so the controller may have other results.
    pub(super) fn clear(&mut self) {
        self.rounds.clear();
    }

    /// Returns what a message sent now can confirm.
    pub(super) fn confirmation(&self, now: Instant) -> Option<Confirmation> {
        let newest = self.rounds.last()?.at;
        let rounds = self.rounds.iter().map(|round| {
            let age = now.saturating_duration_since(round.at).as_millis();
            CheckRound { age: Span::from_millis(i64::try_from(age).unwrap_or(i64::MAX)), checks: round.checks.clone() }
        });
        let results = ConfirmedResults { through: self.through, rounds: rounds.collect() };
        Some(Confirmation { results, newest })
    }

    /// Removes what the controller has accepted.
    pub(super) fn mark_accepted(&mut self, confirmation: &Confirmation) {
        self.rounds.retain(|round| round.at > confirmation.newest);
    }

    fn remove(&mut self, checks: &[CheckId]) {
        for round in &mut self.rounds {
            round.checks.retain(|check| !checks.contains(check));
        }
        self.rounds.retain(|round| !round.checks.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use doctor_checks::document::{TestEvidence, Versions};
    use doctor_core::{ids::NodeName, time::Timestamp};

    use super::*;

    fn checks(names: &[&str]) -> Vec<CheckId> {
        names.iter().map(|name| CheckId::new(name).unwrap()).collect()
    }

    fn report(number: u64, names: &[&str]) -> AgentReport {
        let at = Timestamp::from_secs(1);
        let evidence = |test| TestEvidence { test, started: at, ended: at, probes: Vec::new() };
        let heartbeat = AgentReport::heartbeat(NodeName::new("n1").unwrap(), number, at, Versions::default());
        AgentReport { checks: checks(names).into_iter().map(evidence).collect(), ..heartbeat }
    }

    fn confirmed(rounds: &CheckRounds, now: Instant) -> Vec<(i64, Vec<CheckId>)> {
        let confirmation = rounds.confirmation(now).map(|confirmation| confirmation.results.rounds);
        confirmation.unwrap_or_default().into_iter().map(|round| (round.age.secs(), round.checks)).collect()
    }

    #[test]
    fn a_message_confirms_each_check_once_with_its_age() {
        let (mut rounds, start) = (CheckRounds::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(rounds.confirmation(start).is_none());
        rounds.record_report(&report(7, &["memory", "oom", "cpu-count"]));
        rounds.add(after(0), checks(&["memory", "oom", "cpu-count"]));
        rounds.add(after(300), checks(&["memory", "oom"]));
        assert_eq!(confirmed(&rounds, after(310)), [(310, checks(&["cpu-count"])), (10, checks(&["memory", "oom"]))]);
        let sent = rounds.confirmation(after(310)).unwrap();
        assert_eq!(sent.results.through, 7);
        // A round that ends while the message is on its way stays.
        rounds.add(after(320), checks(&["oom"]));
        rounds.mark_accepted(&sent);
        assert_eq!(confirmed(&rounds, after(330)), [(10, checks(&["oom"]))]);
    }

    #[test]
    fn a_reported_or_lost_result_is_not_confirmed_by_an_earlier_round() {
        let (mut rounds, start) = (CheckRounds::default(), Instant::now());
        rounds.add(start, checks(&["memory", "oom"]));
        // A hook's report has another result of the check than the agent's round.
        rounds.record_report(&report(8, &["oom"]));
        assert_eq!(confirmed(&rounds, start), [(0, checks(&["memory"]))]);
        assert_eq!(rounds.confirmation(start).unwrap().results.through, 8);
        rounds.clear();
        assert!(rounds.confirmation(start).is_none());
    }
}
