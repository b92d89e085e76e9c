//! Builds the batch job of a run, and derives the run's state from the queue and the claims. Pure.
//!
//! The script is piped to `sbatch`. It contains the run's key: Slurm shows a script only to the job's own user and to
//! administrators, but command-line arguments to every user.

use std::path::Path;

use doctor_backend::{JobOutput, JobRequest};
use doctor_checks::{
    job_file::{JobFile, POLICY_DIGEST_VARIABLE},
    result_transport::URL_VARIABLE,
};
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    run::{JobEnd, ObservedJobState},
    time::{Span, Timestamp},
};

use super::{
    config::{JOB_PREFIX, SlurmConfig},
    queue::Job,
    states::{JobState, Phase},
};

/// A test must not have the service's rights in Slurm. `sbatch` passes on every variable of Slurm whatever `--export` says, and a
/// list there makes it load the user's login environment as well; so the script unsets the token itself.
const UNSET_TOKEN: &str = "unset SLURM_JWT";

/// Returns the name of a run's job, and of its reservation.
pub(super) fn name(run: RunId) -> String {
    format!("{JOB_PREFIX}{run}")
}

/// Uses the name instead of Slurm's number: it is known before the job exists, and finds the job after a crash.
pub(super) fn id(run: RunId) -> JobId {
    JobId(name(run))
}

/// Returns the run of a job of ours.
pub(super) fn run_of(name: &str) -> Option<RunId> {
    name.strip_prefix(JOB_PREFIX)?.parse().ok()
}

/// The nodes and resources of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placement<'a> {
    pub(super) nodes: &'a [NodeName],
    pub(super) partition: Option<&'a str>,
    /// Per node.
    pub(super) gpus: u32,
    /// The reservation of drained nodes.
    pub(super) reservation: Option<&'a str>,
}

/// Builds the arguments of `sbatch`.
pub(super) fn arguments(
    name: &str,
    comment: &str,
    placement: &Placement<'_>,
    limit: Span,
    output: &Path,
    config: &SlurmConfig,
) -> Vec<String> {
    let job = &config.job;
    let nodes = placement.nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
    // The job ends itself at its limit; the controller ends one that did not, and Slurm is the backstop for both.
    let minutes = (limit.secs() + job.grace.secs()) / 60 + 2;
    let mut args = vec![
        "--parsable".to_owned(),
        format!("--job-name={name}"),
        format!("--comment={comment}"),
        format!("--nodelist={nodes}"),
        format!("--nodes={}", placement.nodes.len()),
        "--ntasks-per-node=1".to_owned(),
        "--exclusive".to_owned(),
        "--mem=0".to_owned(),
        "--no-requeue".to_owned(),
        format!("--nice={}", job.nice),
        format!("--time={minutes}"),
        format!("--signal=B:TERM@{}", job.grace.secs()),
        format!("--output={}", output.display()),
        "--open-mode=append".to_owned(),
        // The service's working directory may not exist on the node.
        "--chdir=/".to_owned(),
    ];
    if job.gres && placement.gpus > 0 {
        args.push(format!("--gres=gpu:{}", placement.gpus));
    }
    for (option, value) in [
        ("partition", placement.partition),
        ("account", job.account.as_deref()),
        ("qos", job.qos.as_deref()),
        ("reservation", placement.reservation),
    ] {
        args.extend(value.map(|value| format!("--{option}={value}")));
    }
    args.extend(job.arguments.iter().cloned());
    args
}

/// Paths on the nodes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paths<'a> {
    pub(super) share: &'a Path,
    /// The run's folder: claims and output.
    pub(super) run: &'a Path,
    /// And the digest of its text: users may be able to write to the share.
    pub(super) policy: Option<(&'a Path, &'a str)>,
}

