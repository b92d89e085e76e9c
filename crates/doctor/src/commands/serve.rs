//! `doctor serve`: the control loop. It runs a cycle at every interval, reloads changed files between cycles, and stops
//! after the current cycle when it receives a signal.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_backend::{open_files, progress::Progress};
use doctor_engine::{cycle::CycleError, cycle_report::CycleReport, share::Share, spans::TARGET, trigger::Trigger};
use doctor_notify::report::Reporter;
use doctor_notify::telemetry::{TelemetrySettings, Traces};
use doctor_store::{self as store, StoreError};

use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use super::api_cli;
use crate::{
    config::{LoadedConfig, ReloadOutcome},
    context::Context,
    controller::{ClusterConnection, Controller, ProcessMode},
    exit::Exit,
    failure::{Failure, Result},
    startup,
    watchdog::Watchdog,
};

/// Run the controller until it receives SIGTERM or SIGINT.
///
/// Several controllers may share one store: one leads, the others wait. Changed policy and profile files take effect in
/// the next cycle; while a file is invalid, the last valid configuration stays in force.
///
/// The process ends within 30 s of SIGTERM, and ends itself when its control loop makes no progress for two cycles (at
/// least a minute), so that another controller can lead: exit code 8 in both cases, if the loop hangs.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Exit after this many cycles.
    #[arg(long, value_name = "N")]
    cycles: Option<u64>,
}

/// The interval at which expired data is removed.
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);
/// The interval at which the stop flag is polled while the loop waits.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The least time between the starts of two cycles that were triggered early. A slow cluster gets a pause as long as
/// its cycle.
const MIN_CYCLE_GAP: Duration = Duration::from_millis(200);
/// After waiting this long, the loop returns unused memory to the system.
const IDLE_BEFORE_TRIM: Duration = Duration::from_millis(500);

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    doctor_engine::heap::limit_heap();
    // Without it, a flood of connections would leave none for the store.
    let _limit = open_files::raise_limit();
    let mut startup = startup::judge(context)?;
    startup.refuse()?;
    let traces = log_to_stderr(&context.config()?.telemetry)?;
    let stop = stop_flag().map_err(|source| Failure::Other(format!("installing signal handlers: {source}")))?;
    let watchdog = Watchdog::start(Some(Arc::clone(&stop)))
        .map_err(|error| Failure::Other(format!("starting the watchdog thread: {error}")))?;
    for remark in &startup.remarks {
        tracing::warn!("{remark}");
    }
    let store = context.open_store_to_lead()?;
    let mut loaded = context.loaded()?.clone();
    // `startup::judge` has tried it. One that does not answer now may answer later: the loop does not wait for it.
    let share = Share::at(&loaded.config.data);
    let world = ClusterConnection::open(&loaded)?;
    let serving = ProcessMode::Service { traces: traces.as_ref().map(Traces::counts) };
    let cli = api_cli::handler(loaded.source.clone(), context.named_store().cloned());
    let controller = Controller::new(&loaded, store, share, world, serving, Some(cli))?;
    tracing::info!(configuration = %loaded.source, store = %loaded.config.store, cycle = %loaded.config.cycle, "started");
    if let Some(found) = controller.engine.store().awaited_migration()? {
        let (from, to) = (found, store::Store::SCHEMA);
        tracing::info!(from, to, "the store has an older schema: this controller migrates it when it leads");
    }
    if let Some(listener) = &controller.agent_listener {
        tracing::info!(at = %listener.address(), "agent endpoint listening");
    }
    if let Some(probes) = &controller.probes_listener {
        tracing::info!(at = %probes.address(), "health probes listening");
    }
    if let Some(scraped) = &controller.metrics_listener {
        tracing::info!(at = %scraped.address(), "metrics endpoint listening");
    }
    if let Some(web) = &controller.api {
        tracing::info!(at = %web.address(), "API listening");
    }
    let mut service =
        ServiceLoop { controller, logged: LoggedState::default(), last_pruned: None, reporter: Reporter::default() };
    // Memory used for the start is not needed again.
    doctor_engine::heap::release_free();
    let (mut done, mut superseded) = (0, None);
    let progress = service.controller.engine.progress().clone();
    watchdog.watch(&progress, service.controller.engine.store());
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        service.reload(&mut loaded);
        superseded = service.cycle(&loaded);
        if superseded.is_some() {
            break;
        }
        done += 1;
        if args.cycles.is_some_and(|limit| done >= limit) {
            break;
        }
        let elapsed = began.elapsed();
        let next = began + service.cycle_interval(&loaded);
        let trigger = Arc::clone(&service.controller.cycle_trigger);
        let earliest = began + (elapsed * 2).max(MIN_CYCLE_GAP);
        wait((&stop, &progress), &trigger, next, earliest, || service.controller.enter_messages());
    }
    let stopped = service.controller.engine.stop();
    service.controller.stop_alerts();
    traces.into_iter().for_each(Traces::stop);
    tracing::info!("stopped");
    // What failed for the same reason at the end is no news.
    if let Some(failure) = superseded {
        return Err(failure);
    }
    stopped?;
    Ok(Exit::Ok)
}

