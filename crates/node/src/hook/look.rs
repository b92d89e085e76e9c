//! Runs the hook's own checks: the fast ones, or the deeper ones after a job that ended badly.

use std::{ffi::OsString, path::PathBuf};

use doctor_core::{finding::Verdict, ids::CheckId, policy::Policy, profile::Profile};

use super::settings::Settings;
use crate::{
    agent::{config::Config, handed::Handed},
    check::{self, Answer, CheckError, Suite},
    clock::now,
    hardware,
    job::{EVIDENCE_ROOM, keep_within},
    policy::{FileError, load_policy, load_profile},
    profile::{self, MachineArgs, ProfileError},
    runner::LocalRunner,
    stop::Stop,
    verdict::{Held, Verdicts},
};

/// How often a failure is reported, as by the agent: rules require confirmation.
const TELL_FAILURE: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub(super) enum LookError {
    #[error(transparent)]
    Policy(#[from] FileError),
    #[error(transparent)]
    Machine(#[from] ProfileError),
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// What checks run with and are classified by.
#[derive(Debug)]
pub(super) struct Eyes {
    pub(super) policy: Policy,
    /// Detected if none is configured.
    profile: Option<Profile>,
    finds_profile: bool,
    root: PathBuf,
    library: OsString,
    state: PathBuf,
}

impl Eyes {
    pub(super) fn of_agent(config: &Config, settings: &Settings) -> Self {
        Self {
            policy: config.policy.clone(),
            profile: config.profile.clone(),
            finds_profile: false,
            root: config.root.clone(),
            library: config.library.clone(),
            state: settings.state.clone(),
        }
    }

    pub(super) fn alone(settings: &Settings) -> Result<Self, LookError> {
        let profile = load_profile(settings.profile.as_deref())?;
        Ok(Self {
            policy: load_policy(settings.policy.as_deref())?,
            finds_profile: profile.is_none(),
            profile,
            root: settings.root.clone(),
            library: settings.nvml.clone().into(),
            state: settings.state.clone(),
        })
    }
}

/// The result of a run of checks.
#[derive(Debug)]
pub(super) struct Looked {
    pub(super) checks: usize,
    /// Evidence to report to the controller.
    pub(super) news: Handed,
}

/// Runs the named checks, or the suite without names, and records their results in `known`.
pub(super) fn look(
    eyes: &Eyes,
    names: &[CheckId],
    suite: Suite,
    known: &mut Verdicts,
    stop: &Stop,
) -> Result<Looked, LookError> {
    let runner = LocalRunner::new(&eyes.root, stop).state(Some(&eyes.state)).library(eyes.library.clone());
    let found = match eyes.finds_profile {
        true => profile::choose(&MachineArgs::unasked(), Some(&eyes.state), &runner)?.profile,
        false => None,
    };
    let profile = eyes.profile.as_ref().or(found.as_ref());
    let answers = check::check_with_evidence(names, suite, &eyes.policy, profile, &runner)?;
    let at = now();
    let (mut news, mut room) = (Vec::new(), EVIDENCE_ROOM);
    let checks = answers.len();
    for (answer, mut evidence) in answers {
        let before = known.of(&answer.check).cloned();
        known.note(&answer.check, answer.verdict, &answer.findings, &answer.text, at);
        if is_news(before.as_ref(), known.of(&answer.check), &answer) {
            room = keep_within(room, &mut evidence);
            news.push(evidence);
        }
    }
    if names.is_empty() && stop.told().is_none() {
        known.looked_at_all(at);
    }
    let (hardware, up) = (hardware::collect(&runner), check::uptime(&runner));
    Ok(Looked { checks, news: Handed { hardware, up, checks: news } })
}

/// Whether the result has changed, or is a failure that needs confirmation.
fn is_news(before: Option<&Held>, after: Option<&Held>, answer: &Answer) -> bool {
    let keys = |held: &Held| held.findings.iter().map(|one| (one.rule.clone(), one.entity.clone())).collect::<Vec<_>>();
    let times = |held: &Held| held.findings.iter().map(|one| one.times).min().unwrap_or(0);
    match (before, after) {
        (Some(before), Some(after)) if before.verdict == after.verdict && keys(before) == keys(after) => {
            answer.verdict == Verdict::Fail && times(after) <= TELL_FAILURE
        }
        _ => true,
    }
}

impl Looked {
    pub(super) const fn has_news(&self) -> bool {
        !self.news.checks.is_empty()
    }
}