/// Builds the script of a run. On several nodes, each runs its own part.
pub(super) fn script(job: &JobRequest, paths: Paths<'_>, config: &SlurmConfig) -> String {
    let mut lines = vec!["#!/bin/sh".to_owned(), format!("# Cluster Doctor, run {}", job.run), UNSET_TOKEN.to_owned()];
    lines.push(format!("export DOCTOR_RUN_KEY={}", job.key.to_hex()));
    lines.extend(paths.policy.map(|(_, digest)| format!("export {POLICY_DIGEST_VARIABLE}={digest}")));
    lines.extend(job.results.iter().map(|url| format!("export {URL_VARIABLE}={}", quote(url))));
    let parts = || job.outputs.iter().map(|output| (&output.node, quoted(&command(job, output, paths, config))));
    match &*job.outputs {
        [_] => lines.extend(parts().map(|(_, command_line)| format!("exec {command_line}"))),
        many => {
            // Slurm provides ranks and names; the secret proves that a peer belongs to the same run.
            lines.push(format!("export DOCTOR_RENDEZVOUS_SECRET={}", job.key.rendezvous_secret()));
            let arms: Vec<String> =
                parts().map(|(node, command_line)| format!("{node}) exec {command_line} ;;")).collect();
            let each = format!("case \"$SLURMD_NODENAME\" in\n{}\nesac", arms.join("\n"));
            let step = format!("--nodes={0} --ntasks={0} --ntasks-per-node=1", many.len());
            // With the whole environment of this script, whatever the site's arguments of `sbatch` set.
            let step = format!("{step} --kill-on-bad-exit=0 --mem=0 --export=ALL");
            lines.push(format!("exec srun {step} /bin/sh -c {}", quote(&each)));
        }
    }
    lines.join("\n") + "\n"
}

/// Builds a script that runs one command.
pub(super) fn repair_script(args: &[String]) -> String {
    format!("#!/bin/sh\n{UNSET_TOKEN}\nexec {}\n", quoted(args))
}

fn command(job: &JobRequest, output: &JobOutput, paths: Paths<'_>, config: &SlurmConfig) -> Vec<String> {
    let written = |path: &Path| path.display().to_string();
    let tests = job.tests.iter().map(|test| test.as_str()).collect::<Vec<_>>().join(",");
    let mut args = vec![written(&config.doctor_node), "job".to_owned()];
    let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
    option("run", job.run.to_string());
    option("node", output.node.to_string());
    option("tests", tests);
    option("limit", job.limit.to_string());
    option("state", written(&config.node_state));
    option("job-file", written(&paths.run.join(claim_file(&output.node))));
    if let Some((policy, _)) = paths.policy {
        option("policy", written(policy));
    }
    for log in &output.logs {
        option("log", written(&paths.share.join(log)));
    }
    option("document", written(&paths.share.join(&output.document)));
    args
}

/// Returns the name of the file in which a node claims its part of a run.
pub(super) fn claim_file(node: &NodeName) -> String {
    format!("{node}.json")
}

fn quoted(args: &[String]) -> String {
    args.iter().map(|arg| quote(arg)).collect::<Vec<_>>().join(" ")
}

/// Quotes a word for the shell.
fn quote(arg: &str) -> String {
    format!("'{}'", arg.replace('\'', "'\\''"))
}

/// Returns the state of a run's job from the queue. Of several jobs with one name the first counts: later ones find its claim and
/// exit.
pub(super) fn job_state(run: RunId, jobs: &[&Job]) -> Option<ObservedJobState> {
    let job = jobs.iter().min_by_key(|job| job.number)?;
    let since = job.submitted.unwrap_or_else(|| run.born());
    // Slurm reports a start time even for a job that never had a node.
    let started = job.started.filter(|_| !job.nodes.is_empty());
    Some(match (job.phase(), job.state) {
        (Phase::Pending, _) | (Phase::Active, Some(JobState::Configuring)) => {
            ObservedJobState::Pending { job: id(run), since }
        }
        (Phase::Active, _) => ObservedJobState::Running { job: id(run), since: started.unwrap_or(since) },
        (Phase::Ended, state) => {
            let at = job.ended.or(started).unwrap_or(since);
            ObservedJobState::Ended {
                job: id(run),
                started,
                at: at.max(started.unwrap_or(at)),
                how: state.map_or(JobEnd::Lost, job_end),
            }
        }
    })
}

