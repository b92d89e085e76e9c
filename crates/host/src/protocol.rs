//! The protocol between a controller and `doctor-node host`: one connection per request.
//!
//! The program sends [`HELLO`] first. The client then sends the request as one line of JSON, and the program replies
//! with one line that repeats the request's number. Shell exit codes, silent reconnects and login banners can therefore
//! never be mistaken for a reply, and a connection that breaks before the hello has changed nothing.

use std::path::PathBuf;

use doctor_core::{
    ids::{NodeName, OpId, RunId, TestId},
    node::Marks,
    run::{NonEmpty, ObservedJobState},
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::{jobs::JobRemains, marks::MarkChange, vendor_reports::ReportProgress};

/// The first line that the program prints. The number is the protocol version.
pub const HELLO: &str = "doctor-node host 1";

/// The largest request, in bytes: the parameters of one run with a policy.
pub const MAX_REQUEST_BYTES: u64 = 4 * 1024 * 1024;

/// The largest reply, in bytes: a host's status with the result documents of its runs.
pub const MAX_RESPONSE_BYTES: u64 = 32 * 1024 * 1024;

/// The largest result document that a reply carries, in bytes. A longer one is dropped, and the run has no document.
pub const MAX_DOCUMENT_BYTES: u64 = 8 * 1024 * 1024;

/// The number of bytes kept from the end of a log that a reply carries.
pub const MAX_LOG_BYTES: u64 = 1024 * 1024;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestFrame {
    /// Repeated in the reply.
    pub number: u64,
    pub request: HostRequest,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostRequest {
    Status(StatusQuery),
    Start(Box<StartRun>),
    /// Ends the job of a run, if there is one.
    Cancel {
        run: RunId,
        /// How long the job may take to write its results before it is killed.
        grace: Span,
    },
    Mark(MarkRequest),
    Repair(Box<RepairRequest>),
    /// Collects the machine's own report and its vendor's. Repeating the request returns the progress.
    Report {
        op: OpId,
    },
}

/// What a status request collects, and what counts as use of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StatusQuery {
    /// Runs whose job state, result document and log are returned.
    pub runs: Vec<RunId>,
    /// Lock files: while one exists, the host counts as busy.
    pub locks: Vec<PathBuf>,
    /// Programs that may hold a GPU open without using it.
    pub ignored_programs: Vec<String>,
}

/// Starts a run. Idempotent: repeating the request starts nothing more.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartRun {
    pub run: RunId,
    pub node: NodeName,
    pub tests: NonEmpty<TestId>,
    pub limit: Span,
    /// The run's key in hexadecimal. It is stored only here and in the job's environment.
    pub key: String,
    /// Where logs and the document are written. `None`: into the run's directory; replies carry them to the controller.
    pub outputs: Option<Outputs>,
    /// The text of the controller's policy, used for classification.
    pub policy: Option<String>,
    /// The other hosts of a multi-node run. `None`: the run uses this host only.
    #[serde(default)]
    pub multi_node: Option<MultiNode>,
    /// What counts as use of the host, which checks once more before it starts the job.
    pub status_query: StatusQuery,
    pub max_load_per_core: f64,
}

/// How the hosts of a multi-node run find each other.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultiNode {
    /// All hosts in rank order.
    pub nodes: NonEmpty<NodeName>,
    /// `HOST:PORT` on which the first host listens.
    pub rendezvous: String,
    /// The secret that authenticates the hosts to each other.
    pub secret: String,
}

/// Omits the secret, so that it cannot reach a log.
impl std::fmt::Debug for MultiNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MultiNode").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

/// Omits the key, so that it cannot reach a log.
impl std::fmt::Debug for StartRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StartRun").field("run", &self.run).field("tests", &self.tests).finish_non_exhaustive()
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outputs {
    /// One path per test, in the order of the tests.
    pub logs: Vec<PathBuf>,
    pub document: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MarkRequest {
    pub op: OpId,
    pub change: MarkChange,
    /// A message-of-the-day file that shows the marks to users who log in. `None`: none is written.
    pub motd: Option<PathBuf>,
}

/// Resets the GPUs or reboots the machine if it is not in use. Repeating the request returns the progress.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepairRequest {
    pub op: OpId,
    pub kind: RepairKind,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The command is killed after this long.
    pub limit: Span,
    /// What counts as use of the host.
    pub status_query: StatusQuery,
    pub max_load_per_core: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RepairKind {
    Reset,
    Reboot,
}

impl RepairKind {
    pub const ALL: [Self; 2] = [Self::Reset, Self::Reboot];

    /// The word that `doctor-node repair` uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Reboot => "reboot",
        }
    }
}

