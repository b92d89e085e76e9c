//! The layers, and the sizes and inputs of each.
//!
//! Inputs depend only on their position, so that device and host have the same ones without a copy.

use crate::dl::expected_sums::hash;

/// A layer, with the inputs of both of its passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    Linear,
    Conv2d,
    LayerNorm,
    RmsNorm,
    Softmax,
    Gelu,
    Attention,
    Embedding,
    CrossEntropy,
    Adam,
}

pub mod sizes {
    //! The sizes in kernels/layers.cuh; a test compares them.

    pub const LINEAR_ROWS: usize = 128;
    pub const LINEAR_INPUTS: usize = 128;
    pub const LINEAR_OUTPUTS: usize = 128;
    pub const CONV_IMAGES: usize = 2;
    pub const CONV_INPUTS: usize = 8;
    pub const CONV_OUTPUTS: usize = 16;
    pub const CONV_SIDE: usize = 16;
    pub const NORM_ROWS: usize = 128;
    pub const NORM_COLUMNS: usize = 512;
    pub const SOFTMAX_ROWS: usize = 128;
    pub const SOFTMAX_COLUMNS: usize = 512;
    pub const GELU_NUMBERS: usize = 32768;
    pub const ATTENTION_HEADS: usize = 4;
    pub const ATTENTION_TOKENS: usize = 64;
    pub const ATTENTION_WIDTH: usize = 32;
    pub const EMBEDDING_TOKENS: usize = 256;
    pub const EMBEDDING_WORDS: usize = 128;
    pub const EMBEDDING_WIDTH: usize = 64;
    pub const ENTROPY_ROWS: usize = 128;
    pub const ENTROPY_CLASSES: usize = 512;
    pub const ADAM_NUMBERS: usize = 32768;

    pub const LINEAR_X: usize = LINEAR_ROWS * LINEAR_INPUTS;
    pub const LINEAR_W: usize = LINEAR_OUTPUTS * LINEAR_INPUTS;
    pub const LINEAR_Y: usize = LINEAR_ROWS * LINEAR_OUTPUTS;
    pub const CONV_PLANE: usize = CONV_SIDE * CONV_SIDE;
    pub const CONV_X: usize = CONV_IMAGES * CONV_INPUTS * CONV_PLANE;
    pub const CONV_W: usize = CONV_OUTPUTS * CONV_INPUTS * 9;
    pub const CONV_Y: usize = CONV_IMAGES * CONV_OUTPUTS * CONV_PLANE;
    pub const NORM_X: usize = NORM_ROWS * NORM_COLUMNS;
    pub const SOFTMAX_X: usize = SOFTMAX_ROWS * SOFTMAX_COLUMNS;
    pub const ATTENTION_X: usize = ATTENTION_HEADS * ATTENTION_TOKENS * ATTENTION_WIDTH;
    pub const EMBEDDING_TABLE: usize = EMBEDDING_WORDS * EMBEDDING_WIDTH;
    pub const EMBEDDING_Y: usize = EMBEDDING_TOKENS * EMBEDDING_WIDTH;
    pub const ENTROPY_X: usize = ENTROPY_ROWS * ENTROPY_CLASSES;
}

pub mod constants {
    //! The constants of the layers.

    /// 2⁻¹⁷, close to the usual 10⁻⁵ and exact in single precision.
    pub const NORM_EPSILON: f64 = 1.0 / 131_072.0;
    pub const ADAM_RATE: f64 = 0.001;
    pub const ADAM_BETA1: f64 = 0.9;
    pub const ADAM_BETA2: f64 = 0.999;
    pub const ADAM_EPSILON: f64 = 1e-8;
    /// The number of the step.
    pub const ADAM_STEP: i32 = 10;
}

use sizes::*;

/// The distribution of an input's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ValueDistribution {
    /// From -scale to scale, in steps of scale / 2²³.
    Signed { scale: f32 },
    /// From 0 to scale.
    Positive { scale: f32 },
    /// Multiples of scale, up to 31 times: exact in bf16, and so are sums of thousands of products in single precision.
    Small { scale: f32 },
    /// An index into a table of this size.
    Index { count: u32 },
}

