//! How the job before an epilog ended, and whether that calls for deeper checks.
//!
//! A failed job is nearly always its user's affair; one that died of a bus error may be the node's. The end is stored
//! as evidence (the check `job-ends` reads it) and is never a verdict by itself.

use std::{fs, io, path::Path, time::Duration};

use doctor_core::time::Timestamp;

use super::{settings::Epilog, slurm_env::SlurmEnv};
use crate::job::output::write_atomically;

const FOLDER: &str = "jobs";
/// The newest are kept.
const MAX_FILES: usize = 32;
const RETENTION: Duration = Duration::from_secs(86_400);

/// A job, and how it and its steps ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobEnd {
    pub(super) job: String,
    user: String,
    batch: Status,
    /// The worst of its steps.
    step: Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Status {
    code: u8,
    signal: u8,
}

impl Status {
    /// Parses `CODE:SIGNAL`.
    fn parse_pair(text: &str) -> Option<Self> {
        let (code, signal) = text.split_once(':')?;
        Some(Self { code: code.parse().ok()?, signal: signal.parse().ok()? })
    }

    /// Parses a status of wait(2).
    fn from_wait_status(text: &str) -> Option<Self> {
        let status: u32 = text.parse().ok()?;
        Some(Self { code: u8::try_from(status >> 8 & 0xff).ok()?, signal: u8::try_from(status & 0x7f).ok()? })
    }

    /// Returns the signal that ended it, including a shell's exit code of 128 plus the signal.
    fn signal_or_shell_signal(self) -> Option<u8> {
        match (self.signal, self.code) {
            (0, code) => code.checked_sub(128).filter(|signal| (1..=64).contains(signal)),
            (signal, _) => Some(signal),
        }
    }

    const fn is_success(self) -> bool {
        self.code == 0 && self.signal == 0
    }
}

impl JobEnd {
    /// Reads Slurm's environment of an epilog. `None` outside of one, or if this Slurm does not set the variables.
    pub(super) fn from_env(slurm_env: &SlurmEnv) -> Option<Self> {
        let job = slurm_env.get("SLURM_JOB_ID").or_else(|| slurm_env.get("SLURM_JOBID"))?;
        if job.len() > 20 || !job.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let pair = slurm_env.get("SLURM_JOB_EXIT_CODE2").and_then(Status::parse_pair);
        let raw = |name| slurm_env.get(name).and_then(Status::from_wait_status);
        let user = slurm_env.get("SLURM_JOB_USER").unwrap_or("?");
        let plain = |c: &char| c.is_ascii_alphanumeric() || "._-@$".contains(*c);
        Some(Self {
            job: job.to_owned(),
            user: user.chars().filter(plain).take(64).collect(),
            batch: pair.or_else(|| raw("SLURM_JOB_EXIT_CODE"))?,
            step: raw("SLURM_JOB_DERIVED_EC").unwrap_or_default(),
        })
    }

    pub(super) const fn is_success(&self) -> bool {
        self.batch.is_success() && self.step.is_success()
    }

    /// Whether deeper checks run after this end.
    pub(super) fn needs_deeper_checks(&self, settings: &Epilog) -> bool {
        [self.batch, self.step].into_iter().any(|status| {
            let by_signal = status.signal_or_shell_signal().is_some_and(|signal| settings.signals.contains(&signal));
            by_signal || (status.code != 0 && settings.exit_codes.contains(&status.code))
        })
    }

    /// Formats the end for the log line.
    pub(super) fn summary(&self) -> String {
        let worst = if self.batch.is_success() { self.step } else { self.batch };
        match (worst.signal_or_shell_signal(), worst.code) {
            _ if worst.is_success() => format!("job {} succeeded", self.job),
            (Some(signal), _) => format!("job {} ended by signal {signal}", self.job),
            (None, code) => format!("job {} ended with code {code}", self.job),
        }
    }

    /// Stores the end in the format that the check reads.
    pub(super) fn store(&self, state: &Path, at: Timestamp) -> io::Result<()> {
        let folder = state.join(FOLDER);
        let JobEnd { job, user, batch, step } = self;
        let text = format!(
            "job {job}\nuser {user}\nended {at}\nbatch {}:{}\nstep {}:{}\n",
            batch.code, batch.signal, step.code, step.signal
        );
        write_atomically(&folder.join(job), text.as_bytes())?;
        tidy(&folder)
    }
}

fn tidy(folder: &Path) -> io::Result<()> {
    let mut remaining = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        remaining.push((entry.metadata()?.modified()?, entry.path()));
    }
    remaining.sort();
    remaining.reverse();
    for (number, (changed, path)) in remaining.into_iter().enumerate() {
        if number >= MAX_FILES || changed.elapsed().is_ok_and(|age| age > RETENTION) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hook::slurm_env::tests::of;

    fn ended(pair: &str, derived: &str) -> JobEnd {
        let env = of(&[
            ("SLURM_JOB_ID", "17"),
            ("SLURM_JOB_USER", "ann"),
            ("SLURM_JOB_EXIT_CODE2", pair),
            ("SLURM_JOB_DERIVED_EC", derived),
        ]);
        JobEnd::from_env(&env).unwrap()
    }

    #[test]
    fn a_job_killed_by_a_hardware_signal_needs_deeper_checks_and_a_cancelled_one_does_not() {
        // From an epilog of Slurm 22.05.8 on 2026-11-15, except for the last three.
        for (pair, derived, needs_checks, summary) in [
            ("0:0", "0", false, "job 17 succeeded"),
            ("3:0", "0", false, "job 17 ended with code 3"),
            ("0:6", "0", true, "job 17 ended by signal 6"),
            ("139:0", "11", true, "job 17 ended by signal 11"),
            ("0:0", "1280", false, "job 17 ended with code 5"),
            ("0:15", "15", false, "job 17 ended by signal 15"),
            ("137:0", "9", false, "job 17 ended by signal 9"),
            ("0:0", "7", true, "job 17 ended by signal 7"),
        ] {
            let end = ended(pair, derived);
            assert_eq!((end.needs_deeper_checks(&Epilog::default()), end.summary().as_str()), (needs_checks, summary));
        }
        let codes = Epilog { exit_codes: vec![3], ..Epilog::default() };
        assert!(ended("3:0", "0").needs_deeper_checks(&codes) && !ended("0:0", "0").needs_deeper_checks(&codes));
    }

    #[test]
    fn missing_slurm_variables_are_not_invented() {
        assert_eq!(JobEnd::from_env(&of(&[])), None);
        assert_eq!(JobEnd::from_env(&of(&[("SLURM_JOB_ID", "17")])), None);
        assert_eq!(JobEnd::from_env(&of(&[("SLURM_JOB_ID", "../etc"), ("SLURM_JOB_EXIT_CODE2", "0:0")])), None);
        let raw = JobEnd::from_env(&of(&[("SLURM_JOBID", "17"), ("SLURM_JOB_EXIT_CODE", "35584")])).unwrap();
        assert_eq!(raw.summary(), "job 17 ended by signal 11");
    }

    #[test]
    fn only_the_newest_records_are_kept() {
        let state = tempfile::tempdir().unwrap();
        for job in 0..40 {
            let end = JobEnd { job: format!("{job}"), ..ended("0:6", "0") };
            end.store(state.path(), Timestamp::from_secs(1_794_700_800)).unwrap();
        }
        let folder = state.path().join(FOLDER);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), MAX_FILES);
        let text = fs::read_to_string(folder.join("39")).unwrap();
        assert_eq!(text, "job 39\nuser ann\nended 2026-11-15T00:00:00Z\nbatch 0:6\nstep 0:0\n");
    }
}
