//! Ways in for the fuzzer to what this crate reads: the lines between a controller and a simulated cluster, lines of
//! scenarios, the record of effects, and worlds as they are written.

use crate::{
    BadWorld, Effect, Incident, WorldConfig,
    drive::scenario,
    effects,
    wire::{Answer, Ask},
};

/// A question as it would be asked again, if this line is one.
pub fn ask(line: &[u8]) -> Option<Vec<u8>> {
    let ask: Ask = serde_json::from_slice(line).ok()?;
    if let Ask::Submit(job) = ask.clone() {
        // A key that is none makes it no job; that is said elsewhere.
        let _job = job.into_request();
    }
    serde_json::to_vec(&ask).ok()
}

/// An answer as it would be given again, if this line is one.
pub fn answer(line: &[u8]) -> Option<Vec<u8>> {
    let answer: Answer = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&answer).ok();
    match answer {
        Answer::Polled(jobs) => drop(jobs.into_iter().map(|job| job.into_polled()).collect::<Vec<_>>()),
        Answer::Reports(reports) => drop(reports.into_iter().map(|report| report.into_report()).collect::<Vec<_>>()),
        _ => {}
    }
    again
}

/// What a line of a scenario lets happen.
pub fn incident(line: &str) -> Option<Incident> {
    let words: Vec<&str> = line.split_whitespace().collect();
    scenario::incident(&words).ok()
}

/// The effects of such a file.
pub fn effects(text: &str) -> Option<Vec<Effect>> {
    effects::parse(text, "fuzzed").ok()
}

/// Whether there can be such a world.
///
/// # Errors
/// With what is accepted.
pub fn check(world: &WorldConfig) -> Result<(), BadWorld> {
    world.check()
}
