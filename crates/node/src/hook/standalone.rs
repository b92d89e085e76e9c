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

use super::nodes::{HOOK_SUFFIX, Node, PREFIX};
use crate::verdict_file::StoredFinding;

/// Delay before the second query. Slurm's times have a resolution of one second; after this delay no further drain can
/// get the same second as ours.
pub(super) const RECHECK_DELAY: Duration = Duration::from_millis(1500);

/// After this time a drain is final: a later hook has run and found it within the limits.
const FINAL_AFTER: Span = Span::minutes(15);

/// Characters of a finding's text in a drain reason. Slurm allows more than people read.
const MAX_REASON_CHARS: usize = 160;

/// The action for this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    Skip(HookSkipReason),
    Drain(String),
    /// End our drain: the finding is gone.
    Release,
    /// Undo our drain, because other nodes were first. Happens if an earlier hook was killed before its second query.
    Revert(HookSkipReason),
}

/// Why the node is left as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum HookSkipReason {
    #[error("nothing to do")]
    Healthy,
    #[error("node {0} is unknown to Slurm")]
    UnknownNode(String),
    #[error("already drained")]
    DrainedAlready,
    #[error("stays drained: {0}")]
    StaysDrained(String),
    #[error("not touched, state set by others: {state}, {reason}")]
    Foreign { state: String, reason: String },
    #[error("not drained, an operator must decide: nodes drained by Cluster Doctor: {out} of {total}, limit {most}")]
    DrainShare { out: usize, total: usize, most: u32 },
    #[error("not drained, an operator must decide: nodes drained by Cluster Doctor in the last hour: {0}, limit {1}")]
    DrainRate(usize, u32),
}

/// The input of a decision.
pub(super) struct DrainInput<'a> {
    pub(super) name: &'a str,
    pub(super) nodes: &'a [Node],
    /// The worst failure that takes a node out of service.
    pub(super) worst_failure: Option<(&'a CheckId, &'a StoredFinding)>,
    /// Whether a hook's drain for this check may end: this run has executed the check and it passed.
    pub(super) has_cleared: &'a dyn Fn(&CheckId) -> bool,
    pub(super) release: bool,
    pub(super) limits: &'a BreakerLimits,
    pub(super) now: Timestamp,
}

