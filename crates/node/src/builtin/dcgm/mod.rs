//! `doctor-node test dcgm`: runs NVIDIA's diagnostics, `dcgmi diag`, under controlled conditions.
//!
//! DCGM's output is passed on unchanged, because the check parses it and the evidence should be DCGM's own. This module
//! makes the result meaningful: the GPUs are unused ([`preconditions`]), there is a host engine ([`engine`]), and the
//! diagnostics end in time or are stopped with SIGTERM. Killing `dcgmi` would leave them running in the engine.

mod engine;
mod preconditions;

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_checks::{
    dcgm_params::DcgmParams,
    disturbance::Disturbance,
    document::Measurements,
    probe::{Probe, ProbeOutput},
};
use doctor_core::observation::{FailureKind, ProbeFailure};

use super::{
    disturbance::ProcessView,
    program::{EndSignal, Program},
};
use crate::{
    runner::{
        LocalRunner, MAX_STREAM_BYTES, ProbeRunner as _, STATE_VARIABLE,
        child::{self, ChildOutcome, Echo, Limits},
        hung_probes::HungProbes,
    },
    stop::{Stop, StopReason},
};
use engine::{Address, ENGINE, Engine, PATIENCE, SHORT_KEEPER_TIMEOUT};
use preconditions::Unmet;

pub(super) use engine::{SUBTASK, run_keeper};

/// Time for `dcgmi` after SIGTERM to stop the engine's worker and wait for it.
const GRACE: Duration = Duration::from_secs(5);
/// The same after a stop of the test itself: the runner kills it soon after, and a `dcgmi` that does not react would be
/// left behind.
const STOP_GRACE: Duration = Duration::from_millis(400);
const KILL_GRACE: Duration = Duration::from_secs(2);
/// The output is embedded as JSON in JSON, where each quote takes two bytes.
const MAX_OUTPUT_BYTES: usize = MAX_STREAM_BYTES / 2;
/// The name under which an unkillable process is recorded.
const PROCESS_LABEL: &str = "dcgmi diag";

/// Entry point of the test's process.
pub(super) fn run(args: Vec<OsString>) -> ProbeOutput {
    diagnose(args).unwrap_or_else(ProbeOutput::Failed)
}

fn diagnose(args: Vec<OsString>) -> Result<ProbeOutput, ProbeFailure> {
    let params = args.into_iter().next().and_then(|text| serde_json::from_str::<DcgmParams>(text.to_str()?).ok());
    let Some(params) = params else {
        return Err(ProbeFailure::new(FailureKind::Unparseable, "cannot parse the parameters of the DCGM test"));
    };
    let stop = Stop::on_signals()
        .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot install signal handlers: {error}")))?;
    let dcgmi = Program::find(&params.program, &[]).ok_or_else(|| {
        let text = format!("{} is not installed; it comes with DCGM (`datacenter-gpu-manager`)", params.program);
        ProbeFailure::new(FailureKind::NotInstalled, text)
    })?;
    let address = Address::parse(&params.address)?;
    let state = env::var_os(STATE_VARIABLE).map(PathBuf::from);
    let hung_probes = state.as_deref().map_or_else(HungProbes::in_memory, HungProbes::in_directory);
    if let Some(pid) = hung_probes.hanging(PROCESS_LABEL) {
        let text = format!("process {pid} of earlier diagnostics still hangs; no others are started");
        return Err(ProbeFailure::new(FailureKind::Abandoned, text));
    }
    let running = match check_preconditions(&params, &stop, state.as_deref()) {
        Ok(running) => running,
        Err(Unmet::Failed(failure)) => return Err(failure),
        Err(Unmet::InUse { failure, by }) => return in_use(failure, &by),
    };
    let engine = Engine::connect_or_start(&address, running, &dcgmi.path, &stop)?;
    let output = run_dcgmi(&dcgmi, &params, &stop, &hung_probes);
    engine.end(if stop.requested().is_some() { SHORT_KEEPER_TIMEOUT } else { PATIENCE });
    output
}

