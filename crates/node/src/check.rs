//! `doctor-node check`: runs checks on this machine and classifies them locally.
//!
//! It serves operators at a terminal, Nagios and compatible monitors, and schedulers' health hooks. The verdict equals
//! the controller's: same evidence, same rules, same function.

mod print;

use doctor_checks::{
    Catalogue, Check, Depth,
    document::TestEvidence,
    probe::{Probe, ProbeOutput},
};
use doctor_core::{
    classify::{Baselines, BootGrace, Classification, ExpectationSources, apply_boot_grace, classify_with},
    finding::{Finding, Severity, Verdict},
    ids::CheckId,
    observation::Observation,
    policy::Policy,
    profile::Profile,
    reason::ReasonCode,
    time::Span,
};
use serde::Serialize;

use crate::{clock::now, runner::ProbeRunner};

pub use print::{rows, summary, table};

/// Exit codes of `doctor-node check`, in the Nagios convention. The worst check decides. Unknown ranks above warning,
/// so 1 means that every check was judged.
pub mod exit {
    /// At least one check passes; all others pass or do not apply.
    pub const OK: u8 = 0;
    /// A finding is worth watching.
    pub const WARNING: u8 = 1;
    /// A finding takes the node out of service.
    pub const CRITICAL: u8 = 2;
    /// A check is inconclusive, no check that ran applies, or the command line is wrong.
    pub const UNKNOWN: u8 = 3;
}

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("unknown check `{name}`; known checks: {known}")]
    NoSuchCheck { name: String, known: String },
    #[error("cannot parse the default rules of a check")]
    Rules(#[source] toml::de::Error),
}

/// The checks to run if none are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// Those checks of `quick` that start no program, for hooks that a scheduler waits for: milliseconds.
    Fast,
    /// The suite `quick`: all checks that do not occupy the node.
    Quick,
}

