//! The work of a hook, from checks to exit code. Each part may fail on its own; a failure is printed and otherwise
//! ignored.

use std::{collections::BTreeSet, fmt::Display, time::Duration};

use doctor_core::{
    finding::{Severity, Verdict},
    ids::{CheckId, NodeName},
    policy::BreakerLimits,
    time::{Span, Timestamp},
};

use super::{
    HookKind,
    checks::{CheckRun, CheckRunner, HookCheckError, run_checks},
    exit,
    job_end::JobEnd,
    line::chain,
    nodes::Node,
    reporting,
    scontrol::{Slurm, SlurmError},
    settings::Settings,
    slurm_env::SlurmEnv,
    standalone::{Decision, DrainInput, HookSkipReason, RECHECK_DELAY},
};
use crate::{
    agent::{config::Config, drain_permit, hook_reports::SubmitOutcome},
    check::Suite,
    clock::now,
    job::node_paths,
    stop::Stop,
    verdict_file::{StoredFinding, StoredResult, Verdicts},
};

/// Share of a hook's time for running checks; the rest is for acting on them.
const CHECK_TIME_SHARE: f64 = 0.6;
/// Time for the controller to accept a report if no agent runs. Otherwise the report is spooled.
const REPORT_TIME: Duration = Duration::from_secs(2);
/// Time reserved to undo a drain whose second query failed.
const REVERT_TIME: Duration = Duration::from_secs(1);
/// Time a prolog needs to block its job: for the drain, the second query, and undoing the drain.
const BLOCK_TIME: Duration = Duration::from_secs(3);

pub(super) struct Done {
    pub(super) code: u8,
    pub(super) line: String,
}

/// The destination of this node's findings.
enum ReportTarget {
    /// Slurm only.
    Slurm,
    Controller(Box<Config>),
    /// No destination is configured, and why.
    Unconfigured(String),
}

/// The verdicts and where they come from.
struct KnownVerdicts {
    verdicts: Verdicts,
    source: VerdictSource,
}

enum VerdictSource {
    /// Stored verdicts of this age.
    Stored(Span),
    /// Checks that ran since this time. Only they are acted upon.
    Fresh(CheckRun, Timestamp),
}

/// The authority by which a hook takes its node out of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DrainAuthority {
    /// The hook's own. The next health check completes an unfinished drain.
    Standalone,
    /// The controller's permit. No later hook completes an unfinished drain.
    Permit,
}

pub(super) fn work(kind: HookKind, settings: &Settings, slurm_env: &SlurmEnv, stop: &Stop) -> Done {
    let target = report_target(settings);
    let job = JobEnd::from_env(slurm_env).filter(|_| kind == HookKind::Epilog);
    let mut parts: Vec<String> = job.iter().filter(|job| !job.is_success()).map(JobEnd::summary).collect();
    if let Some(job) = job.as_ref().filter(|job| !job.is_success())
        && let Err(error) = job.store(&settings.state, now())
    {
        parts.push(format!("cannot store the end of the job: {error}"));
    }
    let deep = job.as_ref().is_some_and(|job| job.needs_deeper_checks(&settings.epilog));
    let known = match gather_verdicts(kind, deep, settings, &target) {
        Ok(known) => known,
        Err(error) => {
            parts.push(format!("inconclusive: no check ran: {}", chain(&error)));
            return Done { code: exit::CONTINUE, line: parts.join("; ") };
        }
    };
    parts.push(known.summary(deep));
    let hook = Hook { kind, settings, slurm_env, stop };
    let (code, action) = match &target {
        ReportTarget::Slurm => hook.act_standalone(&known),
        ReportTarget::Controller(config) => hook.report(config, &known),
        ReportTarget::Unconfigured(why) => (exit::CONTINUE, Some(format!("not reported: {why}"))),
    };
    parts.extend(action);
    Done { code, line: parts.join("; ") }
}

fn report_target(settings: &Settings) -> ReportTarget {
    if settings.standalone {
        return ReportTarget::Slurm;
    }
    match reporting::agent_config(&settings.agent) {
        Ok(config) => ReportTarget::Controller(Box::new(config)),
        Err(error) => ReportTarget::Unconfigured(chain(&error)),
    }
}

