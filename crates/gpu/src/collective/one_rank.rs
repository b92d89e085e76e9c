//! One rank: joins, and for each size fills its share, reduces with the others, compares the result, and measures the time.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use doctor_checks::{
    collective_order::CollectiveOrder,
    collective_report::{Broken, GpuReport, SizeReport, WrongElement},
};

use super::{Steps, Task, numbers::Numbers, values::Values};
use crate::{
    cuda::{Buffer, Cuda, CudaError, Gpu},
    nccl::{Communicator, Nccl, NcclError},
};

/// A value that no sum has: all bits set, a NaN. An element that is not written is therefore wrong.
const POISON: u32 = u32::MAX;

/// Milliseconds on the fastest link: long against the skew with which ranks start.
const MOST_PASSED_ON: u64 = 1 << 30;
/// Several rounds, because the first also pays for setting up the connection.
const ROUNDS: usize = 6;
/// The seed space of these messages, disjoint from that of sums.
const PASSED_ON: u32 = 1 << 31;

/// Why a rank did not finish.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error("{what} did not complete within {limit:?}")]
    Hung { what: String, limit: Duration },
    #[error("{0}")]
    Blind(String),
    #[error("stopped by the coordinator")]
    Stopped,
}

impl Ended {
    fn broken(self) -> Broken {
        let text = self.to_string();
        match self {
            Self::Cuda(error) if error.is_hardware() => Broken::Gpu(text),
            Self::Nccl(error) if error.is_of_another_rank() => Broken::Lost(text),
            Self::Cuda(_) | Self::Nccl(_) => Broken::Failed(text),
            Self::Hung { .. } => Broken::Hung(text),
            Self::Blind(_) => Broken::Blind(text),
            Self::Stopped => Broken::Stopped,
        }
    }
}

pub(super) fn run(cuda: &Cuda, nccl: &Nccl, index: usize, bus: &str, task: &Task, steps: &Steps<'_>) {
    let number = task.first_rank + index as u32;
    let mut report = GpuReport { rank: number, gpu: bus.to_owned(), sizes: Vec::new(), exchange: None, broken: None };
    let gpu = match cuda.gpu(index) {
        Ok(gpu) => gpu,
        Err(error) => {
            report.broken = Some(Ended::from(error).broken());
            return (steps.report)(report);
        }
    };
    let rank = match Rank::join(&gpu, nccl, number, task, steps) {
        Ok(rank) => rank,
        Err(ended) => {
            report.broken = Some(ended.broken());
            return (steps.report)(report);
        }
    };
    report.broken = rank.work(&mut report).err().map(Ended::broken);
    // Reported before the rank is released, because ending a communicator that hangs may hang.
    (steps.report)(report);
}

struct Rank<'a> {
    // Declared first: dropped before the memory that it works on.
    communicator: Communicator<'a>,
    share: Buffer<'a>,
    sum: Buffer<'a>,
    values: Values<'a>,
    gpu: &'a Gpu<'a>,
    task: &'a Task,
    steps: &'a Steps<'a>,
    number: u32,
}

impl<'a> Rank<'a> {
    fn join(
        gpu: &'a Gpu<'a>,
        nccl: &'a Nccl,
        number: u32,
        task: &'a Task,
        steps: &'a Steps<'a>,
    ) -> Result<Self, Ended> {
        let values = Values::load(gpu)?;
        if let Some(why) = values.sees_errors(task.ranks)? {
            return Err(Ended::Blind(format!("the test does not detect planted errors: {why}")));
        }
        let most = task.sizes.last().copied().unwrap_or_default() as usize;
        let (share, sum) = (gpu.allocate(most)?, gpu.allocate(most)?);
        step(steps, 0)?;
        let communicator = nccl.join(gpu, task.id, number, task.ranks)?;
        Ok(Self { communicator, share, sum, values, gpu, task, steps, number })
    }

    fn work(&self, report: &mut GpuReport) -> Result<(), Ended> {
        let deadline = Instant::now() + self.task.stall;
        self.communicator
            .ready(&|| self.goes_on(deadline))
            .map_err(|error| self.or_hung(error, "connecting the ranks"))?;
        for (number, bytes) in self.task.sizes.iter().enumerate() {
            step(self.steps, number + 1)?;
            report.sizes.push(self.one_size(number as u32, *bytes)?);
        }
        let sums = self.task.sizes.len() + 1;
        report.exchange = Some(self.pass_on(sums)?);
        // No rank leaves while another still needs its resources.
        step(self.steps, sums + ROUNDS)
    }

