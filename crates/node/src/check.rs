//! `doctor-node check`: looks at this machine now and judges on the spot.
//!
//! Meant for a person at a terminal, for Nagios and its heirs, and for health hooks of schedulers. The verdict is the
//! one the controller would find: same evidence, same rules, same function.

use std::fmt::Write as _;

use doctor_checks::{Catalogue, Check, spec::Params};
use doctor_core::{
    classify::{Judgement, judge},
    finding::{Finding, Severity, Verdict},
    ids::CheckId,
    policy::{Policy, Rule},
    profile::Profile,
    reason::ReasonCode,
    time::Span,
};
use serde::Serialize;

use crate::{clock::now, runner::ProbeRunner};

/// Exit codes of `doctor-node check`, as Nagios reads them. The worst check decides; failing is worse than not knowing.
pub mod exit {
    /// Every check passed or does not apply here.
    pub const OK: u8 = 0;
    /// Something fails that is worth watching.
    pub const WARNING: u8 = 1;
    /// Something fails that takes the node out of service.
    pub const CRITICAL: u8 = 2;
    /// Something could not be judged, or the command itself was wrong.
    pub const UNKNOWN: u8 = 3;
}

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("there is no check `{name}`; there are: {known}")]
    NoSuchCheck { name: String, known: String },
    #[error("a check's own rules do not parse")]
    Rules(#[source] toml::de::Error),
}

/// One check's answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    pub check: CheckId,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub text: String,
    pub took: Span,
    pub findings: Vec<Finding>,
}

impl Answer {
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// Runs the named checks, or all that the policy has not switched off.
pub fn check(
    names: &[CheckId],
    policy: &Policy,
    profile: Option<&Profile>,
    runner: &dyn ProbeRunner,
) -> Result<Vec<Answer>, CheckError> {
    let catalogue = Catalogue::with_site_checks(policy);
    let rules = catalogue.rules(policy).map_err(CheckError::Rules)?;
    let chosen = choose(&catalogue, names, policy)?;
    let answers = chosen.into_iter().map(|(id, check)| {
        let params = catalogue.params(policy, &id);
        answer(id, check, &params, &rules, profile, runner)
    });
    Ok(answers.collect())
}

fn choose<'a>(
    catalogue: &'a Catalogue,
    names: &[CheckId],
    policy: &Policy,
) -> Result<Vec<(CheckId, &'a Check)>, CheckError> {
    let wanted = if names.is_empty() {
        catalogue.tests(policy).into_iter().map(|test| test.id).collect()
    } else {
        names.to_vec()
    };
    let known = || catalogue.iter().map(|check| check.spec.id).collect::<Vec<_>>().join(", ");
    let find = |name: CheckId| match catalogue.get(&name) {
        Some(check) => Ok((name, check)),
        None => Err(CheckError::NoSuchCheck { name: name.to_string(), known: known() }),
    };
    wanted.into_iter().map(find).collect()
}

fn answer(
    id: CheckId,
    check: &Check,
    params: &Params,
    rules: &[Rule],
    profile: Option<&Profile>,
    runner: &dyn ProbeRunner,
) -> Answer {
    let started = now();
    let outputs: Vec<_> = (check.probes)(params).iter().map(|probe| runner.run(probe)).collect();
    let observation = (check.interpret)(params, &outputs);
    let Judgement { verdict, reason, text, findings } = judge(rules, profile, &id, &observation);
    Answer { check: id, verdict, reason, text, took: now().since(started), findings }
}

/// The exit code for these answers.
pub fn exit_code(answers: &[Answer]) -> u8 {
    let rank = |answer: &Answer| match (answer.verdict, answer.worst()) {
        (Verdict::Pass | Verdict::NotApplicable, _) => (0, exit::OK),
        (Verdict::Inconclusive, _) => (1, exit::UNKNOWN),
        (Verdict::Fail, None | Some(Severity::Monitor)) => (2, exit::WARNING),
        (Verdict::Fail, Some(Severity::Reset | Severity::Reboot | Severity::Isolate)) => (3, exit::CRITICAL),
    };
    // Nothing checked is not health.
    answers.iter().map(rank).max().map_or(exit::UNKNOWN, |(_, code)| code)
}

/// A table for people: one line per check, and below it everything else that is wrong.
pub fn table(answers: &[Answer]) -> String {
    let width = answers.iter().map(|answer| answer.check.as_str().len()).max().unwrap_or(0).max("CHECK".len());
    let mut out = format!("{:width$}  {:14}  {:8}  WHY\n", "CHECK", "VERDICT", "SEVERITY");
    for answer in answers {
        let severity = answer.worst().map_or("-", Severity::code);
        let (check, verdict, reason, text) = (&answer.check, answer.verdict, &answer.reason, &answer.text);
        let _infallible = writeln!(out, "{check:width$}  {verdict:14}  {severity:8}  {reason}: {text}");
        for finding in answer.findings.iter().skip(1) {
            let Finding { severity, reason, text, .. } = finding;
            let _infallible = writeln!(out, "{:width$}  {:14}  {severity:8}  {reason}: {text}", "", "");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::FixtureRunner;
    use doctor_checks::probe::{Probe, ProbeOutput};

    fn memory(available: u32) -> FixtureRunner {
        let text = format!("MemTotal: 1000000 kB\nMemAvailable: {available} kB\n");
        FixtureRunner::new([(Probe::Read { path: "/proc/meminfo".into() }, ProbeOutput::Text(text))])
    }

    fn code(names: &[&str], runner: &FixtureRunner) -> u8 {
        let names: Vec<_> = names.iter().map(|name| CheckId::new(name).unwrap()).collect();
        exit_code(&check(&names, &Policy::standard(), None, runner).unwrap())
    }

    #[test]
    fn the_worst_answer_decides_and_failing_is_worse_than_not_knowing() {
        assert_eq!(code(&["memory"], &memory(900_000)), exit::OK);
        assert_eq!(code(&["memory"], &memory(10)), exit::WARNING);
        assert_eq!(code(&["memory", "kernel-log"], &memory(900_000)), exit::UNKNOWN);
        assert_eq!(code(&["memory", "kernel-log"], &memory(10)), exit::WARNING);
        assert_eq!(exit_code(&[]), exit::UNKNOWN);
    }

    #[test]
    fn an_unknown_check_is_refused_with_the_known_ones() {
        let names = [CheckId::new("nonsense").unwrap()];
        let error = check(&names, &Policy::standard(), None, &FixtureRunner::default()).unwrap_err().to_string();
        assert!(error.contains("`nonsense`") && error.contains("disk-space"), "{error}");
    }

    #[test]
    fn the_table_shows_every_finding() {
        let text = "MemTotal: 1000 kB\nMemAvailable: 10 kB\nSwapTotal: 10 kB\nSwapFree: 0 kB\n".to_owned();
        let runner = FixtureRunner::new([(Probe::Read { path: "/proc/meminfo".into() }, ProbeOutput::Text(text))]);
        let answers = check(&[CheckId::new("memory").unwrap()], &Policy::standard(), None, &runner).unwrap();
        let table = table(&answers);
        assert!(table.contains("memory-low") && table.contains("swap-used"), "{table}");
        assert_eq!(exit_code(&answers), exit::CRITICAL, "less memory than any machine has");
    }
}