/// Returns stored verdicts if they are fresh enough, and otherwise runs checks.
fn gather_verdicts(
    kind: HookKind,
    deep: bool,
    settings: &Settings,
    target: &ReportTarget,
) -> Result<KnownVerdicts, HookCheckError> {
    let fresh = |verdicts: Verdicts| {
        let age = verdicts.age(now()).filter(|age| *age <= settings.fresh)?;
        Some(KnownVerdicts { verdicts, source: VerdictSource::Stored(age) })
    };
    let of_agent = match target {
        ReportTarget::Controller(config) => fresh(Verdicts::read(&config.state)),
        ReportTarget::Slurm | ReportTarget::Unconfigured(_) => None,
    };
    let mut verdicts = Verdicts::read(&settings.state);
    // Older results, of an earlier deep check or from before the agent came, have not been verified since.
    verdicts.forget_before(now().minus(settings.fresh));
    let (mut names, suite) = match deep {
        true => (settings.epilog.deeper.clone(), Suite::Quick),
        false => (Vec::new(), Suite::Fast),
    };
    if !deep {
        // HealthCheckProgram must run the checks; a job need not wait for the same checks again.
        let of_hook = || fresh(verdicts.clone()).filter(|_| kind != HookKind::Health);
        if let Some(known) = of_agent.or_else(of_hook) {
            let min_severity = min_action_severity(kind, settings, target);
            let failing: BTreeSet<_> =
                min_severity.iter().flat_map(|min_severity| known.confirmed(*min_severity)).map(|one| one.0).collect();
            names = failing.into_iter().cloned().collect();
            if names.is_empty() {
                return Ok(known);
            }
            // The node may have been repaired since: run these checks again and continue their counts.
            verdicts = known.verdicts;
        }
    }
    let check_runner = match target {
        ReportTarget::Controller(config) => CheckRunner::of_agent(config, settings),
        ReportTarget::Slurm | ReportTarget::Unconfigured(_) => CheckRunner::standalone(settings)?,
    };
    let stop = Stop::never().after(settings.limit(kind).to_std().mul_f64(CHECK_TIME_SHARE));
    let started = now();
    let check_run = run_checks(&check_runner, &names, suite, &mut verdicts, &stop)?;
    // If writing fails, the next hook runs the checks itself.
    let _saved = verdicts.write(&settings.state);
    Ok(KnownVerdicts { verdicts, source: VerdictSource::Fresh(check_run, started) })
}

/// Returns the severity from which this hook acts itself. `None` if it only reports.
fn min_action_severity(kind: HookKind, settings: &Settings, target: &ReportTarget) -> Option<Severity> {
    match target {
        ReportTarget::Slurm => Some(Severity::Reset),
        ReportTarget::Controller(_) => (kind == HookKind::Prolog && settings.prolog.block).then_some(Severity::Isolate),
        ReportTarget::Unconfigured(_) => None,
    }
}

impl KnownVerdicts {
    /// Returns confirmed failures of at least this severity, the worst first.
    fn confirmed(&self, min_severity: Severity) -> impl Iterator<Item = (&CheckId, &StoredFinding)> {
        let failing = self.verdicts.failing().into_iter();
        failing.filter(move |(_, finding)| finding.is_confirmed() && finding.severity >= min_severity)
    }

    /// Returns the worst of them that this run observed. A stored finding may have been repaired since.
    fn worst_fresh(&self, min_severity: Severity) -> Option<(&CheckId, &StoredFinding)> {
        self.confirmed(min_severity).find(|(check, _)| self.fresh_result(check).is_some())
    }

    /// Returns this run's own result of a check.
    fn fresh_result(&self, check: &CheckId) -> Option<&StoredResult> {
        match &self.source {
            VerdictSource::Stored(_) => None,
            VerdictSource::Fresh(_, started) => self.verdicts.get(check).filter(|result| result.at >= *started),
        }
    }

