//! M6: the shipped agent and its driver helper, on a fake machine with eight GPUs and eight ports.
//!
//! A listener on loopback replies as the controller's agent endpoint does. The cost of an hour without changes is
//! assembled from measured parts: sixty minutes of waiting, from a report to the heartbeat; twelve check rounds without
//! changes, of an agent whose policy checks every two seconds instead of every five minutes; and one round that reports
//! everything. SIGHUP triggers that one, so it also reloads the configuration and costs more than a scheduled one. A
//! minute with a report is a minute of waiting and a round that finds and reports a changed GPU.
//!
//! CPU time includes all processes that the agent starts. Memory is the peak anonymous memory of the agent and its
//! helper together, sampled every millisecond from the start to the end of the waiting.
//!
//! Correctness check: the first report is signed, has evidence of every check that an agent runs, and no rule matches;
//! a changed GPU is found in every round after the change, and nothing else is.

pub(crate) mod report_sink;

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use doctor_checks::{
    Catalogue, Depth,
    credential::Credential,
    document::{AgentReport, RunKey},
};
use doctor_core::{
    classify::classify,
    finding::Verdict,
    ids::{CheckId, NodeName},
    policy::Policy,
    profile::ProfileFile,
};
use doctor_testbed::fake_machine::{FakeMachine, GPUS, InstalledMachine, PORTS, fake_nvidia_library};
use serde_json::json;

use crate::{Measured, figure::Figure, process::Running, shipped, stopwatch::cpu_time_of};
use report_sink::ReportSink;

/// The number of check rounds in one measurement.
const ROUNDS: u32 = 20;
/// The default intervals of an agent, in minutes.
const CHECK_INTERVAL_MINUTES: f64 = 5.0;
const FULL_REPORT_INTERVAL_MINUTES: f64 = 60.0;
/// The limit for anything that should come immediately.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// The agent sends a heartbeat after a minute without a report.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(70);
const MEGABYTE: f64 = 1e6;

pub(crate) fn run() -> Result<Measured> {
    let program = shipped::doctor_node()?;
    let bytes = fs::metadata(&program).context("reading the size of the program")?.len();
    let library = fake_nvidia_library(&std::env::current_exe().context("finding this program")?);
    let machine = FakeMachine::hgx_h100().install(&program, &library);
    let key = RunKey::new([7; 32]);
    let sink = ReportSink::open()?;
    let credential = Credential {
        node: NodeName::new("bench")?,
        key: key.clone(),
        controller: Some(sink.address().to_owned()),
        fingerprints: Vec::new(),
    };
    let agent = Running::start(machine.agent(&credential.text()).stderr(Stdio::null()))?;
    let memory = agent.watch_memory("RssAnon");
    eprintln!("  checking: the first report");
    let checks = verify_report(&machine, &next_full_report(&sink, &key)?)?;
    agent.wait_until_idle(REPLY_TIMEOUT)?;

    eprintln!("  measuring: check rounds that report everything");
    let used = cpu_time_of(agent.pid())?;
    for _look in 0..ROUNDS {
        agent.hang_up()?;
        next_full_report(&sink, &key)?;
        agent.wait_until_idle(REPLY_TIMEOUT)?;
    }
    let full = (cpu_time_of(agent.pid())? - used).as_secs_f64() * 1000.0 / f64::from(ROUNDS);

    eprintln!("  measuring: an idle minute, and meanwhile check rounds of other agents");
    let (waiting, rounds) = thread::scope(|scope| {
        let rounds = scope.spawn(|| -> Result<(f64, f64)> {
            Ok((unchanged_round_cpu(&program, &library, &key)?, changed_round_cpu(&program, &library, &key)?))
        });
        let waiting = idle_minute_cpu(&agent, &sink, &key);
        (waiting, rounds.join().expect("the measuring thread does not panic"))
    });
    let (waiting, (unchanged, changed)) = (waiting?, rounds?);
    ensure!(agent.children().len() == 1, "expected one helper process, found {:?}", agent.children());
    let most = memory.peak();

    let inputs = json!({
        "gpus": GPUS, "ports": PORTS, "checks": checks, "look_ms": round(unchanged), "full_look_ms": round(full),
        "changed_look_ms": round(changed), "waiting_ms_per_min": round(waiting), "looks": ROUNDS,
    });
    let figure = |name: &str, value, unit, note: &str| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note: note.to_owned(),
    };
    Ok(Measured::Figures(vec![
        figure(
            "rss_anon_mb",
            most as f64 / MEGABYTE,
            "MB",
            "peak RssAnon of the agent and its helper together, in 10^6 bytes",
        ),
        figure(
            "cpu_ms_per_min",
            waiting + unchanged / CHECK_INTERVAL_MINUTES + full / FULL_REPORT_INTERVAL_MINUTES,
            "ms",
            "an idle minute with its heartbeat, a fifth of a check round without changes, and a sixtieth of one that \
             reports everything; agent and helper together",
        ),
        figure(
            "cpu_ms_per_min_reporting",
            waiting + changed,
            "ms",
            "an idle minute, and a check round that finds and reports a changed GPU; agent and helper together",
        ),
        figure("binary_mb", bytes as f64 / MEGABYTE, "MB", "doctor-node, profile dist, in 10^6 bytes"),
    ]))
}

