//! Access to one Slurm cluster: the client programs, the settings, and the queries and node updates that every other module uses.
//!
//! No answer of Slurm is cached, except partitions and power saving, which change when an administrator edits slurm.conf.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::{BackendError, Effect};
use doctor_core::ids::NodeName;

use super::{
    accounting::AccountingSchedule,
    cluster_config::{self, Partition, PowerSaving},
    config::SlurmConfig,
    marks::{NewState, NodeUpdate},
    nodes::{self, SlurmNode},
    programs::{Access, Programs},
    queue::{self, Job},
    rest,
    share_files::ShareFiles,
};

/// How long partitions and power saving are cached: they change when an administrator edits slurm.conf.
const CONFIG_CACHE_TIME: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub struct SlurmBackend {
    pub(super) config: SlurmConfig,
    pub(super) programs: Programs,
    /// Our user id in Slurm.
    pub(super) user: u32,
    /// The shared directory at the service's path.
    pub(super) data: PathBuf,
    /// Our files below it.
    pub(super) share_files: ShareFiles,
    /// The policy file for jobs.
    pub(super) policy: Option<PathBuf>,
    cluster_config: Mutex<Option<(Instant, ClusterConfig)>>,
    /// The status numbers found on nodes by the last snapshot.
    pub(super) status_numbers: Mutex<HashMap<NodeName, u64>>,
    pub(super) accounting: Mutex<AccountingSchedule>,
    /// When old files were last removed.
    pub(super) last_pruned: Mutex<Option<Instant>>,
}

/// Slurm's own configuration.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterConfig {
    pub(super) partitions: HashMap<String, Partition>,
    pub(super) power_saving: PowerSaving,
}

impl SlurmBackend {
    /// Opens the backend. `data` is the shared directory, `policy` the site's policy file. The first snapshot reports whether
    /// Slurm responds.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub fn open(config: SlurmConfig, data: &Path, policy: Option<&Path>) -> Result<Self, BackendError> {
        let operation = "open the Slurm backend";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NotAppliedPermanent };
        config.check().map_err(|error| refuse(error.to_string()))?;
        let data = std::path::absolute(data).map_err(|error| refuse(format!("{}: {error}", data.display())))?;
        Ok(Self {
            programs: Programs::new(&config),
            config,
            user: rustix::process::getuid().as_raw(),
            share_files: ShareFiles::new(&data),
            data,
            policy: policy.map(Path::to_owned),
            cluster_config: Mutex::default(),
            status_numbers: Mutex::default(),
            accounting: Mutex::default(),
            last_pruned: Mutex::default(),
        })
    }

    /// Reads all nodes, from slurmrestd or `scontrol`.
    pub(super) fn nodes(&self) -> Result<Vec<SlurmNode>, BackendError> {
        let operation = "read the nodes";
        let unreadable = |text: String| BackendError { operation, text, effect: Effect::NotAppliedRetry };
        match &self.config.rest {
            Some(rest) => rest::nodes(rest, self.config.deadline.to_std()).map_err(unreadable),
            None => {
                let text = self.programs.read(operation, "scontrol", &["show", "node", "-o"])?;
                nodes::parse(&text).map_err(|error| unreadable(error.to_string()))
            }
        }
    }

    /// Reads these nodes, in this order.
    ///
    /// # Errors
    /// Permanently, if one does not exist.
    pub(super) fn nodes_named(
        &self,
        operation: &'static str,
        names: &[NodeName],
    ) -> Result<Vec<SlurmNode>, BackendError> {
        let list = names.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
        let missing = |name: &str| BackendError {
            operation,
            text: format!("Slurm has no node {name}"),
            effect: Effect::NotAppliedPermanent,
        };
        let text = match self.programs.read(operation, "scontrol", &["show", "node", "-o", &list]) {
            Err(error) if error.text.contains("not found") => return Err(missing(&list)),
            other => other?,
        };
        let mut found: HashMap<String, SlurmNode> =
            nodes::parse(&text).unwrap_or_default().into_iter().map(|node| (node.name.clone(), node)).collect();
        names.iter().map(|name| found.remove(name.as_str()).ok_or_else(|| missing(name.as_str()))).collect()
    }

    /// Lists the jobs in the queue. Each line begins with a random token that users cannot know.
    pub(super) fn jobs(&self, operation: &'static str, options: &[&str]) -> Result<Vec<Job>, BackendError> {
        let mut token = [0; 8];
        getrandom::fill(&mut token).map_err(|error| BackendError {
            operation,
            text: format!("reading random bytes failed: {error}"),
            effect: Effect::NotAppliedRetry,
        })?;
        let token = format!("{:016x}", u64::from_le_bytes(token));
        let format = format!("--format={}", queue::format(&token));
        let args = [&["--noheader", "--all", &format][..], options].concat();
        Ok(queue::parse(&self.programs.read(operation, "squeue", &args)?, &token))
    }

    /// Lists our jobs in any state, as long as Slurm has not purged them.
    pub(super) fn our_jobs(&self, operation: &'static str, more: &[&str]) -> Result<Vec<Job>, BackendError> {
        let user = format!("--user={}", self.user);
        let jobs = self.jobs(operation, &[&["--states=all", &user][..], more].concat())?;
        Ok(jobs.into_iter().filter(|job| job.uid == Some(self.user)).collect())
    }

    /// Lists our jobs of this name, as long as Slurm has not purged them.
    pub(super) fn job_named(&self, operation: &'static str, name: &str) -> Result<Vec<Job>, BackendError> {
        let jobs = self.our_jobs(operation, &[&format!("--name={name}")])?;
        Ok(jobs.into_iter().filter(|job| job.name == name).collect())
    }

    pub(super) fn cluster_config(&self) -> Result<ClusterConfig, BackendError> {
        let operation = "read the partitions";
        let mut known = self.cluster_config.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cluster_config)) = known.as_ref().filter(|(at, _)| at.elapsed() < CONFIG_CACHE_TIME) {
            return Ok(cluster_config.clone());
        }
        let cluster_config = ClusterConfig {
            partitions: cluster_config::partitions(&self.programs.read(
                operation,
                "scontrol",
                &["show", "partition", "-o"],
            )?),
            power_saving: cluster_config::power_saving(&self.programs.read(
                operation,
                "scontrol",
                &["show", "config"],
            )?),
        };
        *known = Some((Instant::now(), cluster_config.clone()));
        Ok(cluster_config)
    }

    /// Updates a node in one command. A node to be set down is drained first: Slurm may resume one that is only down when its
    /// slurmd starts (`ReturnToService`).
    pub(super) fn write(&self, operation: &'static str, node: &str, update: &NodeUpdate) -> Result<(), BackendError> {
        if update.state == Some(NewState::Down) {
            self.write_once(operation, node, &NodeUpdate { state: Some(NewState::Drain), ..update.clone() })?;
            return self.write_once(operation, node, &NodeUpdate { field: None, ..update.clone() });
        }
        self.write_once(operation, node, update)
    }

    fn write_once(&self, operation: &'static str, node: &str, update: &NodeUpdate) -> Result<(), BackendError> {
        let mut args = vec!["update".to_owned(), format!("nodename={node}")];
        args.extend(update.state.map(|state| format!("state={}", state.word())));
        args.extend(update.reason.as_ref().map(|reason| format!("reason={reason}")));
        args.extend(update.field.as_ref().map(|field| format!("{}={field}", self.config.notes.key())));
        if args.len() == 2 {
            return Ok(());
        }
        self.programs.run(operation, "scontrol", &args, "", Access::Write).map(drop)
    }
}
