//! Submits runs, and manages their files on the shared directory: `metadata/slurm/RUN/`, with a claim of each of its nodes and
//! the output of the job itself.
//!
//! A run is submitted once: its job is looked up by name first, then its claims, which outlast the queue. Two concurrent
//! submissions create two jobs, of which the second finds the claim and exits.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
    sync::PoisonError,
    time::{Duration, Instant, SystemTime},
};

use doctor_backend::{
    BackendError, Effect, JobRequest,
    clock::{Clock, SystemClock},
    trusted_file,
};
use doctor_checks::job_file::{JobFile, policy_digest};
use doctor_core::{
    fnv::fnv1a,
    ids::{JobId, RunId},
    time::{Span, Timestamp},
};

use super::{
    SlurmBackend,
    job::{self, Paths, Placement},
    maintenance_reservation, marks,
    nodes::SlurmNode,
    programs::Access,
    reservations::Reservation,
};

const OPERATION: &str = "submit";
/// The output of the job itself, in the folder of its run.
pub(super) const OUTPUT: &str = "output.txt";
/// Relative to the shared directory.
pub(super) const FOLDER: &str = "metadata/slurm";
/// How long the files of runs are kept.
const RETENTION: Span = Span::days(30);
/// The interval between removals: on a shared file system they are slow.
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);
/// A claim has about two hundred bytes.
const MAX_CLAIM_BYTES: u64 = 16 * 1024;

fn permanent_error(text: String) -> BackendError {
    BackendError { operation: OPERATION, text, effect: Effect::NotAppliedPermanent }
}

fn retryable_error(text: String) -> BackendError {
    BackendError { operation: OPERATION, text, effect: Effect::NotAppliedRetry }
}

impl SlurmBackend {
    pub(super) fn submit_run(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        check(request)?;
        let name = job::name(request.run);
        if !self.job_named(OPERATION, &name)?.is_empty() {
            return Ok(job::id(request.run));
        }
        let begun =
            self.claims(request.run).map_err(|error| retryable_error(format!("reading its claims failed: {error}")))?;
        if !begun.is_empty() {
            return Ok(job::id(request.run));
        }
        let nodes = self.nodes_named(OPERATION, &request.nodes)?;
        let folder =
            self.prepare(request.run).map_err(|error| retryable_error(format!("the shared directory: {error}")))?;
        let policy = self.publish_policy().map_err(|error| retryable_error(format!("the policy for jobs: {error}")))?;
        // Slurm starts nothing on a drained node, and a reserved one accepts only jobs of its reservation.
        let reservations = self.reservations(OPERATION)?;
        let ours = |one: &&Reservation| maintenance_reservation::reservation_kind(one).exists();
        let in_reservation =
            reservations.iter().filter(ours).any(|one| request.nodes.iter().any(|node| one.holds(node)));
        let closed = in_reservation || nodes.iter().any(|node| marks::is_drained_by_us(node, &self.config));
        if closed {
            self.reserve_and_resume(OPERATION, &name, &request.nodes)?;
        }
        let partition = self.partition(&nodes, request.limit)?;
        let placement = Placement {
            nodes: &request.nodes,
            partition: partition.as_deref(),
            gpus: nodes.iter().map(|node| node.gpus).min().unwrap_or_default(),
            reservation: closed.then_some(name.as_str()),
        };
        let output = folder.join(OUTPUT);
        let comment = format!("Cluster Doctor run {}", request.run);
        let args = job::arguments(&name, &comment, &placement, request.limit, &output, &self.config);
        let share = self.share_path();
        let policy = policy.as_ref().map(|(path, digest)| (path.as_path(), digest.as_str()));
        let paths = Paths { share, run: &folder, policy };
        self.programs.run(OPERATION, "sbatch", &args, &job::script(request, paths, &self.config), Access::Write)?;
        Ok(job::id(request.run))
    }

    /// Returns the shared directory's path on the nodes.
    pub(super) fn share_path(&self) -> &Path {
        self.config.share.as_deref().unwrap_or(&self.data)
    }

    /// Returns the first partition that has all of these nodes, is up and allows the time; otherwise the first that has them.
    pub(super) fn partition(&self, nodes: &[SlurmNode], limit: Span) -> Result<Option<String>, BackendError> {
        if let Some(partition) = &self.config.job.partition {
            return Ok(Some(partition.clone()));
        }
        let cluster_config = self.cluster_config()?;
        let Some((first, rest)) = nodes.split_first() else { return Ok(None) };
        let shared = |name: &&String| rest.iter().all(|node| node.partitions.contains(name));
        let needed = limit + self.config.job.grace + Span::minutes(2);
        let good = |name: &&String| {
            cluster_config
                .partitions
                .get(*name)
                .is_some_and(|one| one.up && !one.reserved_only && one.max_time.is_none_or(|longest| longest >= needed))
        };
        let all: Vec<&String> = first.partitions.iter().filter(shared).collect();
        let chosen = all.iter().copied().find(|name| good(name)).or_else(|| all.first().copied());
        match chosen {
            Some(name) => Ok(Some(name.clone())),
            None => Err(permanent_error("no partition contains all nodes; set `job.partition`".to_owned())),
        }
    }

