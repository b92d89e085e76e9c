//! `doctor-node report`: collects hardware details and the vendor's diagnostics for a repair or a support case.
//!
//! It writes `machine.json` and the output of `nvidia-bug-report.sh` into a directory. The tool inspects everything and
//! may hang with the driver: it has a time limit, and partial output is kept. If it did not run, `machine.json` states
//! why.

mod machine;

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context;
use doctor_checks::result_transport::PackedDocument;
use doctor_core::time::Span;
use doctor_host::vendor_reports::{self, MACHINE_FILE, MAX_CARRIED_BYTES, MAX_FILE_BYTES, VENDOR_FILES};
use serde_json::{Value, json};

use crate::{
    runner::{
        ProbeRunner,
        child::{self, ChildOutcome, Echo, Limits},
    },
    stop::Stop,
};

const TOOL: &str = "nvidia-bug-report.sh";
/// Where the driver's package installs it, below the machine's root.
const TOOL_FOLDERS: [&str; 2] = ["usr/bin", "usr/local/bin"];
/// A directory of ours on the machine, in which the tool runs if we are in a container.
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
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut machine = machine::describe(metadata, runner);
    let taken = run_vendor_tool(out, root, limit, stop);
    let message = match &taken {
        Ok(file) => format!("{TOOL} wrote {file}"),
        Err(error) => format!("no report from {TOOL}: {error}"),
    };
    machine["vendor_report"] = match taken {
        Ok(file) => json!({ "file": file }),
        Err(error) => json!({ "why_not": error }),
    };
    let path = out.join(MACHINE_FILE);
    write(&path, &machine).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(message)
}

/// Returns both files as the lines of a log, for a job that shares no directory with the controller.
///
/// # Errors
/// If there is no report in the directory, or it is too long for a log.
pub fn carried(out: &Path) -> anyhow::Result<String> {
    let report = vendor_reports::read(out, Path::new(""), MAX_CARRIED_BYTES).context("cannot read the report")?;
    let report = report.context("the report is gone")?;
    let packed = PackedDocument::pack(&serde_json::to_vec(&report)?).context("cannot pack the report")?;
    Ok(packed.to_log_lines())
}

/// Writes the file atomically.
fn write(path: &Path, machine: &Value) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, serde_json::to_vec_pretty(machine)?)?;
    fs::rename(temporary, path)
}

/// Runs the vendor's tool, if it is not installed here on the machine below `root`. Returns the file that it left, or why there is
/// none.
fn run_vendor_tool(out: &Path, root: &Path, limit: Span, stop: &Stop) -> Result<String, String> {
    for name in VENDOR_FILES {
        // A file of an earlier run must not be taken for this one's.
        let _none = fs::remove_file(out.join(name));
    }
    if let Some(tool) = find(TOOL) {
        let mut command = Command::new(tool);
        // It writes its file into the current directory.
        command.current_dir(out);
        return run_in(&mut command, out, limit, stop);
    }
    let installed = TOOL_FOLDERS.iter().find(|folder| root.join(folder).join(TOOL).is_file());
    let Some(folder) = installed.filter(|_| root != Path::new("/")) else {
        return Err(format!("{TOOL} is not installed here"));
    };
    run_on_machine(&Path::new("/").join(folder).join(TOOL), out, root, limit, stop)
}

/// Runs the tool with the machine's file system as its root, in a new directory there, and moves its file to `out`.
fn run_on_machine(tool: &Path, out: &Path, root: &Path, limit: Span, stop: &Stop) -> Result<String, String> {
    let failed = |error: io::Error| format!("cannot use the machine's file system: {error}");
    let inner = Path::new(MACHINE_FOLDER).join(format!("report-{}", std::process::id()));
    let outer = root.join(&inner);
    fs::create_dir_all(root.join(MACHINE_FOLDER)).map_err(failed)?;
    // Of an earlier container with the same process id.
    let _absent = fs::remove_dir_all(&outer);
    fs::create_dir(&outer).map_err(failed)?;
    let mut command = Command::new("chroot");
    command
        .arg(root)
        .args(["/bin/sh", "-c", "cd \"$1\" && exec \"$2\"", "sh"])
        .arg(Path::new("/").join(inner))
        .arg(tool);
    let taken = run_in(&mut command, &outer, limit, stop);
    let moved = VENDOR_FILES.iter().filter(|name| outer.join(name).is_file()).try_for_each(|name| {
        // Another file system: a rename would fail.
        fs::copy(outer.join(name), out.join(name)).map(drop)
    });
    let _left = fs::remove_dir_all(&outer);
    taken.and_then(|file| moved.map(|()| file).map_err(failed))
}

/// Runs the tool, which writes its file into `out`.
fn run_in(command: &mut Command, out: &Path, limit: Span, stop: &Stop) -> Result<String, String> {
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
    let file = VENDOR_FILES.iter().find_map(|name| Some((*name, fs::metadata(out.join(name)).ok()?.len())));
    match (file, problem) {
        (Some((name, bytes)), _) if bytes > MAX_FILE_BYTES => {
            let path = out.join(name);
            Err(format!("{} has {} MiB, the limit is {} MiB", path.display(), bytes >> 20, MAX_FILE_BYTES >> 20))
        }
        (Some((name, 1..)), None) => Ok(name.to_owned()),
        (Some((name, 1..)), Some(problem)) => Ok(format!("{name}, truncated: {problem}")),
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
