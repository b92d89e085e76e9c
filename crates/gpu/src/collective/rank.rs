//! One rank: joins, and for each size fills its share, reduces with the others, compares the result, and measures the time.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use doctor_checks::{
    collective_params::CollectiveParams,
    collective_report::{GpuReport, RankFailure, SizeReport, WrongElement},
};

use super::{RankBarrier, Task, test_values::TestValues, value_kernels::ValueKernels};
use crate::{
    cuda::{Buffer, Cuda, CudaError, Gpu},
    nccl::{Communicator, Nccl, NcclError},
};

/// A value that no sum has: all bits set, a NaN. An element that is not written is therefore wrong.
const POISON: u32 = u32::MAX;

/// Milliseconds on the fastest link: long against the skew with which ranks start.
const MAX_RING_BYTES: u64 = 1 << 30;
/// Several rounds, because the first also pays for setting up the connection.
const RING_ROUNDS: usize = 6;
/// The seed space of these messages, disjoint from that of sums.
const RING_SEED: u32 = 1 << 31;

/// Why a rank did not finish.
#[derive(Debug, thiserror::Error)]
enum RankError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error("{what} did not complete within {limit:?}")]
    Hung { what: String, limit: Duration },
    #[error("{0}")]
    ControlFailed(String),
    #[error("stopped by the coordinator")]
    Stopped,
}

impl RankError {
    fn into_failure(self) -> RankFailure {
        let text = self.to_string();
        match self {
            Self::Cuda(error) if error.is_hardware() => RankFailure::GpuLost(text),
            Self::Nccl(error) if error.is_remote_error() => RankFailure::PeerLost(text),
            Self::Cuda(_) | Self::Nccl(_) => RankFailure::Failed(text),
            Self::Hung { .. } => RankFailure::Hung(text),
            Self::ControlFailed(_) => RankFailure::ControlFailed(text),
            Self::Stopped => RankFailure::Stopped,
        }
    }
}

pub(super) fn run(cuda: &Cuda, nccl: &Nccl, index: usize, bus: &str, task: &Task, steps: &RankBarrier<'_>) {
    let number = task.first_rank + index as u32;
    let mut report = GpuReport { rank: number, gpu: bus.to_owned(), sizes: Vec::new(), exchange: None, failure: None };
    let gpu = match cuda.gpu(index) {
        Ok(gpu) => gpu,
        Err(error) => {
            report.failure = Some(RankError::from(error).into_failure());
            return (steps.report)(report);
        }
    };
    let rank = match Rank::join(&gpu, nccl, number, task, steps) {
        Ok(rank) => rank,
        Err(failure) => {
            report.failure = Some(failure.into_failure());
            return (steps.report)(report);
        }
    };
    report.failure = rank.work(&mut report).err().map(RankError::into_failure);
    // Reported before the rank is released, because ending a communicator that hangs may hang.
    (steps.report)(report);
}

struct Rank<'a> {
    // Declared first: dropped before the memory that it works on.
    communicator: Communicator<'a>,
    share: Buffer<'a>,
    sum: Buffer<'a>,
    values: ValueKernels<'a>,
    gpu: &'a Gpu<'a>,
    task: &'a Task,
    steps: &'a RankBarrier<'a>,
    rank: u32,
}

impl<'a> Rank<'a> {
    fn join(
        gpu: &'a Gpu<'a>,
        nccl: &'a Nccl,
        number: u32,
        task: &'a Task,
        steps: &'a RankBarrier<'a>,
    ) -> Result<Self, RankError> {
        let values = ValueKernels::load(gpu)?;
        if let Some(problem) = values.negative_control(task.ranks)? {
            return Err(RankError::ControlFailed(format!("the test does not detect planted errors: {problem}")));
        }
        let max_bytes = task.sizes.last().copied().unwrap_or_default() as usize;
        let (share, sum) = (gpu.allocate(max_bytes)?, gpu.allocate(max_bytes)?);
        wait_at_barrier(steps, 0)?;
        let communicator = nccl.join(gpu, task.id, number, task.ranks)?;
        Ok(Self { communicator, share, sum, values, gpu, task, steps, rank: number })
    }

    fn work(&self, report: &mut GpuReport) -> Result<(), RankError> {
        let deadline = Instant::now() + self.task.stall;
        self.communicator
            .ready(&|| self.should_continue(deadline))
            .map_err(|error| self.aborted_as_hung(error, "connecting the ranks"))?;
        for (number, bytes) in self.task.sizes.iter().enumerate() {
            wait_at_barrier(self.steps, number + 1)?;
            report.sizes.push(self.one_size(number as u32, *bytes)?);
        }
        let sums = self.task.sizes.len() + 1;
        report.exchange = Some(self.ring_exchange(sums)?);
        // No rank leaves while another still needs its resources.
        wait_at_barrier(self.steps, sums + RING_ROUNDS)
    }

