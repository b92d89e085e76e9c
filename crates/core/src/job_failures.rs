//! User work that failed on a node: a reason to test the node sooner, never a verdict.
//!
//! Most work fails through its own fault, so weak evidence has little weight: one piece of work counts once, divided
//! among the nodes that it failed on; and one owner counts once, divided among all failed work of that owner. Work of
//! several owners that fails on one node and not elsewhere is typical of a bad node. See [`weigh`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{ids::NodeName, time::Timestamp};

/// Work on more nodes than this is no evidence about any of them, and is not kept.
pub const MAX_JOB_NODES: usize = 32;

/// The newest failures of a node that are shown and kept with its case.
const MAX_SHOWN: usize = 16;

/// A smaller weight counts as none: work over more than five nodes, or an owner with more than four fifths of the
/// failures elsewhere.
const MIN_WEIGHT: u16 = Weight::ONE_OWNER.0 / 5;

/// Text from outside, such as a job name: short, on one line, without control characters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label(Arc<str>);

impl Label {
    /// Longer text is truncated. Counted in characters.
    pub const MAX_CHARS: usize = 128;

    pub fn new(text: &str) -> Self {
        let plain = |c: char| if c.is_control() { '?' } else { c };
        match text.chars().count() <= Self::MAX_CHARS && !text.contains(char::is_control) {
            true => Self(text.into()),
            false => Self(text.chars().take(Self::MAX_CHARS).map(plain).collect::<String>().into()),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for Label {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Label {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        std::borrow::Cow::<str>::deserialize(deserializer).map(|text| Self::new(&text))
    }
}

/// A piece of user work that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFailure {
    /// Unique in the cluster; the parts of one piece of work on several nodes share it.
    pub id: Label,
    /// The name for people.
    pub name: Label,
    /// The user, account or namespace. All failures of one owner count as one.
    pub owner: Label,
    pub at: Timestamp,
    pub how: JobFailureKind,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ended")]
pub enum JobFailureKind {
    Exit {
        code: i32,
    },
    Signal {
        number: i32,
    },
    /// It used more memory than it had requested, or than the node has.
    OutOfMemory,
    /// The node failed while the work was on it.
    NodeFailed,
    /// The cluster does not report how it failed.
    Unknown,
}

impl fmt::Display for JobFailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit { code } => write!(f, "exit code {code}"),
            Self::Signal { number } => write!(f, "signal {number}"),
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::NodeFailed => f.write_str("the node failed"),
            Self::Unknown => f.write_str("failed"),
        }
    }
}

/// Weight of the evidence in thousandths: an owner whose work failed on this node and nowhere else is 1000.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Weight(pub u16);

impl Weight {
    pub const NONE: Self = Self(0);
    pub const ONE_OWNER: Self = Self(1000);

    /// Converts from the unit of the policy, owners.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the range of u16")]
    pub fn from_owners(owners: f64) -> Self {
        Self((owners * f64::from(Self::ONE_OWNER.0)).clamp(0.0, f64::from(u16::MAX)) as u16)
    }
}

/// Recent failures on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeJobFailures {
    pub weight: Weight,
    /// Number of different owners.
    pub owners: u32,
    /// Number of failures; `works` may hold fewer.
    pub count: u32,
    /// Newest first.
    pub failures: Vec<JobFailure>,
}

impl NodeJobFailures {
    /// Returns when the newest of them failed.
    pub fn newest(&self) -> Option<Timestamp> {
        self.failures.first().map(|work| work.at)
    }
}