impl Suite {
    fn holds(self, check: &Check) -> bool {
        match self {
            Self::Fast => check.spec.depth == Depth::Quick && check.spec.is_fast(),
            Self::Quick => check.spec.depth == Depth::Quick,
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckResult {
    pub check: CheckId,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub text: String,
    pub duration: Span,
    pub findings: Vec<Finding>,
}

impl CheckResult {
    pub fn worst_severity(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// The observation of one check, before classification.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckObservation {
    pub check: CheckId,
    pub observation: Observation,
    pub duration: Span,
}

/// Runs the named checks, or the suite's checks that the policy enables, and classifies the observations.
pub fn check(
    names: &[CheckId],
    suite: Suite,
    policy: &Policy,
    profile: Option<&Profile>,
    runner: &dyn ProbeRunner,
) -> Result<Vec<CheckResult>, CheckError> {
    let all = check_with_evidence(names, suite, policy, profile, runner)?;
    Ok(all.into_iter().map(|(result, _)| result).collect())
}

/// Like [`check`], and returns the evidence of each answer so that it can be classified again.
pub fn check_with_evidence(
    names: &[CheckId],
    suite: Suite,
    policy: &Policy,
    profile: Option<&Profile>,
    runner: &dyn ProbeRunner,
) -> Result<Vec<(CheckResult, TestEvidence)>, CheckError> {
    let catalogue = Catalogue::with_site_checks(policy);
    let rule_book = catalogue.rule_book(policy);
    let observations = observe_with_evidence(&catalogue, names, suite, policy, runner)?;
    let (baselines, up) = (Baselines::at(now()), uptime(runner));
    let judged = observations.into_iter().map(|(CheckObservation { check, observation, duration: took }, evidence)| {
        let of = catalogue.get(&check);
        let rules = of.map_or(Ok(Vec::new()), |of| rule_book.rules_for(of, &observation)).map_err(CheckError::Rules)?;
        let sources = ExpectationSources::of_profile(profile, &baselines);
        let judgement = classify_with(&rules, sources, &check, &observation);
        let is_deep = of.is_some_and(|of| of.spec.exclusive);
        let boot = BootGrace { up, grace: policy.agents.boot_grace, is_deep };
        let Classification { verdict, reason, text, findings, .. } = apply_boot_grace(judgement, boot);
        Ok((CheckResult { check, verdict, reason, text, duration: took, findings }, evidence))
    });
    judged.collect()
}

/// Runs the named checks, or the suite's checks that the policy enables, without classifying them.
pub fn observe(
    names: &[CheckId],
    suite: Suite,
    policy: &Policy,
    runner: &dyn ProbeRunner,
) -> Result<Vec<CheckObservation>, CheckError> {
    let all = observe_with_evidence(&Catalogue::with_site_checks(policy), names, suite, policy, runner)?;
    Ok(all.into_iter().map(|(observation, _)| observation).collect())
}

fn observe_with_evidence(
    catalogue: &Catalogue,
    names: &[CheckId],
    suite: Suite,
    policy: &Policy,
    runner: &dyn ProbeRunner,
) -> Result<Vec<(CheckObservation, TestEvidence)>, CheckError> {
    let chosen = choose(catalogue, names, suite, policy)?;
    let params = |id: &CheckId| catalogue.params(policy, id);
    // Reads shared by all checks count as the first check's time.
    let mut started = now();
    let probes: Vec<_> = chosen.iter().flat_map(|(id, check)| (check.probes)(&params(id))).collect();
    runner.prepare(&probes);
    let observations = chosen.into_iter().map(|(check, of)| {
        let params = params(&check);
        let probes = (of.probes)(&params);
        let outputs: Vec<_> = probes.iter().map(|probe| runner.run(probe)).collect();
        let observation = (of.interpret)(&params, &outputs);
        let began_at = std::mem::replace(&mut started, now());
        let probes = probes.into_iter().zip(outputs).collect();
        let evidence = TestEvidence { test: check.clone(), started: began_at, ended: started, probes };
        (CheckObservation { check, observation, duration: started.since(began_at) }, evidence)
    });
    Ok(observations.collect())
}

/// Returns how long this machine has been up. `None` if it cannot be read: then the boot grace does not apply.
pub fn uptime(runner: &dyn ProbeRunner) -> Option<Span> {
    let ProbeOutput::Text(text) = runner.run(&Probe::read("/proc/uptime")) else { return None };
    let seconds: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, reason = "an uptime in milliseconds is far below the limits of i64")]
    let millis = (seconds.is_finite() && seconds >= 0.0).then_some((seconds * 1000.0) as i64)?;
    Some(Span::from_millis(millis))
}

fn choose<'a>(
    catalogue: &'a Catalogue,
    names: &[CheckId],
    suite: Suite,
    policy: &Policy,
) -> Result<Vec<(CheckId, &'a Check)>, CheckError> {
    let known = || catalogue.iter().map(|check| check.spec.id).collect::<Vec<_>>().join(", ");
    let find = |name: CheckId| match catalogue.get(&name) {
        Some(check) => Ok((name, check)),
        None => Err(CheckError::NoSuchCheck { name: name.to_string(), known: known() }),
    };
    if !names.is_empty() {
        return names.iter().cloned().map(find).collect();
    }
    let all: Result<Vec<_>, _> = catalogue.tests(policy).into_iter().map(|test| find(test.id)).collect();
    Ok(all?.into_iter().filter(|(_, check)| suite.holds(check)).collect())
}

/// Returns the exit code for these answers.
pub fn exit_code(results: &[CheckResult]) -> u8 {
    let rank = |result: &CheckResult| match (result.verdict, result.worst_severity()) {
        // A node to which no check applies is not thereby healthy.
        (Verdict::NotApplicable, _) => (0, exit::UNKNOWN),
        (Verdict::Pass, _) => (1, exit::OK),
        (Verdict::Fail, None | Some(Severity::Monitor)) => (2, exit::WARNING),
        (Verdict::Inconclusive, _) => (3, exit::UNKNOWN),
        (Verdict::Fail, Some(Severity::Reset | Severity::Reboot | Severity::Isolate)) => (4, exit::CRITICAL),
    };
    results.iter().map(rank).max().map_or(exit::UNKNOWN, |(_, code)| code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::FixtureRunner;

    fn memory(available: u32) -> FixtureRunner {
        let text = format!("MemTotal: 1000000 kB\nMemAvailable: {available} kB\n");
        FixtureRunner::new([(Probe::read("/proc/meminfo"), ProbeOutput::Text(text))])
    }

    fn run_results(names: &[&str], runner: &FixtureRunner) -> Vec<CheckResult> {
        let names: Vec<_> = names.iter().map(|name| CheckId::new(name).unwrap()).collect();
        check(&names, Suite::Fast, &Policy::built_in(), None, runner).unwrap()
    }

    fn code(names: &[&str], runner: &FixtureRunner) -> u8 {
        exit_code(&run_results(names, runner))
    }

    #[test]
    fn the_worst_answer_decides_and_what_is_worth_watching_hides_nothing_that_nobody_knows() {
        assert_eq!(code(&["memory"], &memory(900_000)), exit::OK);
        assert_eq!(code(&["memory"], &memory(10)), exit::WARNING);
        assert_eq!(code(&["memory", "kernel-log"], &memory(900_000)), exit::UNKNOWN);
        assert_eq!(code(&["memory", "kernel-log"], &memory(10)), exit::UNKNOWN);
        assert_eq!(exit_code(&[]), exit::UNKNOWN);
    }

    #[test]
    fn where_nothing_applies_nobody_is_told_that_all_is_well() {
        let none = CheckResult {
            check: CheckId::new("gpu-ecc").unwrap(),
            verdict: Verdict::NotApplicable,
            reason: ReasonCode::fixed("no-gpu"),
            text: String::new(),
            duration: Span::ZERO,
            findings: Vec::new(),
        };
        assert_eq!(exit_code(std::slice::from_ref(&none)), exit::UNKNOWN);
        let mut both = run_results(&["memory"], &memory(900_000));
        both.push(none);
        assert_eq!(exit_code(&both), exit::OK);
    }

    #[test]
    fn in_the_first_minutes_after_a_boot_nothing_measured_fails() {
        let runner = |up: &str| {
            let low = "MemTotal: 1000000 kB\nMemAvailable: 10 kB\n".to_owned();
            let up = (Probe::read("/proc/uptime"), ProbeOutput::Text(format!("{up} 1.00\n")));
            FixtureRunner::new([(Probe::read("/proc/meminfo"), ProbeOutput::Text(low)), up])
        };
        let soon = run_results(&["memory"], &runner("299.99"));
        assert_eq!((soon[0].verdict, soon[0].reason.as_str()), (Verdict::Inconclusive, "booting"));
        assert_eq!(run_results(&["memory"], &runner("300.00"))[0].verdict, Verdict::Fail);
        assert_eq!(run_results(&["memory"], &runner("soon"))[0].verdict, Verdict::Fail);
    }

    #[test]
    fn an_unknown_check_is_rejected_with_the_known_ones() {
        let names = [CheckId::new("nonsense").unwrap()];
        let error = check(&names, Suite::Fast, &Policy::built_in(), None, &FixtureRunner::default());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`nonsense`") && error.contains("disk-space"), "{error}");
    }

    #[test]
    fn the_table_shows_every_finding_and_the_rows_are_flat() {
        let passing = table(&run_results(&["memory"], &memory(900_000)), false);
        assert!(Severity::ALL.iter().all(|severity| !passing.contains(severity.meaning())), "{passing}");
        let text = "MemTotal: 1000 kB\nMemAvailable: 10 kB\nSwapTotal: 10 kB\nSwapFree: 0 kB\n".to_owned();
        let runner = FixtureRunner::new([(Probe::read("/proc/meminfo"), ProbeOutput::Text(text))]);
        let results = run_results(&["memory", "kernel-log"], &runner);
        let table = table(&results, false);
        assert!(table.contains("memory-low") && table.contains("swap-used") && table.contains("kernel-log"), "{table}");
        let mut findings = results.iter().flat_map(|result| &result.findings);
        assert!(findings.all(|finding| table.contains(&finding.severity.described())), "{table}");
        assert_eq!(exit_code(&results), exit::CRITICAL, "less memory than any machine has");
        let rows = serde_json::to_value(rows(&results)).unwrap();
        let rows = rows.as_array().unwrap();
        assert!(rows.len() >= 3, "{rows:?}");
        for row in rows {
            for key in ["check", "entity", "verdict", "severity", "reason"] {
                assert!(row.get(key).is_some(), "{key} is missing in {row}");
            }
        }
    }
}
