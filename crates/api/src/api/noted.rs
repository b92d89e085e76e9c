//! Limits how many rejected requests are recorded: any client can connect, and a line for each would let it fill the
//! disk.
//!
//! Authenticated callers have their own allowance, so that the noise of unknown clients does not hide their attempts.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::refusal::Refusal;

/// Rejections recorded of each kind within [`WITHIN`]; the rest are counted.
const MOST: u32 = 120;
const WITHIN: Duration = Duration::from_secs(60);

/// The kind of a rejected request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Knock {
    /// A command from an authenticated caller.
    Known,
    /// A command from an unknown client.
    Stranger,
    /// A read from an unknown client.
    Look,
}

#[derive(Debug)]
struct Lately {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Default for Lately {
    fn default() -> Self {
        Self { since: Instant::now(), lines: 0, left_out: 0 }
    }
}

/// Recent counts by kind.
#[derive(Debug, Default)]
pub(super) struct Noted {
    known: Mutex<Lately>,
    stranger: Mutex<Lately>,
    look: Mutex<Lately>,
}

impl Noted {
    /// Returns `Some` if this rejection is recorded, with the number of those left out before it.
    pub(super) fn may(&self, knock: Knock) -> Option<u64> {
        let of = match knock {
            Knock::Known => &self.known,
            Knock::Stranger => &self.stranger,
            Knock::Look => &self.look,
        };
        let mut noted = of.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.since.elapsed() >= WITHIN {
            (noted.since, noted.lines) = (Instant::now(), 0);
        }
        if noted.lines >= MOST {
            noted.left_out += 1;
            return None;
        }
        noted.lines += 1;
        Some(std::mem::take(&mut noted.left_out))
    }

    /// Logs a read by an unknown client. The audit trail records changes only.
    pub(super) fn unknown(&self, peer: IpAddr, path: &str, refusal: &Refusal) {
        if refusal.is_of_unknown()
            && let Some(left_out) = self.may(Knock::Look)
        {
            tracing::info!(%peer, path, reason = %refusal, not_logged = left_out, "API request rejected: unknown client");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_are_recorded_up_to_a_limit_and_counted_beyond() {
        let mine = Noted::default();
        assert_eq!((0..MOST).filter(|_| mine.may(Knock::Stranger) == Some(0)).count(), MOST as usize);
        assert_eq!((mine.may(Knock::Stranger), mine.may(Knock::Stranger)), (None, None));
        assert_eq!(mine.may(Knock::Known), Some(0), "unknown clients do not use up the allowance of known callers");
        mine.stranger.lock().unwrap().since = Instant::now().checked_sub(WITHIN).unwrap();
        assert_eq!((mine.may(Knock::Stranger), mine.may(Knock::Stranger)), (Some(2), Some(0)));
    }
}
