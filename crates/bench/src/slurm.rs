//! M15: one cycle of the service on a Slurm of 10,000 nodes, from the start of the program to its end: snapshot, plan, commit.
//!
//! `cpu_s` and `rss_mb` are for a cluster in use, replayed from `scontrol` and `squeue` output of a real slurmctld,
//! with the states that its nodes would have if they responded. `…_live` are for that slurmctld itself, whose nodes
//! have no slurmd. CPU time is that of the service and of every program that it started.
//!
//! Correctness check: the service reports the expected occupancy of each node, in both cases.

mod captured_replies;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result};
use doctor_testbed::slurm::{Layout, Slurm, SlurmTestbedError};
use serde_json::{Value, json};

use self::captured_replies::CapturedReplies;
use crate::{
    Measured,
    figure::Figure,
    one_cycle::{CycleSample, Service},
    shipped,
    stopwatch::{median, spread},
};

const NODES: usize = 10_000;
/// Users' jobs with a later start time, each on this many nodes.
const WAITING: usize = 200;
const NODES_OF_A_JOB: usize = 16;
/// One node in this many was drained by an operator.
const DRAINED_EVERY: usize = 100;

const REPEATS: usize = 9;
const MEGABYTE: f64 = 1e6;

pub(crate) fn run() -> Result<Measured> {
    eprintln!("  starting a slurmctld with {NODES} nodes");
    let slurm = match cluster() {
        Ok(slurm) => slurm,
        Err(SlurmTestbedError::Unsupported { why }) => return Ok(Measured::NotAvailable(why)),
        Err(other) => return Err(other).context("starting Slurm"),
    };
    let program = shipped::doctor()?;
    let live = service(&program, slurm.programs(), Some(&slurm.conf()))?;
    eprintln!("  checking: the service sees every node of the slurmctld");
    live.run_cycle()?;
    live.compare(&silent())?;
    let captured = CapturedReplies::of(&slurm, &program)?;
    let working = service(&program, &captured.programs(), None)?;
    eprintln!("  checking: the service sees every node of the captured cluster");
    working.run_cycle()?;
    working.compare(&captured_replies::expected_in_use())?;

    eprintln!("  measuring");
    let (mut of_live, mut of_working) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        of_live.push(live.run_cycle()?);
        of_working.push(working.run_cycle()?);
    }
    live.compare(&silent())?;
    working.compare(&captured_replies::expected_in_use())?;
    let inputs = json!({
        "nodes": NODES, "waiting_jobs": WAITING, "nodes_of_a_job": NODES_OF_A_JOB, "drained": NODES / DRAINED_EVERY,
        "slurm": slurm.run("sinfo", &["--version"])?, "store": "SQLite", "mode": "observe", "bytes_of_nodes": captured.bytes(),
    });
    let mut figures = figures("", &of_working, &inputs);
    figures.extend(self::figures("_live", &of_live, &inputs));
    Ok(Measured::Figures(figures))
}

/// Creates a service that uses these client programs.
fn service(program: &Path, programs: &Path, conf: Option<&Path>) -> Result<Service> {
    let conf = conf.map(|conf| format!("slurm_conf = \"{}\"\n", conf.display())).unwrap_or_default();
    Service::new(program, &format!("[backend.slurm]\nprograms = \"{}\"\n{conf}", programs.display()))
}

/// Starts a slurmctld with the nodes, some of them drained, and queued jobs with a later start time. Jobs that were
/// pending for nodes would reserve free ones, and the check could not predict which.
fn cluster() -> Result<Slurm, SlurmTestbedError> {
    let slurm = Slurm::start(&Layout { nodes: NODES, slurmds: false, ..Layout::default() })?;
    let drained: Vec<String> = (1..=NODES).filter(|node| is_drained(*node)).map(node_name).collect();
    let drained = format!("nodename={}", drained.join(","));
    slurm.run("scontrol", &["update", &drained, "state=drain", "reason=ticket 4711: fan 3"])?;
    let nodes = format!("--nodes={NODES_OF_A_JOB}");
    for _ in 0..WAITING {
        slurm.submit(&["--exclusive", "--gres=gpu:8", &nodes, "--time=60", "--begin=now+1day", "--wrap=true"])?;
    }
    Ok(slurm)
}

fn node_name(number: usize) -> String {
    format!("node{number}")
}

const fn is_drained(number: usize) -> bool {
    number.is_multiple_of(DRAINED_EVERY)
}

/// Returns the expected occupancy of nodes without a slurmd: unknown.
fn silent() -> BTreeMap<String, &'static str> {
    (1..=NODES).map(|node| (node_name(node), "unknown")).collect()
}

fn figures(suffix: &str, cycles: &[CycleSample], inputs: &Value) -> Vec<Figure> {
    let of = |part: fn(&CycleSample) -> f64| cycles.iter().map(part).collect::<Vec<f64>>();
    let all = of(|cycle| (cycle.own + cycle.programs).as_secs_f64());
    let own = of(|cycle| cycle.own.as_secs_f64());
    let anonymous = of(|cycle| cycle.peak_rss_anon as f64 / MEGABYTE);
    let resident = of(|cycle| cycle.peak_rss as f64 / MEGABYTE);
    let figure = |name: &str, values: &[f64], unit, note: &str| Figure {
        name: format!("{name}{suffix}"),
        value: median(values),
        unit,
        inputs: inputs.clone(),
        note: format!("{note}, {}", spread(values)),
    };
    vec![
        figure("cpu_s", &all, "s", "doctor serve --cycles 1 and the programs it starts, user and system time"),
        figure("own_cpu_s", &own, "s", "the same without those programs"),
        figure("rss_anon_mb", &anonymous, "MB", "peak RssAnon of doctor serve --cycles 1, in 10^6 bytes"),
        figure("rss_mb", &resident, "MB", "VmHWM of doctor serve --cycles 1, in 10^6 bytes"),
    ]
}
