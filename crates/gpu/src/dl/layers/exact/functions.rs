//! Functions and sums with the rounding of the kernels.

use std::f32::consts::{LN_2, LOG2_E, SQRT_2};

/// The exact value of ln 2 less [`LN_2`], which is a little too large.
const LN_2_ERROR: f32 = -1.904_654_3e-9;

/// Adding and subtracting it rounds to an integer.
const ROUNDING_MAGIC: f32 = 12_582_912.0;

pub(super) fn exponential(x: f32) -> f32 {
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let n = x.mul_add(LOG2_E, ROUNDING_MAGIC) - ROUNDING_MAGIC;
    let r = n.mul_add(-LN_2_ERROR, n.mul_add(-LN_2, x));
    let series = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let p = series.iter().fold(1.0 / 5040.0, |p: f32, factor| p.mul_add(r, *factor));
    p * f32::from_bits(((n as i32 + 127) << 23).cast_unsigned())
}

/// Returns the natural logarithm of a positive number that is not subnormal.
pub(super) fn logarithm(x: f32) -> f32 {
    let bits = x.to_bits();
    let (mut exponent, mut m) =
        (((bits >> 23).cast_signed() - 127) as f32, f32::from_bits((bits & 0x7f_ffff) | 0x3f80_0000));
    if m > SQRT_2 {
        m *= 0.5;
        exponent += 1.0;
    }
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = [1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];
    let p = series.iter().fold(1.0 / 11.0, |p: f32, factor| p.mul_add(z, *factor));
    exponent.mul_add(LN_2, exponent.mul_add(LN_2_ERROR, (s + s) * p))
}

/// Sums a row as one warp does: lane l adds the positions l, l + 32, …; then the sums of the lanes are added in pairs.
pub(super) fn warp_sum(count: usize, add: impl Fn(f32, usize) -> f32) -> f32 {
    let mut lanes: [f32; 32] = std::array::from_fn(|lane| (lane..count).step_by(32).fold(0.0, &add));
    for distance in [16, 8, 4, 2, 1] {
        lanes = std::array::from_fn(|lane| lanes[lane] + lanes[lane ^ distance]);
    }
    lanes[0]
}

/// The maximum and the sum by which the exponentials of a row are normalised.
pub(super) struct SoftmaxStats {
    pub(super) most: f32,
    pub(super) sum: f32,
}

impl SoftmaxStats {
    pub(super) fn from_row(x: &[f32]) -> Self {
        let max = x.iter().fold(-3.0e38, |max, x| if *x > max { *x } else { max });
        Self { most: max, sum: warp_sum(x.len(), |sum, i| sum + exponential(x[i] - max)) }
    }

    /// Returns the softmax of `x` in its row.
    pub(super) fn softmax(&self, x: f32) -> f32 {
        exponential(x - self.most) / self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the largest relative error over 100,000 steps from `from` to `to`.
    fn error(from: f32, to: f32, function: fn(f32) -> f32, truth: fn(f64) -> f64) -> f64 {
        let count = 100_000;
        (0..=count)
            .map(|i| {
                let x = (to - from).mul_add(i as f32 / count as f32, from);
                let truth = truth(f64::from(x));
                ((f64::from(function(x)) - truth) / truth).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn the_exponential_is_within_two_units_of_the_last_digit() {
        assert!(error(-86.9, 87.9, exponential, f64::exp) < 2.0 * f64::from(f32::EPSILON));
    }

    #[test]
    fn the_exponential_stays_in_normal_numbers() {
        assert!(exponential(-1000.0).is_normal() && exponential(-1000.0) < 1e-37);
        assert!(exponential(1000.0).is_finite() && exponential(1000.0) > 1e38);
        assert_eq!(exponential(0.0).to_bits(), 1.0f32.to_bits());
    }

    #[test]
    fn the_logarithm_is_within_two_units_of_the_last_digit() {
        assert!(error(1.01, 1000.0, logarithm, f64::ln) < 2.0 * f64::from(f32::EPSILON));
        assert_eq!(logarithm(1.0).to_bits(), 0.0f32.to_bits());
    }

    #[test]
    fn a_nan_stays_a_nan() {
        assert!(exponential(f32::NAN).is_nan());
    }

    #[test]
    fn every_element_of_a_row_is_summed_once() {
        for count in [1, 31, 32, 33, 64, 100] {
            assert_eq!(warp_sum(count, |sum, i| sum + i as f32), (count * (count - 1) / 2) as f32);
        }
    }
}
