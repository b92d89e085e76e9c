//! The passes: the forward and backward kernel of each layer, its number of outputs, their tolerance, and the
//! fingerprint of the right ones.

use std::fmt;

use super::layer_inputs::{Layer, sizes::*};

/// One kernel of the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    LinearForward,
    LinearBackward,
    Conv2dForward,
    Conv2dBackward,
    LayerNormForward,
    LayerNormBackward,
    RmsNormForward,
    RmsNormBackward,
    SoftmaxForward,
    SoftmaxBackward,
    GeluForward,
    GeluBackward,
    AttentionForward,
    AttentionBackward,
    EmbeddingForward,
    EmbeddingBackward,
    CrossEntropyForward,
    CrossEntropyBackward,
    AdamStep,
}

/// The tolerance of an output against its reference: `absolute + relative * |reference|`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    pub absolute: f64,
    pub relative: f64,
}

/// The largest relative error of one rounding in single precision.
const UNIT: f64 = 1.0 / 16_777_216.0;

impl Tolerance {
    /// Nothing is rounded.
    const EXACT: Self = Self { absolute: 0.0, relative: 0.0 };

    /// A tolerance in roundings of numbers of size 1 and of the output's own size.
    const fn roundings(absolute: f64, relative: f64) -> Self {
        Self { absolute: absolute * UNIT, relative: relative * UNIT }
    }

    /// The tolerance of a sum of `root`² terms whose sizes add up to `size`. Roundings go up as often as down, so their
    /// sum grows with the square root of their number.
    const fn sum(root: f64, size: f64) -> Self {
        Self::roundings(root * size, 0.0)
    }

    pub fn allows(self, expected: f64) -> f64 {
        self.relative.mul_add(expected.abs(), self.absolute)
    }
}

/// The known properties of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassSpec {
    /// The name of the kernel, and of the pass in reports.
    pub name: &'static str,
    /// Outputs of one replica.
    pub numbers: usize,
    pub tolerance: Tolerance,
    /// The fingerprint of the right outputs, on every architecture.
    pub fingerprint: u64,
}

const fn known(name: &'static str, numbers: usize, tolerance: Tolerance, fingerprint: u64) -> PassSpec {
    PassSpec { name, numbers, tolerance, fingerprint }
}

impl Pass {
    pub const ALL: [Self; 19] = [
        Self::LinearForward,
        Self::LinearBackward,
        Self::Conv2dForward,
        Self::Conv2dBackward,
        Self::LayerNormForward,
        Self::LayerNormBackward,
        Self::RmsNormForward,
        Self::RmsNormBackward,
        Self::SoftmaxForward,
        Self::SoftmaxBackward,
        Self::GeluForward,
        Self::GeluBackward,
        Self::AttentionForward,
        Self::AttentionBackward,
        Self::EmbeddingForward,
        Self::EmbeddingBackward,
        Self::CrossEntropyForward,
        Self::CrossEntropyBackward,
        Self::AdamStep,
    ];

    pub const fn spec(self) -> PassSpec {
        use Tolerance as T;
        match self {
            // Small multiples of 1/16: all sums are exact.
            Self::LinearForward => known("linear_forward", LINEAR_Y, T::EXACT, 0x0bfe_a20a_2806_7bb1),
            Self::LinearBackward => {
                known("linear_backward", LINEAR_X + LINEAR_W + LINEAR_OUTPUTS, T::EXACT, 0x48d0_1a49_5b38_7c7a)
            }
            // 72 products and the bias.
            Self::Conv2dForward => known("conv2d_forward", CONV_Y, T::sum(8.6, 16.0), 0xbbc3_b043_11b9_711f),
            // The gradient of a weight is the longest sum: a product for each of 512 points.
            Self::Conv2dBackward => {
                known("conv2d_backward", CONV_X + CONV_W + CONV_OUTPUTS, T::sum(22.7, 160.0), 0x83a8_f75c_4b63_9899)
            }
            // Mean and deviation are sums over 512 columns and enter numbers of at most 5.
            Self::LayerNormForward => known("layernorm_forward", NORM_X, T::sum(22.7, 5.0), 0xee63_f63f_8eff_2144),
            // The gradient of gamma sums such numbers over 128 rows.
            Self::LayerNormBackward => {
                known("layernorm_backward", NORM_X + 2 * NORM_COLUMNS, T::sum(22.7, 64.0), 0x01de_fa30_bf33_dd2e)
            }
            Self::RmsNormForward => known("rmsnorm_forward", NORM_X, T::sum(22.7, 5.0), 0x8d2c_7c13_c9f7_a27a),
            Self::RmsNormBackward => {
                known("rmsnorm_backward", NORM_X + NORM_COLUMNS, T::sum(22.7, 64.0), 0x03e0_052b_6b04_ff80)
            }
            // A quotient by a sum over 512 columns, with a few roundings in each exponential.
            Self::SoftmaxForward => known("softmax_forward", SOFTMAX_X, T::roundings(0.0, 32.0), 0x6077_e8a1_d073_1181),
            // No softmax value exceeds 1/50, and its factor comes from such a sum.
            Self::SoftmaxBackward => known("softmax_backward", SOFTMAX_X, T::sum(22.7, 0.04), 0xc0a9_f77a_3b76_c19a),
            // The exponent is up to 11 and is rounded three times, which is the relative error of the exponential.
            Self::GeluForward => known("gelu_forward", GELU_NUMBERS, T::roundings(0.0, 48.0), 0x71e3_a544_91b3_f9b8),
            // The same, where the slope passes through zero.
            Self::GeluBackward => known("gelu_backward", GELU_NUMBERS, T::roundings(48.0, 0.0), 0x36fb_7904_31e5_65cc),
            // Scores are sums of 32 products, up to 6 in size, followed by sums over up to 64 weights.
            Self::AttentionForward => {
                known("attention_forward", ATTENTION_X, T::roundings(64.0, 0.0), 0xcef9_efa3_6c72_0744)
            }
            // The same again, times numbers up to 4.
            Self::AttentionBackward => {
                known("attention_backward", 3 * ATTENTION_X, T::roundings(256.0, 0.0), 0x80e8_7d1f_746b_4dd1)
            }
            // A copy.
            Self::EmbeddingForward => known("embedding_forward", EMBEDDING_Y, T::EXACT, 0xefc2_cdde_262d_fe19),
            // No word occurs more than 9 times.
            Self::EmbeddingBackward => {
                known("embedding_backward", EMBEDDING_TABLE, T::sum(3.0, 9.0), 0xac39_5451_c731_5e1f)
            }
            // A logarithm of a sum and an input, up to 16.
            Self::CrossEntropyForward => {
                known("cross_entropy_forward", ENTROPY_ROWS, T::roundings(32.0, 4.0), 0x00b2_47d2_4495_9bee)
            }
            Self::CrossEntropyBackward => {
                known("cross_entropy_backward", ENTROPY_X, T::roundings(0.0, 48.0), 0xf82a_ee41_3cf3_de76)
            }
            // A few roundings of numbers up to 1, and their quotient times the rate.
            Self::AdamStep => known("adam_step", 3 * ADAM_NUMBERS, T::roundings(4.0, 4.0), 0x52e0_15bf_c9c9_8a2d),
        }
    }

