//! `doctor-node hook`: Slurm's HealthCheckProgram, Prolog and Epilog.
//!
//! A hook delays users' jobs. It therefore returns within its time limit whatever hangs, prints one line, and acts only
//! on what it has observed. A check that timed out, a stalled file system, and a Slurm or a controller that does not
//! respond are inconclusive; inconclusive neither drains a node nor stops a job. An error of this program is exit code
//! 0.
//!
//! There are two processes. The one that Slurm starts reads the settings, waits, and returns. Its worker does the work
//! and may hang in the kernel, where even SIGKILL does not end it. Such a worker is left behind and recorded, and no
//! other is started while it hangs.
//!
//! With a controller ([`reporting`]) a hook reports, and the controller drains within its breaker. Without one
//! ([`standalone`]) the hook drains its node itself, under the same limits. A fresh verdict of the agent or of an earlier
//! hook is reused.

mod checks;
mod decide;
#[doc(hidden)]
pub mod fuzz_targets;
mod job_end;
mod line;
mod nodes;
mod reporting;
mod scontrol;
mod settings;
mod slurm_env;
mod standalone;

use std::{
    env,
    ffi::OsString,
    path::Path,
    process::{Command, ExitCode},
    time::Duration,
};

use rustix::fs::Mode;
use serde::{Deserialize, Serialize};

use crate::{
    runner::{
        child::{self, ChildOutcome, Echo, Limits},
        hung_probes::HungProbes,
    },
    stop::Stop,
};

pub use settings::{DEFAULT_FILE, Settings, SettingsError};

/// The hidden argument that makes this program a hook's worker process.
pub const HOOK_ARGUMENT: &str = "__hook";

/// Exit codes of a hook.
pub mod exit {
    /// Continue; also if the result is unknown.
    pub const CONTINUE: u8 = 0;
    /// Prolog only: do not start the job here. Slurm drains the node and requeues the job.
    pub const BLOCK_JOB: u8 = 1;
}

/// Time for a worker to exit after SIGTERM, and again after SIGKILL; a kill without effect by then has none.
const GRACE: Duration = Duration::from_millis(300);
/// One line, and whatever a library prints.
const MAX_OUTPUT_BYTES: usize = 64 << 10;

/// Which of Slurm's hooks runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookKind {
    /// HealthCheckProgram: periodically, on every node
    Health,
    /// Prolog: before a job
    Prolog,
    /// Epilog: after a job
    Epilog,
}

impl HookKind {
    pub const ALL: [Self; 3] = [Self::Health, Self::Prolog, Self::Epilog];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Prolog => "prolog",
            Self::Epilog => "epilog",
        }
    }
}

/// The worker's input.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HookArgs {
    kind: HookKind,
    settings: Settings,
}

/// Runs the hook and returns its exit code. `standalone` overrides the file. A panic of this program is not a fault of the
/// node.
pub fn run(kind: HookKind, config: Option<&Path>, standalone: bool) -> u8 {
    std::panic::catch_unwind(|| run_hook(kind, config, standalone)).unwrap_or(exit::CONTINUE)
}

fn run_hook(kind: HookKind, config: Option<&Path>, standalone: bool) -> u8 {
    // The files in the state directory describe users' jobs.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let mut settings = match Settings::load(config) {
        Ok(settings) => settings,
        Err(error) => {
            // Without settings there is no state directory to log to.
            let message = format!("doctor-node: {}: no check ran: {}", kind.as_str(), line::chain(&error));
            line::print_stderr(&message);
            return exit::CONTINUE;
        }
    };
    settings.standalone |= standalone;
    let state = settings.state.clone();
    let (code, message) = supervised(&HookArgs { kind, settings });
    line::log_line(&state, kind, &message);
    code
}

/// Starts the worker and returns its result within the time limit.
fn supervised(args: &HookArgs) -> (u8, String) {
    let abandoned = HungProbes::in_directory(&args.settings.state);
    let what = format!("hook {}", args.kind.as_str());
    if let Some(pid) = abandoned.hanging(&what) {
        return (exit::CONTINUE, format!("inconclusive: an earlier check still hangs in the kernel (process {pid})"));
    }
    let limit = args.settings.limit(args.kind).to_std();
    let text = match serde_json::to_string(args) {
        Ok(text) => text,
        Err(error) => return (exit::CONTINUE, format!("inconclusive: cannot serialise the settings: {error}")),
    };
    let mut command = Command::new("/proc/self/exe");
    command.arg(HOOK_ARGUMENT).arg(text);
    let limits = Limits { timeout: limit, max_stream_bytes: MAX_OUTPUT_BYTES, grace: GRACE, kill_grace: GRACE };
    // Signals end this process, as Slurm expects. The worker is in its own process group and has its own limit.
    match child::run(&mut command, &limits, &Stop::never(), Echo::default()) {
        Ok(ChildOutcome::Exited { status, stderr, .. }) => {
            let stderr_text = String::from_utf8_lossy(&stderr).trim().to_owned();
            match status.code().and_then(|code| u8::try_from(code).ok()) {
                Some(code @ (exit::CONTINUE | exit::BLOCK_JOB)) => (code, stderr_text),
                _ => (exit::CONTINUE, format!("inconclusive: the check ended with {status}: {stderr_text}")),
            }
        }
        Ok(ChildOutcome::Unkillable { pid, child }) => {
            abandoned.add(&what, pid, child);
            (exit::CONTINUE, format!("inconclusive: the check hangs in the kernel (process {pid}) and was left behind"))
        }
        Ok(ChildOutcome::TimedOut | ChildOutcome::Stopped(_)) => {
            (exit::CONTINUE, format!("inconclusive: the check took longer than {}", args.settings.limit(args.kind)))
        }
        Ok(ChildOutcome::TooLong) => (exit::CONTINUE, "inconclusive: the check printed too much output".to_owned()),
        Err(error) => (exit::CONTINUE, format!("inconclusive: cannot start the check: {error}")),
    }
}

/// The worker: does the work, prints its line on standard error, and exits with the hook's code.
pub fn worker(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let hook_args = args.next().and_then(|text| serde_json::from_str::<HookArgs>(text.to_str()?).ok());
    let Some(HookArgs { kind: moment, settings }) = hook_args else {
        line::print_stderr(&format!("{HOOK_ARGUMENT} is internal to doctor-node"));
        return ExitCode::FAILURE;
    };
    // Gives up shortly before it is killed, so that it can print what it waited for.
    let limit = settings.limit(moment).to_std();
    let stop = Stop::never().after(limit.saturating_sub(GRACE));
    let slurm_env = slurm_env::SlurmEnv::new(env::vars_os());
    let done = decide::work(moment, &settings, &slurm_env, &stop);
    line::print_stderr(&done.line);
    ExitCode::from(done.code)
}