/// Measures the CPU time, in milliseconds, of a minute with only a heartbeat.
fn idle_minute_cpu(agent: &Running, sink: &ReportSink, key: &RunKey) -> Result<f64> {
    let (began, used) = (Instant::now(), agent.threads_used()?);
    let alive = AgentReport::open(&sink.next(HEARTBEAT_TIMEOUT)?, key).context("opening the heartbeat")?;
    ensure!(alive.checks.is_empty(), "the agent ran checks within the idle minute: {} checks", alive.checks.len());
    agent.wait_until_idle(REPLY_TIMEOUT)?;
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    Ok((agent.threads_used()? - used).as_secs_f64() * 1000.0 / minutes)
}

/// An agent that checks every two seconds, after its first report.
struct FrequentAgent {
    machine: InstalledMachine,
    sink: ReportSink,
    agent: Running,
}

impl FrequentAgent {
    fn start(program: &Path, library: &Path, key: &RunKey) -> Result<Self> {
        let machine = often().install(program, library);
        let sink = ReportSink::open()?;
        let credential = Credential {
            node: NodeName::new("bench")?,
            key: key.clone(),
            controller: Some(sink.address().to_owned()),
            fingerprints: Vec::new(),
        };
        let agent = Running::start(machine.agent(&credential.text()).stderr(Stdio::null()))?;
        next_full_report(&sink, key)?;
        agent.wait_until_idle(REPLY_TIMEOUT)?;
        Ok(Self { machine, sink, agent })
    }
}

fn often() -> FakeMachine {
    FakeMachine::hgx_h100().policy("[agents]\ncheck_every = \"2s\"\n")
}

/// Measures the CPU time, in milliseconds, of a check round without changes.
fn unchanged_round_cpu(program: &Path, library: &Path, key: &RunKey) -> Result<f64> {
    let FrequentAgent { machine: _machine, sink, agent } = FrequentAgent::start(program, library, key)?;
    let used = cpu_time_of(agent.pid())?;
    for _look in 0..ROUNDS {
        agent.wait_until_active(REPLY_TIMEOUT)?;
        agent.wait_until_idle(REPLY_TIMEOUT)?;
    }
    let round_cpu = (cpu_time_of(agent.pid())? - used).as_secs_f64() * 1000.0 / f64::from(ROUNDS);
    for report in sink.unread() {
        let checks = AgentReport::open(&report, key).context("opening a report")?.checks;
        ensure!(checks.is_empty(), "the agent reported {} checks of an unchanged machine", checks.len());
    }
    Ok(round_cpu)
}

/// Measures the CPU time, in milliseconds, of a check round that finds a changed GPU, with its report.
fn changed_round_cpu(program: &Path, library: &Path, key: &RunKey) -> Result<f64> {
    let FrequentAgent { machine, sink, agent } = FrequentAgent::start(program, library, key)?;
    // The agent reports a failure several times, so only the first round after each change is measured.
    let mut spent = Duration::ZERO;
    for round in 0..ROUNDS {
        let pending = if round % 2 == 0 { 1.0 } else { 0.0 };
        let used = cpu_time_of(agent.pid())?;
        machine.set_driver(&often().gpu(3, "remapped_rows.pending", pending));
        let report = next_full_report(&sink, key)?;
        agent.wait_until_idle(REPLY_TIMEOUT)?;
        spent += cpu_time_of(agent.pid())? - used;
        let tests: Vec<&str> = report.checks.iter().map(|evidence| evidence.test.as_str()).collect();
        ensure!(tests == ["gpu-row-remap"], "one check has changed, and the agent reports {tests:?}");
    }
    Ok(spent.as_secs_f64() * 1000.0 / f64::from(ROUNDS))
}

/// Returns the next report that is more than a heartbeat.
pub(crate) fn next_full_report(sink: &ReportSink, key: &RunKey) -> Result<AgentReport> {
    loop {
        let report = AgentReport::open(&sink.next(REPLY_TIMEOUT)?, key).context("opening a report")?;
        if !report.checks.is_empty() {
            return Ok(report);
        }
    }
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Verifies that the report has every check that an agent runs and no finding. Returns the number of checks.
fn verify_report(machine: &InstalledMachine, report: &AgentReport) -> Result<usize> {
    let policy = Policy::with_site_settings(&fs::read_to_string(machine.path("policy.toml"))?)?;
    let profile = ProfileFile::read(&fs::read_to_string(machine.path("profile.toml"))?)?.profile();
    let catalogue = Catalogue::with_site_checks(&policy);
    let rules = catalogue.rules(&policy)?;
    let runs =
        |id: &CheckId| catalogue.get(id).is_some_and(|check| check.spec.depth == Depth::Quick && !check.spec.exclusive);
    let expected: BTreeSet<CheckId> = catalogue.tests(&policy).into_iter().map(|test| test.id).filter(runs).collect();
    let reported: BTreeSet<CheckId> = report.checks.iter().map(|evidence| evidence.test.clone()).collect();
    ensure!(expected == reported, "missing or unexpected checks: {:?}", expected.symmetric_difference(&reported));
    for evidence in &report.checks {
        let check = catalogue.get(&evidence.test).context("the report has a check that this program does not know")?;
        let seen = check.observe(&catalogue.params(&policy, &evidence.test), evidence);
        let judged = classify(&rules, Some(&profile), &evidence.test, &seen);
        ensure!(judged.verdict != Verdict::Fail, "a healthy machine fails {}: {}", evidence.test, judged.text);
    }
    Ok(reported.len())
}
