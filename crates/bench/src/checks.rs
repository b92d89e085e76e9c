//! M7: the fast checks on a fake machine with eight GPUs and eight ports, run by the shipped program.
//!
//! CPU time is that of the program and of its driver helper.
//!
//! Correctness check: the machine is healthy and every check passes; an injected fault is found.

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use doctor_testbed::fake_machine::{FakeMachine, GPUS, InstalledMachine, PORTS, fake_nvidia_library};
use serde_json::json;

use crate::{
    Measured,
    figure::Figure,
    process, shipped,
    stopwatch::{REPEATS, median, spread},
};

/// Runs per repeat: the kernel counts the CPU time of children in hundredths of a second.
const RUNS: u32 = 20;

pub(crate) fn run() -> Result<Measured> {
    let program = shipped::doctor_node()?;
    let library = fake_nvidia_library(&std::env::current_exe().context("finding this program")?);
    let healthy = FakeMachine::hgx_h100();
    let machine = healthy.install(&program, &library);
    eprintln!("  checking: a healthy machine, and one with a fault");
    let seen = machine.run_check();
    ensure!(seen.failing.is_empty() && seen.inconclusive.is_empty(), "a healthy machine has findings: {seen:?}");
    let faulty = FakeMachine::hgx_h100().gpu(3, "remapped_rows.failure", 1.0).install(&program, &library).run_check();
    ensure!(faulty.failing.len() == 1, "one fault was planted, found: {:?}", faulty.failing);
    eprintln!("  measuring");
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    for _repeat in 0..REPEATS {
        let used = children_used()?;
        let began = Instant::now();
        for _run in 0..RUNS {
            let status = quietly(&machine).status().context("starting doctor-node")?;
            ensure!(status.success(), "doctor-node check ended with {status}");
        }
        wall.push(began.elapsed().as_secs_f64() * 1000.0 / f64::from(RUNS));
        cpu.push((children_used()? - used).as_secs_f64() * 1000.0 / f64::from(RUNS));
    }
    let children = most_children(&machine)?;
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
        format!("doctor-node check --fast-only --json, from start to end; {what}, {}", spread(samples))
    };
    Ok(Measured::Figures(vec![
        figure("wall_ms", median(&wall), "ms", of(&wall, "wall time")),
        figure("cpu_ms", median(&cpu), "ms", of(&cpu, "user and system time of the process and its children")),
        figure(
            "child_processes",
            children as f64,
            "count",
            format!("processes that one check round starts, maximum of {REPEATS} rounds"),
        ),
    ]))
}

fn quietly(machine: &InstalledMachine) -> Command {
    let mut command = machine.fast();
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Returns the CPU time of children that have ended and were waited for.
fn children_used() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    let (Some(user), Some(system)) = (ticks(13), ticks(14)) else { bail!("/proc/self/stat has no times of children") };
    Ok(Duration::from_millis((user + system) * 1000 / rustix::param::clock_ticks_per_second().max(1)))
}

/// Returns the largest number of processes that one of several check runs starts.
fn most_children(machine: &InstalledMachine) -> Result<usize> {
    let mut most = 0;
    for _run in 0..REPEATS {
        let mut child = quietly(machine).spawn().context("starting doctor-node")?;
        // Polled without a pause: starting a program takes far longer than one read.
        let (began, mut seen) = (Instant::now(), BTreeSet::new());
        while child.try_wait().context("waiting for doctor-node")?.is_none() {
            ensure!(began.elapsed() < Duration::from_secs(30), "doctor-node check does not end");
            seen.extend(process::children(child.id()));
        }
        most = most.max(seen.len());
    }
    Ok(most)
}
