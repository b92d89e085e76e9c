//! M6: the agent as it is shipped, on a machine that does not exist with eight GPUs and eight ports, while nothing happens.
//!
//! A listener on the loopback answers as the controller's door does. What an hour costs is put together from its parts,
//! each measured: sixty minutes of waiting, from a report to the sign of life; twelve looks that find nothing new, of an
//! agent whose policy has it look every other second instead of every five minutes; and one look that reports everything.
//! That one is asked for by SIGHUP, so it also reads the configuration again: more than it would be.
//!
//! Its twin: the first report is signed, has evidence of every check that an agent runs, and no rule finds anything in it.

mod door;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use doctor_bed::machine::{GPUS, Machine, PORTS, Standing, standin};
use doctor_checks::{
    Catalogue, Depth,
    credential::Credential,
    document::{AgentReport, RunKey},
};
use doctor_core::{
    classify::judge,
    finding::Verdict,
    ids::{CheckId, NodeName},
    policy::Policy,
    profile::ProfileFile,
};
use serde_json::json;

use crate::{Measured, figure::Figure, process::Running, stopwatch::cpu_time_of};
use door::Door;

/// Looks that are measured together.
const LOOKS: u32 = 20;
/// Of an ordinary agent, in minutes.
const LOOK_EVERY: f64 = 5.0;
const SAY_ALL_EVERY: f64 = 60.0;
/// For anything that should come at once.
const SOON: Duration = Duration::from_secs(30);
/// The agent gives a sign of life after a minute without a word.
const SIGN_OF_LIFE: Duration = Duration::from_secs(70);
const MEGABYTE: f64 = 1e6;

pub(crate) fn run() -> Result<Measured> {
    let program = shipped()?;
    let bytes = fs::metadata(&program).context("looking at the program")?.len();
    let library = standin(&std::env::current_exe().context("finding this program")?);
    let standing = Machine::hgx_h100().stand(&program, &library);
    let key = RunKey::new([7; 32]);
    let door = Door::open()?;
    let credential =
        Credential { node: NodeName::new("bench")?, key: key.clone(), controller: Some(door.address().to_owned()) };
    let agent = Running::start(standing.agent(&credential.text()).stderr(Stdio::null()))?;
    eprintln!("  twin: the first report");
    let checks = prove(&standing, &what_it_saw(&door, &key)?)?;
    agent.settle(SOON)?;

    eprintln!("  measuring: looks that report everything");
    let used = cpu_time_of(agent.pid())?;
    for _look in 0..LOOKS {
        agent.hang_up()?;
        what_it_saw(&door, &key)?;
        agent.settle(SOON)?;
    }
    let full = (cpu_time_of(agent.pid())? - used).as_secs_f64() * 1000.0 / f64::from(LOOKS);

    eprintln!("  measuring: a minute of waiting, and meanwhile another agent's looks that find nothing new");
    let (waiting, look) = thread::scope(|scope| {
        let look = scope.spawn(|| ordinary_look(&program, &library, &key));
        let waiting = waiting_minute(&agent, &door, &key);
        (waiting, look.join().expect("a panic there is a panic here"))
    });
    let (waiting, look) = (waiting?, look?);

    let inputs = json!({
        "gpus": GPUS, "ports": PORTS, "checks": checks, "look_ms": round(look), "full_look_ms": round(full),
        "waiting_ms_per_min": round(waiting), "looks": LOOKS,
    });
    let figure = |name: &str, value, unit, note: &str| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note: note.to_owned(),
    };
    Ok(Measured::Figures(vec![
        figure("rss_mb", agent.resident()? as f64 / MEGABYTE, "MB", "VmRSS after a minute of waiting, in 10^6 bytes"),
        figure(
            "cpu_ms_per_min",
            waiting + look / LOOK_EVERY + full / SAY_ALL_EVERY,
            "ms",
            "a waiting minute with its sign of life, a fifth of a look that finds nothing new, and a sixtieth of one that \
             reports everything",
        ),
        figure("binary_mb", bytes as f64 / MEGABYTE, "MB", "doctor-node, profile dist, in 10^6 bytes"),
    ]))
}

