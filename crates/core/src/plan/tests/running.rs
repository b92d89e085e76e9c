//! Running work: what is cancelled, what has ended, and how.

use super::{
    super::{Action, Conclusion},
    cluster::{Cluster, NOW, Spans, busy, cluster, free, job, name, pending, run, run_of, running, unknown},
};
use crate::{
    node::{MarkKind, OurMark},
    policy::Mode,
    run::{CancelReason, IncompleteReason, JobEnd, NonEmpty, NotStartedReason, ObservedJobState, RunState},
    snapshot::ActiveRun,
    time::{Span, Timestamp},
};

/// The conclusions of a plan.
fn ends(cluster: &Cluster) -> Vec<Conclusion> {
    let actions = cluster.plan().actions.into_iter();
    actions
        .filter_map(|action| if let Action::Conclude { end, .. } = action.value { Some(end) } else { None })
        .collect()
}

fn ended(started: Option<Span>, ago: Span, how: JobEnd) -> ObservedJobState {
    ObservedJobState::Ended { job: job(), started: started.map(|ago| NOW.minus(ago)), at: NOW.minus(ago), how }
}

fn on_a(seen: ObservedJobState) -> Cluster {
    cluster().node(free("a")).run(run("a", &["dl"], seen))
}

/// Submitted, and unknown to the backend for this long.
fn absent(state: RunState, started: Option<Timestamp>, since: Span) -> Cluster {
    let mut active = run("a", &["dl"], ObservedJobState::Absent);
    active.run.state = state;
    active.started = started;
    active.absent_since = Some(NOW.minus(since));
    cluster().node(free("a")).run(active)
}

fn submitted() -> RunState {
    RunState::Submitted { job: job(), at: NOW.minus(10.minutes()) }
}

#[test]
fn a_job_pending_for_more_than_five_minutes_is_cancelled() {
    assert!(on_a(pending(5.minutes())).lines().is_empty());
    assert_eq!(on_a(pending(6.minutes())).lines(), ["cancel: pending-too-long"]);
}

#[test]
fn a_job_cancelled_while_pending_leaves_no_row_and_its_node_backs_off_longer_each_time() {
    let mut cluster = on_a(pending(6.minutes()));
    assert_eq!(cluster.cycle(), ["cancel: pending-too-long"]);
    assert_eq!(ends(&cluster), [Conclusion::NotStarted(NotStartedReason::PendingTooLong)]);
    cluster.cycle();
    let record = cluster.record("a").clone();
    assert!(record.test_records[0].attempt().is_none());
    assert_eq!(record.backoff.unwrap().sightings, 1);
    assert!(cluster.chosen().is_empty());
    cluster.wait(10.minutes());
    assert_eq!(cluster.chosen(), ["a dl"]);
}

#[test]
fn a_node_wanted_by_user_work_has_its_validation_cancelled_at_once() {
    for seen in [pending(Span::from_secs(1)), running(1.minutes())] {
        let cluster = cluster().node(busy("a")).run(run("a", &["dl"], seen));
        assert_eq!(cluster.lines(), ["cancel: node-taken"]);
    }
}

#[test]
fn a_validation_cancelled_for_user_work_is_not_started_or_incomplete_by_whether_it_had_started() {
    let cancelled = |seen| on_a(seen).cancelling(CancelReason::NodeTaken, 3.minutes());
    let pending = cancelled(ended(None, 3.minutes(), JobEnd::Killed));
    assert_eq!(ends(&pending), [Conclusion::NotStarted(NotStartedReason::NodeTaken)]);
    let running = cancelled(ended(Some(5.minutes()), 3.minutes(), JobEnd::Killed));
    assert_eq!(ends(&running), [Conclusion::Incomplete(IncompleteReason::NodeTaken)]);
}

#[test]
fn a_node_of_unknown_occupancy_keeps_its_run() {
    let cluster = cluster().node(unknown("a")).run(run("a", &["dl"], running(1.minutes())));
    assert!(cluster.lines().is_empty());
}

#[test]
fn a_run_over_its_time_limit_is_cancelled_and_incomplete() {
    assert!(on_a(running(20.minutes())).lines().is_empty());
    let mut cluster = on_a(running(21.minutes()));
    assert_eq!(cluster.cycle(), ["cancel: over-time-limit"]);
    assert!(cluster.lines().is_empty(), "a partial result may still come");
    cluster.wait(2.minutes());
    assert_eq!(ends(&cluster), [Conclusion::Incomplete(IncompleteReason::OverTimeLimit)]);
}

