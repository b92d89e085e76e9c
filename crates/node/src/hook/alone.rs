//! Decides without a controller whether to drain this node and whether to end our drain. Pure; the caller acts.
//!
//! There is no central breaker here, so the hooks of all nodes apply its limits to what Slurm shows each of them:
//! reasons with our prefix or of a prolog that stopped a job, and when they were set. A hook counts before it drains.
//! If many nodes fail within a second, all of them see the same count and drain. Each therefore queries Slurm again a
//! moment later, and those that were too late by slurmctld's clock undo their drain. By then every drain of the same
//! second is visible, so all hooks compute the same order.

use std::time::Duration;

use doctor_core::{
    ids::CheckId,
    policy::BreakerLimits,
    time::{Span, Timestamp},
};

use super::nodes::{BY_HOOK, Node, PREFIX};
use crate::verdict::HeldFinding;

/// Delay before the second query. Slurm's times have a resolution of one second; after this delay no further drain can
/// get the same second as ours.
pub(super) const SECOND_LOOK: Duration = Duration::from_millis(1500);

/// After this time a drain is final: a later hook has run and found it within the limits.
const SETTLED: Span = Span::minutes(15);

/// Characters of a finding's text in a drain reason. Slurm allows more than people read.
const MOST_WORDS: usize = 160;

/// The action for this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    Leave(Leave),
    Drain(String),
    /// End our drain: the finding is gone.
    Release,
    /// Undo our drain, because other nodes were first. Happens if an earlier hook was killed before its second query.
    TakeBack(Leave),
}

/// Why the node is left as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Leave {
    #[error("nothing to do")]
    Well,
    #[error("node {0} is unknown to Slurm")]
    NotSlurms(String),
    #[error("already drained")]
    DrainedAlready,
    #[error("stays drained: {0}")]
    StaysDrained(String),
    #[error("not touched, state set by others: {state}, {reason}")]
    Foreign { state: String, reason: String },
    #[error("not drained, an operator must decide: nodes drained by Cluster Doctor: {out} of {total}, limit {most}")]
    Share { out: usize, total: usize, most: u32 },
    #[error("not drained, an operator must decide: nodes drained by Cluster Doctor in the last hour: {0}, limit {1}")]
    PerHour(usize, u32),
}

/// The input of a decision.
pub(super) struct Scene<'a> {
    pub(super) name: &'a str,
    pub(super) nodes: &'a [Node],
    /// The worst failure that takes a node out of service.
    pub(super) trouble: Option<(&'a CheckId, &'a HeldFinding)>,
    /// Whether a hook's drain for this check may end: this run has executed the check and it passed.
    pub(super) is_over: &'a dyn Fn(&CheckId) -> bool,
    pub(super) release: bool,
    pub(super) limits: &'a BreakerLimits,
    pub(super) now: Timestamp,
}

