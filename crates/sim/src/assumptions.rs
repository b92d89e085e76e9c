//! The parameters of the simulated world. They are printed with every result, because a simulation is only as good as
//! its assumptions.

use std::fmt;

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

use crate::fault::FaultKind;

/// The world's parameters. Rates are per node and day unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Assumptions {
    /// Rate of faults that stop work immediately, fleet average.
    pub hard_per_node_day: f64,
    /// Rate of faults that only degrade, fleet average.
    pub gray_per_node_day: f64,
    /// Rate of silent data corruption, fleet average.
    pub sdc_per_node_day: f64,
    /// Share of machines that fail far more often, and the factor of their rate.
    pub lemon_share: f64,
    pub lemon_factor: f64,
    /// The factor by which a machine's hazard grows with every incident.
    pub hazard_per_incident: f64,
    pub infant_factor: f64,
    pub infant_period: Span,
    /// The age of the oldest machine at the start; ages are uniform from zero to this.
    pub oldest: Span,
    /// Weibull shape of the times between faults of one machine; below one, faults come in bursts.
    pub weibull_shape: f64,

    /// Chance that one run of the right test detects a degrading fault.
    pub catch_gray: f64,
    /// Chance that one run of the compute test detects silent corruption, when cold and after other load.
    pub catch_sdc_cold: f64,
    pub catch_sdc_hot: f64,
    /// The longest time between a hard fault and the agent's report of it.
    pub agent_poll: Span,

    /// Relative deviation of a healthy measurement from the profile's value.
    pub noise: f64,
    /// Chance that a healthy value is an outlier, and how low such a value is.
    pub outlier: f64,
    pub outlier_depth: f64,

    pub utilisation: f64,
    pub job_median: Span,
    pub job_sigma: f64,
    pub job_longest: Span,
    /// Weights of user jobs of 1, 2, 4, 8, ... nodes. Sizes above a quarter of the pool are left out.
    pub job_sizes: Vec<f64>,
    pub crash_per_hour: f64,
    pub crash_per_hour_bad: f64,
    /// On a node with a hard fault.
    pub crash_per_hour_hard: f64,
    /// A crash loses half of this on average, plus a restart.
    pub checkpoint: Span,
    pub restart: Span,
    /// Chance that a user job avoids nodes under validation if others are available.
    pub avoids_validation: f64,
    /// A user job that waits longer than this for our job to leave counts as disturbed.
    pub disturbed_after: Span,

    /// The longest time between submission and start of a validation job on a free node.
    pub start_delay: Span,
    /// The time between cancelling a running job and its end.
    pub cancel_takes: Span,
    /// Deviation of a test's duration, as a share of its usual duration.
    pub length_sigma: f64,
    pub reset_takes: Span,
    pub reboot_takes: Span,
    pub repair_median: Span,
    /// Share of repairs that take longer than a day; with the median, this determines the spread.
    pub repair_over_a_day: f64,
    pub repair_longest: Span,
    /// The mean times until users report an undetected fault.
    pub ticket_hard: Span,
    pub ticket_gray: Span,
    pub ticket_sdc: Span,
}

impl Default for Assumptions {
    fn default() -> Self {
        Self {
            hard_per_node_day: 3.8e-3,
            gray_per_node_day: 1.5e-3,
            sdc_per_node_day: 1.0e-4,
            lemon_share: 0.015,
            lemon_factor: 20.0,
            hazard_per_incident: 1.085,
            infant_factor: 3.0,
            infant_period: Span::days(30),
            oldest: Span::days(3 * 365),
            weibull_shape: 0.7,
            catch_gray: 0.9,
            catch_sdc_cold: 0.3,
            catch_sdc_hot: 0.7,
            agent_poll: Span::minutes(5),
            noise: 0.01,
            outlier: 1.0e-4,
            outlier_depth: 0.15,
            utilisation: 0.84,
            job_median: Span::hours(2),
            job_sigma: 1.5,
            job_longest: Span::days(3),
            job_sizes: vec![0.50, 0.18, 0.14, 0.10, 0.05, 0.02, 0.01],
            crash_per_hour: 0.005,
            crash_per_hour_bad: 0.05,
            crash_per_hour_hard: 6.0,
            checkpoint: Span::hours(1),
            restart: Span::minutes(10),
            avoids_validation: 0.9,
            disturbed_after: Span::minutes(2),
            start_delay: Span::from_secs(20),
            cancel_takes: Span::from_secs(5),
            length_sigma: 0.08,
            reset_takes: Span::minutes(2),
            reboot_takes: Span::minutes(10),
            repair_median: Span::hours(6),
            repair_over_a_day: 0.38,
            repair_longest: Span::days(14),
            ticket_hard: Span::hours(12),
            ticket_gray: Span::days(10),
            ticket_sdc: Span::days(30),
        }
    }
}

