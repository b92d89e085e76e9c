//! The barrier of a multi-node job: which nodes have joined, which step each has reached, and which are late.
//!
//! It turns messages of nodes into messages to nodes, without clock or sockets. A single-node job uses it too.

use doctor_checks::collective_report::{Broken, GpuReport, NodeReport};

use super::told::{Begin, Down, Up};

/// A message to one node, or to all that have joined.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Tell {
    One(usize, Down),
    All(Down),
}

#[derive(Debug, Default)]
struct Member {
    /// Its name, once it has joined.
    name: Option<String>,
    /// Number of GPUs, and the memory free on them.
    opened: Option<(u32, u64)>,
    at: Option<usize>,
    report: Option<NodeReport>,
    gone: bool,
}

#[derive(Debug)]
pub(super) struct Steps {
    members: Vec<Member>,
    /// The last step that all nodes have passed.
    passed: Option<usize>,
    stopped: Option<String>,
    ended: bool,
}

impl Steps {
    pub(super) fn new(nodes: usize) -> Self {
        let members = std::iter::repeat_with(Member::default).take(nodes).collect();
        Self { members, passed: None, stopped: None, ended: false }
    }

    /// Adds a node. Returns false if that rank has joined already.
    pub(super) fn came(&mut self, node: usize, name: &str) -> bool {
        let free = self.members.get(node).is_some_and(|member| member.name.is_none());
        if free {
            self.members[node].name = Some(name.to_owned());
        }
        free
    }

    pub(super) fn hear(&mut self, node: usize, up: Up) -> Vec<Tell> {
        match up {
            Up::Opened { gpus, room } => self.opened(node, gpus, room),
            Up::Id(id) if node == 0 => self.begin(&id),
            // Only the first node creates the id.
            Up::Id(_) => Vec::new(),
            Up::At(step) => self.at(node, step),
            Up::Broken(text) => self.stop(format!("{}: {text}", self.words(node))),
            Up::Report(report) => {
                self.members[node].report = Some(report);
                self.end()
            }
        }
    }

    fn opened(&mut self, node: usize, gpus: u32, room: u64) -> Vec<Tell> {
        self.members[node].opened = Some((gpus, room));
        let all = self.members.iter().all(|member| member.opened.is_some());
        if all && self.stopped.is_none() { vec![Tell::One(0, Down::MakeId)] } else { Vec::new() }
    }

    fn begin(&self, id: &str) -> Vec<Tell> {
        let opened: Vec<_> = self.members.iter().map(|member| member.opened.unwrap_or_default()).collect();
        let ranks = opened.iter().map(|(gpus, _)| gpus).sum();
        let room = opened.iter().map(|(_, room)| *room).min().unwrap_or_default();
        let begin = opened.iter().enumerate().scan(0, |first_rank, (node, (gpus, _))| {
            let begin = Begin { id: id.to_owned(), first_rank: *first_rank, ranks, room };
            *first_rank += gpus;
            Some(Tell::One(node, Down::Begin(begin)))
        });
        begin.collect()
    }

    fn at(&mut self, node: usize, step: usize) -> Vec<Tell> {
        self.members[node].at = Some(step);
        let next = self.passed.map_or(0, |passed| passed + 1);
        let all = self.members.iter().all(|member| member.at >= Some(next));
        if !all || self.stopped.is_some() {
            return Vec::new();
        }
        self.passed = Some(next);
        vec![Tell::All(Down::Go(next))]
    }

    /// Handles a node whose connection ended or that no longer responds.
    pub(super) fn gone(&mut self, node: usize, why: &str) -> Vec<Tell> {
        let member = &mut self.members[node];
        if member.gone || self.ended {
            return Vec::new();
        }
        member.gone = true;
        let mut tell = if member.report.is_some() {
            Vec::new()
        } else {
            let text = format!("disconnected: {why}");
            let gpu = GpuReport {
                rank: u32::MAX,
                gpu: "?".to_owned(),
                sizes: Vec::new(),
                exchange: None,
                broken: Some(Broken::Stopped),
            };
            let name = member.name.clone().unwrap_or_else(|| format!("rank {node}"));
            member.report = Some(NodeReport { node: name, gpus: vec![gpu], other_way: None });
            self.stop(format!("{}: {text}", self.words(node)))
        };
        tell.extend(self.end());
        tell
    }

    /// Stops all nodes.
    pub(super) fn stop(&mut self, why: String) -> Vec<Tell> {
        if self.stopped.is_some() || self.ended {
            return Vec::new();
        }
        self.stopped = Some(why.clone());
        vec![Tell::All(Down::Stop(why))]
    }