    /// Creates the run's folder and returns its path on the nodes.
    pub(super) fn prepare(&self, run: RunId) -> io::Result<PathBuf> {
        self.prune();
        fs::create_dir_all(self.run_folder(run))?;
        Ok(self.share_path().join(FOLDER).join(run.to_string()))
    }

    fn run_folder(&self, run: RunId) -> PathBuf {
        self.data.join(FOLDER).join(run.to_string())
    }

    /// Periodically removes old files of runs, repairs and policies. What cannot be removed is retried later.
    fn prune(&self) {
        let mut last = self.last_pruned.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < PRUNE_INTERVAL) {
            return;
        }
        *last = Some(Instant::now());
        prune(&self.data.join(FOLDER), SystemClock.now());
    }

    /// Reads the claims of a run's nodes.
    pub(super) fn claims(&self, run: RunId) -> io::Result<Vec<JobFile>> {
        let entries = match fs::read_dir(self.run_folder(run)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut claims = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let length = fs::metadata(&path)?.len();
            if length > MAX_CLAIM_BYTES {
                return Err(io::Error::other(format!("{} has {length} bytes", path.display())));
            }
            let claim: JobFile = serde_json::from_slice(&fs::read(&path)?).map_err(io::Error::other)?;
            if claim.run == run {
                claims.push(claim);
            }
        }
        Ok(claims)
    }

    /// Copies the policy for jobs under a name that contains its hash: a pending job reads the version it was submitted with. Returns
    /// its path on the nodes and the digest by which jobs verify it.
    fn publish_policy(&self) -> io::Result<Option<(PathBuf, String)>> {
        let Some(policy) = &self.policy else { return Ok(None) };
        let text = trusted_file::read(policy)?;
        let name = format!("policy-{:016x}.toml", fnv1a(&text));
        let path = self.data.join(FOLDER).join(&name);
        // Touch a policy that is in use; one that is not used for long is removed.
        let touched =
            fs::File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        if touched.is_err() {
            let fresh = path.with_extension(format!("{}.new", std::process::id()));
            fs::write(&fresh, &text)?;
            fs::rename(&fresh, &path)?;
        }
        Ok(Some((self.share_path().join(FOLDER).join(name), policy_digest(&text))))
    }
}

fn prune(folder: &Path, now: Timestamp) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if name.parse::<RunId>().is_ok_and(|run| now.since(run.born()) > RETENTION) {
            let _kept = fs::remove_dir_all(entry.path());
            continue;
        }
        if name.starts_with("report-") && modified(&entry).is_some_and(|at| now.since(at) > RETENTION) {
            let _kept = fs::remove_dir_all(entry.path());
            continue;
        }
        let ours = (name.starts_with("policy-") && (name.ends_with(".toml") || name.ends_with(".new")))
            || (name.starts_with("repair-") && name.ends_with(".txt"));
        if ours && modified(&entry).is_some_and(|at| now.since(at) > RETENTION) {
            let _kept = fs::remove_file(entry.path());
        }
    }
}

fn modified(entry: &fs::DirEntry) -> Option<Timestamp> {
    let since = entry.metadata().ok()?.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(Timestamp::from_secs(i64::try_from(since.as_secs()).ok()?))
}

/// Checks that the request has an output for each node, below the shared directory.
fn check(request: &JobRequest) -> Result<(), BackendError> {
    let same = request.outputs.len() == request.nodes.len()
        && request.nodes.iter().all(|node| request.outputs.iter().any(|output| output.node == *node));
    if !same {
        return Err(permanent_error("each node of a run needs exactly one output path".to_owned()));
    }
    let paths = request.outputs.iter().flat_map(|output| output.logs.iter().chain([&output.document]));
    match paths.into_iter().find(|path| !path.components().all(|part| matches!(part, Component::Normal(_)))) {
        Some(path) => Err(permanent_error(format!("{} leads out of the shared directory", path.display()))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::ids::IdSource;

    #[test]
    fn only_our_old_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut ids = IdSource::new(1);
        let now = SystemClock.now();
        ids.set_time(now.minus(RETENTION + Span::days(1)));
        let old = ids.run();
        ids.set_time(now);
        let (young, op) = (ids.run(), ids.op());
        for run in [young, old] {
            fs::create_dir(folder.path().join(run.to_string())).unwrap();
        }
        let repair = format!("repair-{op}.txt");
        for file in ["policy-00.toml", "policy-00.7.new", "notes.txt", &repair] {
            fs::write(folder.path().join(file), "").unwrap();
        }
        let left = || {
            let names = fs::read_dir(folder.path()).unwrap().map(|one| one.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        prune(folder.path(), now);
        assert!(!left().contains(&old.to_string()) && left().len() == 5, "{:?}", left());
        prune(folder.path(), now.plus(RETENTION + Span::hours(1)));
        assert_eq!(left(), ["notes.txt"]);
    }
}
