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
    Moment,
    alone::{Decision, Leave, SECOND_LOOK, Scene},
    exit,
    job_end::JobEnd,
    line::chain,
    look::{Eyes, LookError, Looked, look},
    nodes::Node,
    reporting,
    settings::Settings,
    slurm::{Slurm, SlurmError},
    surroundings::Surroundings,
};
use crate::{
    agent::{config::Config, handed::Reported, permit},
    check::Suite,
    clock::now,
    job::place,
    stop::Stop,
    verdict::{Held, HeldFinding, Verdicts},
};

/// Share of a hook's time for running checks; the rest is for acting on them.
const FOR_LOOKING: f64 = 0.6;
/// Time for the controller to accept a report if no agent runs. Otherwise the report is spooled.
const FOR_TELLING: Duration = Duration::from_secs(2);
/// Time reserved to undo a drain whose second query failed.
const FOR_TAKING_BACK: Duration = Duration::from_secs(1);
/// Time a prolog needs to block its job: for the drain, the second query, and undoing the drain.
const FOR_BLOCKING: Duration = Duration::from_secs(3);

pub(super) struct Done {
    pub(super) code: u8,
    pub(super) line: String,
}

/// The destination of this node's findings.
enum Ear {
    /// Slurm only.
    Slurm,
    Controller(Box<Config>),
    /// No destination is configured, and why.
    Nobody(String),
}

/// The verdicts and where they come from.
struct Known {
    verdicts: Verdicts,
    source: Source,
}

enum Source {
    /// Stored verdicts of this age.
    Kept(Span),
    /// Checks that ran since this time. Only they are acted upon.
    Seen(Looked, Timestamp),
}

/// The authority by which a hook takes its node out of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    /// The hook's own. The next health check completes an unfinished drain.
    Own,
    /// The controller's permit. No later hook completes an unfinished drain.
    Permit,
}

pub(super) fn work(moment: Moment, settings: &Settings, surroundings: &Surroundings, stop: &Stop) -> Done {
    let ear = ear(settings);
    let job = JobEnd::told(surroundings).filter(|_| moment == Moment::Epilog);
    let mut words: Vec<String> = job.iter().filter(|job| !job.is_well()).map(JobEnd::words).collect();
    if let Some(job) = job.as_ref().filter(|job| !job.is_well())
        && let Err(error) = job.keep(&settings.state, now())
    {
        words.push(format!("cannot store the end of the job: {error}"));
    }
    let deeper = job.as_ref().is_some_and(|job| job.calls_for_a_look(&settings.epilog));
    let known = match known(moment, deeper, settings, &ear) {
        Ok(known) => known,
        Err(error) => {
            words.push(format!("inconclusive: no check ran: {}", chain(&error)));
            return Done { code: exit::GO_ON, line: words.join("; ") };
        }
    };
    words.push(known.words(deeper));
    let hook = Hook { moment, settings, surroundings, stop };
    let (code, did) = match &ear {
        Ear::Slurm => hook.act_alone(&known),
        Ear::Controller(config) => hook.tell(config, &known),
        Ear::Nobody(why) => (exit::GO_ON, Some(format!("not reported: {why}"))),
    };
    words.extend(did);
    Done { code, line: words.join("; ") }
}

fn ear(settings: &Settings) -> Ear {
    if settings.alone {
        return Ear::Slurm;
    }
    match reporting::road(&settings.agent) {
        Ok(config) => Ear::Controller(Box::new(config)),
        Err(error) => Ear::Nobody(chain(&error)),
    }
}

/// Returns stored verdicts if they are fresh enough, and otherwise runs checks.
fn known(moment: Moment, deeper: bool, settings: &Settings, ear: &Ear) -> Result<Known, LookError> {
    let fresh = |verdicts: Verdicts| {
        let age = verdicts.age(now()).filter(|age| *age <= settings.fresh)?;
        Some(Known { verdicts, source: Source::Kept(age) })
    };
    let of_agent = match ear {
        Ear::Controller(config) => fresh(Verdicts::read(&config.state)),
        Ear::Slurm | Ear::Nobody(_) => None,
    };
    let mut verdicts = Verdicts::read(&settings.state);
    // Older results, of an earlier deep check or from before the agent came, have not been verified since.
    verdicts.forget_before(now().minus(settings.fresh));
    let (mut names, suite) = match deeper {
        true => (settings.epilog.deeper.clone(), Suite::Quick),
        false => (Vec::new(), Suite::Fast),
    };
    if !deeper {
        // HealthCheckProgram must run the checks; a job need not wait for the same checks again.
        let of_hook = || fresh(verdicts.clone()).filter(|_| moment != Moment::Health);
        if let Some(known) = of_agent.or_else(of_hook) {
            let least = acts_from(moment, settings, ear);
            let failing: BTreeSet<_> =
                least.iter().flat_map(|least| known.confirmed(*least)).map(|one| one.0).collect();
            names = failing.into_iter().cloned().collect();
            if names.is_empty() {
                return Ok(known);
            }
            // The node may have been repaired since: run these checks again and continue their counts.
            verdicts = known.verdicts;
        }
    }
    let eyes = match ear {
        Ear::Controller(config) => Eyes::of_agent(config, settings),
        Ear::Slurm | Ear::Nobody(_) => Eyes::alone(settings)?,
    };
    let until = Stop::never().after(settings.limit(moment).to_std().mul_f64(FOR_LOOKING));
    let begun = now();
    let looked = look(&eyes, &names, suite, &mut verdicts, &until)?;
    // If writing fails, the next hook runs the checks itself.
    let _kept = verdicts.write(&settings.state);
    Ok(Known { verdicts, source: Source::Seen(looked, begun) })
}

