//! Determines which nodes pending user work needs. Pure.
//!
//! If a site lets jobs preempt ours, Slurm does that by itself. If not, a user's job stays pending although only a job of ours is
//! in its way. This module trusts Slurm's report that a job could start and finds no nodes, and only asks whether our nodes would
//! suffice.

use std::collections::{BTreeSet, HashMap, HashSet};

use doctor_core::ids::NodeName;

use super::{nodes::SlurmNode, queue::Job, states::Phase};

/// Reasons of a job that could run and finds no nodes. Jobs that are held, too early, over a limit, or dependent on another have
/// other reasons.
const WAITING_REASONS: [&str; 4] = ["Resources", "Priority", "ReqNodeNotAvail", "Nodes required for job are DOWN"];

/// Returns whether a job waits for nodes and for nothing else.
pub(super) fn is_waiting(job: &Job) -> bool {
    let reason = job.reason.replace('_', " ");
    // A job with a reservation waits for that reservation's nodes, which we do not use.
    job.phase() == Phase::Pending
        && job.reservation.is_none()
        && WAITING_REASONS.iter().any(|prefix| reason.starts_with(prefix))
}

/// A node that may suit a pending job.
#[derive(Debug, Clone, Copy)]
pub(super) struct CandidateNode<'a> {
    pub(super) node: &'a SlurmNode,
    /// Whether a job of ours is on it, or pending for it.
    pub(super) has_our_job: bool,
}

/// The offers not taken yet, by partition: first those without a job of ours, then those with one; sorted.
#[derive(Debug)]
struct FreeNodes<'a> {
    by_partition: HashMap<&'a str, [BTreeSet<usize>; 2]>,
    count: usize,
}