#[test]
fn a_cancellation_without_effect_is_repeated_after_a_minute() {
    let cluster = |ago| on_a(running(21.minutes())).cancelling(CancelReason::OverTimeLimit, ago);
    assert!(cluster(Span::from_secs(59)).lines().is_empty());
    assert_eq!(cluster(1.minutes()).lines(), ["cancel: over-time-limit"]);
}

#[test]
fn a_run_on_a_node_removed_from_the_cluster_is_cancelled() {
    let cluster = cluster().node(free("b").fresh()).run(run("a", &["dl"], running(1.minutes())));
    assert_eq!(cluster.lines(), ["cancel: node-vanished"]);
}

/// A host that is removed from the host file takes its job with it: no backend can find that any more.
#[test]
fn a_run_whose_node_left_the_cluster_with_its_job_is_concluded() {
    let removed = |state: RunState, started: Option<Timestamp>, since: Span| {
        let mut active = run("a", &["dl"], ObservedJobState::Absent);
        (active.run.state, active.started, active.absent_since) = (state, started, Some(NOW.minus(since)));
        cluster().node(free("b").fresh()).run(active)
    };
    let started = Some(NOW.minus(9.minutes()));
    assert!(ends(&removed(submitted(), started, 1.minutes())).is_empty(), "its result may be in transit");
    let lost = removed(submitted(), started, 2.minutes());
    assert_eq!(ends(&lost), [Conclusion::Incomplete(IncompleteReason::NodeVanished)]);
    let unstarted = removed(submitted(), None, 2.minutes());
    assert_eq!(ends(&unstarted), [Conclusion::NotStarted(NotStartedReason::Withdrawn)]);
}

#[test]
fn a_run_on_a_node_that_an_operator_holds_is_cancelled() {
    let node = |until| free("a").held("bob", until).run_fixture();
    let lines = node(None).lines();
    assert_eq!(lines, ["cancel: withdrawn", "move a held by bob: held"]);
    assert!(node(Some(NOW)).lines().is_empty(), "that hold is over");
}

impl super::cluster::NodeFixture {
    fn run_fixture(self) -> Cluster {
        cluster().node(self.fresh()).run(run("a", &["dl"], running(1.minutes())))
    }
}

#[test]
fn a_job_that_ended_without_a_result_is_concluded_after_a_grace_period() {
    for (how, why) in [
        (JobEnd::Exited, IncompleteReason::NoResult),
        (JobEnd::Failed, IncompleteReason::Crashed),
        (JobEnd::Killed, IncompleteReason::Crashed),
        (JobEnd::Lost, IncompleteReason::JobLost),
        (JobEnd::NodeDied, IncompleteReason::NodeDied),
    ] {
        let cluster = |ago| on_a(ended(Some(30.minutes()), ago, how));
        assert!(ends(&cluster(1.minutes())).is_empty(), "{how}");
        assert_eq!(ends(&cluster(2.minutes())), [Conclusion::Incomplete(why)], "{how}");
    }
}

#[test]
fn a_job_that_ended_before_it_started_leaves_no_row() {
    for how in JobEnd::ALL.iter().filter(|how| **how != JobEnd::Preempted) {
        let cluster = on_a(ended(None, Span::ZERO, *how));
        assert_eq!(ends(&cluster), [Conclusion::NotStarted(NotStartedReason::Rejected)], "{how}");
    }
}

#[test]
fn a_job_once_observed_running_counts_as_started() {
    let mut active = run("a", &["dl"], ended(None, 3.minutes(), JobEnd::Lost));
    active.started = Some(NOW.minus(9.minutes()));
    let cluster = cluster().node(free("a")).run(active);
    assert_eq!(ends(&cluster), [Conclusion::Incomplete(IncompleteReason::JobLost)]);
}

#[test]
fn a_started_job_unknown_to_the_backend_is_lost_after_a_grace_period() {
    let started = Some(NOW.minus(9.minutes()));
    assert!(ends(&absent(submitted(), started, 1.minutes())).is_empty());
    let lost = absent(submitted(), started, 2.minutes());
    assert_eq!(ends(&lost), [Conclusion::Incomplete(IncompleteReason::JobLost)]);
    let cancelled = lost.cancelling(CancelReason::Withdrawn, 3.minutes());
    assert_eq!(ends(&cancelled), [Conclusion::Incomplete(IncompleteReason::Withdrawn)]);
}

#[test]
fn a_submitted_job_unknown_to_the_backend_may_have_run_between_two_cycles() {
    assert!(absent(submitted(), None, 1.minutes()).lines().is_empty());
    let lost = absent(submitted(), None, 2.minutes());
    assert_eq!(ends(&lost), [Conclusion::NotStarted(NotStartedReason::Rejected)]);
}

#[test]
fn a_run_that_never_reached_the_backend_is_submitted_again() {
    let cluster = absent(RunState::Planned, None, Span::ZERO);
    assert_eq!(cluster.lines(), ["resubmit: never-submitted"]);
}

