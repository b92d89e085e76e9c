//! The default policy on a simulated cluster, as it is shipped: it holds its periods, and nothing is wrong for good.

use doctor_core::policy::Policy;
use doctor_sim::harness::period_coverage::{PeriodReport, play};

fn env<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn the_default_policy_holds_its_periods() {
    let mut policy = Policy::built_in();
    policy.limits.renew_ahead = env("DOCTOR_AHEAD", policy.limits.renew_ahead);
    policy.limits.jobs = env("DOCTOR_JOBS", policy.limits.jobs);
    let report = play(policy, env("DOCTOR_NODES", 50), env("DOCTOR_DAYS", 9), env("DOCTOR_SEED", 1)).unwrap();
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    let PeriodReport { lowest_hour_percent, lasting_problems, .. } = &report;
    assert!(*lowest_hour_percent >= 95.0);
    assert!(lasting_problems.is_empty());
}
