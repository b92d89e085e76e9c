//! The layers by their textbook formulas, in double precision: the reference for the outputs.
//!
//! Nothing here follows the kernels. Tests compare each backward pass with finite differences of the forward pass.

use std::f64::consts::PI;

use super::{
    layer_inputs::{Layer, constants::*, sizes::*},
    passes::Pass,
};

type Values = Vec<f64>;

/// Returns all outputs of a pass, in memory order.
pub fn outputs(pass: Pass) -> Values {
    match pass {
        Pass::LinearForward => with_inputs(Layer::Linear, |[x, w, b, _]| linear(&x, &w, &b)),
        Pass::LinearBackward => with_inputs(Layer::Linear, |[x, w, _, dy]| linear_backward(&x, &w, &dy)),
        Pass::Conv2dForward => with_inputs(Layer::Conv2d, |[x, w, b, _]| conv2d(&x, &w, &b)),
        Pass::Conv2dBackward => with_inputs(Layer::Conv2d, |[x, w, _, dy]| conv2d_backward(&x, &w, &dy)),
        Pass::LayerNormForward => with_inputs(Layer::LayerNorm, |[x, gamma, beta, _]| layernorm(&x, &gamma, &beta)),
        Pass::LayerNormBackward => {
            with_inputs(Layer::LayerNorm, |[x, gamma, _, dy]| layernorm_backward(&x, &gamma, &dy))
        }
        Pass::RmsNormForward => with_inputs(Layer::RmsNorm, |[x, gamma, _]| rmsnorm(&x, &gamma)),
        Pass::RmsNormBackward => with_inputs(Layer::RmsNorm, |[x, gamma, dy]| rmsnorm_backward(&x, &gamma, &dy)),
        Pass::SoftmaxForward => with_inputs(Layer::Softmax, |[x, _]| softmax_rows(&x)),
        Pass::SoftmaxBackward => with_inputs(Layer::Softmax, |[x, dy]| softmax_backward(&x, &dy)),
        Pass::GeluForward => with_inputs(Layer::Gelu, |[x, _]| x.iter().map(|x| gelu(*x)).collect()),
        Pass::GeluBackward => {
            with_inputs(Layer::Gelu, |[x, dy]| x.iter().zip(&dy).map(|(x, dy)| dy * gelu_slope(*x)).collect())
        }
        Pass::AttentionForward => with_inputs(Layer::Attention, |[q, k, v, _]| attention(&q, &k, &v)),
        Pass::AttentionBackward => with_inputs(Layer::Attention, |[q, k, v, dy]| attention_backward(&q, &k, &v, &dy)),
        Pass::EmbeddingForward => with_inputs(Layer::Embedding, |[tokens, table, _]| embedding(&tokens, &table)),
        Pass::EmbeddingBackward => with_inputs(Layer::Embedding, |[tokens, _, dy]| embedding_backward(&tokens, &dy)),
        Pass::CrossEntropyForward => with_inputs(Layer::CrossEntropy, |[x, targets]| cross_entropy(&x, &targets)),
        Pass::CrossEntropyBackward => {
            with_inputs(Layer::CrossEntropy, |[x, targets]| cross_entropy_backward(&x, &targets))
        }
        Pass::AdamStep => with_inputs(Layer::Adam, |[w, g, m, v]| adam(&w, &g, &m, &v)),
    }
}

