//! Access to one Slurm cluster: the client programs, the settings, and the queries and node updates that every other module uses.
//!
//! Nothing that Slurm answers is kept, except partitions and power saving, which change when an administrator edits slurm.conf.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::{BackendError, Effect};
use doctor_core::ids::NodeName;

use super::{
    accounting::Accounting,
    config::SlurmConfig,
    marks::{NewState, Update},
    nodes::{self, NodeSeen},
    programs::{Does, Programs},
    queue::{self, Job},
    rest,
    site::{self, Partition, PowerSaving},
};

/// Partitions and the times of power saving change when a person edits slurm.conf.
const SITE_HOLDS: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub struct SlurmBackend {
    pub(super) config: SlurmConfig,
    pub(super) programs: Programs,
    /// Who we are to Slurm.
    pub(super) user: u32,
    /// The shared directory as this service sees it.
    pub(super) data: PathBuf,
    /// The policy that jobs are given.
    pub(super) policy: Option<PathBuf>,
    site: Mutex<Option<(Instant, Site)>>,
    /// What the last look found written on nodes.
    pub(super) shown: Mutex<HashMap<NodeName, u64>>,
    pub(super) accounting: Mutex<Accounting>,
    /// When old files were last removed.
    pub(super) pruned: Mutex<Option<Instant>>,
}

/// What Slurm says of itself.
#[derive(Debug, Clone, Default)]
pub(super) struct Site {
    pub(super) partitions: HashMap<String, Partition>,
    pub(super) saving: PowerSaving,
}

impl SlurmBackend {
    /// `data` is the shared directory, `policy` the site's policy file. Whether Slurm answers is told by the first snapshot.
    ///
    /// # Errors
    /// If a setting cannot be.
    pub fn open(config: SlurmConfig, data: &Path, policy: Option<&Path>) -> Result<Self, BackendError> {
        let operation = "open the Slurm backend";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NoneGiveUp };
        config.check().map_err(|error| refuse(error.to_string()))?;
        let data = std::path::absolute(data).map_err(|error| refuse(format!("{}: {error}", data.display())))?;
        Ok(Self {
            programs: Programs::new(&config),
            config,
            user: rustix::process::getuid().as_raw(),
            data,
            policy: policy.map(Path::to_owned),
            site: Mutex::default(),
            shown: Mutex::default(),
            accounting: Mutex::default(),
            pruned: Mutex::default(),
        })
    }

    /// All nodes, by the way that is configured.
    pub(super) fn nodes(&self) -> Result<Vec<NodeSeen>, BackendError> {
        let operation = "look at the nodes";
        let unreadable = |text: String| BackendError { operation, text, effect: Effect::NoneTryAgain };
        match &self.config.rest {
            Some(rest) => rest::nodes(rest, self.config.deadline.to_std()).map_err(unreadable),
            None => {
                let text = self.programs.read(operation, "scontrol", &["show", "node", "-o"])?;
                nodes::parse(&text).map_err(|error| unreadable(error.to_string()))
            }
        }
    }

    /// These nodes, as Slurm has them now, in the order asked for.
    ///
    /// # Errors
    /// For good, if one is not there.
    pub(super) fn nodes_named(
        &self,
        operation: &'static str,
        names: &[NodeName],
    ) -> Result<Vec<NodeSeen>, BackendError> {
        let list = names.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
        let missing = |name: &str| BackendError {
            operation,
            text: format!("Slurm has no node {name}"),
            effect: Effect::NoneGiveUp,
        };
        let text = match self.programs.read(operation, "scontrol", &["show", "node", "-o", &list]) {
            Err(error) if error.text.contains("not found") => return Err(missing(&list)),
            other => other?,
        };
        let mut found: HashMap<String, NodeSeen> =
            nodes::parse(&text).unwrap_or_default().into_iter().map(|node| (node.name.clone(), node)).collect();
        names.iter().map(|name| found.remove(name.as_str()).ok_or_else(|| missing(name.as_str()))).collect()
    }

    /// Jobs in the queue. Each line begins with a word that nobody can know.
    pub(super) fn jobs(&self, operation: &'static str, options: &[&str]) -> Result<Vec<Job>, BackendError> {
        let mut token = [0; 8];
        getrandom::fill(&mut token).map_err(|error| BackendError {
            operation,
            text: format!("asking the system for random bits: {error}"),
            effect: Effect::NoneTryAgain,
        })?;
        let token = format!("{:016x}", u64::from_le_bytes(token));
        let format = format!("--format={}", queue::format(&token));
        let words = [&["--noheader", "--all", &format][..], options].concat();
        Ok(queue::parse(&self.programs.read(operation, "squeue", &words)?, &token))
    }

    /// Jobs of ours in any state that Slurm still remembers.
    pub(super) fn our_jobs(&self, operation: &'static str, more: &[&str]) -> Result<Vec<Job>, BackendError> {
        let user = format!("--user={}", self.user);
        let jobs = self.jobs(operation, &[&["--states=all", &user][..], more].concat())?;
        Ok(jobs.into_iter().filter(|job| job.uid == Some(self.user)).collect())
    }

    /// The job of this name, if Slurm remembers one.
    pub(super) fn job_named(&self, operation: &'static str, name: &str) -> Result<Vec<Job>, BackendError> {
        let jobs = self.our_jobs(operation, &[&format!("--name={name}")])?;
        Ok(jobs.into_iter().filter(|job| job.name == name).collect())
    }

    pub(super) fn site(&self) -> Result<Site, BackendError> {
        let operation = "look at the partitions";
        let mut known = self.site.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, site)) = known.as_ref().filter(|(at, _)| at.elapsed() < SITE_HOLDS) {
            return Ok(site.clone());
        }
        let site = Site {
            partitions: site::partitions(&self.programs.read(operation, "scontrol", &["show", "partition", "-o"])?),
            saving: site::power_saving(&self.programs.read(operation, "scontrol", &["show", "config"])?),
        };
        *known = Some((Instant::now(), site.clone()));
        Ok(site)
    }

    /// Writes on a node, all of it at once. One that is to be down is drained before: Slurm may take back what is only down
    /// when its slurmd starts (`ReturnToService`).
    pub(super) fn write(&self, operation: &'static str, node: &str, update: &Update) -> Result<(), BackendError> {
        if update.state == Some(NewState::Down) {
            self.write_once(operation, node, &Update { state: Some(NewState::Drain), ..update.clone() })?;
            return self.write_once(operation, node, &Update { field: None, ..update.clone() });
        }
        self.write_once(operation, node, update)
    }

    fn write_once(&self, operation: &'static str, node: &str, update: &Update) -> Result<(), BackendError> {
        let mut words = vec!["update".to_owned(), format!("nodename={node}")];
        words.extend(update.state.map(|state| format!("state={}", state.word())));
        words.extend(update.reason.as_ref().map(|reason| format!("reason={reason}")));
        words.extend(update.field.as_ref().map(|field| format!("{}={field}", self.config.notes.key())));
        if words.len() == 2 {
            return Ok(());
        }
        self.programs.run(operation, "scontrol", &words, "", Does::Changes).map(drop)
    }
}
