//! `doctor log RUN`: prints the logs of a run from the shared directory, also while it runs, and the last output of a job that
//! ended without a complete result, from the store.

use std::{path::PathBuf, time::Duration};

use doctor_core::{
    ids::{NodeName, RunId},
    last_output::{LastOutput, last_line},
    run::{RunEnd, RunState},
    view,
};
use doctor_engine::share::{LogRange, Share, ShareError};
use doctor_store::{Store, records::RunRecord};
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{comma_separated, format_time, sanitize},
};

/// Print the output of a run.
///
/// The logs of its tests come from the shared directory. For a run that ended without a complete result, the end of what its job
/// printed and how the cluster says it ended follow: a missing program, an image that cannot be pulled, a killed process.
///
/// A log that is not a regular file is named and not opened: nodes write to the shared directory. A shared directory that does not
/// answer is an error after some seconds.
///
/// Exit code 1 if there is no output.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub query: Query,
    /// Follow the output until the run ends.
    #[arg(long, short)]
    pub follow: bool,
}

/// The run.
#[derive(Debug, clap::Args)]
pub(crate) struct Query {
    /// Run id, as `doctor history` prints it.
    pub run: RunId,
    /// Only this node, for a run over several nodes.
    #[arg(long, value_name = "NODE")]
    pub node: Option<NodeName>,
}

/// The interval at which a growing log is read.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// A client of the API gets at most so much of the end of each log, and of all logs of a run together: nodes write the logs, and
/// the controller keeps the reply in memory.
const CLIENT_LOG: u64 = 1 << 20;
const CLIENT_LOGS: u64 = 4 << 20;
const CLIENT_LOG_FLOOR: u64 = 16 << 10;

#[derive(Debug, Serialize)]
struct LogView {
    run: RunId,
    node: NodeName,
    /// `None`: the text is the last output of the job, from the store.
    path: Option<PathBuf>,
    state: &'static str,
    /// How the job ended, in the cluster's words.
    ending: Option<String>,
    /// The bytes of the log before the text.
    start: u64,
    text: String,
}

/// A log file and the number of bytes printed.
struct LogTail {
    share: Share,
    /// Relative to the shared directory.
    file: PathBuf,
    node: NodeName,
    path: PathBuf,
    printed: u64,
    /// How much of the end of the log is read, at most; `None`: all of it.
    limit: Option<u64>,
    /// The bytes before those that were printed first.
    start: u64,
    /// The end of what was printed.
    end: String,
    /// Whether something else than a file was found in its place, which was printed.
    is_spoilt: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    show(context, &args.query, args.follow)
}