/// The largest multiple in [`ValueDistribution::Small`].
const SMALL: u32 = 31;

impl ValueDistribution {
    /// Returns the encoding that the kernel takes: kind, range and scale.
    pub const fn encode(self) -> (u32, u32, f32) {
        match self {
            Self::Signed { scale } => (0, 0, scale),
            Self::Positive { scale } => (1, 0, scale),
            Self::Small { scale } => (2, SMALL, scale),
            Self::Index { count } => (3, count, 1.0),
        }
    }

    fn value(self, hash: u32) -> f32 {
        match self {
            Self::Signed { scale } => ((hash >> 8).cast_signed() - 0x80_0000) as f32 / 8_388_608.0 * scale,
            Self::Positive { scale } => (hash >> 8) as f32 / 16_777_216.0 * scale,
            Self::Small { scale } => {
                (((hash >> 16) * (2 * SMALL + 1)) >> 16).cast_signed().wrapping_sub_unsigned(SMALL) as f32 * scale
            }
            Self::Index { count } => (((hash >> 16) * count) >> 16) as f32,
        }
    }
}

/// One input of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tensor {
    pub count: usize,
    pub spread: ValueDistribution,
}

const fn signed(count: usize, scale: f32) -> Tensor {
    Tensor { count, spread: ValueDistribution::Signed { scale } }
}

const fn positive(count: usize, scale: f32) -> Tensor {
    Tensor { count, spread: ValueDistribution::Positive { scale } }
}

const fn small(count: usize) -> Tensor {
    Tensor { count, spread: ValueDistribution::Small { scale: 0.0625 } }
}

const fn index(count: usize, among: usize) -> Tensor {
    Tensor { count, spread: ValueDistribution::Index { count: among as u32 } }
}

impl Layer {
    pub const ALL: [Self; 10] = [
        Self::Linear,
        Self::Conv2d,
        Self::LayerNorm,
        Self::RmsNorm,
        Self::Softmax,
        Self::Gelu,
        Self::Attention,
        Self::Embedding,
        Self::CrossEntropy,
        Self::Adam,
    ];

