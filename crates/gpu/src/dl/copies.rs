//! Copies between host and device, within a device and between devices: their rate, and whether the data arrives intact.

use std::sync::{Mutex, PoisonError};

use super::memory::{MemoryTester, Pattern, word_at};
use crate::cuda::{CudaError, Gpu, HostBuffer};

/// The rate in bytes per second, and the number of 64-bit words that arrived wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CopyResult {
    pub rate: f64,
    pub wrong: u64,
}

/// The copies of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CopyReport {
    pub to_device: CopyResult,
    pub to_host: CopyResult,
    pub on_device: CopyResult,
}

/// Large enough for the full rate of PCIe 5, small enough to be pinned quickly.
const BYTES: usize = 128 << 20;
const REPEATS: usize = 5;

/// GPUs behind one PCIe switch share its uplink: together each would reach a part of the rate that a profile expects.
static HOST_LINK: Mutex<()> = Mutex::new(());

/// Runs the three kinds of copies that need no other GPU. Copies to and from the host run on one GPU at a time.
pub fn run<'g>(gpu: &'g Gpu<'g>, tester: &MemoryTester<'g>) -> Result<CopyReport, CudaError> {
    let mut host = gpu.allocate_host(BYTES / 8)?;
    let alone = HOST_LINK.lock().unwrap_or_else(PoisonError::into_inner);
    let (to_device, to_host) = (to_device(gpu, tester, &mut host)?, to_host(gpu, tester, &mut host)?);
    drop(alone);
    Ok(CopyReport { to_device, to_host, on_device: on_device(gpu, tester)? })
}

fn to_device(gpu: &Gpu<'_>, tester: &MemoryTester<'_>, host: &mut HostBuffer<'_>) -> Result<CopyResult, CudaError> {
    let (device, pattern) = (gpu.allocate(BYTES)?, Pattern::random(1));
    for (index, word) in host.iter_mut().enumerate() {
        *word = word_at(device.address() + index as u64 * 8, pattern);
    }
    let rate = median_rate(BYTES, || gpu.timed(|| device.load(host)))?;
    tester.verify(pattern, &device)?;
    Ok(CopyResult { rate, wrong: tester.take_wrong_words(pattern, &[device])?.0 })
}

fn to_host(gpu: &Gpu<'_>, tester: &MemoryTester<'_>, host: &mut HostBuffer<'_>) -> Result<CopyResult, CudaError> {
    let (device, pattern) = (gpu.allocate(BYTES)?, Pattern::random(2));
    tester.fill(pattern, &device)?;
    let rate = median_rate(BYTES, || gpu.timed(|| device.store(host)))?;
    gpu.synchronize()?;
    let right = |(index, word): (usize, &u64)| *word == word_at(device.address() + index as u64 * 8, pattern);
    Ok(CopyResult { rate, wrong: host.iter().enumerate().filter(|word| !right(*word)).count() as u64 })
}

/// Copies within the device. The expected value of a word depends on its address, so the data is copied there and back.
fn on_device(gpu: &Gpu<'_>, tester: &MemoryTester<'_>) -> Result<CopyResult, CudaError> {
    // Well beyond the cache.
    let bytes = 16 * BYTES;
    let (original, copy, pattern) = (gpu.allocate(bytes)?, gpu.allocate(bytes)?, Pattern::random(3));
    tester.fill(pattern, &original)?;
    // Each byte is read and written.
    let rate = median_rate(2 * bytes, || gpu.timed(|| copy.copy_from(&original, bytes)))?;
    original.fill(0)?;
    original.copy_from(&copy, bytes)?;
    tester.verify(pattern, &original)?;
    Ok(CopyResult { rate, wrong: tester.take_wrong_words(pattern, &[original])?.0 })
}

/// Copies from one GPU to another and back. Both are open on this thread; the testers belong to them.
pub fn between(from: &MemoryTester<'_>, to: &MemoryTester<'_>) -> Result<CopyResult, CudaError> {
    let (near, far, pattern) = (from.gpu(), to.gpu(), Pattern::random(4));
    far.make_current()?;
    far.enable_peer_access(near)?;
    let copy = far.allocate(BYTES)?;
    near.make_current()?;
    near.enable_peer_access(far)?;
    let original = near.allocate(BYTES)?;
    from.fill(pattern, &original)?;
    let rate = median_rate(BYTES, || near.timed(|| copy.copy_from_peer(&original, BYTES)))?;
    original.fill(0)?;
    original.copy_from_peer(&copy, BYTES)?;
    from.verify(pattern, &original)?;
    let wrong_words = from.take_wrong_words(pattern, std::slice::from_ref(&original))?.0;
    Ok(CopyResult { rate, wrong: wrong_words })
}

fn median_rate(bytes: usize, mut copy: impl FnMut() -> Result<f64, CudaError>) -> Result<f64, CudaError> {
    // The first copy also pays for setting up the path.
    copy()?;
    let mut rates =
        (0..REPEATS).map(|_| copy().map(|seconds| bytes as f64 / seconds)).collect::<Result<Vec<_>, _>>()?;
    rates.sort_by(f64::total_cmp);
    Ok(rates[REPEATS / 2])
}
