//! The protocol between a controller and a simulated cluster in another process: one line of JSON in each direction.

use std::sync::Arc;

use doctor_backend::{
    BackendError, Change, Effect as After, JobOutput, JobRequest, NodeOp, ObservedJobFailure, ObservedNode, PolledJob,
};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{JobId, NodeName, OpId, RunId, TestId},
    job_failures::JobFailure,
    last_output::LastOutput,
    node::{Node, OurMark},
    run::{NonEmpty, ObservedJobState},
    snapshot::Capabilities,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::{
    disruptions::Incident,
    truth::Truth,
    world::{OperatorRequest, QueuedReport},
};

/// The limit of a line in bytes.
pub(crate) const MAX_LINE: u64 = 64 << 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Call {
    Hello,
    Now,
    Snapshot,
    Submit(WireJob),
    Poll(Vec<RunId>),
    RemainingOutput(RunId),
    Cancel(RunId),
    FailedWork(Timestamp),
    Apply { node: NodeName, op: OpId, what: WireChange },
    Reports,
    Acknowledge(Vec<u64>),
    AgentKey(NodeName),
    OperatorRequests,
    Inject(Incident),
    Truth,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Response {
    Hello {
        caps: Capabilities,
        speed: f64,
        now: Timestamp,
    },
    Now(Timestamp),
    Nodes(Vec<WireNode>),
    Job(JobId),
    Polled(Vec<WirePolled>),
    Output(Vec<LastOutput>),
    Failures(Vec<WireFailure>),
    Done,
    Reports(Vec<WireReport>),
    Key(String),
    Requests(Vec<WireRequest>),
    Injected(bool),
    Truth(Truth),
    Failed {
        text: String,
        effect: WireEffect,
    },
    /// The request could not be parsed.
    Refused(String),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireJob {
    run: RunId,
    nodes: NonEmpty<NodeName>,
    tests: NonEmpty<TestId>,
    limit: Span,
    key: String,
    outputs: Vec<WireOutput>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct WireOutput {
    node: NodeName,
    logs: Vec<std::path::PathBuf>,
    document: std::path::PathBuf,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WireChange {
    Mark(OurMark),
    Unmark(OurMark),
    Drain,
    Evict,
    Undrain,
    Reset,
    Reboot,
    Replace,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireNode {
    node: Arc<Node>,
    last_report: Option<Timestamp>,
    jobs: Vec<RunId>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WirePolled {
    seen: ObservedJobState,
    documents: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireFailure {
    work: JobFailure,
    nodes: Vec<NodeName>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireReport {
    number: u64,
    node: NodeName,
    bytes: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireRequest {
    at: Timestamp,
    node: NodeName,
    why: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WireEffect {
    NoneTryAgain,
    NoneGiveUp,
    Unknown,
}

impl From<&JobRequest> for WireJob {
    fn from(job: &JobRequest) -> Self {
        let output = |output: &JobOutput| WireOutput {
            node: output.node.clone(),
            logs: output.logs.clone(),
            document: output.document.clone(),
        };
        Self {
            run: job.run,
            nodes: job.nodes.clone(),
            tests: job.tests.clone(),
            limit: job.limit,
            key: job.key.to_hex(),
            outputs: job.outputs.iter().map(output).collect(),
        }
    }
}

impl WireJob {
    /// Converts the job; `None` if the key is invalid.
    pub(crate) fn into_request(self) -> Option<JobRequest> {
        let output = |output: WireOutput| JobOutput { node: output.node, logs: output.logs, document: output.document };
        Some(JobRequest {
            run: self.run,
            nodes: self.nodes,
            tests: self.tests,
            // A simulated node has no access to give.
            access: Vec::new(),
            limit: self.limit,
            key: RunKey::from_hex(&self.key)?,
            results: None,
            outputs: self.outputs.into_iter().map(output).collect(),
        })
    }
}

impl From<&Change> for WireChange {
    fn from(change: &Change) -> Self {
        match change {
            Change::Mark(mark) => Self::Mark(mark.clone()),
            Change::Unmark(mark) => Self::Unmark(mark.clone()),
            Change::Drain => Self::Drain,
            Change::Evict => Self::Evict,
            Change::Undrain => Self::Undrain,
            Change::Reset => Self::Reset,
            Change::Reboot => Self::Reboot,
            Change::Replace => Self::Replace,
        }
    }
}

impl WireChange {
    pub(crate) fn into_op(self, op: OpId) -> NodeOp {
        let what = match self {
            Self::Mark(mark) => Change::Mark(mark),
            Self::Unmark(mark) => Change::Unmark(mark),
            Self::Drain => Change::Drain,
            Self::Evict => Change::Evict,
            Self::Undrain => Change::Undrain,
            Self::Reset => Change::Reset,
            Self::Reboot => Change::Reboot,
            Self::Replace => Change::Replace,
        };
        NodeOp { op, what }
    }
}

impl From<ObservedNode> for WireNode {
    fn from(seen: ObservedNode) -> Self {
        Self { node: seen.node, last_report: seen.agent_last_seen, jobs: seen.jobs }
    }
}

impl From<WireNode> for ObservedNode {
    fn from(wire: WireNode) -> Self {
        Self { node: wire.node, agent_last_seen: wire.last_report, jobs: wire.jobs }
    }
}

impl From<ObservedJobFailure> for WireFailure {
    fn from(failed: ObservedJobFailure) -> Self {
        Self { work: failed.job, nodes: failed.nodes }
    }
}

impl From<WireFailure> for ObservedJobFailure {
    fn from(wire: WireFailure) -> Self {
        Self { job: wire.work, nodes: wire.nodes }
    }
}

impl From<PolledJob> for WirePolled {
    fn from(job: PolledJob) -> Self {
        Self { seen: job.state, documents: job.documents.iter().map(|bytes| to_hex(bytes)).collect() }
    }
}

impl WirePolled {
    pub(crate) fn into_polled(self) -> Option<PolledJob> {
        let documents = self.documents.iter().map(|text| from_hex(text)).collect::<Option<_>>()?;
        Some(PolledJob { state: self.seen, documents })
    }
}

impl From<QueuedReport> for WireReport {
    fn from(report: QueuedReport) -> Self {
        Self { number: report.number, node: report.node, bytes: to_hex(&report.bytes) }
    }
}

impl WireReport {
    pub(crate) fn into_report(self) -> Option<QueuedReport> {
        Some(QueuedReport { number: self.number, node: self.node, bytes: from_hex(&self.bytes)? })
    }
}

impl From<OperatorRequest> for WireRequest {
    fn from(request: OperatorRequest) -> Self {
        Self { at: request.at, node: request.node, why: request.why }
    }
}

impl From<WireRequest> for OperatorRequest {
    fn from(wire: WireRequest) -> Self {
        Self { at: wire.at, node: wire.node, why: wire.why }
    }
}

impl From<BackendError> for Response {
    fn from(error: BackendError) -> Self {
        let effect = match error.effect {
            After::NotAppliedRetry => WireEffect::NoneTryAgain,
            After::NotAppliedPermanent => WireEffect::NoneGiveUp,
            After::Unknown => WireEffect::Unknown,
        };
        Self::Failed { text: error.text, effect }
    }
}

impl From<WireEffect> for After {
    fn from(effect: WireEffect) -> Self {
        match effect {
            WireEffect::NoneTryAgain => Self::NotAppliedRetry,
            WireEffect::NoneGiveUp => Self::NotAppliedPermanent,
            WireEffect::Unknown => Self::Unknown,
        }
    }
}

/// Encodes bytes as hexadecimal digits: documents may be cut anywhere and need not be valid text.
fn to_hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let half = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(half(pair[0])? << 4 | half(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_survive_a_round_trip() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&bytes)).unwrap(), bytes);
        assert_eq!(from_hex("abc"), None);
        assert_eq!(from_hex("zz"), None);
    }
}