    /// Exchanges data with the neighbouring ranks in a ring. If a sum is slow, this shows between which two ranks.
    ///
    /// All ranks start together, once per round: back to back, every rank would soon run at the pace of the slowest.
    /// The best round counts, because a rank that starts a little earlier waits for its neighbour.
    fn pass_on(&self, first_step: usize) -> Result<SizeReport, Ended> {
        let ranks = self.task.ranks;
        let (next, before) = ((self.number + 1) % ranks, (self.number + ranks - 1) % ranks);
        let bytes = self.task.sizes.last().copied().unwrap_or_default().min(MOST_PASSED_ON);
        let count = bytes as usize / size_of::<f32>();
        // A sum of one share; each rank's message differs.
        let message = |rank: u32| Numbers::new(1, PASSED_ON ^ rank);
        let shares = || self.values.fill(message(self.number), 0, &self.share, count);
        let exchange = |go_on: &dyn Fn() -> bool| {
            self.communicator.exchange((&self.share, next), (&self.sum, before), count, go_on)
        };
        let mut seconds = f64::INFINITY;
        for round in 0..ROUNDS {
            step(self.steps, first_step + round)?;
            seconds = seconds.min(self.pass(bytes, 1, shares, exchange)?);
        }
        let (wrong, listed) = self.values.check(message(before), &self.sum, count)?;
        // The message is no sum, so no rank's share can be missing from it.
        let listed = listed.into_iter().map(|element| WrongElement { lost: None, ..element }).collect();
        Ok(SizeReport { bytes, seconds, wrong, listed })
    }

    /// Compares the sums before and after the timed pass, with different numbers: data left from the first pass is
    /// wrong in the second.
    fn one_size(&self, number: u32, bytes: u64) -> Result<SizeReport, Ended> {
        let (first, mut listed, _) = self.sum(2 * number, bytes, 1)?;
        let (second, more, seconds) = self.sum(2 * number + 1, bytes, CollectiveOrder::repeats(bytes))?;
        listed.extend(more);
        Ok(SizeReport { bytes, seconds, wrong: first + second, listed })
    }

    fn sum(&self, seed: u32, bytes: u64, repeats: u32) -> Result<(u64, Vec<WrongElement>, f64), Ended> {
        let count = bytes as usize / size_of::<f32>();
        let numbers = Numbers::new(self.task.ranks, seed);
        let shares = || self.values.fill(numbers, self.number, &self.share, count);
        let add_up = |go_on: &dyn Fn() -> bool| self.communicator.all_reduce(&self.share, &self.sum, count, go_on);
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
    ) -> Result<f64, Ended> {
        fill()?;
        self.sum.fill(POISON)?;
        self.gpu.synchronize()?;
        let deadline = Instant::now() + self.task.stall;
        let what = || format!("a message of {bytes} bytes");
        let go_on = || self.goes_on(deadline);
        let ask = |times| (0..times).try_for_each(|_| once(&go_on).map_err(|error| self.or_hung(error, &what())));
        if repeats > 1 {
            // Not timed: when it completes, all ranks have arrived.
            ask(1)?;
        }
        let seconds = self.gpu.timed_while(
            || ask(repeats),
            || {
                self.communicator.trouble()?;
                Ok::<_, Ended>(self.goes_on(deadline))
            },
        )?;
        // An operation that was aborted because another rank left looks complete, and its sum wrong.
        self.communicator.trouble()?;
        seconds.map(|seconds| seconds / f64::from(repeats)).ok_or_else(|| self.given_up(&what()))
    }

    fn goes_on(&self, deadline: Instant) -> bool {
        !self.steps.stop.load(Ordering::Relaxed) && Instant::now() < deadline
    }

    fn or_hung(&self, error: NcclError, what: &str) -> Ended {
        match error {
            NcclError::GivenUp { .. } => self.given_up(what),
            other => other.into(),
        }
    }

    fn given_up(&self, what: &str) -> Ended {
        if self.steps.stop.load(Ordering::Relaxed) {
            return Ended::Stopped;
        }
        Ended::Hung { what: what.to_owned(), limit: self.task.stall }
    }
}

fn step(steps: &Steps<'_>, number: usize) -> Result<(), Ended> {
    if (steps.wait)(number) { Ok(()) } else { Err(Ended::Stopped) }
}
