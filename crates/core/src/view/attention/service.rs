//! The service itself: its leader, the age of its observation, its breaker, limits and pauses.

use super::{AttentionItem, AttentionKind, StatusParts, Urgency, grouping::folded};
use crate::{
    ids::NodeName,
    snapshot::{Breaker, Pause},
    time::{Span, Timestamp},
    view::{
        Facts, format_time,
        formatting::short_duration,
        plural,
        service_state::{LeaderView, StoredStatus},
    },
};

/// A controller that a timer starts leads only for a moment, and one that is updated is back within minutes. A longer time
/// without one is a problem, and after the limit none comes.
const TIMER_PAUSE: Span = Span::minutes(15);
const TIMER_LIMIT: Span = Span::hours(1);
/// An older observation is critical: cycles are seconds apart, and an outage of the cluster's API ends within minutes.
const OBSERVATION_LIMIT: Span = Span::minutes(15);
/// Rejected documents are shown for this long.
const REJECTION_SHOWN: Span = Span::days(1);

pub(super) fn items(facts: &Facts, stored: &StoredStatus, parts: &StatusParts<'_>) -> Vec<AttentionItem> {
    let mut items = Vec::new();
    items.extend(no_controller(facts, stored, parts.leader));
    let observation = observation(facts, stored, parts.leader);
    if observation.is_none() {
        items.extend(cycle_problem(stored));
    }
    items.extend(observation);
    items.extend(breaker(facts));
    items.extend(many_nodes_out(facts));
    items.extend(facts.snapshot.pauses.iter().map(paused));
    items.extend(parts.capacity.shortfalls.iter().map(|text| {
        AttentionItem::new(AttentionKind::LimitTooSmall, Urgency::Warning, text.clone()).next("doctor config check")
    }));
    items.extend(rejected(facts, stored));
    items.extend((stored.alerts_lost > 0).then(|| {
        let text = format!("messages about alerts not delivered within the last day: {}", stored.alerts_lost);
        AttentionItem::new(AttentionKind::AlertsLost, Urgency::Warning, text).next("doctor alert list")
    }));
    items
}

fn no_controller(facts: &Facts, stored: &StoredStatus, leader: &LeaderView) -> Option<AttentionItem> {
    let item = |urgency, text: String| {
        Some(AttentionItem::new(AttentionKind::NoController, urgency, text).next("doctor serve"))
    };
    match leader {
        LeaderView::Leads { .. } => None,
        LeaderView::Lost { by, since } => {
            let ago = short_duration(facts.now.since(*since));
            let text = format!("no controller leads: the lease of {by} expired {ago} ago");
            item(Urgency::Critical, text).map(|item| item.since(*since))
        }
        LeaderView::NoLeader => {
            let last = facts.cycle_at.max(stored.last_cycle.as_ref().map(|cycle| cycle.at));
            let Some(last) = last else {
                return item(Urgency::Critical, "no controller leads, and none has run a cycle yet".to_owned());
            };
            let ago = facts.now.since(last);
            let urgency = match ago {
                _ if ago > TIMER_LIMIT => Urgency::Critical,
                _ if ago > TIMER_PAUSE => Urgency::Warning,
                _ => Urgency::Notice,
            };
            let text =
                format!("no controller leads: the last one stopped after its cycle of {} ago", short_duration(ago));
            item(urgency, text).map(|item| item.since(last))
        }
    }
}

/// Reports a cluster that does not answer its leader, or has not answered for long when a controller that a timer starts ran last. A
/// leader that was lost is reported by itself.
fn observation(facts: &Facts, stored: &StoredStatus, leader: &LeaderView) -> Option<AttentionItem> {
    let failed_for = |cycle: Timestamp| facts.observed_at.is_some_and(|seen| cycle.since(seen) > OBSERVATION_LIMIT);
    match leader {
        LeaderView::Leads { .. } => {}
        LeaderView::NoLeader if stored.last_cycle.as_ref().is_some_and(|cycle| failed_for(cycle.at)) => {}
        LeaderView::NoLeader | LeaderView::Lost { .. } => return None,
    }
    let problem = stored.last_cycle.as_ref().and_then(|cycle| cycle.problem.as_ref());
    let problem = problem.map_or_else(String::new, |problem| format!("; the last cycle: {problem}"));
    let item = |urgency, text: String| {
        let item = AttentionItem::new(AttentionKind::ObservationOld, urgency, text);
        Some(item.since(facts.observed_at).next("doctor config check --live"))
    };
    let Some(observed_at) = facts.observed_at else {
        return item(Urgency::Critical, format!("the cluster was never observed{problem}"));
    };
    let age = facts.now.since(observed_at);
    let is_failing = facts.cycle_at.is_some_and(|cycle| cycle > observed_at);
    let (ago, time) = (short_duration(age), format_time(observed_at));
    let text = format!("the cluster was last observed {ago} ago ({time} UTC){problem}");
    match (age > OBSERVATION_LIMIT, is_failing) {
        (true, _) => item(Urgency::Critical, text),
        (false, true) => item(Urgency::Warning, text),
        (false, false) => None,
    }
}

