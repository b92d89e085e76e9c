//! What is planted: words in `DOCTOR_STANDIN_FAULTS`, separated by spaces.
//!
//! - `zero:RANK:PLACE`, `element:RANK:PLACE`: the sum that this rank gets is zero there, or one too large;
//! - `share:RANK:PLACE`: what this rank brings there is lost on its way;
//! - `slow:RANK:MILLISECONDS`, `hang:RANK`, `crash:RANK`: before each message; `ecc:RANK`: its GPU fails in one;
//! - `drag:RANK:MILLISECONDS`: before each message that it sends to the next rank alone;
//! - `socket`, `shm`, `peer`: connections take this way whatever was asked; `mute`: the log does not name them;
//! - `no-net`: there is no network of the name that is asked for; `blind`: wrong sums are not seen.

use std::env;

const VARIABLE: &str = "DOCTOR_STANDIN_FAULTS";

fn words() -> Vec<String> {
    env::var(VARIABLE).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

pub(crate) fn is_planted(word: &str) -> bool {
    words().iter().any(|planted| planted == word)
}

/// The number after a word and a rank, 0 where there is none.
pub(crate) fn of_rank(word: &str, rank: i32) -> Option<u64> {
    words().iter().find_map(|planted| {
        let mut parts = planted.split(':');
        let fits = parts.next() == Some(word) && parts.next()?.parse() == Ok(rank);
        fits.then(|| parts.next().and_then(|number| number.parse().ok()).unwrap_or(0))
    })
}
