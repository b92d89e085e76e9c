//! What a stretch of GPU memory holds, as a function of the position in it.
//!
//! A GPU of the stand-in has 80 GB, the machine that tests run on has not. What kernels write is a known function of
//! the position (a pattern, a matrix, a product), so memory keeps the function, and computes a word when it is read.

pub(crate) mod layer_output;
pub(crate) mod matrix;
pub(crate) mod pattern;
pub(crate) mod product;
mod row_sums;
pub(crate) mod sum;

use std::sync::Arc;

use layer_output::LayerOutput;
use matrix::Matrix;
use pattern::Pattern;
use product::Product;
use sum::Sum;

/// Positions are in 32-bit words.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    /// These words, as they are.
    Words(Arc<Vec<u32>>),
    /// The same word everywhere.
    Same(u32),
    /// The position is the address.
    Pattern(Pattern),
    Matrix(Matrix),
    Product(Arc<Product>),
    Layer(Arc<LayerOutput>),
    Sum(Arc<Sum>),
}

impl Content {
    pub(crate) fn words(words: Vec<u32>) -> Self {
        Self::Words(Arc::new(words))
    }

    pub(crate) fn word(&self, position: u64) -> u32 {
        match self {
            Self::Words(words) => words[position as usize],
            Self::Same(word) => *word,
            Self::Pattern(pattern) => {
                let word = pattern.word_at(position / 2 * 8);
                if position & 1 == 0 { word as u32 } else { (word >> 32) as u32 }
            }
            Self::Matrix(matrix) => matrix.word(position),
            Self::Product(product) => product.bits(position),
            Self::Layer(output) => output.word(position),
            Self::Sum(sum) => sum.value(position).to_bits(),
        }
    }

    /// Reads consecutive words.
    pub(crate) fn read(&self, position: u64, to: &mut [u32]) {
        match self {
            Self::Words(words) => to.copy_from_slice(&words[position as usize..][..to.len()]),
            Self::Same(word) => to.fill(*word),
            Self::Pattern(pattern) if position.is_multiple_of(2) && to.len().is_multiple_of(2) => {
                pattern.read(position * 4, to)
            }
            Self::Layer(output) => output.read(position, to),
            _ => to.iter_mut().zip(position..).for_each(|(word, position)| *word = self.word(position)),
        }
    }
}
