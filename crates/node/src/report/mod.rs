//! `doctor-node report`: collects hardware details and the vendor's diagnostics for a repair or a support case.
//!
//! It writes `machine.json` and the output of `nvidia-bug-report.sh` into a directory. The tool inspects everything and
//! may hang with the driver: it has a time limit, and partial output is kept. If it did not run, `machine.json` states
//! why.
//!
//! On Slurm the directory is on the share, which other nodes write: the tool runs in a private directory, and the files are written
//! through a handle that follows no link.

mod machine;
mod workspace;

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context;
use doctor_checks::result_transport::PackedDocument;
use doctor_core::time::Span;
use doctor_host::{
    shared_directory::{EntryKind, SharedDirectory},
    vendor_reports::{self, MACHINE_FILE, MAX_CARRIED_BYTES, MAX_FILE_BYTES, VENDOR_FILES},
};
use serde_json::json;
use workspace::Workspace;

use crate::{
    job::shared_file,
    runner::{
        ProbeRunner,
        child::{self, ChildOutcome, Echo, Limits},
    },
    stop::Stop,
};

const TOOL: &str = "nvidia-bug-report.sh";
/// Where the driver's package installs it, below the machine's root.
const TOOL_FOLDERS: [&str; 2] = ["usr/bin", "usr/local/bin"];
/// A directory of ours on the machine, below which the tool runs if we are in a container.
const MACHINE_FOLDER: &str = "var/lib/cluster-doctor";
/// What the tool prints besides its file.
const MAX_OUTPUT_BYTES: usize = 1 << 20;
const GRACE: Duration = Duration::from_secs(5);

/// Writes both files and returns a one-line summary.
///
/// # Errors
/// If the directory cannot be written.
pub fn report(
    out: &Path,
    root: &Path,
    limit: Span,
    metadata: &str,
    runner: &dyn ProbeRunner,
    stop: &Stop,
) -> anyhow::Result<String> {
    let directory = shared_file::make_run_directory(out).with_context(|| format!("cannot create {}", out.display()))?;
    remove_earlier(&directory)?;
    let mut machine = machine::describe(metadata, runner);
    let taken = run_vendor_tool(root, limit, stop).and_then(|file| {
        write(&directory, file.name, &mut file.content.take(MAX_FILE_BYTES)).map_err(|error| format!("{error:#}"))?;
        Ok(file.problem.map_or_else(|| file.name.to_owned(), |problem| format!("{}, truncated: {problem}", file.name)))
    });
    let message = match &taken {
        Ok(file) => format!("{TOOL} wrote {file}"),
        Err(error) => format!("no report from {TOOL}: {error}"),
    };
    machine["vendor_report"] = match taken {
        Ok(file) => json!({ "file": file }),
        Err(error) => json!({ "why_not": error }),
    };
    write(&directory, MACHINE_FILE, &mut &*serde_json::to_vec_pretty(&machine)?)?;
    Ok(message)
}

/// Returns both files as the lines of a log, for a job that shares no directory with the controller.
///
/// # Errors
/// If there is no report in the directory, or it is too long for a log.
pub fn carried(out: &Path) -> anyhow::Result<String> {
    let (data, below) = shared_file::split_run_directory(out);
    let report = vendor_reports::read(&data, &below, MAX_CARRIED_BYTES).context("cannot read the report")?;
    let report = report.context("the report is gone")?;
    let packed = PackedDocument::pack(&serde_json::to_vec(&report)?).context("cannot pack the report")?;
    Ok(packed.to_log_lines())
}

/// Removes the vendor's files of an earlier run, which must not be taken for this one's. Nothing but a plain file ever is.
fn remove_earlier(directory: &SharedDirectory) -> anyhow::Result<()> {
    for name in VENDOR_FILES {
        let removed = directory.remove(name.as_ref());
        let is_file = directory.entry(Path::new(name)).map(|found| found.is_some_and(|e| e.kind == EntryKind::File));
        if is_file.context("cannot read the directory of the report")? {
            removed.context("cannot remove the file of an earlier report")?;
        }
    }
    Ok(())
}

