//! The status that is published on a node.

use super::cluster::{NodeFixture, Spans, bad, cluster, free, test, unconfirmed};
use crate::{
    case::RepairStep,
    finding::{Severity, Verdict},
    lifecycle::NodeState,
    node_status::{NodeHealth, NodeStatus},
};

fn status_of(node: NodeFixture) -> NodeStatus {
    let mut cluster = cluster().tests(vec![test("dl"), test("nccl")]).node(node);
    let record = cluster.record("a").clone();
    NodeStatus::of(&cluster.snapshot, &record)
}

#[test]
fn node_health_is_pass_only_if_every_routine_test_passed_recently() {
    use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
    let of = |dl: Verdict, nccl: Verdict| free("a").result("dl", dl, 1.hours()).result("nccl", nccl, 1.hours());
    for (node, status) in [
        (free("a"), NodeHealth::Unknown),
        (free("a").result("dl", Pass, 1.hours()), NodeHealth::Unknown),
        (of(Pass, Pass), NodeHealth::Pass),
        (of(Pass, NotApplicable), NodeHealth::Pass),
        (of(NotApplicable, NotApplicable), NodeHealth::Unknown),
        (of(Pass, Inconclusive), NodeHealth::Unknown),
        (free("a").result("dl", Pass, 1.hours()).result("nccl", Pass, 8.days()), NodeHealth::Unknown),
        // A first failure gives unknown, a confirmed one gives fail.
        (of(Pass, Fail).found(unconfirmed("nccl", Severity::Isolate)), NodeHealth::Unknown),
        (of(Pass, Fail).found(bad("nccl", Severity::Monitor)), NodeHealth::Fail),
        (of(Pass, Pass).out(Severity::Reset, RepairStep::Reset), NodeHealth::Fail),
        (of(Pass, Pass).state(NodeState::Held { by: "ann".into() }), NodeHealth::Unknown),
        (of(Pass, Pass).reported(2.hours()), NodeHealth::Unknown),
    ] {
        let published = status_of(node);
        assert_eq!(published.status, status, "{published:?}");
    }
}

#[test]
fn node_status_lists_findings_and_unknown_tests_and_changes_only_with_them() {
    let node = || free("a").result("dl", Verdict::Fail, 1.hours()).found(bad("dl", Severity::Isolate));
    let first = status_of(node());
    assert_eq!((first.severity, first.findings.len(), first.passed), (Some(Severity::Isolate), 1, 0));
    assert_eq!(
        first.not_known.iter().map(|(test, status)| format!("{test} {}", status.code())).collect::<Vec<_>>(),
        ["nccl never-tested"]
    );
    let later = status_of(free("a").result("dl", Verdict::Fail, 5.minutes()).found(bad("dl", Severity::Isolate)));
    assert_eq!(first, later, "a repeated result changes nothing");
}