#[test]
fn a_run_never_submitted_ends_when_its_node_is_no_longer_available() {
    let planned = || {
        let mut active = run("a", &["dl"], ObservedJobState::Absent);
        active.absent_since = Some(NOW);
        active
    };
    for node in [busy("a"), unknown("a"), free("a").cordoned_by("bob"), free("a").held("bob", None)] {
        let cluster = cluster().node(node.clone()).run(planned());
        assert_eq!(ends(&cluster), [Conclusion::NotStarted(NotStartedReason::NodeTaken)], "{node:?}");
    }
    let removed = cluster().node(free("b").fresh()).run(planned());
    assert_eq!(ends(&removed), [Conclusion::NotStarted(NotStartedReason::NodeTaken)]);
}

#[test]
fn a_run_not_submitted_in_time_is_concluded_as_not_started() {
    let mut active: ActiveRun = run("a", &["dl"], ObservedJobState::Absent);
    active.run.planned = NOW.minus(6.minutes());
    let cluster = cluster().node(free("a")).run(active);
    assert_eq!(ends(&cluster), [Conclusion::NotStarted(NotStartedReason::PendingTooLong)]);
}

/// A run whose job's state is unknown, planned this long ago. Its limit is 20 minutes, and 5 more for waiting.
fn unknown_for(planned: Span, started: Option<Span>) -> ActiveRun {
    let mut active = run("a", &["dl"], ObservedJobState::Unknown { why: "timeout".into() });
    active.run.planned = NOW.minus(planned);
    active.started = started.map(|ago| NOW.minus(ago));
    active
}

#[test]
fn nothing_follows_from_a_job_of_unknown_state_within_its_limits() {
    for node in [unknown("a"), free("a")] {
        let cluster = cluster().node(node).run(unknown_for(25.minutes(), Some(25.minutes())));
        assert!(cluster.lines().is_empty());
        assert_eq!(cluster.passed_over("a"), None, "its run occupies it");
    }
}

#[test]
fn a_job_of_unknown_state_leaves_a_node_that_a_user_or_an_operator_wants() {
    let both = |other| {
        let mut active = unknown_for(5.minutes(), Some(5.minutes()));
        active.run.nodes = NonEmpty::new(vec![name("a"), name("b")]).unwrap();
        cluster().node(unknown("a")).node(other).run(active)
    };
    assert_eq!(both(busy("b")).lines(), ["cancel: node-taken"]);
    assert_eq!(both(free("b").held("bob", None)).lines()[0], "cancel: withdrawn");
    let cancelled = both(busy("b")).cancelling(CancelReason::NodeTaken, 1.minutes());
    assert!(cancelled.lines().is_empty(), "{:?}", cancelled.lines());
}

#[test]
fn a_job_of_unknown_state_is_cancelled_past_its_limits_only_if_its_node_is_unknown_too() {
    for (started, code) in [(Some(25.minutes()), "cancel: over-time-limit"), (None, "cancel: pending-too-long")] {
        let active = || unknown_for(26.minutes(), started);
        let cluster = |node| cluster().node(node);
        assert_eq!(cluster(unknown("a")).run(active()).lines(), [code]);
        assert!(cluster(free("a")).run(active()).lines().is_empty(), "its result could not be looked for");
        let why = if started.is_some() { CancelReason::OverTimeLimit } else { CancelReason::PendingTooLong };
        let again = cluster(unknown("a")).run(ActiveRun { job: running(25.minutes()), ..active() });
        assert_eq!(again.cancelling(why, 1.hours()).lines(), [code], "the cancellation has not reached it");
        let waited = cluster(free("a")).run(ActiveRun { job: running(1.minutes()), ..active() });
        assert!(waited.cancelling(why, 1.hours()).lines().is_empty(), "it had waited for the cluster");
    }
}

#[test]
fn a_cancelled_run_does_not_keep_its_other_nodes_for_one_that_never_answers_again() {
    let died = [Conclusion::Incomplete(IncompleteReason::NodeDied)];
    let late = [Conclusion::NotStarted(NotStartedReason::PendingTooLong)];
    for (started, why, end) in [
        (Some(41.minutes()), CancelReason::OverTimeLimit, &died),
        (None, CancelReason::PendingTooLong, &late),
        (Some(41.minutes()), CancelReason::NodeTaken, &died),
    ] {
        let alone = |planned: Span| {
            let cluster = cluster().node(unknown("a")).node(free("b").fresh());
            cluster.run(unknown_for(planned, started)).cancelling(why, 8.hours())
        };
        assert!(alone(9.hours()).lines().is_empty(), "nothing is concluded from silence, and its node stays occupied");
        assert_eq!(alone(9.hours()).passed_over("a"), None);
        let both = |planned: Span, cancelled: Span| {
            let mut active = unknown_for(planned, started);
            active.run.nodes = NonEmpty::new(vec![name("a"), name("b")]).unwrap();
            cluster().node(unknown("a")).node(free("b").fresh()).run(active).cancelling(why, cancelled)
        };
        for (planned, cancelled) in [(40.minutes(), 39.minutes()), (41.minutes(), 14.minutes())] {
            assert!(both(planned, cancelled).lines().is_empty());
        }
        assert_eq!(ends(&both(41.minutes(), 15.minutes())), *end);
    }
}

