//! The collective test: the GPUs of this machine as ranks of one all-reduce, each on a thread of its own, every element
//! compared.
//!
//! The ranks of several machines go in step: before each size, and at the end, every rank waits until all are there. Who
//! holds them back or tells them to stop is the caller's business ([`Steps`]). A rank tells what it has seen before it lets
//! go of NCCL and the driver, because letting go may hang.

mod numbers;
mod one_rank;
mod values;

use std::{ffi::OsStr, sync::atomic::AtomicBool, thread, time::Duration};

use doctor_checks::collective_report::GpuReport;
use doctor_core::observation::{FailureKind, ProbeFailure};

use crate::{
    cuda::{Cuda, CudaError},
    nccl::{Nccl, UniqueId},
};

/// Two messages, and as much again for what NCCL and others take.
const SHARE_OF_FREE: u64 = 3;

/// The GPUs of this machine, with the libraries to use them.
#[derive(Debug)]
pub struct Ranks {
    cuda: Cuda,
    nccl: Nccl,
    gpus: Vec<String>,
    room: u64,
}

/// What the ranks of this machine do in a job.
#[derive(Debug, Clone)]
pub struct Task {
    pub id: UniqueId,
    /// Of the first GPU here; the others follow.
    pub first_rank: u32,
    pub ranks: u32,
    /// Bytes of each message, ascending.
    pub sizes: Vec<u64>,
    /// How long one size may take, and how long all ranks may take to find each other.
    pub stall: Duration,
}

/// How the ranks of all machines keep in step.
pub struct Steps<'a> {
    /// Called by every rank before each step; comes back when all are there. `false`: stop.
    pub wait: &'a (dyn Fn(usize) -> bool + Sync),
    /// Set when a rank should stop in the middle of a step.
    pub stop: &'a AtomicBool,
    /// Hears of each rank when it is done or broken.
    pub report: &'a (dyn Fn(GpuReport) + Sync),
}

impl std::fmt::Debug for Steps<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Steps")
    }
}

impl Ranks {
    /// Loads both libraries and looks at the GPUs.
    ///
    /// # Errors
    /// Without a GPU, its driver, or NCCL.
    pub fn open(cuda: &OsStr, nccl: &OsStr) -> Result<Self, ProbeFailure> {
        let cuda = Cuda::open(cuda).map_err(|error| error.failure())?;
        let count = cuda.count().map_err(|error| error.failure())?;
        if count == 0 {
            return Err(ProbeFailure::new(FailureKind::Missing, "the CUDA driver sees no GPU on this machine"));
        }
        let nccl = Nccl::open(nccl).map_err(|error| error.failure())?;
        let looked = thread::scope(|scope| {
            let look = |index| {
                scope.spawn({
                    let cuda = &cuda;
                    move || look(cuda, index)
                })
            };
            let threads: Vec<_> = (0..count).map(look).collect();
            threads.into_iter().map(|thread| thread.join().expect("looking does not panic")).collect::<Vec<_>>()
        });
        let (mut gpus, mut room) = (Vec::new(), u64::MAX);
        for seen in looked {
            let (gpu, free) = seen.map_err(|error| error.failure())?;
            gpus.push(gpu);
            room = room.min(free / SHARE_OF_FREE);
        }
        Ok(Self { cuda, nccl, gpus, room })
    }

    /// Addresses on the bus, in the driver's order.
    pub fn gpus(&self) -> &[String] {
        &self.gpus
    }

    /// The largest message that every GPU has room for.
    pub const fn room(&self) -> u64 {
        self.room
    }

    /// As 22809 for 2.28.9.
    ///
    /// # Errors
    /// If NCCL does not say.
    pub fn nccl_version(&self) -> Result<u32, ProbeFailure> {
        self.nccl.version().map_err(|error| error.failure())
    }

    /// Begins a job, of which this process is the place to meet.
    ///
    /// # Errors
    /// If NCCL finds no network interface, for instance.
    pub fn unique_id(&self) -> Result<UniqueId, ProbeFailure> {
        self.nccl.unique_id().map_err(|error| error.failure())
    }

    /// Runs all ranks of this machine to their end.
    pub fn run(&self, task: &Task, steps: &Steps<'_>) {
        thread::scope(|scope| {
            for (index, gpu) in self.gpus.iter().enumerate() {
                scope.spawn(move || one_rank::run(&self.cuda, &self.nccl, index, gpu, task, steps));
            }
        });
    }
}

fn look(cuda: &Cuda, index: usize) -> Result<(String, u64), CudaError> {
    let gpu = cuda.gpu(index)?;
    Ok((gpu.bus_id()?.to_lowercase(), gpu.memory()?.0 as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_driver_there_is_no_measurement_and_the_reason_says_so() {
        let failure = Ranks::open(OsStr::new("libcuda-that-is-not-there.so"), OsStr::new("libnccl.so.2")).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Missing);
        assert!(failure.text.contains("libcuda-that-is-not-there.so cannot be loaded"), "{}", failure.text);
    }
}
