//! GELU, embedding and Adam.

use super::functions::exponential;

const GELU: usize = 32_768;
const TOKENS: usize = 256;
const WORDS: usize = 128;
const WIDTH: usize = 64;
const ADAM: usize = 32_768;

pub(super) const GELU_INPUT: usize = 2 * GELU;
pub(super) const EMBEDDING_INPUT: usize = TOKENS + WORDS * WIDTH + TOKENS * WIDTH;
pub(super) const ADAM_INPUT: usize = 4 * ADAM;

/// Returns the factor of GELU and the slope of its exponent: x / (1 + exp(-u)), u = x (1.5957691 + 0.07135481 x²).
fn gate(x: f32) -> (f32, f32) {
    const LINEAR: f32 = 1.595_769_2;
    const CUBIC: f32 = 0.071_354_814;
    let square = x * x;
    let u = x * f32::mul_add(square, CUBIC, LINEAR);
    (1.0 / (1.0 + exponential(-u)), f32::mul_add(square, 3.0 * CUBIC, LINEAR))
}

pub(super) fn gelu_forward(input: &[f32]) -> Vec<f32> {
    input[..GELU].iter().map(|x| x * gate(*x).0).collect()
}

pub(super) fn gelu_backward(input: &[f32]) -> Vec<f32> {
    let (x, dy) = input.split_at(GELU);
    let derivative = |(x, dy): (&f32, &f32)| {
        let (open, slope) = gate(*x);
        dy * f32::mul_add(x * slope, open * (1.0 - open), open)
    };
    x.iter().zip(dy).map(derivative).collect()
}

pub(super) fn embedding_forward(input: &[f32]) -> Vec<f32> {
    let (words, table) = input.split_at(TOKENS);
    words.iter().flat_map(|word| &table[*word as usize * WIDTH..][..WIDTH]).copied().collect()
}

pub(super) fn embedding_backward(input: &[f32]) -> Vec<f32> {
    let (words, dy) = (&input[..TOKENS], &input[TOKENS + WORDS * WIDTH..]);
    let mut table = vec![0.0; WORDS * WIDTH];
    for (token, word) in words.iter().enumerate() {
        for column in 0..WIDTH {
            table[*word as usize * WIDTH + column] += dy[token * WIDTH + column];
        }
    }
    table
}

/// The tenth step.
pub(super) fn adam_step(input: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; 3 * ADAM];
    for i in 0..ADAM {
        let [w, g, m, v] = [0, 1, 2, 3].map(|tensor| input[tensor * ADAM + i]);
        let first = f32::mul_add(m, 0.9, 0.1 * g);
        let second = f32::mul_add(v, 0.999, 0.001 * g * g);
        // Divided by 1 - 0.9¹⁰ and 1 - 0.999¹⁰.
        let root = (second / 0.009_955_119).sqrt() + 1e-8;
        out[i] = f32::mul_add(-0.001, first / 0.651_321_53 / root, w);
        out[ADAM + i] = first;
        out[2 * ADAM + i] = second;
    }
    out
}
