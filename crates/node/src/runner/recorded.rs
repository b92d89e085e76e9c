//! Replays recorded probe outputs instead of querying a machine.

use doctor_checks::probe::{Probe, ProbeOutput};
use doctor_core::observation::FailureKind;

use super::{ProbeRunner, describe, failed};

/// Answers from a recording: a result document's evidence, or a fixture.
#[derive(Debug, Clone, Default)]
pub struct FixtureRunner {
    recorded: Vec<(Probe, ProbeOutput)>,
}

impl FixtureRunner {
    pub fn new(recorded: impl IntoIterator<Item = (Probe, ProbeOutput)>) -> Self {
        Self { recorded: recorded.into_iter().collect() }
    }
}

impl ProbeRunner for FixtureRunner {
    fn run(&self, probe: &Probe) -> ProbeOutput {
        let entry = self.recorded.iter().find(|(recorded, _)| recorded == probe);
        entry.map_or_else(
            || failed(FailureKind::Missing, format!("{}: not in the recording", describe(probe))),
            |(_, output)| output.clone(),
        )
    }
}