impl Assumptions {
    /// Returns a world without faults, users and deviations: the start of a scripted scenario.
    pub fn quiet() -> Self {
        Self {
            hard_per_node_day: 0.0,
            gray_per_node_day: 0.0,
            sdc_per_node_day: 0.0,
            utilisation: 0.0,
            outlier: 0.0,
            length_sigma: 0.0,
            catch_gray: 1.0,
            catch_sdc_cold: 1.0,
            catch_sdc_hot: 1.0,
            ..Self::default()
        }
    }

    /// Returns the fault rate of an ordinary machine per day. The published rates are averages over fleets that include
    /// lemons.
    pub(crate) fn ordinary_rate(&self) -> f64 {
        let all = self.hard_per_node_day + self.gray_per_node_day + self.sdc_per_node_day;
        all / (1.0 + self.lemon_share * (self.lemon_factor - 1.0))
    }

    /// Returns the lognormal sigma at which `repair_over_a_day` of all repairs take longer than a day.
    pub(crate) fn repair_sigma(&self) -> f64 {
        let ratio = (Span::days(1).as_hours() / self.repair_median.as_hours()).ln();
        let z = normal_quantile(1.0 - self.repair_over_a_day);
        if z > 0.0 && ratio > 0.0 { ratio / z } else { 0.0 }
    }
}

impl Assumptions {
    /// Returns the mean duration of a user job in hours, for a lognormal distribution cut off at the longest duration.
    pub(crate) fn mean_job_hours(&self) -> f64 {
        let (median, longest) = (self.job_median.as_hours(), self.job_longest.as_hours());
        if self.job_sigma <= 0.0 {
            return median.min(longest);
        }
        let cut = (longest / median).ln();
        let shorter =
            median * (self.job_sigma.powi(2) / 2.0).exp() * normal_below(cut / self.job_sigma - self.job_sigma);
        shorter + longest * (1.0 - normal_below(cut / self.job_sigma))
    }
}