/// Writes a file atomically, and prints what was planted in its place and could not be removed.
fn write(directory: &SharedDirectory, name: &str, content: &mut dyn Read) -> anyhow::Result<()> {
    let written = directory.replace(name.as_ref(), content);
    let written = written.with_context(|| format!("cannot write {}", directory.path().join(name).display()))?;
    if let Some(moved) = written.moved_aside {
        eprintln!("doctor-node: {moved}");
    }
    Ok(())
}

/// The file that the vendor's tool left.
struct VendorOutput {
    name: &'static str,
    content: File,
    /// Why the tool did not finish it.
    problem: Option<String>,
    /// Removed when the file is written to its place.
    _workspace: Workspace,
}

/// Runs the vendor's tool in a private directory. If it is not installed here, the one of the machine below `root` is run there.
/// Returns the file that it left, or why there is none.
fn run_vendor_tool(root: &Path, limit: Span, stop: &Stop) -> Result<VendorOutput, String> {
    if let Some(tool) = find(TOOL) {
        let parent = std::env::temp_dir();
        let failed = |error: io::Error| format!("cannot create a directory in {}: {error}", parent.display());
        let workspace = Workspace::create_in(&parent).map_err(failed)?;
        let mut command = Command::new(tool);
        // It writes its file into the current directory.
        command.current_dir(workspace.path());
        return run_in(&mut command, workspace, limit, stop);
    }
    let installed = TOOL_FOLDERS.iter().find(|folder| root.join(folder).join(TOOL).is_file());
    let Some(folder) = installed.filter(|_| root != Path::new("/")) else {
        return Err(format!("{TOOL} is not installed here"));
    };
    run_on_machine(&Path::new("/").join(folder).join(TOOL), root, limit, stop)
}

/// Runs the tool with the machine's file system as its root.
fn run_on_machine(tool: &Path, root: &Path, limit: Span, stop: &Stop) -> Result<VendorOutput, String> {
    let failed = |error: io::Error| format!("cannot use the machine's file system: {error}");
    let parent = root.join(MACHINE_FOLDER);
    fs::create_dir_all(&parent).map_err(failed)?;
    let workspace = Workspace::create_in(&parent).map_err(failed)?;
    let inner = Path::new("/").join(MACHINE_FOLDER).join(workspace.name());
    let mut command = Command::new("chroot");
    command.arg(root).args(["/bin/sh", "-c", "cd \"$1\" && exec \"$2\"", "sh"]).arg(inner).arg(tool);
    run_in(&mut command, workspace, limit, stop)
}

/// Runs the tool, which writes its file into the workspace.
fn run_in(command: &mut Command, workspace: Workspace, limit: Span, stop: &Stop) -> Result<VendorOutput, String> {
    let limits =
        Limits { timeout: limit.to_std(), max_stream_bytes: MAX_OUTPUT_BYTES, grace: GRACE, kill_grace: GRACE };
    let outcome = child::run(command, &limits, stop, Echo::default());
    let problem = match outcome {
        Ok(ChildOutcome::Exited { status, .. }) if status.success() => None,
        Ok(ChildOutcome::Exited { status, stdout, stderr }) => {
            Some(format!("it ended with {status}: {}", last(&stdout, &stderr)))
        }
        Ok(ChildOutcome::TimedOut) => Some(format!("it did not end within {limit}")),
        Ok(ChildOutcome::TooLong) => Some("it printed too much output".to_owned()),
        Ok(ChildOutcome::Stopped(_)) => Some("it was stopped".to_owned()),
        Ok(ChildOutcome::Unkillable { pid, .. }) => Some(format!("process {pid} hangs in the kernel")),
        Err(error) => Some(format!("cannot start it: {error}")),
    };
    match (workspace.first_file(&VENDOR_FILES)?, problem) {
        (Some((name, _, bytes)), _) if bytes > MAX_FILE_BYTES => {
            Err(format!("{name} has {} MiB, the limit is {} MiB", bytes >> 20, MAX_FILE_BYTES >> 20))
        }
        (Some((name, content, 1..)), problem) => Ok(VendorOutput { name, content, problem, _workspace: workspace }),
        (_, Some(problem)) => Err(problem),
        (_, None) => Err("it succeeded but wrote no file".to_owned()),
    }
}

/// Returns the last non-empty line.
fn last(stdout: &[u8], stderr: &[u8]) -> String {
    let text = format!("{}\n{}", String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr));
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no output");
    line.chars().take(200).collect()
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file())
}
