//! M4: queries over ten million rows of history, on both databases, through the store's public interface.
//!
//! Correctness check: every answer equals the one computed from the generator of the rows. The databases are generated
//! once and cached; after generation the store's own verification must succeed.

mod expected;
mod fill;
mod generator;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use doctor_core::time::Span;
use doctor_store::{Store, StoreUrl, records::HistoryFilter};
use doctor_testbed::postgres::{Server, Setup};
use serde_json::{Value, json};

use self::{expected::Expected, generator::GeneratedRow};
use crate::{
    Measured, cache,
    figure::Figure,
    random::spread,
    stopwatch::{REPEATS, Samples, time},
};

/// The number of rows requested for a node.
const LAST: u32 = 20;
/// The database on the cached server.
const DATABASE: &str = "history";

pub(crate) fn run_sqlite() -> Result<Measured> {
    let path = cache::input("history-sqlite", fill::fingerprint()?, |path| {
        eprintln!("  generating {} rows, once", GeneratedRow::ROWS);
        fill::sqlite(path)?;
        verify_store(&Store::open(&StoreUrl::Sqlite(path.to_owned()))?)
    })?;
    let store = Store::open(&StoreUrl::Sqlite(path.clone()))?;
    let samples = measure_queries(&store)?;
    let bytes = std::fs::metadata(&path).context("reading the size of the database")?.len();
    Ok(Measured::Figures(samples.figures("", bytes, &inputs("SQLite"))))
}

pub(crate) fn run_postgres() -> Result<Measured> {
    let making = |path: &Path| {
        eprintln!("  generating {} rows, once", GeneratedRow::ROWS);
        let server = Server::start(Setup::default())?;
        let url = server.create_database(DATABASE)?;
        fill::postgres(&url)?;
        verify_store(&Store::open(&url.parse()?)?)?;
        Ok(server.stop_and_keep(path)?)
    };
    if let Err(why) = Server::can_start() {
        return Ok(Measured::NotAvailable(why.to_string()));
    }
    let data = cache::input("history-postgres", fill::fingerprint()?, making)?;
    let server = Server::start(Setup { durable: true, data: Some(&data), tls: None })?;
    let url = server.socket_url(DATABASE);
    let samples = measure_queries(&Store::open(&url.parse()?)?)?;
    Ok(Measured::Figures(samples.figures("_pg", fill::postgres_bytes(&url)?, &inputs("PostgreSQL, by its socket"))))
}

fn inputs(database: &str) -> Value {
    json!({
        "database": database, "rows": GeneratedRow::ROWS, "nodes": GeneratedRow::NODES, "tests": GeneratedRow::TESTS.len(), "days": GeneratedRow::DAYS,
    })
}

/// Runs the store's own verification: `latest_result` and the counts must match the history.
fn verify_store(store: &Store) -> Result<()> {
    eprintln!("  checking: the store verifies the generated history");
    let verified = store.verify()?;
    ensure!(verified.is_consistent(), "the generated history is inconsistent: {}", verified.problems.join("; "));
    Ok(())
}

struct QuerySamples {
    all_latest: Samples,
    last: Samples,
    rates: Samples,
}

impl QuerySamples {
    #[expect(clippy::cast_precision_loss, reason = "a file's size and ten million are small against 2^53")]
    fn figures(&self, suffix: &str, bytes: u64, inputs: &Value) -> Vec<Figure> {
        let mut figures = Vec::new();
        figures.extend(self.all_latest.figures("all_latest", suffix, inputs, "Store::latest_all, 30,000 rows"));
        let note = format!("Store::history, the newest {LAST} of a node, another node each time");
        figures.extend(self.last.figures("last20", suffix, inputs, &note));
        figures.extend(self.rates.figures("rate30d", suffix, inputs, "Store::failure_rates over 30 days"));
        figures.push(Figure {
            name: format!("bytes_per_row{suffix}"),
            value: bytes as f64 / GeneratedRow::ROWS as f64,
            unit: "bytes",
            inputs: inputs.clone(),
            note: "size of the database by rows of history, without runs and evidence, which retention deletes"
                .to_owned(),
        });
        figures
    }
}

/// Runs every query, compares the answers, then repeats them with a stopwatch.
fn measure_queries(store: &Store) -> Result<QuerySamples> {
    eprintln!("  checking: query results against the generator");
    let expected = Expected::compute()?;
    let since = GeneratedRow::END.minus(Span::days(30));
    expected.check_latest(&store.latest_all()?)?;
    expected.check_rates(&store.failure_rates(since)?, since)?;
    eprintln!("  measuring");
    let mut answers =
        QuerySamples { all_latest: Samples::default(), last: Samples::default(), rates: Samples::default() };
    for repeat in 0..REPEATS as u64 {
        let (all, sample) = time(|| store.latest_all());
        ensure!(all?.len() == GeneratedRow::PAIRS, "latest results are missing");
        answers.all_latest.push(sample);

        let node = u32::try_from(spread(repeat) % u64::from(GeneratedRow::NODES)).context("choosing a node")?;
        let filter =
            HistoryFilter { node: Some(GeneratedRow::name(node)), limit: Some(LAST), ..HistoryFilter::default() };
        let (rows, sample) = time(|| store.history(&filter));
        expected::check_newest(node, &rows?, LAST as usize)?;
        answers.last.push(sample);

        let (rates, sample) = time(|| store.failure_rates(since));
        expected.check_rates(&rates?, since)?;
        answers.rates.push(sample);
    }
    Ok(answers)
}
