//! The norms, softmax and cross-entropy: one warp for each row.

use super::functions::{Exponents, logarithm, summed};

const NORM_ROWS: usize = 128;
const NORM_COLUMNS: usize = 512;
const NORM: usize = NORM_ROWS * NORM_COLUMNS;
const SOFTMAX_COLUMNS: usize = 512;
const SOFTMAX: usize = 128 * SOFTMAX_COLUMNS;
const ENTROPY_ROWS: usize = 128;
const CLASSES: usize = 512;
const ENTROPY: usize = ENTROPY_ROWS * CLASSES;

pub(super) const LAYER_NORM_INPUT: usize = 2 * NORM + 2 * NORM_COLUMNS;
pub(super) const RMS_NORM_INPUT: usize = 2 * NORM + NORM_COLUMNS;
pub(super) const SOFTMAX_INPUT: usize = 2 * SOFTMAX;
pub(super) const ENTROPY_INPUT: usize = ENTROPY + ENTROPY_ROWS;

const PART: f32 = 1.0 / NORM_COLUMNS as f32;

/// Mean and scale of a row.
#[derive(Clone, Copy)]
struct Norm {
    mean: f32,
    scale: f32,
}

impl Norm {
    fn of(row: &[f32], is_centred: bool) -> Self {
        let mean = if is_centred { summed(row.len(), |sum, i| sum + row[i]) * PART } else { 0.0 };
        let square = summed(row.len(), |sum, i| f32::mul_add(row[i] - mean, row[i] - mean, sum));
        Self { mean, scale: 1.0 / f32::mul_add(square, PART, 1.0 / 131_072.0).sqrt() }
    }

    fn applied(self, x: f32) -> f32 {
        (x - self.mean) * self.scale
    }
}

pub(super) fn layer_norm_forward(input: &[f32]) -> Vec<f32> {
    let (x, rest) = input.split_at(NORM);
    let (gamma, beta) = rest.split_at(NORM_COLUMNS);
    let row = |x: &[f32]| {
        let norm = Norm::of(x, true);
        (0..NORM_COLUMNS).map(|i| f32::mul_add(norm.applied(x[i]), gamma[i], beta[i])).collect::<Vec<_>>()
    };
    x.chunks(NORM_COLUMNS).flat_map(row).collect()
}

pub(super) fn rms_norm_forward(input: &[f32]) -> Vec<f32> {
    let (x, gamma) = input.split_at(NORM);
    let row = |x: &[f32]| {
        let norm = Norm::of(x, false);
        (0..NORM_COLUMNS).map(|i| norm.applied(x[i]) * gamma[i]).collect::<Vec<_>>()
    };
    x.chunks(NORM_COLUMNS).flat_map(row).collect()
}

pub(super) fn layer_norm_backward(input: &[f32]) -> Vec<f32> {
    norm_backward(&input[..NORM], &input[NORM..], &input[NORM + 2 * NORM_COLUMNS..], true)
}

pub(super) fn rms_norm_backward(input: &[f32]) -> Vec<f32> {
    norm_backward(&input[..NORM], &input[NORM..], &input[NORM + NORM_COLUMNS..], false)
}

/// Returns the gradients of x, of gamma and, where the norm has one, of beta.
fn norm_backward(all_x: &[f32], gamma: &[f32], all_dy: &[f32], is_centred: bool) -> Vec<f32> {
    let mut out = Vec::new();
    let (mut for_gamma, mut for_beta) = (vec![0.0f32; NORM_COLUMNS], vec![0.0f32; NORM_COLUMNS]);
    for (x, dy) in all_x.chunks(NORM_COLUMNS).zip(all_dy.chunks(NORM_COLUMNS)) {
        let norm = Norm::of(x, is_centred);
        let mean = match is_centred {
            true => summed(NORM_COLUMNS, |sum, i| f32::mul_add(dy[i], gamma[i], sum)) * PART,
            false => 0.0,
        };
        let along = summed(NORM_COLUMNS, |sum, i| f32::mul_add(dy[i] * gamma[i], norm.applied(x[i]), sum)) * PART;
        for i in 0..NORM_COLUMNS {
            let right = norm.applied(x[i]);
            out.push(f32::mul_add(-right, along, f32::mul_add(dy[i], gamma[i], -mean)) * norm.scale);
            for_gamma[i] = f32::mul_add(dy[i], right, for_gamma[i]);
            for_beta[i] += dy[i];
        }
    }
    out.extend(for_gamma);
    if is_centred {
        out.extend(for_beta);
    }
    out
}

pub(super) fn softmax_forward(input: &[f32]) -> Vec<f32> {
    let row = |x: &[f32]| {
        let all = Exponents::of(x);
        x.iter().map(|x| all.share(*x)).collect::<Vec<_>>()
    };
    input[..SOFTMAX].chunks(SOFTMAX_COLUMNS).flat_map(row).collect()
}

pub(super) fn softmax_backward(input: &[f32]) -> Vec<f32> {
    let (x, dy) = input.split_at(SOFTMAX);
    let row = |(x, dy): (&[f32], &[f32])| {
        let all = Exponents::of(x);
        let along = summed(x.len(), |sum, i| f32::mul_add(all.share(x[i]), dy[i], sum));
        x.iter().zip(dy).map(|(x, dy)| all.share(*x) * (dy - along)).collect::<Vec<_>>()
    };
    x.chunks(SOFTMAX_COLUMNS).zip(dy.chunks(SOFTMAX_COLUMNS)).flat_map(row).collect()
}

pub(super) fn cross_entropy_forward(input: &[f32]) -> Vec<f32> {
    let (x, targets) = input.split_at(ENTROPY);
    let row = |(x, target): (&[f32], &f32)| {
        let all = Exponents::of(x);
        logarithm(all.sum) - (x[*target as usize] - all.largest)
    };
    x.chunks(CLASSES).zip(targets).map(row).collect()
}

/// The gradient of the mean loss over all rows.
pub(super) fn cross_entropy_backward(input: &[f32]) -> Vec<f32> {
    let (x, targets) = input.split_at(ENTROPY);
    let row = |(x, target): (&[f32], &f32)| {
        let all = Exponents::of(x);
        let gradient = |(class, x): (usize, &f32)| {
            let y = all.share(*x);
            (if class == *target as usize { y - 1.0 } else { y }) * (1.0 / ENTROPY_ROWS as f32)
        };
        x.iter().enumerate().map(gradient).collect::<Vec<_>>()
    };
    x.chunks(CLASSES).zip(targets).flat_map(row).collect()
}
