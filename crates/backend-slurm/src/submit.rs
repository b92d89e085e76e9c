//! Submits runs, and manages their files on the shared directory: `metadata/slurm/RUN/`, with a claim of each of its nodes and
//! the output of the job itself.
//!
//! A run is submitted once: its job is looked up by name first, then its claims, which outlast the queue. Two concurrent
//! submissions create two jobs, of which the second finds the claim and exits.

use std::{
    io,
    path::{Component, Path, PathBuf},
    sync::PoisonError,
    time::{Duration, Instant},
};

use doctor_backend::{
    BackendError, Effect, JobRequest,
    clock::{Clock, SystemClock},
    share_worker::Progress,
    shared_directory::{Entry, EntryKind, SharedDirectory, SharedDirectoryError},
    trusted_file,
};
pub(super) use doctor_checks::job_file::SLURM_FOLDER as FOLDER;
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
/// How long the files of runs are kept.
const RETENTION: Span = Span::days(30);
/// How old a policy in use may look.
const REFRESH: Span = Span::days(1);
/// The interval between removals: on a shared file system they are slow.
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);
/// A claim has about two hundred bytes.
const MAX_CLAIM_BYTES: u64 = 16 * 1024;
/// More claims than a run has nodes. A node may write any number of them.
const MAX_CLAIMS: usize = 5_000;

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
        let folder = run_folder(run);
        let on_nodes = self.share_path().join(&folder);
        self.share_files.call("making the folder of a run", move |root| own_folder(root, &folder).map(drop))?;
        Ok(on_nodes)
    }

    /// Periodically removes old files of runs, repairs and policies. What cannot be removed is retried later.
    fn prune(&self) {
        let mut last = self.last_pruned.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < PRUNE_INTERVAL) {
            return;
        }
        *last = Some(Instant::now());
        let _later = self
            .share_files
            .call_noting("removing old files", |root, progress| prune(root, SystemClock.now(), progress));
    }

    /// Reads the claims of a run's nodes. What is no claim is left out: nodes write there, and none may keep its run active.
    ///
    /// # Errors
    /// Only if the shared directory is away or does not answer, so that it is not known what is there.
    pub(super) fn claims(&self, run: RunId) -> io::Result<Vec<JobFile>> {
        let read = move |root: &SharedDirectory, progress: &Progress| read_claims(root, run, progress);
        self.share_files.call_noting("reading the claims of a run", read)
    }

    /// Copies the policy for jobs under a name that contains its hash: a pending job reads the version it was submitted with. Returns
    /// its path on the nodes and the digest by which jobs verify it.
    fn publish_policy(&self) -> io::Result<Option<(PathBuf, String)>> {
        let Some(policy) = &self.policy else { return Ok(None) };
        let text = trusted_file::read(policy)?;
        let name = format!("policy-{:016x}.toml", fnv1a(&text));
        let (on_nodes, digest) = (self.share_path().join(FOLDER).join(&name), policy_digest(&text));
        self.share_files.call("writing the policy for jobs", move |root| write_policy(root, &name, &text))?;
        Ok(Some((on_nodes, digest)))
    }
}

fn run_folder(run: RunId) -> PathBuf {
    Path::new(FOLDER).join(run.to_string())
}

/// Opens a directory of ours, and creates it if it is missing. What is no directory and has its name is moved aside.
pub(super) fn own_folder(root: &SharedDirectory, folder: &Path) -> Result<SharedDirectory, SharedDirectoryError> {
    let (folder, moved) = root.make_own_subdirectory(folder)?;
    moved.iter().for_each(|moved| tracing::warn!("{moved}"));
    Ok(folder)
}