    /// Exchanges data with the neighbouring ranks in a ring. If a sum is slow, this shows between which two ranks.
    ///
    /// All ranks start together, once per round: back to back, every rank would soon run at the pace of the slowest.
    /// The best round counts, because a rank that starts a little earlier waits for its neighbour.
    fn ring_exchange(&self, first_step: usize) -> Result<SizeReport, RankError> {
        let ranks = self.task.ranks;
        let (next, before) = ((self.rank + 1) % ranks, (self.rank + ranks - 1) % ranks);
        let bytes = self.task.sizes.last().copied().unwrap_or_default().min(MAX_RING_BYTES);
        let count = bytes as usize / size_of::<f32>();
        // A sum of one share; each rank's message differs.
        let message = |rank: u32| TestValues::new(1, RING_SEED ^ rank);
        let shares = || self.values.fill(message(self.rank), 0, &self.share, count);
        let exchange = |keep_waiting: &dyn Fn() -> bool| {
            self.communicator.exchange((&self.share, next), (&self.sum, before), count, keep_waiting)
        };
        let mut seconds = f64::INFINITY;
        for round in 0..RING_ROUNDS {
            wait_at_barrier(self.steps, first_step + round)?;
            seconds = seconds.min(self.pass(bytes, 1, shares, exchange)?);
        }
        let (wrong, listed) = self.values.check(message(before), &self.sum, count)?;
        // The message is no sum, so no rank's share can be missing from it.
        let listed = listed.into_iter().map(|element| WrongElement { missing_rank: None, ..element }).collect();
        Ok(SizeReport { bytes, seconds, wrong, wrong_elements: listed })
    }

    /// Compares the sums before and after the timed pass, with different numbers: data left from the first pass is
    /// wrong in the second.
    fn one_size(&self, number: u32, bytes: u64) -> Result<SizeReport, RankError> {
        let (first, mut listed, _) = self.sum(2 * number, bytes, 1)?;
        let (second, more, seconds) = self.sum(2 * number + 1, bytes, CollectiveParams::repeats(bytes))?;
        listed.extend(more);
        Ok(SizeReport { bytes, seconds, wrong: first + second, wrong_elements: listed })
    }

    fn sum(&self, seed: u32, bytes: u64, repeats: u32) -> Result<(u64, Vec<WrongElement>, f64), RankError> {
        let count = bytes as usize / size_of::<f32>();
        let numbers = TestValues::new(self.task.ranks, seed);
        let shares = || self.values.fill(numbers, self.rank, &self.share, count);
        let add_up =
            |keep_waiting: &dyn Fn() -> bool| self.communicator.all_reduce(&self.share, &self.sum, count, keep_waiting);
        let seconds = self.pass(bytes, repeats, shares, add_up)?;
        let (wrong, listed) = self.values.check(numbers, &self.sum, count)?;
        Ok((wrong, listed, seconds))
    }

    /// Returns the seconds per repeat, with the receive buffer poisoned before.
    fn pass(
        &self,
        bytes: u64,
        repeats: u32,
        fill: impl FnOnce() -> Result<(), CudaError>,
        once: impl Fn(&dyn Fn() -> bool) -> Result<(), NcclError>,
    ) -> Result<f64, RankError> {
        fill()?;
        self.sum.fill(POISON)?;
        self.gpu.synchronize()?;
        let deadline = Instant::now() + self.task.stall;
        let what = || format!("a message of {bytes} bytes");
        let keep_waiting = || self.should_continue(deadline);
        let ask = |times| {
            (0..times).try_for_each(|_| once(&keep_waiting).map_err(|error| self.aborted_as_hung(error, &what())))
        };
        if repeats > 1 {
            // Not timed: when it completes, all ranks have arrived.
            ask(1)?;
        }
        let seconds = self.gpu.timed_while(
            || ask(repeats),
            || {
                self.communicator.async_error()?;
                Ok::<_, RankError>(self.should_continue(deadline))
            },
        )?;
        // An operation that was aborted because another rank left looks complete, and its sum wrong.
        self.communicator.async_error()?;
        seconds.map(|seconds| seconds / f64::from(repeats)).ok_or_else(|| self.hung_or_stopped(&what()))
    }

    fn should_continue(&self, deadline: Instant) -> bool {
        !self.steps.stop.load(Ordering::Relaxed) && Instant::now() < deadline
    }

    fn aborted_as_hung(&self, error: NcclError, what: &str) -> RankError {
        match error {
            NcclError::Aborted { .. } => self.hung_or_stopped(what),
            other => other.into(),
        }
    }

    fn hung_or_stopped(&self, what: &str) -> RankError {
        if self.steps.stop.load(Ordering::Relaxed) {
            return RankError::Stopped;
        }
        RankError::Hung { what: what.to_owned(), limit: self.task.stall }
    }
}

fn wait_at_barrier(steps: &RankBarrier<'_>, number: usize) -> Result<(), RankError> {
    if (steps.wait)(number) { Ok(()) } else { Err(RankError::Stopped) }
}
