//! Slurm's own programs: started without a shell, in an environment that is made for them, with a time limit.
//!
//! What the service's own environment holds (passwords, settings for `squeue`, a format for times) is kept from them: `sbatch`
//! would hand all of it to the job, and the others would print in another form.

use std::{ffi::OsString, path::PathBuf, process::Command, time::Duration};

use doctor_backend::{
    BackendError, Effect,
    process::{self, Output},
};

use super::config::SlurmConfig;

/// No answer is read beyond this. A hundred thousand nodes are a tenth of it.
const MOST_OUTPUT: usize = 512 * 1024 * 1024;
/// Of our own environment, what Slurm's programs need.
const HANDED_ON: [&str; 2] = ["PATH", "SLURM_JWT"];

/// What a program does to the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Does {
    Reads,
    Changes,
}

#[derive(Debug)]
pub(super) struct Programs {
    folder: Option<PathBuf>,
    environment: Vec<(OsString, OsString)>,
    deadline: Duration,
}

/// Words by which Slurm says that it did nothing and may do it later.
const LATER: [&str; 14] = [
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
/// Words by which it says that it does not know.
const MAY_HAVE: [&str; 6] = [
    "Socket timed out",
    "Zero Bytes were transmitted",
    "ransport endpoint",
    "onnection reset",
    "Unexpected message",
    "Communication connection failure",
];

impl Programs {
    pub(super) fn new(config: &SlurmConfig) -> Self {
        let own = HANDED_ON.iter().filter_map(|name| Some((OsString::from(name), std::env::var_os(name)?)));
        let mut environment: Vec<(OsString, OsString)> = own.collect();
        let conf = config.slurm_conf.clone().map(OsString::from).or_else(|| std::env::var_os("SLURM_CONF"));
        environment.extend(conf.map(|path| ("SLURM_CONF".into(), path)));
        environment.push(("LC_ALL".into(), "C.UTF-8".into()));
        Self { folder: config.programs.clone(), environment, deadline: config.deadline.to_std() }
    }

    /// Asks for something. Times are told in UTC.
    pub(super) fn read(
        &self,
        operation: &'static str,
        program: &str,
        arguments: &[&str],
    ) -> Result<String, BackendError> {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        self.run(operation, program, &arguments, "", Does::Reads)
    }

    /// Runs a program to its end, with this on its standard input, and answers with what it printed.
    pub(super) fn run(
        &self,
        operation: &'static str,
        program: &str,
        arguments: &[String],
        input: &str,
        does: Does,
    ) -> Result<String, BackendError> {
        let fail = |text: String, effect| BackendError { operation, text, effect };
        let path = self.folder.as_ref().map_or_else(|| PathBuf::from(program), |folder| folder.join(program));
        let mut command = Command::new(&path);
        command.args(arguments).env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        if does == Does::Reads {
            // A job would inherit it.
            command.env("TZ", "UTC0").env("SLURM_TIME_FORMAT", "standard");
        }
        let ran = process::output(command, input.as_bytes(), self.deadline, MOST_OUTPUT).map_err(|error| {
            fail(format!("{} cannot be started: {error}; see `programs`", path.display()), Effect::NoneGiveUp)
        })?;
        match ran {
            Output::Ended { status, stdout, .. } if status.success() => {
                String::from_utf8(stdout).or_else(|error| Ok(String::from_utf8_lossy(error.as_bytes()).into_owned()))
            }
            Output::Ended { stderr, stdout, .. } => {
                let said = if stderr.is_empty() { String::from_utf8_lossy(&stdout).into_owned() } else { stderr };
                let said = process::last_line(&said);
                let effect = effect(&said, does);
                Err(fail(format!("{program}: {said}"), effect))
            }
            Output::TooLong => Err(fail(format!("{program} printed more than {MOST_OUTPUT} bytes"), effect("", does))),
            Output::Late => {
                let text = format!("{program} did not end within {} s", self.deadline.as_secs());
                let effect = if does == Does::Reads { Effect::NoneTryAgain } else { Effect::Unknown };
                Err(fail(text, effect))
            }
        }
    }
}

/// What may have happened although a program failed.
fn effect(said: &str, does: Does) -> Effect {
    let says = |words: &[&str]| words.iter().any(|word| said.contains(word));
    match does {
        Does::Reads => Effect::NoneTryAgain,
        Does::Changes if says(&MAY_HAVE) => Effect::Unknown,
        Does::Changes if says(&LATER) => Effect::NoneTryAgain,
        Does::Changes => Effect::NoneGiveUp,
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

    fn sh(script: &str, does: Does) -> Result<String, BackendError> {
        programs(Span::from_secs(20)).run("try", "sh", &["-c".to_owned(), script.to_owned()], "input", does)
    }

    #[test]
    fn the_environment_is_made_for_it_and_times_are_utc() {
        let told = sh("cat; echo; env", Does::Reads).unwrap();
        assert!(told.starts_with("input\n") && told.contains("TZ=UTC0"), "{told}");
        assert!(!told.contains("CARGO"), "{told}");
        assert!(!sh("env", Does::Changes).unwrap().contains("TZ="));
    }

    #[test]
    fn what_it_says_tells_whether_to_ask_again() {
        for (said, expected) in [
            ("Unable to contact slurm controller (connect failure)", Effect::NoneTryAgain),
            ("Socket timed out on send/recv operation", Effect::Unknown),
            ("Invalid node name specified", Effect::NoneGiveUp),
            ("Requested reservation is in use", Effect::NoneTryAgain),
        ] {
            let error = sh(&format!("echo 'slurm_update error: {said}' >&2; exit 1"), Does::Changes).unwrap_err();
            assert_eq!(error.effect, expected, "{error}");
            assert!(error.text.contains(said), "{error}");
        }
        assert_eq!(sh("exit 1", Does::Reads).unwrap_err().effect, Effect::NoneTryAgain);
    }

    #[test]
    fn one_that_does_not_end_is_ended_with_what_it_started() {
        let began = Instant::now();
        let words = ["-c".to_owned(), "sleep 600 & sleep 600".to_owned()];
        let error = programs(Span::from_millis(300)).run("try", "sh", &words, "", Does::Changes).unwrap_err();
        assert_eq!(error.effect, Effect::Unknown);
        assert!(began.elapsed() < Duration::from_secs(20), "{error}");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = programs(Span::from_secs(1)).read("try", "no-such-scontrol", &[]).unwrap_err();
        assert!(error.text.contains("no-such-scontrol") && error.effect == Effect::NoneGiveUp, "{error}");
    }
}
