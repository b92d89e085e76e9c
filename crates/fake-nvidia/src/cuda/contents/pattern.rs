//! The patterns of the memory test: 64-bit words that depend on their address. Written independently of
//! `crates/gpu/kernels/memory.cu`, so that a mistake in one is not also in the other.

const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;
/// `FACTOR * INVERSE` is 1 modulo 2⁶⁴.
const INVERSE: u64 = inverse_of(FACTOR);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatternKind {
    Address,
    Inverse,
    WalkOne,
    WalkZero,
    Checker,
    Random,
}

impl PatternKind {
    /// Returns the kind by its name in kernels.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "address" => Self::Address,
            "inverse" => Self::Inverse,
            "walk_one" => Self::WalkOne,
            "walk_zero" => Self::WalkZero,
            "checker" => Self::Checker,
            "random" => Self::Random,
            _ => return None,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub(crate) kind: PatternKind,
    pub(crate) seed: u64,
}

impl Pattern {
    /// Returns the word at an address that is a multiple of 8.
    #[inline]
    pub(crate) const fn word_at(self, address: u64) -> u64 {
        let turn = ((address / 8).wrapping_add(self.seed) % 64) as u32;
        match self.kind {
            PatternKind::Address => address,
            PatternKind::Inverse => !address,
            PatternKind::WalkOne => 1 << turn,
            PatternKind::WalkZero => !(1 << turn),
            PatternKind::Checker if turn % 2 == 1 => 0xaaaa_aaaa_aaaa_aaaa,
            PatternKind::Checker => 0x5555_5555_5555_5555,
            PatternKind::Random => spread(address ^ self.seed),
        }
    }

    /// Reads consecutive words, an even number, from an address that is a multiple of 8.
    pub(crate) fn read(self, address: u64, to: &mut [u32]) {
        if self.kind == PatternKind::Random {
            return read_random(self.seed, address, to);
        }
        for (halves, address) in to.as_chunks_mut::<2>().0.iter_mut().zip((address..).step_by(8)) {
            *halves = halves_of(self.word_at(address));
        }
    }

    /// Returns the random pattern that these words are, if they are one at this address: a copy of it from the host
    /// then takes no memory.
    pub(crate) fn recognize(address: u64, words: &[u64]) -> Option<Self> {
        let pattern = Self { kind: PatternKind::Random, seed: gather(*words.first()?) ^ address };
        // In parts, so that the first difference ends it.
        let mut parts = words.chunks(1 << 12).zip((address..).step_by(8 << 12));
        parts.all(|(words, address)| is_random(pattern.seed, address, words)).then_some(pattern)
    }
}

/// Defines a function twice: as it is, and with the vectors of newer processors, eight words at a time.
macro_rules! with_wide_vectors {
    ($(fn $name:ident ( $($arg:ident : $type:ty),* ) -> $result:ty $body:block)*) => { $(
        fn $name($($arg: $type),*) -> $result {
            #[inline(always)]
            fn anywhere($($arg: $type),*) -> $result $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq")]
            fn wide($($arg: $type),*) -> $result {
                anywhere($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
                // SAFETY: the processor has both.
                return unsafe { wide($($arg),*) };
            }
            anywhere($($arg),*)
        }
    )* };
}

with_wide_vectors! {
    fn read_random(seed: u64, address: u64, to: &mut [u32]) -> () {
        let mut address = address;
        for halves in to.as_chunks_mut::<2>().0 {
            *halves = halves_of(spread(address ^ seed));
            address = address.wrapping_add(8);
        }
    }
    fn is_random(seed: u64, address: u64, words: &[u64]) -> bool {
        let (mut address, mut difference) = (address, 0);
        for word in words {
            difference |= spread(address ^ seed) ^ word;
            address = address.wrapping_add(8);
        }
        difference == 0
    }
}

/// Returns the lower and the upper half of a word.
#[inline(always)]
const fn halves_of(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// Spreads every bit over the whole word.
#[inline(always)]
const fn spread(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(FACTOR);
    x ^= x >> 32;
    x = x.wrapping_mul(FACTOR);
    x ^ (x >> 32)
}

/// The inverse of [`spread`].
const fn gather(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(INVERSE);
    x ^= x >> 32;
    x = x.wrapping_mul(INVERSE);
    x ^ (x >> 32)
}

/// Newton's iteration doubles the number of right bits each time.
const fn inverse_of(factor: u64) -> u64 {
    let mut inverse = factor;
    let mut bits = 3;
    while bits < 64 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(inverse)));
        bits *= 2;
    }
    inverse
}