#[test]
fn a_host_removed_after_it_hung_has_vanished_whatever_was_cancelled() {
    for why in [CancelReason::OverTimeLimit, CancelReason::PendingTooLong] {
        let gone = |started| {
            let mut active = run("a", &["dl"], ObservedJobState::Absent);
            (active.run.state, active.started) = (submitted(), started);
            active.absent_since = Some(NOW.minus(2.minutes()));
            cluster().node(free("b").fresh()).run(active).cancelling(why, 9.minutes())
        };
        let started = Some(NOW.minus(30.minutes()));
        assert_eq!(ends(&gone(started)), [Conclusion::Incomplete(IncompleteReason::NodeVanished)]);
        assert_eq!(ends(&gone(None)), [Conclusion::NotStarted(CancelReason::NodeVanished.not_started())]);
    }
}

#[test]
fn a_cancellation_for_the_time_limit_does_not_hide_that_the_node_failed() {
    for (how, why) in [(JobEnd::NodeDied, IncompleteReason::NodeDied), (JobEnd::Lost, IncompleteReason::JobLost)] {
        let cluster = |why| on_a(ended(Some(30.minutes()), 3.minutes(), how)).cancelling(why, 9.minutes());
        assert_eq!(ends(&cluster(CancelReason::OverTimeLimit)), [Conclusion::Incomplete(why)]);
        assert_eq!(ends(&cluster(CancelReason::PendingTooLong)), [Conclusion::Incomplete(why)]);
        let taken = [Conclusion::Incomplete(IncompleteReason::NodeTaken)];
        assert_eq!(ends(&cluster(CancelReason::NodeTaken)), taken, "a user wanted the node");
    }
}

#[test]
fn a_cancelled_run_ends_with_the_reason_of_its_cancellation() {
    for why in CancelReason::ALL {
        let not_started = on_a(ended(None, 3.minutes(), JobEnd::Killed)).cancelling(*why, 3.minutes());
        assert_eq!(ends(&not_started), [Conclusion::NotStarted(why.not_started())], "{why}");
        let incomplete = on_a(ended(Some(9.minutes()), 3.minutes(), JobEnd::Killed)).cancelling(*why, 3.minutes());
        assert_eq!(ends(&incomplete), [Conclusion::Incomplete(why.incomplete())], "{why}");
    }
}

#[test]
fn a_run_names_its_actions_by_its_id() {
    let plan = on_a(pending(6.minutes())).plan();
    assert_eq!(plan.actions[0].value, Action::Cancel { run: run_of("a"), why: CancelReason::PendingTooLong });
}

#[test]
fn a_job_preempted_for_a_user_is_taken_and_not_crashed() {
    let over = |started| ends(&on_a(ended(started, 3.minutes(), JobEnd::Preempted)));
    assert_eq!(over(Some(9.minutes())), [Conclusion::Incomplete(IncompleteReason::NodeTaken)]);
    assert_eq!(over(None), [Conclusion::NotStarted(NotStartedReason::NodeTaken)]);
}

#[test]
fn a_maintenance_mark_is_removed_when_its_run_ends_or_a_user_wants_the_node() {
    let mark = OurMark { kind: MarkKind::Maintenance, case: None };
    let marked = |mut cluster: Cluster| {
        cluster.record("a").node_mut().marks.ours.push(mark.clone());
        cluster
    };
    let runs = || run("a", &["dl"], running(5.minutes()));
    assert!(marked(cluster().node(free("a").fresh()).run(runs())).lines().is_empty(), "its run goes on");
    assert_eq!(marked(cluster().node(free("a").fresh())).lines(), ["tidy a: tested"], "left by any controller");
    let taken = marked(cluster().node(busy("a").fresh()).run(runs())).lines();
    assert_eq!(taken, ["cancel: node-taken", "tidy a: tested"]);
    let watching = marked(cluster().node(free("a").fresh())).policy(|policy| policy.mode = Mode::Observe);
    assert_eq!(watching.lines(), ["tidy a: tested"], "our temporary mark keeps users out");
}
