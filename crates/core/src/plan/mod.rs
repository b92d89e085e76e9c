//! The planner: the only module that makes decisions.
//!
//! [`plan`] is a pure function of a [`Snapshot`]; [`Planner`] computes the same result incrementally. Neither acts: an
//! [`Action`] is a value that the executor records and then executes. Every node of the snapshot is accounted for
//! exactly once: an action names it, a run occupies it, or it is passed over for a reason.

mod breaker;
mod breaker_allowance;
mod builder;
mod candidates;
mod capacity;
mod due;
mod escalation;
mod examination;
mod findings;
mod hardware_identity;
mod holds;
mod multi_node;
mod new_case;
mod operator_commands;
mod priority;
mod repair_request;
mod repair_wait;
mod requalification;
mod required_tests;
mod running;
mod steps;
mod test_set;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

use serde::{Deserialize, Serialize};

pub use breaker_allowance::{BreakerAllowance, breaker_allowance};
pub(crate) use due::{due_at, is_run_by_agent};
pub use findings::{MIN_SILENT_AGENTS, unhealthy_mark};
pub use multi_node::MAX_TEST_NODES;
pub use repair_request::{REQUEST_LIFETIME, RepairBlock, can_repair, repair_block};
pub use repair_wait::{UnfinishedRepair, unfinished_repair};
pub(crate) use repair_wait::{WaitCause, waiting_repair};
pub(crate) use requalification::{Blocked, blocked, names};

use self::{
    builder::PlanBuilder,
    capacity::Capacity,
    priority::{Eligibility, Index},
};
use crate::{
    case::{Advice, Case, CaseOutcome, OperatorRequest, RepairStep, StepKind},
    ids::{CaseId, HardwareId, IdSource, NodeName, OpId, PoolName, RunId, TestId},
    lifecycle::NodeState,
    reason::WithReason,
    run::{CancelReason, IncompleteReason, NotStartedReason, Run},
    snapshot::{ActiveRun, Breaker, NodeRecord, Pause, PendingCommand, RecentActions, Snapshot, Trial},
    time::{Span, Timestamp},
};

/// The actions to take, and for every other node the reason why it was passed over.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    pub actions: Vec<WithReason<Action>>,
    /// Every node that no action names and no run occupies, sorted by name.
    pub skipped: Vec<(NodeName, SkipReason)>,
}