/// Returns the severity from which this hook acts itself. `None` if it only reports.
fn acts_from(moment: Moment, settings: &Settings, ear: &Ear) -> Option<Severity> {
    match ear {
        Ear::Slurm => Some(Severity::Reset),
        Ear::Controller(_) => (moment == Moment::Prolog && settings.prolog.block).then_some(Severity::Isolate),
        Ear::Nobody(_) => None,
    }
}

impl Known {
    /// Returns confirmed failures of at least this severity, the worst first.
    fn confirmed(&self, least: Severity) -> impl Iterator<Item = (&CheckId, &HeldFinding)> {
        let failing = self.verdicts.failing().into_iter();
        failing.filter(move |(_, finding)| finding.is_confirmed() && finding.severity >= least)
    }

    /// Returns the worst of them that this run observed. A stored finding may have been repaired since.
    fn worst(&self, least: Severity) -> Option<(&CheckId, &HeldFinding)> {
        self.confirmed(least).find(|(check, _)| self.seen_now(check).is_some())
    }

    /// Returns this run's own result of a check.
    fn seen_now(&self, check: &CheckId) -> Option<&Held> {
        match &self.source {
            Source::Kept(_) => None,
            Source::Seen(_, begun) => self.verdicts.of(check).filter(|held| held.at >= *begun),
        }
    }

    fn words(&self, deeper: bool) -> String {
        let failing = self.verdicts.failing();
        let what = match failing.as_slice() {
            [] => "healthy".to_owned(),
            [(check, finding), more @ ..] => {
                let HeldFinding { reason, severity, text, .. } = finding;
                let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
                format!("{reason} ({severity}) of {check}: {text}{more}")
            }
        };
        let unknown = match (self.verdicts.inconclusive(), self.verdicts.why_inconclusive()) {
            (0, _) => String::new(),
            (count, None) => format!(", {count} inconclusive"),
            (count, Some(why)) => format!(", {count} inconclusive ({why})"),
        };
        let how = match &self.source {
            Source::Kept(age) => format!("checked {age} ago"),
            Source::Seen(looked, _) if deeper => format!("deeper checks run: {}", looked.checks),
            Source::Seen(looked, _) => format!("checks run: {}", looked.checks),
        };
        format!("{what}{unknown}, {how}")
    }
}

/// The outcome in words, and whether we have the node out of service.
type Settled = (Option<String>, bool);

struct Hook<'a> {
    moment: Moment,
    settings: &'a Settings,
    surroundings: &'a Surroundings,
    stop: &'a Stop,
}

