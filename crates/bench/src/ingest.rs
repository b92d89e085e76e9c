//! M5: results per second, from the first byte sent to the shipped `doctor serve` until each can be read.
//!
//! The controller runs as a user starts it, on a simulated cluster that is a process of its own and in which nothing
//! happens by itself. 64 TLS connections post reports of agents and result documents of runs that the controller has
//! planned. Both have the evidence of all checks that the shipped agent ran on the fake machine with eight GPUs; every
//! report is a full one, as agents send once an hour. The time of a round ends when the ingest queue is empty, because
//! a message leaves it in the transaction that makes it readable. Messages are signed before the round: on a cluster,
//! each node does that itself.
//!
//! `busy_p99_ms` is the same while the control loop waits for a cluster that does not answer.
//!
//! Correctness check: every run has exactly one result of each test, every report counts once, the verdict of the check
//! that fails on some nodes is right on all, and the store's own verification succeeds.

mod cluster;
mod messages;
mod senders;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use doctor_store::StoreUrl;
use doctor_testbed::postgres::{Server, Setup};
use serde_json::{Value, json};

use self::{
    cluster::Cluster,
    messages::{Messages, Template},
    senders::Round,
};
use crate::{
    Measured,
    figure::Figure,
    shipped,
    stopwatch::{REPEATS, cpu_time_of, median, millis, spread},
};

const CONNECTIONS: usize = 64;
const NODES: usize = 2_000;
/// Reports and documents per round.
const RESULTS: usize = 2_000;
/// Of them, documents, if the controller has planned as many runs.
const DOCUMENTS: usize = 160;
/// Messages while the loop is busy, and the time that the cluster does not answer.
const BUSY_RESULTS: usize = 500;

pub(crate) fn run_sqlite() -> Result<Measured> {
    let folder = tempfile::tempdir().context("creating a folder for the store")?;
    let url = StoreUrl::Sqlite(folder.path().join("doctor.db"));
    let rounds = measure(&url, None)?;
    Ok(Measured::Figures(figures(&rounds, "", &rounds.inputs("SQLite", "journal_mode=WAL, synchronous=FULL"))))
}

pub(crate) fn run_postgres() -> Result<Measured> {
    if let Err(why) = Server::can_start() {
        return Ok(Measured::NotAvailable(why.to_string()));
    }
    let server = Server::start(Setup { durable: true, ..Setup::default() })?;
    server.create_database("ingest")?;
    let url: StoreUrl = server.socket_url("ingest").parse()?;
    let rounds = measure(&url, Some(server.pid()))?;
    let inputs = rounds.inputs("PostgreSQL, by its socket", "fsync=on, synchronous_commit=on");
    Ok(Measured::Figures(figures(&rounds, "_pg", &inputs)))
}

/// All rounds on one database.
struct Rounds {
    rounds: Vec<Round>,
    busy: Round,
    documents: usize,
    message_bytes: usize,
    checks: usize,
}

