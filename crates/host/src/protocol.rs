//! What a controller and `doctor-node host` say to each other, over one connection for each question.
//!
//! The program says [`HELLO`] first. Only then is the question sent, as one line of JSON; the answer is one line too, and bears
//! the question's number. So whatever the connection did (an exit code that a shell made up, a silent second try, the words that
//! a login prints) cannot be taken for an answer, and a connection that broke before the hello has changed nothing.

use std::path::PathBuf;

use doctor_core::{
    ids::{NodeName, OpId, RunId, TestId},
    node::Marks,
    run::{JobSeen, NonEmpty},
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::{marks::MarkChange, reports::Reported};

/// The first line of the program. The number changes when the form of what follows does.
pub const HELLO: &str = "doctor-node host 1";

/// A question is one run's order with a policy, at the most.
pub const MOST_QUESTION: u64 = 4 * 1024 * 1024;

/// An answer is a look with the result documents of a host's runs, at the most.
pub const MOST_ANSWER: u64 = 32 * 1024 * 1024;

/// A longer result document is not carried, and the run is without one.
pub const MOST_DOCUMENT: u64 = 8 * 1024 * 1024;

/// Of a log that is carried: its end.
pub const MOST_LOG: u64 = 1024 * 1024;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// The answer bears it too.
    pub number: u64,
    pub ask: Ask,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    Look(Wanted),
    Start(Box<Start>),
    /// Ends the job of a run, if there is one.
    Cancel {
        run: RunId,
        /// It has this long to write what it has.
        grace: Span,
    },
    Mark(Mark),
    Repair(Box<Repair>),
    /// What the machine and its vendor's tool say of it. Asked again, it tells how far that has got.
    Report {
        op: OpId,
    },
}

/// What a look is to find.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Wanted {
    /// Runs whose jobs are asked about, with their documents and logs.
    pub runs: Vec<RunId>,
    /// Files that keep us off while they exist.
    pub locks: Vec<PathBuf>,
    /// Programs that may hold a GPU without using it.
    pub bystanders: Vec<String>,
}

/// A run to be started. Asked again, nothing more happens.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    pub run: RunId,
    pub node: NodeName,
    pub tests: NonEmpty<TestId>,
    pub limit: Span,
    /// The run's key in hexadecimal. Nowhere but in here and in the job's environment.
    pub key: String,
    /// Where logs and document belong; absent: in the run's directory, from which they are carried to who asks.
    pub outputs: Option<Outputs>,
    /// The text of the policy that the controller judges by.
    pub policy: Option<String>,
    /// The other hosts of a run over several; absent: it is for this one alone.
    #[serde(default)]
    pub together: Option<Together>,
    /// What counts as use: the host looks once more before it begins.
    pub users: Wanted,
    pub max_load_per_core: f64,
}

/// How the hosts of one run find each other.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Together {
    /// All of them, by rank.
    pub nodes: NonEmpty<NodeName>,
    /// `HOST:PORT`, where the first listens.
    pub rendezvous: String,
    /// What they know each other by.
    pub secret: String,
}

/// The secret is not for logs either.
impl std::fmt::Debug for Together {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Together").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

/// The key is not for logs.
impl std::fmt::Debug for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Start").field("run", &self.run).field("tests", &self.tests).finish_non_exhaustive()
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outputs {
    /// One for each test, in their order.
    pub logs: Vec<PathBuf>,
    pub document: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    pub op: OpId,
    pub change: MarkChange,
    /// A file that tells who logs in of the marks; absent: none is written.
    pub motd: Option<PathBuf>,
}

/// GPUs to be reset, or a machine to be rebooted, if nobody uses it. Asked again, it tells how far that has got.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {
    pub op: OpId,
    pub what: RepairKind,
    /// The command that does it, word by word.
    pub command: Vec<String>,
    /// The command is ended after this long.
    pub limit: Span,
    /// What counts as use.
    pub users: Wanted,
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

    /// As `doctor-node repair` has it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Reboot => "reboot",
        }
    }
}

/// How far a repair has got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Repaired {
    /// Seen to have happened: another boot, or a driver that asks for nothing more.
    Done,
    /// It was begun, and nobody has seen yet that it happened.
    UnderWay { text: String },
    /// Somebody uses the machine, or that cannot be ruled out: nothing was begun.
    InUse { by: String },
    /// It was tried and did not happen.
    Failed { text: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    pub number: u64,
    pub said: Said,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    Looked(Box<Look>),
    /// What has become of the run that was to be started.
    Started(JobSeen),
    /// Nothing was begun: somebody uses the host, or may.
    InUse {
        by: String,
    },
    Done,
    Repair(Repaired),
    Report(Reported),
    /// It could not be done; it may have been done in part.
    Failed {
        text: String,
    },
}

