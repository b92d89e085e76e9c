//! A node as its cluster reports it: occupancy, marks and hardware identity.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    bounded_text::bound,
    ids::{CaseId, HardwareId, NodeName, PoolName, Sku},
    measured_count::GPU_COUNT,
    reason::coded,
    time::Timestamp,
};

/// One node as reported by its backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub name: NodeName,
    pub pool: PoolName,
    pub occupancy: Occupancy,
    pub marks: Marks,
    /// Unknown until the node or its cluster reports it.
    pub hardware: Option<Arc<Hardware>>,
    pub sku: Option<Sku>,
    /// The hardware that the cluster declares; nodes of one kind share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Arc<Declared>>,
    /// Set where this node differs from the rest of its cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overrides: Option<Arc<NodeOverrides>>,
}

/// Hardware that a cluster's configuration or its device plugin declares for a node, whether or not the node reports it.
///
/// A cluster may offer less than the machine has, so a declared number is what the machine has at least.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Declared {
    /// Whole GPUs. `None`: the cluster does not say, or says zero. A device plugin that died leaves zero, so zero never
    /// means that the machine has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
}

impl Declared {
    /// Declares this number of GPUs; `None` for zero.
    pub fn gpus(count: u32) -> Option<Self> {
        (count > 0).then_some(Self { gpus: Some(count) })
    }

    /// Returns the declared value of a metric.
    pub fn value(&self, metric: &str) -> Option<f64> {
        self.gpus.filter(|_| metric == GPU_COUNT).map(f64::from)
    }
}

/// Properties of a single node that the cluster-wide capabilities do not cover.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeOverrides {
    /// The cluster starts no work on the node, but a path past the scheduler reaches it and has shown that it is not in
    /// use. Requalification runs can use that path. The node still does not count as free.
    pub out_of_band: bool,
    /// The cluster itself reports that the node has no work and cannot receive any.
    pub vacant: bool,
    /// Set if only a person can replace the node: the instructions for that.
    pub manual_replacement: Option<String>,
}

impl Node {
    /// Returns how many GPUs the cluster declares for the node; zero if it declares none.
    pub fn declared_gpus(&self) -> u32 {
        self.declared.as_ref().and_then(|declared| declared.gpus).unwrap_or(0)
    }

    pub fn is_reachable_out_of_band(&self) -> bool {
        self.overrides.as_ref().is_some_and(|apart| apart.out_of_band)
    }

    pub fn is_vacant(&self) -> bool {
        self.overrides.as_ref().is_some_and(|apart| apart.vacant)
    }

    /// Returns the instructions for replacing the node by hand, if it can be replaced in no other way.
    pub fn manual_replacement(&self) -> Option<&str> {
        self.overrides.as_ref()?.manual_replacement.as_deref()
    }
}

/// Whether a node runs user work, or is about to.
///
/// An outage, a missing field or a node that does not answer gives `Unknown`. `Unknown` never counts as `Free`: nothing
/// is started on a node that its cluster has not reported as free.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

/// Marks on a node, split by owner. Cluster Doctor changes only `ours`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    pub ours: Vec<OurMark>,
    pub foreign: Vec<ForeignMark>,
}

impl Marks {
    pub fn has_ours(&self, kind: MarkKind) -> bool {
        self.ours.iter().any(|mark| mark.kind == kind)
    }

    /// Returns whether a mark of ours keeps the node out of service for longer than a test.
    pub fn keeps_out_of_service(&self) -> bool {
        self.ours.iter().any(|mark| mark.kind != MarkKind::Maintenance)
    }

    /// Returns the first mark by another party that keeps the node out of service.
    pub fn blocking_foreign_mark(&self) -> Option<&ForeignMark> {
        self.foreign.iter().find(|mark| mark.blocks)
    }
}

/// A mark set by Cluster Doctor. The mark itself carries the case id, so that a controller with an empty store can
/// still attribute it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OurMark {
    pub kind: MarkKind,
    pub case: Option<CaseId>,
}

/// A mark set by another party: a cordon, a drain with a reason, a taint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ForeignMark {
    pub by: String,
    pub text: String,
    /// Whether it keeps work off the node.
    pub blocks: bool,
}

coded! {
    /// The meaning of a mark of ours.
    pub enum MarkKind {
        /// Found bad: no new work.
        Unhealthy => "unhealthy",
        /// Reserved for the length of a test or a repair: no new work.
        Maintenance => "maintenance",
        /// Drained by Cluster Doctor: running work may finish, nothing new starts.
        Cordon => "cordon",
    }
}

/// The hardware identity of a node, independent of its name. A node's history follows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hardware {
    pub gpu_uuids: Vec<String>,
    pub board_serial: Option<String>,
    pub physical_host: Option<String>,
    pub boot_id: Option<String>,
}

