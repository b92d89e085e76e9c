//! `doctor-node agent`: checks its node continuously and reports changes to the controller.
//!
//! There are two threads. This one runs checks: it sleeps in poll(2) until a check is due, the kernel logs a message,
//! or a signal arrives. The other one ([`sender`]) sends reports from a spool on disk ([`spool`]), so that a day
//! without the controller only delays them. The agent classifies only to detect changes; the controller gives the
//! verdict.

pub mod config;
pub mod handed;
pub mod http;
pub mod kernel;
pub mod permit;
pub mod said;
pub mod schedule;
pub mod sender;
pub mod spool;
pub mod token;

use std::{
    collections::BTreeSet,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use doctor_checks::{
    document::{AgentReport, TestEvidence},
    probe::Probe,
};
use doctor_core::{
    classify::{Past, after_boot, judge_with},
    ids::CheckId,
    node::Hardware,
    time::Span,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::SIGHUP;

use self::{
    config::{Config, ConfigError, Written},
    handed::{Bell, claim},
    kernel::KernelLog,
    said::Said,
    schedule::Schedule,
    sender::Outbox,
    spool::Spool,
};
use crate::{
    check,
    clock::now,
    hardware,
    job::{EVIDENCE_ROOM, keep_within},
    memory,
    runner::{DriverHelper, LocalRunner, ProbeRunner},
    stop::Stop,
    verdict::Verdicts,
};

/// Interval at which all results are reported again.
const SAY_ALL: Duration = Duration::from_secs(3600);
/// Interval at which files are tested for changes.
const LOOK_AT_FILES: Duration = Duration::from_secs(60);
/// Time for the sender to finish on shutdown; unsent reports stay on disk.
const LAST_WORDS: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot use {} as the state directory", .path.display())]
    State { path: PathBuf, source: io::Error },
    #[error("another agent uses {}: stop it, or set another --state", .0.display())]
    Taken(PathBuf),
    #[error("cannot install signal handlers")]
    Signals(#[source] io::Error),
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Runs until stopped.
///
/// # Errors
/// Only at startup. Later only a signal ends the agent.
pub fn run(told: &Written, file: Option<&std::path::Path>, stop: &Stop) -> Result<(), AgentError> {
    memory::be_frugal();
    let config = Config::load(told, file)?;
    let failed = |source| AgentError::State { path: config.state.clone(), source };
    let spool = Spool::open(&config.state.join("spool"), config.room).map_err(failed)?;
    let _mine = claim(&config.state)?;
    let bell = Bell::hang(&config.state).map_err(failed)?;
    let outbox = Arc::new(Outbox::new(spool, config.route.clone(), config.state.clone()));
    let (hung_up, signal) = UnixStream::pair().map_err(AgentError::Signals)?;
    hung_up.set_nonblocking(true).map_err(AgentError::Signals)?;
    signal_hook::low_level::pipe::register(SIGHUP, signal).map_err(AgentError::Signals)?;
    let (done, ended) = mpsc::channel::<()>();
    let sending = Arc::clone(&outbox);
    let body = move || {
        let _ends_with_this = done;
        sender::run(&sending, &say);
    };
    thread::Builder::new().name("doctor-sender".to_owned()).spawn(body).map_err(AgentError::Thread)?;
    say(&format!("reporting as {} to {}", config.route.node, config.route.address));
    let rung = Rung { hung_up, bell };
    Agent::new(told, file, config, &outbox, stop, rung).run();
    outbox.close();
    // Do not wait longer for a sender in mid-exchange: unsent reports are on disk.
    let _in_time = ended.recv_timeout(LAST_WORDS);
    say(&format!("stopped; reports in the spool: {}", outbox.waiting()));
    Ok(())
}

/// Logs to stderr; systemd adds the time.
fn say(words: &str) {
    eprintln!("doctor-node: {words}");
}

/// External wake-ups.
struct Rung {
    /// SIGHUP: reload the configuration.
    hung_up: UnixStream,
    /// Rung by a scheduler's hook that has submitted evidence.
    bell: Bell,
}

struct Agent<'a> {
    told: &'a Written,
    file: Option<&'a std::path::Path>,
    config: Config,
    outbox: &'a Outbox,
    stop: &'a Stop,
    rung: Rung,
    started: Instant,
    schedule: Schedule,
    /// Checks that read the kernel log.
    log_checks: Vec<CheckId>,
    log: KernelLog,
    said: Said,
    said_all: Option<Instant>,
    looked_at_files: Instant,
    disk_trouble: Option<String>,
    /// Shared with hooks, which skip their own checks while this is fresh.
    verdicts: Verdicts,
    /// The process that queries the GPU driver, for the agent's lifetime.
    driver_helper: Arc<DriverHelper>,
}

impl<'a> Agent<'a> {
    fn new(
        told: &'a Written,
        file: Option<&'a std::path::Path>,
        config: Config,
        outbox: &'a Outbox,
        stop: &'a Stop,
        rung: Rung,
    ) -> Self {
        let log = KernelLog::follow(&config.root).unwrap_or_else(|error| {
            say(&format!("cannot follow the kernel log, it is read every few minutes instead: {error}"));
            KernelLog::deaf()
        });
        let started = Instant::now();
        Self {
            told,
            file,
            outbox,
            stop,
            rung,
            started,
            schedule: plan(&config),
            log_checks: log_checks(&config),
            log,
            said: Said::default(),
            said_all: None,
            looked_at_files: started,
            disk_trouble: None,
            verdicts: Verdicts::read(&config.state),
            driver_helper: Arc::default(),
            config,
        }
    }

    fn run(&mut self) {
        // Includes evidence submitted while no agent ran.
        self.take_handed();
        while self.stop.told().is_none() {
            self.look_at_files();
            if self.rung.bell.take_ring() {
                self.take_handed();
            }
            if let Err(error) = self.log.notice(Instant::now()) {
                say(&format!("cannot follow the kernel log any more: {error}"));
            }
            let mut due: BTreeSet<CheckId> = self.schedule.take_due(self.started.elapsed()).into_iter().collect();
            if self.log.take_due(Instant::now()) {
                due.extend(self.log_checks.iter().cloned());
            }
            if self.is_time_to_say_all() {
                self.said.forget();
                due.extend(self.config.checks().into_iter().map(|(check, _)| check));
            }
            if !due.is_empty() {
                self.look(&due);
                memory::give_back();
            }
            self.sleep();
        }
    }

    fn is_time_to_say_all(&mut self) -> bool {
        let due = self.outbox.take_say_all() || self.said_all.is_none_or(|said| said.elapsed() >= SAY_ALL);
        if due {
            self.said_all = Some(Instant::now());
        }
        due
    }

    /// Runs these checks and reports changed results.
    fn look(&mut self, due: &BTreeSet<CheckId>) {
        let config = &self.config;
        let runner = LocalRunner::new(&config.root, self.stop).state(Some(&config.state));
        let runner = runner.library(config.library.clone()).driver_helper(&self.driver_helper);
        let probes_of = |check: &CheckId| {
            let found = config.catalogue.get(check);
            found.map_or_else(Vec::new, |found| (found.probes)(&config.catalogue.params(&config.policy, check)))
        };
        runner.prepare(&due.iter().flat_map(&probes_of).collect::<Vec<_>>());
        let (mut news, mut room) = (Vec::new(), EVIDENCE_ROOM);
        let up = check::uptime(&runner);
        for id in due {
            let Some(check) = config.catalogue.get(id) else { continue };
            let params = config.catalogue.params(&config.policy, id);
            let started = now();
            let (probes, outputs): (Vec<_>, Vec<_>) =
                probes_of(id).into_iter().map(|probe| (probe.clone(), runner.run(&probe))).unzip();
            if self.stop.told().is_some() {
                return;
            }
            let observation = (check.interpret)(&params, &outputs);
            let past = Past::at(now());
            let judgement = judge_with(config.rules_of(id), config.profile.as_ref(), &past, id, &observation);
            // The result changes when the grace ends, and is reported then.
            let judgement = after_boot(judgement, up, config.policy.agents.boot_grace);
            self.verdicts.note(id, judgement.verdict, &judgement.findings, &judgement.text, now());
            if self.said.is_news(id, &observation, &judgement) {
                let probes = probes.into_iter().zip(outputs).collect();
                let mut evidence = TestEvidence { test: id.clone(), started, ended: now(), probes };
                room = keep_within(room, &mut evidence);
                news.push(evidence);
            }
        }
        self.keep_verdicts(due);
        if news.is_empty() {
            return;
        }
        let hardware = hardware::collect(&runner);
        drop(runner);
        self.report(hardware, up, news);
    }

    fn report(&mut self, hardware: Hardware, up: Option<Span>, checks: Vec<TestEvidence>) {
        let route = &self.config.route;
        let trouble = self.outbox.add(|number| AgentReport {
            node: route.node.clone(),
            hardware,
            number,
            at: now(),
            up,
            checks,
            versions: route.versions.clone(),
            dropped: None,
        });
        if let Some(trouble) = &trouble
            && self.disk_trouble.as_ref() != Some(trouble)
        {
            say(&format!("cannot write the spool, reports are in memory only: {trouble}"));
        }
        self.disk_trouble = trouble;
    }

    /// Saves the verdicts for hooks. If that fails, a hook runs the checks itself.
    fn keep_verdicts(&mut self, due: &BTreeSet<CheckId>) {
        if self.config.fast_checks().all(|check| due.contains(&check)) {
            self.verdicts.looked_at_all(now());
        }
        let _kept = self.verdicts.write(&self.config.state);
    }

    /// Reports the evidence that hooks have submitted.
    fn take_handed(&self) {
        for (path, handed) in handed::waiting(&self.config.state) {
            let _on_disk_or_in_memory = self.outbox.add(|number| handed::report(handed, &self.config, number));
            // If the file stays, it is reported again; the controller counts it once.
            let _gone = std::fs::remove_file(path);
        }
    }

    /// Reloads the configuration on SIGHUP or if a file has changed.
    fn look_at_files(&mut self) {
        let asked = io::Read::read(&mut self.rung.hung_up, &mut [0; 64]).is_ok_and(|count| count > 0);
        if !asked {
            if self.looked_at_files.elapsed() < LOOK_AT_FILES {
                return;
            }
            self.looked_at_files = Instant::now();
            if !self.config.has_changed() {
                return;
            }
        }
        match Config::load(self.told, self.file) {
            Ok(mut config) => {
                if (&config.state, &config.root, config.room)
                    != (&self.config.state, &self.config.root, self.config.room)
                {
                    say("changes of `state`, `root` and the spool size take effect after a restart");
                }
                config.state.clone_from(&self.config.state);
                config.root.clone_from(&self.config.root);
                config.room = self.config.room;
                self.config = config;
                self.outbox.set_route(self.config.route.clone());
                // Run all checks now: a new policy may change their results.
                (self.schedule, self.started) = (plan(&self.config), Instant::now());
                self.log_checks = log_checks(&self.config);
                self.said_all = None;
                say(&format!("the changed configuration is in force, policy version {}", self.config.policy.version));
            }
            Err(error) => {
                self.config.note_files();
                let why = chain(&error);
                say(&format!("the changed configuration is invalid, the previous one stays in force: {why}"));
            }
        }
    }

    /// Sleeps until a check is due, the kernel logs a message, or a signal arrives.
    fn sleep(&self) {
        let at = Instant::now();
        let mut until = self.looked_at_files + LOOK_AT_FILES;
        if let Some(due) = self.schedule.next() {
            until = until.min(self.started + due);
        }
        if let Some(due) = self.log.next() {
            until = until.min(due);
        }
        let wait = until.saturating_duration_since(at);
        let wake = self.stop.wake();
        let mut fds =
            vec![PollFd::new(&self.rung.hung_up, PollFlags::IN), PollFd::new(self.rung.bell.socket(), PollFlags::IN)];
        fds.extend(wake.as_ref().map(|wake| PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)));
        // While log checks are pending, further messages must not wake the agent.
        let log = self.log.descriptor().filter(|_| self.log.next().is_none());
        fds.extend(log.map(|log| PollFd::from_borrowed_fd(log, PollFlags::IN)));
        let wait = Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: i64::from(wait.subsec_nanos()) };
        // The loop tests every source, whatever ended the wait.
        let _ready = poll(&mut fds, Some(&wait));
    }
}

fn plan(config: &Config) -> Schedule {
    Schedule::new(config.checks(), &config.route.node, now())
}

fn log_checks(config: &Config) -> Vec<CheckId> {
    let reads_log = |id: &CheckId| {
        let params = config.catalogue.params(&config.policy, id);
        config.catalogue.get(id).is_some_and(|check| (check.probes)(&params).contains(&Probe::Kmsg))
    };
    config.checks().into_iter().map(|(id, _)| id).filter(reads_log).collect()
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