/// One host as it is now. What could not be learnt is an error in its place, never a good value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Look {
    pub at: Timestamp,
    pub boot_id: String,
    pub cores: usize,
    /// The load average of one minute, of everybody.
    pub load: Result<f64, String>,
    /// Processes of others that hold a GPU open.
    pub gpus: Result<Vec<Process>, String>,
    /// Processes of others that have a terminal and are computing.
    pub terminals: Result<Vec<Process>, String>,
    /// Those of [`Wanted::locks`] that exist.
    pub locks: Vec<PathBuf>,
    /// A process of an earlier job that could not be killed.
    pub abandoned: Option<u32>,
    pub marks: Marks,
    /// Runs whose jobs are pending or running here.
    pub under_way: Vec<RunId>,
    /// One for each of [`Wanted::runs`].
    pub runs: Vec<SeenRun>,
}

/// Somebody's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenRun {
    pub run: RunId,
    pub seen: JobSeen,
    /// The result document, of a run that has ended and was to be carried.
    pub document: Option<String>,
    /// The end of its log, likewise.
    #[serde(default)]
    pub log: Option<String>,
    /// All hosts of a run over several; empty: it is for this one.
    #[serde(default)]
    pub nodes: Vec<NodeName>,
}

impl SeenRun {
    /// Without anything that came along.
    pub const fn bare(run: RunId, seen: JobSeen) -> Self {
        Self { run, seen, document: None, log: None, nodes: Vec::new() }
    }
}

/// The answer in a line, if it is one and bears this number.
///
/// # Errors
/// With what is wrong with it.
pub fn read_answer(line: &[u8], number: u64) -> Result<Said, String> {
    let answer: Answer = serde_json::from_slice(line).map_err(|error| format!("its answer does not parse: {error}"))?;
    if answer.number != number {
        return Err(format!("it answered question {} where {number} was asked", answer.number));
    }
    Ok(answer.said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_a_host_prints_is_an_answer_only_with_its_number(
            line in "(\\{|\\}|\"|:|,|number|said|done|failed|text|looked|7|8| |.){0,40}", number in 0..16_u64,
        ) {
            // Whether it parses or not, nothing breaks, and no line answers two questions.
            let answers = (0..16).filter(|asked| read_answer(line.as_bytes(), *asked).is_ok()).count();
            prop_assert!(answers <= 1);
            let answer = serde_json::to_vec(&Answer { number, said: Said::Failed { text: line.clone() } }).unwrap();
            let said = read_answer(&answer, number);
            let is_same = matches!(said, Ok(Said::Failed { text }) if text == line);
            prop_assert!(is_same);
            prop_assert!(!answer.contains(&b'\n'), "an answer is one line");
        }
    }

    #[test]
    fn an_answer_to_another_question_is_none() {
        assert!(matches!(read_answer(br#"{"number": 7, "said": "done"}"#, 7), Ok(Said::Done)));
        let error = read_answer(br#"{"number": 6, "said": "done"}"#, 7).unwrap_err();
        assert!(error.contains("question 6"), "{error}");
        for line in ["", "Welcome!", "{\"number\": 7}", "{\"number\": 7, \"said\": \"done\"", "[7]"] {
            assert!(read_answer(line.as_bytes(), 7).is_err(), "{line}");
        }
    }

    #[test]
    fn the_secrets_of_a_run_are_not_shown() {
        let start: Start = serde_json::from_str(
            r#"{"run": "r0000000000000", "node": "n", "tests": ["memory"], "limit": "1m", "key": "feedface",
                "outputs": null, "policy": null,
                "together": {"nodes": ["n", "m"], "rendezvous": "n:1", "secret": "cafebabe"},
                "users": {}, "max_load_per_core": 0.7}"#,
        )
        .unwrap();
        let shown = format!("{:?} {start:?}", start.together);
        assert!(!shown.contains("feedface") && !shown.contains("cafebabe"), "{shown}");
    }

    #[test]
    fn a_repair_is_called_as_the_program_calls_it() {
        for kind in RepairKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.word());
        }
    }
}
