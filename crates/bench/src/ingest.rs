//! M5: results per second, from signed bytes to a durable row, with 64 writers.
//!
//! Each writer verifies, parses and classifies a document as a node would write it, and waits until the store has it on
//! disk. Correctness check: afterwards every run has exactly one result with the right verdict, and the store's own
//! verification succeeds.

mod documents;
mod writers;

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, Result, ensure};
use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId},
    time::Span,
};
use doctor_engine::settings::Settings;
use doctor_store::{GroupCommit, Lease, Store, StoreUrl, records::HistoryFilter};
use doctor_testbed::postgres::{Server, Setup};
use serde_json::{Value, json};

use self::{
    documents::{Job, Plans},
    writers::Round,
};
use crate::{
    Measured,
    figure::Figure,
    stopwatch::{REPEATS, cpu_time_of, median, spread},
};

const WRITERS: usize = 64;
/// Results per repeat, one for each node.
const RESULTS: usize = 10_000;
/// The lease holder.
const HOLDER: &str = "bench";

pub(crate) fn run_sqlite() -> Result<Measured> {
    let folder = tempfile::tempdir().context("creating a folder for the store")?;
    let url = StoreUrl::Sqlite(folder.path().join("doctor.db"));
    let rounds = measure(&Store::open(&url)?, None)?;
    Ok(Measured::Figures(figures(&rounds, "", &inputs("SQLite", "journal_mode=WAL, synchronous=FULL"))))
}

pub(crate) fn run_postgres() -> Result<Measured> {
    if let Err(why) = Server::can_start() {
        return Ok(Measured::NotAvailable(why.to_string()));
    }
    let server = Server::start(Setup { durable: true, ..Setup::default() })?;
    server.create_database("ingest")?;
    let url: StoreUrl = server.socket_url("ingest").parse()?;
    let rounds = measure(&Store::open(&url)?, Some(server.pid()))?;
    Ok(Measured::Figures(figures(
        &rounds,
        "_pg",
        &inputs("PostgreSQL, by its socket", "fsync=on, synchronous_commit=on"),
    )))
}

fn inputs(database: &str, durability: &str) -> Value {
    json!({
        "database": database, "durability": durability, "writers": WRITERS, "results": RESULTS,
        "document_bytes": documents::size(), "tests_per_document": 1, "failing_percent": documents::FAILING_PERCENT,
    })
}

/// Runs all repeats and then verifies the stored results. The first repeat is a warm-up.
fn measure(store: &Store, server: Option<u32>) -> Result<Vec<Round>> {
    let settings = documents::settings()?;
    let mut plans = Plans::new(RESULTS);
    let lease = store.acquire(HOLDER, plans.now(), Span::days(3_650))?;
    let group = GroupCommit::start(store, &lease)?;
    let mut expected: HashMap<(RunId, NodeName), Verdict> = HashMap::new();
    let mut rounds = Vec::new();
    eprintln!("  measuring");
    for repeat in 0..=REPEATS {
        let jobs = plan(store, &lease, &mut plans)?;
        expected.extend(jobs.iter().map(|job| ((job.run.run.id, job.node.clone()), job.verdict)));
        let round = ingest(&settings, store, &group, jobs, server)?;
        if repeat > 0 {
            rounds.push(round);
        }
    }
    drop(group);
    eprintln!("  checking: every result once");
    check(store, &expected)?;
    Ok(rounds)
}

fn plan(store: &Store, lease: &Lease, plans: &mut Plans) -> Result<Vec<Job>> {
    plans.wait();
    let jobs = plans.jobs()?;
    plans.commit(store, lease, &jobs)?;
    Ok(jobs)
}

fn ingest(
    settings: &Settings,
    store: &Store,
    group: &GroupCommit,
    jobs: Vec<Job>,
    server: Option<u32>,
) -> Result<Round> {
    let used = |server: Option<u32>| server.map_or(Ok(Duration::ZERO), cpu_time_of);
    let before = used(server)?;
    let mut round = writers::run(settings, store, group, WRITERS, jobs)?;
    round.server = used(server)?.saturating_sub(before);
    ensure!(round.latencies.len() == RESULTS, "{} results were stored, {RESULTS} were sent", round.latencies.len());
    Ok(round)
}

fn check(store: &Store, expected: &HashMap<(RunId, NodeName), Verdict>) -> Result<()> {
    let rows = store.history(&HistoryFilter::default())?;
    ensure!(rows.len() == expected.len(), "{} rows are in history, {} results were stored", rows.len(), expected.len());
    let mut seen = HashMap::with_capacity(rows.len());
    for row in rows {
        let run = row.run.context("a row of history has no run")?;
        let sent = expected.get(&(run, row.node.clone())).with_context(|| format!("{run} was not sent"))?;
        ensure!(row.verdict == *sent, "{run} on {} is {}, {sent} was sent", row.node, row.verdict);
        ensure!(seen.insert((run, row.node), ()).is_none(), "{run} is in history twice");
    }
    let verified = store.verify()?;
    ensure!(verified.is_consistent(), "the store is inconsistent: {}", verified.problems.join("; "));
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "ten thousand results")]
fn figures(rounds: &[Round], suffix: &str, inputs: &Value) -> Vec<Figure> {
    let figure = |name: &str, unit, values: &[f64], note: &str| Figure {
        name: format!("{name}{suffix}"),
        value: median(values),
        unit,
        inputs: inputs.clone(),
        note: format!("{note}; {}", spread(values)),
    };
    let rates: Vec<f64> = rounds.iter().map(|round| RESULTS as f64 / round.sample.wall.as_secs_f64()).collect();
    let p99: Vec<f64> = rounds.iter().map(Round::p99_ms).collect();
    let each = |cpu: Duration| cpu.as_secs_f64() * 1e6 / RESULTS as f64;
    let cpu: Vec<f64> = rounds.iter().map(|round| each(round.sample.cpu)).collect();
    let server: Vec<f64> = rounds.iter().map(|round| each(round.server)).collect();
    let mut figures = vec![
        figure("results_per_s", "1/s", &rates, "signature, parse, interpret, classify, compress, store, sync"),
        figure("p99_ms", "ms", &p99, "from receiving a document until its result is durable"),
        figure("cpu_us_per_result", "us", &cpu, "CPU time of this process"),
    ];
    if median(&server) > 0.0 {
        figures.push(figure("server_cpu_us_per_result", "us", &server, "CPU time of the database server"));
    }
    figures
}