    /// Ends the test when all reports are there.
    fn end(&mut self) -> Vec<Tell> {
        if self.ended || self.members.iter().any(|member| member.report.is_none()) {
            return Vec::new();
        }
        self.ended = true;
        let reports = self.members.iter().filter_map(|member| member.report.clone()).collect();
        vec![Tell::All(Down::All { reports, why: self.stopped.clone() })]
    }

    pub(super) const fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// Returns the nodes that never joined.
    pub(super) fn missing(&self) -> Vec<usize> {
        self.without(|member| member.name.is_some())
    }

    /// Returns the nodes that the others wait for: their GPUs are not open, or they have not reached the next step.
    pub(super) fn late(&self) -> Vec<usize> {
        let next = self.passed.map_or(0, |passed| passed + 1);
        let begun = self.members.iter().any(|member| member.at.is_some());
        if begun {
            let waited_for = self.members.iter().any(|member| member.at >= Some(next));
            return if waited_for { self.without(|member| member.at >= Some(next)) } else { Vec::new() };
        }
        self.without(|member| member.opened.is_some())
    }

    /// Returns the nodes without a report.
    pub(super) fn silent(&self) -> Vec<usize> {
        self.without(|member| member.report.is_some())
    }

    fn without(&self, has: impl Fn(&Member) -> bool) -> Vec<usize> {
        (0..self.members.len()).filter(|node| !has(&self.members[*node])).collect()
    }

    /// Formats `rank 3 (gpu09)`.
    pub(super) fn words(&self, node: usize) -> String {
        let name = self.members.get(node).and_then(|member| member.name.as_ref());
        name.map_or_else(|| format!("rank {node}"), |name| format!("rank {node} ({name})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(nodes: usize) -> Steps {
        let mut steps = Steps::new(nodes);
        for node in 0..nodes {
            assert!(steps.came(node, &format!("n{node}")));
            let told = steps.hear(node, Up::Opened { gpus: 2, room: 100 - node as u64 });
            assert_eq!(!told.is_empty(), node + 1 == nodes, "only when all are there");
        }
        steps
    }

    fn report(node: usize) -> NodeReport {
        NodeReport { node: format!("n{node}"), gpus: Vec::new(), other_way: None }
    }

    #[test]
    fn ranks_follow_the_nodes_and_nobody_gets_ahead() {
        let mut steps = opened(3);
        let told = steps.hear(0, Up::Id("abc".to_owned()));
        let firsts: Vec<_> = told
            .iter()
            .map(|tell| match tell {
                Tell::One(node, Down::Begin(begin)) => (*node, begin.first_rank, begin.ranks, begin.room),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(firsts, [(0, 0, 6, 98), (1, 2, 6, 98), (2, 4, 6, 98)]);
        assert!(steps.hear(1, Up::At(0)).is_empty() && steps.hear(0, Up::At(0)).is_empty());
        assert_eq!(steps.late(), [2]);
        assert_eq!(steps.hear(2, Up::At(0)), [Tell::All(Down::Go(0))]);
        assert!(steps.late().is_empty(), "no node waits for another");
        assert!(steps.hear(2, Up::At(1)).is_empty());
        assert_eq!(steps.late(), [0, 1]);
    }

    #[test]
    fn one_that_breaks_stops_all_and_all_reports_make_the_end() {
        let mut steps = opened(2);
        let told = steps.hear(1, Up::Broken("out of memory".to_owned()));
        assert_eq!(told, [Tell::All(Down::Stop("rank 1 (n1): out of memory".to_owned()))]);
        assert!(steps.hear(0, Up::Broken("me too".to_owned())).is_empty(), "the first reason is the reason");
        assert!(steps.hear(0, Up::Report(report(0))).is_empty());
        assert_eq!(steps.silent(), [1]);
        let told = steps.hear(1, Up::Report(report(1)));
        let why = Some("rank 1 (n1): out of memory".to_owned());
        assert_eq!(told, [Tell::All(Down::All { reports: vec![report(0), report(1)], why })]);
    }

    #[test]
    fn one_that_goes_away_is_named_and_the_others_come_to_an_end() {
        let mut steps = opened(2);
        let told = steps.gone(1, "connection reset");
        assert_eq!(told, [Tell::All(Down::Stop("rank 1 (n1): disconnected: connection reset".to_owned()))]);
        assert!(steps.gone(1, "again").is_empty());
        let told = steps.hear(0, Up::Report(report(0)));
        let [Tell::All(Down::All { reports, why: Some(why) })] = &told[..] else { panic!("{told:?}") };
        assert_eq!((reports.len(), why.contains("rank 1 (n1)")), (2, true));
    }

    #[test]
    fn a_place_is_taken_once_and_who_never_came_is_known() {
        let mut steps = Steps::new(3);
        assert!(steps.came(0, "a") && steps.came(2, "c"));
        assert!(!steps.came(2, "d") && !steps.came(9, "e"));
        assert_eq!(steps.missing(), [1]);
    }
}
