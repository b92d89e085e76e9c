//! Runs NVIDIA's `all_reduce_perf` instead of our own ranks, if a site configures it: with the same parameters, the
//! same judgement of NCCL's log, and the same metrics.

use std::{env, ffi::OsString, process::Command, time::Duration};

use doctor_checks::{
    collective_params::{CollectiveParams, GPU_COUNT_METRIC},
    document::Measurements,
    measurements::exit_failure,
    nccl_log::{NcclLog, RequestedPath},
    nccl_tests::{self, NcclTests},
};
use doctor_core::observation::{Entity, Event, FailureKind, Metric, ProbeFailure, Unit};
use doctor_gpu::cuda::{self, Cuda};

use super::environment;
use crate::{
    runner::child::{self, ChildOutcome, Echo, Limits},
    stop::{Stop, StopReason},
};

/// Includes NCCL's log.
const MAX_OUTPUT_BYTES: usize = 16 << 20;
const KILL_GRACE: Duration = Duration::from_secs(2);

pub(super) fn run(params: &CollectiveParams, stop: &Stop) -> Result<Measurements, ProbeFailure> {
    let gpus = count_gpus()?;
    let mut measurements = Measurements::default();
    measurements.metrics.push(Metric::count(GPU_COUNT_METRIC, Entity::node(), f64::from(gpus)));
    if gpus == 1 {
        return Ok(measurements);
    }
    let (exit, stdout, stderr) = run_program(params, gpus, stop)?;
    let read = nccl_tests::parse(&stdout).map_err(|error| ProbeFailure::new(FailureKind::Failed, error.to_string()));
    let tests = match (exit, read) {
        (Some(0), Ok(tests)) => tests,
        // It also exits with an error if values are wrong.
        (Some(_), Ok(tests)) if tests.wrong > 0 => tests,
        (Some(0), Err(failure)) => return Err(failure),
        (exit, _) => return Err(exit_failure(exit, &stderr)),
    };
    if tests.wrong > 0 {
        let text = format!("{} wrong elements, according to all_reduce_perf", tests.wrong);
        measurements.events.push(Event::seen("collective-wrong", Entity::node(), text));
    }
    let log = NcclLog::read(&format!("{stdout}\n{stderr}"));
    add_metrics(params, gpus, &tests, &log, &mut measurements);
    Ok(measurements)
}

fn add_metrics(
    params: &CollectiveParams,
    gpus: u32,
    tests: &NcclTests,
    log: &NcclLog,
    measurements: &mut Measurements,
) {
    let requested =
        RequestedPath { mode: params.mode, net: &params.net, shared_memory: params.shared_memory, ranks: 0..gpus };
    let paths = match log.check_path(&requested) {
        Ok(paths) => paths,
        Err(other_way) => {
            return measurements.failures.push(ProbeFailure::new(FailureKind::Failed, other_way.to_string()));
        }
    };
    let row = tests.largest();
    let mut metric =
        |name: &str, value: f64, unit| measurements.metrics.push(Metric::new(name, Entity::node(), value, unit));
    metric(params.mode.metric(), row.bus_bandwidth, Unit::BytesPerSecond);
    metric("collective_bytes", row.bytes as f64, Unit::Bytes);
    metric("collective_wrong_elements", tests.wrong as f64, Unit::Count);
    metric("nccl_connections", paths.all as f64, Unit::Count);
    if paths.network > 0 {
        metric("nccl_without_gpu_direct", paths.without_gpu_direct as f64, Unit::Count);
    }
}

fn count_gpus() -> Result<u32, ProbeFailure> {
    let library = env::var_os("DOCTOR_CUDA").unwrap_or_else(|| OsString::from(cuda::LIBRARY));
    let count = Cuda::open(&library).and_then(|cuda| cuda.count()).map_err(|error| error.failure())?;
    match u32::try_from(count) {
        Ok(0) | Err(_) => Err(ProbeFailure::new(FailureKind::Missing, "the CUDA driver sees no GPU on this machine")),
        Ok(count) => Ok(count),
    }
}

type ProgramOutput = (Option<i32>, String, String);

fn run_program(params: &CollectiveParams, gpus: u32, stop: &Stop) -> Result<ProgramOutput, ProbeFailure> {
    let Some((program, rest)) = params.nccl_tests.split_first() else {
        return Err(ProbeFailure::new(FailureKind::Missing, "`nccl_tests` names no program"));
    };
    // Under a launcher each process has one GPU.
    let each = if rest.is_empty() { gpus } else { 1 };
    let mut command = Command::new(program);
    command.args(rest).args(["-b", &params.least.to_string(), "-e", &params.most.to_string()]);
    command.args(["-f", "4", "-c", "1", "-g", &each.to_string()]);
    environment::set(&mut command, params);
    let limits = Limits {
        timeout: params.timeout.to_std(),
        max_stream_bytes: MAX_OUTPUT_BYTES,
        grace: Duration::ZERO,
        kill_grace: KILL_GRACE,
    };
    let show = |line: &str| {
        if !line.contains(" NCCL INFO ") {
            eprintln!("{line}");
        }
    };
    let failed = |kind, text: String| ProbeFailure::new(kind, format!("{program}: {text}"));
    match child::run(&mut command, &limits, stop, Echo { stdout: Some(&show), stderr: Some(&show) }) {
        Ok(ChildOutcome::Exited { status, stdout, stderr }) => {
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            Ok((status.code(), text(stdout), text(stderr)))
        }
        Ok(ChildOutcome::TimedOut) => {
            Err(failed(FailureKind::TimedOut, format!("did not finish within {}", params.timeout)))
        }
        Ok(ChildOutcome::TooLong) => {
            Err(failed(FailureKind::TooLong, format!("it printed more than {MAX_OUTPUT_BYTES} bytes")))
        }
        Ok(ChildOutcome::Stopped(StopReason::Signal | StopReason::TimeLimit)) => {
            Err(failed(FailureKind::Killed, "stopped by a signal".to_owned()))
        }
        Ok(ChildOutcome::Unkillable { pid, .. }) => {
            Err(failed(FailureKind::Abandoned, format!("process {pid} cannot be killed and was left behind")))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(failed(FailureKind::Missing, "program not found".to_owned()))
        }
        Err(error) => Err(failed(FailureKind::Failed, error.to_string())),
    }
}