/// Limits of what is kept of the identifiers that a machine reports.
const MAX_IDENTIFIER_BYTES: usize = 256;
const MAX_GPUS: usize = 256;

impl Hardware {
    /// Returns the identifiers with a limited length and number.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.gpu_uuids.truncate(MAX_GPUS);
        let others = [&mut self.board_serial, &mut self.physical_host, &mut self.boot_id];
        let texts = self.gpu_uuids.iter_mut().chain(others.into_iter().flatten());
        texts.for_each(|text| bound(text, MAX_IDENTIFIER_BYTES));
        self
    }

    /// Returns the most stable identifier of this machine. `None` if the machine reported no identifier: its history
    /// then follows the node name.
    pub fn id(&self) -> Option<HardwareId> {
        let (kind, text) = self.most_stable()?;
        let clean: String = sanitized(text).collect();
        HardwareId::new(&format!("{kind}-{clean}")).ok()
    }

    /// Returns whether this machine has that id. One planning pass calls this for a hundred thousand nodes, so it
    /// allocates nothing and tests the most common case first.
    pub fn matches(&self, id: &HardwareId) -> bool {
        let named = |kind: &str, text: &str| {
            let rest = id.as_str().strip_prefix(kind).and_then(|rest| rest.strip_prefix('-'));
            rest.is_some_and(|rest| rest == text || rest.chars().eq(sanitized(text)))
        };
        self.board_serial.as_deref().is_some_and(|serial| named("board", serial) && is_real_serial(serial))
            || self.most_stable().is_some_and(|(kind, text)| named(kind, text))
    }

    /// Returns whether the machine reported any identifier.
    pub fn is_known(&self) -> bool {
        self.most_stable().is_some()
    }

    /// A board outlives its GPUs and its host name; the lowest GPU UUID outlives a re-imaged host.
    fn most_stable(&self) -> Option<(&'static str, &str)> {
        let board =
            self.board_serial.as_deref().filter(|serial| is_real_serial(serial)).map(|serial| ("board", serial));
        let gpu = || self.gpu_uuids.iter().min().map(|uuid| ("gpu", uuid.as_str()));
        let host = || self.physical_host.as_deref().map(|host| ("host", host));
        board.or_else(gpu).or_else(host)
    }
}

/// Returns the text in the form used in an id: at most 200 characters, `-` for everything that is not alphanumeric.
fn sanitized(text: &str) -> impl Iterator<Item = char> + '_ {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(200)
}

/// Returns whether this is a serial number: the firmware of many boards has one of these placeholders instead.
fn is_real_serial(serial: &str) -> bool {
    const FILLERS: [&str; 8] =
        ["", "none", "n/a", "default string", "not specified", "system serial number", "to be filled by o.e.m.", "0"];
    let serial = serial.trim();
    !FILLERS.iter().any(|filler| serial.eq_ignore_ascii_case(filler))
}

/// An operator's instruction to leave a node alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
        assert!(hardware.matches(&hardware.id().unwrap()));
        let gpu = hardware.id().unwrap();
        hardware.board_serial = Some("J1020.77".into());
        assert_eq!(hardware.id().unwrap().as_str(), "board-J1020-77");
        assert!(hardware.matches(&hardware.id().unwrap()) && !hardware.matches(&gpu));
        hardware.board_serial = None;
        hardware.gpu_uuids.clear();
        assert_eq!(hardware.id().unwrap().as_str(), "host-HV-17");
        assert_eq!(Hardware::default().id(), None);
        assert!(!Hardware::default().matches(&gpu));
    }

    #[test]
    fn zero_gpus_are_not_a_declaration_and_a_declaration_reads_back() {
        assert_eq!(Declared::gpus(0), None);
        let eight = Declared::gpus(8).unwrap();
        assert_eq!((eight.value("gpu_count"), eight.value("nvme_disks")), (Some(8.0), None));
        assert_eq!(Declared::default().value("gpu_count"), None);
        assert_eq!(serde_json::to_string(&eight).unwrap(), r#"{"gpus":8}"#);
        assert_eq!(serde_json::from_str::<Declared>(r#"{"gpus":8}"#).unwrap(), eight);
        assert_eq!(serde_json::from_str::<Declared>("{}").unwrap(), Declared::default());
        assert!(serde_json::from_str::<Declared>(r#"{"gpu":8}"#).is_err());
    }

    #[test]
    fn every_mark_kind_reads_back() {
        for kind in MarkKind::ALL {
            assert_eq!(MarkKind::from_code(kind.code()), Some(*kind));
        }
    }
}
