//! The messages that nodes would send: what the shipped agent reports of the fake machine with eight GPUs.

use std::{collections::BTreeMap, process::Stdio};

use anyhow::{Context, Result, ensure};
use doctor_checks::{
    credential::Credential,
    document::{AgentReport, Document, RunKey, TestEvidence},
    probe::ProbeOutput,
    result_transport::{RESULTS_PATH, RUN_HEADER},
};
use doctor_core::{
    ids::{NodeName, RunId, TestId},
    node::Hardware,
    time::{Span, Timestamp},
};
use doctor_store::records::StoredRun;
use doctor_testbed::fake_machine::{FakeMachine, fake_nvidia_library};

use crate::{
    agent::{next_full_report, report_sink::ReportSink},
    process::Running,
    random::spread,
    shipped,
};

/// The percentage of nodes on which a check fails in every second report.
pub(super) const FAILING_PERCENT: u64 = 1;
/// That check, and its captured output when it fails.
pub(super) const FAILING_CHECK: &str = "memory";
const FAILING: &str = include_str!("../../../checks/fixtures/memory/nothing-available.txt");

/// The report of an agent that has just started.
#[derive(Debug)]
pub(super) struct Template(AgentReport);

impl Template {
    pub(super) fn record() -> Result<Self> {
        eprintln!("  recording a report of the agent");
        let library = fake_nvidia_library(&std::env::current_exe().context("finding this program")?);
        let machine = FakeMachine::hgx_h100().install(&shipped::doctor_node()?, &library);
        let key = RunKey::new([7; 32]);
        let sink = ReportSink::open()?;
        let controller = Some(sink.address().to_owned());
        let credential =
            Credential { node: NodeName::new("bench")?, key: key.clone(), controller, fingerprints: Vec::new() };
        let _agent = Running::start(machine.agent(&credential.text()).stderr(Stdio::null()))?;
        let report = next_full_report(&sink, &key)?;
        ensure!(report.checks.len() >= 70, "the agent reports {} checks", report.checks.len());
        Ok(Self(report))
    }

    /// Returns whether the agent runs this check.
    pub(super) fn has(&self, test: &TestId) -> bool {
        self.0.checks.iter().any(|evidence| evidence.test == *test)
    }
}

/// A signed message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) path: &'static str,
    pub(super) headers: String,
    pub(super) bytes: Vec<u8>,
}

impl Message {
    pub(super) fn is_document(&self) -> bool {
        self.path == RESULTS_PATH
    }
}

/// Makes messages, and knows what the store must have of them.
#[derive(Debug)]
pub(super) struct Messages {
    template: AgentReport,
    agents: Vec<(NodeName, RunKey)>,
    runs: Vec<StoredRun>,
    next_agent: usize,
    number: u64,
    /// The number of the last report of each node, and whether the check fails in it.
    pub(super) last_reports: BTreeMap<NodeName, (u64, bool)>,
    /// Runs whose documents were made.
    pub(super) sent_runs: Vec<RunId>,
}

impl Messages {
    pub(super) fn new(template: Template, agents: Vec<(NodeName, RunKey)>, runs: Vec<StoredRun>) -> Self {
        let (last_reports, sent_runs) = (BTreeMap::new(), Vec::new());
        Self { template: template.0, agents, runs, next_agent: 0, number: 1, last_reports, sent_runs }
    }

    pub(super) const fn checks(&self) -> usize {
        self.template.checks.len()
    }

    /// Returns the messages of one round, documents among the reports. No node sends two reports.
    pub(super) fn round(&mut self, results: usize, documents: usize) -> Result<Vec<Message>> {
        let documents = documents.min(self.runs.len());
        let at = now();
        self.number += 1;
        let mut messages = Vec::with_capacity(results);
        for _ in 0..documents {
            let run = self.runs.pop().context("there are as many runs")?;
            messages.push(self.document(&run)?);
            self.sent_runs.push(run.run.id);
        }
        for _ in documents..results {
            let (node, key) = self.agents[self.next_agent % self.agents.len()].clone();
            self.next_agent += 1;
            messages.push(self.report(&node, &key, at)?);
        }
        messages.sort_by_cached_key(|message| spread(message.bytes.iter().take(64).map(|byte| u64::from(*byte)).sum()));
        Ok(messages)
    }

    fn report(&mut self, node: &NodeName, key: &RunKey, at: Timestamp) -> Result<Message> {
        let is_failing = node.as_str().bytes().fold(7, |seen, byte| spread(seen ^ u64::from(byte))) % 100
            < FAILING_PERCENT
            && self.number.is_multiple_of(2);
        let mut checks = self.template.checks.clone();
        if is_failing {
            checks.iter_mut().filter(|evidence| evidence.test.as_str() == FAILING_CHECK).for_each(fail);
        }
        let (sequence, hardware) = (self.number, self.hardware(node));
        let report = AgentReport { node: node.clone(), sequence, at, checks, hardware, ..self.template.clone() };
        self.last_reports.insert(node.clone(), (sequence, is_failing));
        let headers = format!("x-doctor-node: {node}\r\n");
        Ok(Message { path: "/api/v1/ingest", headers, bytes: report.sign(key)? })
    }

    fn document(&self, stored: &StoredRun) -> Result<Message> {
        let (run, node) = (&stored.run, stored.run.nodes.first());
        // By the clock of the simulated cluster.
        let (started, ended) = (run.planned.plus(Span::from_secs(1)), run.planned.plus(Span::from_secs(2)));
        let of_run = |evidence: &&TestEvidence| run.tests.contains(&evidence.test);
        let tests: Vec<TestEvidence> = self.template.checks.iter().filter(of_run).cloned().collect();
        ensure!(tests.len() == run.tests.len(), "{} has tests that the agent does not run", run.id);
        let document = Document {
            run: run.id,
            node: node.clone(),
            hardware: self.hardware(node),
            started,
            ended,
            tests,
            uptime: self.template.uptime,
            machine: self.template.machine.clone(),
        };
        let headers = format!("{RUN_HEADER}: {}\r\nx-doctor-node: {node}\r\n", run.id);
        Ok(Message { path: RESULTS_PATH, headers, bytes: document.sign(&stored.key)? })
    }

    fn hardware(&self, node: &NodeName) -> Hardware {
        Hardware { board_serial: Some(format!("SN-{node}")), gpu_uuids: Vec::new(), ..self.template.hardware.clone() }
    }
}

fn fail(evidence: &mut TestEvidence) {
    for (_, output) in &mut evidence.probes {
        *output = ProbeOutput::Text(FAILING.to_owned());
    }
}

fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
