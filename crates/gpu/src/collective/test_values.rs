//! The number that each rank contributes to a sum. `kernels/collective.cu` computes the same, and each run compares the two.

/// All integers up to this one are exact in f32.
const MAX_EXACT_INTEGER: u32 = 1 << 24;
/// A larger range would not detect more errors.
const MAX_RANGE: u32 = 1 << 20;

/// The numbers of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TestValues {
    pub(super) ranks: u32,
    /// Shares are from 1 to this.
    pub(super) range: u32,
    pub(super) seed: u32,
}

impl TestValues {
    /// Chooses the range such that sums stay exact for any number of ranks that a job can have.
    pub(super) const fn new(ranks: u32, seed: u32) -> Self {
        let exact = MAX_EXACT_INTEGER / ranks;
        let range = if exact < MAX_RANGE { exact } else { MAX_RANGE };
        // Seeds are consecutive; hashing spreads their bits.
        Self { ranks, range, seed: hash(seed ^ 0x5bf0_3635) }
    }

    /// Returns the share of one rank at one position, without the sign.
    pub(super) fn share(&self, index: u64, rank: u32) -> u32 {
        let mixed = hash(self.hash_index(index).wrapping_add((rank + 1).wrapping_mul(0x85eb_ca6b)));
        1 + ((u64::from(mixed) * u64::from(self.range)) >> 32) as u32
    }

    pub(super) fn sum(&self, index: u64) -> f32 {
        let size = (0..self.ranks).map(|rank| self.share(index, rank)).sum::<u32>() as f32;
        if self.hash_index(index) & 1 == 1 { -size } else { size }
    }

    /// Returns the rank whose share a wrong sum lacks, if exactly one fits.
    pub(super) fn missing_rank(&self, index: u64, value: f32) -> Option<u32> {
        let lacks = (self.sum(index).abs() - value.abs()) as i64;
        if !value.is_finite() || value.fract() != 0.0 {
            return None;
        }
        let mut ranks = (0..self.ranks).filter(|rank| i64::from(self.share(index, *rank)) == lacks);
        ranks.next().filter(|_| ranks.next().is_none())
    }

    const fn hash_index(&self, index: u64) -> u32 {
        hash(index as u32 ^ self.seed).wrapping_add(((index >> 32) as u32).wrapping_mul(0x9e37_79b9))
    }
}

const fn hash(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x21f0_aaad);
    x ^= x >> 15;
    x = x.wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_never_zero_and_have_both_signs() {
        for ranks in [2, 8, 16, 72, 4096] {
            let numbers = TestValues::new(ranks, 1);
            assert!(u64::from(numbers.range) * u64::from(ranks) <= u64::from(MAX_EXACT_INTEGER));
            let sums: Vec<_> = (0..200u64).map(|index| numbers.sum(index << 25)).collect();
            assert!(sums.iter().all(|sum| sum.abs() >= ranks as f32 && sum.fract() == 0.0), "{ranks}");
            assert!(sums.iter().any(|sum| *sum < 0.0) && sums.iter().any(|sum| *sum > 0.0));
        }
    }

    #[test]
    fn a_missing_share_identifies_its_rank_and_other_errors_identify_none() {
        let numbers = TestValues::new(8, 3);
        for index in 0..1000 {
            let (sum, sign) = (numbers.sum(index), numbers.sum(index).signum());
            for rank in 0..8 {
                let without = sum - sign * numbers.share(index, rank) as f32;
                assert_eq!(numbers.missing_rank(index, without), Some(rank), "{index}");
            }
            for value in [0.0, f32::NAN, f32::INFINITY, sum + sign, sum + 0.5 * sign] {
                assert_eq!(numbers.missing_rank(index, value), None, "{index} {value}");
            }
        }
    }
}
