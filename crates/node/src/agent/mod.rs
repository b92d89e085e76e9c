//! `doctor-node agent`: checks its node continuously and reports changes to the controller.
//!
//! There are two threads. This one runs checks: it sleeps in poll(2) until a check is due, the kernel logs a message,
//! or a signal arrives. The other one ([`sender`]) sends reports from a spool on disk ([`spool`]), so that a day
//! without the controller only delays them. The agent classifies only to detect changes; the controller gives the
//! verdict.

mod check_rounds;
mod checking;
pub mod config;
pub mod drain_permit;
pub mod exchange;
pub mod hook_reports;
pub mod http;
pub mod kernel_log;
pub mod machine;
pub mod report_dedup;
pub mod schedule;
pub mod sender;
pub mod spool;
pub mod tls;
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

use doctor_checks::probe::Probe;
use doctor_core::ids::CheckId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::SIGHUP;

use self::{
    config::{AgentSettings, Config, ConfigError},
    hook_reports::{HookSocket, lock_state},
    kernel_log::KernelLog,
    machine::Machine,
    report_dedup::ReportDedup,
    schedule::Schedule,
    sender::Outbox,
    spool::Spool,
};
use crate::{clock::now, heap, runner::DriverHelper, stop::Stop, verdict_file::Verdicts};

/// Interval at which all results are reported again.
const FULL_REPORT_INTERVAL: Duration = Duration::from_secs(3600);
/// Interval at which files are tested for changes.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Time for the sender to finish on shutdown; unsent reports stay on disk.
const SENDER_SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

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
pub fn run(cli_settings: &AgentSettings, file: Option<&std::path::Path>, stop: &Stop) -> Result<(), AgentError> {
    heap::limit_memory();
    let config = Config::load(cli_settings, file)?;
    let failed = |source| AgentError::State { path: config.state.clone(), source };
    let spool = Spool::open(&config.state.join("spool"), config.spool_limits).map_err(failed)?;
    let _state_lock = lock_state(&config.state)?;
    let hook_socket = HookSocket::bind(&config.state).map_err(failed)?;
    let (sighup, signal) = wake_pair()?;
    signal_hook::low_level::pipe::register(SIGHUP, signal).map_err(AgentError::Signals)?;
    let (news, wake) = wake_pair()?;
    let machine = Machine::load(&config.state, wake.try_clone().map_err(AgentError::Signals)?);
    let outbox = Arc::new(Outbox::new(spool, config.route.clone(), config.state.clone(), machine.site_digest(), wake));
    let (done, sender_ended) = mpsc::channel::<()>();
    let sending = Arc::clone(&outbox);
    let body = move || {
        let _ends_with_this = done;
        sender::run(&sending, &log_line);
    };
    thread::Builder::new().name("doctor-sender".to_owned()).spawn(body).map_err(AgentError::Thread)?;
    log_line(&format!("reporting as {} to {}", config.route.node, config.route.address));
    let wake_sources = WakeSources { sighup, hook_socket, news };
    Agent::new(cli_settings, file, config, &outbox, stop, wake_sources, machine).run();
    outbox.close();
    // Do not wait longer for a sender in mid-exchange: unsent reports are on disk.
    let _in_time = sender_ended.recv_timeout(SENDER_SHUTDOWN_GRACE);
    log_line(&format!("stopped; reports in the spool: {}", outbox.waiting()));
    Ok(())
}

/// Returns both ends of a channel that wakes the agent. Neither end blocks: a full channel has woken it already.
fn wake_pair() -> Result<(UnixStream, UnixStream), AgentError> {
    let (woken, wake) = UnixStream::pair().map_err(AgentError::Signals)?;
    for end in [&woken, &wake] {
        end.set_nonblocking(true).map_err(AgentError::Signals)?;
    }
    Ok((woken, wake))
}

/// Logs to stderr; systemd adds the time.
fn log_line(text: &str) {
    eprintln!("doctor-node: {text}");
}

/// External wake-ups.
struct WakeSources {
    /// SIGHUP: reload the configuration.
    sighup: UnixStream,
    /// Woken by a scheduler's hook that has submitted evidence.
    hook_socket: HookSocket,
    /// The controller has sent profiles, or the cloud has answered.
    news: UnixStream,
}

struct Agent<'a> {
    cli_settings: &'a AgentSettings,
    file: Option<&'a std::path::Path>,
    config: Config,
    outbox: &'a Outbox,
    stop: &'a Stop,
    wake_sources: WakeSources,
    started: Instant,
    schedule: Schedule,
    /// Checks that read the kernel log.
    log_checks: Vec<CheckId>,
    log: KernelLog,
    report_dedup: ReportDedup,
    last_full_report: Option<Instant>,
    files_checked_at: Instant,
    spool_error: Option<String>,
    /// Shared with hooks, which skip their own checks while this is fresh.
    verdicts: Verdicts,
    /// The process that queries the GPU driver, for the agent's lifetime.
    driver_helper: Arc<DriverHelper>,
    machine: Machine,
}

