//! Entry points for the fuzzer: the protocol between a controller and a simulated cluster, lines of scenarios, the
//! record of effects, and world configurations.

use crate::{
    BadWorld, Effect, Incident, WorldConfig, effects,
    harness::scenario,
    wire::{Call, Response},
};

/// Parses a request and serialises it again.
pub fn request(line: &[u8]) -> Option<Vec<u8>> {
    let ask: Call = serde_json::from_slice(line).ok()?;
    if let Call::Submit(job) = ask.clone() {
        // A job with an invalid key is rejected elsewhere.
        let _job = job.into_request();
    }
    serde_json::to_vec(&ask).ok()
}

/// Parses an answer and serialises it again.
pub fn response(line: &[u8]) -> Option<Vec<u8>> {
    let answer: Response = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&answer).ok();
    match answer {
        Response::Polled(jobs) => drop(jobs.into_iter().map(|job| job.into_polled()).collect::<Vec<_>>()),
        Response::Reports(reports) => drop(reports.into_iter().map(|report| report.into_report()).collect::<Vec<_>>()),
        _ => {}
    }
    again
}

/// Parses an incident of a scenario line.
pub fn incident(line: &str) -> Option<Incident> {
    let args: Vec<&str> = line.split_whitespace().collect();
    scenario::incident(&args).ok()
}

/// Parses a file of effects.
pub fn effects(text: &str) -> Option<Vec<Effect>> {
    effects::parse(text, "fuzzed").ok()
}

/// Checks a world's configuration.
///
/// # Errors With the accepted values.
pub fn check(world: &WorldConfig) -> Result<(), BadWorld> {
    world.check()
}
