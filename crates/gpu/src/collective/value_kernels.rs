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
        got: &Buffer<'_>,
        count: usize,
    ) -> Result<(u64, Vec<WrongElement>), CudaError> {
        self.count.fill(0)?;
        let TestValues { ranks, range, seed } = numbers;
        let (wrong, listed) = (Argument::Buffer(&self.count), Argument::Buffer(&self.listed));
        let count = (count as u64).into();
        let arguments = [got.into(), count, ranks.into(), seed.into(), range.into(), wrong, listed, MAX_LISTED.into()];
        self.module.function("check_sums")?.launch(self.launch, &arguments)?;
        let wrong = self.count.read::<u64>(1)?[0];
        if wrong == 0 {
            return Ok((0, Vec::new()));
        }
        let words = self.listed.read::<u32>(wrong.min(u64::from(MAX_LISTED)) as usize * WRONG_WORDS)?;
        let element = |word: &[u32]| {
            let place = u64::from(word[0]) | u64::from(word[1]) << 32;
            let lost = numbers.missing_rank(place, f32::from_bits(word[3]));
            WrongElement { place, expected: word[2], got: word[3], lost }
        };
        let mut listed: Vec<_> = words.chunks_exact(WRONG_WORDS).map(element).collect();
        listed.sort_by_key(|element| element.place);
        Ok((wrong, listed))
    }

    /// Injects errors into correct sums and verifies that each is found at its position, and nothing else.
    ///
    /// The correct sums come from the host, so the two implementations are compared as well.
    pub(super) fn negative_control(&self, ranks: u32) -> Result<Option<String>, CudaError> {
        const COUNT: usize = 1 << 14;
        let numbers = TestValues::new(ranks, u32::MAX);
        let sums: Vec<f32> = (0..COUNT as u64).map(|place| numbers.sum(place)).collect();
        let buffer = self.gpu.upload(&sums)?;
        let (wrong, listed) = self.check(numbers, &buffer, COUNT)?;
        if wrong > 0 {
            return Ok(Some(format!("{wrong} correct sums were reported as wrong, such as index {}", listed[0].place)));
        }
        let sum = |place: u64| sums[place as usize];
        let without = |place: u64| sum(place) - sum(place).signum() * numbers.share(place, ranks - 1) as f32;
        // A lost value, a flipped bit, a NaN, a neighbour's value, and a sum without the last rank's share.
        let planted = [
            (3u64, 0u32, 0u32),
            (4_097, 1, 1 << 13),
            (8_190, 2, 0),
            (12_001, 3, sum(12_002).to_bits()),
            (16_383, 3, without(16_383).to_bits()),
        ];
        for (place, kind, value) in planted {
            let arguments = [(&buffer).into(), place.into(), kind.into(), value.into()];
            self.module.function("plant_number")?.launch(Launch::new(1, 1), &arguments)?;
        }
        let (wrong, listed) = self.check(numbers, &buffer, COUNT)?;
        let found: Vec<u64> = listed.iter().map(|element| element.place).collect();
        let places = planted.map(|(place, ..)| place);
        let lost = listed.last().and_then(|element| element.lost);
        Ok((wrong != places.len() as u64 || found != places || lost != Some(ranks - 1))
            .then(|| format!("errors were planted at {places:?}, and {wrong} were found, at {found:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Driver 525 shipped with CUDA 12.0 and accepts PTX up to 8.0.
    #[test]
    fn the_kernels_are_ptx_that_the_oldest_driver_understands() {
        let mut lines = KERNELS.lines();
        assert_eq!((lines.next(), lines.next()), (Some(".version 8.0"), Some(".target sm_80")));
        for kernel in ["fill_shares", "check_sums", "plant_number"] {
            assert!(KERNELS.contains(&format!(".entry {kernel}(")), "{kernel}");
        }
    }
}
