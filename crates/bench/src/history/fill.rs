//! Fills a store's tables with the generated history in chronological order, through each database's bulk interface.
//!
//! The store's own interface takes minutes for ten million results. The store's `verify` confirms that the tables
//! contain what that interface would have written.

use std::{collections::BTreeMap, fmt::Write as _, io::Write as _, path::Path};

use anyhow::{Context, Result};
use doctor_core::{finding::Severity, lifecycle::NodeState};
use doctor_store::{Store, StoreUrl};

use super::{expected::Expected, generator::GeneratedRow};
use crate::random::spread;

const HOUR: i64 = 3_600_000;

/// A value of a row.
enum Cell {
    Null,
    Int(i64),
    Text(String),
}

impl From<i64> for Cell {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl<T: Into<Self>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// Direct access to a database, bypassing the store.
trait Inside {
    /// Appends rows to `table (columns)`.
    fn append(&mut self, table: &str, columns: &[&str], rows: &mut dyn Iterator<Item = Vec<Cell>>) -> Result<()>;
}

/// Returns a fingerprint that changes with the schema and with the generator.
pub(crate) fn fingerprint() -> Result<u64> {
    const MADE: u64 = 1;
    let folder = tempfile::tempdir().context("creating a folder for an empty store")?;
    let path = folder.path().join("empty.db");
    drop(Store::open(&StoreUrl::Sqlite(path.clone()))?);
    let schema: Option<String> = rusqlite::Connection::open(&path)
        .and_then(|empty| empty.query_row("SELECT group_concat(sql) FROM sqlite_schema", (), |row| row.get(0)))
        .context("reading the schema of an empty store")?;
    Ok(schema.unwrap_or_default().bytes().fold(spread(MADE), |seen, byte| spread(seen ^ u64::from(byte))))
}

pub(crate) fn sqlite(path: &Path) -> Result<()> {
    drop(Store::open(&StoreUrl::Sqlite(path.to_owned()))?);
    let operation = "filling the SQLite database";
    let mut connection = rusqlite::Connection::open(path).context(operation)?;
    // There is no other reader, and an unfinished database is discarded: no journal, no sync, everything in memory.
    let settings = "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -2097152; PRAGMA locking_mode = EXCLUSIVE;";
    connection.execute_batch(settings).context(operation)?;
    let tx = connection.transaction().context(operation)?;
    fill(&mut SqliteInside(&tx))?;
    tx.commit().context(operation)?;
    connection.close().map_err(|(_, error)| error).context(operation)
}

pub(crate) fn postgres(url: &str) -> Result<()> {
    drop(Store::open(&url.parse()?)?);
    let operation = "filling the PostgreSQL database";
    let mut client = postgres::Client::connect(url, postgres::NoTls).context(operation)?;
    fill(&mut PostgresInside(&mut client))?;
    // Autovacuum would do this before long.
    client.batch_execute("VACUUM ANALYZE").context(operation)
}

pub(crate) fn postgres_bytes(url: &str) -> Result<u64> {
    let operation = "reading the size of the database";
    let mut client = postgres::Client::connect(url, postgres::NoTls).context(operation)?;
    let bytes: i64 = client.query_one("SELECT pg_database_size(current_database())", &[]).context(operation)?.get(0);
    Ok(bytes.cast_unsigned())
}

/// Returns a database id; ids start at 1.
fn number(index: usize) -> Cell {
    Cell::Int(i64::try_from(index).unwrap_or(i64::MAX) + 1)
}

fn fill(database: &mut dyn Inside) -> Result<()> {
    let state = serde_json::to_string(&NodeState::InService).context("writing a state")?;
    let began = GeneratedRow::END.millis();
    let mut nodes = (0..GeneratedRow::NODES).map(|node| {
        vec![number(node as usize), GeneratedRow::name(node).as_str().into(), state.as_str().into(), began.into()]
    });
    database.append("node", &["id", "name", "state", "state_since"], &mut nodes)?;
    let mut tests = GeneratedRow::TESTS.iter().enumerate().map(|(index, name)| vec![number(index), (*name).into()]);
    database.append("test", &["id", "name"], &mut tests)?;
    fill_outcomes(database)?;
    let mut rows = GeneratedRow::all().map(|row| {
        let run = row.run.number().cast_signed();
        let since_birth = row.at.millis() - row.run.born().millis();
        vec![
            number(row.node as usize),
            run.into(),
            number(row.test),
            number(row.outcome),
            since_birth.into(),
            row.took.millis().into(),
        ]
    });
    database.append("history", &["node", "run", "test", "outcome", "offset_ms", "duration_ms"], &mut rows)?;
    fill_latest(database)?;
    fill_hourly(database)
}

fn fill_outcomes(database: &mut dyn Inside) -> Result<()> {
    let columns = ["id", "name", "verdict", "severity", "reason", "untrusted", "imported", "by_agent"];
    let mut rows = GeneratedRow::OUTCOMES.iter().enumerate().map(|(index, kind)| {
        let severity = kind.severity.map(Severity::code);
        let name = format!("{}/{}/own/{}", kind.verdict, severity.unwrap_or("-"), kind.reason);
        let verdict = kind.verdict.code();
        vec![
            number(index),
            name.as_str().into(),
            verdict.into(),
            severity.into(),
            kind.reason.into(),
            Cell::Int(0),
            Cell::Int(0),
            Cell::Int(0),
        ]
    });
    database.append("outcome", &columns, &mut rows)
}

fn fill_latest(database: &mut dyn Inside) -> Result<()> {
    let columns = [
        "node",
        "test",
        "attempted_at",
        "outcome",
        "run",
        "settled_at",
        "conclusive_outcome",
        "conclusive_at",
        "inconclusive_count",
    ];
    let expected = Expected::compute()?;
    let mut rows = expected.latest.iter().enumerate().map(|(index, latest)| {
        vec![
            number(index / GeneratedRow::TESTS.len()),
            number(index % GeneratedRow::TESTS.len()),
            latest.record.attempt().map(|at| at.millis()).into(),
            number(latest.outcome),
            latest.run.number().cast_signed().into(),
            latest.record.settled().map(|at| at.millis()).into(),
            latest.conclusive.map_or(Cell::Null, |(outcome, _)| number(outcome)),
            latest.conclusive.map(|(_, at)| at.millis()).into(),
            i64::from(latest.record.misses()).into(),
        ]
    });
    database.append("latest_result", &columns, &mut rows)
}

fn fill_hourly(database: &mut dyn Inside) -> Result<()> {
    let columns = ["hour", "test", "passed", "failed", "inconclusive", "not_applicable"];
    let mut counts: BTreeMap<(i64, usize), [i64; 4]> = BTreeMap::new();
    for row in GeneratedRow::all() {
        // The columns have the order of the outcomes: one per verdict.
        counts.entry((row.at.millis().div_euclid(HOUR), row.test)).or_default()[row.outcome] += 1;
    }
    let mut rows = counts.into_iter().map(|((hour, test), counts)| {
        let mut row = vec![Cell::Int(hour), number(test)];
        row.extend(counts.map(Cell::Int));
        row
    });
    database.append("hourly_count", &columns, &mut rows)
}

struct SqliteInside<'a>(&'a rusqlite::Connection);

