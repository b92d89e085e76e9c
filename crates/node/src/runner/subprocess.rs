//! Probes in child processes: programs, and reads that the kernel could block forever.

use std::{io, path::Path, process::Command, time::Duration};

use doctor_checks::{
    measurements::exit_failure,
    probe::{Probe, ProbeOutput},
};
use doctor_core::{observation::FailureKind, time::Span};
use doctor_host::trusted_file;

use super::{
    BUILTIN_ARGUMENT, HELPER_ARGUMENT, KEY_VARIABLE, LocalRunner, MAX_STREAM_BYTES, STATE_VARIABLE,
    child::{self, ChildOutcome, Echo, Limits},
    failed, kind_of, timeout_for,
    words::command_line,
};
use crate::{builtin_test::BuiltinTest, stop::StopReason};

/// The helper's output is JSON, which may need several characters for one byte of input.
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// Time for a built-in test to remove its files after SIGTERM. A job that is stopped has two seconds in total.
const BUILTIN_GRACE: Duration = Duration::from_millis(800);

/// A killed process is gone within microseconds unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(2);

impl LocalRunner<'_> {
    /// Runs a program that no other user can change: a policy names it, and it runs with our rights.
    pub(super) fn exec(&self, program: &str, args: &[String], timeout: Span) -> ProbeOutput {
        let path = match trusted_file::program(Path::new(program)) {
            Ok(path) => path,
            Err(error) => return self.explain(&command_line(program, args), Err(error), timeout),
        };
        let mut command = Command::new(path);
        command.args(args).env("LC_ALL", "C").env("DOCTOR_ROOT", &self.root);
        let echo = Echo { stdout: self.echo, stderr: self.echo };
        self.run_program(command, &command_line(program, args), timeout, Duration::ZERO, echo)
    }

    /// Runs a built-in test. Its standard error goes to the log; its standard output is a probe output as JSON.
    pub(super) fn builtin(&self, test: &str, args: &[String], timeout: Span) -> ProbeOutput {
        let what = format!("test {test}");
        if BuiltinTest::named(test).is_none() {
            return failed(FailureKind::Missing, format!("this doctor-node has no built-in test `{test}`"));
        }
        let mut command = Command::new(&self.helper);
        command.arg(BUILTIN_ARGUMENT).arg(test).args(args);
        command.env("DOCTOR_ROOT", &self.root).env("DOCTOR_NVML", &self.library);
        if let Some(state) = &self.state {
            command.env(STATE_VARIABLE, state);
        }
        let echo = Echo { stdout: None, stderr: self.echo };
        match self.run_program(command, &what, timeout, BUILTIN_GRACE, echo) {
            ProbeOutput::Ran { exit: Some(0), stdout, .. } => serde_json::from_str(&stdout)
                .unwrap_or_else(|error| failed(FailureKind::Unparseable, format!("{what}: invalid output: {error}"))),
            ProbeOutput::Ran { exit, stderr, .. } => ProbeOutput::Failed(exit_failure(exit, &stderr)),
            other => other,
        }
    }

    /// Runs a program to its end. At a limit it gets SIGTERM and has `grace` for cleanup before it is killed.
    fn run_program(
        &self,
        mut command: Command,
        what: &str,
        timeout: Span,
        grace: Duration,
        echo: Echo<'_>,
    ) -> ProbeOutput {
        command.env_remove(KEY_VARIABLE);
        let limits =
            Limits { timeout: timeout.to_std(), max_stream_bytes: MAX_STREAM_BYTES, grace, kill_grace: KILL_GRACE };
        match child::run(&mut command, &limits, self.stop, echo) {
            Ok(ChildOutcome::Exited { status, stdout, stderr }) => ProbeOutput::Ran {
                exit: status.code(),
                stdout: String::from_utf8_lossy(&stdout).into_owned(),
                stderr: String::from_utf8_lossy(&stderr).into_owned(),
            },
            other => self.explain(what, other, timeout),
        }
    }

    pub(super) fn read_in_helper(&self, probe: &Probe, what: &str) -> ProbeOutput {
        let Ok(request) = serde_json::to_string(probe) else {
            return failed(FailureKind::Failed, format!("{what}: cannot serialise the probe"));
        };
        let mut command = Command::new(&self.helper);
        let library = if matches!(probe, Probe::DcgmHealth { .. }) { &self.dcgm } else { &self.library };
        command.arg(HELPER_ARGUMENT).arg(request).arg(&self.root).arg(library).env_remove(KEY_VARIABLE);
        let limit = timeout_for(probe);
        let limits = Limits {
            timeout: limit,
            max_stream_bytes: MAX_ANSWER_BYTES,
            grace: Duration::ZERO,
            kill_grace: KILL_GRACE,
        };
        match child::run(&mut command, &limits, self.stop, Echo::default()) {
            Ok(ChildOutcome::Exited { status, stdout, .. }) if status.success() => serde_json::from_slice(&stdout)
                .unwrap_or_else(|error| {
                    failed(FailureKind::Unparseable, format!("{what}: invalid output of the helper: {error}"))
                }),
            Ok(ChildOutcome::Exited { status, stderr, .. }) => {
                let message = String::from_utf8_lossy(&stderr).trim().to_owned();
                failed(FailureKind::Failed, format!("{what}: the helper process ended with {status}: {message}"))
            }
            other => self.explain(what, other, Span::from_millis(limit.as_millis() as i64)),
        }
    }

    /// Converts an unsuccessful end into a failure.
    pub(super) fn explain(&self, what: &str, outcome: io::Result<ChildOutcome>, timeout: Span) -> ProbeOutput {
        let (kind, text) = match outcome {
            Err(error) => (kind_of(&error), format!("{what}: {error}")),
            Ok(ChildOutcome::TimedOut) => {
                (FailureKind::TimedOut, format!("{what}: no answer within {timeout}; it was killed"))
            }
            Ok(ChildOutcome::TooLong) => {
                (FailureKind::TooLong, format!("{what}: it printed more than {MAX_STREAM_BYTES} bytes and was killed"))
            }
            Ok(ChildOutcome::Stopped(StopReason::Signal)) => {
                (FailureKind::Killed, format!("{what}: stopped by a signal"))
            }
            Ok(ChildOutcome::Stopped(StopReason::TimeLimit)) => {
                (FailureKind::Killed, format!("{what}: the job's time limit was reached"))
            }
            Ok(ChildOutcome::Unkillable { pid, child }) => {
                self.abandoned.add(what, pid, child);
                (FailureKind::Abandoned, format!("{what}: process {pid} cannot be killed and was left behind"))
            }
            Ok(ChildOutcome::Exited { status, .. }) => (FailureKind::Failed, format!("{what}: it ended with {status}")),
        };
        failed(kind, text)
    }
}
