//! The layers as the kernels compute them, in single precision, operation by operation: the bits that every correct GPU
//! produces. Read each function beside the kernel of its name.
//!
//! This is possible because the kernels use no operation whose result IEEE 754 leaves open. Tests compare these bits
//! with the reference in double precision; the fingerprints in [`super::passes`] are computed from them.

mod elementwise;
mod functions;
mod matrices;
mod rows;

use super::passes::Pass;

/// Returns all outputs of a pass, in memory order.
pub fn outputs(pass: Pass) -> Vec<f32> {
    match pass {
        Pass::LinearForward => matrices::linear_forward(),
        Pass::LinearBackward => matrices::linear_backward(),
        Pass::Conv2dForward => matrices::conv2d_forward(),
        Pass::Conv2dBackward => matrices::conv2d_backward(),
        Pass::LayerNormForward => rows::layernorm_forward(),
        Pass::LayerNormBackward => rows::layernorm_backward(),
        Pass::RmsNormForward => rows::rmsnorm_forward(),
        Pass::RmsNormBackward => rows::rmsnorm_backward(),
        Pass::SoftmaxForward => rows::softmax_forward(),
        Pass::SoftmaxBackward => rows::softmax_backward(),
        Pass::CrossEntropyForward => rows::cross_entropy_forward(),
        Pass::CrossEntropyBackward => rows::cross_entropy_backward(),
        Pass::GeluForward => elementwise::gelu_forward(),
        Pass::GeluBackward => elementwise::gelu_backward(),
        Pass::AttentionForward => matrices::attention_forward(),
        Pass::AttentionBackward => matrices::attention_backward(),
        Pass::EmbeddingForward => elementwise::embedding_forward(),
        Pass::EmbeddingBackward => elementwise::embedding_backward(),
        Pass::AdamStep => elementwise::adam_step(),
    }
}

/// Returns one number for all bits and their positions; the kernel `fingerprint` explains why.
pub fn fingerprint(numbers: &[f32]) -> u64 {
    numbers.iter().zip(0u64..).fold(0, |sum, (number, index)| {
        let mut x = index << 32 | u64::from(number.to_bits());
        x ^= x >> 32;
        x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
        x ^= x >> 32;
        x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
        x ^= x >> 32;
        sum.wrapping_add(x)
    })
}
