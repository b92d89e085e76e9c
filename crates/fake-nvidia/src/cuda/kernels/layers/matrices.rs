//! Linear, convolution and attention.

use super::functions::{Exponents, summed};

/// Rows, inputs and outputs of the linear layer.
const SIDE: usize = 128;
const SQUARE: usize = SIDE * SIDE;
const IMAGES: usize = 2;
const CHANNELS_IN: usize = 8;
const CHANNELS_OUT: usize = 16;
const IMAGE_SIDE: usize = 16;
const PLANE: usize = IMAGE_SIDE * IMAGE_SIDE;
const HEADS: usize = 4;
const TOKENS: usize = 64;
const WIDTH: usize = 32;
const HEAD: usize = TOKENS * WIDTH;

const CONV_X: usize = IMAGES * CHANNELS_IN * PLANE;
const CONV_W: usize = CHANNELS_OUT * CHANNELS_IN * 9;
const CONV_Y: usize = IMAGES * CHANNELS_OUT * PLANE;

pub(super) const LINEAR_INPUT: usize = 3 * SQUARE + SIDE;
pub(super) const CONV_INPUT: usize = CONV_X + CONV_W + CHANNELS_OUT + CONV_Y;
pub(super) const ATTENTION_INPUT: usize = 4 * HEADS * HEAD;

/// Multiplies two square matrices. The inputs are such that sums are exact in any order.
fn multiply(a: impl Fn(usize, usize) -> f32, b: impl Fn(usize, usize) -> f32) -> impl Iterator<Item = f32> {
    (0..SQUARE).map(move |i| (0..SIDE).fold(0.0, |sum, k| sum + a(i / SIDE, k) * b(i % SIDE, k)))
}

pub(super) fn linear_forward(input: &[f32]) -> Vec<f32> {
    let (x, rest) = input.split_at(SQUARE);
    let (w, b) = rest.split_at(SQUARE);
    let product = multiply(|row, k| x[row * SIDE + k], |column, k| w[column * SIDE + k]);
    product.enumerate().map(|(i, sum)| sum + b[i % SIDE]).collect()
}

pub(super) fn linear_backward(input: &[f32]) -> Vec<f32> {
    let (x, rest) = input.split_at(SQUARE);
    let (w, dy) = (&rest[..SQUARE], &rest[SQUARE + SIDE..]);
    let dx = multiply(|row, k| dy[row * SIDE + k], |column, k| w[k * SIDE + column]);
    let dw = multiply(|row, k| dy[k * SIDE + row], |column, k| x[k * SIDE + column]);
    let db = (0..SIDE).map(|column| (0..SIDE).fold(0.0, |sum, row| sum + dy[row * SIDE + column]));
    dx.chain(dw).chain(db).collect()
}

/// Returns the places of the image around `at` that the kernel covers, each with its place in the kernel.
fn around(at: usize) -> impl Iterator<Item = (usize, usize)> {
    let (y, x) = (at / IMAGE_SIDE, at % IMAGE_SIDE);
    (0..9).filter_map(move |k| {
        // One more than the row and the column.
        let (row, column) = (y + k / 3, x + k % 3);
        let inside = (1..=IMAGE_SIDE).contains(&row) && (1..=IMAGE_SIDE).contains(&column);
        inside.then(|| ((row - 1) * IMAGE_SIDE + column - 1, k))
    })
}

pub(super) fn conv2d_forward(input: &[f32]) -> Vec<f32> {
    let (x, rest) = input.split_at(CONV_X);
    let (w, b) = rest.split_at(CONV_W);
    let number = |i: usize| {
        let (image, output, at) = (i / (CHANNELS_OUT * PLANE), i / PLANE % CHANNELS_OUT, i % PLANE);
        let mut sum = b[output];
        for channel in 0..CHANNELS_IN {
            let (plane, kernel) = ((image * CHANNELS_IN + channel) * PLANE, (output * CHANNELS_IN + channel) * 9);
            for (place, k) in around(at) {
                sum = f32::mul_add(x[plane + place], w[kernel + k], sum);
            }
        }
        sum
    };
    (0..CONV_Y).map(number).collect()
}

