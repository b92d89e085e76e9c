//! Injected faults: words in `DOCTOR_FAKE_NVIDIA_FAULTS`, separated by spaces.
//!
//! - `zero:RANK:PLACE`, `element:RANK:PLACE`: the sum that this rank receives is zero there, or one too large;
//! - `share:RANK:PLACE`: this rank's share is lost there;
//! - `slow:RANK:MILLISECONDS`, `hang:RANK`, `crash:RANK`: before each message; `ecc:RANK`: its GPU fails during one;
//! - `drag:RANK:MILLISECONDS`: before each message that it sends only to the next rank;
//! - `socket`, `shm`, `peer`: connections use this transport whatever was requested; `mute`: the log does not name
//!   them;
//! - `no-net`: the requested network does not exist; `blind`: wrong sums are not detected.

use std::env;

const VARIABLE: &str = "DOCTOR_FAKE_NVIDIA_FAULTS";

fn entries() -> Vec<String> {
    env::var(VARIABLE).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

pub(crate) fn is_injected(name: &str) -> bool {
    entries().iter().any(|entry| entry == name)
}

/// Returns the number after a word and a rank, or 0 if there is none.
pub(crate) fn for_rank(name: &str, rank: i32) -> Option<u64> {
    entries().iter().find_map(|entry| {
        let mut parts = entry.split(':');
        let fits = parts.next() == Some(name) && parts.next()?.parse() == Ok(rank);
        fits.then(|| parts.next().and_then(|number| number.parse().ok()).unwrap_or(0))
    })
}
