//! M18: the build times of a contributor. A clean clone of this commit is built with an empty target directory: the CPU
//! time of `cargo build --release`, the time until `cargo run --release -- demo` prints its first line, and the time of
//! the next build after a change of one line in the Slurm backend.
//!
//! It takes many minutes and runs only when named. Correctness check: the demo prints its first line.

use std::{
    fs::{self, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::{Measured, figure::Figure};

/// The file that is changed for the second build.
const CHANGED: &str = "crates/backend-slurm/src/lib.rs";

pub(crate) fn run() -> Result<Measured> {
    let folder = tempfile::tempdir().context("creating a temporary folder")?;
    let clone = folder.path().join("clone");
    let status = Command::new("git").args(["clone", "--quiet", "."]).arg(&clone).status().context("starting git")?;
    ensure!(status.success(), "git clone of this repository failed");
    eprintln!("  cargo build --release, from an empty target directory");
    let (cold_wall, cold_cpu) = build(&clone)?;
    eprintln!("  cargo run --release -- demo, to its first line");
    let line_wall = first_line(&clone)?;
    let path = clone.join(CHANGED);
    let mut file = OpenOptions::new().append(true).open(&path).with_context(|| format!("opening {CHANGED}"))?;
    file.write_all(b"// One line more.\n").with_context(|| format!("writing {CHANGED}"))?;
    eprintln!("  cargo build --release, after a change of one line in the Slurm backend");
    let (again_wall, again_cpu) = build(&clone)?;
    let inputs = json!({ "features": "default", "profile": "release", "target": "empty", "changed": CHANGED });
    let figure = |name: &str, value: Duration, note: String| Figure {
        name: name.to_owned(),
        value: value.as_secs_f64(),
        unit: "s",
        inputs: inputs.clone(),
        note,
    };
    let wall = |time: Duration| format!("once; {:.0} s of wall time", time.as_secs_f64());
    let cpu = |time: Duration| format!("once; {:.0} s of CPU time", time.as_secs_f64());
    Ok(Measured::Figures(vec![
        figure("cold_cpu_s", cold_cpu, wall(cold_wall)),
        figure("first_line_s", cold_wall + line_wall, "once; the build and the first line of the demo".to_owned()),
        figure("rebuild_s", again_wall, cpu(again_cpu)),
    ]))
}

fn cargo(clone: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(clone).env("CARGO_TARGET_DIR", clone.join("target"));
    command
}

/// Returns wall time and CPU time.
fn build(clone: &Path) -> Result<(Duration, Duration)> {
    let (began, used) = (Instant::now(), used_by_children()?);
    let status = cargo(clone).args(["build", "--release", "--quiet"]).status().context("starting cargo")?;
    ensure!(status.success(), "cargo build failed");
    Ok((began.elapsed(), used_by_children()?.saturating_sub(used)))
}

fn first_line(clone: &Path) -> Result<Duration> {
    let began = Instant::now();
    let mut command = cargo(clone);
    command.args(["run", "--release", "--quiet", "--", "demo"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context("starting cargo")?;
    let stdout = child.stdout.take().context("the output is piped")?;
    let mut lines = BufReader::new(stdout).lines();
    let first = lines.next().transpose().context("reading the output")?.unwrap_or_default();
    let elapsed = began.elapsed();
    let rest = lines.map_while(std::io::Result::ok).count();
    ensure!(child.wait().context("waiting for the demo")?.success(), "the demo failed");
    ensure!(!first.is_empty() && rest > 0, "the demo printed nothing");
    Ok(elapsed)
}

/// Returns the CPU time of all children that this process has waited for.
fn used_by_children() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    let fields: Vec<u64> = stat
        .rsplit_once(") ")
        .map_or("", |(_, rest)| rest)
        .split(' ')
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    let (Some(user), Some(system)) = (fields.get(13), fields.get(14)) else {
        anyhow::bail!("/proc/self/stat has no CPU times of children")
    };
    Ok(Duration::from_millis((user + system) * 1000 / rustix::param::clock_ticks_per_second().max(1)))
}