impl Hook<'_> {
    fn slurm(&self) -> Slurm<'_> {
        Slurm::find(self.settings, self.surroundings, self.stop)
    }

    /// Reports new results to the controller, which decides. Only a prolog that may block acts itself.
    fn tell(&self, config: &Config, known: &Known) -> (u8, Option<String>) {
        let told = match &known.source {
            Source::Seen(looked, _) if looked.has_news() => {
                Some(match reporting::report(config, &looked.news, FOR_TELLING) {
                    Ok(Reported::ByAgent) => "the agent reports it".to_owned(),
                    Ok(Reported::Now) => "reported".to_owned(),
                    Ok(Reported::Later) => "the controller does not accept it now, it is spooled".to_owned(),
                    Err(error) => format!("cannot report it: {error}"),
                })
            }
            Source::Seen(..) | Source::Kept(_) => None,
        };
        if !self.may_block() || known.worst(Severity::Isolate).is_none() {
            return (exit::GO_ON, told);
        }
        let (code, did) = match self.block(config, known) {
            Ok(did) => (exit::STOP, format!("the job is blocked on this node: {did}")),
            Err(why) => (exit::GO_ON, format!("the job is allowed: {why}")),
        };
        (code, Some(told.into_iter().chain([did]).collect::<Vec<_>>().join("; ")))
    }

    /// Takes the node out of service, or returns why not. Every node may hold a permit without knowing how many others
    /// use theirs, and a fault that all nodes share must not stop all jobs. The hooks therefore count each other's
    /// drains in Slurm, as in standalone mode.
    fn block(&self, config: &Config, known: &Known) -> Result<String, String> {
        if !permit::is_fresh(&config.state, now()) {
            return Err("no fresh drain permit from the controller".to_owned());
        }
        if self.stop.at_most(FOR_BLOCKING) < FOR_BLOCKING {
            return Err("too little of `prolog.limit` is left to count the drained nodes".to_owned());
        }
        // Slurm drains the node anyway; setting our reason first makes the cause visible.
        let node = self.surroundings.node(self.settings).unwrap_or_else(|| config.route.node.clone());
        match self.settle(&node, known, &config.policy.breaker, Word::Permit) {
            Ok((did, true)) => Ok(did.unwrap_or_default()),
            Ok((did, false)) => Err(did.unwrap_or_default()),
            Err(error) => Err(chain(&error)),
        }
    }

    fn may_block(&self) -> bool {
        self.moment == Moment::Prolog && self.settings.prolog.block
    }

    /// Decides and acts locally, within the breaker's limits.
    fn act_alone(&self, known: &Known) -> (u8, Option<String>) {
        let trouble = known.worst(Severity::Reset);
        if trouble.is_none() && !self.settings.release {
            return (exit::GO_ON, None);
        }
        let Some(node) = self.surroundings.node(self.settings).or_else(|| place::this_node().ok()) else {
            return (exit::GO_ON, Some("nothing is done: the name of this node in Slurm is unknown".to_owned()));
        };
        let policy = match Eyes::alone(self.settings) {
            Ok(eyes) => eyes.policy,
            Err(error) => return (exit::GO_ON, Some(format!("nothing is done: {}", chain(&error)))),
        };
        match self.settle(&node, known, &policy.breaker, Word::Own) {
            Ok((decision, out)) => {
                let isolates = known.worst(Severity::Isolate).is_some();
                let code = if out && isolates && self.may_block() { exit::STOP } else { exit::GO_ON };
                (code, decision)
            }
            Err(error) => (exit::GO_ON, Some(format!("nothing is done: {}", chain(&error)))),
        }
    }

    /// Decides and acts. Returns the outcome in words, and whether we have the node out of service.
    fn settle(
        &self,
        node: &NodeName,
        known: &Known,
        limits: &BreakerLimits,
        word: Word,
    ) -> Result<Settled, SlurmError> {
        let slurm = self.slurm();
        let is_over = |check: &CheckId| known.seen_now(check).is_some_and(|held| held.verdict == Verdict::Pass);
        let nodes = slurm.nodes()?;
        let scene = Scene {
            name: node.as_str(),
            nodes: &nodes,
            trouble: known.worst(match word {
                Word::Own => Severity::Reset,
                Word::Permit => Severity::Isolate,
            }),
            is_over: &is_over,
            release: self.settings.release && word == Word::Own,
            limits,
            now: now(),
        };
        match scene.decide() {
            Decision::Leave(Leave::Well) => Ok((None, false)),
            Decision::Leave(why @ Leave::DrainedAlready) => Ok((Some(why.to_string()), true)),
            Decision::Leave(why) => Ok((Some(why.to_string()), false)),
            Decision::Release => {
                slurm.resume(node)?;
                Ok((Some("resumed: the finding has cleared".to_owned()), false))
            }
            Decision::TakeBack(why) => take_back(&slurm, node, &why),
            Decision::Drain(reason) => {
                slurm.drain(node, &reason)?;
                std::thread::sleep(SECOND_LOOK);
                let nodes = match self.second_look(&slurm, word) {
                    Err(error) if word == Word::Permit => return take_back(&slurm, node, &chain(&error)),
                    nodes => nodes?,
                };
                match (Scene { nodes: &nodes, now: now(), ..scene }).came_too_late() {
                    None => Ok((Some("drained".to_owned()), true)),
                    Some(why) => take_back(&slurm, node, &why),
                }
            }
        }
    }

    /// Queries the nodes after the drain. If no later hook would undo it, leaves time to do so.
    fn second_look(&self, slurm: &Slurm<'_>, word: Word) -> Result<Vec<Node>, SlurmError> {
        match word {
            Word::Own => slurm.nodes(),
            Word::Permit => {
                let left = self.stop.at_most(self.settings.limit(self.moment).to_std());
                let until = Stop::never().after(left.saturating_sub(FOR_TAKING_BACK));
                Slurm::find(self.settings, self.surroundings, &until).nodes()
            }
        }
    }
}

fn take_back(slurm: &Slurm<'_>, node: &NodeName, why: &dyn Display) -> Result<Settled, SlurmError> {
    slurm.resume(node)?;
    Ok((Some(format!("drain reverted: {why}")), false))
}
