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
    pub(super) fn share(&self, place: u64, rank: u32) -> u32 {
        let mixed = hash(self.hash_index(place).wrapping_add((rank + 1).wrapping_mul(0x85eb_ca6b)));
        1 + ((u64::from(mixed) * u64::from(self.range)) >> 32) as u32
    }

    pub(super) fn sum(&self, place: u64) -> f32 {
        let size = (0..self.ranks).map(|rank| self.share(place, rank)).sum::<u32>() as f32;
        if self.hash_index(place) & 1 == 1 { -size } else { size }
    }

    /// Returns the rank whose share a wrong sum lacks, if exactly one fits.
    pub(super) fn missing_rank(&self, place: u64, got: f32) -> Option<u32> {
        let lacks = (self.sum(place).abs() - got.abs()) as i64;
        if !got.is_finite() || got.fract() != 0.0 {
            return None;
        }
        let mut ranks = (0..self.ranks).filter(|rank| i64::from(self.share(place, *rank)) == lacks);
        ranks.next().filter(|_| ranks.next().is_none())
    }

    const fn hash_index(&self, place: u64) -> u32 {
        hash(place as u32 ^ self.seed).wrapping_add(((place >> 32) as u32).wrapping_mul(0x9e37_79b9))
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
            let sums: Vec<_> = (0..200u64).map(|place| numbers.sum(place << 25)).collect();
            assert!(sums.iter().all(|sum| sum.abs() >= ranks as f32 && sum.fract() == 0.0), "{ranks}");
            assert!(sums.iter().any(|sum| *sum < 0.0) && sums.iter().any(|sum| *sum > 0.0));
        }
    }

    #[test]
    fn a_lost_share_is_told_by_its_rank_and_anything_else_is_not_explained() {
        let numbers = TestValues::new(8, 3);
        for place in 0..1000 {
            let (sum, sign) = (numbers.sum(place), numbers.sum(place).signum());
            for rank in 0..8 {
                let without = sum - sign * numbers.share(place, rank) as f32;
                assert_eq!(numbers.missing_rank(place, without), Some(rank), "{place}");
            }
            for got in [0.0, f32::NAN, f32::INFINITY, sum + sign, sum + 0.5 * sign] {
                assert_eq!(numbers.missing_rank(place, got), None, "{place} {got}");
            }
        }
    }
}