/// Returns the standard normal quantile for probabilities above one half, by bisection on the error function's series.
fn normal_quantile(probability: f64) -> f64 {
    let (mut low, mut high) = (0.0_f64, 8.0_f64);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if normal_below(middle) < probability {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

fn normal_below(z: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (z, z, 1.0);
    while term.abs() > 1e-15 * sum.abs() && odd < 400.0 {
        odd += 2.0;
        term *= z * z / odd;
        sum += term;
    }
    0.5 + sum * (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

impl fmt::Display for Assumptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_faults(f)?;
        self.fmt_tests(f)?;
        self.fmt_users(f)?;
        self.fmt_operations(f)
    }
}

impl Assumptions {
    fn fmt_faults(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "faults per node and day, fleet average")?;
        writeln!(f, "  hard (work stops)           {}", self.hard_per_node_day)?;
        writeln!(f, "  gray (work degrades)        {}", self.gray_per_node_day)?;
        writeln!(f, "  silent data corruption      {}", self.sdc_per_node_day)?;
        writeln!(
            f,
            "  lemons                      {} of machines, {} times as often",
            self.lemon_share, self.lemon_factor
        )?;
        writeln!(f, "  after each incident         hazard times {}", self.hazard_per_incident)?;
        writeln!(f, "  machines younger than {}   hazard times {}", self.infant_period, self.infant_factor)?;
        writeln!(f, "  ages at the start           even from 0 to {}", self.oldest)?;
        writeln!(f, "  times between faults        Weibull, shape {}", self.weibull_shape)?;
        writeln!(f, "kinds of faults (share of their class; cured by reset, reboot, only a repair; slows work by)")?;
        for kind in FaultKind::ALL {
            let facts = kind.profile();
            let [reset, reboot, replace] = facts.cures;
            writeln!(
                f,
                "  {:<20} {:<5} {:<5} {reset:.2} {reboot:.2} {replace:.2}  {:>3.0} %  {}",
                facts.code,
                facts.class,
                facts.share,
                facts.slows * 100.0,
                facts.symptom
            )?;
        }
        Ok(())
    }

    fn fmt_tests(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "detection")?;
        writeln!(f, "  agent, hard faults          within {}", self.agent_poll)?;
        writeln!(f, "  right test, gray            {} per run", self.catch_gray)?;
        writeln!(
            f,
            "  compute test, corruption    {} cold, {} after other load",
            self.catch_sdc_cold, self.catch_sdc_hot
        )?;
        writeln!(f, "  healthy values              deviate by {}", self.noise)?;
        writeln!(
            f,
            "  outliers                    {} of healthy values, down to -{}",
            self.outlier, self.outlier_depth
        )?;
        writeln!(
            f,
            "  users' tickets              after {} (hard), {} (gray), {} (corruption), mean",
            self.ticket_hard, self.ticket_gray, self.ticket_sdc
        )
    }

    fn fmt_users(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "users")?;
        writeln!(f, "  target utilisation          {}", self.utilisation)?;
        writeln!(
            f,
            "  job length                  lognormal, median {}, sigma {}, at most {}",
            self.job_median, self.job_sigma, self.job_longest
        )?;
        writeln!(f, "  job sizes 1, 2, 4, ...      {:?}", self.job_sizes)?;
        writeln!(
            f,
            "  crashes per hour            {} healthy, {} with a gray fault, {} with a hard one",
            self.crash_per_hour, self.crash_per_hour_bad, self.crash_per_hour_hard
        )?;
        writeln!(f, "  a crash loses               half of {} and {}", self.checkpoint, self.restart)?;
        writeln!(f, "  avoid nodes under test      {} of jobs", self.avoids_validation)?;
        writeln!(f, "  disturbed                   if kept waiting for more than {}", self.disturbed_after)
    }

    fn fmt_operations(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "operations")?;
        writeln!(f, "  job start, cancellation     within {}, takes {}", self.start_delay, self.cancel_takes)?;
        writeln!(f, "  test length                 deviates by {}", self.length_sigma)?;
        writeln!(f, "  reset, reboot               {}, {}", self.reset_takes, self.reboot_takes)?;
        writeln!(
            f,
            "  repair, replacement         lognormal, median {}, {} over a day, at most {}",
            self.repair_median, self.repair_over_a_day, self.repair_longest
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_of_repair_times_matches_the_share_over_a_day() {
        let assumptions = Assumptions::default();
        let sigma = assumptions.repair_sigma();
        let over_a_day = 1.0 - normal_below((24.0_f64 / 6.0).ln() / sigma);
        assert!((over_a_day - 0.38).abs() < 1e-6, "{over_a_day}");
        assert!((normal_quantile(0.975) - 1.959_964).abs() < 1e-5);
    }

    #[test]
    fn every_number_is_printed() {
        let text = Assumptions::default().to_string();
        let written = serde_json::to_value(Assumptions::default()).unwrap();
        for (name, value) in written.as_object().unwrap() {
            let rendered = match value {
                serde_json::Value::String(text) => text.clone(),
                serde_json::Value::Array(_) => "0.18".to_owned(),
                // As `Display` writes it; JSON writes small numbers differently.
                other => other.as_f64().unwrap().to_string(),
            };
            assert!(text.contains(&rendered), "{name} = {rendered} is not in\n{text}");
        }
        for kind in FaultKind::ALL {
            assert!(text.contains(kind.code()), "{kind}");
        }
    }

    #[test]
    fn the_fleet_average_matches_the_published_rate() {
        let a = Assumptions::default();
        let fleet = a.ordinary_rate() * (1.0 - a.lemon_share) + a.ordinary_rate() * a.lemon_factor * a.lemon_share;
        assert!((fleet - 5.4e-3).abs() < 1e-12, "{fleet}");
    }
}
