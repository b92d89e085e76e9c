//! Runs the hook's own checks: the fast ones, or the deeper ones after a job that ended badly.

use std::{ffi::OsString, path::PathBuf};

use doctor_core::{finding::Verdict, ids::CheckId, policy::Policy, profile::Profile};

use super::settings::Settings;
use crate::{
    agent::{config::Config, hook_reports::HookReport, machine::stored_profile},
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
            detects_profile: config.profile.is_none(),
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
    check_runner: &CheckRunner,
    names: &[CheckId],
    suite: Suite,
    known: &mut Verdicts,
    stop: &Stop,
) -> Result<CheckRun, HookCheckError> {
    let runner = LocalRunner::new(&check_runner.root, stop)
        .state(Some(&check_runner.state))
        .library(check_runner.library.clone());
    let detected = match check_runner.detects_profile {
        true => match stored_profile(&check_runner.state, &runner) {
            Some(profile) => Some(profile),
            None => profile::select_profile(&MachineArgs::detect_all(), Some(&check_runner.state), &runner)?.profile,
        },
        false => None,
    };
    let profile = check_runner.profile.as_ref().or(detected.as_ref());
    let results = check::check_with_evidence(names, suite, &check_runner.policy, profile, &runner)?;
    let at = now();
    let (mut reported, mut bytes_left) = (Vec::new(), MAX_EVIDENCE_BYTES);
    let checks = results.len();
    for (result, mut evidence) in results {
        let before = known.get(&result.check).cloned();
        known.record(&result.check, result.verdict, &result.findings, &result.text, at);
        if should_report(before.as_ref(), known.get(&result.check), &result) {
            bytes_left = truncate_evidence(bytes_left, &mut evidence);
            reported.push(evidence);
        }
    }
    if names.is_empty() && stop.requested().is_none() {
        known.mark_all_checked(at);
    }
    let (hardware, up) = (hardware::collect(&runner), check::uptime(&runner));
    Ok(CheckRun { checks, report: HookReport { hardware, uptime: up, checks: reported } })
}

/// Whether the result has changed, or is a failure that needs confirmation.
fn should_report(before: Option<&StoredResult>, after: Option<&StoredResult>, result: &CheckResult) -> bool {
    let keys = |stored: &StoredResult| {
        stored.findings.iter().map(|one| (one.rule.clone(), one.entity.clone())).collect::<Vec<_>>()
    };
    let times = |stored: &StoredResult| stored.findings.iter().map(|one| one.sightings).min().unwrap_or(0);
    match (before, after) {
        (Some(before), Some(after)) if before.verdict == after.verdict && keys(before) == keys(after) => {
            result.verdict == Verdict::Fail && times(after) <= MAX_FAILURE_REPORTS
        }
        _ => true,
    }
}

impl CheckRun {
    pub(super) const fn has_report(&self) -> bool {
        !self.report.checks.is_empty()
    }
}
