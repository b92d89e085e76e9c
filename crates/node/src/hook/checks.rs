//! Runs the hook's own checks: the fast ones, or the deeper ones after a job that ended badly.

use std::{ffi::OsString, path::PathBuf};

use doctor_core::{finding::Verdict, ids::CheckId, policy::Policy, profile::Profile};

use super::settings::Settings;
use crate::{
    agent::{config::Config, hook_reports::HookReport},
    check::{self, CheckError, CheckResult, Suite},
    clock::now,
    hardware,
    job::{MAX_EVIDENCE_BYTES, truncate_evidence},
    policy::{FileError, load_policy, load_profile},
    profile::{self, MachineArgs, ProfileError},
    runner::LocalRunner,
    stop::Stop,
    verdict_file::{StoredResult, Verdicts},
};

/// How often a failure is reported, as by the agent: rules require confirmation.
const MAX_FAILURE_REPORTS: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub(super) enum HookCheckError {
    #[error(transparent)]
    Policy(#[from] FileError),
    #[error(transparent)]
    Machine(#[from] ProfileError),
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// What checks run with and are classified by.
#[derive(Debug)]
pub(super) struct CheckRunner {
    pub(super) policy: Policy,
    /// Detected if none is configured.
    profile: Option<Profile>,
    detects_profile: bool,
    root: PathBuf,
    library: OsString,
    state: PathBuf,
}

impl CheckRunner {
    pub(super) fn of_agent(config: &Config, settings: &Settings) -> Self {
        Self {
            policy: config.policy.clone(),
            profile: config.profile.clone(),
            detects_profile: false,
            root: config.root.clone(),
            library: config.library.clone(),
            state: settings.state.clone(),
        }
    }

    pub(super) fn standalone(settings: &Settings) -> Result<Self, HookCheckError> {
        let profile = load_profile(settings.profile.as_deref())?;
        Ok(Self {
            policy: load_policy(settings.policy.as_deref())?,
            detects_profile: profile.is_none(),
            profile,
            root: settings.root.clone(),
            library: settings.nvml.clone().into(),
            state: settings.state.clone(),
        })
    }
}

/// The result of a run of checks.
#[derive(Debug)]
pub(super) struct CheckRun {
    pub(super) checks: usize,
    /// Evidence to report to the controller.
    pub(super) report: HookReport,
}

/// Runs the named checks, or the suite without names, and records their results in `known`.
pub(super) fn run_checks(
    eyes: &CheckRunner,
    names: &[CheckId],
    suite: Suite,
    known: &mut Verdicts,
    stop: &Stop,
) -> Result<CheckRun, HookCheckError> {
    let runner = LocalRunner::new(&eyes.root, stop).state(Some(&eyes.state)).library(eyes.library.clone());
    let found = match eyes.detects_profile {
        true => profile::select_profile(&MachineArgs::detect_all(), Some(&eyes.state), &runner)?.profile,
        false => None,
    };
    let profile = eyes.profile.as_ref().or(found.as_ref());
    let answers = check::check_with_evidence(names, suite, &eyes.policy, profile, &runner)?;
    let at = now();
    let (mut news, mut room) = (Vec::new(), MAX_EVIDENCE_BYTES);
    let checks = answers.len();
    for (answer, mut evidence) in answers {
        let before = known.get(&answer.check).cloned();
        known.record(&answer.check, answer.verdict, &answer.findings, &answer.text, at);
        if should_report(before.as_ref(), known.get(&answer.check), &answer) {
            room = truncate_evidence(room, &mut evidence);
            news.push(evidence);
        }
    }
    if names.is_empty() && stop.requested().is_none() {
        known.mark_all_checked(at);
    }
    let (hardware, up) = (hardware::collect(&runner), check::uptime(&runner));
    Ok(CheckRun { checks, report: HookReport { hardware, up, checks: news } })
}

/// Whether the result has changed, or is a failure that needs confirmation.
fn should_report(before: Option<&StoredResult>, after: Option<&StoredResult>, answer: &CheckResult) -> bool {
    let keys = |held: &StoredResult| {
        held.findings.iter().map(|one| (one.rule.clone(), one.entity.clone())).collect::<Vec<_>>()
    };
    let times = |held: &StoredResult| held.findings.iter().map(|one| one.times).min().unwrap_or(0);
    match (before, after) {
        (Some(before), Some(after)) if before.verdict == after.verdict && keys(before) == keys(after) => {
            answer.verdict == Verdict::Fail && times(after) <= MAX_FAILURE_REPORTS
        }
        _ => true,
    }
}

impl CheckRun {
    pub(super) const fn has_report(&self) -> bool {
        !self.report.checks.is_empty()
    }
}
