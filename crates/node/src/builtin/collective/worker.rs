//! The worker: the only process that loads CUDA and NCCL, with one thread per GPU.
//!
//! NCCL reads its variables when it is loaded, and both libraries may hang where only a kill helps. The worker is
//! therefore a separate process that exchanges lines with its node. It reports each GPU before it releases it.

use std::{
    env,
    ffi::OsString,
    io::{self, BufRead as _, Write as _},
    process::ExitCode,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use doctor_checks::{collective_params::CollectiveParams, collective_report::GpuReport};
use doctor_core::{
    hex,
    observation::{FailureKind, ProbeFailure},
};
use doctor_gpu::{
    collective::{LocalRanks, RankBarrier, Task},
    cuda,
    nccl::{self, ID_BYTES, UniqueId},
};
use rustix::process::Signal;

use super::messages::{OpenedGpus, StartParams, WorkerCommand, WorkerMessage};

/// The subtask name under which this program becomes the worker.
pub(in crate::builtin) const SUBTASK: &str = "collective-work";

pub(in crate::builtin) fn run_worker(args: &[OsString]) -> ExitCode {
    // The worker must not outlive its node.
    let _killed_with_it = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let params = args.first().and_then(|text| serde_json::from_str::<CollectiveParams>(text.to_str()?).ok());
    let Some(params) = params else {
        eprintln!("{SUBTASK} is internal to doctor-node");
        return ExitCode::FAILURE;
    };
    if let Err(failure) = run_ranks(&params) {
        send_message(&WorkerMessage::Failed(failure));
    }
    ExitCode::SUCCESS
}

/// Writes one line at a time: several ranks report.
fn send_message(message: &WorkerMessage) {
    let line = serde_json::to_string(message).unwrap_or_default();
    // Fails only if the node is gone.
    let _sent = writeln!(io::stdout().lock(), "{line}");
}

fn run_ranks(params: &CollectiveParams) -> Result<(), ProbeFailure> {
    let or = |variable: &str, default: &str| env::var_os(variable).unwrap_or_else(|| default.into());
    let nccl = params.library.as_ref().map_or_else(|| or("DOCTOR_NCCL", nccl::LIBRARY), OsString::from);
    let ranks = LocalRanks::open(&or("DOCTOR_CUDA", cuda::LIBRARY), &nccl)?;
    send_message(&WorkerMessage::Opened(OpenedGpus {
        gpus: ranks.gpus().to_vec(),
        free_bytes: ranks.max_message_bytes(),
        nccl: ranks.nccl_version()?,
    }));
    let gate = Gate::default();
    let (to_begin, begin_requests) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| listen(&ranks, &gate, to_begin));
        // Stopped before the start: there is nothing to report.
        if let Ok(begin) = begin_requests.recv() {
            match task(params, &begin) {
                Ok(task) => gate.run(&ranks, &task),
                Err(failure) => send_message(&WorkerMessage::Failed(failure)),
            }
        }
        // The listener blocks in a read until the node ends, so exit explicitly.
        std::process::exit(0)
    })
}

/// Handles messages of the node until it closes the pipe.
fn listen(ranks: &LocalRanks, gate: &Gate, begin: mpsc::Sender<StartParams>) {
    let mut begin = Some(begin);
    for line in io::stdin().lock().lines() {
        let Some(command) = line.ok().and_then(|line| serde_json::from_str::<WorkerCommand>(&line).ok()) else { break };
        match command {
            WorkerCommand::MakeId => match ranks.unique_id() {
                Ok(id) => send_message(&WorkerMessage::Id(hex::encode(id.bytes()))),
                Err(failure) => send_message(&WorkerMessage::Failed(failure)),
            },
            WorkerCommand::Begin(with) => drop(begin.take().map(|begin| begin.send(with))),
            WorkerCommand::GoToStep(step) => gate.go(step),
            WorkerCommand::Stop => {
                begin = None;
                gate.stop();
            }
        }
    }
    // The node is gone.
    std::process::exit(0);
}

fn task(params: &CollectiveParams, begin: &StartParams) -> Result<Task, ProbeFailure> {
    let invalid = |text: &str| ProbeFailure::new(FailureKind::Unparseable, text);
    let id = id(&begin.id).ok_or_else(|| invalid("the first node sent an invalid NCCL id"))?;
    let sizes = params.sizes(begin.free_bytes);
    if sizes.is_empty() {
        let text =
            format!("not enough GPU memory: {} bytes free, smallest message {} bytes", begin.free_bytes, params.least);
        return Err(ProbeFailure::new(FailureKind::Failed, text));
    }
    Ok(Task { id, first_rank: begin.first_rank, ranks: begin.ranks, sizes, stall: params.stall.to_std() })
}

fn id(text: &str) -> Option<UniqueId> {
    let bytes: [u8; ID_BYTES] = hex::decode(text)?.try_into().ok()?;
    Some(UniqueId::new(bytes))
}

/// Where the ranks of this node wait for the other nodes.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct GateState {
    /// Ranks that have reached the awaited step.
    waiting: usize,
    /// Number of steps that are released.
    open: usize,
}

impl Gate {
    fn run(&self, ranks: &LocalRanks, task: &Task) {
        let local_ranks = ranks.gpus().len();
        let report = |report: GpuReport| send_message(&WorkerMessage::Report(report));
        ranks.run(task, &RankBarrier { wait: &|step| self.wait(step, local_ranks), stop: &self.stop, report: &report });
    }

    fn wait(&self, step: usize, local_ranks: usize) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        if state.waiting == local_ranks {
            state.waiting = 0;
            send_message(&WorkerMessage::AtStep(step));
        }
        let closed = |state: &mut GateState| state.open <= step && !self.stop.load(Ordering::Relaxed);
        drop(self.changed.wait_while(state, closed).unwrap_or_else(PoisonError::into_inner));
        !self.stop.load(Ordering::Relaxed)
    }

    fn go(&self, step: usize) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).open = step + 1;
        self.changed.notify_all();
    }

    fn stop(&self) {
        // Under the lock, so that a rank that is about to wait does not miss it.
        let _state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.stop.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nccl_id_survives_encoding() {
        let bytes: [u8; ID_BYTES] = std::array::from_fn(|index| index as u8);
        assert_eq!(id(&hex::encode(&bytes)).unwrap().bytes(), &bytes);
        for invalid in ["", "00", &"g".repeat(256), &"+1".repeat(128)] {
            assert!(id(invalid).is_none(), "{invalid}");
        }
    }
}
