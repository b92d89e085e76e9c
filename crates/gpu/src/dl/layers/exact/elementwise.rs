//! Elementwise layers: GELU, embedding, Adam.

use super::{
    super::layer_inputs::{Layer, constants::*, sizes::*},
    functions::exponential,
};

/// 2 √(2/π), and that times 0.044715.
const GELU_LINEAR: f32 = 1.595_769_2;
const GELU_CUBIC: f32 = 0.071_354_814;

struct GeluValue {
    open: f32,
    slope: f32,
}

impl GeluValue {
    fn compute(x: f32) -> Self {
        let square = x * x;
        let u = x * square.mul_add(GELU_CUBIC, GELU_LINEAR);
        Self { open: 1.0 / (1.0 + exponential(-u)), slope: square.mul_add(3.0 * GELU_CUBIC, GELU_LINEAR) }
    }
}

pub(super) fn gelu_forward() -> Vec<f32> {
    let [x, _] = Layer::Gelu.inputs();
    x.iter().map(|x| x * GeluValue::compute(*x).open).collect()
}

pub(super) fn gelu_backward() -> Vec<f32> {
    let [x, dy] = Layer::Gelu.inputs();
    let each = x.iter().zip(&dy).map(|(x, dy)| {
        let at = GeluValue::compute(*x);
        dy * (x * at.slope).mul_add(at.open * (1.0 - at.open), at.open)
    });
    each.collect()
}

pub(super) fn embedding_forward() -> Vec<f32> {
    let [tokens, table, _] = Layer::Embedding.inputs();
    let rows = tokens.iter().flat_map(|token| {
        let first = *token as usize * EMBEDDING_WIDTH;
        &table[first..first + EMBEDDING_WIDTH]
    });
    rows.copied().collect()
}

pub(super) fn embedding_backward() -> Vec<f32> {
    let [tokens, _, dy] = Layer::Embedding.inputs();
    let mut table = vec![0.0; EMBEDDING_TABLE];
    for (token, dy) in tokens.iter().zip(dy.chunks(EMBEDDING_WIDTH)) {
        let first = *token as usize * EMBEDDING_WIDTH;
        for (sum, dy) in table[first..first + EMBEDDING_WIDTH].iter_mut().zip(dy) {
            *sum += dy;
        }
    }
    table
}

/// The constants of [`Adam`](Layer::Adam) in single precision, and 1 - beta and 1 - beta¹⁰ rounded once.
const RATE: f32 = ADAM_RATE as f32;
const BETA1: f32 = ADAM_BETA1 as f32;
const BETA2: f32 = ADAM_BETA2 as f32;
const REST1: f32 = 0.1;
const REST2: f32 = 0.001;
const BIAS1: f32 = 0.651_321_53;
const BIAS2: f32 = 0.009_955_119;

pub(super) fn adam_step() -> Vec<f32> {
    let [w, g, m, v] = Layer::Adam.inputs();
    let mut all = vec![0.0; 3 * ADAM_NUMBERS];
    for i in 0..ADAM_NUMBERS {
        let first = m[i].mul_add(BETA1, REST1 * g[i]);
        let second = v[i].mul_add(BETA2, REST2 * g[i] * g[i]);
        let root = (second / BIAS2).sqrt() + ADAM_EPSILON as f32;
        all[i] = (-RATE).mul_add(first / BIAS1 / root, w[i]);
        all[ADAM_NUMBERS + i] = first;
        all[2 * ADAM_NUMBERS + i] = second;
    }
    all
}
