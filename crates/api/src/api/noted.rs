//! How many refusals are written down: anybody can knock, and one line for each would let anybody fill the disk.
//!
//! Those who are known have a room of their own, so that the noise of strangers does not hide what they tried.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::refusal::Refusal;

/// Refusals that are noted of each kind within [`WITHIN`]; the rest is counted.
const MOST: u32 = 120;
const WITHIN: Duration = Duration::from_secs(60);

/// Who was refused what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Knock {
    /// An order, of somebody who is known.
    Known,
    /// An order, of whoever it was.
    Stranger,
    /// A look, of whoever it was.
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

/// What was noted lately.
#[derive(Debug, Default)]
pub(super) struct Noted {
    known: Mutex<Lately>,
    stranger: Mutex<Lately>,
    look: Mutex<Lately>,
}

impl Noted {
    /// Whether one more refusal is noted, and how many were not before it.
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

    /// Somebody wanted to look whom nobody knows. That stands in the log: the audit trail is about changes.
    pub(super) fn unknown(&self, peer: IpAddr, path: &str, refusal: &Refusal) {
        if refusal.is_of_unknown()
            && let Some(left_out) = self.may(Knock::Look)
        {
            tracing::info!(%peer, path, why = %refusal, left_out, "somebody unknown was not answered by the API");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_noted_up_to_a_limit_and_counted_beyond() {
        let mine = Noted::default();
        assert_eq!((0..MOST).filter(|_| mine.may(Knock::Stranger) == Some(0)).count(), MOST as usize);
        assert_eq!((mine.may(Knock::Stranger), mine.may(Knock::Stranger)), (None, None));
        assert_eq!(mine.may(Knock::Known), Some(0), "the noise of strangers hides nobody who is known");
        mine.stranger.lock().unwrap().since = Instant::now().checked_sub(WITHIN).unwrap();
        assert_eq!((mine.may(Knock::Stranger), mine.may(Knock::Stranger)), (Some(2), Some(0)));
    }
}