impl<'a> Agent<'a> {
    fn new(
        cli_settings: &'a AgentSettings,
        file: Option<&'a std::path::Path>,
        config: Config,
        outbox: &'a Outbox,
        stop: &'a Stop,
        wake_sources: WakeSources,
        machine: Machine,
    ) -> Self {
        let log = KernelLog::follow(&config.root).unwrap_or_else(|error| {
            log_line(&format!("cannot follow the kernel log, it is read every few minutes instead: {error}"));
            KernelLog::disabled()
        });
        let started = Instant::now();
        Self {
            cli_settings,
            file,
            outbox,
            stop,
            wake_sources,
            started,
            schedule: plan(&config),
            log_checks: log_checks(&config),
            log,
            report_dedup: ReportDedup::default(),
            last_full_report: None,
            files_checked_at: started,
            spool_error: None,
            verdicts: Verdicts::read(&config.state),
            driver_helper: Arc::default(),
            machine,
            config,
        }
    }

    fn run(&mut self) {
        // Includes evidence submitted while no agent ran.
        self.take_hook_reports();
        while self.stop.requested().is_none() {
            self.reload_if_changed();
            self.take_news();
            if self.wake_sources.hook_socket.take_wakeup() {
                self.take_hook_reports();
            }
            if let Err(error) = self.log.poll_records(Instant::now()) {
                log_line(&format!("cannot follow the kernel log any more: {error}"));
            }
            let mut due: BTreeSet<CheckId> = self.schedule.take_due(self.started.elapsed()).into_iter().collect();
            if self.log.take_due(Instant::now()) {
                due.extend(self.log_checks.iter().cloned());
            }
            if self.is_full_report_due() {
                self.refresh_machine();
                self.report_dedup.clear();
                due.extend(self.config.checks().into_iter().map(|(check, _)| check));
            }
            if !due.is_empty() {
                self.run_checks(&due);
                heap::give_back();
            }
            self.sleep();
        }
    }

    fn is_full_report_due(&mut self) -> bool {
        let due = self.outbox.take_full_report_request()
            || self.last_full_report.is_none_or(|last_report| last_report.elapsed() >= FULL_REPORT_INTERVAL);
        if due {
            self.last_full_report = Some(Instant::now());
        }
        due
    }

    /// Adopts profiles that the controller has sent, and the cloud's answer.
    fn take_news(&mut self) {
        if !io::Read::read(&mut self.wake_sources.news, &mut [0; 64]).is_ok_and(|count| count > 0) {
            return;
        }
        let before = self.machine.profile().cloned();
        if let Some(line) = self.machine.take_cloud_answer() {
            log_line(&line);
        }
        if let Some(profiles) = self.outbox.take_profiles() {
            log_line(&self.machine.set_site_profiles(profiles));
        }
        if self.config.profile.is_none() && self.machine.profile() != before.as_ref() {
            // Results may differ under another profile.
            (self.schedule, self.started) = (plan(&self.config), Instant::now());
        }
    }

    /// Reports the evidence that hooks have submitted.
    fn take_hook_reports(&mut self) {
        for (path, hook_report) in hook_reports::pending(&self.config.state) {
            // The controller now has the hook's results of these checks, so the agent's own must be reported again.
            hook_report.checks.iter().for_each(|evidence| self.report_dedup.forget(&evidence.test));
            let _on_disk_or_in_memory =
                self.outbox.add(Vec::new(), |number| hook_reports::report(hook_report, &self.config, number));
            // If the file stays, it is reported again; the controller counts it once.
            let _removed = std::fs::remove_file(path);
        }
    }

    /// Reloads the configuration on SIGHUP or if a file has changed.
    fn reload_if_changed(&mut self) {
        let signalled = io::Read::read(&mut self.wake_sources.sighup, &mut [0; 64]).is_ok_and(|count| count > 0);
        if !signalled {
            if self.files_checked_at.elapsed() < FILE_CHECK_INTERVAL {
                return;
            }
            self.files_checked_at = Instant::now();
            if !self.config.has_changed() {
                return;
            }
        }
        match Config::load(self.cli_settings, self.file) {
            Ok(mut config) => {
                if (&config.state, &config.root, config.spool_limits)
                    != (&self.config.state, &self.config.root, self.config.spool_limits)
                {
                    log_line("changes of `state`, `root` and the spool size take effect after a restart");
                }
                config.state.clone_from(&self.config.state);
                config.root.clone_from(&self.config.root);
                config.spool_limits = self.config.spool_limits;
                self.config = config;
                self.outbox.set_route(self.config.route.clone());
                // Run all checks now: a new policy may change their results.
                (self.schedule, self.started) = (plan(&self.config), Instant::now());
                self.log_checks = log_checks(&self.config);
                // The full report also looks at the machine again.
                self.last_full_report = None;
                log_line(&format!(
                    "the changed configuration is in force, policy version {}",
                    self.config.policy.version
                ));
            }
            Err(error) => {
                self.config.note_files();
                let reason = chain(&error);
                log_line(&format!("the changed configuration is invalid, the previous one stays in force: {reason}"));
            }
        }
    }

    /// Sleeps until a check is due, the kernel logs a message, or a signal arrives.
    fn sleep(&self) {
        let at = Instant::now();
        let mut deadline = self.files_checked_at + FILE_CHECK_INTERVAL;
        if let Some(due) = self.schedule.next() {
            deadline = deadline.min(self.started + due);
        }
        if let Some(due) = self.log.next() {
            deadline = deadline.min(due);
        }
        let wait = deadline.saturating_duration_since(at);
        let wake = self.stop.wake();
        let mut fds = vec![
            PollFd::new(&self.wake_sources.sighup, PollFlags::IN),
            PollFd::new(self.wake_sources.hook_socket.socket(), PollFlags::IN),
            PollFd::new(&self.wake_sources.news, PollFlags::IN),
        ];
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
