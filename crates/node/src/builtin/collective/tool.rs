//! Runs NVIDIA's `all_reduce_perf` instead of our own ranks, if a site configures it: with the same parameters, the
//! same judgement of NCCL's log, and the same metrics.

use std::{env, ffi::OsString, process::Command, time::Duration};

use doctor_checks::{
    collective_order::{CollectiveOrder, GPUS},
    document::Measurements,
    measurements::ended_badly,
    nccl_log::{Asked, NcclLog},
    nccl_tests::{self, NcclTests},
};
use doctor_core::observation::{Entity, Event, FailureKind, Metric, ProbeFailure, Unit};
use doctor_gpu::cuda::{self, Cuda};

use super::environment;
use crate::{
    runner::child::{self, Echo, Ended, Limits},
    stop::{Stop, StopWhy},
};

/// Includes NCCL's log.
const MOST_BYTES: usize = 16 << 20;
const KILL_GRACE: Duration = Duration::from_secs(2);

pub(super) fn run(order: &CollectiveOrder, stop: &Stop) -> Result<Measurements, ProbeFailure> {
    let gpus = count_gpus()?;
    let mut said = Measurements::default();
    said.metrics.push(Metric::count(GPUS, Entity::node(), f64::from(gpus)));
    if gpus == 1 {
        return Ok(said);
    }
    let (exit, stdout, stderr) = ran(order, gpus, stop)?;
    let read = nccl_tests::parse(&stdout).map_err(|error| ProbeFailure::new(FailureKind::Failed, error.to_string()));
    let tests = match (exit, read) {
        (Some(0), Ok(tests)) => tests,
        // It also exits with an error if values are wrong.
        (Some(_), Ok(tests)) if tests.wrong > 0 => tests,
        (Some(0), Err(failure)) => return Err(failure),
        (exit, _) => return Err(ended_badly(exit, &stderr)),
    };
    if tests.wrong > 0 {
        let text = format!("{} elements are not the sum, according to all_reduce_perf", tests.wrong);
        said.events.push(Event::seen("collective-wrong", Entity::node(), text));
    }
    let log = NcclLog::read(&format!("{stdout}\n{stderr}"));
    figures(order, gpus, &tests, &log, &mut said);
    Ok(said)
}

fn figures(order: &CollectiveOrder, gpus: u32, tests: &NcclTests, log: &NcclLog, said: &mut Measurements) {
    let asked = Asked { mode: order.mode, net: &order.net, shared_memory: order.shared_memory, ranks: 0..gpus };
    let paths = match log.judge(&asked) {
        Ok(paths) => paths,
        Err(other_way) => return said.unread.push(ProbeFailure::new(FailureKind::Failed, other_way.to_string())),
    };
    let row = tests.largest();
    let mut metric = |name: &str, value: f64, unit| said.metrics.push(Metric::new(name, Entity::node(), value, unit));
    metric(order.mode.metric(), row.bus_bandwidth, Unit::BytesPerSecond);
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

type Ran = (Option<i32>, String, String);

fn ran(order: &CollectiveOrder, gpus: u32, stop: &Stop) -> Result<Ran, ProbeFailure> {
    let Some((program, rest)) = order.nccl_tests.split_first() else {
        return Err(ProbeFailure::new(FailureKind::Missing, "`nccl_tests` names no program"));
    };
    // Under a launcher each process has one GPU.
    let each = if rest.is_empty() { gpus } else { 1 };
    let mut command = Command::new(program);
    command.args(rest).args(["-b", &order.least.to_string(), "-e", &order.most.to_string()]);
    command.args(["-f", "4", "-c", "1", "-g", &each.to_string()]);
    environment::set(&mut command, order);
    let limits =
        Limits { timeout: order.timeout.to_std(), stream: MOST_BYTES, grace: Duration::ZERO, kill_grace: KILL_GRACE };
    let show = |line: &str| {
        if !line.contains(" NCCL INFO ") {
            eprintln!("{line}");
        }
    };
    let failed = |kind, text: String| ProbeFailure::new(kind, format!("{program}: {text}"));
    match child::run(&mut command, &limits, stop, Echo { stdout: Some(&show), stderr: Some(&show) }) {
        Ok(Ended::Exited { status, stdout, stderr }) => {
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            Ok((status.code(), text(stdout), text(stderr)))
        }
        Ok(Ended::TimedOut) => Err(failed(FailureKind::TimedOut, format!("did not finish within {}", order.timeout))),
        Ok(Ended::TooLong) => Err(failed(FailureKind::TooLong, format!("it printed more than {MOST_BYTES} bytes"))),
        Ok(Ended::Stopped(StopWhy::Signal | StopWhy::TimeLimit)) => {
            Err(failed(FailureKind::Killed, "stopped by a signal".to_owned()))
        }
        Ok(Ended::Unkillable { pid, .. }) => {
            Err(failed(FailureKind::Abandoned, format!("process {pid} cannot be killed and was left behind")))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(failed(FailureKind::Missing, "program not found".to_owned()))
        }
        Err(error) => Err(failed(FailureKind::Failed, error.to_string())),
    }
}
