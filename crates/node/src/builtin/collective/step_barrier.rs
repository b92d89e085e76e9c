//! The barrier of a multi-node job: which nodes have joined, which step each has reached, and which are late.
//!
//! It turns messages of nodes into messages to nodes, without clock or sockets. A single-node job uses it too.

use doctor_checks::collective_report::{GpuReport, NodeReport, RankFailure};

use super::messages::{FromFirst, StartParams, ToFirst};

/// A message to one node, or to all that have joined.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outgoing {
    One(usize, FromFirst),
    All(FromFirst),
}

#[derive(Debug, Default)]
struct Member {
    /// Its name, once it has joined.
    name: Option<String>,
    /// Number of GPUs, and the memory free on them.
    gpus_and_memory: Option<(u32, u64)>,
    step: Option<usize>,
    report: Option<NodeReport>,
    gone: bool,
}

#[derive(Debug)]
pub(super) struct Barrier {
    members: Vec<Member>,
    /// The last step that all nodes have passed.
    last_step: Option<usize>,
    stop_reason: Option<String>,
    ended: bool,
}

impl Barrier {
    pub(super) fn new(nodes: usize) -> Self {
        let members = std::iter::repeat_with(Member::default).take(nodes).collect();
        Self { members, last_step: None, stop_reason: None, ended: false }
    }

    /// Adds a node. Returns false if that rank has joined already.
    pub(super) fn join(&mut self, node: usize, name: &str) -> bool {
        let free = self.members.get(node).is_some_and(|member| member.name.is_none());
        if free {
            self.members[node].name = Some(name.to_owned());
        }
        free
    }

    pub(super) fn handle(&mut self, node: usize, up: ToFirst) -> Vec<Outgoing> {
        match up {
            ToFirst::Opened { gpus, free_bytes: max_bytes } => self.gpus_opened(node, gpus, max_bytes),
            ToFirst::Id(id) if node == 0 => self.begin(&id),
            // Only the first node creates the id.
            ToFirst::Id(_) => Vec::new(),
            ToFirst::AtStep(step) => self.step_reached(node, step),
            ToFirst::Failed(text) => self.stop(format!("{}: {text}", self.describe_node(node))),
            ToFirst::Report(report) => {
                self.members[node].report = Some(report);
                self.end()
            }
        }
    }

    fn gpus_opened(&mut self, node: usize, gpus: u32, max_bytes: u64) -> Vec<Outgoing> {
        self.members[node].gpus_and_memory = Some((gpus, max_bytes));
        let all = self.members.iter().all(|member| member.gpus_and_memory.is_some());
        if all && self.stop_reason.is_none() { vec![Outgoing::One(0, FromFirst::MakeId)] } else { Vec::new() }
    }

    fn begin(&self, id: &str) -> Vec<Outgoing> {
        let opened: Vec<_> = self.members.iter().map(|member| member.gpus_and_memory.unwrap_or_default()).collect();
        let ranks = opened.iter().map(|(gpus, _)| gpus).sum();
        let max_bytes = opened.iter().map(|(_, max_bytes)| *max_bytes).min().unwrap_or_default();
        let begin = opened.iter().enumerate().scan(0, |first_rank, (node, (gpus, _))| {
            let begin = StartParams { id: id.to_owned(), first_rank: *first_rank, ranks, free_bytes: max_bytes };
            *first_rank += gpus;
            Some(Outgoing::One(node, FromFirst::Begin(begin)))
        });
        begin.collect()
    }

    fn step_reached(&mut self, node: usize, step: usize) -> Vec<Outgoing> {
        self.members[node].step = Some(step);
        let next = self.last_step.map_or(0, |passed| passed + 1);
        let all = self.members.iter().all(|member| member.step >= Some(next));
        if !all || self.stop_reason.is_some() {
            return Vec::new();
        }
        self.last_step = Some(next);
        vec![Outgoing::All(FromFirst::GoToStep(next))]
    }

    /// Handles a node whose connection ended or that no longer responds.
    pub(super) fn node_lost(&mut self, node: usize, reason: &str) -> Vec<Outgoing> {
        let member = &mut self.members[node];
        if member.gone || self.ended {
            return Vec::new();
        }
        member.gone = true;
        let mut outgoing = if member.report.is_some() {
            Vec::new()
        } else {
            let text = format!("disconnected: {reason}");
            let gpu = GpuReport {
                rank: u32::MAX,
                gpu: "?".to_owned(),
                sizes: Vec::new(),
                exchange: None,
                failure: Some(RankFailure::Stopped),
            };
            let name = member.name.clone().unwrap_or_else(|| format!("rank {node}"));
            let (gpus, disturbances) = (vec![gpu], Vec::new());
            member.report = Some(NodeReport { node: name, gpus, path_mismatch: None, disturbances });
            self.stop(format!("{}: {text}", self.describe_node(node)))
        };
        outgoing.extend(self.end());
        outgoing
    }

    /// Stops all nodes.
    pub(super) fn stop(&mut self, reason: String) -> Vec<Outgoing> {
        if self.stop_reason.is_some() || self.ended {
            return Vec::new();
        }
        self.stop_reason = Some(reason.clone());
        vec![Outgoing::All(FromFirst::Stop(reason))]
    }

