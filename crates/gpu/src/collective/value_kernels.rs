//! Shares and sums on the GPU: filling a message, comparing the result, and proving that errors are detected.

use doctor_checks::collective_report::WrongElement;

use super::test_values::TestValues;
use crate::cuda::{Argument, Attribute, Buffer, CudaError, Gpu, Launch, Module};

const KERNELS: &str = include_str!("../../kernels/collective.ptx");

/// Further wrong elements are counted but not listed.
const MAX_LISTED: u32 = 64;
/// The size in words of `struct Wrong` in the kernel.
const WRONG_WORDS: usize = 4;

/// The kernels on one GPU.
#[derive(Debug)]
pub(super) struct ValueKernels<'g> {
    gpu: &'g Gpu<'g>,
    module: Module<'g>,
    launch: Launch,
    count: Buffer<'g>,
    listed: Buffer<'g>,
}

impl<'g> ValueKernels<'g> {
    pub(super) fn load(gpu: &'g Gpu<'g>) -> Result<Self, CudaError> {
        let multiprocessors = gpu.attribute(Attribute::Multiprocessors)?.unsigned_abs();
        Ok(Self {
            gpu,
            module: gpu.module(KERNELS)?,
            launch: Launch::new(multiprocessors * 8, 256),
            count: gpu.allocate(8)?,
            listed: gpu.allocate(MAX_LISTED as usize * WRONG_WORDS * 4)?,
        })
    }

    /// Enqueues the fill of the first `count` numbers with this rank's shares.
    pub(super) fn fill(&self, numbers: TestValues, rank: u32, to: &Buffer<'_>, count: usize) -> Result<(), CudaError> {
        let arguments = [to.into(), (count as u64).into(), rank.into(), numbers.seed.into(), numbers.range.into()];
        self.module.function("fill_shares")?.launch(self.launch, &arguments)
    }

    /// Compares every number with the expected sum. Returns how many are wrong, and which.
    pub(super) fn check(
        &self,
        numbers: TestValues,
        sums: &Buffer<'_>,
        count: usize,
    ) -> Result<(u64, Vec<WrongElement>), CudaError> {
        self.count.fill(0)?;
        let TestValues { ranks, range, seed } = numbers;
        let (wrong_count, wrong_elements) = (Argument::Buffer(&self.count), Argument::Buffer(&self.listed));
        let count = (count as u64).into();
        let arguments = [
            sums.into(),
            count,
            ranks.into(),
            seed.into(),
            range.into(),
            wrong_count,
            wrong_elements,
            MAX_LISTED.into(),
        ];
        self.module.function("check_sums")?.launch(self.launch, &arguments)?;
        let wrong_count = self.count.read::<u64>(1)?[0];
        if wrong_count == 0 {
            return Ok((0, Vec::new()));
        }
        let encoded = self.listed.read::<u32>(wrong_count.min(u64::from(MAX_LISTED)) as usize * WRONG_WORDS)?;
        let element = |word: &[u32]| {
            let index = u64::from(word[0]) | u64::from(word[1]) << 32;
            let missing_rank = numbers.missing_rank(index, f32::from_bits(word[3]));
            WrongElement { index, expected: word[2], got: word[3], missing_rank }
        };
        let mut wrong_elements: Vec<_> = encoded.chunks_exact(WRONG_WORDS).map(element).collect();
        wrong_elements.sort_by_key(|element| element.index);
        Ok((wrong_count, wrong_elements))
    }

    /// Injects errors into correct sums and verifies that each is found at its position, and nothing else.
    ///
    /// The correct sums come from the host, so the two implementations are compared as well.
    pub(super) fn negative_control(&self, ranks: u32) -> Result<Option<String>, CudaError> {
        const COUNT: usize = 1 << 14;
        let numbers = TestValues::new(ranks, u32::MAX);
        let sums: Vec<f32> = (0..COUNT as u64).map(|index| numbers.sum(index)).collect();
        let buffer = self.gpu.upload(&sums)?;
        let (wrong_count, wrong_elements) = self.check(numbers, &buffer, COUNT)?;
        if wrong_count > 0 {
            return Ok(Some(format!(
                "{wrong_count} correct sums were reported as wrong, such as index {}",
                wrong_elements[0].index
            )));
        }
        let sum = |index: u64| sums[index as usize];
        let without = |index: u64| sum(index) - sum(index).signum() * numbers.share(index, ranks - 1) as f32;
        // A lost value, a flipped bit, a NaN, a neighbour's value, and a sum without the last rank's share.
        let injected = [
            (3u64, 0u32, 0u32),
            (4_097, 1, 1 << 13),
            (8_190, 2, 0),
            (12_001, 3, sum(12_002).to_bits()),
            (16_383, 3, without(16_383).to_bits()),
        ];
        for (index, kind, value) in injected {
            let arguments = [(&buffer).into(), index.into(), kind.into(), value.into()];
            self.module.function("plant_number")?.launch(Launch::new(1, 1), &arguments)?;
        }
        let (wrong_count, wrong_elements) = self.check(numbers, &buffer, COUNT)?;
        let found_indices: Vec<u64> = wrong_elements.iter().map(|element| element.index).collect();
        let indices = injected.map(|(index, ..)| index);
        let missing_rank = wrong_elements.last().and_then(|element| element.missing_rank);
        Ok((wrong_count != indices.len() as u64 || found_indices != indices || missing_rank != Some(ranks - 1))
            .then(|| format!("errors were planted at {indices:?}, and {wrong_count} were found, at {found_indices:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Driver 525 shipped with CUDA 12.0 and accepts PTX up to 8.0.
    #[test]
    fn the_kernels_are_ptx_that_the_oldest_supported_driver_accepts() {
        let mut lines = KERNELS.lines();
        assert_eq!((lines.next(), lines.next()), (Some(".version 8.0"), Some(".target sm_70")));
        for kernel in ["fill_shares", "check_sums", "plant_number"] {
            assert!(KERNELS.contains(&format!(".entry {kernel}(")), "{kernel}");
        }
    }
}