impl<'a> FreeNodes<'a> {
    fn new(offers: &[CandidateNode<'a>]) -> Self {
        let mut by_partition: HashMap<&str, [BTreeSet<usize>; 2]> = HashMap::new();
        for (index, offer) in offers.iter().enumerate() {
            for name in &offer.node.partitions {
                by_partition.entry(name).or_default()[usize::from(offer.has_our_job)].insert(index);
            }
        }
        Self { by_partition, count: offers.len() }
    }

    /// Returns as many offers as the job needs, or `None`.
    fn nodes_for(&self, job: &Job, offers: &[CandidateNode<'_>]) -> Option<Vec<usize>> {
        let needed = usize::try_from(job.node_count).unwrap_or(usize::MAX);
        let lists: Vec<_> = job.partitions.iter().filter_map(|name| self.by_partition.get(name.as_str())).collect();
        let indices = |ours: usize| lists.iter().flat_map(move |list| &list[ours]);
        let mut chosen: Vec<usize> = Vec::new();
        for index in indices(0).chain(indices(1)) {
            // It may be in several of the partitions.
            if fits(job, offers[*index].node) && !chosen.contains(index) {
                chosen.push(*index);
                if chosen.len() == needed {
                    return Some(chosen);
                }
            }
        }
        None
    }

    fn take(&mut self, index: usize, offer: &CandidateNode<'_>) {
        for name in &offer.node.partitions {
            if let Some(list) = self.by_partition.get_mut(name.as_str()) {
                list[usize::from(offer.has_our_job)].remove(&index);
            }
        }
        self.count -= 1;
    }
}

/// The properties of a job that determine where it can run.
type RequestShape<'a> = (&'a [String], &'a [NodeName], &'a [NodeName], Option<&'a str>, u32, u32, u64, u64);

fn request_shape(job: &Job) -> RequestShape<'_> {
    let features = job.features.as_deref();
    (&job.partitions, &job.required, &job.excluded, features, job.node_count, job.gpus, job.cpus, job.memory)
}

/// Returns the needed nodes, by their index in `offers`, and the job that needs each. Nodes without a job of ours are reserved
/// for it; those with one are taken only if the others do not suffice, and only if they then do.
///
/// Thousands of jobs may be pending, most of them alike: a job that does not fit now does not fit later, because offers only
/// decrease.
pub(super) fn demanded_nodes(offers: &[CandidateNode<'_>], mut waiting: Vec<&Job>) -> HashMap<usize, String> {
    waiting.sort_by_key(|job| job.number);
    let mut left = FreeNodes::new(offers);
    let mut hopeless: HashSet<RequestShape<'_>> = HashSet::new();
    let mut demanded: HashMap<usize, String> = HashMap::new();
    for job in waiting {
        if left.count == 0 {
            break;
        }
        if hopeless.contains(&request_shape(job)) {
            continue;
        }
        let Some(chosen) = left.nodes_for(job, offers) else {
            hopeless.insert(request_shape(job));
            continue;
        };
        for index in chosen {
            left.take(index, &offers[index]);
            demanded.insert(index, format!("job {} of {}, which waits for it", job.number, job.user));
        }
    }
    demanded
}

fn fits(job: &Job, node: &SlurmNode) -> bool {
    let named = |list: &[NodeName]| list.iter().any(|name| name.as_str() == node.name);
    let partition = job.partitions.iter().any(|name| node.partitions.contains(name));
    let node_allowed = (job.required.is_empty() || named(&job.required)) && !named(&job.excluded);
    let size = job.gpus <= node.gpus && job.cpus <= node.cpus && job.memory <= node.memory;
    partition && node_allowed && size && job.features.as_deref().is_none_or(|features| has_features(features, node))
}

/// Evaluates `a&b` and `a|b`. For any other constraint, the node is assumed to match.
fn has_features(required: &str, node: &SlurmNode) -> bool {
    let has = |name: &str| node.features.iter().any(|feature| feature == name);
    if required.contains(['[', '(', '*', '!', '{']) {
        return true;
    }
    required.split('|').any(|all| all.split(['&', ',']).all(|name| has(name.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue;

    fn node(name: &str, features: &[&str]) -> SlurmNode {
        SlurmNode {
            name: name.to_owned(),
            partitions: vec!["gpu".to_owned()],
            features: features.iter().map(|feature| (*feature).to_owned()).collect(),
            gpus: 8,
            cpus: 96,
            memory: 1_900_000,
            ..SlurmNode::default()
        }
    }

    /// Fields as `squeue` prints them, from the reason on.
    struct JobSpec<'a> {
        reason: &'a str,
        nodes: &'a str,
        count: &'a str,
        gres: &'a str,
        features: &'a str,
    }

    const SPEC: JobSpec<'static> =
        JobSpec { reason: "Resources", nodes: "", count: "1", gres: "gres:gpu:8", features: "(null)" };

    fn job(number: u64, spec: &JobSpec<'_>) -> Job {
        let number = number.to_string();
        let fields = [
            "t",
            &number,
            "1000",
            "alice",
            "PENDING",
            spec.reason,
            "gpu",
            "2026-11-15T22:58:02",
            "N/A",
            "N/A",
            "",
            spec.nodes,
            "",
            spec.count,
            "1",
            "0",
            spec.gres,
            "(null)",
            spec.features,
            "train",
        ];
        let jobs = queue::parse(&fields.join("\u{1f}"), "t");
        jobs.into_iter().next().unwrap()
    }

    fn names(offers: &[CandidateNode<'_>], jobs: &[Job]) -> Vec<String> {
        let mut found: Vec<String> = demanded_nodes(offers, jobs.iter().filter(|job| is_waiting(job)).collect())
            .keys()
            .map(|index| offers[*index].node.name.clone())
            .collect();
        found.sort();
        found
    }

    #[test]
    fn a_job_gets_a_free_node_first_and_a_node_with_our_job_only_if_there_is_no_other() {
        let (a, b, c) = (node("a", &["h100"]), node("b", &["h100"]), node("c", &["h200"]));
        let offers = [
            CandidateNode { node: &a, has_our_job: true },
            CandidateNode { node: &b, has_our_job: false },
            CandidateNode { node: &c, has_our_job: true },
        ];
        assert_eq!(names(&offers, &[job(1, &SPEC)]), ["b"]);
        assert_eq!(names(&offers, &[job(1, &SPEC), job(2, &SPEC)]), ["a", "b"]);
        assert_eq!(names(&offers, &[job(1, &JobSpec { features: "h200|h300", ..SPEC })]), ["c"]);
        assert_eq!(names(&offers, &[job(1, &JobSpec { features: "h200&ib", ..SPEC })]), [""; 0]);
        assert_eq!(names(&offers, &[job(1, &JobSpec { nodes: "a", ..SPEC })]), ["a"]);
    }

    #[test]
    fn a_multi_node_job_demands_our_nodes_only_if_it_can_then_start() {
        let (a, b) = (node("a", &[]), node("b", &[]));
        let offers = [CandidateNode { node: &a, has_our_job: true }, CandidateNode { node: &b, has_our_job: false }];
        assert_eq!(names(&offers, &[job(1, &JobSpec { count: "2", ..SPEC })]), ["a", "b"]);
        assert_eq!(names(&offers, &[job(1, &JobSpec { count: "3", ..SPEC })]), [""; 0]);
    }

    #[test]
    fn thousands_of_unschedulable_jobs_are_not_compared_with_every_node() {
        let nodes: Vec<SlurmNode> = (0..2000).map(|at| node(&format!("n{at}"), &[])).collect();
        let offers: Vec<CandidateNode<'_>> =
            nodes.iter().map(|node| CandidateNode { node, has_our_job: false }).collect();
        let hopeless = job(1, &JobSpec { features: "h300", ..SPEC });
        let fitting = job(2, &SPEC);
        let jobs: Vec<Job> = (1..=20_000)
            .map(|number| Job { number, ..hopeless.clone() })
            .chain([Job { number: 30_000, ..fitting }])
            .collect();
        let began = std::time::Instant::now();
        assert_eq!(names(&offers, &jobs), ["n0"]);
        // Comparing every job with every node took minutes in a debug build.
        assert!(began.elapsed() < std::time::Duration::from_secs(10), "{:?}", began.elapsed());
    }

    #[test]
    fn a_node_in_two_partitions_of_a_job_is_counted_once() {
        let both = SlurmNode { partitions: vec!["gpu".to_owned(), "debug".to_owned()], ..node("a", &[]) };
        let offers = [CandidateNode { node: &both, has_our_job: false }];
        let partitions = vec!["gpu".to_owned(), "debug".to_owned()];
        let two = Job { partitions: partitions.clone(), ..job(1, &JobSpec { count: "2", ..SPEC }) };
        assert_eq!(names(&offers, &[two]), [""; 0]);
        assert_eq!(names(&offers, &[Job { partitions, ..job(1, &SPEC) }]), ["a"]);
    }

    #[test]
    fn only_a_runnable_job_without_a_free_node_demands_one() {
        let a = node("a", &[]);
        let offers = [CandidateNode { node: &a, has_our_job: true }];
        let of = |reason| names(&offers, &[job(1, &JobSpec { reason, ..SPEC })]).len();
        for reason in [
            "Resources",
            "Priority",
            "ReqNodeNotAvail, UnavailableNodes:a",
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
        ] {
            assert_eq!(of(reason), 1, "{reason}");
        }
        for reason in [
            "JobHeldUser",
            "JobHeldAdmin",
            "Dependency",
            "BeginTime",
            "QOSMaxJobsPerUserLimit",
            "None",
            "Reservation",
            "PartitionTimeLimit",
            "Licenses",
        ] {
            assert_eq!(of(reason), 0, "{reason}");
        }
        assert_eq!(names(&offers, &[job(1, &JobSpec { gres: "gres:gpu:16", ..SPEC })]).len(), 0);
        let reserved = Job { reservation: Some("monday".to_owned()), ..job(1, &SPEC) };
        assert!(!is_waiting(&reserved));
    }
}
