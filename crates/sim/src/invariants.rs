//! Checks invariants against the record of effects alone: it shows what a controller did, whatever the controller
//! believed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use doctor_core::{
    ids::{NodeName, OpId, RunId},
    run::JobEnd,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::effects::{Effect, EffectKind, Target};

/// Tolerances for a controller that works in cycles and does not see every change immediately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tolerances {
    /// A job may be submitted to a node that stopped being free this recently.
    pub view: Span,
    /// A job must leave a wanted node within this time.
    pub leave: Span,
}

impl Default for Tolerances {
    /// For cycles that are a minute or less apart.
    fn default() -> Self {
        Self { view: Span::minutes(1), leave: Span::minutes(2) }
    }
}

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    pub at: Timestamp,
    pub what: Invariant,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "broken")]
pub enum Invariant {
    /// A second job was created for a node whose first had not ended.
    TwoRuns { node: NodeName, first: RunId, second: RunId },
    /// One run got two jobs.
    TwoJobs { run: RunId },
    /// A job started on a node that was not free.
    StartedOnTaken { run: RunId, node: NodeName },
    /// A job was created for a node that had not been free for longer than the tolerance.
    SubmittedToTaken { run: RunId, node: NodeName, taken_for: Span },
    /// Users waited too long for our job to leave.
    SlowToLeave { run: RunId, node: NodeName, after: Span },
    /// One operation took effect twice.
    TwoEffects { op: OpId, node: NodeName },
    /// A node was reset, rebooted or replaced while a user had it.
    DisturbedUser { op: OpId, node: NodeName },
    /// A node was disturbed again before the first disturbance was over.
    DisturbedTwice { op: OpId, node: NodeName },
    /// A job ended or delivered a result before it was created, or after its end.
    OutOfOrder { run: RunId },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.at)?;
        match &self.what {
            Invariant::TwoRuns { node, first, second } => write!(f, "{node} had {first} when {second} was submitted"),
            Invariant::TwoJobs { run } => write!(f, "{run} was given a second job"),
            Invariant::StartedOnTaken { run, node } => write!(f, "{run} began on {node}, which was not free"),
            Invariant::SubmittedToTaken { run, node, taken_for } => {
                write!(f, "{run} was submitted to {node}, which had not been free for {taken_for}")
            }
            Invariant::SlowToLeave { run, node, after } => {
                write!(f, "{run} was still on {node} {after} after a user wanted it")
            }
            Invariant::TwoEffects { op, node } => write!(f, "{op} took effect twice on {node}"),
            Invariant::DisturbedUser { op, node } => write!(f, "{op} disturbed {node} under a user"),
            Invariant::DisturbedTwice { op, node } => write!(f, "{op} disturbed {node}, which was disturbed already"),
            Invariant::OutOfOrder { run } => write!(f, "{run} ended or left a result without being under way"),
        }
    }
}

/// Returns every violated invariant in a record of effects; none if the record is sound.
pub fn check_effects(effects: &[Effect], patience: Tolerances) -> Vec<Violation> {
    let mut judge = InvariantChecker { tolerances: patience, ..InvariantChecker::default() };
    for effect in effects {
        judge.apply(effect);
    }
    if let Some(last) = effects.last() {
        judge.close(last.at);
    }
    judge.violations
}

#[derive(Default)]
struct InvariantChecker {
    tolerances: Tolerances,
    violations: Vec<Violation>,
    /// Jobs that were created and have not ended.
    open: BTreeMap<RunId, Vec<NodeName>>,
    created: BTreeSet<RunId>,
    on_node: BTreeMap<NodeName, BTreeSet<RunId>>,
    wanted: BTreeMap<(RunId, NodeName), Timestamp>,
    ops: BTreeSet<OpId>,
}

impl InvariantChecker {
    fn report_violation(&mut self, at: Timestamp, what: Invariant) {
        self.violations.push(Violation { at, what });
    }

    fn apply(&mut self, Effect { at, what }: &Effect) {
        let at = *at;
        match what {
            EffectKind::Submitted { run, nodes, .. } => self.submitted(at, *run, nodes),
            EffectKind::Started { run, nodes } => {
                for target in nodes.iter().filter(|target| target.taken_for.is_some()) {
                    self.report_violation(at, Invariant::StartedOnTaken { run: *run, node: target.node.clone() });
                }
                self.must_be_open(at, *run);
            }
            EffectKind::Ended { run, how, .. } => self.ended(at, *run, *how),
            EffectKind::Document { run, .. } => self.must_be_open(at, *run),
            EffectKind::UserWaiting { run, node } => {
                self.wanted.entry((*run, node.clone())).or_insert(at);
            }
            EffectKind::Marked { op, node, .. }
            | EffectKind::Unmarked { op, node, .. }
            | EffectKind::Drained { op, node }
            | EffectKind::Evicted { op, node }
            | EffectKind::Undrained { op, node } => self.operated(at, *op, node),
            EffectKind::Disturbed { op, node, user, in_progress: under_way, .. } => {
                self.operated(at, *op, node);
                if *user {
                    self.report_violation(at, Invariant::DisturbedUser { op: *op, node: node.clone() });
                }
                if *under_way {
                    self.report_violation(at, Invariant::DisturbedTwice { op: *op, node: node.clone() });
                }
            }
            EffectKind::SubmittedAgain { .. }
            | EffectKind::CancelRequested { .. }
            | EffectKind::Report { .. }
            | EffectKind::UserStarted { .. }
            | EffectKind::Recovered { .. }
            | EffectKind::RepeatedOperation { .. }
            | EffectKind::Incident { .. }
            | EffectKind::ShareTrouble { .. } => {}
        }
    }

