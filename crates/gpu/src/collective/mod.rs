//! The collective test: the GPUs of this machine as ranks of one all-reduce, each on its own thread, every element
//! compared.
//!
//! The ranks of all machines run in lockstep: before each size, and at the end, every rank waits for all others. The
//! caller provides the barrier and the stop signal ([`RankBarrier`]). A rank reports its results before it releases NCCL and
//! the driver, because that may hang.

mod rank;
mod test_values;
mod value_kernels;

use std::{ffi::OsStr, sync::atomic::AtomicBool, thread, time::Duration};

use doctor_checks::collective_report::GpuReport;
use doctor_core::observation::{FailureKind, ProbeFailure};

use crate::{
    cuda::{Cuda, CudaError},
    nccl::{Nccl, UniqueId},
};

/// The number of equal shares of free memory: two for the buffers of a message, one for NCCL and other processes.
const SHARE_OF_FREE: u64 = 3;

/// The GPUs of this machine, and the loaded libraries.
#[derive(Debug)]
pub struct LocalRanks {
    cuda: Cuda,
    nccl: Nccl,
    gpus: Vec<String>,
    max_message_bytes: u64,
}

/// The work of this machine's ranks in a job.
#[derive(Debug, Clone)]
pub struct Task {
    pub id: UniqueId,
    /// The rank of the first GPU on this machine; the others follow.
    pub first_rank: u32,
    pub ranks: u32,
    /// The sizes of the messages in bytes, ascending.
    pub sizes: Vec<u64>,
    /// The limit for one size, and for all ranks to join.
    pub stall: Duration,
}

/// How the ranks of all machines stay in lockstep.
pub struct RankBarrier<'a> {
    /// Called by every rank before each step; returns when all have arrived. `false`: stop.
    pub wait: &'a (dyn Fn(usize) -> bool + Sync),
    /// Set to stop a rank in the middle of a step.
    pub stop: &'a AtomicBool,
    /// Receives each rank's report when it has finished or failed.
    pub report: &'a (dyn Fn(GpuReport) + Sync),
}

impl std::fmt::Debug for RankBarrier<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Steps")
    }
}

impl LocalRanks {
    /// Loads both libraries and opens the GPUs.
    ///
    /// # Errors
    /// Fails without a GPU, its driver, or NCCL.
    pub fn open(cuda: &OsStr, nccl: &OsStr) -> Result<Self, ProbeFailure> {
        let cuda = Cuda::open(cuda).map_err(|error| error.failure())?;
        let count = cuda.count().map_err(|error| error.failure())?;
        if count == 0 {
            return Err(ProbeFailure::new(FailureKind::Missing, "the CUDA driver sees no GPU on this machine"));
        }
        let nccl = Nccl::open(nccl).map_err(|error| error.failure())?;
        let query_results = thread::scope(|scope| {
            let query = |index| {
                scope.spawn({
                    let cuda = &cuda;
                    move || query_gpu(cuda, index)
                })
            };
            let threads: Vec<_> = (0..count).map(query).collect();
            threads.into_iter().map(|thread| thread.join().expect("the query does not panic")).collect::<Vec<_>>()
        });
        let (mut gpus, mut max_message_bytes) = (Vec::new(), u64::MAX);
        for result in query_results {
            let (gpu, free) = result.map_err(|error| error.failure())?;
            gpus.push(gpu);
            max_message_bytes = max_message_bytes.min(free / SHARE_OF_FREE);
        }
        Ok(Self { cuda, nccl, gpus, max_message_bytes })
    }

    /// Returns the PCI addresses, in the driver's order.
    pub fn gpus(&self) -> &[String] {
        &self.gpus
    }

    /// Returns the largest message, in bytes, that fits on every GPU.
    pub const fn max_message_bytes(&self) -> u64 {
        self.max_message_bytes
    }

    /// Returns the version, such as 22809 for 2.28.9.
    ///
    /// # Errors
    /// Fails if NCCL does not report one.
    pub fn nccl_version(&self) -> Result<u32, ProbeFailure> {
        self.nccl.version().map_err(|error| error.failure())
    }

    /// Creates the id of a job, with this process as the rendezvous.
    ///
    /// # Errors
    /// Fails if NCCL finds no network interface, for instance.
    pub fn unique_id(&self) -> Result<UniqueId, ProbeFailure> {
        self.nccl.unique_id().map_err(|error| error.failure())
    }

    /// Runs all ranks of this machine to completion.
    pub fn run(&self, task: &Task, steps: &RankBarrier<'_>) {
        thread::scope(|scope| {
            for (index, gpu) in self.gpus.iter().enumerate() {
                scope.spawn(move || rank::run(&self.cuda, &self.nccl, index, gpu, task, steps));
            }
        });
    }
}

fn query_gpu(cuda: &Cuda, index: usize) -> Result<(String, u64), CudaError> {
    let gpu = cuda.gpu(index)?;
    Ok((gpu.bus_id()?.to_lowercase(), gpu.memory()?.0 as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_driver_there_is_no_measurement_and_the_reason_says_so() {
        let failure =
            LocalRanks::open(OsStr::new("libcuda-that-is-not-there.so"), OsStr::new("libnccl.so.2")).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Missing);
        assert!(failure.text.contains("libcuda-that-is-not-there.so cannot be loaded"), "{}", failure.text);
    }
}
