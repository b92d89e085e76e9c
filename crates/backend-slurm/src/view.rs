//! Combines Slurm's answers: each node with its marks, its occupancy, and our jobs on it. Pure.

use std::{collections::HashMap, sync::Arc};

use doctor_backend::ObservedNode;
use doctor_core::{
    ids::{NodeName, PoolName, RunId, Sku},
    node::{Declared, Node, Occupancy},
    time::Timestamp,
};

use super::{
    cluster::ClusterConfig,
    config::{JOB_PREFIX, SlurmConfig},
    job, maintenance_reservation,
    marks::{self, ReservationKind},
    nodes::SlurmNode,
    occupancy::{NodeContext, occupancy},
    pending_demand::{self, CandidateNode},
    queue::Job,
    reservations::Reservation,
    states::Phase,
    status_writer,
};

#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) nodes: &'a [SlurmNode],
    pub(super) jobs: &'a [Job],
    pub(super) reservations: &'a [Reservation],
    pub(super) cluster_config: &'a ClusterConfig,
    /// Our user id: any user may choose our job names.
    pub(super) user: u32,
}

/// Jobs on one node.
#[derive(Debug, Default)]
struct NodeJobs<'a> {
    users: Vec<&'a Job>,
    /// Including repairs.
    has_our_job: bool,
    our_job_pending: bool,
    runs: Vec<RunId>,
}

