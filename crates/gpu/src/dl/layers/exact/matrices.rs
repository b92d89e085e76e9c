//! Layers that multiply: linear, convolution, attention.

use super::{
    super::layer_inputs::{Layer, sizes::*},
    functions::{SoftmaxStats, warp_sum},
};

/// Sums products over `depth`. The sums are exact for the inputs of the tensor cores, so their order does not matter.
fn product(rows: usize, columns: usize, depth: usize, term: impl Fn(usize, usize, usize) -> f32) -> Vec<f32> {
    let mut c = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            c.push((0..depth).fold(0.0, |sum, k| sum + term(row, column, k)));
        }
    }
    c
}

pub(super) fn linear_forward() -> Vec<f32> {
    let [x, w, b, _] = Layer::Linear.inputs();
    let mut y = product(LINEAR_ROWS, LINEAR_OUTPUTS, LINEAR_INPUTS, |row, column, k| {
        x[row * LINEAR_INPUTS + k] * w[column * LINEAR_INPUTS + k]
    });
    for (index, y) in y.iter_mut().enumerate() {
        *y += b[index % LINEAR_OUTPUTS];
    }
    y
}

pub(super) fn linear_backward() -> Vec<f32> {
    let [x, w, _, dy] = Layer::Linear.inputs();
    let mut all = product(LINEAR_ROWS, LINEAR_INPUTS, LINEAR_OUTPUTS, |row, column, k| {
        dy[row * LINEAR_OUTPUTS + k] * w[k * LINEAR_INPUTS + column]
    });
    all.extend(product(LINEAR_OUTPUTS, LINEAR_INPUTS, LINEAR_ROWS, |row, column, k| {
        dy[k * LINEAR_OUTPUTS + row] * x[k * LINEAR_INPUTS + column]
    }));
    all.extend(product(1, LINEAR_OUTPUTS, LINEAR_ROWS, |_, column, k| dy[k * LINEAR_OUTPUTS + column]));
    all
}

/// Returns the positions of the plane around (y, x) with the kernel positions that fall on them, in order.
fn conv_neighbours(y: usize, x: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..9).filter_map(move |k| {
        let (row, column) = ((y + k / 3).checked_sub(1)?, (x + k % 3).checked_sub(1)?);
        (row < CONV_SIDE && column < CONV_SIDE).then_some((row * CONV_SIDE + column, k))
    })
}

pub(super) fn conv2d_forward() -> Vec<f32> {
    let [x, w, b, _] = Layer::Conv2d.inputs();
    (0..CONV_Y)
        .map(|i| {
            let (image, o, at) = (i / (CONV_OUTPUTS * CONV_PLANE), i / CONV_PLANE % CONV_OUTPUTS, i % CONV_PLANE);
            let mut sum = b[o];
            for c in 0..CONV_INPUTS {
                let (plane, kernel) = ((image * CONV_INPUTS + c) * CONV_PLANE, (o * CONV_INPUTS + c) * 9);
                for (neighbour, k) in conv_neighbours(at / CONV_SIDE, at % CONV_SIDE) {
                    sum = x[plane + neighbour].mul_add(w[kernel + k], sum);
                }
            }
            sum
        })
        .collect()
}

pub(super) fn conv2d_backward() -> Vec<f32> {
    let [x, w, _, dy] = Layer::Conv2d.inputs();
    let mut all: Vec<f32> = (0..CONV_X)
        .map(|i| {
            let (image, c, at) = (i / (CONV_INPUTS * CONV_PLANE), i / CONV_PLANE % CONV_INPUTS, i % CONV_PLANE);
            let mut sum = 0.0;
            for o in 0..CONV_OUTPUTS {
                let (plane, kernel) = ((image * CONV_OUTPUTS + o) * CONV_PLANE, (o * CONV_INPUTS + c) * 9);
                for (neighbour, k) in conv_neighbours(at / CONV_SIDE, at % CONV_SIDE) {
                    sum = dy[plane + neighbour].mul_add(w[kernel + 8 - k], sum);
                }
            }
            sum
        })
        .collect();
    all.extend((0..CONV_W).map(|i| {
        let (o, c, kernel) = (i / (CONV_INPUTS * 9), i / 9 % CONV_INPUTS, i % 9);
        let mut sum = 0.0;
        for at in 0..CONV_IMAGES * CONV_PLANE {
            let (image, at) = (at / CONV_PLANE, at % CONV_PLANE);
            if let Some((neighbour, _)) = conv_neighbours(at / CONV_SIDE, at % CONV_SIDE).find(|(_, k)| *k == kernel) {
                let (given, seen) = ((image * CONV_OUTPUTS + o) * CONV_PLANE, (image * CONV_INPUTS + c) * CONV_PLANE);
                sum = dy[given + at].mul_add(x[seen + neighbour], sum);
            }
        }
        sum
    }));
    all.extend((0..CONV_OUTPUTS).map(|o| {
        (0..CONV_IMAGES * CONV_PLANE)
            .fold(0.0, |sum, at| sum + dy[(at / CONV_PLANE * CONV_OUTPUTS + o) * CONV_PLANE + at % CONV_PLANE])
    }));
    all
}

