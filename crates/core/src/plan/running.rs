//! Running work: cancels runs that are in the way, hung or over their limit, and concludes those that have ended.

use crate::{
    ids::{NodeName, RunId},
    node::Occupancy,
    run::{CancelReason, IncompleteReason, JobEnd, NotStartedReason, ObservedJobState, RunState},
    snapshot::{ActiveRun, CommandKind, NodeRecord},
    time::{Span, Timestamp},
};

use super::{
    Action, Conclusion,
    builder::{PlanBuilder, STUCK_AFTER, coarse, is_available, is_reachable_out_of_band},
};

/// Delay before a cancellation without effect is repeated.
const CANCEL_AGAIN: Span = Span::minutes(1);

pub(super) fn plan(builder: &mut PlanBuilder<'_>) {
    let snapshot = builder.snapshot;
    for active in &snapshot.runs {
        if let Some(step) = withdrawn(builder, active).or_else(|| decide(builder, active)) {
            for node in active.run.nodes.iter() {
                builder.touch(node);
            }
            let (action, code, text) = step.into_action(active.run.id);
            builder.push_action(action, code, text);
        }
    }
}

enum RunDecision {
    Resubmit,
    Cancel(CancelReason, String),
    Conclude(Conclusion, String),
}

impl RunDecision {
    fn into_action(self, run: RunId) -> (Action, &'static str, String) {
        match self {
            Self::Resubmit => {
                (Action::Resubmit { run }, "never-submitted", "recorded earlier, but not known to the backend".into())
            }
            Self::Cancel(why, text) => (Action::Cancel { run, why }, why.code(), text),
            Self::Conclude(end @ Conclusion::Incomplete(why), text) => {
                (Action::Conclude { run, end }, why.code(), text)
            }
            Self::Conclude(end @ Conclusion::NotStarted(why), text) => {
                (Action::Conclude { run, end }, why.code(), text)
            }
        }
    }
}

/// Cancels a run that an operator withdrew, unless it has ended or is being cancelled already.
fn withdrawn(builder: &PlanBuilder<'_>, active: &ActiveRun) -> Option<RunDecision> {
    let run = active.run.id;
    let request = builder.snapshot.commands.iter().find(|request| request.kind == CommandKind::CancelRun { run })?;
    let over = active.cancelling.is_some() || matches!(active.job, ObservedJobState::Ended { .. });
    (!over)
        .then(|| RunDecision::Cancel(CancelReason::Withdrawn, format!("requested by {}: {}", request.by, request.why)))
}

fn decide(builder: &PlanBuilder<'_>, active: &ActiveRun) -> Option<RunDecision> {
    match &active.job {
        ObservedJobState::Unknown { why } => unknown_job(builder, active, why),
        ObservedJobState::Absent => absent(builder, active),
        ObservedJobState::Ended { started, at, how, .. } => {
            ended(builder, active, started.or(active.started), *at, *how)
        }
        ObservedJobState::Pending { since, .. } | ObservedJobState::Running { since, .. } => {
            let running = matches!(active.job, ObservedJobState::Running { .. });
            live_job(builder, active, running, *since)
        }
    }
}

/// Handles a job whose state is unknown. A node that is observed may be wanted by a user all the same: the cancellation reaches the
/// parts of the job that can be reached. If a node of the run is not observed either, the job is cancelled past its limits, and
/// again when it is observed. A run that also has nodes which are observed ends once its own time limit must have ended it: they
/// do not wait for a node that never answers again.
fn unknown_job(builder: &PlanBuilder<'_>, active: &ActiveRun, why: &str) -> Option<RunDecision> {
    if active.cancelling.is_none()
        && let Some(decision) = unavailable_node(builder, active)
    {
        return Some(decision);
    }
    let is_observed = |name: &NodeName| {
        builder.record(name).is_some_and(|record| !matches!(record.node.occupancy, Occupancy::Unknown { .. }))
    };
    let unobserved = active.run.nodes.iter().find(|node| !is_observed(node))?;
    let at = builder.snapshot.at;
    let age = at.since(active.run.planned);
    let longest = builder.snapshot.policy.limits.pending + active.run.limit;
    if age <= longest {
        return None;
    }
    let Some(cancelling) = active.cancelling else {
        let reason = if active.started.is_some() { CancelReason::OverTimeLimit } else { CancelReason::PendingTooLong };
        let text = format!("planned {} ago, {longest} is the limit, and its state is unknown: {why}", coarse(age));
        return Some(RunDecision::Cancel(reason, text));
    };
    let is_past = at.since(cancelling.since) >= STUCK_AFTER && age > longest + STUCK_AFTER;
    if !is_past || !active.run.nodes.iter().any(is_observed) {
        return None;
    }
    let conclusion = match active.started {
        Some(_) => Conclusion::Incomplete(IncompleteReason::NodeDied),
        None => Conclusion::NotStarted(NotStartedReason::PendingTooLong),
    };
    let text = format!("planned {} ago and cancelled, and {unobserved} has not answered since: {why}", coarse(age));
    Some(RunDecision::Conclude(conclusion, text))
}