fn read_claims(root: &SharedDirectory, run: RunId, progress: &Progress) -> Result<Vec<JobFile>, SharedDirectoryError> {
    let listed = root.subdirectory(&run_folder(run)).and_then(|folder| {
        let Some(folder) = folder else { return Ok(None) };
        let names = folder.names(&progress.while_listing())?;
        Ok(Some((folder, names)))
    });
    let (folder, mut names) = match listed {
        Ok(Some(listed)) => listed,
        Ok(None) => return Ok(Vec::new()),
        Err(error) if error.is_outage() => return Err(error),
        Err(error) => {
            tracing::warn!(%run, %error, "no claims");
            return Ok(Vec::new());
        }
    };
    names.retain(|name| Path::new(name).extension().is_some_and(|extension| extension == "json"));
    names.truncate(MAX_CLAIMS);
    let (mut claims, mut spoilt) = (Vec::new(), Vec::new());
    for name in names {
        progress.answered();
        // One that is too long is cut, and then no JSON.
        let read = match folder.read(Path::new(&name), MAX_CLAIM_BYTES) {
            Err(error) if !error.is_outage() => Err(error.to_string()),
            read => Ok(read?),
        };
        let Some(claim) = read.transpose() else { continue };
        match claim.and_then(|bytes| serde_json::from_slice::<JobFile>(&bytes).map_err(|error| error.to_string())) {
            Ok(claim) => claims.extend(Some(claim).filter(|claim| claim.run == run)),
            Err(error) => spoilt.push((name, error)),
        }
    }
    if let Some((name, error)) = spoilt.first() {
        let number = spoilt.len();
        tracing::warn!(%run, number, ?name, %error, "files of a run are no claims: find out which node made them");
    }
    Ok(claims)
}

/// Writes the policy, unless it is there as it should be. One in use is written again now and then, so that its age shows when it
/// was last used; one that is not used for long is removed.
fn write_policy(root: &SharedDirectory, name: &str, text: &[u8]) -> Result<(), SharedDirectoryError> {
    let folder = own_folder(root, Path::new(FOLDER))?;
    let found = folder.entry(Path::new(name))?.filter(|entry| entry.kind == EntryKind::File);
    let is_recent = found.is_some_and(|entry| age(&entry, SystemClock.now()) < REFRESH);
    if is_recent && folder.read(Path::new(name), text.len() as u64)?.is_some_and(|bytes| bytes == text) {
        return Ok(());
    }
    let written = folder.replace(name.as_ref(), &mut &*text)?;
    written.moved_aside.iter().for_each(|moved| tracing::warn!("{moved}"));
    Ok(())
}

fn prune(root: &SharedDirectory, now: Timestamp, progress: &Progress) -> Result<(), SharedDirectoryError> {
    let Some(folder) = root.subdirectory(Path::new(FOLDER))? else { return Ok(()) };
    let names = folder.names(&progress.while_listing())?;
    let (looks, go_on) = (progress.while_listing(), progress.while_removing());
    for entry_name in &names {
        let Some(name) = entry_name.to_str() else { continue };
        let is_old = || {
            let entry = looks().then(|| folder.entry(Path::new(name)));
            entry.is_some_and(|entry| entry.is_ok_and(|entry| entry.is_some_and(|e| age(&e, now) > RETENTION)))
        };
        let ours = name.starts_with("report-")
            || (name.starts_with("policy-") && (name.ends_with(".toml") || name.ends_with(".new")))
            || (name.starts_with("repair-") && name.ends_with(".txt"));
        if name.parse::<RunId>().is_ok_and(|run| now.since(run.born()) > RETENTION) || (ours && is_old()) {
            // What is left is removed the next time.
            let _kept = folder.remove_tree(entry_name, &go_on);
        }
    }
    folder.remove_left_temporaries(&names, now.minus(RETENTION).secs(), &progress.while_removing());
    Ok(())
}

