//! What goes wrong around the nodes: calls that fail or only seem to, jobs that end badly, people and clocks that
//! interfere. Everything here is off unless a configuration or a script turns it on.

use std::{collections::BTreeMap, fmt};

use doctor_core::{
    ids::{NodeName, RunId},
    node::ForeignMark,
    time::Span,
};
use serde::{Deserialize, Serialize};

use crate::fault::FaultKind;

/// Chances of trouble. All zero by default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hostile {
    /// Chances, per call.
    pub submits: CallChances,
    pub changes: CallChances,
    pub cancels: CallChances,
    /// Chances, per job.
    pub jobs: BTreeMap<JobTrouble, f64>,
    /// Times a day, on average, that the whole cluster stops answering, and for how long.
    pub outages_per_day: f64,
    pub outage: Span,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallChances {
    /// Fails without effect.
    pub refused: f64,
    /// Takes effect, and the answer never arrives.
    pub unanswered: f64,
}

impl Hostile {
    /// A bad week everywhere at once, for tests of endurance.
    pub fn rough() -> Self {
        let calls = CallChances { refused: 0.05, unanswered: 0.05 };
        let jobs = JobTrouble::ALL.iter().map(|trouble| (*trouble, 0.01)).collect();
        Self { submits: calls, changes: calls, cancels: calls, jobs, outages_per_day: 1.0, outage: Span::minutes(20) }
    }
}

/// How a call can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CallTrouble {
    /// Nothing happens, and trying again may help.
    Refused,
    /// Nothing happens, and trying again will not help.
    RefusedForGood,
    /// It happens, and the answer never arrives.
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
pub enum JobTrouble {
    /// Stays pending.
    NeverStarts,
    /// The cluster forgets it halfway.
    Lost,
    /// Runs until it is cancelled.
    Hung,
    /// Fails halfway.
    Crashes,
    /// Ends well and leaves no result.
    NoResult,
    /// Leaves its result twice.
    Twice,
    /// Leaves half of its result.
    Truncated,
    /// Signs its result with another key.
    WronglySigned,
    /// Leaves a result that names another node.
    OtherNode,
}

impl JobTrouble {
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

/// Something that happens to the world at a moment of a script's choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub enum Incident {
    /// The machine of this node breaks. What would cure it is drawn as for any other fault.
    Fault { node: NodeName, kind: FaultKind },
    /// All is well with the machine of this node again.
    Heal { node: NodeName },
    /// A user's job takes exactly these nodes, for so long. Where our jobs run, it waits for them to leave.
    UserJob { nodes: Vec<NodeName>, length: Span },
    /// The cluster tells that work of this user has failed on these nodes. Nothing else happens.
    UserWorkFails { nodes: Vec<NodeName>, owner: String },
    /// The next calls of this kind go wrong.
    Calls { call: Call, trouble: CallTrouble, times: u32 },
    /// The next jobs go wrong.
    Jobs { trouble: JobTrouble, times: u32 },
    /// The whole cluster stops answering.
    Outage { length: Span },
    /// The cluster does not know what is on this node.
    Unreachable { node: NodeName, length: Span },
    /// The node is in no list any more.
    Vanish { node: NodeName },
    /// The machine that was this node comes back under a name.
    Return { node: NodeName, called: NodeName },
    /// The node's clock is this far ahead of everybody else's from now on.
    NodeClock { node: NodeName, ahead_secs: i64 },
    /// The controller's clock jumps by so much.
    ControllerClock { by_secs: i64 },
    /// One agent says nothing.
    AgentSilent { node: NodeName, length: Span },
    /// This share of all agents says nothing.
    AgentsSilent { percent: f64, length: Span },
    /// Somebody else marks the node.
    ForeignMark { node: NodeName, mark: ForeignMark },
    /// Somebody else takes their marks away.
    ForeignUnmark { node: NodeName, by: String },
    /// Somebody else takes our marks away.
    OurMarksRemoved { node: NodeName },
    /// Somebody else reboots the node.
    ForeignReboot { node: NodeName },
    /// The cluster loses sight of the job of this run.
    JobLost { run: RunId },
    /// Users, distance and silence leave the node at once.
    Clear { node: NodeName },
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault { node, kind } => write!(f, "{node} has {kind}"),
            Self::Heal { node } => write!(f, "{node} is well again"),
            Self::UserJob { nodes, length } => write!(f, "a user job wants {nodes:?} for {length}"),
            Self::UserWorkFails { nodes, owner } => write!(f, "work of {owner} fails on {nodes:?}"),
            Self::Calls { call, trouble, times } => write!(f, "the next {times} calls to {call:?} are {trouble:?}"),
            Self::Jobs { trouble, times } => write!(f, "the next {times} jobs: {trouble:?}"),
            Self::Outage { length } => write!(f, "the cluster does not answer for {length}"),
            Self::Unreachable { node, length } => write!(f, "{node} is out of reach for {length}"),
            Self::Vanish { node } => write!(f, "{node} vanishes"),
            Self::Return { node, called } => write!(f, "what was {node} returns as {called}"),
            Self::NodeClock { node, ahead_secs } => write!(f, "the clock of {node} is {ahead_secs} s ahead"),
            Self::ControllerClock { by_secs } => write!(f, "the controller's clock jumps by {by_secs} s"),
            Self::AgentSilent { node, length } => write!(f, "the agent of {node} is silent for {length}"),
            Self::AgentsSilent { percent, length } => write!(f, "{percent} % of agents are silent for {length}"),
            Self::ForeignMark { node, mark } => write!(f, "{} marks {node}: {}", mark.by, mark.text),
            Self::ForeignUnmark { node, by } => write!(f, "{by} unmarks {node}"),
            Self::OurMarksRemoved { node } => write!(f, "somebody removes our marks from {node}"),
            Self::ForeignReboot { node } => write!(f, "somebody reboots {node}"),
            Self::JobLost { run } => write!(f, "the job of {run} is lost"),
            Self::Clear { node } => write!(f, "{node} is cleared"),
        }
    }
}