/// Sets up logging to standard error, and traces to a collector if one is configured.
fn log_to_stderr(telemetry: &TelemetrySettings) -> Result<Option<Traces>> {
    let started = Traces::start(telemetry, &store::this_process());
    let started = started.map_err(|error| Failure::Other(format!("starting the trace export thread: {error}")))?;
    let (traces, layer) = started.unzip();
    let configured = std::env::var("DOCTOR_LOG").ok().and_then(|configured| configured.parse().ok());
    let filter: Targets = configured.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    // Spans go only to the collector: log lines carry their own context.
    let filter = filter.with_target(TARGET, LevelFilter::OFF);
    let layer = layer.map(|layer| layer.with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO)));
    let ansi = io::IsTerminal::is_terminal(&io::stderr()) && std::env::var_os("NO_COLOR").is_none();
    // Fails only if a subscriber is installed already, that is, if this function is called twice.
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(ansi);
    let _first = tracing_subscriber::registry().with(lines.with_filter(filter)).with(layer).try_init();
    Ok(traces)
}

/// Returns a flag that the first SIGTERM or SIGINT sets. The second signal ends the program immediately.
pub(crate) fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// Waits until the next cycle is due, or until it is woken, but then not before `earliest`. What wakes it may be messages
/// of nodes, which are entered meanwhile: they need not wait for a cluster that answers slowly.
fn wait(
    (stop, progress): (&AtomicBool, &Progress),
    trigger: &Trigger,
    until: Instant,
    earliest: Instant,
    mut enter_messages: impl FnMut() -> std::result::Result<(), StoreError>,
) {
    progress.enter("wait for the next cycle");
    let began = Instant::now();
    let (mut woken, mut rested) = (false, false);
    while !stop.load(Ordering::Relaxed) {
        progress.tick();
        if !woken && !rested && began.elapsed() >= IDLE_BEFORE_TRIM {
            rested = true;
            doctor_engine::heap::release_free();
        }
        let until = if woken { earliest.min(until) } else { until };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if trigger.wait(left.min(STOP_POLL_INTERVAL)) {
            woken = true;
            if let Err(error) = enter_messages() {
                // The cycle finds the same and reports it.
                tracing::debug!(%error, "entering messages failed");
                std::thread::sleep(left.min(STOP_POLL_INTERVAL));
            }
        }
    }
}

/// What has been logged already, so that each state is logged once.
#[derive(Debug, Default)]
struct LoggedState {
    leader: Option<String>,
    store_error: Option<String>,
    problems: Vec<String>,
}

struct ServiceLoop {
    controller: Controller,
    logged: LoggedState,
    last_pruned: Option<Instant>,
    reporter: Reporter,
}