impl Scene<'_> {
    pub(super) fn decide(&self) -> Decision {
        let Some(own) = self.nodes.iter().find(|node| node.name == self.name) else {
            return Decision::Leave(Leave::NotSlurms(self.name.to_owned()));
        };
        if own.is_ours() {
            return self.of_drained(own);
        }
        let Some((check, finding)) = self.trouble else { return Decision::Leave(Leave::Well) };
        if own.is_others() {
            let reason = own.reason.as_ref().map_or("no reason", |reason| reason.text.as_str());
            return Decision::Leave(Leave::Foreign { state: own.state.clone(), reason: reason.to_owned() });
        }
        let taken: Vec<&Node> = self.nodes.iter().filter(|node| node.is_taken()).collect();
        match self.refusal(own, &taken, self.now) {
            Some(refusal) => Decision::Leave(refusal),
            None => Decision::Drain(reason(check, finding)),
        }
    }

    fn of_drained(&self, own: &Node) -> Decision {
        if let Some(why) = self.came_too_late() {
            return Decision::TakeBack(why);
        }
        if self.trouble.is_some() {
            return Decision::Leave(Leave::DrainedAlready);
        }
        let text = own.reason.as_ref().map(|reason| reason.text.clone()).unwrap_or_default();
        let for_check = check_of(&text).filter(|_| own.reason.as_ref().is_some_and(|reason| reason.is_of_a_hook()));
        match for_check {
            Some(check) if self.release && (self.is_over)(&check) => Decision::Release,
            _ => Decision::Leave(Leave::StaysDrained(text)),
        }
    }

    /// Returns why this node may not be drained in addition to `taken`. The share counts nodes of the same partitions,
    /// since a large cluster has small partitions; the hourly limit counts all nodes.
    fn refusal(&self, own: &Node, taken: &[&Node], at: Timestamp) -> Option<Leave> {
        let peer = |node: &&Node| node.name == own.name || node.shares_a_partition(own);
        let total = self.nodes.iter().filter(peer).filter(|node| node.is_there() || node.is_taken()).count();
        let out = taken.iter().copied().filter(peer).count();
        let most = self.limits.most_out(u32::try_from(total).unwrap_or(u32::MAX));
        let over = |count: usize, most: u32| u32::try_from(count).unwrap_or(u32::MAX) >= most;
        if over(out, most) {
            return Some(Leave::Share { out, total, most });
        }
        let hour_ago = at.minus(Span::hours(1));
        // A reason without a time may be from this hour.
        let lately = |node: &&&Node| node.reason.as_ref().and_then(|reason| reason.at).is_none_or(|set| set > hour_ago);
        let lately = taken.iter().filter(lately).count();
        let per_hour = self.limits.nodes_per_hour;
        over(lately, per_hour).then_some(Leave::PerHour(lately, per_hour))
    }

    /// Returns why our visible drain must be undone, if enough other nodes were drained before it.
    pub(super) fn came_too_late(&self) -> Option<Leave> {
        let own = self.nodes.iter().find(|node| node.name == self.name && node.is_ours())?;
        let reason = own.reason.as_ref().filter(|reason| reason.is_of_a_hook())?;
        if reason.at.is_none_or(|at| self.now.distance(at) > SETTLED) {
            return None;
        }
        let key = |node: &Node| (node.reason.as_ref().and_then(|reason| reason.at), node.name.clone());
        let mine = key(own);
        let before: Vec<&Node> = self.nodes.iter().filter(|node| node.is_taken() && key(node) < mine).collect();
        self.refusal(own, &before, mine.0.unwrap_or(self.now))
    }
}

/// Formats `doctor: CODE CHECK: text [hook]`.
fn reason(check: &CheckId, finding: &HeldFinding) -> String {
    let plain = |c: char| if c.is_control() || c == '"' || c == '\'' || c == '\\' { ' ' } else { c };
    let text: String = finding.text.chars().map(plain).take(MOST_WORDS).collect();
    format!("{PREFIX} {} {check}: {} {BY_HOOK}", finding.reason, text.trim())
}

