//! Tests that this program brings along. Each runs in a process of its own, started by the runner.
//!
//! A test occupies the machine, loads drivers and leaves files while it works; all three can hang or be killed. In its own
//! process it can be ended, and what it leaves is its own to remove: told to stop (SIGTERM) it has a moment for that.
//! People read what it writes on standard error while it runs, in the log of the run. On standard output it answers
//! once, with measurements or with the reason why there are none.

mod collective;
mod dcgm;
mod dl;
mod fabric;
mod program;
mod storage;

#[doc(hidden)]
pub use collective::fuzzed;

use std::{ffi::OsString, process::ExitCode};

use doctor_checks::{document::Measurements, probe::ProbeOutput};
use doctor_core::observation::{FailureKind, ProbeFailure};
use rustix::process::Signal;

use crate::builtin_test::BuiltinTest;

/// Also right when the program was replaced by an update while it runs.
const OURSELVES: &str = "/proc/self/exe";

/// What a test does in a further process of its own, because it may hang there: a name and its work.
type Hand = (&'static str, fn(&[OsString]) -> ExitCode);
static HANDS: &[Hand] = &[
    (collective::WORK, collective::work),
    (dcgm::KEEP, dcgm::keep),
    (program::BOUND, program::bound),
    (storage::KEEP, storage::keep),
    (storage::ENTER, storage::enter),
];

/// What the process of a test does.
pub fn run(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let name = args.next().and_then(|name| name.into_string().ok());
    if let Some((_, work)) = HANDS.iter().find(|(hand, _)| name.as_deref() == Some(hand)) {
        return work(&args.collect::<Vec<_>>());
    }
    // Whoever asked may be killed; nobody would take the answer then.
    let _kept = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    let Some(test) = name.as_deref().and_then(BuiltinTest::named) else {
        eprintln!("this argument is for doctor-node itself");
        return ExitCode::FAILURE;
    };
    let args = args.collect();
    let answer = match test {
        BuiltinTest::Collective => measured(collective::run(args)),
        BuiltinTest::Dcgm => dcgm::run(args),
        BuiltinTest::Dl => measured(dl::run(args)),
        BuiltinTest::Fabric => measured(fabric::run(args)),
        BuiltinTest::Storage => measured(storage::run(args)),
    };
    match serde_json::to_writer(std::io::stdout().lock(), &answer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The answer of a test that measures for itself.
fn measured(result: Result<Measurements, ProbeFailure>) -> ProbeOutput {
    let failed = |error| {
        let text = format!("the measurements cannot be written down: {error}");
        ProbeOutput::Failed(ProbeFailure::new(FailureKind::Failed, text))
    };
    match result.map(|measurements| serde_json::to_string(&measurements)) {
        Ok(Ok(text)) => ProbeOutput::Text(text),
        Ok(Err(error)) => failed(error),
        Err(failure) => ProbeOutput::Failed(failure),
    }
}