/// Handles a job that the backend does not know: it was never submitted, or it is lost.
fn absent(builder: &PlanBuilder<'_>, active: &ActiveRun) -> Option<RunDecision> {
    let at = builder.snapshot.at;
    let not_started = |why, text: &str| Some(RunDecision::Conclude(Conclusion::NotStarted(why), text.to_owned()));
    let absent_for = at.since(active.absent_since.unwrap_or(at));
    let in_grace = absent_for < builder.snapshot.policy.limits.result_grace;
    // The job of a node that left the cluster is lost with it: there is no place left to look for it.
    let vanished = active.run.nodes.iter().find(|node| builder.record(node).is_none());
    // A cancellation for the time limit may never have reached a node that left.
    let cancelled = active.cancelling.filter(|cancelling| vanished.is_none() || !is_over_limit(cancelling.why));
    if active.started.is_some() {
        // Its result may still be in transit.
        if in_grace {
            return None;
        }
        let lost = if vanished.is_some() { IncompleteReason::NodeVanished } else { IncompleteReason::JobLost };
        let why = cancelled.map_or(lost, |cancelling| cancelling.why.incomplete());
        let text = vanished.map_or_else(
            || "the backend no longer knows the job".to_owned(),
            |name| format!("{name} is no longer in the cluster, and its job is lost"),
        );
        return Some(RunDecision::Conclude(Conclusion::Incomplete(why), text));
    }
    if let Some(cancelling) = cancelled {
        return not_started(cancelling.why.not_started(), "cancelled before it started");
    }
    if !matches!(active.run.state, RunState::Planned) {
        // A short test may have started and ended between two cycles: its result may be in transit too.
        if in_grace {
            return None;
        }
        return match vanished {
            Some(name) => not_started(
                CancelReason::NodeVanished.not_started(),
                &format!("{name} left the cluster before the job started"),
            ),
            None => not_started(NotStartedReason::Rejected, "the backend lost the job before it started"),
        };
    }
    if at.since(active.run.planned) > builder.snapshot.policy.limits.pending {
        return not_started(NotStartedReason::PendingTooLong, "the job could not be submitted in time");
    }
    let open = |record: &NodeRecord| is_available(record, at) || is_reachable_out_of_band(record, at);
    match active.run.nodes.iter().all(|node| builder.record(node).is_some_and(open)) {
        true => Some(RunDecision::Resubmit),
        false => not_started(NotStartedReason::NodeTaken, "its node is no longer free"),
    }
}

fn ended(
    builder: &PlanBuilder<'_>,
    active: &ActiveRun,
    started: Option<Timestamp>,
    ended: Timestamp,
    how: JobEnd,
) -> Option<RunDecision> {
    let cancelled = active.cancelling.map(|cancelling| cancelling.why);
    if started.is_none() {
        let unasked = if how == JobEnd::Preempted { NotStartedReason::NodeTaken } else { NotStartedReason::Rejected };
        let why = cancelled.map_or(unasked, CancelReason::not_started);
        return Some(RunDecision::Conclude(
            Conclusion::NotStarted(why),
            format!("the job ended ({how}) before it started"),
        ));
    }
    if builder.snapshot.at.since(ended) < builder.snapshot.policy.limits.result_grace {
        return None;
    }
    // The cancellation of a job that was over its time limit does not explain that its node failed, and may never have reached it.
    let cancelled = cancelled.filter(|why| !(matches!(how, JobEnd::NodeDied | JobEnd::Lost) && is_over_limit(*why)));
    let why = cancelled.map_or_else(
        || match how {
            JobEnd::Exited => IncompleteReason::NoResult,
            JobEnd::Failed | JobEnd::Killed => IncompleteReason::Crashed,
            JobEnd::Preempted => IncompleteReason::NodeTaken,
            JobEnd::NodeDied => IncompleteReason::NodeDied,
            JobEnd::Lost => IncompleteReason::JobLost,
        },
        CancelReason::incomplete,
    );
    Some(RunDecision::Conclude(Conclusion::Incomplete(why), format!("the job ended ({how}) without a complete result")))
}

/// Whether a job is cancelled for this reason because of its age alone.
const fn is_over_limit(why: CancelReason) -> bool {
    matches!(why, CancelReason::OverTimeLimit | CancelReason::PendingTooLong)
}

/// Returns the decision to cancel a job because of one of its nodes: it left the cluster, a user wants it, or an operator holds it.
fn unavailable_node(builder: &PlanBuilder<'_>, active: &ActiveRun) -> Option<RunDecision> {
    let at = builder.snapshot.at;
    active.run.nodes.iter().find_map(|name| {
        let (why, text) = match builder.record(name) {
            None => (CancelReason::NodeVanished, format!("{name} is no longer in the cluster")),
            Some(record) => match (&record.node.occupancy, record.hold_at(at)) {
                (Occupancy::Busy { by }, _) => (CancelReason::NodeTaken, format!("{name} is wanted by {by}")),
                (_, Some(hold)) => (CancelReason::Withdrawn, format!("{name} is held by {}", hold.by)),
                _ => return None,
            },
        };
        Some(RunDecision::Cancel(why, text))
    })
}

/// Handles a pending or running job: cancels it if another user wants a node or it takes too long.
fn live_job(builder: &PlanBuilder<'_>, active: &ActiveRun, running: bool, since: Timestamp) -> Option<RunDecision> {
    let (at, limits) = (builder.snapshot.at, &builder.snapshot.policy.limits);
    let waited = at.since(since);
    let (limit, why, doing) = match running {
        false => (limits.pending, CancelReason::PendingTooLong, "pending"),
        true => (active.run.limit, CancelReason::OverTimeLimit, "running"),
    };
    let is_over = waited > limit;
    // A job that was cancelled for its age while its state was unknown may have waited for the cluster, and started since.
    if let Some(cancelling) = active.cancelling.filter(|cancelling| is_over || !is_over_limit(cancelling.why)) {
        let again = at.since(cancelling.since) >= CANCEL_AGAIN;
        return again
            .then(|| RunDecision::Cancel(cancelling.why, "the job still exists after it was cancelled".into()));
    }
    unavailable_node(builder, active).or_else(|| {
        let text = || format!("{doing} for {}, {limit} is the limit", coarse(waited));
        is_over.then(|| RunDecision::Cancel(why, text()))
    })
}
