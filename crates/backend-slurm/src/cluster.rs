//! The backend itself: asks Slurm through its own programs, and keeps nothing of what they say.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Board, Change, Effect, Ground, JobRequest, NodeOp, PolledJob, SeenFailure, SeenNode,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    node::MarkKind,
    run::JobSeen,
    snapshot::Caps,
};

use super::{
    config::SlurmConfig,
    failures::Accounting,
    job, marks,
    marks::{NewState, Shelter, Update},
    nodes::{self, NodeSeen},
    programs::{Does, Programs},
    queue::{self, Job},
    shelter,
    site::{self, Partition, PowerSaving},
    view::View,
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
    fn nodes(&self) -> Result<Vec<NodeSeen>, BackendError> {
        let operation = "look at the nodes";
        let unreadable = |text: String| BackendError { operation, text, effect: Effect::NoneTryAgain };
        match &self.config.rest {
            Some(rest) => super::rest::nodes(rest, self.config.deadline.to_std()).map_err(unreadable),
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
    fn our_jobs(&self, operation: &'static str, more: &[&str]) -> Result<Vec<Job>, BackendError> {
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

    fn change_marks(&self, node: &NodeName, change: &NodeOp, ground: Option<&Ground>) -> Result<(), BackendError> {
        let operation = "change the node";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NoneGiveUp };
        let [now] = &self.nodes_named(operation, std::slice::from_ref(node))?[..] else {
            return Err(refuse(format!("Slurm has no node {node}")));
        };
        let there = self.reservations(operation)?;
        let held = there.iter().filter(|one| one.holds(node)).map(shelter::kind).find(|kind| kind.is_there());
        let shelter = held.unwrap_or_default();
        let update = marks::update(now, shelter.is_there(), change.op, &change.what, ground, &self.config);
        if let Some(update) = update.map_err(|taken| refuse(taken.to_string()))? {
            self.write(operation, &now.name, &update)?;
        }
        match &change.what {
            // Also if it was noted before: a controller may have been killed between the two.
            Change::Unmark(mark) if mark.kind == MarkKind::Maintenance && shelter.is_there() => {
                self.leave_shelter(operation, node)
            }
            // The plan has gone on: what a repair left behind that was given up is not asked for any more.
            _ if shelter == Shelter::Repair => self.end_given_up(operation, node),
            _ => Ok(()),
        }
    }

    fn change(&self, node: &NodeName, change: &NodeOp, ground: Option<&Ground>) -> Result<(), BackendError> {
        match change.what {
            Change::Mark(_) | Change::Unmark(_) | Change::Drain | Change::Undrain => {
                self.change_marks(node, change, ground)
            }
            Change::Reboot => self.reboot(node, change.op, ground),
            Change::Reset => self.reset(node, change.op),
            Change::Replace => self.replace(node, change.op),
            Change::Evict => Err(BackendError {
                operation: "evict",
                text: "jobs of users end by themselves here: a drained node lets them".to_owned(),
                effect: Effect::NoneGiveUp,
            }),
        }
    }
}

impl Backend for SlurmBackend {
    fn name(&self) -> &str {
        "slurm"
    }

    fn caps(&self) -> Caps {
        Caps {
            mark: true,
            drain: true,
            evict: false,
            reset: !self.config.reset.is_empty(),
            reboot: self.config.reboot,
            replace: !self.config.replace.is_empty(),
        }
    }

    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError> {
        // The nodes first: a job that began or ended since is then seen by one of the two.
        let nodes = self.nodes()?;
        let jobs = self.jobs("look at the queue", &[])?;
        let reservations = self.reservations("look at the reservations")?;
        let site = self.site()?;
        let view = View { nodes: &nodes, jobs: &jobs, reservations: &reservations, site: &site, user: self.user };
        let (seen, shown) = view.seen(SystemClock.now(), &self.config);
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = shown;
        Ok(seen)
    }

    fn submit(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        self.submit_run(request)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        let jobs = self.our_jobs("poll", &[])?;
        let mut of_run: HashMap<RunId, Vec<&Job>> = HashMap::new();
        for job in &jobs {
            if let Some(run) = job::run_of(&job.name) {
                of_run.entry(run).or_default().push(job);
            }
        }
        let look = |run: &RunId| {
            let known = of_run.get(run).and_then(|jobs| job::seen(*run, jobs));
            // Slurm forgets a job soon after its end; what it wrote itself stays.
            known.unwrap_or_else(|| {
                self.claims(*run).map_or_else(
                    |error| JobSeen::Unknown { why: format!("its claims cannot be read: {error}") },
                    |claims| job::from_claims(*run, &claims),
                )
            })
        };
        Ok(runs.iter().map(|run| PolledJob { seen: look(run), documents: Vec::new() }).collect())
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        let words = [format!("--name={}", job::name(run)), format!("--user={}", self.user)];
        match self.programs.run("cancel", "scancel", &words, "", Does::Changes) {
            Err(error) if error.text.contains("already completing or completed") => Ok(()),
            // Whether or not it got there, asking again is right.
            Err(error) => Err(BackendError { effect: Effect::Unknown, ..error }),
            Ok(_) => Ok(()),
        }
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        self.change(node, change, None)
    }

    fn apply_for(&self, node: &NodeName, change: &NodeOp, ground: &Ground) -> Result<(), BackendError> {
        self.change(node, change, Some(ground))
    }

    fn board(&self) -> Option<&dyn Board> {
        (self.config.status_note || self.config.validated_feature.is_some()).then_some(self as &dyn Board)
    }

    fn failed_work(&self, since: doctor_core::time::Timestamp) -> Result<Vec<SeenFailure>, BackendError> {
        self.failures(since)
    }
}
