//! `doctor log RUN`: prints the logs of a run from the shared directory, also while it runs.

use std::{
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
    time::Duration,
};

use doctor_core::{
    ids::{NodeName, RunId},
    run::RunState,
    view,
};
use doctor_engine::share::Share;
use doctor_store::{Store, records::RunRecord};
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{comma_separated, format_time, sanitize},
};

/// Print the output of a run from the shared directory.
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

#[derive(Debug, Serialize)]
struct LogView {
    run: RunId,
    node: NodeName,
    path: PathBuf,
    state: &'static str,
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
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    show(context, &args.query, args.follow)
}

/// Prints the output of a run, and with `follow` also what is written until the run ends.
pub(super) fn show(context: &Context, args: &Query, follow: bool) -> Result<Exit> {
    let store = context.store()?;
    let share = context.share()?;
    let record = find(&store, args.run)?;
    let mut logs: Vec<LogTail> = Vec::new();
    for node in record.run.nodes.iter().filter(|node| args.node.as_ref().is_none_or(|only| only == *node)) {
        for test in record.run.tests.iter() {
            let file = Share::log_path(test, node, record.run.planned);
            let path = share.root().join(&file);
            logs.push(LogTail { share: share.clone(), file, node: node.clone(), path, printed: 0 });
        }
    }
    if logs.is_empty() {
        let (what, known) = ("node", comma_separated(record.run.nodes.iter()));
        return Err(Failure::Unknown {
            what,
            name: args.node.as_ref().map_or_else(String::new, ToString::to_string),
            known,
        });
    }
    if context.out.is_json() {
        return json(context, &record, logs);
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
    report_missing_log(context, &record, found, &logs)?;
    Ok(if found { Exit::Ok } else { Exit::ProblemsFound })
}

fn find(store: &Store, run: RunId) -> Result<RunRecord> {
    let known = "`doctor history` and `doctor why NODE` name runs".to_owned();
    store.run(run)?.ok_or_else(|| Failure::Unknown { what: "run", name: run.to_string(), known })
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

fn json(context: &Context, record: &RunRecord, logs: Vec<LogTail>) -> Result<Exit> {
    let mut views = Vec::new();
    for mut log in logs {
        let Some(text) = log.read_new()? else { continue };
        views.push(LogView { run: record.run.id, node: log.node, path: log.path, state: state(record), text });
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
        let Some(text) = log.read_new()? else { continue };
        found = true;
        if several && first && !text.is_empty() {
            context.out.print(&format!("== {}\n", log.path.display()))?;
        }
        context.out.print(&text)?;
    }
    Ok(found)
}

impl LogTail {
    /// Returns what was written since the last call. `None`: the log does not exist (yet).
    fn read_new(&mut self) -> Result<Option<String>> {
        /// The maximum number of bytes read per call. Writers cap their logs; this limits one that does not.
        const MOST: u64 = 64 << 20;
        let failed = |source| Failure::File { operation: "reading the log", path: self.path.clone(), source };
        // No link is followed: nodes write to the shared directory, and this may run for a client of the API.
        let Some(mut file) = self.share.open_log(&self.file)? else { return Ok(None) };
        file.seek(SeekFrom::Start(self.printed)).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(MOST).read_to_end(&mut bytes).map_err(failed)?;
        self.printed += bytes.len() as u64;
        Ok(Some(sanitize(&String::from_utf8_lossy(&bytes))))
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