/// Prints the output of a run, and with `follow` also what is written until the run ends.
pub(super) fn show(context: &Context, args: &Query, follow: bool) -> Result<Exit> {
    let store = context.store()?;
    let record = find(&store, args.run)?;
    let is_wanted = |node: &NodeName| args.node.as_ref().is_none_or(|only| only == node);
    if !record.run.nodes.iter().any(is_wanted) {
        let (what, known) = ("node", comma_separated(record.run.nodes.iter()));
        return Err(Failure::Unknown {
            what,
            name: args.node.as_ref().map_or_else(String::new, ToString::to_string),
            known,
        });
    }
    // Without the shared directory, the last output of a job is still there.
    let share = context.share();
    let mut logs: Vec<LogTail> = Vec::new();
    if let Ok(share) = &share {
        let count = record.run.nodes.iter().filter(|node| is_wanted(node)).count() * record.run.tests.iter().count();
        let limit = CLIENT_LOGS / u64::try_from(count).unwrap_or(u64::MAX).max(1);
        let limit = context.is_for_client().then_some(limit.clamp(CLIENT_LOG_FLOOR, CLIENT_LOG));
        for node in record.run.nodes.iter().filter(|node| is_wanted(node)) {
            for test in record.run.tests.iter() {
                let file = Share::log_path(test, node, record.run.planned);
                let path = share.root().join(&file);
                logs.push(LogTail {
                    share: share.clone(),
                    file,
                    node: node.clone(),
                    path,
                    printed: 0,
                    limit,
                    start: 0,
                    end: String::new(),
                    is_spoilt: false,
                });
            }
        }
    }
    if context.out.is_json() {
        let outputs = last_outputs(&store, &record, is_wanted)?;
        return json(context, &record, logs, outputs);
    }
    let mut found = false;
    let mut record = record;
    loop {
        // Check for the end before reading, so that everything written before the end is printed.
        let ended = is_ended(&record);
        found |= print_new(context, &mut logs)?;
        if ended || !follow {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
        record = find(&store, args.run)?;
    }
    for output in last_outputs(&store, &record, is_wanted)? {
        found |= print_last_output(context, &output, &logs)?;
    }
    if let (false, Err(error)) = (found, share) {
        return Err(error);
    }
    let is_spoilt = logs.iter().any(|log| log.is_spoilt);
    report_missing_log(context, &record, found || is_spoilt, &logs)?;
    Ok(if found && !is_spoilt { Exit::Ok } else { Exit::ProblemsFound })
}

fn find(store: &Store, run: RunId) -> Result<RunRecord> {
    let known = "`doctor history` and `doctor why NODE` name runs".to_owned();
    store.run(run)?.ok_or_else(|| Failure::Unknown { what: "run", name: run.to_string(), known })
}

/// Returns the last output of the run's job. A refused submission is output only until the job is submitted after all. Of a complete
/// run, only a log that could not be saved in time is there.
fn last_outputs(store: &Store, record: &RunRecord, is_wanted: impl Fn(&NodeName) -> bool) -> Result<Vec<LastOutput>> {
    let shows = |output: &LastOutput| match &record.run.state {
        RunState::Planned | RunState::Ended(RunEnd::Incomplete { .. } | RunEnd::NotStarted(_)) => true,
        RunState::Ended(RunEnd::Completed(_)) => output.ending.is_none(),
        RunState::Submitted { .. } | RunState::Running { .. } => false,
    };
    let mut outputs = store.job_output(record.run.id)?;
    outputs.retain(|output| is_wanted(&output.node) && shows(output));
    Ok(outputs)
}

/// Prints what the logs do not have. Returns whether there was anything.
fn print_last_output(context: &Context, output: &LastOutput, logs: &[LogTail]) -> Result<bool> {
    let last = last_line(&output.text);
    let in_log = |line: &String| logs.iter().any(|log| log.node == output.node && log.end.contains(line.as_str()));
    let is_new = last.as_ref().is_some_and(|line| !in_log(line));
    if is_new {
        let text = sanitize(&output.text);
        context.out.print(&format!("== last output of the job on {}\n{}\n", output.node, text.trim_end()))?;
    }
    if let Some(ending) = &output.ending {
        context.out.print(&format!("== on {}: {}\n", output.node, sanitize(ending)))?;
    }
    Ok(last.is_some() || output.ending.is_some())
}

const fn is_ended(record: &RunRecord) -> bool {
    matches!(record.run.state, RunState::Ended(_))
}

fn state(record: &RunRecord) -> &'static str {
    match &record.run.state {
        RunState::Planned => "planned",
        RunState::Submitted { .. } => "pending",
        RunState::Running { .. } => "running",
        RunState::Ended(end) => view::run_end(end).0,
    }
}

