//! Compares outputs with the reference within its tolerance, and bit by bit.

use super::passes::Tolerance;

/// The largest deviations of outputs from their reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Deviation {
    /// Infinite if an output is not a number.
    pub error: f64,
    /// Relative to the tolerance, which depends on the position; above 1 is wrong.
    pub of_tolerance: f64,
    /// The position of that deviation.
    pub place: usize,
}

impl Deviation {
    pub(super) const NONE: Self = Self { error: 0.0, of_tolerance: 0.0, place: 0 };

    pub fn between(outputs: &[f32], expected: &[f64], tolerance: Tolerance) -> Self {
        let mut worst = Self::NONE;
        for (index, (output, expected)) in outputs.iter().zip(expected).enumerate() {
            let error = (f64::from(*output) - expected).abs();
            // A NaN would lose every comparison below and count as within the tolerance.
            let error = if error.is_nan() { f64::INFINITY } else { error };
            let allowed = tolerance.allows(*expected);
            // Avoids 0/0 where the tolerance is zero.
            let part = if error == 0.0 { 0.0 } else { error / allowed };
            worst.error = worst.error.max(error);
            if part > worst.of_tolerance {
                (worst.of_tolerance, worst.place) = (part, index);
            }
        }
        worst
    }

    pub fn is_allowed(&self) -> bool {
        self.of_tolerance <= 1.0
    }
}

/// An output with wrong bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongNumber {
    pub place: usize,
    pub got: u32,
    pub expected: u32,
}

/// Returns how many outputs have wrong bits, and the first of them.
pub(super) fn wrong_numbers(outputs: &[f32], exact: &[f32]) -> (usize, Option<WrongNumber>) {
    let mut wrong = outputs.iter().zip(exact).enumerate().filter_map(|(index, (got, expected))| {
        let (got, expected) = (got.to_bits(), expected.to_bits());
        (got != expected).then_some(WrongNumber { place: index, got, expected })
    });
    let first = wrong.next();
    (usize::from(first.is_some()) + wrong.count(), first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUNDREDTH: Tolerance = Tolerance { absolute: 0.001, relative: 0.01 };
    const NONE: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };

    #[test]
    fn the_tolerance_grows_with_the_value() {
        assert!(Deviation::between(&[100.9, 0.0005], &[100.0, 0.0], HUNDREDTH).is_allowed());
        let off = Deviation::between(&[100.0, 0.1], &[100.0, 0.0], HUNDREDTH);
        assert!(!off.is_allowed());
        assert_eq!(off.place, 1);
    }

    #[test]
    fn no_nan_and_no_infinity_is_allowed() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for tolerance in [HUNDREDTH, NONE] {
                let off = Deviation::between(&[1.0, value], &[1.0, 1.0], tolerance);
                assert!(!off.is_allowed() && off.error.is_infinite() && off.place == 1, "{value}: {off:?}");
            }
        }
    }

    #[test]
    fn without_tolerance_only_the_same_number_is_allowed() {
        assert!(Deviation::between(&[1.0, 0.0], &[1.0, 0.0], NONE).is_allowed());
        assert!(!Deviation::between(&[1.000_000_1], &[1.0], NONE).is_allowed());
        assert!(!Deviation::between(&[1e-30], &[0.0], NONE).is_allowed());
    }

    #[test]
    fn wrong_bits_are_counted_and_the_first_is_named() {
        let (count, first) = wrong_numbers(&[1.0, -0.0, f32::NAN, 4.0], &[1.0, 0.0, f32::NAN, 5.0]);
        assert_eq!(count, 2);
        assert_eq!(first, Some(WrongNumber { place: 1, got: 0x8000_0000, expected: 0 }));
        assert_eq!(wrong_numbers(&[1.0], &[1.0]), (0, None));
    }
}