impl DrainInput<'_> {
    pub(super) fn decide(&self) -> Decision {
        let Some(own) = self.nodes.iter().find(|node| node.name == self.name) else {
            return Decision::Skip(HookSkipReason::UnknownNode(self.name.to_owned()));
        };
        if own.is_ours() {
            return self.decide_drained(own);
        }
        let Some((check, finding)) = self.worst_failure else { return Decision::Skip(HookSkipReason::Healthy) };
        if own.is_foreign() {
            let reason = own.reason.as_ref().map_or("no reason", |reason| reason.text.as_str());
            return Decision::Skip(HookSkipReason::Foreign { state: own.state.clone(), reason: reason.to_owned() });
        }
        let taken: Vec<&Node> = self.nodes.iter().filter(|node| node.is_drained_by_hook()).collect();
        match self.breaker_refusal(own, &taken, self.now) {
            Some(refusal) => Decision::Skip(refusal),
            None => Decision::Drain(reason(check, finding)),
        }
    }

    fn decide_drained(&self, own: &Node) -> Decision {
        if let Some(cause) = self.must_revert() {
            return Decision::Revert(cause);
        }
        if self.worst_failure.is_some() {
            return Decision::Skip(HookSkipReason::DrainedAlready);
        }
        let text = own.reason.as_ref().map(|reason| reason.text.clone()).unwrap_or_default();
        let for_check =
            check_in_reason(&text).filter(|_| own.reason.as_ref().is_some_and(|reason| reason.is_from_hook()));
        match for_check {
            Some(check) if self.release && (self.has_cleared)(&check) => Decision::Release,
            _ => Decision::Skip(HookSkipReason::StaysDrained(text)),
        }
    }

    /// Returns why this node may not be drained in addition to `taken`. The share counts nodes of the same partitions,
    /// since a large cluster has small partitions; the hourly limit counts all nodes.
    fn breaker_refusal(&self, own: &Node, taken: &[&Node], at: Timestamp) -> Option<HookSkipReason> {
        let peer = |node: &&Node| node.name == own.name || node.shares_a_partition(own);
        let total = self.nodes.iter().filter(peer).filter(|node| node.exists() || node.is_drained_by_hook()).count();
        let out = taken.iter().copied().filter(peer).count();
        let max_out = self.limits.max_out(u32::try_from(total).unwrap_or(u32::MAX));
        let over = |count: usize, limit: u32| u32::try_from(count).unwrap_or(u32::MAX) >= limit;
        if over(out, max_out) {
            return Some(HookSkipReason::DrainShare { out, total, most: max_out });
        }
        let hour_ago = at.minus(Span::hours(1));
        // A reason without a time may be from this hour.
        let is_recent =
            |node: &&&Node| node.reason.as_ref().and_then(|reason| reason.at).is_none_or(|set| set > hour_ago);
        let recent = taken.iter().filter(is_recent).count();
        let per_hour = self.limits.nodes_per_hour;
        over(recent, per_hour).then_some(HookSkipReason::DrainRate(recent, per_hour))
    }

    /// Returns why our visible drain must be undone, if enough other nodes were drained before it.
    pub(super) fn must_revert(&self) -> Option<HookSkipReason> {
        let own = self.nodes.iter().find(|node| node.name == self.name && node.is_ours())?;
        let reason = own.reason.as_ref().filter(|reason| reason.is_from_hook())?;
        if reason.at.is_none_or(|at| self.now.distance(at) > FINAL_AFTER) {
            return None;
        }
        let key = |node: &Node| (node.reason.as_ref().and_then(|reason| reason.at), node.name.clone());
        let own_key = key(own);
        let before: Vec<&Node> =
            self.nodes.iter().filter(|node| node.is_drained_by_hook() && key(node) < own_key).collect();
        self.breaker_refusal(own, &before, own_key.0.unwrap_or(self.now))
    }
}

/// Formats `doctor: CODE CHECK: text [hook]`.
fn reason(check: &CheckId, finding: &StoredFinding) -> String {
    let plain = |c: char| if c.is_control() || c == '"' || c == '\'' || c == '\\' { ' ' } else { c };
    let text: String = finding.text.chars().map(plain).take(MAX_REASON_CHARS).collect();
    format!("{PREFIX} {} {check}: {} {HOOK_SUFFIX}", finding.reason, text.trim())
}

