//! Runs Slurm's commands: without a shell, in a minimal environment, with a time limit.
//!
//! They do not inherit the service's environment (passwords, settings of `squeue`, a time format): `sbatch` would pass all of it
//! to the job, and the other commands would print in another format.

use std::{ffi::OsString, io, path::PathBuf, process::Command, time::Duration};

use doctor_backend::{
    BackendError, Effect, deadline,
    process::{self, ProcessOutput},
};

use super::config::SlurmConfig;

/// The most bytes of output that are read. A hundred thousand nodes need a tenth of it.
const MAX_OUTPUT_BYTES: usize = 512 * 1024 * 1024;
/// The variables of our environment that Slurm's commands need.
const PASSED_VARIABLES: [&str; 2] = ["PATH", "SLURM_JWT"];

/// Whether a command changes the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

#[derive(Debug)]
pub(super) struct Programs {
    folder: Option<PathBuf>,
    environment: Vec<(OsString, OsString)>,
    deadline: Duration,
}

/// Messages with which Slurm reports that it did nothing and may succeed later.
const RETRYABLE_ERRORS: [&str; 14] = [
    "Unable to contact slurm controller",
    "connect failure",
    "Munge",
    "uthentication",
    "redential",
    "ermission denied",
    "in standby mode",
    "nodes are busy",
    "is in use",
    "overlaps with another",
    "already completing or completed",
    "Job is pending execution",
    "node configuration is not available",
    "QOSMax",
];
/// Messages with which it leaves the result unknown.
const UNCERTAIN_ERRORS: [&str; 6] = [
    "Socket timed out",
    "Zero Bytes were transmitted",
    "ransport endpoint",
    "onnection reset",
    "Unexpected message",
    "Communication connection failure",
];

impl Programs {
    pub(super) fn new(config: &SlurmConfig) -> Self {
        let own = PASSED_VARIABLES.iter().filter_map(|name| Some((OsString::from(name), std::env::var_os(name)?)));
        let mut environment: Vec<(OsString, OsString)> = own.collect();
        let conf = config.slurm_conf.clone().map(OsString::from).or_else(|| std::env::var_os("SLURM_CONF"));
        environment.extend(conf.map(|path| ("SLURM_CONF".into(), path)));
        environment.push(("LC_ALL".into(), "C.UTF-8".into()));
        Self { folder: config.programs.clone(), environment, deadline: config.deadline.to_std() }
    }

    /// Runs a query. Times are printed in UTC.
    pub(super) fn read(
        &self,
        operation: &'static str,
        program: &str,
        arguments: &[&str],
    ) -> Result<String, BackendError> {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self.run(operation, program, &arguments, "", Access::Read)
    }

    /// Runs a command to its end with `input` on its standard input, and returns its output.
    pub(super) fn run(
        &self,
        operation: &'static str,
        program: &str,
        arguments: &[String],
        input: &str,
        does: Access,
    ) -> Result<String, BackendError> {
        let fail = |text: String, effect| BackendError { operation, text, effect };
        let path = self.folder.as_ref().map_or_else(|| PathBuf::from(program), |folder| folder.join(program));
        let mut command = Command::new(&path);
        command.args(arguments).env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        if does == Access::Read {
            // For queries only, because a job would inherit these.
            command.env("TZ", "UTC0").env("SLURM_TIME_FORMAT", "standard");
        }
        let limit = deadline::time_left(self.deadline);
        let ran = process::output(command, input.as_bytes(), limit, MAX_OUTPUT_BYTES).map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                return fail(format!("{program}: {error}"), Effect::NotAppliedRetry);
            }
            fail(format!("{} cannot be started: {error}; see `programs`", path.display()), Effect::NotAppliedPermanent)
        })?;
        match ran {
            ProcessOutput::Exited { status, stdout, .. } if status.success() => {
                String::from_utf8(stdout).or_else(|error| Ok(String::from_utf8_lossy(error.as_bytes()).into_owned()))
            }
            ProcessOutput::Exited { stderr, stdout, .. } => {
                let message = if stderr.is_empty() { String::from_utf8_lossy(&stdout).into_owned() } else { stderr };
                let message = process::last_line(&message);
                let effect = effect(&message, does);
                Err(fail(format!("{program}: {message}"), effect))
            }
            ProcessOutput::OutputLimit => {
                Err(fail(format!("{program} printed more than {MAX_OUTPUT_BYTES} bytes"), effect("", does)))
            }
            ProcessOutput::TimedOut => {
                let text = format!("{program} did not end within {} s", limit.as_secs().max(1));
                let effect = if does == Access::Read { Effect::NotAppliedRetry } else { Effect::Unknown };
                Err(fail(text, effect))
            }
        }
    }
}

/// Returns what a failed command may have changed.
fn effect(message: &str, does: Access) -> Effect {
    let says = |patterns: &[&str]| patterns.iter().any(|pattern| message.contains(pattern));
    match does {
        Access::Read => Effect::NotAppliedRetry,
        Access::Write if says(&UNCERTAIN_ERRORS) => Effect::Unknown,
        Access::Write if says(&RETRYABLE_ERRORS) => Effect::NotAppliedRetry,
        Access::Write => Effect::NotAppliedPermanent,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use doctor_core::time::Span;

    use super::*;

    fn programs(deadline: Span) -> Programs {
        Programs::new(&SlurmConfig { deadline, ..SlurmConfig::default() })
    }

    fn sh(script: &str, does: Access) -> Result<String, BackendError> {
        programs(Span::from_secs(20)).run("try", "sh", &["-c".to_owned(), script.to_owned()], "input", does)
    }

    #[test]
    fn a_program_has_a_clean_environment_and_reads_use_utc() {
        let output = sh("cat; echo; env", Access::Read).unwrap();
        assert!(output.starts_with("input\n") && output.contains("TZ=UTC0"), "{output}");
        assert!(!output.contains("CARGO"), "{output}");
        assert!(!sh("env", Access::Write).unwrap().contains("TZ="));
    }

    #[test]
    fn the_error_message_determines_whether_to_retry() {
        for (message, expected) in [
            ("Unable to contact slurm controller (connect failure)", Effect::NotAppliedRetry),
            ("Socket timed out on send/recv operation", Effect::Unknown),
            ("Invalid node name specified", Effect::NotAppliedPermanent),
            ("Requested reservation is in use", Effect::NotAppliedRetry),
        ] {
            let error = sh(&format!("echo 'slurm_update error: {message}' >&2; exit 1"), Access::Write).unwrap_err();
            assert_eq!(error.effect, expected, "{error}");
            assert!(error.text.contains(message), "{error}");
        }
        assert_eq!(sh("exit 1", Access::Read).unwrap_err().effect, Effect::NotAppliedRetry);
    }

    #[test]
    fn a_program_that_times_out_is_killed_with_its_children() {
        let began = Instant::now();
        let args = ["-c".to_owned(), "sleep 600 & sleep 600".to_owned()];
        let error = programs(Span::from_millis(300)).run("try", "sh", &args, "", Access::Write).unwrap_err();
        assert_eq!(error.effect, Effect::Unknown);
        assert!(began.elapsed() < Duration::from_secs(20), "{error}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = programs(Span::from_secs(1)).read("try", "no-such-scontrol", &[]).unwrap_err();
        assert!(error.text.contains("no-such-scontrol") && error.effect == Effect::NotAppliedPermanent, "{error}");
    }
}
