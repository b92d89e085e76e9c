//! The schedule of queries to Slurm's accounting: every five minutes, and less often while it fails.

use std::time::{Duration, Instant};

use doctor_core::time::Timestamp;

/// The interval between queries.
const INTERVAL: Duration = Duration::from_secs(300);
/// The longest interval: each failed query doubles it up to this.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);

/// When to query accounting. A query may take as long as the deadline of a Slurm command, and the cycle waits for it.
#[derive(Debug, Default)]
pub(super) struct AccountingSchedule {
    next_query: Option<Instant>,
    /// The earliest time not queried yet.
    pending_from: Option<Timestamp>,
    failures: u32,
}

impl AccountingSchedule {
    /// Returns the start of the period to query, if a query is due. A period that is not queried now is included later.
    pub(super) fn due(&mut self, since: Timestamp, now: Instant) -> Option<Timestamp> {
        let from = self.pending_from.map_or(since, |from| from.min(since));
        self.pending_from = Some(from);
        self.next_query.is_none_or(|next| next <= now).then_some(from)
    }

    pub(super) fn queried(&mut self, well: bool, now: Instant) {
        if well {
            (self.failures, self.pending_from) = (0, None);
        } else {
            self.failures = self.failures.saturating_add(1);
        }
        let times = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        self.next_query = Some(now + INTERVAL.saturating_mul(times).min(MAX_INTERVAL));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::time::Span;

    #[test]
    fn accounting_is_queried_at_an_interval_with_backoff_after_failures_and_no_period_is_skipped() {
        let mut accounting = AccountingSchedule::default();
        let (begun, since) = (Instant::now(), Timestamp::from_secs(1_794_700_800));
        assert_eq!(accounting.due(since, begun), Some(since));
        accounting.queried(true, begun);
        let later = since.plus(Span::minutes(1));
        assert_eq!(accounting.due(later, begun + Duration::from_secs(60)), None);
        let now = begun + INTERVAL;
        assert_eq!(accounting.due(since.plus(Span::minutes(5)), now), Some(later), "from the end of the last query");
        accounting.queried(false, now);
        assert_eq!(accounting.due(since.plus(Span::minutes(10)), now + INTERVAL), None, "it did not answer");
        assert_eq!(accounting.due(since.plus(Span::minutes(15)), now + INTERVAL * 2), Some(later));
        for _ in 0..50 {
            accounting.queried(false, now);
        }
        assert_eq!(accounting.due(since.plus(Span::hours(1)), now + MAX_INTERVAL), Some(later));
    }
}
