//! Wall time and CPU time over repeats. CPU time is recorded as well, because the machine may be busy.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use crate::figure::Figure;

/// The number of repeats.
pub(crate) const REPEATS: usize = 11;

/// The duration of one repeat.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) wall: Duration,
    /// Of all threads of this process.
    pub(crate) cpu: Duration,
}

/// Runs a function and measures it.
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

/// Returns the CPU time of another process, such as a database server, and its children so far. The kernel counts in
/// hundredths of a second.
pub(crate) fn cpu_time_of(pid: u32) -> Result<Duration> {
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    let mut ticks = 0;
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let name = entry.context("reading /proc")?.file_name();
        let Some(other) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // A process that has exited in the meantime is counted by its parent.
        let Ok(stat) = fs::read_to_string(format!("/proc/{other}/stat")) else { continue };
        let Some((_, fields)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<u64> = fields.split(' ').map(|field| field.parse().unwrap_or(0)).collect();
        // Fields from the state on: the parent is second, then user and system time, and those of reaped children.
        if let [_, parent, _, _, _, _, _, _, _, _, _, user, system, gone_user, gone_system, ..] = fields[..] {
            if other == pid {
                ticks += user + system + gone_user + gone_system;
            } else if parent == u64::from(pid) {
                ticks += user + system;
            }
        }
    }
    Ok(Duration::from_millis(ticks * 1_000 / ticks_per_second.max(1)))
}

/// All repeats of one measurement.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<Sample>);

impl Samples {
    pub(crate) fn push(&mut self, sample: Sample) {
        self.0.push(sample);
    }

    /// Returns two figures: `NAME_ms`, the median wall time, and `NAME_cpu_ms`, the median CPU time.
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

/// Returns the median; of an even number of values, the lower of the middle two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// Formats the range of the repeats, for the note of a figure.
pub(crate) fn spread(values: &[f64]) -> String {
    let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = values.iter().copied().fold(0.0, f64::max);
    format!("median of {} between {lowest:.3} and {highest:.3}", values.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_depend_on_the_order() {
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn cpu_time_agrees_with_the_kernels_accounting() {
        let began = Instant::now();
        while cpu_time() < Duration::from_millis(50) && began.elapsed() < Duration::from_secs(60) {}
        let counted = cpu_time_of(std::process::id()).unwrap();
        assert!(counted >= Duration::from_millis(20), "{counted:?}");
    }

    #[test]
    fn work_uses_cpu_time_and_waiting_does_not() {
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
