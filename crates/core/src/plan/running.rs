//! Running work: cancels runs that are in the way, hung or over their limit, and concludes those that have ended.

use crate::{
    ids::RunId,
    node::Occupancy,
    run::{CancelWhy, IncompleteWhy, JobEnd, JobSeen, NotStarted, RunState},
    snapshot::{ActiveRun, Asked, NodeRecord},
    time::{Span, Timestamp},
};

use super::{
    Action, Conclusion,
    draft::{Draft, coarse, is_free_to_us, takes_proofs},
};

/// Delay before a cancellation without effect is repeated.
const CANCEL_AGAIN: Span = Span::minutes(1);

pub(super) fn plan(draft: &mut Draft<'_>) {
    let snapshot = draft.snapshot;
    for active in &snapshot.runs {
        if let Some(step) = withdrawn(draft, active).or_else(|| decide(draft, active)) {
            for node in active.run.nodes.iter() {
                draft.touch_name(node);
            }
            let (action, code, text) = step.into_action(active.run.id);
            draft.act(action, code, text);
        }
    }
}

enum Next {
    Resubmit,
    Cancel(CancelWhy, String),
    Conclude(Conclusion, String),
}

impl Next {
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
fn withdrawn(draft: &Draft<'_>, active: &ActiveRun) -> Option<Next> {
    let run = active.run.id;
    let request = draft.snapshot.requests.iter().find(|request| request.what == Asked::Withdraw { run })?;
    let over = active.cancelling.is_some() || matches!(active.seen, JobSeen::Ended { .. });
    (!over).then(|| Next::Cancel(CancelWhy::Withdrawn, format!("requested by {}: {}", request.by, request.why)))
}

fn decide(draft: &Draft<'_>, active: &ActiveRun) -> Option<Next> {
    match &active.seen {
        JobSeen::Unknown { .. } => None,
        JobSeen::Absent => absent(draft, active),
        JobSeen::Ended { started, at, how, .. } => ended(draft, active, started.or(active.started), *at, *how),
        JobSeen::Pending { since, .. } | JobSeen::Running { since, .. } => {
            let running = matches!(active.seen, JobSeen::Running { .. });
            in_the_way(draft, active, running, *since)
        }
    }
}

/// Handles a job that the backend does not know: it was never submitted, or it is lost.
fn absent(draft: &Draft<'_>, active: &ActiveRun) -> Option<Next> {
    let at = draft.snapshot.at;
    let not_started = |why, text: &str| Some(Next::Conclude(Conclusion::NotStarted(why), text.to_owned()));
    let gone = at.since(active.absent_since.unwrap_or(at));
    let in_grace = gone < draft.snapshot.policy.limits.result_grace;
    if active.started.is_some() {
        // Its result may still be in transit.
        if in_grace {
            return None;
        }
        let why = active.cancelling.map_or(IncompleteWhy::JobLost, |cancelling| cancelling.why.incomplete());
        return Some(Next::Conclude(Conclusion::Incomplete(why), "the backend no longer knows the job".into()));
    }
    if let Some(cancelling) = active.cancelling {
        return not_started(cancelling.why.not_started(), "cancelled before it started");
    }
    if !matches!(active.run.state, RunState::Planned) {
        // A short test may have started and ended between two cycles: its result may be in transit too.
        if in_grace {
            return None;
        }
        return not_started(NotStarted::Rejected, "the backend lost the job before it started");
    }
    if at.since(active.run.planned) > draft.snapshot.policy.limits.pending {
        return not_started(NotStarted::PendingTooLong, "the job could not be submitted in time");
    }
    let open = |record: &NodeRecord| is_free_to_us(record, at) || takes_proofs(record, at);
    match active.run.nodes.iter().all(|node| draft.record(node).is_some_and(open)) {
        true => Some(Next::Resubmit),
        false => not_started(NotStarted::NodeTaken, "its node is no longer free"),
    }
}

fn ended(
    draft: &Draft<'_>,
    active: &ActiveRun,
    started: Option<Timestamp>,
    ended: Timestamp,
    how: JobEnd,
) -> Option<Next> {
    let cancelled = active.cancelling.map(|cancelling| cancelling.why);
    if started.is_none() {
        let unasked = if how == JobEnd::Displaced { NotStarted::NodeTaken } else { NotStarted::Rejected };
        let why = cancelled.map_or(unasked, CancelWhy::not_started);
        return Some(Next::Conclude(Conclusion::NotStarted(why), format!("the job ended ({how}) before it started")));
    }
    if draft.snapshot.at.since(ended) < draft.snapshot.policy.limits.result_grace {
        return None;
    }
    let why = cancelled.map_or_else(
        || match how {
            JobEnd::Exited => IncompleteWhy::NoResult,
            JobEnd::Failed | JobEnd::Killed => IncompleteWhy::Crashed,
            JobEnd::Displaced => IncompleteWhy::NodeTaken,
            JobEnd::NodeDied => IncompleteWhy::NodeDied,
            JobEnd::Lost => IncompleteWhy::JobLost,
        },
        CancelWhy::incomplete,
    );
    Some(Next::Conclude(Conclusion::Incomplete(why), format!("the job ended ({how}) without a complete result")))
}

/// Handles a pending or running job: cancels it if another user wants a node or it takes too long.
fn in_the_way(draft: &Draft<'_>, active: &ActiveRun, running: bool, since: Timestamp) -> Option<Next> {
    let at = draft.snapshot.at;
    if let Some(cancelling) = active.cancelling {
        let again = at.since(cancelling.since) >= CANCEL_AGAIN;
        return again.then(|| Next::Cancel(cancelling.why, "the job still exists after it was cancelled".into()));
    }
    for name in active.run.nodes.iter() {
        let Some(record) = draft.record(name) else {
            return Some(Next::Cancel(CancelWhy::NodeVanished, format!("{name} is no longer in the cluster")));
        };
        if let Occupancy::Busy { by } = &record.node.occupancy {
            return Some(Next::Cancel(CancelWhy::NodeTaken, format!("{name} is wanted by {by}")));
        }
        if let Some(hold) = record.hold_at(at) {
            return Some(Next::Cancel(CancelWhy::Withdrawn, format!("{name} is held by {}", hold.by)));
        }
    }
    let waited = at.since(since);
    let limits = &draft.snapshot.policy.limits;
    if !running && waited > limits.pending {
        let text = format!("pending for {}, {} is the limit", coarse(waited), limits.pending);
        return Some(Next::Cancel(CancelWhy::PendingTooLong, text));
    }
    if running && waited > active.run.limit {
        let text = format!("running for {}, {} is the limit", coarse(waited), active.run.limit);
        return Some(Next::Cancel(CancelWhy::OverTimeLimit, text));
    }
    None
}
