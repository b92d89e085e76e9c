//! What is left of a job without a result: the output file that `sbatch --output` names, and how Slurm says the job ended.

use std::path::Path;

use doctor_backend::{BackendError, Effect, MAX_REMAINING_OUTPUT, output_file};
use doctor_core::{
    ids::RunId,
    last_output::LastOutput,
    run::{NonEmpty, Run},
};

use super::{
    SlurmBackend, job,
    queue::Job,
    scontrol_text::Record,
    states::{JobState, Phase},
    submit::{FOLDER, OUTPUT},
};

const OPERATION: &str = "read the output of a job";
/// The fields of `scontrol show job` that are read, sorted.
const KEYS: [&str; 7] = ["ExitCode", "JobId", "JobState", "Reason", "Requeue", "Restarts", "RunTime"];

impl SlurmBackend {
    /// The file is on the shared directory, to which nodes write. It is the output of all nodes of the run, and is shown under
    /// the first.
    pub(super) fn remaining_output_of(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        let path = Path::new(FOLDER).join(run.id.to_string()).join(OUTPUT);
        let text = self.output_end(&path)?;
        let ending = self.ending(run.id)?;
        if text.is_none() && ending.is_none() {
            return Ok(Vec::new());
        }
        let node = NonEmpty::first(&run.nodes).clone();
        Ok(vec![LastOutput { node, ending, text: text.unwrap_or_default() }])
    }

    /// Returns the end of a job's output file, by its path below the shared directory.
    pub(super) fn output_end(&self, path: &Path) -> Result<Option<String>, BackendError> {
        let below = path.to_owned();
        let read = move |root: &Path| output_file::tail(root, &below, MAX_REMAINING_OUTPUT);
        self.share_files.at_root("reading the output of a job", read).map_err(|error| BackendError {
            operation: OPERATION,
            text: format!("{}: {error}", self.data.join(path).display()),
            effect: Effect::NotAppliedRetry,
        })
    }

    /// Returns `None` if Slurm has purged the job.
    fn ending(&self, run: RunId) -> Result<Option<String>, BackendError> {
        let jobs = self.job_named(OPERATION, &job::name(run))?;
        let Some(job) = jobs.iter().min_by_key(|job| job.number) else { return Ok(None) };
        // The exit code is an addition; without it the state still says much.
        let shown = self.programs.read(OPERATION, "scontrol", &["show", "job", "-o", &job.number.to_string()]);
        Ok(Some(ending(job, shown.ok().and_then(|text| exit_code(&text)))))
    }
}

/// Formats how a job ended, in Slurm's words.
fn ending(job: &Job, exit_code: Option<String>) -> String {
    let state = job.state.map_or("in an unknown state", JobState::word);
    let mut parts = vec![format!("Slurm job {} {state}", job.number)];
    if job.phase() == Phase::Ended {
        parts.extend(exit_code);
    }
    if !job.reason.is_empty() {
        parts.push(format!("reason {}", job.reason));
    }
    parts.join(", ")
}

/// Returns the exit code or signal in the record of a job: `ExitCode=127:0`.
fn exit_code(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("JobId="))?;
    let record = Record::parse(line, &KEYS);
    match record.word("ExitCode")?.split_once(':')? {
        ("0", "0") => None,
        (code, "0") => Some(format!("exit code {code}")),
        (_, signal) => Some(format!("signal {signal}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_read_and_an_ordinary_end_has_none() {
        let record = |code: &str| {
            let user = "UserId=root(0) GroupId=root(0) MCS_label=N/A";
            format!(
                "JobId=12 JobName=doctor-r0 {user} JobState=FAILED Reason=NonZeroExitCode ExitCode={code} RunTime=0\n"
            )
        };
        for (code, expected) in
            [("127:0", Some("exit code 127")), ("0:9", Some("signal 9")), ("0:0", None), ("nonsense", None)]
        {
            assert_eq!(exit_code(&record(code)).as_deref(), expected, "{code}");
        }
        assert_eq!(exit_code("slurm_load_jobs error: Invalid job id specified\n"), None);
    }

    #[test]
    fn the_ending_names_state_exit_code_and_reason() {
        let job = |state: &str, reason: &str| {
            let fields = [
                "t",
                "12",
                "0",
                "root",
                state,
                reason,
                "gpu",
                "2026-11-15T22:58:02",
                "2026-11-15T22:58:03",
                "2026-11-15T22:58:04",
                "n1",
                "n1",
                "",
                "1",
                "1",
                "0",
                "N/A",
                "(null)",
                "(null)",
                "doctor-x",
            ];
            crate::queue::parse(&fields.join("\u{1f}"), "t").remove(0)
        };
        let failed = ending(&job("FAILED", "NonZeroExitCode"), Some("exit code 127".to_owned()));
        assert_eq!(failed, "Slurm job 12 FAILED, exit code 127, reason NonZeroExitCode");
        assert_eq!(ending(&job("OUT_OF_MEMORY", "None"), None), "Slurm job 12 OUT_OF_MEMORY");
        let waiting = ending(&job("PENDING", "ReqNodeNotAvail, UnavailableNodes:n1"), Some("exit code 1".to_owned()));
        assert_eq!(waiting, "Slurm job 12 PENDING, reason ReqNodeNotAvail, UnavailableNodes:n1");
    }
}
