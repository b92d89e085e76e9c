//! Wall time and CPU time, many times over. The machine may be busy with other things, so the CPU time stands beside.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use crate::figure::Figure;

/// How often everything is measured.
pub(crate) const REPEATS: usize = 11;

/// How long one repeat took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) wall: Duration,
    /// Of all threads of this process.
    pub(crate) cpu: Duration,
}

/// Does something once and says how long it took.
pub(crate) fn time<T>(body: impl FnOnce() -> T) -> (T, Sample) {
    let (began, used) = (Instant::now(), cpu_time());
    let value = body();
    let sample = Sample { wall: began.elapsed(), cpu: cpu_time().saturating_sub(used) };
    (value, sample)
}

fn cpu_time() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(spent.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(spent.tv_nsec).unwrap_or(0))
}

/// All repeats of one thing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<Sample>);

impl Samples {
    pub(crate) fn push(&mut self, sample: Sample) {
        self.0.push(sample);
    }

    /// Two figures: `NAME_ms`, the median of the wall times, and `NAME_cpu_ms`, that of the CPU times.
    pub(crate) fn figures(&self, name: &str, suffix: &str, inputs: &Value, note: &str) -> [Figure; 2] {
        let wall: Vec<f64> = self.0.iter().map(|sample| millis(sample.wall)).collect();
        let cpu: Vec<f64> = self.0.iter().map(|sample| millis(sample.cpu)).collect();
        [
            Figure {
                name: format!("{name}_ms{suffix}"),
                value: median(&wall),
                unit: "ms",
                inputs: inputs.clone(),
                note: format!("{note}; wall time, {}", spread(&wall)),
            },
            Figure {
                name: format!("{name}_cpu_ms{suffix}"),
                value: median(&cpu),
                unit: "ms",
                inputs: inputs.clone(),
                note: format!("{note}; CPU time of this process, {}", spread(&cpu)),
            },
        ]
    }
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The middle one; of an even number, the lower of the two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// From where to where the repeats went, for the note.
pub(crate) fn spread(values: &[f64]) -> String {
    let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = values.iter().copied().fold(0.0, f64::max);
    format!("median of {} between {lowest:.3} and {highest:.3}", values.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn work_takes_cpu_time_and_waiting_does_not() {
        let (_, worked) = time(|| {
            let began = Instant::now();
            let mut turns = 0_u64;
            while began.elapsed() < Duration::from_millis(20) {
                turns = std::hint::black_box(turns + 1);
            }
        });
        assert!(worked.wall >= Duration::from_millis(20));
        assert!(worked.cpu > Duration::ZERO && worked.cpu <= worked.wall * 2, "{worked:?}");
    }
}