/// One action. Actions on the cluster are recorded before they are executed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// A new run.
    Submit(Run),
    /// A run that was recorded in an earlier cycle and never reached the backend.
    Resubmit {
        run: RunId,
    },
    Cancel {
        run: RunId,
        why: CancelReason,
    },
    /// A run ended without a result.
    Conclude {
        run: RunId,
        end: Conclusion,
    },
    OpenCase(Case),
    /// Raises the escalation level: what was tried did not help.
    Escalate {
        case: CaseId,
        to: RepairStep,
    },
    /// A new, worse finding in an open case; the node's open findings replace those of the case.
    RaiseSeverity {
        case: CaseId,
        node: NodeName,
    },
    /// The recommendation from the tests of an operator's quarantine.
    Advise {
        case: CaseId,
        node: NodeName,
        advice: Advice,
    },
    Step {
        case: CaseId,
        node: NodeName,
        step: StepKind,
        op: OpId,
        attempts: u32,
    },
    /// A step that the policy leaves to an operator.
    Propose {
        case: CaseId,
        node: NodeName,
        step: StepKind,
        op: OpId,
    },
    /// A repair step that an operator requested, on a case that is open by then. `op` identifies the request, not the step.
    RequestRepair {
        case: CaseId,
        node: NodeName,
        op: OpId,
        request: OperatorRequest,
    },
    /// Completes (`done`) or fails a step without executing it: it took effect by other means, or its deadline has passed.
    CompleteStep {
        case: CaseId,
        op: OpId,
        done: bool,
    },
    /// Withdraws the intent of a requested repair that was not sent to the cluster; it is prepared again.
    WithdrawStep {
        case: CaseId,
        node: NodeName,
        op: OpId,
    },
    SetState {
        node: NodeName,
        to: NodeState,
        case: Option<CaseId>,
    },
    CloseCase {
        case: CaseId,
        node: NodeName,
        how: CaseOutcome,
    },
    /// The machine of an open case has another node name now; the case moves with it.
    RebindCase {
        case: CaseId,
        node: NodeName,
    },
    OpenBreaker,
    /// A message for operators, sent once.
    Notice(Notice),
    /// An operator's request is completed.
    CompleteCommand {
        command: u64,
    },
    /// An operator's request for this node ends without having begun.
    WithdrawCommand {
        command: u64,
        node: NodeName,
    },
    /// A run for a request that stays until the run has ended.
    StartTrial {
        command: u64,
        run: RunId,
    },
    /// Trials over several nodes have attributed the fault to this node, or to the path between it and `peer`.
    AttributeFault {
        node: NodeName,
        test: TestId,
        peer: Option<NodeName>,
        /// The last of the trials.
        run: RunId,
    },
    /// Removes our maintenance mark: its run is over.
    RemoveMaintenanceMark {
        node: NodeName,
        op: OpId,
    },
    /// The machine behind this name became known for the first time.
    HardwareIdentified {
        node: NodeName,
        hardware: HardwareId,
    },
    /// Another machine is behind this name: its history starts anew, in service.
    HardwareReplaced {
        node: NodeName,
        hardware: HardwareId,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notice {
    /// So many agents are silent at the same time that the fault is Cluster Doctor's.
    AgentsSilent {
        silent: u32,
        total: u32,
    },
    AgentsBack,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Conclusion {
    /// The run had started: incomplete rows.
    Incomplete(IncompleteReason),
    /// The run had not started: no row.
    NotStarted(NotStartedReason),
}

/// Why a node was not chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "because")]
pub enum SkipReason {
    Busy {
        by: Arc<str>,
    },
    OccupancyUnknown {
        why: Arc<str>,
    },
    ForeignMark {
        by: String,
        text: String,
    },
    Held {
        by: String,
    },
    OutOfService {
        state: NodeState,
    },
    BackingOff {
        until: Timestamp,
    },
    /// No test is due before then.
    Fresh {
        until: Timestamp,
    },
    NothingApplies,
    Paused {
        by: String,
    },
    QuietWindow,
    /// Due, but other nodes come first.
    WaitingForSlot,
    PoolFull {
        pool: PoolName,
    },
    /// The due tests load a shared resource that is in use.
    ShareBusy {
        test: TestId,
    },
    BudgetSpent,
}

/// Plans from a snapshot alone.
///
/// The order is fixed: running work first (cancelled if the node is taken, if it is pending too long or over its
/// limit), then operators' requests, then state changes and remedies under the circuit breaker, then candidates under
/// budgets.
pub fn plan(snapshot: &Snapshot, ids: &mut IdSource) -> Plan {
    let mut skipped = Vec::with_capacity(snapshot.nodes.len());
    let mut due = Vec::new();
    let index = Index::build(snapshot, |record, eligibility, _| {
        let why = match eligibility {
            Eligibility::Skipped(why) => why,
            Eligibility::Due(group, _) => {
                due.push((skipped.len(), group));
                SkipReason::WaitingForSlot
            }
            Eligibility::Early { until, .. } => SkipReason::Fresh { until },
        };
        skipped.push((record.node.name.clone(), why));
    });
    let decision = decide(snapshot, &index, ids);
    for (position, group) in due {
        skipped[position].1 = decision.capacity.skip_reason(snapshot, &group);
    }
    let mut handled = decision.handled.iter().copied().peekable();
    let mut nodes = 0_u32..;
    skipped.retain(|_| nodes.next().is_some_and(|node| handled.next_if_eq(&node).is_none()));
    Plan { actions: decision.actions, skipped }
}

fn decide(snapshot: &Snapshot, index: &Index, ids: &mut IdSource) -> Decision {
    let mut builder = PlanBuilder::new(snapshot, index, ids);
    running::plan(&mut builder);
    operator_commands::plan(&mut builder);
    findings::plan(&mut builder);
    let capacity = candidates::plan(&mut builder);
    Decision { actions: builder.actions, handled: builder.touched.union(&builder.active).copied().collect(), capacity }
}

/// The result of one planning pass; the reasons of passed-over nodes are derived on demand.
#[derive(Debug, Default)]
struct Decision {
    actions: Vec<WithReason<Action>>,
    /// Nodes that an action names or a run occupies: not passed over.
    handled: BTreeSet<u32>,
    capacity: Capacity,
}

impl Decision {
    fn skip_reason(&self, snapshot: &Snapshot, index: &Index, node: u32) -> Option<SkipReason> {
        if self.handled.contains(&node) {
            return None;
        }
        Some(match &index.eligibilities[node as usize] {
            Eligibility::Skipped(why) => why.clone(),
            Eligibility::Due(group, _) => self.capacity.skip_reason(snapshot, group),
            Eligibility::Early { until, .. } => SkipReason::Fresh { until: *until },
        })
    }
}

/// An incremental planner: the cost of a plan depends on what changed and not on the size of the cluster.
///
/// Tests verify that its plans, and its reason for each node, equal those of [`plan`].
#[derive(Debug)]
pub struct Planner {
    snapshot: Snapshot,
    index: Index,
    last: Decision,
    /// Nodes whose eligibility changed since the last plan.
    dirty: BTreeSet<u32>,
}

impl Planner {
    pub fn new(snapshot: Snapshot) -> Self {
        let index = Index::build_incremental(&snapshot);
        let dirty = (0..u32::try_from(snapshot.nodes.len()).unwrap_or(u32::MAX)).collect();
        Self { snapshot, index, last: Decision::default(), dirty }
    }

    pub const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Replaces the record of one node. Returns false for an unknown node or a changed pool, which need a new planner.
    pub fn set_node(&mut self, record: NodeRecord) -> bool {
        let Some(node) = builder::find(&self.snapshot, &record.node.name) else { return false };
        let index = node as usize;
        if self.snapshot.nodes[index].node.pool != record.node.pool {
            return false;
        }
        self.snapshot.nodes[index] = record;
        self.index.refresh(&self.snapshot, node);
        self.dirty.insert(node);
        true
    }

    /// Sets when a node's agent last reported. Cheap, because it happens continuously for every node.
    pub fn set_last_report(&mut self, index: usize, last_report: Option<Timestamp>) {
        if let Some(record) = self.snapshot.nodes.get_mut(index) {
            record.last_report = last_report;
            self.index.set_last_report(index as u32, last_report);
        }
    }

    /// Changes what is not about one node: runs, cases, breaker, pauses, requests, spent budget.
    pub fn update_cluster(&mut self, change: impl FnOnce(&mut ClusterFields<'_>)) {
        let s = &mut self.snapshot;
        change(&mut ClusterFields {
            runs: &mut s.runs,
            cases: &mut s.cases,
            recent: &mut s.recent,
            spent: &mut s.spent,
            breaker: &mut s.breaker,
            pauses: &mut s.pauses,
            requests: &mut s.commands,
            trials: &mut s.trials,
            silence_reported: &mut s.silence_reported,
        });
    }

    /// Plans for this moment. `passed_over` holds only nodes whose reason changed since the last plan.
    pub fn plan(&mut self, at: Timestamp, ids: &mut IdSource) -> Plan {
        if at < self.snapshot.at {
            // The clock went back: expired timers are in the future again.
            self.snapshot.at = at;
            self.index = Index::build_incremental(&self.snapshot);
            self.dirty.extend(0..u32::try_from(self.snapshot.nodes.len()).unwrap_or(u32::MAX));
        }
        self.snapshot.at = at;
        let silent_before = at.minus(self.snapshot.policy.agents.silent_after);
        for node in self.index.due_timers(at).into_iter().chain(self.index.changed_agents(silent_before)) {
            self.index.refresh(&self.snapshot, node);
            self.dirty.insert(node);
        }
        let decision = decide(&self.snapshot, &self.index, ids);
        self.snapshot.planned_at = Some(at);
        let mut changed = std::mem::take(&mut self.dirty);
        changed.extend(decision.handled.symmetric_difference(&self.last.handled));
        if decision.capacity != self.last.capacity {
            // The reason of a node on which nothing is due does not depend on the capacity.
            for (group, ranks) in self.index.groups.iter().filter(|(group, _)| !group.is_early) {
                let [now, before] =
                    [&decision, &self.last].map(|plan| plan.capacity.skip_reason(&self.snapshot, group));
                if now != before {
                    changed.extend(ranks.iter().map(|rank| rank.node));
                }
            }
        }
        self.last = decision;
        let passed_over = changed
            .into_iter()
            .filter_map(|node| {
                let name = self.snapshot.nodes[node as usize].node.name.clone();
                Some((name, self.last.skip_reason(&self.snapshot, &self.index, node)?))
            })
            .collect();
        Plan { actions: std::mem::take(&mut self.last.actions), skipped: passed_over }
    }

    /// Returns the nodes that the breaker would allow another program to take out now, without waiting for the next
    /// plan.
    pub fn take_out_permit(&self) -> TakeOutPermit {
        let (snapshot, index) = (&self.snapshot, &self.index);
        let gate = breaker::BreakerGuard::new(snapshot, index.pools.len());
        if !(snapshot.capabilities.mark || snapshot.capabilities.drain)
            || matches!(snapshot.breaker, Breaker::Open { .. })
        {
            return TakeOutPermit::NoNode;
        }
        let pools = (0_u16..).zip(index.pools.iter().zip(&index.counts));
        let full: Vec<&PoolName> = pools
            .filter(|(pool, (name, count))| !gate.has_room(*pool, name.as_str(), count))
            .map(|(_, (name, _))| name)
            .collect();
        if full.len() == index.pools.len() {
            return TakeOutPermit::NoNode;
        }
        let of_full = |record: &&NodeRecord| !full.is_empty() && full.contains(&&record.node.pool);
        TakeOutPermit::AllExcept(snapshot.nodes.iter().filter(of_full).map(|record| record.node.name.clone()).collect())
    }

    /// Returns why this node was not chosen in the last plan; `None` if an action names it or a run occupies it.
    pub fn skip_reason(&self, name: &NodeName) -> Option<SkipReason> {
        builder::find(&self.snapshot, name).and_then(|node| self.last.skip_reason(&self.snapshot, &self.index, node))
    }
}

/// The nodes that may be taken out of service without a plan, as far as the breaker is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TakeOutPermit {
    /// The breaker is open or at its limit in every pool, or this controller takes no nodes out.
    NoNode,
    /// All nodes except those of pools at their limit.
    AllExcept(BTreeSet<NodeName>),
}

impl TakeOutPermit {
    pub fn allows(&self, node: &NodeName) -> bool {
        matches!(self, Self::AllExcept(excluded) if !excluded.contains(node))
    }
}

/// The parts of a snapshot that are not about one node.
#[derive(Debug)]
pub struct ClusterFields<'a> {
    pub runs: &'a mut Vec<ActiveRun>,
    pub cases: &'a mut Vec<Case>,
    pub recent: &'a mut RecentActions,
    pub spent: &'a mut Span,
    pub breaker: &'a mut Breaker,
    pub pauses: &'a mut Vec<Pause>,
    pub requests: &'a mut Vec<PendingCommand>,
    pub trials: &'a mut Vec<Trial>,
    pub silence_reported: &'a mut bool,
}