fn age(entry: &Entry, now: Timestamp) -> Span {
    now.since(Timestamp::from_millis(entry.modified.saturating_mul(1000)))
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
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;
    use doctor_core::ids::IdSource;

    #[test]
    fn only_our_old_files_are_removed() {
        let share = tempfile::tempdir().unwrap();
        let folder = share.path().join(FOLDER);
        fs::create_dir_all(&folder).unwrap();
        let root = SharedDirectory::open(share.path()).unwrap();
        let mut ids = IdSource::new(1);
        let now = SystemClock.now();
        ids.set_time(now.minus(RETENTION + Span::days(1)));
        let old = ids.run();
        ids.set_time(now);
        let (young, op) = (ids.run(), ids.op());
        for run in [young, old] {
            fs::create_dir(folder.join(run.to_string())).unwrap();
        }
        let repair = format!("repair-{op}.txt");
        for file in ["policy-00.toml", "policy-00.7.new", "notes.txt", &repair] {
            fs::write(folder.join(file), "").unwrap();
        }
        let left = || {
            let names = fs::read_dir(&folder).unwrap().map(|one| one.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        prune(&root, now, &Progress::default()).unwrap();
        assert!(!left().contains(&old.to_string()) && left().len() == 5, "{:?}", left());
        prune(&root, now.plus(RETENTION + Span::hours(1)), &Progress::default()).unwrap();
        assert_eq!(left(), ["notes.txt"]);
    }

    fn claims(root: &SharedDirectory, run: RunId) -> Vec<JobFile> {
        read_claims(root, run, &Progress::default()).unwrap()
    }

    #[test]
    fn what_is_no_claim_is_left_out_and_an_outage_is_an_error() {
        let share = tempfile::tempdir().unwrap();
        let root = SharedDirectory::open(share.path()).unwrap();
        let mut ids = IdSource::new(1);
        ids.set_time(SystemClock.now());
        let (run, other) = (ids.run(), ids.run());
        let folder = share.path().join(run_folder(run));
        fs::create_dir_all(&folder).unwrap();
        let good = |run| serde_json::to_vec(&JobFile { run, process: None, ended: None }).unwrap();
        fs::write(folder.join("n1.json"), good(run)).unwrap();
        fs::write(folder.join("n2.json"), "garbage").unwrap();
        fs::write(folder.join("n3.json"), vec![b' '; 1 << 20]).unwrap();
        fs::write(folder.join("n4.json"), good(other)).unwrap();
        fs::create_dir(folder.join("n5.json")).unwrap();
        fs::write(folder.join("n6.json"), good(run)).unwrap();
        fs::set_permissions(folder.join("n6.json"), fs::Permissions::from_mode(0o000)).unwrap();
        let readable = if fs::read(folder.join("n6.json")).is_ok() { 2 } else { 1 };
        assert_eq!(claims(&root, run).len(), readable);
        fs::write(share.path().join(run_folder(other)), "in place of the folder").unwrap();
        assert!(claims(&root, other).is_empty());
        // Whether the run has claims is not known then.
        let files = crate::share_files::ShareFiles::new(&share.path().join("no mount"));
        assert!(files.call_noting("x", move |root, progress| read_claims(root, run, progress)).is_err());
    }

    #[test]
    fn what_is_planted_in_place_of_our_folders_and_policies_is_moved_aside() {
        let share = tempfile::tempdir().unwrap();
        let root = SharedDirectory::open(share.path()).unwrap();
        fs::create_dir(share.path().join("metadata")).unwrap();
        std::os::unix::fs::symlink("/", share.path().join(FOLDER)).unwrap();
        own_folder(&root, &Path::new(FOLDER).join("run")).unwrap();
        assert!(share.path().join(FOLDER).join("run").is_dir());
        fs::create_dir_all(share.path().join(FOLDER).join("policy-1.toml/x")).unwrap();
        write_policy(&root, "policy-1.toml", b"ours").unwrap();
        assert_eq!(fs::read_to_string(share.path().join(FOLDER).join("policy-1.toml")).unwrap(), "ours");
    }

    #[test]
    fn planted_links_and_pipes_are_neither_followed_nor_waited_for() {
        let share = tempfile::tempdir().unwrap();
        let outside = share.path().join("outside");
        fs::create_dir_all(outside.join("kept")).unwrap();
        fs::write(outside.join("policy"), "theirs").unwrap();
        let data = share.path().join("data");
        let folder = data.join(FOLDER);
        let mut ids = IdSource::new(1);
        ids.set_time(SystemClock.now().minus(RETENTION + Span::days(1)));
        let (run, linked) = (ids.run(), ids.run());
        fs::create_dir_all(folder.join(run.to_string())).unwrap();
        let root = SharedDirectory::open(&data).unwrap();

        let pipe = folder.join(run.to_string()).join("n1.json");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(claims(&root, run).is_empty());

        std::os::unix::fs::symlink(outside.join("policy"), folder.join("policy-1.toml")).unwrap();
        write_policy(&root, "policy-1.toml", b"ours").unwrap();
        assert_eq!(fs::read_to_string(folder.join("policy-1.toml")).unwrap(), "ours");
        fs::write(folder.join("policy-1.toml"), "mine").unwrap();
        write_policy(&root, "policy-1.toml", b"ours").unwrap();
        assert_eq!(fs::read_to_string(folder.join("policy-1.toml")).unwrap(), "ours", "a node had changed it");

        std::os::unix::fs::symlink(&outside, folder.join(linked.to_string())).unwrap();
        prune(&root, SystemClock.now(), &Progress::default()).unwrap();
        assert!(!folder.join(run.to_string()).exists() && !folder.join(linked.to_string()).exists());
        assert_eq!(fs::read_to_string(outside.join("policy")).unwrap(), "theirs");
        assert!(outside.join("kept").is_dir());
    }
}