impl View<'_> {
    /// Returns every managed node, in order, and the number of the status on each.
    pub(super) fn seen_nodes(
        &self,
        now: Timestamp,
        config: &SlurmConfig,
    ) -> (Vec<ObservedNode>, HashMap<NodeName, u64>) {
        let on_nodes = self.jobs_by_node();
        let (reserved, our_reservations) = self.reservations_by_node(now, config);
        let mut managed: Vec<(NodeName, &SlurmNode, NodeContext)> = self
            .nodes
            .iter()
            .filter(|node| is_managed(node, config))
            .filter_map(|node| {
                let name = node.node_name()?;
                let context = NodeContext {
                    foreign_reservation: reserved
                        .get(&name)
                        .or_else(|| reserved.get(&all_nodes_key()))
                        .map(|one| (*one).to_owned()),
                    our_reservation: our_reservations.get(&name).copied().unwrap_or_default(),
                    suspend_at: self.cluster_config.power_saving.power_down_time(node, &self.cluster_config.partitions),
                    ..on_nodes.get(node.name.as_str()).map(NodeJobs::context).unwrap_or_default()
                };
                Some((name, node, context))
            })
            .collect();
        managed.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        self.mark_demanded(&mut managed, now, config);
        let (mut pools, mut hardware) = (Pools::default(), SharedHardware::default());
        let mut status_numbers = HashMap::new();
        let seen = managed.into_iter().map(|(name, node, context)| {
            status_numbers.extend(status_writer::status_number(node, config).map(|number| (name.clone(), number)));
            let mut runs = on_nodes.get(node.name.as_str()).map(|on| on.runs.clone()).unwrap_or_default();
            runs.sort_unstable();
            runs.dedup();
            let node = Node {
                name,
                pool: pools.pool_of(node, config),
                occupancy: occupancy(node, &context, now, config),
                marks: marks::marks(node, context.our_reservation, config),
                // Slurm knows only the machine's name; the job's result reports the hardware.
                hardware: None,
                sku: sku(node, config),
                declared: node.declared.map(|declared| hardware.share(declared)),
                overrides: None,
            };
            ObservedNode { node: Arc::new(node), agent_last_seen: None, jobs: runs }
        });
        (seen.collect(), status_numbers)
    }

    fn jobs_by_node(&self) -> HashMap<&str, NodeJobs<'_>> {
        let mut on: HashMap<&str, NodeJobs<'_>> = HashMap::new();
        for job in self.jobs {
            let ours = job.uid == Some(self.user) && job.name.starts_with(JOB_PREFIX);
            match (job.phase(), ours) {
                (Phase::Ended, _) | (Phase::Pending, false) => {}
                (Phase::Active, false) => {
                    job.nodes.iter().for_each(|node| on.entry(node.as_str()).or_default().users.push(job));
                }
                (phase, true) => {
                    let nodes = if phase == Phase::Active { &job.nodes } else { &job.required };
                    for node in nodes {
                        let node_jobs = on.entry(node.as_str()).or_default();
                        node_jobs.has_our_job |= phase == Phase::Active;
                        node_jobs.our_job_pending |= phase == Phase::Pending;
                        node_jobs.runs.extend(job::run_of(&job.name));
                    }
                }
            }
        }
        on
    }

    /// Returns foreign reservations by node, and the nodes that ours hold.
    fn reservations_by_node(
        &self,
        now: Timestamp,
        config: &SlurmConfig,
    ) -> (HashMap<NodeName, &str>, HashMap<NodeName, ReservationKind>) {
        let (mut reserved, mut our_reservations) = (HashMap::new(), HashMap::new());
        for reservation in self.reservations {
            let ours = maintenance_reservation::reservation_kind(reservation);
            if ours.exists() {
                our_reservations.extend(reservation.nodes.iter().map(|node| (node.clone(), ours)));
                continue;
            }
            let soon = reservation.start.is_none_or(|at| at.since(now) <= config.reservation_margin);
            if reservation.active || soon {
                let name = reservation.name.as_str();
                reserved.extend(reservation.nodes.iter().map(|node| (node.clone(), name)));
                if reservation.unreadable {
                    reserved.insert(all_nodes_key(), name);
                }
            }
        }
        (reserved, our_reservations)
    }

    /// Marks the nodes that pending user work needs and could have without our jobs.
    fn mark_demanded(&self, managed: &mut [(NodeName, &SlurmNode, NodeContext)], now: Timestamp, config: &SlurmConfig) {
        let ours = |job: &&Job| job.uid == Some(self.user) && job.name.starts_with(JOB_PREFIX);
        let waiting: Vec<&Job> = self.jobs.iter().filter(|job| pending_demand::is_waiting(job) && !ours(job)).collect();
        if waiting.is_empty() {
            return;
        }
        let free = |(_, node, context): &(NodeName, &SlurmNode, NodeContext)| {
            // Users could not have a node that we keep out of service; they could have one that we only test.
            let open = !marks::marks(node, context.our_reservation, config).keeps_out_of_service();
            open && occupancy(node, context, now, config) == Occupancy::Free
        };
        let offered: Vec<usize> = (0..managed.len()).filter(|index| free(&managed[*index])).collect();
        let offers: Vec<CandidateNode<'_>> = offered
            .iter()
            .map(|index| {
                let (_, node, context) = &managed[*index];
                CandidateNode { node, has_our_job: context.has_our_job || context.our_job_pending }
            })
            .collect();
        for (offer, by) in pending_demand::demanded_nodes(&offers, waiting) {
            managed[offered[offer]].2.pending_job = Some(by);
        }
    }
}

/// A placeholder for every node in a map of nodes; no real node has this name.
fn all_nodes_key() -> NodeName {
    NodeName::new("all-nodes.of-a-list-that-cannot-be-read").expect("a valid node name")
}

impl NodeJobs<'_> {
    fn context(&self) -> NodeContext {
        let users = self.users.iter().map(|job| format!("job {} of {}", job.number, job.user)).collect();
        NodeContext {
            users,
            has_our_job: self.has_our_job,
            our_job_pending: self.our_job_pending,
            ..NodeContext::default()
        }
    }
}

fn is_managed(node: &SlurmNode, config: &SlurmConfig) -> bool {
    let partition = config.partitions.is_empty() || node.partitions.iter().any(|name| config.partitions.contains(name));
    partition && (node.gpus > 0 || !config.gpus_only)
}

/// Nodes of one partition share its name.
#[derive(Debug, Default)]
struct Pools(HashMap<String, PoolName>);

impl Pools {
    /// Returns the first managed partition of the node.
    fn pool_of(&mut self, node: &SlurmNode, config: &SlurmConfig) -> PoolName {
        let is_configured = |name: &&String| config.partitions.is_empty() || config.partitions.contains(name);
        let name = node.partitions.iter().find(is_configured).map_or("none", String::as_str);
        if let Some(known) = self.0.get(name) {
            return known.clone();
        }
        let pool = PoolName::new(name).unwrap_or_else(|_| PoolName::new("other").expect("a valid pool name"));
        self.0.insert(name.to_owned(), pool.clone());
        pool
    }
}