fn json(context: &Context, record: &RunRecord, logs: Vec<LogTail>, outputs: Vec<LastOutput>) -> Result<Exit> {
    let mut views = Vec::new();
    for mut log in logs {
        let Some(text) = log.read_new()?.unwrap_or_else(|error| Some(format!("{error}\n"))) else { continue };
        let (run, path, start) = (record.run.id, Some(log.path), log.start);
        views.push(LogView { run, node: log.node, path, state: state(record), ending: None, start, text });
    }
    let is_complete = matches!(record.run.state, RunState::Ended(RunEnd::Completed(_)));
    for LastOutput { node, ending, text } in outputs {
        if is_complete && views.iter().any(|view: &LogView| view.node == node) {
            continue;
        }
        views.push(LogView { run: record.run.id, node, path: None, state: state(record), ending, start: 0, text });
    }
    context.out.json(&views)?;
    Ok(if views.is_empty() { Exit::ProblemsFound } else { Exit::Ok })
}

/// Prints new output. Returns whether any log exists.
fn print_new(context: &Context, logs: &mut [LogTail]) -> Result<bool> {
    let several = logs.len() > 1;
    let mut found = false;
    for log in logs {
        let first = log.printed == 0;
        let text = match log.read_new()? {
            Ok(Some(text)) => text,
            Ok(None) => continue,
            Err(error) => {
                if !std::mem::replace(&mut log.is_spoilt, true) {
                    context.out.print(&format!("== {error}\n"))?;
                }
                continue;
            }
        };
        found = true;
        if several && first && !text.is_empty() {
            context.out.print(&format!("== {}\n", log.path.display()))?;
        }
        if first && log.start > 0 {
            context.out.print(&omitted(log.start, &log.path.display().to_string()))?;
        }
        context.out.print(&text)?;
    }
    Ok(found)
}

/// Says that the beginning of a log is not shown.
pub(crate) fn omitted(bytes: u64, path: &str) -> String {
    format!("[{bytes} bytes before this are not sent to clients; they are in {path}]\n")
}

impl LogTail {
    /// Returns what was written since the last call. `None`: the log does not exist (yet). The inner error: something else is in
    /// its place.
    ///
    /// # Errors
    /// If the shared directory cannot be read, or does not answer.
    fn read_new(&mut self) -> Result<std::result::Result<Option<String>, ShareError>> {
        /// The maximum number of bytes read per call. Writers cap their logs; this limits one that does not.
        const MOST: u64 = 64 << 20;
        let range = match self.limit {
            Some(limit) if self.printed == 0 => LogRange::Last(limit),
            limit => LogRange::From(self.printed, limit.unwrap_or(MOST)),
        };
        let file = self.file.clone();
        let part = match self.share.read("reading a log", move |files| files.read_log(&file, range))? {
            Ok(Some(part)) => part,
            Ok(None) => return Ok(Ok(None)),
            Err(error) if error.is_wrong_kind() => return Ok(Err(error)),
            Err(error) => return Err(error.into()),
        };
        if self.printed == 0 {
            (self.start, self.printed) = (part.start, part.start);
        }
        let bytes = part.bytes;
        self.printed += bytes.len() as u64;
        let text = sanitize(&String::from_utf8_lossy(&bytes));
        self.keep_end(&text);
        Ok(Ok(Some(text)))
    }
}

impl LogTail {
    /// Keeps the end of what was printed.
    fn keep_end(&mut self, text: &str) {
        /// As much as is kept of a job's last output, which may repeat it.
        const KEPT: usize = 2 * doctor_core::last_output::MAX_BYTES;
        self.end.push_str(text);
        let mut surplus = self.end.len().saturating_sub(KEPT);
        while !self.end.is_char_boundary(surplus) {
            surplus += 1;
        }
        self.end.drain(..surplus);
    }
}

fn report_missing_log(context: &Context, record: &RunRecord, found: bool, logs: &[LogTail]) -> Result<()> {
    if !found {
        let path = logs.first().map_or_else(String::new, |log| log.path.display().to_string());
        context.out.print(&format!(
            "Run {} has no log.\nIt is {} and was planned at {} UTC; expected log file: {path}.\n",
            record.run.id,
            state(record),
            format_time(record.run.planned)
        ))?;
    }
    Ok(())
}
