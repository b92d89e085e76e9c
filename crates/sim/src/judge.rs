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

use crate::effects::{Effect, Happened, Target};

/// Tolerances for a controller that works in cycles and does not see every change immediately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patience {
    /// A job may be submitted to a node that stopped being free this recently.
    pub view: Span,
    /// A job must leave a wanted node within this time.
    pub leave: Span,
}

impl Default for Patience {
    /// For cycles that are a minute or less apart.
    fn default() -> Self {
        Self { view: Span::minutes(1), leave: Span::minutes(2) }
    }
}

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    pub at: Timestamp,
    pub what: Broken,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "broken")]
pub enum Broken {
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
            Broken::TwoRuns { node, first, second } => write!(f, "{node} had {first} when {second} was submitted"),
            Broken::TwoJobs { run } => write!(f, "{run} was given a second job"),
            Broken::StartedOnTaken { run, node } => write!(f, "{run} began on {node}, which was not free"),
            Broken::SubmittedToTaken { run, node, taken_for } => {
                write!(f, "{run} was submitted to {node}, which had not been free for {taken_for}")
            }
            Broken::SlowToLeave { run, node, after } => {
                write!(f, "{run} was still on {node} {after} after a user wanted it")
            }
            Broken::TwoEffects { op, node } => write!(f, "{op} took effect twice on {node}"),
            Broken::DisturbedUser { op, node } => write!(f, "{op} disturbed {node} under a user"),
            Broken::DisturbedTwice { op, node } => write!(f, "{op} disturbed {node}, which was disturbed already"),
            Broken::OutOfOrder { run } => write!(f, "{run} ended or left a result without being under way"),
        }
    }
}

/// Returns every violated invariant in a record of effects; none if the record is sound.
pub fn judge_effects(effects: &[Effect], patience: Patience) -> Vec<Violation> {
    let mut judge = Judge { patience, ..Judge::default() };
    for effect in effects {
        judge.see(effect);
    }
    if let Some(last) = effects.last() {
        judge.close(last.at);
    }
    judge.violations
}

#[derive(Default)]
struct Judge {
    patience: Patience,
    violations: Vec<Violation>,
    /// Jobs that were created and have not ended.
    open: BTreeMap<RunId, Vec<NodeName>>,
    made: BTreeSet<RunId>,
    on_node: BTreeMap<NodeName, BTreeSet<RunId>>,
    wanted: BTreeMap<(RunId, NodeName), Timestamp>,
    ops: BTreeSet<OpId>,
}

impl Judge {
    fn broken(&mut self, at: Timestamp, what: Broken) {
        self.violations.push(Violation { at, what });
    }

    fn see(&mut self, Effect { at, what }: &Effect) {
        let at = *at;
        match what {
            Happened::Submitted { run, nodes, .. } => self.submitted(at, *run, nodes),
            Happened::Started { run, nodes } => {
                for target in nodes.iter().filter(|target| target.taken_for.is_some()) {
                    self.broken(at, Broken::StartedOnTaken { run: *run, node: target.node.clone() });
                }
                self.must_be_open(at, *run);
            }
            Happened::Ended { run, how, .. } => self.ended(at, *run, *how),
            Happened::Document { run, .. } => self.must_be_open(at, *run),
            Happened::Wanted { run, node } => {
                self.wanted.entry((*run, node.clone())).or_insert(at);
            }
            Happened::Marked { op, node, .. }
            | Happened::Unmarked { op, node, .. }
            | Happened::Drained { op, node }
            | Happened::Evicted { op, node }
            | Happened::Undrained { op, node } => self.operated(at, *op, node),
            Happened::Disturbed { op, node, user, under_way, .. } => {
                self.operated(at, *op, node);
                if *user {
                    self.broken(at, Broken::DisturbedUser { op: *op, node: node.clone() });
                }
                if *under_way {
                    self.broken(at, Broken::DisturbedTwice { op: *op, node: node.clone() });
                }
            }
            Happened::SubmittedAgain { .. }
            | Happened::CancelAsked { .. }
            | Happened::Report { .. }
            | Happened::WantedGot { .. }
            | Happened::Back { .. }
            | Happened::AskedAgain { .. }
            | Happened::Incident { .. }
            | Happened::ShareTrouble { .. } => {}
        }
    }

