//! What a cluster says of its nodes: who uses them, who marked them, which machine it really is.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    ids::{CaseId, HardwareId, NodeName, PoolName, Sku},
    reason::coded,
    time::Timestamp,
};

/// One node as its backend saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub name: NodeName,
    pub pool: PoolName,
    pub occupancy: Occupancy,
    pub marks: Marks,
    /// Unknown until the node or its cluster has told.
    pub hardware: Option<Arc<Hardware>>,
    pub sku: Option<Sku>,
    /// Where this node is another case than the rest of its cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<Arc<Apart>>,
}

/// What holds for a node that the capabilities of its cluster do not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Apart {
    /// Its cluster starts nothing on it, and there is a way past the cluster on which it was seen that nobody uses it: a proof can go
    /// that way. It is not free for that.
    pub proofs: bool,
    /// By its cluster's own word nobody is on it, and nobody can come.
    pub vacant: bool,
    /// Only people replace it: what they have to do.
    pub by_hand: Option<String>,
}

impl Node {
    pub fn takes_proofs(&self) -> bool {
        self.apart.as_ref().is_some_and(|apart| apart.proofs)
    }

    pub fn is_vacant(&self) -> bool {
        self.apart.as_ref().is_some_and(|apart| apart.vacant)
    }

    /// How people replace it, where nobody else can.
    pub fn by_hand(&self) -> Option<&str> {
        self.apart.as_ref()?.by_hand.as_deref()
    }
}

/// Whether user work is on a node, or is about to be.
///
/// `Unknown` is what an outage, a missing field or a node that does not answer gives. It is never `Free`: nothing is
/// ever started on a node that nobody vouched for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Occupancy {
    Free,
    Busy { by: Arc<str> },
    Unknown { why: Arc<str> },
}

impl Occupancy {
    pub const fn is_free(&self) -> bool {
        matches!(self, Self::Free)
    }
}

/// Marks on a node, split by who made them. Only `ours` may ever be changed by us.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    pub ours: Vec<OurMark>,
    pub foreign: Vec<ForeignMark>,
}

impl Marks {
    pub fn has_ours(&self, kind: MarkKind) -> bool {
        self.ours.iter().any(|mark| mark.kind == kind)
    }

    /// A mark of ours keeps the node out of service, and not only for the length of a test.
    pub fn keep_out(&self) -> bool {
        self.ours.iter().any(|mark| mark.kind != MarkKind::Maintenance)
    }

    /// Somebody else keeps this node out of service.
    pub fn foreign_block(&self) -> Option<&ForeignMark> {
        self.foreign.iter().find(|mark| mark.blocks)
    }
}

/// A mark that carries our name. The case that it belongs to is readable from the mark itself, so that a controller
/// with an empty store can still tell what it is looking at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OurMark {
    pub kind: MarkKind,
    pub case: Option<CaseId>,
}

/// A mark of somebody else: a cordon, a drain with a reason, a taint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ForeignMark {
    pub by: String,
    pub text: String,
    /// Whether it keeps work off the node.
    pub blocks: bool,
}

coded! {
    /// What a mark of ours says.
    pub enum MarkKind {
        /// Found bad: no new work.
        Unhealthy => "unhealthy",
        /// Ours for the length of a test or a repair: no new work.
        Maintenance => "maintenance",
        /// Drained by us: running work may finish, nothing new starts.
        Cordon => "cordon",
    }
}

/// Which machine it is, whatever its name. A node's past follows this.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hardware {
    pub gpu_uuids: Vec<String>,
    pub board_serial: Option<String>,
    pub physical_host: Option<String>,
    pub boot_id: Option<String>,
}

impl Hardware {
    /// The most stable name this machine has. `None` if it told nothing about itself: then its past cannot follow
    /// it, and its name has to do.
    pub fn id(&self) -> Option<HardwareId> {
        let (kind, text) = self.most_stable()?;
        let clean: String = written(text).collect();
        HardwareId::new(&format!("{kind}-{clean}")).ok()
    }

    /// Whether this machine's id is that one. A hundred thousand nodes are asked in one planning pass, so nothing is
    /// put together for it, and the usual answer comes first.
    pub fn is(&self, id: &HardwareId) -> bool {
        let named = |kind: &str, text: &str| {
            let rest = id.as_str().strip_prefix(kind).and_then(|rest| rest.strip_prefix('-'));
            rest.is_some_and(|rest| rest == text || rest.chars().eq(written(text)))
        };
        self.board_serial.as_deref().is_some_and(|serial| named("board", serial) && is_real_serial(serial))
            || self.most_stable().is_some_and(|(kind, text)| named(kind, text))
    }

    /// Whether it told anything by which it would be recognised.
    pub fn is_known(&self) -> bool {
        self.most_stable().is_some()
    }

    /// A board outlives its GPUs and its host name; the lowest GPU outlives a re-imaged host.
    fn most_stable(&self) -> Option<(&'static str, &str)> {
        let board =
            self.board_serial.as_deref().filter(|serial| is_real_serial(serial)).map(|serial| ("board", serial));
        let gpu = || self.gpu_uuids.iter().min().map(|uuid| ("gpu", uuid.as_str()));
        let host = || self.physical_host.as_deref().map(|host| ("host", host));
        board.or_else(gpu).or_else(host)
    }
}

/// Text as it stands in an id.
fn written(text: &str) -> impl Iterator<Item = char> + '_ {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(200)
}

/// Firmware of many boards says one of these instead of a serial number.
fn is_real_serial(serial: &str) -> bool {
    const FILLERS: [&str; 8] =
        ["", "none", "n/a", "default string", "not specified", "system serial number", "to be filled by o.e.m.", "0"];
    let serial = serial.trim();
    !FILLERS.iter().any(|filler| serial.eq_ignore_ascii_case(filler))
}

/// An operator's word that a node is not to be touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub by: String,
    pub why: String,
    pub since: Timestamp,
    pub until: Option<Timestamp>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_recognised_by_its_board_then_its_gpus_then_its_host() {
        let mut hardware = Hardware {
            gpu_uuids: vec!["GPU-b".into(), "GPU-a".into()],
            board_serial: Some("Default string".into()),
            physical_host: Some("HV 17".into()),
            boot_id: None,
        };
        assert_eq!(hardware.id().unwrap().as_str(), "gpu-GPU-a");
        assert!(hardware.is(&hardware.id().unwrap()));
        let gpu = hardware.id().unwrap();
        hardware.board_serial = Some("J1020.77".into());
        assert_eq!(hardware.id().unwrap().as_str(), "board-J1020-77");
        assert!(hardware.is(&hardware.id().unwrap()) && !hardware.is(&gpu));
        hardware.board_serial = None;
        hardware.gpu_uuids.clear();
        assert_eq!(hardware.id().unwrap().as_str(), "host-HV-17");
        assert_eq!(Hardware::default().id(), None);
        assert!(!Hardware::default().is(&gpu));
    }

    #[test]
    fn every_mark_kind_reads_back() {
        for kind in MarkKind::ALL {
            assert_eq!(MarkKind::from_code(kind.code()), Some(*kind));
        }
    }
}
