//! When each check is due. Pure: time is measured from the agent's start.
//!
//! Checks with the same interval run together, so that shared reads happen once. The phase within the interval is
//! derived from the node's name, so that a fleet that starts together does not report together.

use std::time::Duration;

use doctor_core::{
    ids::{CheckId, NodeName},
    time::{Span, Timestamp},
};

#[derive(Debug, Clone)]
pub struct Schedule {
    groups: Vec<Group>,
}

#[derive(Debug, Clone)]
struct Group {
    every: Duration,
    /// The first slot of this group after the start.
    first: Duration,
    next: Duration,
    checks: Vec<CheckId>,
}

/// Shorter intervals would be a busy loop.
const SHORTEST: Duration = Duration::from_secs(1);

impl Schedule {
    /// Makes every check due now and then at its own slots. `start` is wall-clock time.
    pub fn new(checks: impl IntoIterator<Item = (CheckId, Span)>, node: &NodeName, start: Timestamp) -> Self {
        let mut groups: Vec<Group> = Vec::new();
        for (check, every) in checks {
            let every = every.to_std().max(SHORTEST);
            match groups.iter_mut().find(|group| group.every == every) {
                Some(group) => group.checks.push(check),
                None => {
                    let first = until_phase(every, node, start);
                    groups.push(Group { every, first, next: Duration::ZERO, checks: vec![check] });
                }
            }
        }
        Self { groups }
    }

    /// Returns the next time at which a check is due.
    pub fn next(&self) -> Option<Duration> {
        self.groups.iter().map(|group| group.next).min()
    }

    /// Returns the checks that are due. Missed slots are skipped.
    pub fn take_due(&mut self, now: Duration) -> Vec<CheckId> {
        let mut due = Vec::new();
        for group in self.groups.iter_mut().filter(|group| group.next <= now) {
            due.extend(group.checks.iter().cloned());
            group.next = group.after(now);
        }
        due
    }
}

impl Group {
    /// Returns the next slot that is at least half an interval away.
    fn after(&self, now: Duration) -> Duration {
        let earliest = now + self.every / 2;
        if earliest <= self.first {
            return self.first;
        }
        let periods = (earliest - self.first).as_nanos().div_ceil(self.every.as_nanos());
        self.first + self.every * u32::try_from(periods).unwrap_or(u32::MAX)
    }
}

fn until_phase(every: Duration, node: &NodeName, start: Timestamp) -> Duration {
    let every = every.as_millis();
    let phase = u128::from(spread(node.as_str())) % every;
    let into = u128::from(start.millis().max(0).cast_unsigned()) % every;
    let wait = (phase + every - into) % every;
    Duration::from_millis(u64::try_from(wait).unwrap_or(0))
}

/// Hashes a name, identically in every process.
pub(super) fn spread(name: &str) -> u64 {
    doctor_core::fnv::fnv1a(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn schedule(node: &str, start: Timestamp) -> Schedule {
        let check = |name: &str| CheckId::new(name).unwrap();
        let checks = [
            (check("memory"), Span::minutes(5)),
            (check("kernel-log"), Span::minutes(5)),
            (check("slow"), Span::hours(1)),
        ];
        Schedule::new(checks, &NodeName::new(node).unwrap(), start)
    }

    #[test]
    fn all_checks_are_due_at_startup_and_then_at_their_periods() {
        let mut schedule = schedule("n1", Timestamp::from_secs(1_000_000));
        assert_eq!(schedule.next(), Some(Duration::ZERO));
        assert_eq!(schedule.take_due(Duration::ZERO).len(), 3);
        let (mut fast, mut slow) = (0, 0);
        let mut last = Duration::ZERO;
        while last < MINUTE * 60 * 24 {
            last = schedule.next().unwrap();
            let due = schedule.take_due(last);
            assert!(!due.is_empty() && schedule.next().unwrap() > last);
            fast += usize::from(due.iter().any(|check| check.as_str() == "memory"));
            slow += usize::from(due.iter().any(|check| check.as_str() == "slow"));
            assert_eq!(
                due.iter().any(|check| check.as_str() == "memory"),
                due.iter().any(|check| check.as_str() == "kernel-log"),
                "checks of one period run together"
            );
        }
        assert!((287..=289).contains(&fast), "{fast}");
        assert!((23..=25).contains(&slow), "{slow}");
    }

    #[test]
    fn nodes_that_start_together_spread_over_the_period_and_a_restart_keeps_the_phase() {
        let at = |node: &str, start: i64| {
            let start = Timestamp::from_secs(start);
            let mut schedule = schedule(node, start);
            schedule.take_due(Duration::ZERO);
            let wait = schedule.groups[0].next.as_millis() as i64;
            (start.millis() + wait).rem_euclid(300_000) / 1000
        };
        let moments: std::collections::BTreeSet<i64> = (0..100).map(|n| at(&format!("gpu{n:03}"), 7_000)).collect();
        assert!(moments.len() > 60, "{} different seconds", moments.len());
        for start in [7_001, 7_155, 8_000, 90_001] {
            assert_eq!(at("gpu007", start), at("gpu007", 7_000));
        }
    }

    #[test]
    fn missed_runs_are_not_made_up() {
        let mut schedule = schedule("n1", Timestamp::from_secs(5));
        schedule.take_due(Duration::ZERO);
        let late = MINUTE * 60 * 8;
        assert_eq!(schedule.take_due(late).len(), 3);
        assert!(schedule.take_due(late).is_empty());
        assert!(schedule.next().unwrap() >= late + MINUTE * 2);
    }
}