    fn submitted(&mut self, at: Timestamp, run: RunId, nodes: &[Target]) {
        if !self.created.insert(run) {
            self.report_violation(at, Invariant::TwoJobs { run });
        }
        for Target { node, taken_for } in nodes {
            if let Some(taken_for) = taken_for.filter(|span| *span > self.tolerances.view) {
                self.report_violation(at, Invariant::SubmittedToTaken { run, node: node.clone(), taken_for });
            }
            let there = self.on_node.entry(node.clone()).or_default();
            let first = there.iter().next().copied();
            there.insert(run);
            if let Some(first) = first {
                self.report_violation(at, Invariant::TwoRuns { node: node.clone(), first, second: run });
            }
        }
        self.open.insert(run, nodes.iter().map(|target| target.node.clone()).collect());
    }

    fn ended(&mut self, at: Timestamp, run: RunId, _: JobEnd) {
        self.must_be_open(at, run);
        for node in self.open.remove(&run).unwrap_or_default() {
            if let Some(there) = self.on_node.get_mut(&node) {
                there.remove(&run);
            }
            if let Some(since) = self.wanted.remove(&(run, node.clone())) {
                self.left(at, run, node, at.since(since));
            }
        }
    }

    fn left(&mut self, at: Timestamp, run: RunId, node: NodeName, after: Span) {
        if after > self.tolerances.leave {
            self.report_violation(at, Invariant::SlowToLeave { run, node, after });
        }
    }

    fn must_be_open(&mut self, at: Timestamp, run: RunId) {
        if !self.open.contains_key(&run) {
            self.report_violation(at, Invariant::OutOfOrder { run });
        }
    }

    fn operated(&mut self, at: Timestamp, op: OpId, node: &NodeName) {
        if !self.ops.insert(op) {
            self.report_violation(at, Invariant::TwoEffects { op, node: node.clone() });
        }
    }

    /// Checks jobs that never left.
    fn close(&mut self, at: Timestamp) {
        for ((run, node), since) in std::mem::take(&mut self.wanted) {
            self.left(at, run, node, at.since(since));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effects::Disturbance;

    fn run(number: u64) -> RunId {
        RunId::from_number(number)
    }

    fn node() -> NodeName {
        NodeName::new("n1").unwrap()
    }

    fn target(taken_for: Option<Span>) -> Vec<Target> {
        vec![Target { node: node(), taken_for }]
    }

    fn submitted(number: u64, taken_for: Option<Span>) -> EffectKind {
        EffectKind::Submitted { run: run(number), nodes: target(taken_for), tests: vec![] }
    }

    fn ended(number: u64) -> EffectKind {
        EffectKind::Ended { run: run(number), how: JobEnd::Exited, started: None }
    }

    fn disturbed(number: u64, user: bool, under_way: bool) -> EffectKind {
        let op = OpId::from_number(number);
        EffectKind::Disturbed { op, node: node(), how: Disturbance::Reset, user, in_progress: under_way }
    }

    /// Checks effects that are a minute apart.
    fn judged(effects: Vec<EffectKind>) -> Vec<Invariant> {
        let effects: Vec<Effect> =
            (0..).zip(effects).map(|(minute, what)| Effect { at: Timestamp::from_secs(minute * 60), what }).collect();
        check_effects(&effects, Tolerances::default()).into_iter().map(|violation| violation.what).collect()
    }

    #[test]
    fn a_correct_effect_sequence_has_no_violation() {
        let story = vec![
            submitted(1, None),
            EffectKind::SubmittedAgain { run: run(1) },
            EffectKind::Started { run: run(1), nodes: target(None) },
            EffectKind::UserWaiting { run: run(1), node: node() },
            EffectKind::CancelRequested { run: run(1) },
            ended(1),
            submitted(2, Some(Span::from_secs(59))),
            ended(2),
            disturbed(1, false, false),
        ];
        assert_eq!(judged(story), []);
    }

    #[test]
    fn each_violation_is_detected() {
        let node = node();
        for (story, broken) in [
            (
                vec![submitted(1, None), submitted(2, None)],
                Invariant::TwoRuns { node: node.clone(), first: run(1), second: run(2) },
            ),
            (vec![submitted(1, None), ended(1), submitted(1, None)], Invariant::TwoJobs { run: run(1) }),
            (
                vec![submitted(1, Some(Span::hours(1)))],
                Invariant::SubmittedToTaken { run: run(1), node: node.clone(), taken_for: Span::hours(1) },
            ),
            (
                vec![submitted(1, None), EffectKind::Started { run: run(1), nodes: target(Some(Span::ZERO)) }],
                Invariant::StartedOnTaken { run: run(1), node: node.clone() },
            ),
            (
                vec![
                    submitted(1, None),
                    EffectKind::UserWaiting { run: run(1), node: node.clone() },
                    EffectKind::CancelRequested { run: run(1) },
                    EffectKind::CancelRequested { run: run(1) },
                    ended(1),
                ],
                Invariant::SlowToLeave { run: run(1), node: node.clone(), after: Span::minutes(3) },
            ),
            (
                vec![disturbed(7, false, false), disturbed(7, false, false)],
                Invariant::TwoEffects { op: OpId::from_number(7), node: node.clone() },
            ),
            (
                vec![disturbed(7, true, false)],
                Invariant::DisturbedUser { op: OpId::from_number(7), node: node.clone() },
            ),
            (vec![disturbed(7, false, true)], Invariant::DisturbedTwice { op: OpId::from_number(7), node }),
            (vec![ended(5)], Invariant::OutOfOrder { run: run(5) }),
        ] {
            assert_eq!(judged(story), [broken]);
        }
    }
}
