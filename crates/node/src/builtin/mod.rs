//! The built-in tests. The runner starts each in its own process.
//!
//! A test occupies the machine, loads drivers and creates files, all of which can hang or be killed. In its own process
//! it can be ended. It must remove its own files, and has a moment for that after SIGTERM. Its standard error goes to
//! the log of the run. It prints one result on standard output: measurements, or the reason why there are none.

mod collective;
mod dcgm;
mod disturbance;
mod dl;
mod fabric;
mod program;
mod storage;

#[doc(hidden)]
pub use collective::fuzz_targets;

use std::{ffi::OsString, process::ExitCode};

use doctor_checks::{document::Measurements, probe::ProbeOutput};
use doctor_core::observation::{FailureKind, ProbeFailure};
use rustix::process::Signal;

use crate::builtin_test::BuiltinTest;

/// Stays valid if an update replaces the running program.
const SELF_EXE: &str = "/proc/self/exe";

/// A subtask that may hang and therefore has its own process: its name and its function.
type Subtask = (&'static str, fn(&[OsString]) -> ExitCode);
static SUBTASKS: &[Subtask] = &[
    (collective::SUBTASK, collective::run_worker),
    (dcgm::SUBTASK, dcgm::run_keeper),
    (program::SUBTASK, program::exec_bound),
    (storage::SUBTASK, storage::run_keeper),
    (storage::ENTER, storage::enter),
];

/// Entry point of a test's process.
pub fn run(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let name = args.next().and_then(|name| name.into_string().ok());
    if let Some((_, work)) = SUBTASKS.iter().find(|(subtask, _)| name.as_deref() == Some(subtask)) {
        return work(&args.collect::<Vec<_>>());
    }
    // Without a parent, no process would read the result.
    let _kept = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    let Some(test) = name.as_deref().and_then(BuiltinTest::named) else {
        eprintln!("this argument is internal to doctor-node");
        return ExitCode::FAILURE;
    };
    let args = args.collect();
    let result = match test {
        BuiltinTest::Collective => to_output(collective::run(args)),
        BuiltinTest::Dcgm => dcgm::run(args),
        BuiltinTest::Dl => to_output(dl::run(args)),
        BuiltinTest::Fabric => to_output(fabric::run(args)),
        BuiltinTest::Storage => to_output(storage::run(args)),
    };
    match serde_json::to_writer(std::io::stdout().lock(), &result) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Converts the result of a test that measures by itself.
fn to_output(result: Result<Measurements, ProbeFailure>) -> ProbeOutput {
    let failed = |error| {
        let text = format!("cannot serialise the measurements: {error}");
        ProbeOutput::Failed(ProbeFailure::new(FailureKind::Failed, text))
    };
    match result.map(|measurements| serde_json::to_string(&measurements)) {
        Ok(Ok(text)) => ProbeOutput::Text(text),
        Ok(Err(error)) => failed(error),
        Err(failure) => ProbeOutput::Failed(failure),
    }
}
