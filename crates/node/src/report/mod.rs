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
use doctor_core::time::Span;
use doctor_host::vendor_reports::{MACHINE_FILE, MAX_FILE_BYTES, VENDOR_FILES};
use serde_json::{Value, json};

use crate::{
    runner::{
        ProbeRunner,
        child::{self, ChildOutcome, Echo, Limits},
    },
    stop::Stop,
};

const TOOL: &str = "nvidia-bug-report.sh";
/// What the tool prints besides its file.
const MAX_OUTPUT_BYTES: usize = 1 << 20;
const GRACE: Duration = Duration::from_secs(5);

/// Writes both files and returns a one-line summary.
///
/// # Errors
/// If the directory cannot be written.
pub fn report(
    out: &Path,
    limit: Span,
    metadata: &str,
    runner: &dyn ProbeRunner,
    stop: &Stop,
) -> anyhow::Result<String> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut machine = machine::describe(metadata, runner);
    let taken = run_vendor_tool(out, limit, stop);
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

/// Writes the file atomically.
fn write(path: &Path, machine: &Value) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, serde_json::to_vec_pretty(machine)?)?;
    fs::rename(temporary, path)
}

/// Runs the vendor's tool. Returns the file that it left, or why there is none.
fn run_vendor_tool(out: &Path, limit: Span, stop: &Stop) -> Result<String, String> {
    let Some(tool) = find(TOOL) else { return Err(format!("{TOOL} is not installed here")) };
    for name in VENDOR_FILES {
        // A file of an earlier run must not be taken for this one's.
        let _none = fs::remove_file(out.join(name));
    }
    let limits =
        Limits { timeout: limit.to_std(), max_stream_bytes: MAX_OUTPUT_BYTES, grace: GRACE, kill_grace: GRACE };
    let mut command = Command::new(tool);
    // It writes its file into the current directory.
    command.current_dir(out);
    let outcome = child::run(&mut command, &limits, stop, Echo::default());
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
