//! Reproducible random numbers. Every use has a separate stream, identified by purpose and owner, so that one seed
//! gives every compared policy the same faults and user jobs, however differently it acts.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// The purpose of a stream. The numbers are part of the meaning of a seed: never reuse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    UserJobs = 1,
    Placement = 2,
    Machine = 3,
    Faults = 4,
    Catch = 5,
    Noise = 6,
    Hostile = 7,
    Repair = 8,
    Timing = 9,
    Keys = 10,
}

/// The root of all streams of one world.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seed(pub(crate) u64);

impl Seed {
    /// Returns the stream of one purpose for one object, identified by up to two numbers.
    pub(crate) fn stream(self, purpose: Purpose, a: u64, b: u64) -> Stream {
        let mut seed = [0; 32];
        for (index, number) in [self.0, purpose as u64, a, b].into_iter().enumerate() {
            seed[index * 8..index * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        Stream(ChaCha8Rng::from_seed(seed))
    }
}

/// One stream of random draws.
#[derive(Debug, Clone)]
pub(crate) struct Stream(ChaCha8Rng);

impl Stream {
    /// Returns a number in `[0, 1)` with all 53 bits of a double.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Returns an integer below `bound`, which must not be zero.
    #[expect(clippy::cast_possible_truncation, reason = "the high half of the product is below a usize")]
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.0.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Draws from an exponential distribution with mean one.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Draws from a standard normal distribution, by Box and Muller.
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    pub(crate) fn lognormal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }

    /// Draws from a Weibull distribution of this shape with mean one. A shape below one gives bursts.
    pub(crate) fn weibull(&mut self, shape: f64) -> f64 {
        self.exponential().powf(1.0 / shape) / gamma(1.0 + 1.0 / shape)
    }

    /// Returns the index of a weighted draw.
    pub(crate) fn pick(&mut self, weights: &[f64]) -> usize {
        let mut left = self.unit() * weights.iter().sum::<f64>();
        for (index, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return index;
            }
        }
        weights.len().saturating_sub(1)
    }

    pub(crate) fn bytes(&mut self) -> [u8; 32] {
        let mut bytes = [0; 32];
        self.0.fill_bytes(&mut bytes);
        bytes
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// The gamma function for arguments from one to about twenty, by shifting up and Stirling's series.
fn gamma(x: f64) -> f64 {
    let (mut shift, mut y) = (1.0, x);
    while y < 12.0 {
        shift *= y;
        y += 1.0;
    }
    let series = 1.0 / (12.0 * y) - 1.0 / (360.0 * y.powi(3)) + 1.0 / (1260.0 * y.powi(5));
    ((y - 0.5) * y.ln() - y + 0.5 * std::f64::consts::TAU.ln() + series).exp() / shift
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(mut draw: impl FnMut() -> f64) -> f64 {
        (0..20_000).map(|_| draw()).sum::<f64>() / 20_000.0
    }

    #[test]
    fn streams_are_reproducible_and_independent() {
        let mut a = Seed(7).stream(Purpose::Faults, 1, 2);
        let mut again = Seed(7).stream(Purpose::Faults, 1, 2);
        let mut other = Seed(7).stream(Purpose::Noise, 1, 2);
        let first: Vec<_> = (0..8).map(|_| a.number()).collect();
        assert_eq!(first, (0..8).map(|_| again.number()).collect::<Vec<_>>());
        assert_ne!(first, (0..8).map(|_| other.number()).collect::<Vec<_>>());
    }

    #[test]
    fn draws_have_the_expected_means() {
        let mut stream = Seed(1).stream(Purpose::Noise, 0, 0);
        assert!((mean(|| stream.unit()) - 0.5).abs() < 0.01);
        assert!((mean(|| stream.exponential()) - 1.0).abs() < 0.03);
        assert!(mean(|| stream.normal()).abs() < 0.03);
        assert!((mean(|| stream.normal().powi(2)) - 1.0).abs() < 0.05);
        assert!((mean(|| stream.weibull(0.7)) - 1.0).abs() < 0.06);
        let picks = mean(|| f64::from(u8::from(stream.pick(&[1.0, 3.0]) == 1)));
        assert!((picks - 0.75).abs() < 0.02, "{picks}");
        assert!((0..1000).all(|_| stream.below(3) < 3));
    }

    #[test]
    fn the_gamma_function_agrees_with_known_values() {
        for (x, value) in [(1.0, 1.0), (2.0, 1.0), (5.0, 24.0), (1.5, 0.886_226_925_452_758), (17.0 / 7.0, 1.265_82)] {
            assert!((gamma(x) / value - 1.0).abs() < 1e-5, "{x}: {}", gamma(x));
        }
    }
}
