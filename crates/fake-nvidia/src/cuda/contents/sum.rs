//! Shares of a sum, and sums of shares. Written independently of `crates/gpu/kernels/collective.cu`, so that a mistake
//! in one is not also in the other.

/// The numbers that these ranks have together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sum {
    /// In ascending order.
    pub(crate) ranks: Vec<u32>,
    pub(crate) seed: u32,
    pub(crate) range: u32,
}

impl Sum {
    /// Returns the sum over all ranks of a job.
    pub(crate) fn of_all(ranks: u32, seed: u32, range: u32) -> Self {
        Self { ranks: (0..ranks).collect(), seed, range }
    }

    pub(crate) fn value(&self, index: u64) -> f32 {
        let base = base(index, self.seed);
        let size = self.ranks.iter().fold(0, |sum: u32, rank| sum + share(base, *rank, self.range));
        if base & 1 == 0 { size as f32 } else { -(size as f32) }
    }

    /// Returns the sum of two, if they are parts of the same.
    pub(crate) fn plus(&self, other: &Self) -> Option<Self> {
        let is_same = (self.seed, self.range) == (other.seed, other.range);
        let mut ranks = [self.ranks.as_slice(), &other.ranks].concat();
        ranks.sort_unstable();
        let no_rank_twice = ranks.windows(2).all(|two| two[0] != two[1]);
        (is_same && no_rank_twice).then_some(Self { ranks, ..*self })
    }
}

fn base(index: u64, seed: u32) -> u32 {
    mix(index as u32 ^ seed).wrapping_add(((index >> 32) as u32).wrapping_mul(0x9e37_79b9))
}

fn share(base: u32, rank: u32, range: u32) -> u32 {
    let mixed = u64::from(mix(base.wrapping_add((rank + 1).wrapping_mul(0x85eb_ca6b))));
    ((mixed * u64::from(range)) >> 32) as u32 + 1
}

fn mix(mut x: u32) -> u32 {
    for (shift, factor) in [(16, 0x21f0_aaad_u32), (15, 0x735a_2d97)] {
        x ^= x >> shift;
        x = x.wrapping_mul(factor);
    }
    x ^ (x >> 15)
}
