//! Chance that can be repeated, and what it does to the cluster while controllers come and go.

use std::collections::BTreeSet;

use doctor_core::{ids::NodeName, node::ForeignMark, time::Span};
use doctor_sim::{Incident, RemoteSim};

/// `SplitMix64`: every number follows from the seed.
pub(crate) struct Chance(u64);

impl Chance {
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

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// What people and machines around the cluster do without asking us.
pub(crate) struct Mischief {
    nodes: Vec<NodeName>,
    /// Nodes that are in no list for now.
    vanished: Vec<NodeName>,
    /// Nodes that were in no list for a while.
    pub(crate) were_away: BTreeSet<NodeName>,
    pub(crate) done: u32,
}

const OTHERS: &str = "somebody else";

impl Mischief {
    pub(crate) const fn new(nodes: Vec<NodeName>) -> Self {
        Self { nodes, vanished: Vec::new(), were_away: BTreeSet::new(), done: 0 }
    }

    /// Has something happen to some node.
    pub(crate) fn strike(&mut self, chance: &mut Chance, cluster: &RemoteSim) {
        let node = self.nodes[usize::try_from(chance.below(self.nodes.len() as u64)).unwrap()].clone();
        let a_while = Span::minutes(5 + i64::try_from(chance.below(60)).unwrap());
        let incident = match chance.below(10) {
            0 => Incident::UserJob { nodes: vec![node], length: a_while },
            1 => {
                let mark = ForeignMark { by: OTHERS.to_owned(), text: "hands off".to_owned(), blocks: true };
                Incident::ForeignMark { node, mark }
            }
            2 => Incident::ForeignUnmark { node, by: OTHERS.to_owned() },
            3 => Incident::OurMarksRemoved { node },
            4 => Incident::ForeignReboot { node },
            5 => Incident::AgentSilent { node, length: a_while },
            6 => Incident::Unreachable { node, length: a_while },
            7 => {
                self.vanished.push(node.clone());
                self.were_away.insert(node.clone());
                Incident::Vanish { node }
            }
            _ => match self.vanished.pop() {
                Some(node) => self.returning(chance, node),
                None => Incident::AgentSilent { node, length: a_while },
            },
        };
        self.happen(cluster, &incident);
    }

    /// Half of those that come back have another name then.
    fn returning(&mut self, chance: &mut Chance, node: NodeName) -> Incident {
        let called = match node.as_str().strip_suffix("-again") {
            _ if chance.once_in(2) => node.clone(),
            Some(before) => NodeName::new(before).unwrap(),
            None => NodeName::new(&format!("{node}-again")).unwrap(),
        };
        self.nodes.retain(|known| *known != node);
        self.nodes.push(called.clone());
        Incident::Return { node, called }
    }

    /// Brings back what vanished: its marks are to be judged too.
    pub(crate) fn tidy(&mut self, cluster: &RemoteSim) {
        for node in std::mem::take(&mut self.vanished) {
            self.happen(cluster, &Incident::Return { called: node.clone(), node });
        }
    }

    fn happen(&mut self, cluster: &RemoteSim, incident: &Incident) {
        self.done += u32::from(cluster.inject(incident).unwrap());
    }
}