fn with_inputs<const N: usize>(layer: Layer, of: impl FnOnce([Values; N]) -> Values) -> Values {
    of(layer.inputs().map(|numbers| numbers.into_iter().map(f64::from).collect()))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor` times a row to another.
fn add_row(to: &mut [f64], factor: f64, row: &[f64]) {
    for (to, x) in to.iter_mut().zip(row) {
        *to += factor * x;
    }
}

fn linear(x: &[f64], w: &[f64], b: &[f64]) -> Values {
    let rows = x.chunks(LINEAR_INPUTS);
    rows.flat_map(|x| w.chunks(LINEAR_INPUTS).zip(b).map(move |(w, b)| dot(x, w) + b)).collect()
}

fn linear_backward(x: &[f64], w: &[f64], dy: &[f64]) -> Values {
    let (mut dx, mut dw, mut db) = (vec![0.0; LINEAR_X], vec![0.0; LINEAR_W], vec![0.0; LINEAR_OUTPUTS]);
    for (row, dy) in dy.chunks(LINEAR_OUTPUTS).enumerate() {
        let here = row * LINEAR_INPUTS..(row + 1) * LINEAR_INPUTS;
        for (o, dy) in dy.iter().enumerate() {
            let there = o * LINEAR_INPUTS..(o + 1) * LINEAR_INPUTS;
            add_row(&mut dx[here.clone()], *dy, &w[there.clone()]);
            add_row(&mut dw[there], *dy, &x[here.clone()]);
            db[o] += dy;
        }
    }
    [dx, dw, db].concat()
}

/// Calls `term` for every multiplication of a convolution, with the positions in y, x and w.
fn conv2d_terms(mut term: impl FnMut(usize, usize, usize)) {
    for y in 0..CONV_Y {
        let (image, o) = (y / CONV_PLANE / CONV_OUTPUTS, y / CONV_PLANE % CONV_OUTPUTS);
        let (row, column) = (y / CONV_SIDE % CONV_SIDE, y % CONV_SIDE);
        for c in 0..CONV_INPUTS {
            for k in 0..9 {
                let (row, column) = (row + k / 3, column + k % 3);
                if (1..=CONV_SIDE).contains(&row) && (1..=CONV_SIDE).contains(&column) {
                    let plane = (image * CONV_INPUTS + c) * CONV_PLANE;
                    term(y, plane + (row - 1) * CONV_SIDE + column - 1, (o * CONV_INPUTS + c) * 9 + k);
                }
            }
        }
    }
}

fn conv2d(x: &[f64], w: &[f64], b: &[f64]) -> Values {
    let mut y: Values = (0..CONV_Y).map(|y| b[y / CONV_PLANE % CONV_OUTPUTS]).collect();
    conv2d_terms(|to, from, k| y[to] += x[from] * w[k]);
    y
}

fn conv2d_backward(x: &[f64], w: &[f64], dy: &[f64]) -> Values {
    let (mut dx, mut dw, mut db) = (vec![0.0; CONV_X], vec![0.0; CONV_W], vec![0.0; CONV_OUTPUTS]);
    conv2d_terms(|to, from, k| {
        dx[from] += dy[to] * w[k];
        dw[k] += dy[to] * x[from];
    });
    for (y, dy) in dy.iter().enumerate() {
        db[y / CONV_PLANE % CONV_OUTPUTS] += dy;
    }
    [dx, dw, db].concat()
}

fn mean(x: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = x.len() as f64;
    x.sum::<f64>() / count
}

fn layernorm(x: &[f64], gamma: &[f64], beta: &[f64]) -> Values {
    let mut y = rmsnorm(&centred(x), gamma);
    for row in y.chunks_mut(NORM_COLUMNS) {
        add_row(row, 1.0, beta);
    }
    y
}

/// Subtracts from each row its mean.
fn centred(x: &[f64]) -> Values {
    let rows = x.chunks(NORM_COLUMNS).flat_map(|x| {
        let mean = mean(x.iter().copied());
        x.iter().map(move |x| x - mean)
    });
    rows.collect()
}

fn layernorm_backward(x: &[f64], gamma: &[f64], dy: &[f64]) -> Values {
    let all = rmsnorm_backward(&centred(x), gamma, dy);
    // Subtracting the mean is its own transpose.
    let (dx, dgamma) = all.split_at(NORM_X);
    let mut dbeta = vec![0.0; NORM_COLUMNS];
    for dy in dy.chunks(NORM_COLUMNS) {
        add_row(&mut dbeta, 1.0, dy);
    }
    [centred(dx), dgamma.to_vec(), dbeta].concat()
}

fn rms(x: &[f64]) -> f64 {
    (mean(x.iter().map(|x| x * x)) + NORM_EPSILON).sqrt()
}

fn rmsnorm(x: &[f64], gamma: &[f64]) -> Values {
    let rows = x.chunks(NORM_COLUMNS).flat_map(|x| {
        let rms = rms(x);
        x.iter().zip(gamma).map(move |(x, gamma)| x / rms * gamma)
    });
    rows.collect()
}

fn rmsnorm_backward(x: &[f64], gamma: &[f64], dy: &[f64]) -> Values {
    let (mut dx, mut dgamma) = (Vec::with_capacity(NORM_X), vec![0.0; NORM_COLUMNS]);
    for (x, dy) in x.chunks(NORM_COLUMNS).zip(dy.chunks(NORM_COLUMNS)) {
        let rms = rms(x);
        let weighted: Values = dy.iter().zip(gamma).map(|(dy, gamma)| dy * gamma).collect();
        let along = dot(&weighted, x) / NORM_COLUMNS as f64 / rms.powi(3);
        dx.extend(weighted.iter().zip(x).map(|(dy, x)| dy / rms - x * along));
        for ((sum, dy), x) in dgamma.iter_mut().zip(dy).zip(x) {
            *sum += dy * x / rms;
        }
    }
    [dx, dgamma].concat()
}

fn softmax(x: &[f64]) -> Values {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Values = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.iter().map(|x| x / sum).collect()
}

/// Returns the gradient through the softmax of one row.
fn softmax_gradient(y: &[f64], dy: &[f64]) -> Values {
    let along = dot(y, dy);
    y.iter().zip(dy).map(|(y, dy)| y * (dy - along)).collect()
}

fn softmax_rows(x: &[f64]) -> Values {
    x.chunks(SOFTMAX_COLUMNS).flat_map(softmax).collect()
}

fn softmax_backward(x: &[f64], dy: &[f64]) -> Values {
    let rows = x.chunks(SOFTMAX_COLUMNS).zip(dy.chunks(SOFTMAX_COLUMNS));
    rows.flat_map(|(x, dy)| softmax_gradient(&softmax(x), dy)).collect()
}

/// Returns √(2/π) (x + 0.044715 x³), and its slope.
fn gelu_inner(x: f64) -> (f64, f64) {
    let factor = (2.0 / PI).sqrt();
    (factor * (x + 0.044_715 * x.powi(3)), factor * (1.0 + 3.0 * 0.044_715 * x * x))
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + gelu_inner(x).0.tanh())
}

fn gelu_slope(x: f64) -> f64 {
    let (u, slope) = gelu_inner(x);
    0.5 * (1.0 + u.tanh()) + 0.5 * x * slope / u.cosh().powi(2)
}

/// Returns the numbers of one token of one head.
fn token(numbers: &[f64], at: usize) -> &[f64] {
    &numbers[at * ATTENTION_WIDTH..(at + 1) * ATTENTION_WIDTH]
}

fn token_mut(numbers: &mut [f64], at: usize) -> &mut [f64] {
    &mut numbers[at * ATTENTION_WIDTH..(at + 1) * ATTENTION_WIDTH]
}

fn attention_scale() -> f64 {
    1.0 / (ATTENTION_WIDTH as f64).sqrt()
}

/// Returns the attention weight of each token from the first of its head up to this one.
fn attention_weights(q: &[f64], k: &[f64], at: usize) -> Values {
    let first = at - at % ATTENTION_TOKENS;
    let scores: Values = (first..=at).map(|j| dot(token(q, at), token(k, j)) * attention_scale()).collect();
    softmax(&scores)
}

fn attention(q: &[f64], k: &[f64], v: &[f64]) -> Values {
    let mut y = vec![0.0; ATTENTION_X];
    for at in 0..ATTENTION_HEADS * ATTENTION_TOKENS {
        for (share, j) in attention_weights(q, k, at).iter().zip(at - at % ATTENTION_TOKENS..) {
            add_row(token_mut(&mut y, at), *share, token(v, j));
        }
    }
    y
}

fn attention_backward(q: &[f64], k: &[f64], v: &[f64], dy: &[f64]) -> Values {
    let [mut dq, mut dk, mut dv] = [const { Vec::new() }; 3].map(|mut empty: Values| {
        empty.resize(ATTENTION_X, 0.0);
        empty
    });
    for at in 0..ATTENTION_HEADS * ATTENTION_TOKENS {
        let first = at - at % ATTENTION_TOKENS;
        let (share, dy) = (attention_weights(q, k, at), token(dy, at));
        let dot_products: Values = (first..=at).map(|j| dot(dy, token(v, j))).collect();
        for ((share, score), j) in share.iter().zip(softmax_gradient(&share, &dot_products)).zip(first..) {
            let score = score * attention_scale();
            add_row(token_mut(&mut dq, at), score, token(k, j));
            add_row(token_mut(&mut dk, j), score, token(q, at));
            add_row(token_mut(&mut dv, j), *share, dy);
        }
    }
    [dq, dk, dv].concat()
}

fn embedding(tokens: &[f64], table: &[f64]) -> Values {
    let rows = tokens.iter().map(|token| *token as usize * EMBEDDING_WIDTH);
    rows.flat_map(|first| table[first..first + EMBEDDING_WIDTH].iter().copied()).collect()
}

fn embedding_backward(tokens: &[f64], dy: &[f64]) -> Values {
    let mut table = vec![0.0; EMBEDDING_TABLE];
    for (token, dy) in tokens.iter().zip(dy.chunks(EMBEDDING_WIDTH)) {
        add_row(&mut table[*token as usize * EMBEDDING_WIDTH..][..EMBEDDING_WIDTH], 1.0, dy);
    }
    table
}

fn cross_entropy(x: &[f64], targets: &[f64]) -> Values {
    let rows = x.chunks(ENTROPY_CLASSES).zip(targets);
    rows.map(|(x, target)| -softmax(x)[*target as usize].ln()).collect()
}

/// Returns the gradient of the mean over all rows.
fn cross_entropy_backward(x: &[f64], targets: &[f64]) -> Values {
    let rows = x.chunks(ENTROPY_CLASSES).zip(targets).flat_map(|(x, target)| {
        let mut y = softmax(x);
        y[*target as usize] -= 1.0;
        y
    });
    rows.map(|y| y / ENTROPY_ROWS as f64).collect()
}

/// Returns the parameters, then both moments.
fn adam(w: &[f64], g: &[f64], m: &[f64], v: &[f64]) -> Values {
    let blend = |beta: f64, old: f64, new: f64| beta * old + (1.0 - beta) * new;
    let m: Values = m.iter().zip(g).map(|(m, g)| blend(ADAM_BETA1, *m, *g)).collect();
    let v: Values = v.iter().zip(g).map(|(v, g)| blend(ADAM_BETA2, *v, g * g)).collect();
    let (bias1, bias2) = (1.0 - ADAM_BETA1.powi(ADAM_STEP), 1.0 - ADAM_BETA2.powi(ADAM_STEP));
    let step = |m: f64, v: f64| ADAM_RATE * (m / bias1) / ((v / bias2).sqrt() + ADAM_EPSILON);
    let w = w.iter().zip(m.iter().zip(&v)).map(|(w, (m, v))| w - step(*m, *v)).collect();
    [w, m, v].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the gradient for one input with finite differences of the forward pass.
    struct Moved<const N: usize> {
        inputs: [Values; N],
        dy: Values,
    }

    impl<const N: usize> Moved<N> {
        fn of<const ALL: usize>(layer: Layer) -> Self {
            let all = layer.inputs::<ALL>().map(|numbers| numbers.into_iter().map(f64::from).collect::<Values>());
            let dy = all[ALL - 1].clone();
            Self { inputs: std::array::from_fn(|i| all[i].clone()), dy }
        }

        fn holds(&self, input: usize, gradient: &[f64], forward: impl Fn(&[Values; N]) -> Values) {
            assert_eq!(gradient.len(), self.inputs[input].len());
            let step = 1e-5;
            for index in [0, 1, gradient.len() / 3, gradient.len() / 2 + 5, gradient.len() - 1] {
                let at = |by: f64| {
                    let mut inputs = self.inputs.clone();
                    inputs[input][index] += by;
                    forward(&inputs)
                };
                let change = at(step).iter().zip(at(-step)).map(|(more, less)| more - less).collect::<Values>();
                let expected = dot(&change, &self.dy) / (2.0 * step);
                let off = (gradient[index] - expected).abs();
                assert!(
                    off < 1e-7 * (1.0 + expected.abs()),
                    "input {input} at {index}: {} and {expected}",
                    gradient[index]
                );
            }
        }
    }

    #[test]
    fn the_linear_gradient_matches_finite_differences() {
        let moved = Moved::<3>::of::<4>(Layer::Linear);
        let gradients = outputs(Pass::LinearBackward);
        let forward = |[x, w, b]: &[Values; 3]| linear(x, w, b);
        moved.holds(0, &gradients[..LINEAR_X], forward);
        moved.holds(1, &gradients[LINEAR_X..LINEAR_X + LINEAR_W], forward);
        moved.holds(2, &gradients[LINEAR_X + LINEAR_W..], forward);
    }

    #[test]
    fn the_convolution_gradient_matches_finite_differences() {
        let moved = Moved::<3>::of::<4>(Layer::Conv2d);
        let gradients = outputs(Pass::Conv2dBackward);
        let forward = |[x, w, b]: &[Values; 3]| conv2d(x, w, b);
        moved.holds(0, &gradients[..CONV_X], forward);
        moved.holds(1, &gradients[CONV_X..CONV_X + CONV_W], forward);
        moved.holds(2, &gradients[CONV_X + CONV_W..], forward);
    }

    #[test]
    fn the_norm_gradients_match_finite_differences() {
        let moved = Moved::<3>::of::<4>(Layer::LayerNorm);
        let gradients = outputs(Pass::LayerNormBackward);
        let forward = |[x, gamma, beta]: &[Values; 3]| layernorm(x, gamma, beta);
        moved.holds(0, &gradients[..NORM_X], forward);
        moved.holds(1, &gradients[NORM_X..NORM_X + NORM_COLUMNS], forward);
        moved.holds(2, &gradients[NORM_X + NORM_COLUMNS..], forward);

        let moved = Moved::<2>::of::<3>(Layer::RmsNorm);
        let gradients = outputs(Pass::RmsNormBackward);
        let forward = |[x, gamma]: &[Values; 2]| rmsnorm(x, gamma);
        moved.holds(0, &gradients[..NORM_X], forward);
        moved.holds(1, &gradients[NORM_X..], forward);
    }

    #[test]
    fn the_softmax_and_gelu_gradients_match_finite_differences() {
        let softmax = |[x]: &[Values; 1]| softmax_rows(x);
        Moved::<1>::of::<2>(Layer::Softmax).holds(0, &outputs(Pass::SoftmaxBackward), softmax);
        let gelu = |[x]: &[Values; 1]| x.iter().map(|x| gelu(*x)).collect();
        Moved::<1>::of::<2>(Layer::Gelu).holds(0, &outputs(Pass::GeluBackward), gelu);
    }

    #[test]
    fn the_attention_gradient_matches_finite_differences() {
        let moved = Moved::<3>::of::<4>(Layer::Attention);
        let gradients = outputs(Pass::AttentionBackward);
        let forward = |[q, k, v]: &[Values; 3]| attention(q, k, v);
        for (input, gradient) in gradients.chunks(ATTENTION_X).enumerate() {
            moved.holds(input, gradient, forward);
        }
    }

    #[test]
    fn the_embedding_gradient_matches_finite_differences() {
        let moved = Moved::<2>::of::<3>(Layer::Embedding);
        moved.holds(1, &outputs(Pass::EmbeddingBackward), |[tokens, table]| embedding(tokens, table));
    }

    #[test]
    fn the_cross_entropy_gradient_matches_finite_differences() {
        let mut moved = Moved::<2>::of::<2>(Layer::CrossEntropy);
        moved.dy = vec![1.0 / ENTROPY_ROWS as f64; ENTROPY_ROWS];
        moved.holds(0, &outputs(Pass::CrossEntropyBackward), |[x, targets]| cross_entropy(x, targets));
    }

    #[test]
    fn a_norm_has_mean_zero_and_variance_one() {
        let [x, ..] =
            Layer::LayerNorm.inputs::<4>().map(|numbers| numbers.into_iter().map(f64::from).collect::<Values>());
        let y = layernorm(&x, &[1.0; NORM_COLUMNS], &[0.0; NORM_COLUMNS]);
        for row in y.chunks(NORM_COLUMNS) {
            assert!(mean(row.iter().copied()).abs() < 1e-12);
            assert!((mean(row.iter().map(|y| y * y)) - 1.0).abs() < 1e-4);
        }
    }

    #[test]
    fn attention_is_causal() {
        let [q, k, mut v, _] =
            Layer::Attention.inputs::<4>().map(|numbers| numbers.into_iter().map(f64::from).collect::<Values>());
        let before = attention(&q, &k, &v);
        assert_eq!(token(&before, 0), token(&v, 0));
        token_mut(&mut v, 40).fill(9.0);
        let after = attention(&q, &k, &v);
        assert_eq!(before[..40 * ATTENTION_WIDTH], after[..40 * ATTENTION_WIDTH]);
        assert_ne!(token(&before, 40), token(&after, 40));
    }

    #[test]
    fn the_first_adam_step_moves_by_the_rate_against_the_gradient() {
        // Without history, m / bias1 is (1 - beta1) g / bias1 and so on: the size of the gradient cancels.
        let all = adam(&[1.0, 1.0], &[0.5, -3.0], &[0.0; 2], &[0.0; 2]);
        let bias1 = 1.0 - ADAM_BETA1.powi(ADAM_STEP);
        let bias2 = 1.0 - ADAM_BETA2.powi(ADAM_STEP);
        let step = ADAM_RATE * (1.0 - ADAM_BETA1) / bias1 / ((1.0 - ADAM_BETA2) / bias2).sqrt();
        assert!((all[0] - (1.0 - step)).abs() < 1e-9 && (all[1] - (1.0 + step)).abs() < 1e-9);
        assert!((all[2] - 0.05).abs() < 1e-12 && (all[5] - 0.009).abs() < 1e-12);
    }
}