/// Reports who uses the GPUs, in the format of tests that measure by themselves.
fn in_use(failure: ProbeFailure, by: &[Disturbance]) -> Result<ProbeOutput, ProbeFailure> {
    let events = by.iter().map(Disturbance::event).collect();
    let report = Measurements { metrics: Vec::new(), events, failures: vec![failure.clone()] };
    serde_json::to_string(&report).map(ProbeOutput::Text).map_err(|_| failure)
}

/// Tests the preconditions, and returns the pid of a running engine, if any.
fn check_preconditions(params: &DcgmParams, stop: &Stop, state: Option<&Path>) -> Result<Option<u32>, Unmet> {
    let root = env::var_os("DOCTOR_ROOT").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let mut runner = LocalRunner::new(&root, stop).state(state);
    if let Some(library) = env::var_os("DOCTOR_NVML") {
        runner = runner.library(library);
    }
    if params.level.loads_gpus() {
        match runner.run(&Probe::gpu(&preconditions::fields())) {
            ProbeOutput::Gpus(result) => preconditions::are_met(&result, &ProcessView::open(&root))?,
            ProbeOutput::Failed(failure) => return Err(Unmet::Failed(failure)),
            _ => {
                let text = "unexpected answer to the GPU query";
                return Err(Unmet::Failed(ProbeFailure::new(FailureKind::Unparseable, text)));
            }
        }
    }
    match runner.run(&Probe::Processes) {
        ProbeOutput::Processes(all) => {
            let engine = all.iter().find(|process| process.name == ENGINE && !matches!(process.state, 'Z' | 'X'));
            Ok(engine.map(|process| process.pid))
        }
        // Then the connection to the address shows whether one runs.
        _ => Ok(None),
    }
}

/// Runs the diagnostics to their end.
fn run_dcgmi(
    dcgmi: &Program,
    params: &DcgmParams,
    stop: &Stop,
    hung_probes: &HungProbes,
) -> Result<ProbeOutput, ProbeFailure> {
    let level = params.level.number();
    let mut command = dcgmi.command(EndSignal::Term);
    command.args(["diag", "--host", &params.address, "-j", "-r", &level.to_string()]);
    if !params.parameters.is_empty() {
        command.args(["-p", &params.parameters.join(";")]);
    }
    let limits = Limits {
        timeout: params.timeout.to_std(),
        max_stream_bytes: MAX_OUTPUT_BYTES,
        grace: GRACE,
        kill_grace: KILL_GRACE,
    };
    eprintln!("dcgmi diag at level {level}, for {} at most", params.timeout);
    let started = Instant::now();
    let log_line = |line: &str| eprintln!("{line}");
    let echo = Echo { stdout: Some(&log_line), stderr: Some(&log_line) };
    let outcome = child::run_with_stop_grace(&mut command, &limits, STOP_GRACE, stop, echo);
    eprintln!("dcgmi ended after {:.1} s", started.elapsed().as_secs_f64());
    let failed = |kind, text: String| Err(ProbeFailure::new(kind, text));
    match outcome {
        Ok(ChildOutcome::Exited { status, stdout, stderr }) => Ok(ProbeOutput::Ran {
            exit: status.code(),
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        }),
        Ok(ChildOutcome::TimedOut) => {
            let text = format!(
                "the diagnostics at level {level} did not end within {} and were stopped; increase `timeout`, or \
                 look for a hung GPU",
                params.timeout
            );
            failed(FailureKind::TimedOut, text)
        }
        Ok(ChildOutcome::TooLong) => {
            failed(FailureKind::TooLong, format!("dcgmi printed more than {MAX_OUTPUT_BYTES} bytes"))
        }
        Ok(ChildOutcome::Stopped(StopReason::Signal | StopReason::TimeLimit)) => {
            failed(FailureKind::Killed, "stopped by a signal".to_owned())
        }
        Ok(ChildOutcome::Unkillable { pid, child }) => {
            hung_probes.add(PROCESS_LABEL, pid, child);
            failed(FailureKind::Abandoned, format!("dcgmi hangs in the kernel and was left behind as process {pid}"))
        }
        Err(error) => failed(FailureKind::Failed, format!("cannot start dcgmi: {error}")),
    }
}