    fn summary(&self, deep: bool) -> String {
        let failing = self.verdicts.failing();
        let health = match failing.as_slice() {
            [] => "healthy".to_owned(),
            [(check, finding), more @ ..] => {
                let StoredFinding { reason, severity, text, .. } = finding;
                let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
                format!("{reason} ({severity}) of {check}: {text}{more}")
            }
        };
        let unknown = match (self.verdicts.inconclusive(), self.verdicts.why_inconclusive()) {
            (0, _) => String::new(),
            (count, None) => format!(", {count} inconclusive"),
            (count, Some(cause)) => format!(", {count} inconclusive ({cause})"),
        };
        let how = match &self.source {
            VerdictSource::Stored(age) => format!("checked {age} ago"),
            VerdictSource::Fresh(check_run, _) if deep => format!("deeper checks run: {}", check_run.checks),
            VerdictSource::Fresh(check_run, _) => format!("checks run: {}", check_run.checks),
        };
        format!("{health}{unknown}, {how}")
    }
}

/// The outcome in words, and whether we have the node out of service.
type DrainOutcome = (Option<String>, bool);

struct Hook<'a> {
    kind: HookKind,
    settings: &'a Settings,
    slurm_env: &'a SlurmEnv,
    stop: &'a Stop,
}

impl Hook<'_> {
    fn slurm(&self) -> Slurm<'_> {
        Slurm::find(self.settings, self.slurm_env, self.stop)
    }

    /// Reports new results to the controller, which decides. Only a prolog that may block acts itself.
    fn report(&self, config: &Config, known: &KnownVerdicts) -> (u8, Option<String>) {
        let report_text = match &known.source {
            VerdictSource::Fresh(check_run, _) if check_run.has_report() => {
                Some(match reporting::report(config, &check_run.report, REPORT_TIME) {
                    Ok(SubmitOutcome::ByAgent) => "the agent reports it".to_owned(),
                    Ok(SubmitOutcome::Sent) => "reported".to_owned(),
                    Ok(SubmitOutcome::Spooled) => "the controller does not accept it now, it is spooled".to_owned(),
                    Err(error) => format!("cannot report it: {error}"),
                })
            }
            VerdictSource::Fresh(..) | VerdictSource::Stored(_) => None,
        };
        if !self.may_block() || known.worst_fresh(Severity::Isolate).is_none() {
            return (exit::CONTINUE, report_text);
        }
        let (code, did) = match self.block(config, known) {
            Ok(did) => (exit::BLOCK_JOB, format!("the job is blocked on this node: {did}")),
            Err(reason) => (exit::CONTINUE, format!("the job is allowed: {reason}")),
        };
        (code, Some(report_text.into_iter().chain([did]).collect::<Vec<_>>().join("; ")))
    }

    /// Takes the node out of service, or returns why not. Every node may hold a permit without knowing how many others
    /// use theirs, and a fault that all nodes share must not stop all jobs. The hooks therefore count each other's
    /// drains in Slurm, as in standalone mode.
    fn block(&self, config: &Config, known: &KnownVerdicts) -> Result<String, String> {
        if !drain_permit::is_valid(&config.state, now()) {
            return Err("no fresh drain permit from the controller".to_owned());
        }
        if self.stop.cap_wait(BLOCK_TIME) < BLOCK_TIME {
            return Err("too little of `prolog.limit` is left to count the drained nodes".to_owned());
        }
        // Slurm drains the node anyway; setting our reason first makes the cause visible.
        let node = self.slurm_env.node(self.settings).unwrap_or_else(|| config.route.node.clone());
        match self.decide_and_act(&node, known, &config.policy.breaker, DrainAuthority::Permit) {
            Ok((did, true)) => Ok(did.unwrap_or_default()),
            Ok((did, false)) => Err(did.unwrap_or_default()),
            Err(error) => Err(chain(&error)),
        }
    }

    fn may_block(&self) -> bool {
        self.kind == HookKind::Prolog && self.settings.prolog.block
    }

    /// Decides and acts locally, within the breaker's limits.
    fn act_standalone(&self, known: &KnownVerdicts) -> (u8, Option<String>) {
        let failure = known.worst_fresh(Severity::Reset);
        if failure.is_none() && !self.settings.release {
            return (exit::CONTINUE, None);
        }
        let Some(node) = self.slurm_env.node(self.settings).or_else(|| node_paths::this_node().ok()) else {
            return (exit::CONTINUE, Some("nothing is done: the name of this node in Slurm is unknown".to_owned()));
        };
        let policy = match CheckRunner::standalone(self.settings) {
            Ok(check_runner) => check_runner.policy,
            Err(error) => return (exit::CONTINUE, Some(format!("nothing is done: {}", chain(&error)))),
        };
        match self.decide_and_act(&node, known, &policy.breaker, DrainAuthority::Standalone) {
            Ok((decision, out)) => {
                let isolates = known.worst_fresh(Severity::Isolate).is_some();
                let code = if out && isolates && self.may_block() { exit::BLOCK_JOB } else { exit::CONTINUE };
                (code, decision)
            }
            Err(error) => (exit::CONTINUE, Some(format!("nothing is done: {}", chain(&error)))),
        }
    }

    /// Decides and acts. Returns the outcome in words, and whether we have the node out of service.
    fn decide_and_act(
        &self,
        node: &NodeName,
        known: &KnownVerdicts,
        limits: &BreakerLimits,
        authority: DrainAuthority,
    ) -> Result<DrainOutcome, SlurmError> {
        let slurm = self.slurm();
        let is_over = |check: &CheckId| known.fresh_result(check).is_some_and(|result| result.verdict == Verdict::Pass);
        let nodes = slurm.nodes()?;
        let input = DrainInput {
            name: node.as_str(),
            nodes: &nodes,
            worst_failure: known.worst_fresh(match authority {
                DrainAuthority::Standalone => Severity::Reset,
                DrainAuthority::Permit => Severity::Isolate,
            }),
            has_cleared: &is_over,
            release: self.settings.release && authority == DrainAuthority::Standalone,
            limits,
            now: now(),
        };
        match input.decide() {
            Decision::Skip(HookSkipReason::Healthy) => Ok((None, false)),
            Decision::Skip(cause @ HookSkipReason::DrainedAlready) => Ok((Some(cause.to_string()), true)),
            Decision::Skip(cause) => Ok((Some(cause.to_string()), false)),
            Decision::Release => {
                slurm.resume(node)?;
                Ok((Some("resumed: the finding has cleared".to_owned()), false))
            }
            Decision::Revert(cause) => revert_drain(&slurm, node, &cause),
            Decision::Drain(reason) => {
                slurm.drain(node, &reason)?;
                std::thread::sleep(RECHECK_DELAY);
                let nodes = match self.recheck_nodes(&slurm, authority) {
                    Err(error) if authority == DrainAuthority::Permit => {
                        return revert_drain(&slurm, node, &chain(&error));
                    }
                    nodes => nodes?,
                };
                match (DrainInput { nodes: &nodes, now: now(), ..input }).must_revert() {
                    None => Ok((Some("drained".to_owned()), true)),
                    Some(cause) => revert_drain(&slurm, node, &cause),
                }
            }
        }
    }

    /// Queries the nodes after the drain. If no later hook would undo it, leaves time to do so.
    fn recheck_nodes(&self, slurm: &Slurm<'_>, authority: DrainAuthority) -> Result<Vec<Node>, SlurmError> {
        match authority {
            DrainAuthority::Standalone => slurm.nodes(),
            DrainAuthority::Permit => {
                let remaining = self.stop.cap_wait(self.settings.limit(self.kind).to_std());
                let stop = Stop::never().after(remaining.saturating_sub(REVERT_TIME));
                Slurm::find(self.settings, self.slurm_env, &stop).nodes()
            }
        }
    }
}

fn revert_drain(slurm: &Slurm<'_>, node: &NodeName, reason: &dyn Display) -> Result<DrainOutcome, SlurmError> {
    slurm.resume(node)?;
    Ok((Some(format!("drain reverted: {reason}")), false))
}