pub(super) fn conv2d_backward(input: &[f32]) -> Vec<f32> {
    let (x, rest) = input.split_at(CONV_X);
    let (w, dy) = (&rest[..CONV_W], &rest[CONV_W + CHANNELS_OUT..]);
    let dx = |i: usize| {
        let (image, channel, at) = (i / (CHANNELS_IN * PLANE), i / PLANE % CHANNELS_IN, i % PLANE);
        let mut sum = 0.0;
        for output in 0..CHANNELS_OUT {
            let (plane, kernel) = ((image * CHANNELS_OUT + output) * PLANE, (output * CHANNELS_IN + channel) * 9);
            for (place, k) in around(at) {
                // An output sees this input through the flipped kernel.
                sum = f32::mul_add(dy[plane + place], w[kernel + 8 - k], sum);
            }
        }
        sum
    };
    let dw = |i: usize| {
        let (output, channel, wanted) = (i / (CHANNELS_IN * 9), i / 9 % CHANNELS_IN, i % 9);
        let mut sum = 0.0;
        for image in 0..IMAGES {
            let (to, from) = ((image * CHANNELS_OUT + output) * PLANE, (image * CHANNELS_IN + channel) * PLANE);
            for at in 0..PLANE {
                for (place, _) in around(at).filter(|(_, k)| *k == wanted) {
                    sum = f32::mul_add(dy[to + at], x[from + place], sum);
                }
            }
        }
        sum
    };
    let db = |output: usize| {
        let planes = (0..IMAGES).map(|image| (image * CHANNELS_OUT + output) * PLANE);
        planes.flat_map(|plane| &dy[plane..plane + PLANE]).fold(0.0, |sum, dy| sum + dy)
    };
    (0..CONV_X).map(dx).chain((0..CONV_W).map(dw)).chain((0..CHANNELS_OUT).map(db)).collect()
}

/// One over the square root of the width.
const SCALE: f32 = 0.176_776_69;

type TokenMatrix = Vec<[f32; TOKENS]>;

fn inner(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| f32::mul_add(*a, *b, sum))
}

fn token(numbers: &[f32], token: usize) -> &[f32] {
    &numbers[token * WIDTH..][..WIDTH]
}

/// Returns how much each token attends to itself and to those before it.
fn shares(q: &[f32], k: &[f32]) -> TokenMatrix {
    let row = |at: usize| {
        let scores: Vec<f32> = (0..=at).map(|j| inner(token(q, at), token(k, j)) * SCALE).collect();
        let all = Exponents::of(&scores);
        let mut row = [0.0; TOKENS];
        row.iter_mut().zip(scores).for_each(|(share, score)| *share = all.share(score));
        row
    };
    (0..TOKENS).map(row).collect()
}

/// Returns q, k, v and dy of a head.
fn tensors(input: &[f32], head: usize) -> [&[f32]; 4] {
    [0, 1, 2, 3].map(|tensor| &input[(tensor * HEADS + head) * HEAD..][..HEAD])
}

pub(super) fn attention_forward(input: &[f32]) -> Vec<f32> {
    let head = |head: usize| {
        let [q, k, v, _] = tensors(input, head);
        let share = shares(q, k);
        let number = move |i: usize| {
            let (at, column) = (i / WIDTH, i % WIDTH);
            (0..=at).fold(0.0, |sum, j| f32::mul_add(share[at][j], v[j * WIDTH + column], sum))
        };
        (0..HEAD).map(number).collect::<Vec<_>>()
    };
    (0..HEADS).flat_map(head).collect()
}

pub(super) fn attention_backward(input: &[f32]) -> Vec<f32> {
    let mut out = [const { Vec::new() }; 3];
    for [q, k, v, dy] in (0..HEADS).map(|head| tensors(input, head)) {
        let share = shares(q, k);
        let score = score_gradients(&share, v, dy);
        for i in 0..HEAD {
            let (at, column) = (i / WIDTH, i % WIDTH);
            let before = |sum, j: usize| f32::mul_add(score[at][j], k[j * WIDTH + column], sum);
            let for_k = |sum, j: usize| f32::mul_add(score[j][at], q[j * WIDTH + column], sum);
            let for_v = |sum, j: usize| f32::mul_add(share[j][at], dy[j * WIDTH + column], sum);
            out[0].push((0..=at).fold(0.0, before));
            out[1].push((at..TOKENS).fold(0.0, for_k));
            out[2].push((at..TOKENS).fold(0.0, for_v));
        }
    }
    out.concat()
}

/// Returns the gradient of each score, before its scale was applied.
fn score_gradients(share: &TokenMatrix, v: &[f32], dy: &[f32]) -> TokenMatrix {
    let row = |at: usize| {
        let products: Vec<f32> = (0..=at).map(|j| inner(token(dy, at), token(v, j))).collect();
        let along = summed(at + 1, |sum, j| f32::mul_add(share[at][j], products[j], sum));
        let mut row = [0.0; TOKENS];
        for j in 0..=at {
            row[j] = share[at][j] * (products[j] - along) * SCALE;
        }
        row
    };
    (0..TOKENS).map(row).collect()
}
