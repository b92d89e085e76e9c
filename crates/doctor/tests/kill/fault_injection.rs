//! Reproducible random numbers, and the random incidents in the cluster while controllers are killed.

use std::collections::{BTreeSet, VecDeque};

use doctor_core::{
    ids::NodeName,
    node::ForeignMark,
    snapshot::CommandKind,
    time::{Span, Timestamp},
};
use doctor_sim::{Incident, RemoteSim};
use doctor_store::Store;

/// `SplitMix64`: every number follows from the seed.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns true once in `times` calls on average.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Incidents in the cluster that the controller does not cause. Those that take a node away are undone after a while:
/// without nodes there would be nothing to kill.
#[derive(Default)]
pub(crate) struct FaultInjector {
    nodes: Vec<NodeName>,
    /// Nodes that are not listed now.
    vanished: VecDeque<NodeName>,
    /// Nodes with a foreign mark.
    marked: VecDeque<NodeName>,
    /// Nodes whose marks of ours were removed, whether or not they had any.
    unmarked: VecDeque<NodeName>,
    /// Nodes that were not listed for a while.
    pub(crate) were_absent: BTreeSet<NodeName>,
    pub(crate) injected: u32,
}

const OPERATOR: &str = "another operator";
/// The number of nodes taken away in each way at a time.
const MAX_REMOVED: usize = 2;

impl FaultInjector {
    pub(crate) fn new(nodes: Vec<NodeName>) -> Self {
        Self { nodes, ..Self::default() }
    }

    /// Makes an incident happen to a random node.
    pub(crate) fn inject_random(&mut self, chance: &mut Rng, cluster: &RemoteSim) {
        let node = self.nodes[usize::try_from(chance.below(self.nodes.len() as u64)).unwrap()].clone();
        let a_while = Span::minutes(5 + i64::try_from(chance.below(60)).unwrap());
        let incident = match chance.below(7) {
            0 => Incident::UserJob { nodes: vec![node], length: a_while },
            1 => Incident::ForeignReboot { node },
            2 => Incident::AgentSilent { node, length: a_while },
            3 => Incident::Unreachable { node, length: a_while },
            4 => {
                self.unmarked.push_back(node.clone());
                Incident::OurMarksRemoved { node }
            }
            5 => self.mark_or_unmark(node),
            _ => self.vanish_or_return(chance, node),
        };
        self.inject(cluster, &incident);
    }

    fn mark_or_unmark(&mut self, node: NodeName) -> Incident {
        let by = OPERATOR.to_owned();
        match oldest(&mut self.marked) {
            Some(node) => Incident::ForeignUnmark { node, by },
            None => {
                self.marked.push_back(node.clone());
                Incident::ForeignMark { node, mark: ForeignMark { by, text: "hands off".to_owned(), blocks: true } }
            }
        }
    }

    /// Removes a node, or brings one back, half of the time under another name.
    fn vanish_or_return(&mut self, chance: &mut Rng, node: NodeName) -> Incident {
        let Some(node) = oldest(&mut self.vanished) else {
            self.vanished.push_back(node.clone());
            self.were_absent.insert(node.clone());
            return Incident::Vanish { node };
        };
        let called = match node.as_str().strip_suffix("-again") {
            _ if chance.once_in(2) => node.clone(),
            Some(before) => NodeName::new(before).unwrap(),
            None => NodeName::new(&format!("{node}-again")).unwrap(),
        };
        self.nodes.retain(|known| *known != node);
        self.nodes.push(called.clone());
        Incident::Return { node, called }
    }

    /// Releases the nodes whose marks were removed, with an operator command in the store.
    pub(crate) fn release_unmarked(&mut self, store: &Store, now: Timestamp) {
        while let Some(node) = oldest(&mut self.unmarked) {
            let command = CommandKind::Release { node };
            store.add_command(&command, OPERATOR, "it may be tested again", now).unwrap();
        }
    }

    /// Brings back the nodes that vanished, so that their marks are checked too.
    pub(crate) fn restore_vanished(&mut self, cluster: &RemoteSim) {
        for node in std::mem::take(&mut self.vanished) {
            self.inject(cluster, &Incident::Return { called: node.clone(), node });
        }
    }

    fn inject(&mut self, cluster: &RemoteSim, incident: &Incident) {
        self.injected += u32::from(cluster.inject(incident).unwrap());
    }
}

/// Returns the oldest entry once the queue is full.
fn oldest(nodes: &mut VecDeque<NodeName>) -> Option<NodeName> {
    if nodes.len() < MAX_REMOVED { None } else { nodes.pop_front() }
}
