//! Matrices of small integers, each of which depends only on its position. Written independently of
//! `crates/gpu/kernels/numbers.cuh`.

/// How a number is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Storage {
    Bf16,
    Fp16,
    Fp32,
    Fp8,
    Int8,
}

impl Storage {
    /// Returns the storage by its name in kernels.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "bf16" => Self::Bf16,
            "fp16" => Self::Fp16,
            "fp32" => Self::Fp32,
            "fp8" => Self::Fp8,
            "int8" => Self::Int8,
            _ => return None,
        })
    }

    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::Bf16 | Self::Fp16 => 16,
            Self::Fp32 => 32,
            Self::Fp8 | Self::Int8 => 8,
        }
    }

    /// Returns the bits of a small integer, in the lower end of a word.
    const fn encode(self, number: i32) -> u32 {
        match self {
            Self::Bf16 => (number as f32).to_bits() >> 16,
            Self::Fp32 => (number as f32).to_bits(),
            Self::Fp16 => small_float(number, 5, 10),
            Self::Fp8 => small_float(number, 4, 3),
            Self::Int8 => number as u32 & 0xff,
        }
    }

    /// Returns the value of such bits: what a unit multiplies.
    pub(crate) fn decode(self, bits: u32) -> f32 {
        match self {
            Self::Bf16 => f32::from_bits(bits << 16),
            Self::Fp32 => f32::from_bits(bits),
            Self::Fp16 => float_from(bits, 5, 10),
            Self::Fp8 => float_from(bits, 4, 3),
            Self::Int8 => f32::from(bits as u8 as i8),
        }
    }
}

/// Encodes an integer that has no more digits than the fraction.
const fn small_float(number: i32, exponent_bits: u32, fraction_bits: u32) -> u32 {
    let sign = if number < 0 { 1 << (exponent_bits + fraction_bits) } else { 0 };
    let (size, bias) = (number.unsigned_abs(), (1 << (exponent_bits - 1)) - 1);
    if size == 0 {
        return sign;
    }
    let power = size.ilog2();
    sign | ((power + bias) << fraction_bits) | (((size << fraction_bits) >> power) & ((1 << fraction_bits) - 1))
}

/// Decodes a float. There are no infinities: close enough for a number with a wrong bit.
fn float_from(bits: u32, exponent_bits: u32, fraction_bits: u32) -> f32 {
    let sign = if (bits >> (exponent_bits + fraction_bits)) & 1 == 1 { -1.0 } else { 1.0 };
    let exponent = ((bits >> fraction_bits) & ((1 << exponent_bits) - 1)) as i32;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let part = (bits & ((1 << fraction_bits) - 1)) as f32 / (1u32 << fraction_bits) as f32;
    sign * if exponent == 0 { part * 2f32.powi(1 - bias) } else { (1.0 + part) * 2f32.powi(exponent - bias) }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Matrix {
    pub(crate) storage: Storage,
    pub(crate) rows: u32,
    /// The numbers in a row.
    pub(crate) k: u32,
    pub(crate) seed: u32,
    /// Numbers are from minus this to this.
    pub(crate) range: u32,
}

impl Matrix {
    #[inline]
    pub(crate) const fn number(&self, row: u32, k: u32) -> i32 {
        number(self.seed, self.range, row, k)
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.rows as u64 * self.k as u64 * self.storage.bits() as u64 / 8
    }

    pub(super) fn word(&self, position: u64) -> u32 {
        let bits = self.storage.bits();
        let per_word = 32 / bits;
        (0..per_word).fold(0, |word, part| {
            let place = position * u64::from(per_word) + u64::from(part);
            let number = self.number((place / u64::from(self.k)) as u32, (place % u64::from(self.k)) as u32);
            word | (self.storage.encode(number) << (part * bits))
        })
    }
}

#[inline(always)]
pub(super) const fn number(seed: u32, range: u32, row: u32, k: u32) -> i32 {
    let high = hash(((row << 16) | k) ^ seed) >> 16;
    // Never out of range; checks would keep the compiler from using vectors.
    (high.wrapping_mul(2 * range + 1) >> 16).wrapping_sub(range) as i32
}

#[inline(always)]
pub(crate) const fn hash(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    let x = (x ^ (x >> 15)).wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}