    /// Returns the inputs in memory order; the gradient from the layer above is last.
    pub const fn tensors(self) -> &'static [Tensor] {
        match self {
            // x, w, b, dy
            Self::Linear => &const { [small(LINEAR_X), small(LINEAR_W), small(LINEAR_OUTPUTS), small(LINEAR_Y)] },
            Self::Conv2d => {
                &const { [signed(CONV_X, 1.0), signed(CONV_W, 0.25), signed(CONV_OUTPUTS, 1.0), signed(CONV_Y, 1.0)] }
            }
            // x, gamma, beta, dy
            Self::LayerNorm => {
                &const { [signed(NORM_X, 2.0), positive(NORM_COLUMNS, 2.0), signed(NORM_COLUMNS, 1.0), signed(NORM_X, 1.0)] }
            }
            // x, gamma, dy
            Self::RmsNorm => &const { [signed(NORM_X, 2.0), positive(NORM_COLUMNS, 2.0), signed(NORM_X, 1.0)] },
            // x, dy
            Self::Softmax => &const { [signed(SOFTMAX_X, 4.0), signed(SOFTMAX_X, 1.0)] },
            Self::Gelu => &const { [signed(GELU_NUMBERS, 4.0), signed(GELU_NUMBERS, 1.0)] },
            // q, k, v, dy
            Self::Attention => {
                &const {
                    [
                        signed(ATTENTION_X, 4.0),
                        signed(ATTENTION_X, 1.0),
                        signed(ATTENTION_X, 1.0),
                        signed(ATTENTION_X, 1.0),
                    ]
                }
            }
            // words, table, dy
            Self::Embedding => {
                &const { [index(EMBEDDING_TOKENS, EMBEDDING_WORDS), signed(EMBEDDING_TABLE, 1.0), signed(EMBEDDING_Y, 1.0)] }
            }
            // x, targets
            Self::CrossEntropy => &const { [signed(ENTROPY_X, 8.0), index(ENTROPY_ROWS, ENTROPY_CLASSES)] },
            // w, g, m, v
            Self::Adam => {
                &const {
                    [
                        signed(ADAM_NUMBERS, 1.0),
                        signed(ADAM_NUMBERS, 1.0),
                        signed(ADAM_NUMBERS, 1.0),
                        positive(ADAM_NUMBERS, 1.0),
                    ]
                }
            }
        }
    }

    /// Returns the total number of values in its inputs.
    pub fn count(self) -> usize {
        self.tensors().iter().map(|tensor| tensor.count).sum()
    }

    /// Returns the seed of an input, different for each.
    pub const fn seed(self, tensor: usize) -> u32 {
        hash(0x4c61_7900 + (self as u32) * 16 + tensor as u32)
    }

    /// Returns the inputs.
    ///
    /// # Panics
    /// Panics if the layer does not have `N` inputs.
    pub fn inputs<const N: usize>(self) -> [Vec<f32>; N] {
        let tensors = self.tensors();
        assert_eq!(tensors.len(), N, "{self:?} has {} inputs", tensors.len());
        std::array::from_fn(|i| {
            let (seed, tensor) = (self.seed(i), tensors[i]);
            (0..tensor.count).map(|at| tensor.spread.value(hash(at as u32 ^ seed))).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = include_str!("../../../kernels/layers.cuh");

    #[test]
    fn the_kernels_have_the_same_sizes() {
        macro_rules! same {
            ($($name:ident)*) => {
                $(assert!(
                    SOURCE.lines().any(|line| line == format!("#define {} {}", stringify!($name), $name)),
                    "kernels/layers.cuh has another {}", stringify!($name)
                );)*
            };
        }
        same!(LINEAR_ROWS LINEAR_INPUTS LINEAR_OUTPUTS CONV_IMAGES CONV_INPUTS CONV_OUTPUTS CONV_SIDE NORM_ROWS);
        same!(NORM_COLUMNS SOFTMAX_ROWS SOFTMAX_COLUMNS GELU_NUMBERS ATTENTION_HEADS ATTENTION_TOKENS ATTENTION_WIDTH);
        same!(EMBEDDING_TOKENS EMBEDDING_WORDS EMBEDDING_WIDTH ENTROPY_ROWS ENTROPY_CLASSES ADAM_NUMBERS);
    }

    #[test]
    fn inputs_fill_their_range_and_all_differ() {
        let [q, k, v, dy] = Layer::Attention.inputs();
        assert!(q.iter().all(|x| (-4.0..4.0).contains(x)) && q.iter().any(|x| *x > 3.9) && q.iter().any(|x| *x < -3.9));
        assert!(k != v && v != dy && k != dy);
        let [tokens, ..] = Layer::Embedding.inputs::<3>();
        assert!(tokens.iter().all(|token| token.fract() == 0.0 && (0.0..EMBEDDING_WORDS as f32).contains(token)));
        let mut distinct = tokens.clone();
        distinct.sort_by(f32::total_cmp);
        distinct.dedup();
        assert!(distinct.len() < tokens.len(), "a word that comes twice is what makes the backward pass a sum");
    }

    #[test]
    fn tensor_core_inputs_are_bf16_with_exact_sums() {
        for tensor in Layer::Linear.inputs::<4>() {
            assert!(tensor.iter().all(|x| x.to_bits() & 0xffff == 0));
        }
        // The largest possible sum, in units of the product's last digit, must fit into the significand of a float.
        let max = SMALL * SMALL * LINEAR_INPUTS.max(LINEAR_OUTPUTS).max(LINEAR_ROWS) as u32 + SMALL * 16;
        assert!(max < 1 << 20, "{max}");
    }
}