    fn submitted(&mut self, at: Timestamp, run: RunId, nodes: &[Target]) {
        if !self.made.insert(run) {
            self.broken(at, Broken::TwoJobs { run });
        }
        for Target { node, taken_for } in nodes {
            if let Some(taken_for) = taken_for.filter(|span| *span > self.patience.view) {
                self.broken(at, Broken::SubmittedToTaken { run, node: node.clone(), taken_for });
            }
            let there = self.on_node.entry(node.clone()).or_default();
            let first = there.iter().next().copied();
            there.insert(run);
            if let Some(first) = first {
                self.broken(at, Broken::TwoRuns { node: node.clone(), first, second: run });
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
        if after > self.patience.leave {
            self.broken(at, Broken::SlowToLeave { run, node, after });
        }
    }

    fn must_be_open(&mut self, at: Timestamp, run: RunId) {
        if !self.open.contains_key(&run) {
            self.broken(at, Broken::OutOfOrder { run });
        }
    }

    fn operated(&mut self, at: Timestamp, op: OpId, node: &NodeName) {
        if !self.ops.insert(op) {
            self.broken(at, Broken::TwoEffects { op, node: node.clone() });
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

    fn submitted(number: u64, taken_for: Option<Span>) -> Happened {
        Happened::Submitted { run: run(number), nodes: target(taken_for), tests: vec![] }
    }

    fn ended(number: u64) -> Happened {
        Happened::Ended { run: run(number), how: JobEnd::Exited, started: None }
    }

    fn disturbed(number: u64, user: bool, under_way: bool) -> Happened {
        let op = OpId::from_number(number);
        Happened::Disturbed { op, node: node(), how: Disturbance::Reset, user, under_way }
    }

    /// Checks effects that are a minute apart.
    fn judged(effects: Vec<Happened>) -> Vec<Broken> {
        let effects: Vec<Effect> =
            (0..).zip(effects).map(|(minute, what)| Effect { at: Timestamp::from_secs(minute * 60), what }).collect();
        judge_effects(&effects, Patience::default()).into_iter().map(|violation| violation.what).collect()
    }

    #[test]
    fn an_orderly_story_has_no_violation() {
        let story = vec![
            submitted(1, None),
            Happened::SubmittedAgain { run: run(1) },
            Happened::Started { run: run(1), nodes: target(None) },
            Happened::Wanted { run: run(1), node: node() },
            Happened::CancelAsked { run: run(1) },
            ended(1),
            submitted(2, Some(Span::from_secs(59))),
            ended(2),
            disturbed(1, false, false),
        ];
        assert_eq!(judged(story), []);
    }

    #[test]
    fn each_disorder_is_named() {
        let node = node();
        for (story, broken) in [
            (
                vec![submitted(1, None), submitted(2, None)],
                Broken::TwoRuns { node: node.clone(), first: run(1), second: run(2) },
            ),
            (vec![submitted(1, None), ended(1), submitted(1, None)], Broken::TwoJobs { run: run(1) }),
            (
                vec![submitted(1, Some(Span::hours(1)))],
                Broken::SubmittedToTaken { run: run(1), node: node.clone(), taken_for: Span::hours(1) },
            ),
            (
                vec![submitted(1, None), Happened::Started { run: run(1), nodes: target(Some(Span::ZERO)) }],
                Broken::StartedOnTaken { run: run(1), node: node.clone() },
            ),
            (
                vec![
                    submitted(1, None),
                    Happened::Wanted { run: run(1), node: node.clone() },
                    Happened::CancelAsked { run: run(1) },
                    Happened::CancelAsked { run: run(1) },
                    ended(1),
                ],
                Broken::SlowToLeave { run: run(1), node: node.clone(), after: Span::minutes(3) },
            ),
            (
                vec![disturbed(7, false, false), disturbed(7, false, false)],
                Broken::TwoEffects { op: OpId::from_number(7), node: node.clone() },
            ),
            (vec![disturbed(7, true, false)], Broken::DisturbedUser { op: OpId::from_number(7), node: node.clone() }),
            (vec![disturbed(7, false, true)], Broken::DisturbedTwice { op: OpId::from_number(7), node }),
            (vec![ended(5)], Broken::OutOfOrder { run: run(5) }),
        ] {
            assert_eq!(judged(story), [broken]);
        }
    }
}