    pub const fn layer(self) -> Layer {
        match self {
            Self::LinearForward | Self::LinearBackward => Layer::Linear,
            Self::Conv2dForward | Self::Conv2dBackward => Layer::Conv2d,
            Self::LayerNormForward | Self::LayerNormBackward => Layer::LayerNorm,
            Self::RmsNormForward | Self::RmsNormBackward => Layer::RmsNorm,
            Self::SoftmaxForward | Self::SoftmaxBackward => Layer::Softmax,
            Self::GeluForward | Self::GeluBackward => Layer::Gelu,
            Self::AttentionForward | Self::AttentionBackward => Layer::Attention,
            Self::EmbeddingForward | Self::EmbeddingBackward => Layer::Embedding,
            Self::CrossEntropyForward | Self::CrossEntropyBackward => Layer::CrossEntropy,
            Self::AdamStep => Layer::Adam,
        }
    }

    pub const fn name(self) -> &'static str {
        self.spec().name
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write, thread};

    use super::*;
    use crate::dl::layers::{compare::Deviation, exact, reference};

    const SOURCES: [&str; 3] = [
        include_str!("../../../kernels/layers_matrices.cuh"),
        include_str!("../../../kernels/layers_points.cuh"),
        include_str!("../../../kernels/layers_rows.cuh"),
    ];

    #[test]
    fn every_kernel_has_its_pass() {
        let lines = SOURCES.into_iter().flat_map(str::lines);
        let kernels: Vec<&str> =
            lines.filter_map(|line| line.strip_prefix("LAYER(")?.split_once(')')).map(|(name, _)| name).collect();
        for pass in Pass::ALL {
            assert!(kernels.contains(&pass.name()), "the kernels have no {pass}");
        }
        assert_eq!(kernels.len(), Pass::ALL.len());
    }

    #[test]
    fn the_guide_states_the_tolerances_and_fingerprints() {
        let page = include_str!("../../../../../docs/guide/gpu-layers.md");
        let size = |x: f64| if x == 0.0 { "0".to_owned() } else { format!("{x:.1e}") };
        for pass in Pass::ALL {
            let PassSpec { name, numbers, tolerance, fingerprint } = pass.spec();
            let (absolute, relative) = (size(tolerance.absolute), size(tolerance.relative));
            let row = format!("| `{name}` | {numbers} | {absolute} | {relative} | `{fingerprint:016x}` |");
            assert!(page.lines().any(|line| line == row), "docs/guide/gpu-layers.md lacks this row:\n{row}");
        }
    }

    /// Runs all passes in parallel, because they are slow without optimisation.
    #[test]
    fn the_exact_bits_have_the_known_fingerprints_and_are_within_the_tolerances() {
        let mismatches: Vec<String> = thread::scope(|scope| {
            let each = Pass::ALL.map(|pass| scope.spawn(move || mismatches_of(pass)));
            each.into_iter().flat_map(|one| one.join().expect("no pass panics")).collect()
        });
        assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    }

    fn mismatches_of(pass: Pass) -> Option<String> {
        let (known, exact, expected) = (pass.spec(), exact::outputs(pass), reference::outputs(pass));
        assert_eq!((exact.len(), expected.len()), (known.numbers, known.numbers), "{pass}");
        let mut mismatches = String::new();
        let found = exact::fingerprint(&exact);
        if found != known.fingerprint {
            writeln!(mismatches, "{pass}: the fingerprint is {found:#018x}")
                .expect("writing to a string does not fail");
        }
        let deviation = Deviation::between(&exact, &expected, known.tolerance);
        // The limit stated in the guide.
        if deviation.of_tolerance >= 0.4 {
            writeln!(mismatches, "{pass}: {deviation:?} over {:?}", known.tolerance)
                .expect("writing to a string does not fail");
        }
        // A tolerance must not hide a lost number.
        let typical = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
        if known.tolerance.allows(typical) > typical / 1000.0 {
            writeln!(mismatches, "{pass}: typical numbers are {typical:e}, too small for {:?}", known.tolerance)
                .expect("writing to a string does not fail");
        }
        (!mismatches.is_empty()).then_some(mismatches)
    }
}