impl Inside for SqliteInside<'_> {
    fn append(&mut self, table: &str, columns: &[&str], rows: &mut dyn Iterator<Item = Vec<Cell>>) -> Result<()> {
        let placeholders = vec!["?"; columns.len()].join(", ");
        let sql = format!("INSERT INTO {table} ({}) VALUES ({placeholders})", columns.join(", "));
        let mut statement = self.0.prepare(&sql).with_context(|| format!("filling {table}"))?;
        for row in rows {
            statement.execute(rusqlite::params_from_iter(row)).with_context(|| format!("filling {table}"))?;
        }
        Ok(())
    }
}

impl rusqlite::ToSql for Cell {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        match self {
            Self::Null => Ok(rusqlite::types::Null.into()),
            Self::Int(number) => number.to_sql(),
            Self::Text(text) => text.to_sql(),
        }
    }
}

struct PostgresInside<'a>(&'a mut postgres::Client);

impl Inside for PostgresInside<'_> {
    fn append(&mut self, table: &str, columns: &[&str], rows: &mut dyn Iterator<Item = Vec<Cell>>) -> Result<()> {
        let operation = || format!("filling {table}");
        let sql = format!("COPY {table} ({}) FROM STDIN", columns.join(", "));
        let mut copy = std::io::BufWriter::with_capacity(1 << 16, self.0.copy_in(&sql).with_context(operation)?);
        let mut line = String::new();
        for row in rows {
            line.clear();
            for (column, cell) in row.iter().enumerate() {
                line.push_str(if column > 0 { "\t" } else { "" });
                // No generated name contains a character that COPY needs escaped.
                match cell {
                    Cell::Null => line.push_str("\\N"),
                    Cell::Int(number) => write!(line, "{number}").context("writing a number")?,
                    Cell::Text(text) => line.push_str(text),
                }
            }
            line.push('\n');
            copy.write_all(line.as_bytes()).with_context(operation)?;
        }
        let copy = copy.into_inner().map_err(std::io::IntoInnerError::into_error).with_context(operation)?;
        copy.finish().with_context(operation)?;
        Ok(())
    }
}