/// Nodes of one kind share what is declared for them.
#[derive(Debug, Default)]
struct SharedHardware(HashMap<Declared, Arc<Declared>>);

impl SharedHardware {
    fn share(&mut self, declared: Declared) -> Arc<Declared> {
        Arc::clone(self.0.entry(declared).or_insert_with(|| Arc::new(declared)))
    }
}

fn sku(node: &SlurmNode, config: &SlurmConfig) -> Option<Sku> {
    let by_feature = node.features.iter().find_map(|feature| config.skus.get(feature)).cloned();
    by_feature.or_else(|| Sku::new(node.instance_type.as_deref()?).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster_config, nodes, queue, reservations};
    use doctor_core::node::MarkKind;
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp::from_secs(1_794_783_600);
    const US: u32 = 7;
    const TOKEN: &str = "t";
    const NODES: &str = "NodeName=n2 State=IDLE Gres=gpu:h100:8 Partitions=gpu,debug ActiveFeatures=h100 CPUTot=96\n\
                         NodeName=n1 State=ALLOCATED Gres=gpu:8 Partitions=gpu CPUTot=96\n\
                         NodeName=login State=IDLE Partitions=login\n";

    fn line(number: &str, uid: &str, state: &str, nodes: &str, required: &str, name: &str) -> String {
        let fields = [
            TOKEN,
            number,
            uid,
            "alice",
            state,
            "Resources",
            "gpu",
            "2026-11-15T22:58:02",
            "N/A",
            "N/A",
            nodes,
            required,
            "",
            "1",
            "1",
            "0",
            "gres:gpu:8",
            "(null)",
            "(null)",
            name,
        ];
        fields.join("\u{1f}")
    }

    fn seen(nodes: &str, jobs: &str, reserved: &str, config: &SlurmConfig) -> Vec<ObservedNode> {
        let nodes = nodes::parse(nodes).unwrap();
        let (jobs, reservations) = (queue::parse(jobs, TOKEN), reservations::parse(reserved));
        let cluster_config = ClusterConfig {
            partitions: cluster_config::partitions(""),
            power_saving: cluster_config::power_saving(""),
        };
        View { nodes: &nodes, jobs: &jobs, reservations: &reservations, cluster_config: &cluster_config, user: US }
            .seen_nodes(NOW, config)
            .0
    }

    fn describe(seen: &ObservedNode) -> String {
        match &seen.node.occupancy {
            Occupancy::Free => format!("{} free", seen.node.name),
            Occupancy::Busy { by } => format!("{} busy: {by}", seen.node.name),
            Occupancy::Unknown { why } => format!("{} unknown: {why}", seen.node.name),
        }
    }

    fn all(jobs: &str, reserved: &str) -> Vec<String> {
        seen(NODES, jobs, reserved, &SlurmConfig::default()).iter().map(describe).collect()
    }

    #[test]
    fn gpu_nodes_are_sorted_and_have_their_pool_and_sku() {
        let h100 = Sku::new("hgx-h100").unwrap();
        let config = SlurmConfig { skus: [("h100".to_owned(), h100.clone())].into(), ..SlurmConfig::default() };
        let nodes = seen(NODES, "", "", &config);
        assert_eq!(nodes.iter().map(|one| one.node.name.as_str()).collect::<Vec<_>>(), ["n1", "n2"]);
        assert_eq!((nodes[1].node.pool.as_str(), &nodes[1].node.sku), ("gpu", &Some(h100)));
        let declared = |index: usize| nodes[index].node.declared.as_ref().unwrap();
        assert_eq!(nodes[0].node.declared_gpus(), 8);
        assert!(Arc::ptr_eq(declared(0), declared(1)), "equal values are stored once");
        let debug = SlurmConfig { partitions: vec!["debug".to_owned()], ..SlurmConfig::default() };
        let nodes = seen(NODES, "", "", &debug);
        assert_eq!((nodes.len(), nodes[0].node.pool.as_str()), (1, "debug"));
        let every = SlurmConfig { gpus_only: false, ..SlurmConfig::default() };
        let nodes = seen(NODES, "", "", &every);
        assert_eq!((nodes.len(), &nodes[0].node.declared), (3, &None));
    }

    #[test]
    fn a_job_is_ours_only_by_both_its_user_and_its_name() {
        let run = doctor_core::ids::IdSource::new(1).run();
        let name = format!("doctor-{run}");
        let ours = line("1", "7", "RUNNING", "n1", "n1", &name);
        assert_eq!(all(&ours, ""), ["n1 free", "n2 free"]);
        assert_eq!(seen(NODES, &ours, "", &SlurmConfig::default())[0].jobs, [run]);
        for (uid, name) in [("8", name.as_str()), ("7", "train")] {
            let job = line("1", uid, "RUNNING", "n1", "", name);
            assert_eq!(all(&job, ""), ["n1 busy: job 1 of alice", "n2 free"]);
        }
        let pending = line("1", "7", "PENDING", "", "n2", &name);
        assert_eq!(seen(NODES, &pending, "", &SlurmConfig::default())[1].jobs, [run]);
    }

    #[test]
    fn a_waiting_job_demands_the_free_node_first_and_then_the_node_with_our_job() {
        let run = doctor_core::ids::IdSource::new(1).run();
        let ours = line("1", "7", "RUNNING", "n1", "n1", &format!("doctor-{run}"));
        let first = line("2", "8", "PENDING", "", "", "a");
        let jobs = [ours, first].join("\n");
        assert_eq!(all(&jobs, ""), ["n1 free", "n2 busy: job 2 of alice, which waits for it"]);
        let jobs = format!("{jobs}\n{}", line("3", "8", "PENDING", "", "", "b"));
        assert_eq!(all(&jobs, "")[0], "n1 busy: job 3 of alice, which waits for it");
    }

    #[test]
    fn a_foreign_reservation_makes_its_nodes_busy_and_ours_is_a_mark() {
        let theirs = |nodes: &str, start: &str| {
            format!("ReservationName=monday StartTime={start} Nodes={nodes} Flags=MAINT State=INACTIVE")
        };
        assert_eq!(all("", &theirs("n2", "2026-11-15T23:30:00"))[1], "n2 busy: reservation monday");
        assert_eq!(all("", &theirs("n2", "2026-11-16T23:30:00"))[1], "n2 free");
        assert_eq!(all("", &theirs("n[2", "2026-11-15T23:30:00"))[1], "n2 busy: reservation monday");
        let run = doctor_core::ids::IdSource::new(1).run();
        let ours = format!("ReservationName=doctor-{run} StartTime=2026-11-15T22:30:00 Nodes=n2 State=ACTIVE");
        let nodes = seen(NODES, "", &ours, &SlurmConfig::default());
        assert!(nodes[1].node.marks.has_ours(MarkKind::Maintenance) && nodes[1].node.occupancy.is_free());
        let who = "ReservationName=doctor-who StartTime=2026-11-15T22:30:00 Nodes=n2 State=ACTIVE";
        assert_eq!(all("", who)[1], "n2 busy: reservation doctor-who");
    }

    proptest! {
        #[test]
        fn no_text_of_a_user_or_an_operator_frees_a_node(text in "\\PC{0,60}(\n\\PC{0,60})?") {
            let job = line("1", "8", "RUNNING", "n1,n2", "", &text);
            prop_assert!(all(&job, "").iter().all(|node| !node.ends_with("free")));
            let reserved = format!("ReservationName=x StartTime=2026-11-15T22:30:00 Nodes=n[1-2] State=ACTIVE Comment={text}");
            prop_assert!(all("", &reserved).iter().all(|node| !node.ends_with("free")));
            let drained = format!("NodeName=n1 State=IDLE+DRAIN Gres=gpu:8 Partitions=gpu Reason=fan {text}");
            let nodes = seen(&drained, "", "", &SlurmConfig::default());
            prop_assert!(nodes.iter().all(|seen| seen.node.name.as_str() != "n1" || !seen.node.occupancy.is_free()));
        }
    }
}