/// Returns the check that a hook's reason names.
fn check_in_reason(reason: &str) -> Option<CheckId> {
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
        verdict_file::{Verdicts, tests::finding},
    };
    use doctor_core::finding::{Severity, Verdict};

    const NOW: i64 = 1_794_702_410;
    const LIMITS: BreakerLimits = BreakerLimits { percent_of_pool: 10.0, nodes_per_hour: 3 };

    fn failing_verdicts() -> Verdicts {
        let mut verdicts = Verdicts::none();
        let findings = [finding("gpu-xid", "xid-79", Severity::Isolate, 1)];
        verdicts.record(&findings[0].check, Verdict::Fail, &findings, "", Timestamp::from_secs(NOW));
        verdicts
    }

    /// The cluster: this node, the others, and idle nodes up to `total`.
    fn cluster(own: Node, others: Vec<Node>, total: usize) -> Vec<Node> {
        let idle = (others.len() + 1..total).map(|n| node(&format!("idle{n}"), "IDLE", None));
        [own].into_iter().chain(others).chain(idle).collect()
    }

    fn decide(nodes: &[Node], verdicts: &Verdicts, release: bool, over: bool) -> Decision {
        let failing = verdicts.failing();
        let input = DrainInput {
            name: "n1",
            nodes,
            worst_failure: failing.first().copied(),
            has_cleared: &|check| over && check.as_str() == "gpu-xid",
            release,
            limits: &LIMITS,
            now: Timestamp::from_secs(NOW),
        };
        input.decide()
    }

    #[test]
    fn a_failing_node_is_drained_with_our_reason_and_a_healthy_one_is_not_touched() {
        let nodes = cluster(node("n1", "IDLE", None), Vec::new(), 20);
        let drain = "doctor: xid-79 gpu-xid: gpu-xid is wrong [hook]";
        assert_eq!(decide(&nodes, &failing_verdicts(), false, false), Decision::Drain(drain.to_owned()));
        assert_eq!(check_in_reason(drain).unwrap().as_str(), "gpu-xid");
        assert_eq!(decide(&nodes, &Verdicts::none(), true, true), Decision::Skip(HookSkipReason::Healthy));
        let busy = cluster(node("n1", "ALLOCATED", None), Vec::new(), 20);
        assert!(matches!(decide(&busy, &failing_verdicts(), false, false), Decision::Drain(_)), "its jobs run on");
        let resumed = cluster(node("n1", "IDLE", Some(("doctor: x y: z [hook]", NOW - 60))), Vec::new(), 20);
        assert!(
            matches!(decide(&resumed, &failing_verdicts(), false, false), Decision::Drain(_)),
            "an operator ended its old drain"
        );
        let missing = cluster(node("n2", "IDLE", None), Vec::new(), 2);
        assert!(matches!(
            decide(&missing, &failing_verdicts(), false, false),
            Decision::Skip(HookSkipReason::UnknownNode(_))
        ));
    }

    #[test]
    fn a_state_set_by_others_is_never_touched() {
        for own in [
            node("n1", "IDLE+DRAIN", Some(("Maintenance", NOW - 60))),
            node("n1", "DOWN+NOT_RESPONDING", Some(("Not responding", NOW - 60))),
            node("n1", "IDLE", Some(("watch this one", NOW - 60))),
            node("n1", "IDLE+REBOOT_REQUESTED", None),
            node("n1", "IDLE+DRAIN", Some(("my doctor: said so", NOW - 60))),
        ] {
            let nodes = cluster(own.clone(), Vec::new(), 20);
            let decision = decide(&nodes, &failing_verdicts(), true, true);
            assert!(matches!(decision, Decision::Skip(HookSkipReason::Foreign { .. })), "{own:?}: {decision:?}");
            assert_eq!(
                decide(&nodes, &Verdicts::none(), true, true),
                Decision::Skip(HookSkipReason::Healthy),
                "{own:?}"
            );
        }
    }

    #[test]
    fn the_breakers_share_and_hourly_limit_apply() {
        let drained = |name: &str, ago: i64| node(name, "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - ago)));
        let after = |others: Vec<Node>, total| {
            decide(&cluster(node("n1", "IDLE", None), others, total), &failing_verdicts(), false, false)
        };
        assert!(matches!(after(vec![], 5), Decision::Drain(_)), "one always may");
        let decision = after(vec![drained("n2", 86_400)], 19);
        assert_eq!(decision, Decision::Skip(HookSkipReason::DrainShare { out: 1, total: 19, most: 1 }));
        assert!(matches!(after(vec![drained("n2", 86_400)], 20), Decision::Drain(_)));
        let three: Vec<Node> = ["n2", "n3", "n4"].map(|name| drained(name, 3000)).to_vec();
        assert_eq!(after(three, 100), Decision::Skip(HookSkipReason::DrainRate(3, 3)));
        let old: Vec<Node> = ["n2", "n3", "n4"].map(|name| drained(name, 4000)).to_vec();
        assert!(matches!(after(old, 100), Decision::Drain(_)));
        // Drains that we did not set do not count.
        let foreign = vec![node("n2", "IDLE+DRAIN", Some(("Maintenance", NOW)))];
        assert!(matches!(after(foreign, 10), Decision::Drain(_)));
    }

    #[test]
    fn the_share_counts_existing_nodes_of_our_partitions() {
        let drained = |name: &str| node(name, "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - 86_400)));
        let elsewhere = |mut node: Node| {
            node.partitions = vec!["cpu".to_owned()];
            node
        };
        let after = |others: Vec<Node>| {
            decide(&cluster(node("n1", "IDLE", None), others, 0), &failing_verdicts(), false, false)
        };
        let idle =
            |count: usize, state: &str| (0..count).map(|n| node(&format!("i{n}"), state, None)).collect::<Vec<_>>();
        let decision = Decision::Skip(HookSkipReason::DrainShare { out: 1, total: 10, most: 1 });
        let with = |mut others: Vec<Node>, more: Vec<Node>| {
            others.extend(more);
            others
        };
        let small = with(vec![drained("n2")], idle(8, "IDLE"));
        assert_eq!(after(small.clone()), decision);
        let many = idle(500, "IDLE").into_iter().map(elsewhere).collect();
        assert_eq!(after(with(small.clone(), many)), decision, "nodes of other partitions do not count");
        for state in ["IDLE+CLOUD+POWERED_DOWN", "FUTURE"] {
            assert_eq!(after(with(small.clone(), idle(500, state))), decision, "{state}");
        }
        let other = with(vec![elsewhere(drained("n2"))], idle(8, "IDLE"));
        assert!(matches!(after(other), Decision::Drain(_)), "drains of other partitions do not count");
    }

    #[test]
    fn nodes_whose_prolog_blocked_a_job_count_as_out() {
        let stopped = vec![node("n2", "IDLE+DRAIN", Some(("Prolog error", NOW - 86_400)))];
        let nodes = cluster(node("n1", "IDLE", None), stopped, 10);
        let decision = decide(&nodes, &failing_verdicts(), false, false);
        assert_eq!(decision, Decision::Skip(HookSkipReason::DrainShare { out: 1, total: 10, most: 1 }));
    }

    #[test]
    fn of_many_concurrent_drains_only_the_allowed_number_stays_and_all_nodes_agree() {
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
                let (failure, is_over, now) = (None, &|_: &CheckId| false, Timestamp::from_secs(NOW));
                let input = DrainInput {
                    name,
                    nodes: &nodes,
                    worst_failure: failure,
                    has_cleared: is_over,
                    release: false,
                    limits: &limits,
                    now,
                };
                input.must_revert().is_none()
            };
            assert_eq!(names.iter().filter(|name| stays(name)).count(), stay);
        }
    }

    #[test]
    fn only_a_hooks_own_drain_ends_and_only_when_its_check_passes_again() {
        let own = |reason| cluster(node("n1", "IDLE+DRAIN", Some((reason, NOW - 60))), Vec::new(), 20);
        let hooks = own("doctor: xid-79 gpu-xid: off the bus [hook]");
        // Its hook was killed before the second query, and another node had been drained earlier.
        let mut two = hooks.clone();
        two[1] = node("n0", "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - 90)));
        let late = decide(&two[..2], &failing_verdicts(), false, false);
        assert_eq!(late, Decision::Revert(HookSkipReason::DrainShare { out: 1, total: 2, most: 1 }));
        two[0] = node("n1", "IDLE+DRAIN", Some(("doctor: xid-79 gpu-xid: off the bus [hook]", NOW - 86_400)));
        two[1] = node("n0", "IDLE+DRAIN", Some(("doctor: x y: z [hook]", NOW - 90_000)));
        let old = decide(&two[..2], &failing_verdicts(), false, false);
        assert_eq!(old, Decision::Skip(HookSkipReason::DrainedAlready), "changed limits do not release a failed node");
        assert_eq!(decide(&hooks, &Verdicts::none(), true, true), Decision::Release);
        for (nodes, verdicts, release, over) in [
            (&hooks, Verdicts::none(), false, true),
            (&hooks, Verdicts::none(), true, false),
            (&own("doctor: xid-79 off the bus [c-1]"), Verdicts::none(), true, true),
            (&own("doctor: ecc gpu-ecc: [hook]"), Verdicts::none(), true, true),
        ] {
            let decision = decide(nodes, &verdicts, release, over);
            assert!(matches!(decision, Decision::Skip(HookSkipReason::StaysDrained(_))), "{decision:?}");
        }
        assert_eq!(decide(&hooks, &failing_verdicts(), true, true), Decision::Skip(HookSkipReason::DrainedAlready));
    }
}
