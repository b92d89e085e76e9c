//! Layers that work on rows: the norms, softmax, cross-entropy.

use super::{
    super::layer_inputs::{Layer, constants::NORM_EPSILON, sizes::*},
    functions::{SoftmaxStats, logarithm, warp_sum},
};

const PART: f32 = 1.0 / NORM_COLUMNS as f32;

struct NormStats {
    mean: f32,
    scale: f32,
}

impl NormStats {
    /// Returns the statistics of a row. `CENTRED`: a layer norm, which subtracts the mean.
    fn from_row<const CENTRED: bool>(x: &[f32]) -> Self {
        let mean = if CENTRED { warp_sum(x.len(), |sum, i| sum + x[i]) * PART } else { 0.0 };
        let square = warp_sum(x.len(), |sum, i| {
            let d = x[i] - mean;
            d.mul_add(d, sum)
        });
        Self { mean, scale: 1.0 / square.mul_add(PART, NORM_EPSILON as f32).sqrt() }
    }

    fn normalized(&self, x: f32) -> f32 {
        (x - self.mean) * self.scale
    }
}

pub(super) fn layernorm_forward() -> Vec<f32> {
    let [x, gamma, beta, _] = Layer::LayerNorm.inputs();
    let rows = x.chunks(NORM_COLUMNS).flat_map(|x| {
        let norm = NormStats::from_row::<true>(x);
        x.iter().zip(gamma.iter().zip(&beta)).map(move |(x, (gamma, beta))| norm.normalized(*x).mul_add(*gamma, *beta))
    });
    rows.collect()
}

pub(super) fn rmsnorm_forward() -> Vec<f32> {
    let [x, gamma, _] = Layer::RmsNorm.inputs();
    let rows = x.chunks(NORM_COLUMNS).flat_map(|x| {
        let norm = NormStats::from_row::<false>(x);
        x.iter().zip(&gamma).map(move |(x, gamma)| norm.normalized(*x) * gamma)
    });
    rows.collect()
}

pub(super) fn layernorm_backward() -> Vec<f32> {
    let [x, gamma, _, dy] = Layer::LayerNorm.inputs();
    norm_backward::<true>(&x, &gamma, &dy)
}

pub(super) fn rmsnorm_backward() -> Vec<f32> {
    let [x, gamma, dy] = Layer::RmsNorm.inputs();
    norm_backward::<false>(&x, &gamma, &dy)
}

fn norm_backward<const CENTRED: bool>(x: &[f32], gamma: &[f32], dy: &[f32]) -> Vec<f32> {
    let mut all = Vec::with_capacity(x.len() + 2 * NORM_COLUMNS);
    let (mut for_gamma, mut for_beta) = (vec![0.0f32; NORM_COLUMNS], vec![0.0f32; NORM_COLUMNS]);
    for (x, dy) in x.chunks(NORM_COLUMNS).zip(dy.chunks(NORM_COLUMNS)) {
        let norm = NormStats::from_row::<CENTRED>(x);
        let mean = if CENTRED { warp_sum(x.len(), |sum, i| dy[i].mul_add(gamma[i], sum)) * PART } else { 0.0 };
        let along = warp_sum(x.len(), |sum, i| (dy[i] * gamma[i]).mul_add(norm.normalized(x[i]), sum)) * PART;
        for i in 0..NORM_COLUMNS {
            let right = norm.normalized(x[i]);
            all.push((-right).mul_add(along, dy[i].mul_add(gamma[i], -mean)) * norm.scale);
            for_gamma[i] = dy[i].mul_add(right, for_gamma[i]);
            for_beta[i] += dy[i];
        }
    }
    all.extend(for_gamma);
    if CENTRED {
        all.extend(for_beta);
    }
    all
}

pub(super) fn softmax_forward() -> Vec<f32> {
    let [x, _] = Layer::Softmax.inputs();
    let rows = x.chunks(SOFTMAX_COLUMNS).flat_map(|x| {
        let all = SoftmaxStats::from_row(x);
        x.iter().map(move |x| all.softmax(*x))
    });
    rows.collect()
}

pub(super) fn softmax_backward() -> Vec<f32> {
    let [x, dy] = Layer::Softmax.inputs();
    let mut dx = Vec::with_capacity(x.len());
    for (x, dy) in x.chunks(SOFTMAX_COLUMNS).zip(dy.chunks(SOFTMAX_COLUMNS)) {
        let all = SoftmaxStats::from_row(x);
        let y: Vec<f32> = x.iter().map(|x| all.softmax(*x)).collect();
        let along = warp_sum(y.len(), |sum, i| y[i].mul_add(dy[i], sum));
        dx.extend(y.iter().zip(dy).map(|(y, dy)| y * (dy - along)));
    }
    dx
}

pub(super) fn cross_entropy_forward() -> Vec<f32> {
    let [x, targets] = Layer::CrossEntropy.inputs();
    let rows = x.chunks(ENTROPY_CLASSES).zip(&targets).map(|(x, target)| {
        let all = SoftmaxStats::from_row(x);
        logarithm(all.sum) - (x[*target as usize] - all.most)
    });
    rows.collect()
}

pub(super) fn cross_entropy_backward() -> Vec<f32> {
    let [x, targets] = Layer::CrossEntropy.inputs();
    let mut dx = Vec::with_capacity(x.len());
    for (x, target) in x.chunks(ENTROPY_CLASSES).zip(&targets) {
        let all = SoftmaxStats::from_row(x);
        dx.extend(x.iter().enumerate().map(|(i, x)| {
            let y = all.softmax(*x);
            (if i == *target as usize { y - 1.0 } else { y }) * (1.0 / ENTROPY_ROWS as f32)
        }));
    }
    dx
}