/// Milliseconds of CPU time in a minute in which there is nothing to do but give a sign of life.
fn waiting_minute(agent: &Running, door: &Door, key: &RunKey) -> Result<f64> {
    let (began, used) = (Instant::now(), agent.threads_used()?);
    let alive = AgentReport::open(&door.next(SIGN_OF_LIFE)?, key).context("opening the sign of life")?;
    ensure!(alive.checks.is_empty(), "it looked again within the minute: {} checks", alive.checks.len());
    agent.settle(SOON)?;
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    Ok((agent.threads_used()? - used).as_secs_f64() * 1000.0 / minutes)
}

/// Milliseconds of CPU time that a look takes which finds what the last one found.
fn ordinary_look(program: &Path, library: &Path, key: &RunKey) -> Result<f64> {
    let standing = Machine::hgx_h100().policy("[agents]\nlook_every = \"2s\"\n").stand(program, library);
    let door = Door::open()?;
    let credential =
        Credential { node: NodeName::new("bench")?, key: key.clone(), controller: Some(door.address().to_owned()) };
    let agent = Running::start(standing.agent(&credential.text()).stderr(Stdio::null()))?;
    what_it_saw(&door, key)?;
    agent.settle(SOON)?;
    let used = cpu_time_of(agent.pid())?;
    for _look in 0..LOOKS {
        agent.wake(SOON)?;
        agent.settle(SOON)?;
    }
    let look = (cpu_time_of(agent.pid())? - used).as_secs_f64() * 1000.0 / f64::from(LOOKS);
    for report in door.waiting() {
        let said = AgentReport::open(&report, key).context("opening a report")?.checks;
        ensure!(said.is_empty(), "a look at an unchanged machine had something to say: {}", said.len());
    }
    Ok(look)
}

/// The next report that is more than a sign of life.
fn what_it_saw(door: &Door, key: &RunKey) -> Result<AgentReport> {
    loop {
        let report = AgentReport::open(&door.next(SOON)?, key).context("opening a report")?;
        if !report.checks.is_empty() {
            return Ok(report);
        }
    }
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// The node program as it is shipped. Building it takes minutes where it is not there yet.
fn shipped() -> Result<PathBuf> {
    eprintln!("  building doctor-node, profile dist");
    let began = Instant::now();
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--profile", "dist", "--quiet", "-p", "doctor-node"])
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "doctor-node does not build");
    eprintln!("  built in {:.0} s", began.elapsed().as_secs_f64());
    let this = std::env::current_exe().context("finding this program")?;
    let target = this.ancestors().nth(2).context("a program lies in a folder of the target directory")?;
    let program = target.join("dist/doctor-node");
    ensure!(program.exists(), "{} is not there", program.display());
    Ok(program)
}

/// Every check that an agent runs is in the report, and nothing is wrong. Returns how many there are.
fn prove(standing: &Standing, report: &AgentReport) -> Result<usize> {
    let policy = Policy::over_defaults(&fs::read_to_string(standing.at("policy.toml"))?)?;
    let profile = ProfileFile::read(&fs::read_to_string(standing.at("profile.toml"))?)?.profile();
    let catalogue = Catalogue::with_site_checks(&policy);
    let rules = catalogue.rules(&policy)?;
    let runs =
        |id: &CheckId| catalogue.get(id).is_some_and(|check| check.spec.depth == Depth::Quick && !check.spec.exclusive);
    let wanted: BTreeSet<CheckId> = catalogue.tests(&policy).into_iter().map(|test| test.id).filter(runs).collect();
    let told: BTreeSet<CheckId> = report.checks.iter().map(|evidence| evidence.test.clone()).collect();
    ensure!(wanted == told, "the report has not every check: {:?}", wanted.symmetric_difference(&told));
    for evidence in &report.checks {
        let check = catalogue.get(&evidence.test).context("a check that the agent knows and we do not")?;
        let seen = check.observe(&catalogue.params(&policy, &evidence.test), evidence);
        let judged = judge(&rules, Some(&profile), &evidence.test, &seen);
        ensure!(judged.verdict != Verdict::Fail, "a healthy machine fails {}: {}", evidence.test, judged.text);
    }
    Ok(told.len())
}