const fn job_end(state: JobState) -> JobEnd {
    match state {
        JobState::Completed => JobEnd::Exited,
        JobState::Cancelled | JobState::Timeout | JobState::Deadline => JobEnd::Killed,
        JobState::Preempted => JobEnd::Preempted,
        JobState::NodeFail => JobEnd::NodeDied,
        JobState::BootFail | JobState::Revoked => JobEnd::Lost,
        // The other states are not final.
        _ => JobEnd::Failed,
    }
}

/// Returns the state of a job that Slurm has purged, from its nodes' claims. A job that started and did not record its end is
/// lost.
pub(super) fn state_from_claims(run: RunId, claims: &[JobFile]) -> ObservedJobState {
    let begun = claims.iter().filter_map(|claim| claim.process.as_ref()).map(|process| process.started).min();
    let Some(started) = begun else { return ObservedJobState::Absent };
    let ends: Option<Vec<(Timestamp, Option<u8>)>> =
        claims.iter().map(|claim| claim.ended.as_ref().map(|ended| (ended.at, ended.exit))).collect();
    let (at, how) = match ends {
        Some(ends) => {
            let well = ends.iter().all(|(_, exit)| *exit == Some(doctor_checks::job_file::exit::DONE));
            let at = ends.iter().map(|(at, _)| *at).max().unwrap_or(started);
            (at, if well { JobEnd::Exited } else { JobEnd::Failed })
        }
        None => (started, JobEnd::Lost),
    };
    ObservedJobState::Ended { job: id(run), started: Some(started), at: at.max(started), how }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue;
    use doctor_checks::{
        document::RunKey,
        job_file::{JobEnded, JobProcess, exit},
    };
    use doctor_core::{
        ids::{IdSource, TestId},
        run::NonEmpty,
    };

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn request(nodes: &[&str]) -> JobRequest {
        let output = |name: &&str| JobOutput {
            node: node(name),
            logs: vec![format!("storage/{name}/a.log").into()],
            document: format!("storage/{name}/a.json").into(),
        };
        JobRequest {
            run: IdSource::new(1).run(),
            nodes: NonEmpty::new(nodes.iter().map(|name| node(name)).collect()).unwrap(),
            tests: NonEmpty::one(TestId::new("storage").unwrap()),
            access: Vec::new(),
            limit: Span::minutes(10),
            key: RunKey::new([7; 32]),
            results: None,
            outputs: nodes.iter().map(output).collect(),
        }
    }

    fn paths() -> Paths<'static> {
        Paths {
            share: Path::new("/data/it's here"),
            run: Path::new("/data/run"),
            policy: Some((Path::new("/data/policy.toml"), "d1ge57")),
        }
    }

    #[test]
    fn the_run_key_is_in_the_script_and_not_in_the_arguments() {
        let (job, config) = (request(&["n1"]), SlurmConfig::default());
        let script = script(&job, paths(), &config);
        assert!(script.starts_with("#!/bin/sh\n") && script.contains(&job.key.to_hex()), "{script}");
        assert!(script.contains("'--document' '/data/it'\\''s here/storage/n1/a.json'"), "{script}");
        assert!(script.contains("export DOCTOR_POLICY_DIGEST=d1ge57\n"), "{script}");
        let nodes = [node("n1")];
        let placement = Placement { nodes: &nodes, partition: Some("gpu"), gpus: 8, reservation: None };
        let args = arguments("doctor-x", "c", &placement, job.limit, Path::new("/data/o"), &config).join(" ");
        assert!(!args.contains(&job.key.to_hex()));
        for option in
            ["--exclusive", "--no-requeue", "--gres=gpu:8", "--nodelist=n1", "--partition=gpu", "--nice=10000"]
        {
            assert!(args.contains(option), "{option}: {args}");
        }
        // Ten minutes, the grace, and the time to start.
        assert!(args.contains("--time=12") && args.contains("--signal=B:TERM@30"), "{args}");
    }

    #[test]
    fn on_several_nodes_each_node_runs_its_own_command() {
        let script = script(&request(&["n1", "n2"]), paths(), &SlurmConfig::default());
        assert!(script.contains("exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1"), "{script}");
        assert!(script.contains("--export=ALL /bin/sh"), "{script}");
        for script in [script.clone(), repair_script(&["true".to_owned()])] {
            let unset = script.find("unset SLURM_JWT\n").unwrap();
            assert!(unset < script.find("exec ").unwrap(), "{script}");
        }
        assert!(script.contains("export DOCTOR_RENDEZVOUS_SECRET="), "{script}");
        assert!(script.contains("n1) exec") && script.contains("n2) exec"), "{script}");
    }

    #[test]
    fn a_quoted_argument_reaches_the_shell_unchanged() {
        for text in ["a b", "it's", "$(x)", "`x`", "a\nb", "\\", "", "ü'"] {
            let output = std::process::Command::new("sh").args(["-c", &format!("printf %s {}", quote(text))]).output();
            assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), text);
        }
    }

    fn job(number: &str, state: &str, nodes: &str) -> Job {
        let fields = [
            "t",
            number,
            "0",
            "root",
            state,
            "None",
            "gpu",
            "2026-11-15T22:58:02",
            "2026-11-15T22:58:03",
            "2026-11-15T22:58:04",
            nodes,
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
        queue::parse(&fields.join("\u{1f}"), "t").remove(0)
    }

    #[test]
    fn every_slurm_job_state_maps_to_an_observed_state() {
        let run = IdSource::new(1).run();
        let of = |state: &str, nodes: &str| match job_state(run, &[&job("1", state, nodes)]).unwrap() {
            ObservedJobState::Pending { .. } => "pending".to_owned(),
            ObservedJobState::Running { .. } => "running".to_owned(),
            ObservedJobState::Ended { started, how, .. } => {
                format!("{how}, {}", if started.is_some() { "ran" } else { "never ran" })
            }
            other => format!("{other:?}"),
        };
        for (state, nodes, expected) in [
            ("PENDING", "", "pending"),
            ("CONFIGURING", "n1", "pending"),
            ("RUNNING", "n1", "running"),
            ("COMPLETING", "n1", "running"),
            ("COMPLETED", "n1", "exited, ran"),
            ("FAILED", "n1", "failed, ran"),
            ("CANCELLED", "n1", "killed, ran"),
            ("CANCELLED", "", "killed, never ran"),
            ("TIMEOUT", "n1", "killed, ran"),
            ("PREEMPTED", "n1", "displaced, ran"),
            ("NODE_FAIL", "n1", "node-died, ran"),
            ("OUT_OF_MEMORY", "n1", "failed, ran"),
        ] {
            assert_eq!(of(state, nodes), expected, "{state}");
        }
    }

    #[test]
    fn of_two_jobs_for_one_run_the_first_is_used() {
        let run = IdSource::new(1).run();
        let (first, second) = (job("7", "RUNNING", "n1"), job("8", "FAILED", "n1"));
        assert!(matches!(job_state(run, &[&second, &first]), Some(ObservedJobState::Running { .. })));
        assert_eq!(job_state(run, &[]), None);
    }

    #[test]
    fn the_state_of_a_job_that_slurm_forgot_is_read_from_its_job_files() {
        let run = IdSource::new(1).run();
        let at = Timestamp::from_secs;
        let claim = |ended: Option<Option<u8>>| JobFile {
            run,
            process: Some(JobProcess { pid: 1, start_ticks: 1, boot_id: "b".to_owned(), started: at(100) }),
            ended: ended.map(|exit| JobEnded { at: at(200), exit }),
        };
        let how = |claims: &[JobFile]| match state_from_claims(run, claims) {
            ObservedJobState::Ended { how, .. } => Some(how),
            _ => None,
        };
        assert_eq!(state_from_claims(run, &[]), ObservedJobState::Absent);
        assert_eq!(how(&[claim(Some(Some(exit::DONE)))]), Some(JobEnd::Exited));
        assert_eq!(how(&[claim(Some(Some(exit::DONE))), claim(None)]), Some(JobEnd::Lost));
        assert_eq!(how(&[claim(Some(Some(exit::STOPPED)))]), Some(JobEnd::Failed));
    }
}