/// The progress of a repair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RepairProgress {
    /// Confirmed: the boot id changed, or the driver no longer requests a reset.
    Done,
    /// Started, not yet confirmed.
    InProgress { text: String },
    /// The machine is in use, or its use could not be determined. Nothing was started.
    InUse { by: String },
    /// Attempted without effect.
    Failed { text: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ResponseFrame {
    pub number: u64,
    pub response: HostResponse,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostResponse {
    Status(Box<HostStatus>),
    /// The state of the job that the request was to start.
    Started(ObservedJobState),
    /// The host is in use, or its use could not be determined. Nothing was started.
    InUse {
        by: String,
    },
    Done,
    Repair(RepairProgress),
    Report(ReportProgress),
    /// The request failed, possibly after part of it took effect.
    Failed {
        text: String,
    },
}

/// The current status of one host. A value that could not be read is an error in its place, never a healthy default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostStatus {
    pub at: Timestamp,
    pub boot_id: String,
    pub cores: usize,
    /// The one-minute load average, our own jobs included.
    pub load: Result<f64, String>,
    /// Foreign processes that hold a GPU open.
    pub gpu_users: Result<Vec<Process>, String>,
    /// Foreign processes that have a terminal and use CPU time.
    pub terminal_users: Result<Vec<Process>, String>,
    /// The files of [`StatusQuery::locks`] that exist.
    pub locks: Vec<PathBuf>,
    /// The process id of an earlier job that could not be killed.
    pub unkillable_pid: Option<u32>,
    pub marks: Marks,
    /// Runs whose jobs are pending or running on this host.
    pub active_runs: Vec<RunId>,
    /// One entry for each of [`StatusQuery::runs`].
    pub runs: Vec<RunStatus>,
}

/// A process on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStatus {
    pub run: RunId,
    pub job: ObservedJobState,
    /// The result document, once the run has ended and if the reply is to carry it.
    pub document: Option<String>,
    /// The end of the log, under the same conditions.
    #[serde(default)]
    pub log: Option<String>,
    /// What is left of a job that ended, if it may have no result.
    #[serde(default)]
    pub remains: Option<JobRemains>,
    /// All hosts of a multi-node run. Empty: the run uses this host only.
    #[serde(default)]
    pub nodes: Vec<NodeName>,
}

impl RunStatus {
    /// A run without document, log or other hosts.
    pub const fn without_result(run: RunId, seen: ObservedJobState) -> Self {
        Self { run, job: seen, document: None, log: None, remains: None, nodes: Vec::new() }
    }
}

/// Parses a reply and checks that it carries this request number.
///
/// # Errors
/// Returns the reason if the line is no reply or carries another number.
pub fn parse_response(line: &[u8], number: u64) -> Result<HostResponse, String> {
    let answer: ResponseFrame =
        serde_json::from_slice(line).map_err(|error| format!("cannot parse its response: {error}"))?;
    if answer.number != number {
        return Err(format!("it answered request {} instead of {number}", answer.number));
    }
    Ok(answer.response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_line_is_a_response_only_with_the_number_of_its_request(
            line in "(\\{|\\}|\"|:|,|number|said|done|failed|text|looked|7|8| |.){0,40}", number in 0..16_u64,
        ) {
            // Parsing may fail but not panic, and no line answers two requests.
            let accepted = (0..16).filter(|requested| parse_response(line.as_bytes(), *requested).is_ok()).count();
            prop_assert!(accepted <= 1);
            let response = serde_json::to_vec(&ResponseFrame { number, response: HostResponse::Failed { text: line.clone() } }).unwrap();
            let parsed = parse_response(&response, number);
            let is_same = matches!(parsed, Ok(HostResponse::Failed { text }) if text == line);
            prop_assert!(is_same);
            prop_assert!(!response.contains(&b'\n'), "an answer is one line");
        }
    }

    #[test]
    fn a_response_to_another_request_is_rejected() {
        assert!(matches!(parse_response(br#"{"number": 7, "response": "done"}"#, 7), Ok(HostResponse::Done)));
        let error = parse_response(br#"{"number": 6, "response": "done"}"#, 7).unwrap_err();
        assert!(error.contains("request 6"), "{error}");
        for line in ["", "Welcome!", "{\"number\": 7}", "{\"number\": 7, \"response\": \"done\"", "[7]"] {
            assert!(parse_response(line.as_bytes(), 7).is_err(), "{line}");
        }
    }

    #[test]
    fn debug_output_contains_no_secrets_of_a_run() {
        let start: StartRun = serde_json::from_str(
            r#"{"run": "r0000000000000", "node": "n", "tests": ["memory"], "limit": "1m", "key": "feedface",
                "outputs": null, "policy": null,
                "multi_node": {"nodes": ["n", "m"], "rendezvous": "n:1", "secret": "cafebabe"},
                "status_query": {}, "max_load_per_core": 0.7}"#,
        )
        .unwrap();
        let printed = format!("{:?} {start:?}", start.multi_node);
        assert!(!printed.contains("feedface") && !printed.contains("cafebabe"), "{printed}");
    }

    #[test]
    fn a_repair_is_called_as_the_program_calls_it() {
        for kind in RepairKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
    }
}