/// Returns the check that a hook's reason names.
fn check_of(reason: &str) -> Option<CheckId> {
    let rest = reason.strip_prefix(PREFIX)?.trim_start();
    let (_code, rest) = rest.split_once(' ')?;
    let (check, _) = rest.split_once(':')?;
    CheckId::new(check).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        hook::nodes::tests::node,
        verdict::{Verdicts, tests::finding},
    };
    use doctor_core::finding::{Severity, Verdict};

    const NOW: i64 = 1_794_702_410;
    const LIMITS: BreakerLimits = BreakerLimits { percent_of_pool: 10.0, nodes_per_hour: 3 };

    fn sick() -> Verdicts {
        let mut kept = Verdicts::none();
        let found = [finding("gpu-xid", "xid-79", Severity::Isolate, 1)];
        kept.note(&found[0].check, Verdict::Fail, &found, "", Timestamp::from_secs(NOW));
        kept
    }

    /// The cluster: this node, the others, and idle nodes up to `total`.
    fn cluster(own: Node, others: Vec<Node>, total: usize) -> Vec<Node> {
        let idle = (others.len() + 1..total).map(|n| node(&format!("idle{n}"), "IDLE", None));
        [own].into_iter().chain(others).chain(idle).collect()
    }

    fn decide(nodes: &[Node], kept: &Verdicts, release: bool, over: bool) -> Decision {
        let failing = kept.failing();
        let scene = Scene {
            name: "n1",
            nodes,
            trouble: failing.first().copied(),
            is_over: &|check| over && check.as_str() == "gpu-xid",
            release,
            limits: &LIMITS,
            now: Timestamp::from_secs(NOW),
        };
        scene.decide()
    }

    #[test]
    fn a_sick_node_is_drained_with_our_reason_and_a_well_one_is_not_touched() {
        let nodes = cluster(node("n1", "IDLE", None), Vec::new(), 20);
        let drain = "doctor: xid-79 gpu-xid: gpu-xid is wrong [hook]";
        assert_eq!(decide(&nodes, &sick(), false, false), Decision::Drain(drain.to_owned()));
        assert_eq!(check_of(drain).unwrap().as_str(), "gpu-xid");
        assert_eq!(decide(&nodes, &Verdicts::none(), true, true), Decision::Leave(Leave::Well));
        let busy = cluster(node("n1", "ALLOCATED", None), Vec::new(), 20);
        assert!(matches!(decide(&busy, &sick(), false, false), Decision::Drain(_)), "its jobs run on");
        let left = cluster(node("n1", "IDLE", Some(("doctor: x y: z [hook]", NOW - 60))), Vec::new(), 20);
        assert!(matches!(decide(&left, &sick(), false, false), Decision::Drain(_)), "an operator ended its old drain");
        let missing = cluster(node("n2", "IDLE", None), Vec::new(), 2);
        assert!(matches!(decide(&missing, &sick(), false, false), Decision::Leave(Leave::NotSlurms(_))));
    }

    #[test]
    fn what_somebody_else_did_is_never_touched() {
        for own in [
            node("n1", "IDLE+DRAIN", Some(("Maintenance", NOW - 60))),
            node("n1", "DOWN+NOT_RESPONDING", Some(("Not responding", NOW - 60))),
            node("n1", "IDLE", Some(("watch this one", NOW - 60))),
            node("n1", "IDLE+REBOOT_REQUESTED", None),
            node("n1", "IDLE+DRAIN", Some(("my doctor: said so", NOW - 60))),
        ] {
            let nodes = cluster(own.clone(), Vec::new(), 20);
            let left = decide(&nodes, &sick(), true, true);
            assert!(matches!(left, Decision::Leave(Leave::Foreign { .. })), "{own:?}: {left:?}");
            assert_eq!(decide(&nodes, &Verdicts::none(), true, true), Decision::Leave(Leave::Well), "{own:?}");
        }
    }

    #[test]
    fn the_breakers_share_and_hourly_limit_hold() {
        let drained = |name: &str, ago: i64| node(name, "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - ago)));
        let after =
            |others: Vec<Node>, total| decide(&cluster(node("n1", "IDLE", None), others, total), &sick(), false, false);
        assert!(matches!(after(vec![], 5), Decision::Drain(_)), "one always may");
        let refused = after(vec![drained("n2", 86_400)], 19);
        assert_eq!(refused, Decision::Leave(Leave::Share { out: 1, total: 19, most: 1 }));
        assert!(matches!(after(vec![drained("n2", 86_400)], 20), Decision::Drain(_)));
        let three: Vec<Node> = ["n2", "n3", "n4"].map(|name| drained(name, 3000)).to_vec();
        assert_eq!(after(three, 100), Decision::Leave(Leave::PerHour(3, 3)));
        let old: Vec<Node> = ["n2", "n3", "n4"].map(|name| drained(name, 4000)).to_vec();
        assert!(matches!(after(old, 100), Decision::Drain(_)));
        // Drains that we did not set do not count.
        let foreign = vec![node("n2", "IDLE+DRAIN", Some(("Maintenance", NOW)))];
        assert!(matches!(after(foreign, 10), Decision::Drain(_)));
    }

    #[test]
    fn the_share_is_of_the_nodes_of_our_partitions_that_are_there() {
        let drained = |name: &str| node(name, "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - 86_400)));
        let elsewhere = |mut node: Node| {
            node.partitions = vec!["cpu".to_owned()];
            node
        };
        let after = |others: Vec<Node>| decide(&cluster(node("n1", "IDLE", None), others, 0), &sick(), false, false);
        let idle =
            |count: usize, state: &str| (0..count).map(|n| node(&format!("i{n}"), state, None)).collect::<Vec<_>>();
        let refused = Decision::Leave(Leave::Share { out: 1, total: 10, most: 1 });
        let with = |mut others: Vec<Node>, more: Vec<Node>| {
            others.extend(more);
            others
        };
        let small = with(vec![drained("n2")], idle(8, "IDLE"));
        assert_eq!(after(small.clone()), refused);
        let many = idle(500, "IDLE").into_iter().map(elsewhere).collect();
        assert_eq!(after(with(small.clone(), many)), refused, "nodes of other partitions do not count");
        for state in ["IDLE+CLOUD+POWERED_DOWN", "FUTURE"] {
            assert_eq!(after(with(small.clone(), idle(500, state))), refused, "{state}");
        }
        let other = with(vec![elsewhere(drained("n2"))], idle(8, "IDLE"));
        assert!(matches!(after(other), Decision::Drain(_)), "drains of other partitions do not count");
    }

    #[test]
    fn nodes_whose_prolog_stopped_a_job_count_as_out() {
        let stopped = vec![node("n2", "IDLE+DRAIN", Some(("Prolog error", NOW - 86_400)))];
        let nodes = cluster(node("n1", "IDLE", None), stopped, 10);
        let refused = decide(&nodes, &sick(), false, false);
        assert_eq!(refused, Decision::Leave(Leave::Share { out: 1, total: 10, most: 1 }));
    }

    #[test]
    fn of_many_that_drain_within_a_second_as_many_stay_drained_as_may_and_all_find_the_same() {
        let names: Vec<String> = (0..30).map(|n| format!("n{n:02}")).collect();
        for (second, limits, stay) in [
            (0, BreakerLimits { percent_of_pool: 10.0, nodes_per_hour: 100 }, 3),
            (1, BreakerLimits { percent_of_pool: 50.0, nodes_per_hour: 2 }, 2),
        ] {
            let drained = |n: usize, name: &String| {
                let at = NOW + i64::try_from(n).unwrap() % 2 * second;
                node(name, "IDLE+DRAIN", Some(("doctor: x y: z [hook]", at)))
            };
            let nodes: Vec<Node> = names.iter().enumerate().map(|(n, name)| drained(n, name)).collect();
            let stays = |name: &String| {
                let (trouble, is_over, now) = (None, &|_: &CheckId| false, Timestamp::from_secs(NOW));
                let scene = Scene { name, nodes: &nodes, trouble, is_over, release: false, limits: &limits, now };
                scene.came_too_late().is_none()
            };
            assert_eq!(names.iter().filter(|name| stays(name)).count(), stay);
        }
    }

    #[test]
    fn only_a_hooks_own_drain_ends_and_only_when_its_check_is_well_again() {
        let own = |reason| cluster(node("n1", "IDLE+DRAIN", Some((reason, NOW - 60))), Vec::new(), 20);
        let hooks = own("doctor: xid-79 gpu-xid: off the bus [hook]");
        // Its hook was killed before the second query, and another node had been drained earlier.
        let mut two = hooks.clone();
        two[1] = node("n0", "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - 90)));
        let late = decide(&two[..2], &sick(), false, false);
        assert_eq!(late, Decision::TakeBack(Leave::Share { out: 1, total: 2, most: 1 }));
        two[0] = node("n1", "IDLE+DRAIN", Some(("doctor: xid-79 gpu-xid: off the bus [hook]", NOW - 86_400)));
        two[1] = node("n0", "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - 90_000)));
        let old = decide(&two[..2], &sick(), false, false);
        assert_eq!(old, Decision::Leave(Leave::DrainedAlready), "changed limits do not release a failed node");
        assert_eq!(decide(&hooks, &Verdicts::none(), true, true), Decision::Release);
        for (nodes, kept, release, over) in [
            (&hooks, Verdicts::none(), false, true),
            (&hooks, Verdicts::none(), true, false),
            (&own("doctor: xid-79 off the bus [c-1]"), Verdicts::none(), true, true),
            (&own("doctor: ecc gpu-ecc: [hook]"), Verdicts::none(), true, true),
        ] {
            let left = decide(nodes, &kept, release, over);
            assert!(matches!(left, Decision::Leave(Leave::StaysDrained(_))), "{left:?}");
        }
        assert_eq!(decide(&hooks, &sick(), true, true), Decision::Leave(Leave::DrainedAlready));
    }
}
