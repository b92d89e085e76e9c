//! `doctor-node test collective`: an all-reduce over the GPUs of this node, or of several nodes.
//!
//! This process loads neither CUDA nor NCCL, because it could not be ended while it hangs there. The worker
//! ([`worker`]) drives the GPUs. Its messages and, in a multi-node job, those of the other nodes come together here
//! ([`node_coordinator`]), with the time limits. The first node synchronises all of them ([`step_barrier`]) over authenticated
//! connections ([`rendezvous`], [`frame_auth`]). At the end each node has the reports of all, and NCCL's log shows whether
//! the requested transport was used.

mod environment;
mod events;
mod frame_auth;
pub mod fuzz_targets;
mod launcher;
mod link;
mod messages;
mod nccl_tests;
mod node_coordinator;
mod rendezvous;
mod step_barrier;
mod worker;
mod worker_process;

use std::{env, ffi::OsString};

use doctor_checks::{
    collective_links::{LinkEnd, ring_links},
    collective_params::{CollectiveParams, GPU_COUNT_METRIC, Mode},
    collective_report::{bandwidth_table, measurements},
    disturbance::RatesOf,
    document::Measurements,
};
use doctor_core::observation::{Event, FailureKind, ProbeFailure};

use super::disturbance::Watch;
use crate::stop::Stop;
use launcher::JobPosition;
use node_coordinator::{Coordinator, Outcome};

pub(super) use worker::{SUBTASK, run_worker};

/// Processes of this test that use GPUs.
const WORKERS: usize = 1;

/// Entry point of the test's process.
pub(super) fn run(args: Vec<OsString>) -> Result<Measurements, ProbeFailure> {
    let params = args.into_iter().next().and_then(|text| serde_json::from_str::<CollectiveParams>(text.to_str()?).ok());
    let Some(params) = params else {
        return Err(ProbeFailure::new(FailureKind::Unparseable, "cannot parse the parameters of the collective test"));
    };
    let stop = Stop::on_signals()
        .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot install signal handlers: {error}")))?;
    if !params.nccl_tests.is_empty() {
        return with_nccl_tests(&params, &stop);
    }
    let position = match params.mode {
        Mode::Nodes => Some(
            JobPosition::find(&params.job, &|name| env::var(name).ok())
                .map_err(|error| ProbeFailure::new(FailureKind::Failed, error.to_string()))?,
        ),
        Mode::Nvlink | Mode::Loopback => None,
    };
    // The cluster's name of the node, if it is set.
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = env::var("DOCTOR_NODE_NAME").unwrap_or_else(|_| host());
    let watch = Watch::gpus(WORKERS, &stop);
    let outcome = match Coordinator::begin(&params, position.as_ref(), name, &watch, &stop).and_then(Coordinator::run) {
        Ok(outcome) => outcome,
        Err(failure) => return watch.report(Err(failure), RatesOf::AllGpus),
    };
    print(&outcome);
    let mut measured = judged(&params, outcome);
    measured.metrics.extend(watch.watched_metric());
    Ok(measured)
}

/// Runs NVIDIA's program instead of our worker. A launcher starts an unknown number of processes.
fn with_nccl_tests(params: &CollectiveParams, stop: &Stop) -> Result<Measurements, ProbeFailure> {
    let own_processes = if params.nccl_tests.len() == 1 { 1 } else { usize::MAX };
    let watch = Watch::gpus(own_processes, stop);
    let result = nccl_tests::run(params, stop);
    let is_single = |measured: &Measurements| {
        measured.metrics.iter().any(|metric| metric.name == GPU_COUNT_METRIC && metric.value == 1.0)
    };
    // With one GPU the test measures no rates, so other processes on it cannot falsify any.
    if result.as_ref().is_ok_and(is_single) { result } else { watch.report(result, RatesOf::AllGpus) }
}

fn judged(params: &CollectiveParams, outcome: Outcome) -> Measurements {
    let Outcome { reports, own, paths, nccl, stop_reason, warnings } = outcome;
    let mut measured = measurements(params.mode, &reports, own, paths, nccl);
    let is_explained = !measured.events.iter().all(Event::is_disturbance) || !measured.failures.is_empty();
    if let Some(stop_reason) = stop_reason.filter(|_| !is_explained) {
        measured.failures.push(ProbeFailure::new(FailureKind::Failed, stop_reason));
    }
    // NCCL's log explains its failures.
    let of_nccl = measured.failures.iter_mut().find(|failure| failure.kind != FailureKind::Disturbed);
    if let (Some(failure), Some(warning)) = (of_nccl, warnings.first()) {
        failure.text = format!("{}; NCCL warned: {warning}", failure.text);
    }
    measured
}

/// Prints the table of sizes to the log of the run.
fn print(outcome: &Outcome) {
    let gpus: usize = outcome.reports.iter().map(|node| node.gpus.len()).sum();
    eprintln!("{gpus} GPUs of {} nodes, NCCL {}", outcome.reports.len(), version(outcome.nccl));
    eprintln!("{:>14} {:>12} {:>12} {:>8}", "bytes", "us", "bus GB/s", "wrong");
    for (bytes, seconds, bandwidth, wrong) in bandwidth_table(&outcome.reports) {
        eprintln!("{bytes:>14} {:>12.1} {:>12.2} {wrong:>8}", seconds * 1e6, bandwidth / 1e9);
    }
    for link in ring_links(&outcome.reports) {
        let end = |(node, gpu): LinkEnd<'_>| format!("{} {}", node.node, gpu.gpu);
        eprintln!("{} to {}: {:.2} GB/s", end(link.from), end(link.to), link.rate / 1e9);
    }
}

/// Formats NCCL's version number: 22809 is 2.28.9.
fn version(number: u32) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}
