//! Hostile behaviour around the nodes: calls that fail or only seem to fail, jobs that end badly, interfering operators
//! and clocks. All of it is off unless a configuration or a script enables it.

use std::{collections::BTreeMap, fmt};

use doctor_core::{
    ids::{NodeName, RunId},
    node::ForeignMark,
    time::Span,
};
use serde::{Deserialize, Serialize};

use crate::fault::FaultKind;

/// Chances of hostile behaviour. All zero by default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Disruptions {
    /// Chances per call.
    pub submits: CallChances,
    pub changes: CallChances,
    pub cancels: CallChances,
    /// Chances per job.
    pub jobs: BTreeMap<JobFault, f64>,
    /// How often per day on average the whole cluster stops answering, and for how long.
    pub outages_per_day: f64,
    pub outage: Span,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallChances {
    /// The call fails without effect.
    pub refused: f64,
    /// The call takes effect, and the answer never arrives.
    pub unanswered: f64,
}

impl Disruptions {
    /// Enables everything, for endurance tests.
    pub fn typical() -> Self {
        let calls = CallChances { refused: 0.05, unanswered: 0.05 };
        let jobs = JobFault::ALL.iter().map(|fault| (*fault, 0.01)).collect();
        Self { submits: calls, changes: calls, cancels: calls, jobs, outages_per_day: 1.0, outage: Span::minutes(20) }
    }
}

/// How a call can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CallFailure {
    /// Nothing happens, and a retry may help.
    Refused,
    /// Nothing happens, and a retry will not help.
    RefusedForGood,
    /// It takes effect, and the answer never arrives.
    Unanswered,
}

/// The calls that change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Call {
    Submit,
    Cancel,
    Change,
}

/// How a validation job can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobFault {
    /// Stays pending.
    NeverStarts,
    /// The cluster loses it halfway.
    Lost,
    /// Runs until it is cancelled.
    Hung,
    /// Fails halfway.
    Crashes,
    /// Ends successfully without a result.
    NoResult,
    /// Delivers its result twice.
    Twice,
    /// Delivers half of its result.
    Truncated,
    /// Signs its result with another key.
    WronglySigned,
    /// Delivers a result that names another node.
    OtherNode,
}

impl JobFault {
    pub const ALL: &'static [Self] = &[
        Self::NeverStarts,
        Self::Lost,
        Self::Hung,
        Self::Crashes,
        Self::NoResult,
        Self::Twice,
        Self::Truncated,
        Self::WronglySigned,
        Self::OtherNode,
    ];
}

/// An event in the world at a time chosen by a script.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub enum Incident {
    /// The machine of this node breaks. Its cure is drawn as for any other fault.
    Fault { node: NodeName, kind: FaultKind },
    /// All faults of this node's machine end.
    Heal { node: NodeName },
    /// A user job takes exactly these nodes for this long. If our jobs run there, it waits for them to leave.
    UserJob { nodes: Vec<NodeName>, length: Span },
    /// The cluster reports that work of this user has failed on these nodes. Nothing else happens.
    UserWorkFails { nodes: Vec<NodeName>, owner: String },
    /// The next calls of this kind go wrong.
    Calls { call: Call, trouble: CallFailure, times: u32 },
    /// The next jobs go wrong.
    Jobs { trouble: JobFault, times: u32 },
    /// The whole cluster stops answering.
    Outage { length: Span },
    /// The cluster cannot reach this node.
    Unreachable { node: NodeName, length: Span },
    /// The node does not answer, and in a cluster whose jobs only their nodes know, nothing is known of its jobs.
    HostHangs { node: NodeName, length: Span },
    /// The node is no longer listed.
    Vanish { node: NodeName },
    /// The machine that was this node returns under a name.
    Return { node: NodeName, called: NodeName },
    /// From now on the node's clock is ahead by this much.
    NodeClock { node: NodeName, ahead_secs: i64 },
    /// The controller's clock jumps by this much.
    ControllerClock { by_secs: i64 },
    /// One agent stops reporting.
    AgentSilent { node: NodeName, length: Span },
    /// This share of all agents stops reporting.
    AgentsSilent { percent: f64, length: Span },
    /// Another party marks the node.
    ForeignMark { node: NodeName, mark: ForeignMark },
    /// That party removes its marks.
    ForeignUnmark { node: NodeName, by: String },
    /// Another party removes our marks.
    OurMarksRemoved { node: NodeName },
    /// Another party reboots the node.
    ForeignReboot { node: NodeName },
    /// The cluster loses the job of this run.
    JobLost { run: RunId },
    /// Ends the node's user job, unreachability and agent silence immediately.
    Clear { node: NodeName },
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault { node, kind } => write!(f, "{node} has {kind}"),
            Self::Heal { node } => write!(f, "{node} is healthy again"),
            Self::UserJob { nodes, length } => write!(f, "a user job wants {nodes:?} for {length}"),
            Self::UserWorkFails { nodes, owner } => write!(f, "work of {owner} fails on {nodes:?}"),
            Self::Calls { call, trouble: failure, times } => {
                write!(f, "the next {times} calls to {call:?} are {failure:?}")
            }
            Self::Jobs { trouble: fault, times } => write!(f, "the next {times} jobs: {fault:?}"),
            Self::Outage { length } => write!(f, "the cluster does not answer for {length}"),
            Self::Unreachable { node, length } => write!(f, "{node} is unreachable for {length}"),
            Self::HostHangs { node, length } => write!(f, "{node} hangs for {length}"),
            Self::Vanish { node } => write!(f, "{node} vanishes"),
            Self::Return { node, called } => write!(f, "{node} returns as {called}"),
            Self::NodeClock { node, ahead_secs } => write!(f, "the clock of {node} is {ahead_secs} s ahead"),
            Self::ControllerClock { by_secs } => write!(f, "the controller's clock jumps by {by_secs} s"),
            Self::AgentSilent { node, length } => write!(f, "the agent of {node} is silent for {length}"),
            Self::AgentsSilent { percent, length } => write!(f, "{percent} % of agents are silent for {length}"),
            Self::ForeignMark { node, mark } => write!(f, "{} marks {node}: {}", mark.by, mark.text),
            Self::ForeignUnmark { node, by } => write!(f, "{by} unmarks {node}"),
            Self::OurMarksRemoved { node } => write!(f, "an operator removes our marks from {node}"),
            Self::ForeignReboot { node } => write!(f, "an operator reboots {node}"),
            Self::JobLost { run } => write!(f, "the job of {run} is lost"),
            Self::Clear { node } => write!(f, "{node} is cleared"),
        }
    }
}