/// One over the square root of the width.
const ATTENTION_SCALE: f32 = 0.176_776_69;

type AttentionMatrix = Vec<[f32; ATTENTION_TOKENS]>;

fn token(numbers: &[f32], at: usize) -> &[f32] {
    &numbers[at * ATTENTION_WIDTH..(at + 1) * ATTENTION_WIDTH]
}

fn inner(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| a.mul_add(*b, sum))
}

/// Returns the attention weight of each token for each token.
fn attention_weights(q: &[f32], k: &[f32]) -> AttentionMatrix {
    (0..ATTENTION_TOKENS)
        .map(|at| {
            let scores: Vec<f32> = (0..=at).map(|j| inner(token(q, at), token(k, j)) * ATTENTION_SCALE).collect();
            let all = SoftmaxStats::from_row(&scores);
            std::array::from_fn(|j| if j <= at { all.softmax(scores[j]) } else { 0.0 })
        })
        .collect()
}

/// Returns the head's part of each input.
fn head<const N: usize>(inputs: &[Vec<f32>; N], head: usize) -> [&[f32]; N] {
    let numbers = ATTENTION_TOKENS * ATTENTION_WIDTH;
    std::array::from_fn(|i| &inputs[i][head * numbers..(head + 1) * numbers])
}

pub(super) fn attention_forward() -> Vec<f32> {
    let inputs = Layer::Attention.inputs::<4>();
    let mut y = Vec::with_capacity(ATTENTION_X);
    for [q, k, v, _] in (0..ATTENTION_HEADS).map(|at| head(&inputs, at)) {
        for (at, share) in attention_weights(q, k).iter().enumerate() {
            y.extend(
                (0..ATTENTION_WIDTH)
                    .map(|column| (0..=at).fold(0.0, |sum, j| share[j].mul_add(v[j * ATTENTION_WIDTH + column], sum))),
            );
        }
    }
    y
}

pub(super) fn attention_backward() -> Vec<f32> {
    let inputs = Layer::Attention.inputs::<4>();
    let (mut dq, mut dk, mut dv) = (Vec::with_capacity(3 * ATTENTION_X), Vec::new(), Vec::new());
    for [q, k, v, dy] in (0..ATTENTION_HEADS).map(|at| head(&inputs, at)) {
        let share = attention_weights(q, k);
        let score: AttentionMatrix = (0..ATTENTION_TOKENS)
            .map(|at| {
                let dot_products: Vec<f32> = (0..=at).map(|j| inner(token(dy, at), token(v, j))).collect();
                let along = warp_sum(at + 1, |sum, j| share[at][j].mul_add(dot_products[j], sum));
                std::array::from_fn(|j| {
                    if j <= at { share[at][j] * (dot_products[j] - along) * ATTENTION_SCALE } else { 0.0 }
                })
            })
            .collect();
        for i in 0..ATTENTION_TOKENS * ATTENTION_WIDTH {
            let (at, column) = (i / ATTENTION_WIDTH, i % ATTENTION_WIDTH);
            dq.push((0..=at).fold(0.0, |sum, j| score[at][j].mul_add(k[j * ATTENTION_WIDTH + column], sum)));
            let later = at..ATTENTION_TOKENS;
            dk.push(later.clone().fold(0.0, |sum, j| score[j][at].mul_add(q[j * ATTENTION_WIDTH + column], sum)));
            dv.push(later.fold(0.0, |sum, j| share[j][at].mul_add(dy[j * ATTENTION_WIDTH + column], sum)));
        }
    }
    dq.extend(dk);
    dq.extend(dv);
    dq
}