impl Rounds {
    fn inputs(&self, database: &str, durability: &str) -> Value {
        json!({
            "database": database, "durability": durability, "connections": CONNECTIONS, "scheme": "https",
            "nodes": NODES, "results": RESULTS, "documents": self.documents, "checks": self.checks,
            "message_bytes": self.message_bytes, "failing_percent": messages::FAILING_PERCENT,
            "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        })
    }
}

/// Runs all rounds and then verifies the stored results. The first round is a warm-up, in which every result is new.
fn measure(url: &StoreUrl, server: Option<u32>) -> Result<Rounds> {
    let template = Template::record()?;
    let cluster = Cluster::start(&shipped::doctor()?, url, NODES, &template)?;
    eprintln!("  enrolling {NODES} agents");
    let mut messages = Messages::new(template, cluster.enroll()?, cluster.planned_runs(DOCUMENTS * (REPEATS + 1))?);
    let mut rounds = Vec::new();
    let mut documents = 0;
    eprintln!("  measuring");
    for repeat in 0..=REPEATS {
        let round = messages.round(RESULTS, DOCUMENTS)?;
        documents = round.iter().filter(|message| message.is_document()).count();
        let used = Used::now(&cluster, server)?;
        let mut sent = senders::run(cluster.endpoint(), CONNECTIONS, round, || cluster.is_queue_empty())?;
        (sent.controller, sent.server) = used.since(&cluster, server)?;
        ensure!(sent.latencies.len() == RESULTS, "{} of {RESULTS} messages were accepted", sent.latencies.len());
        if repeat > 0 {
            rounds.push(sent);
        }
    }
    eprintln!("  measuring while the cluster does not answer");
    let round = messages.round(BUSY_RESULTS, 0)?;
    let message_bytes = round.first().map_or(0, |message| message.bytes.len());
    let frozen = cluster.freeze()?;
    let busy = senders::run(cluster.endpoint(), CONNECTIONS, round, || Ok(true))?;
    drop(frozen);
    cluster.wait_until_queue_is_empty()?;
    eprintln!("  checking: every result once");
    let checks = messages.checks();
    cluster.verify(&messages)?;
    Ok(Rounds { rounds, busy, documents, message_bytes, checks })
}

/// CPU time of the controller and of the database server.
struct Used(Duration, Duration);

impl Used {
    fn now(cluster: &Cluster, server: Option<u32>) -> Result<Self> {
        Ok(Self(cpu_time_of(cluster.controller())?, server.map_or(Ok(Duration::ZERO), cpu_time_of)?))
    }

    fn since(self, cluster: &Cluster, server: Option<u32>) -> Result<(Duration, Duration)> {
        let now = Self::now(cluster, server)?;
        Ok((now.0.saturating_sub(self.0), now.1.saturating_sub(self.1)))
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few thousand results")]
fn figures(all: &Rounds, suffix: &str, inputs: &Value) -> Vec<Figure> {
    let figure = |name: &str, unit, values: &[f64], note: &str| Figure {
        name: format!("{name}{suffix}"),
        value: median(values),
        unit,
        inputs: inputs.clone(),
        note: format!("{note}; {}", spread(values)),
    };
    let of = |part: fn(&Round) -> f64| all.rounds.iter().map(part).collect::<Vec<f64>>();
    let each = |cpu: Duration| cpu.as_secs_f64() * 1e6 / RESULTS as f64;
    let controller: Vec<f64> = all.rounds.iter().map(|round| each(round.controller)).collect();
    let client: Vec<f64> = all.rounds.iter().map(|round| each(round.sample.cpu)).collect();
    let server: Vec<f64> = all.rounds.iter().map(|round| each(round.server)).collect();
    let mut figures = vec![
        figure(
            "results_per_s",
            "1/s",
            &of(|round: &Round| RESULTS as f64 / round.sample.wall.as_secs_f64()),
            "from the first byte sent until each result can be read",
        ),
        figure("p99_ms", "ms", &of(Round::p99_ms), "from sending a message to its answer, when it is durable"),
        figure(
            "durable_per_s",
            "1/s",
            &of(|round: &Round| RESULTS as f64 / round.answered.as_secs_f64()),
            "until the last answer",
        ),
        figure("controller_cpu_us_per_result", "us", &controller, "CPU time of doctor serve"),
        figure("client_cpu_us_per_result", "us", &client, "CPU time of this process"),
        Figure {
            name: format!("busy_p99_ms{suffix}"),
            value: all.busy.p99_ms(),
            unit: "ms",
            inputs: inputs.clone(),
            note: format!(
                "{BUSY_RESULTS} reports while a cycle waits for the cluster, {:.0} ms",
                millis(all.busy.answered)
            ),
        },
    ];
    if median(&server) > 0.0 {
        figures.push(figure("server_cpu_us_per_result", "us", &server, "CPU time of the database server"));
    }
    figures
}