impl ServiceLoop {
    fn reload(&mut self, loaded: &mut LoadedConfig) {
        let alerts = loaded.config.alerts.clone();
        match loaded.reload() {
            ReloadOutcome::Unchanged => {}
            ReloadOutcome::Changed { after_restart } => {
                if alerts != loaded.config.alerts
                    && let Err(error) = self.controller.set_alerts(&loaded.config.alerts)
                {
                    tracing::error!(%error, "restart of alert delivery failed");
                }
                self.controller.engine.set_settings(loaded.settings.clone());
                if let Some(listener) = &self.controller.agent_listener {
                    listener.set_site_profiles(loaded.site_profiles.clone());
                }
                self.controller.engine.set_persistent_problem(None);
                tracing::info!(policy = loaded.settings.policy.version, "configuration reloaded");
                if !after_restart.is_empty() {
                    tracing::warn!(settings = after_restart.join(", "), "restart needed to apply changed settings");
                }
            }
            ReloadOutcome::Invalid(error) => {
                let error = error_chain(&error);
                tracing::warn!(%error, "configuration reload failed, the last valid configuration stays in force");
                let text = format!("configuration reload failed, the last valid configuration stays in force: {error}");
                self.controller.engine.set_persistent_problem(Some(text));
            }
        }
    }

    /// Returns the time between the starts of two cycles, unless one is triggered early.
    fn cycle_interval(&self, loaded: &LoadedConfig) -> Duration {
        loaded.config.cycle.to_std().div_f64(self.controller.time_factor())
    }

    /// Runs one cycle. Returns why this process can never lead again: a newer program has migrated the store.
    fn cycle(&mut self, loaded: &LoadedConfig) -> Option<Failure> {
        match self.controller.cycle(self.cycle_interval(loaded)) {
            Ok(report) => {
                if self.logged.leader.take().is_some() {
                    tracing::info!("this controller leads now");
                }
                if self.logged.store_error.take().is_some() {
                    tracing::info!("store available again");
                }
                self.log_report(&report);
                self.prune(loaded);
                let (config, now) = (&loaded.config, self.controller.clock.now());
                self.controller.engine.progress().enter("write reports");
                self.reporter.write_due(&config.reports, &config.data, self.controller.engine.store(), now);
            }
            Err(CycleError::NotLeader { by, until }) => {
                if self.logged.leader.as_ref() != Some(&by) {
                    tracing::info!(%by, %until, "another controller leads; this one waits");
                    self.logged.leader = Some(by);
                }
            }
            Err(error @ CycleError::Store(StoreError::NewerSchema { .. })) => {
                let failure = Failure::from(error);
                tracing::error!("{failure}: this controller stops");
                return Some(failure);
            }
            Err(CycleError::Store(error)) => {
                let failure = Failure::Store(error);
                let text = failure.chain();
                if self.logged.store_error.as_ref() != Some(&text) {
                    let hint = failure.hint().unwrap_or_else(|| "the next cycle retries".to_owned());
                    tracing::error!(error = %text, %hint, "store failed");
                    self.logged.store_error = Some(text);
                }
            }
        }
        None
    }

    /// Logs one line for a cycle that did something, and each problem once while it lasts.
    fn log_report(&mut self, report: &CycleReport) {
        for problem in report.problems.iter().filter(|problem| !self.logged.problems.contains(problem)) {
            tracing::warn!("{problem}");
        }
        if report.problems.is_empty() && !self.logged.problems.is_empty() {
            tracing::info!("problems resolved");
        }
        self.logged.problems.clone_from(&report.problems);
        if !report.actions.is_empty() || report.results > 0 || report.rejected > 0 {
            tracing::info!(
                nodes = report.nodes,
                free = report.free,
                running = report.running,
                actions = report.actions.len(),
                results = report.results,
                rejected = report.rejected,
                "cycle"
            );
        }
    }

    fn prune(&mut self, loaded: &LoadedConfig) {
        if self.last_pruned.is_some_and(|tidied| tidied.elapsed() < PRUNE_INTERVAL) {
            return;
        }
        self.last_pruned = Some(Instant::now());
        match self.controller.engine.prune(loaded.config.retention) {
            Ok(pruned) if pruned.history_rows + pruned.evidence_rows > 0 || !pruned.logs.is_empty() => {
                let (history, evidence, logs) = (pruned.history_rows, pruned.evidence_rows, pruned.logs.len());
                tracing::info!(history, evidence, logs, "expired data removed");
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error = %error_chain(&error), "removal of expired data failed"),
        }
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