    /// Ends the test when all reports are there.
    fn end(&mut self) -> Vec<Outgoing> {
        if self.ended || self.members.iter().any(|member| member.report.is_none()) {
            return Vec::new();
        }
        self.ended = true;
        let reports = self.members.iter().filter_map(|member| member.report.clone()).collect();
        vec![Outgoing::All(FromFirst::Finished { reports, why: self.stop_reason.clone() })]
    }

    pub(super) const fn is_stopped(&self) -> bool {
        self.stop_reason.is_some()
    }

    /// Returns the nodes that never joined.
    pub(super) fn missing(&self) -> Vec<usize> {
        self.without(|member| member.name.is_some())
    }

    /// Returns the nodes that the others wait for: their GPUs are not open, or they have not reached the next step.
    pub(super) fn late(&self) -> Vec<usize> {
        let next = self.last_step.map_or(0, |passed| passed + 1);
        let has_started = self.members.iter().any(|member| member.step.is_some());
        if has_started {
            let is_awaited = self.members.iter().any(|member| member.step >= Some(next));
            return if is_awaited { self.without(|member| member.step >= Some(next)) } else { Vec::new() };
        }
        self.without(|member| member.gpus_and_memory.is_some())
    }

    /// Returns the nodes without a report.
    pub(super) fn without_report(&self) -> Vec<usize> {
        self.without(|member| member.report.is_some())
    }

    fn without(&self, has: impl Fn(&Member) -> bool) -> Vec<usize> {
        (0..self.members.len()).filter(|node| !has(&self.members[*node])).collect()
    }

    /// Formats `rank 3 (gpu09)`.
    pub(super) fn describe_node(&self, node: usize) -> String {
        let name = self.members.get(node).and_then(|member| member.name.as_ref());
        name.map_or_else(|| format!("rank {node}"), |name| format!("rank {node} ({name})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(nodes: usize) -> Barrier {
        let mut barrier = Barrier::new(nodes);
        for node in 0..nodes {
            assert!(barrier.join(node, &format!("n{node}")));
            let outgoing = barrier.handle(node, ToFirst::Opened { gpus: 2, free_bytes: 100 - node as u64 });
            assert_eq!(!outgoing.is_empty(), node + 1 == nodes, "only when all are there");
        }
        barrier
    }

    fn report(node: usize) -> NodeReport {
        NodeReport { node: format!("n{node}"), gpus: Vec::new(), path_mismatch: None, disturbances: Vec::new() }
    }

    #[test]
    fn ranks_are_assigned_in_node_order_and_no_node_gets_ahead() {
        let mut barrier = opened(3);
        let outgoing = barrier.handle(0, ToFirst::Id("abc".to_owned()));
        let starts: Vec<_> = outgoing
            .iter()
            .map(|message| match message {
                Outgoing::One(node, FromFirst::Begin(begin)) => {
                    (*node, begin.first_rank, begin.ranks, begin.free_bytes)
                }
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(starts, [(0, 0, 6, 98), (1, 2, 6, 98), (2, 4, 6, 98)]);
        assert!(barrier.handle(1, ToFirst::AtStep(0)).is_empty() && barrier.handle(0, ToFirst::AtStep(0)).is_empty());
        assert_eq!(barrier.late(), [2]);
        assert_eq!(barrier.handle(2, ToFirst::AtStep(0)), [Outgoing::All(FromFirst::GoToStep(0))]);
        assert!(barrier.late().is_empty(), "no node waits for another");
        assert!(barrier.handle(2, ToFirst::AtStep(1)).is_empty());
        assert_eq!(barrier.late(), [0, 1]);
    }

    #[test]
    fn a_failed_node_stops_all_and_the_test_ends_with_all_reports() {
        let mut barrier = opened(2);
        let outgoing = barrier.handle(1, ToFirst::Failed("out of memory".to_owned()));
        assert_eq!(outgoing, [Outgoing::All(FromFirst::Stop("rank 1 (n1): out of memory".to_owned()))]);
        assert!(barrier.handle(0, ToFirst::Failed("me too".to_owned())).is_empty(), "the first reason is the reason");
        assert!(barrier.handle(0, ToFirst::Report(report(0))).is_empty());
        assert_eq!(barrier.without_report(), [1]);
        let outgoing = barrier.handle(1, ToFirst::Report(report(1)));
        let reason = Some("rank 1 (n1): out of memory".to_owned());
        assert_eq!(outgoing, [Outgoing::All(FromFirst::Finished { reports: vec![report(0), report(1)], why: reason })]);
    }

    #[test]
    fn a_lost_node_is_named_and_the_others_end() {
        let mut barrier = opened(2);
        let outgoing = barrier.node_lost(1, "connection reset");
        assert_eq!(
            outgoing,
            [Outgoing::All(FromFirst::Stop("rank 1 (n1): disconnected: connection reset".to_owned()))]
        );
        assert!(barrier.node_lost(1, "again").is_empty());
        let outgoing = barrier.handle(0, ToFirst::Report(report(0)));
        let [Outgoing::All(FromFirst::Finished { reports, why: Some(reason) })] = &outgoing[..] else {
            panic!("{outgoing:?}")
        };
        assert_eq!((reports.len(), reason.contains("rank 1 (n1)")), (2, true));
    }

    #[test]
    fn a_rank_joins_once_and_missing_nodes_are_known() {
        let mut barrier = Barrier::new(3);
        assert!(barrier.join(0, "a") && barrier.join(2, "c"));
        assert!(!barrier.join(2, "d") && !barrier.join(9, "e"));
        assert_eq!(barrier.missing(), [1]);
    }
}