fn cycle_problem(stored: &StoredStatus) -> Option<AttentionItem> {
    let cycle = stored.last_cycle.as_ref()?;
    let text = format!("problem in the last cycle: {}", cycle.problem.as_ref()?);
    let item = AttentionItem::new(AttentionKind::CycleProblem, Urgency::Warning, text);
    Some(item.since(cycle.at).next("doctor config check --live"))
}

fn breaker(facts: &Facts) -> Option<AttentionItem> {
    let Breaker::Open { since, why } = &facts.snapshot.breaker else { return None };
    let text = format!("the breaker is open: {why}; check the cause before you close it");
    let nodes = facts.snapshot.recent.taken_out.iter().map(|(node, _)| node.clone()).collect();
    let item = AttentionItem::new(AttentionKind::BreakerOpen, Urgency::Critical, text).about(nodes);
    Some(item.since(*since).next("doctor breaker close --why …"))
}

/// Reports a fleet of which more is out of service than the controller may take out. An operator's commands do not count
/// against the breaker, so nothing else would report them.
fn many_nodes_out(facts: &Facts) -> Option<AttentionItem> {
    let all = &facts.snapshot.nodes;
    let out = || all.iter().filter(|record| record.state.is_out_of_service());
    let (count, total) = (out().count(), all.len());
    let limits = &facts.snapshot.policy.breaker;
    let as_float = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    let is_many = as_float(count) > f64::from(limits.nodes_per_hour)
        && as_float(count) * 100.0 > limits.percent_of_pool * as_float(total);
    if !(is_many || (count == total && total > 1)) {
        return None;
    }
    let nodes: Vec<NodeName> = out().map(|record| record.name()).collect();
    let since = out().map(|record| record.since).min();
    let list = folded(&nodes).map_or_else(String::new, |list| format!(": {list}"));
    let text = format!("{count} of {} are out of service{list}", plural(total, "node"));
    let item = AttentionItem::new(AttentionKind::ManyNodesOut, Urgency::Critical, text).about(nodes);
    Some(item.since(since).next("doctor cases"))
}

/// A pause without an end is a warning: it lasts until an operator remembers it.
fn paused(pause: &Pause) -> AttentionItem {
    let scope = pause.pool.as_ref().map_or_else(|| "everywhere".to_owned(), |pool| format!("in pool {pool}"));
    let (until, urgency) = match pause.until {
        Some(until) => (format!("until {} UTC", format_time(until)), Urgency::Notice),
        None => ("until resumed".to_owned(), Urgency::Warning),
    };
    let text = format!("paused {scope} by {} {until}: {}", pause.by, pause.why);
    let pool = pause.pool.as_ref().map_or_else(String::new, |pool| format!(" --pool {pool}"));
    let item = AttentionItem::new(AttentionKind::Paused, urgency, text);
    item.since(pause.since).next(format!("doctor resume{pool} --why …"))
}

fn rejected(facts: &Facts, stored: &StoredStatus) -> Option<AttentionItem> {
    let at = stored.rejected_at.filter(|at| facts.now.since(*at) <= REJECTION_SHOWN)?;
    let ago = short_duration(facts.now.since(at));
    let count = stored.rejected;
    let text = format!(
        "results or reports rejected so far: {count}, the last {ago} ago; see rejected/ in the shared directory"
    );
    let item = AttentionItem::new(AttentionKind::ResultsRejected, Urgency::Warning, text);
    Some(item.since(at).next("doctor audit"))
}
