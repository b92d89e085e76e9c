//! M7: the fast checks on a machine that does not exist, with eight GPUs and eight ports, by the program as people run it.
//!
//! Its twin: the machine is healthy and every check says so; with a fault planted, that one is found.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use doctor_bed::machine::{GPUS, Machine, PORTS, Standing, standin};
use serde_json::json;

use crate::{
    Measured,
    figure::Figure,
    stopwatch::{REPEATS, median, spread},
};

/// Runs in one repeat: the kernel counts the CPU time of children in hundredths of a second.
const RUNS: u32 = 20;

pub(crate) fn run() -> Result<Measured> {
    let program = program()?;
    let library = standin(&program);
    let healthy = Machine::hgx_h100();
    let standing = healthy.stand(&program, &library);
    eprintln!("  twin: a healthy machine, and one with a fault");
    let seen = standing.look();
    ensure!(seen.failing.is_empty() && seen.inconclusive.is_empty(), "a healthy machine: {seen:?}");
    let faulty = Machine::hgx_h100().gpu(3, "remapped_rows.failure", 1.0).stand(&program, &library).look();
    ensure!(faulty.failing.len() == 1, "one fault was planted: {:?}", faulty.failing);
    eprintln!("  measuring");
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    for _repeat in 0..REPEATS {
        let used = children_used()?;
        let began = Instant::now();
        for _run in 0..RUNS {
            let status = quietly(&standing).status().context("starting doctor-node")?;
            ensure!(status.success(), "doctor-node check ended with {status}");
        }
        wall.push(began.elapsed().as_secs_f64() * 1000.0 / f64::from(RUNS));
        cpu.push((children_used()? - used).as_secs_f64() * 1000.0 / f64::from(RUNS));
    }
    let checks = seen.passing.len() + seen.not_applicable.len();
    let inputs = json!({ "gpus": GPUS, "ports": PORTS, "checks": checks, "passing": seen.passing.len() });
    let figure = |name: &str, value, unit, note: String| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note,
    };
    let of = |samples: &[f64], what: &str| {
        format!("doctor-node check --suite fast --json, from start to end; {what}, {}", spread(samples))
    };
    Ok(Measured::Figures(vec![
        figure("wall_ms", median(&wall), "ms", of(&wall, "wall time")),
        figure("cpu_ms", median(&cpu), "ms", of(&cpu, "user and system time of the process")),
        figure(
            "child_processes",
            f64::from(children(&standing)?),
            "count",
            "0: no child was ever waited for, by the page faults of children in /proc; 1: some were".to_owned(),
        ),
    ]))
}

/// The node program of this build, beside this one.
fn program() -> Result<PathBuf> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--release", "--quiet", "-p", "doctor-node"])
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "doctor-node does not build");
    let beside = std::env::current_exe().context("finding this program")?.with_file_name("doctor-node");
    ensure!(beside.exists(), "{} is not there", beside.display());
    Ok(beside)
}

fn quietly(standing: &Standing) -> Command {
    let mut command = standing.fast();
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// CPU time of children that have ended and were waited for.
fn children_used() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
    let ticks = |place: usize| fields.get(place).and_then(|field| field.parse::<u64>().ok());
    let (Some(user), Some(system)) = (ticks(13), ticks(14)) else { bail!("/proc/self/stat has no times of children") };
    Ok(Duration::from_millis((user + system) * 1000 / rustix::param::clock_ticks_per_second().max(1)))
}

/// Programs that a look starts, in a process that ends: its own counters tell of children it waited for.
fn children(standing: &Standing) -> Result<u32> {
    let mut child = quietly(standing).spawn().context("starting doctor-node")?;
    let stat = format!("/proc/{}/stat", child.id());
    // Until it has ended and nobody has asked for its end yet, its counters can be read.
    let began = Instant::now();
    let faults = loop {
        let text = std::fs::read_to_string(&stat).with_context(|| format!("reading {stat}"))?;
        let fields: Vec<&str> = text.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
        if fields.first() == Some(&"Z") {
            // Page faults of children that it waited for: a program cannot be started without any.
            break fields.get(8).and_then(|field| field.parse::<u64>().ok()).context("no such field")?;
        }
        ensure!(began.elapsed() < Duration::from_secs(30), "doctor-node check does not end");
        std::thread::sleep(Duration::from_millis(1));
    };
    child.wait().context("waiting for doctor-node")?;
    Ok(u32::from(faults > 0))
}
