//! Functions and sums as one warp computes them: only operations whose result IEEE 754 defines, in a fixed order.

pub(super) fn exponential(x: f32) -> f32 {
    /// Adding and subtracting it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 as a float, and what it lacks.
    const LN_2: f32 = std::f32::consts::LN_2;
    const REST: f32 = 1.904_654_3e-9;
    // Not `clamp`: a NaN passes both comparisons.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let n = f32::mul_add(x, std::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = f32::mul_add(n, REST, f32::mul_add(n, -LN_2, x));
    let mut p = 1.0f32 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = f32::mul_add(p, r, coefficient);
    }
    p * f32::from_bits(((n as i32 + 127) << 23) as u32)
}

/// Of a positive number that is not subnormal.
pub(super) fn logarithm(x: f32) -> f32 {
    let mut exponent = ((x.to_bits() >> 23) as i32 - 127) as f32;
    let mut m = f32::from_bits((x.to_bits() & 0x007f_ffff) | 0x3f80_0000);
    if m > std::f32::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1.0;
    }
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 1.0f32 / 11.0;
    for coefficient in [1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        p = f32::mul_add(p, z, coefficient);
    }
    let low = f32::mul_add(exponent, -1.904_654_3e-9, (s + s) * p);
    f32::mul_add(exponent, std::f32::consts::LN_2, low)
}

/// Sums over `count` places: lane l of 32 takes the places l, l + 32, and so on; then pairs of lanes are added.
pub(super) fn summed(count: usize, add: impl Fn(f32, usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; 32];
    for place in 0..count {
        lanes[place % 32] = add(lanes[place % 32], place);
    }
    for distance in [16, 8, 4, 2, 1] {
        let before = lanes;
        for lane in 0..32 {
            lanes[lane] = before[lane] + before[lane ^ distance];
        }
    }
    lanes[0]
}

/// The largest number of a row, and the sum of the exponentials of the distances to it.
pub(super) struct Exponents {
    pub(super) largest: f32,
    pub(super) sum: f32,
}

impl Exponents {
    pub(super) fn of(row: &[f32]) -> Self {
        let largest = row.iter().fold(-3.0e38, |largest, x| if *x > largest { *x } else { largest });
        Self { largest, sum: summed(row.len(), |sum, i| sum + exponential(row[i] - largest)) }
    }

    pub(super) fn share(&self, x: f32) -> f32 {
        exponential(x - self.largest) / self.sum
    }
}