/// Weighs the failed work of each node. A node below the threshold has the weight [`Weight::NONE`] but is still listed,
/// because its failures are shown.
pub fn weigh(failed: &[(NodeName, JobFailure)]) -> BTreeMap<NodeName, NodeJobFailures> {
    let mut spread: BTreeMap<&Label, u64> = BTreeMap::new();
    let mut of_owner: BTreeMap<&Label, BTreeSet<&Label>> = BTreeMap::new();
    let mut here: BTreeMap<&NodeName, Vec<&JobFailure>> = BTreeMap::new();
    for (node, work) in failed {
        *spread.entry(&work.id).or_default() += 1;
        of_owner.entry(&work.owner).or_default().insert(&work.id);
        here.entry(node).or_default().push(work);
    }
    let share = |work: &JobFailure| {
        let one = u64::from(Weight::ONE_OWNER.0) * 1000;
        let nodes = spread.get(&work.id).copied().unwrap_or(1);
        let all = of_owner.get(&work.owner).map_or(1, |works| works.len() as u64);
        one / nodes / all
    };
    here.into_iter()
        .map(|(node, mut works)| {
            works.sort_by(|a, b| b.at.cmp(&a.at).then_with(|| a.id.cmp(&b.id)));
            // Summed in millionths, so that many small shares are not each rounded to zero.
            let sum = works.iter().map(|work| share(work)).sum::<u64>() / 1000;
            let weight = u16::try_from(sum).unwrap_or(u16::MAX);
            let owners: BTreeSet<&Label> = works.iter().map(|work| &work.owner).collect();
            let failed = NodeJobFailures {
                weight: if weight < MIN_WEIGHT { Weight::NONE } else { Weight(weight) },
                owners: u32::try_from(owners.len()).unwrap_or(u32::MAX),
                count: u32::try_from(works.len()).unwrap_or(u32::MAX),
                failures: works.into_iter().take(MAX_SHOWN).cloned().collect(),
            };
            (node.clone(), failed)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(node: &str, owner: &str, id: &str) -> (NodeName, JobFailure) {
        let (id, owner, name) = (Label::new(id), Label::new(owner), Label::new("train"));
        let work = JobFailure {
            id,
            name,
            owner,
            at: Timestamp::from_secs(1_794_700_800),
            how: JobFailureKind::Exit { code: 1 },
        };
        (NodeName::new(node).unwrap(), work)
    }

    fn weights(all: &[(NodeName, JobFailure)]) -> Vec<(String, u16)> {
        weigh(all).into_iter().map(|(node, here)| (node.to_string(), here.weight.0)).collect()
    }

    fn is(node: &str, weight: u16) -> (String, u16) {
        (node.to_owned(), weight)
    }

    #[test]
    fn weights_of_owners_add_up_and_each_owner_counts_once() {
        assert_eq!(weights(&[failed("a", "ann", "1")]), [is("a", 1000)]);
        assert_eq!(weights(&[failed("a", "ann", "1"), failed("a", "ann", "2")]), [is("a", 1000)]);
        assert_eq!(weights(&[failed("a", "ann", "1"), failed("a", "bob", "2")]), [is("a", 2000)]);
    }

    #[test]
    fn a_job_on_many_nodes_has_little_weight_for_each() {
        let over = |nodes: usize| (0..nodes).map(|node| failed(&format!("n{node}"), "ann", "1")).collect::<Vec<_>>();
        assert_eq!(weights(&over(2)), [is("n0", 500), is("n1", 500)]);
        assert_eq!(weights(&over(6))[0], is("n0", 0));
    }

    #[test]
    fn an_owner_whose_jobs_fail_everywhere_has_no_weight_and_mostly_here_has() {
        let everywhere: Vec<_> =
            (0..20).map(|node| failed(&format!("n{node:02}"), "ann", &format!("job-{node}"))).collect();
        assert!(weights(&everywhere).iter().all(|(_, weight)| *weight == 0));
        let mut mostly_here: Vec<_> = (0..6).map(|job| failed("bad", "ann", &format!("here-{job}"))).collect();
        mostly_here.extend((0..4).map(|node| failed(&format!("n{node}"), "ann", &format!("there-{node}"))));
        let weights = weights(&mostly_here);
        assert_eq!((&weights[0], &weights[1]), (&is("bad", 600), &is("n0", 0)));
    }

    #[test]
    fn stored_failures_are_bounded_newest_first() {
        let mut all = Vec::new();
        for number in 0..40_i64 {
            let (node, mut work) = failed("a", "ann", &format!("{number:02}"));
            work.at = Timestamp::from_secs(number);
            all.push((node, work));
        }
        let here = weigh(&all).into_values().next().unwrap();
        assert_eq!((here.count, here.failures.len(), here.newest()), (40, MAX_SHOWN, Some(Timestamp::from_secs(39))));
    }

    #[test]
    fn a_hostile_job_name_is_truncated_and_sanitised() {
        let label = Label::new(&format!("\u{1b}[2Jx{}", "y".repeat(500)));
        assert_eq!(label.as_str().chars().count(), Label::MAX_CHARS);
        assert!(label.as_str().starts_with("?[2Jx"));
        let read: Label = serde_json::from_str("\"a\\u0007b\"").unwrap();
        assert_eq!(read.as_str(), "a?b");
    }

    #[test]
    fn every_failure_kind_reads_back() {
        let all = [
            (JobFailureKind::Exit { code: 3 }, "exit code 3"),
            (JobFailureKind::Signal { number: 11 }, "signal 11"),
            (JobFailureKind::OutOfMemory, "out of memory"),
            (JobFailureKind::NodeFailed, "the node failed"),
            (JobFailureKind::Unknown, "failed"),
        ];
        for (how, display) in all {
            let text = serde_json::to_string(&how).unwrap();
            assert_eq!(
                (serde_json::from_str::<JobFailureKind>(&text).unwrap(), how.to_string()),
                (how, display.to_owned())
            );
        }
    }
}
