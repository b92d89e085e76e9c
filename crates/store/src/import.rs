//! Imports databases of the system this one replaces: `validation.db`, `test-storage.db`, `test-nccl.db`.
//!
//! Their rows become untrusted history: the original wrote "pass" whatever the test reported. They make no test fresh
//! unless the operator declares them trustworthy. The two performance files have measurements but no verdicts, so their
//! rows are inconclusive and never trusted. Importing again adds nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    reason::ReasonCode,
    time::{Span, Timestamp},
};
use rusqlite::{Connection, types::ValueRef};

use super::{
    Store,
    audit::{self, Counter, NewAuditLine},
    db::{Access, ColumnType, Tx, open_read_only, vals},
    error::{Result, StoreError},
    id_cache::OutcomeKind,
    records::ImportSummary,
    result_writer::{self, NewHistoryRow},
};

/// Rows per transaction.
const ROWS: usize = 5000;
/// The last second that a run id can encode: in the year 2109. A larger value is not in seconds.
const LATEST: i64 = (1 << 42) / 1000 - 1;
/// Unreadable rows that are quoted.
const EXAMPLES: usize = 5;

const IMPORTED: ReasonCode = ReasonCode::fixed("imported");
const MEASURED_ONLY: ReasonCode = ReasonCode::fixed("imported-measurement");

/// The three files, by the table that identifies them. The position in this list is part of the rows' run ids: if it
/// changed, importing again would duplicate everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Validation,
    Storage,
    Nccl,
}

impl Source {
    const ALL: [Self; 3] = [Self::Validation, Self::Storage, Self::Nccl];

    const fn table(self) -> &'static str {
        match self {
            Self::Validation => "runs",
            Self::Storage => "storage_performance",
            Self::Nccl => "nccl_performance",
        }
    }

    const fn columns(self) -> &'static [&'static str] {
        match self {
            Self::Validation => &["node", "test", "timestamp", "result"],
            Self::Storage | Self::Nccl => &["node", "timestamp"],
        }
    }

    /// Distinguishes the files in the run ids of imported rows.
    const fn number(self) -> u64 {
        match self {
            Self::Validation => 1,
            Self::Storage => 2,
            Self::Nccl => 3,
        }
    }
}

/// A parsed row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LegacyRow {
    pub(super) node: NodeName,
    test: TestId,
    pub(super) at: Timestamp,
    pub(super) run: RunId,
    verdict: Verdict,
    reason: ReasonCode,
    /// Whether the row contains a verdict that could be trusted.
    has_verdict: bool,
}

impl Store {
    /// Imports these files, which are only read.
    pub fn import(&self, files: &[PathBuf], trust: bool, at: Timestamp) -> Result<ImportSummary> {
        let mut report = ImportSummary::default();
        for file in files {
            let found = read_file(file, &mut report)?;
            for some in found.chunks(ROWS) {
                self.write_unfenced(Access::WriteExclusive, |tx| import_rows(tx, some, trust, at))?.add_to(&mut report);
            }
        }
        if report.added + report.trusted > 0 {
            self.write_unfenced(Access::Write, |tx| {
                let text = format!(
                    "{} rows, {} of them already imported, {} unreadable, from {}",
                    report.added + report.already_imported,
                    report.already_imported,
                    report.skipped,
                    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
                );
                let code = if trust { "trusted" } else { "untrusted" }.to_owned();
                audit::append(
                    tx,
                    at,
                    None,
                    &[NewAuditLine { action: "import", code, text, ..NewAuditLine::default() }],
                )?;
                audit::add_counts(
                    tx,
                    &[(Counter::HistoryRewrites, 1), (Counter::HistoryChanges, 1), (Counter::OperatorChanges, 1)],
                )
            })?;
        }
        Ok(report)
    }
}

/// Counts of one step.
#[derive(Debug, Clone, Copy, Default)]
struct ImportCounts {
    added: u64,
    known: u64,
    trusted: u64,
}

impl ImportCounts {
    const fn add_to(self, report: &mut ImportSummary) {
        report.added += self.added;
        report.already_imported += self.known;
        report.trusted += self.trusted;
    }
}

fn refused(file: &Path, why: &str) -> StoreError {
    StoreError::Refused {
        operation: "importing",
        why: format!(
            "{}: {why}; expected a SQLite file with a table runs(node, test, timestamp, result), \
             storage_performance(node, timestamp, …) or nccl_performance(node, timestamp, …)",
            file.display()
        ),
    }
}

pub(super) fn read_file(file: &Path, report: &mut ImportSummary) -> Result<Vec<LegacyRow>> {
    let cannot = |error: rusqlite::Error| refused(file, &error.to_string());
    let database = open_read_only(file).map_err(|error| refused(file, &error.to_string()))?;
    let tables: BTreeSet<String> = database
        .prepare("SELECT name FROM sqlite_schema WHERE type = 'table'")
        .and_then(|mut statement| statement.query_map((), |row| row.get(0))?.collect())
        .map_err(cannot)?;
    let mut found = Vec::new();
    let mut any = false;
    for source in Source::ALL.into_iter().filter(|source| tables.contains(source.table())) {
        any = true;
        let has = columns_of(&database, source.table()).map_err(cannot)?;
        if let Some(lacking) = source.columns().iter().find(|column| !has.contains(**column)) {
            return Err(refused(file, &format!("its table {} has no column {lacking}", source.table())));
        }
        read_table(&database, source, &mut found, report).map_err(cannot)?;
    }
    if !any {
        return Err(refused(file, "it has none of the known tables"));
    }
    found.sort_by_key(|row| row.run);
    Ok(found)
}

fn columns_of(database: &Connection, table: &str) -> rusqlite::Result<BTreeSet<String>> {
    let mut statement = database.prepare(&format!("PRAGMA table_info({table})"))?;
    statement.query_map((), |row| row.get(1))?.collect()
}

fn read_table(
    database: &Connection,
    source: Source,
    found: &mut Vec<LegacyRow>,
    report: &mut ImportSummary,
) -> rusqlite::Result<()> {
    // Rows with the same node, test and second are distinguished by their order, which is the same every time.
    let mut ordinals: HashMap<(NodeName, TestId, Timestamp), u64> = HashMap::new();
    let columns = source.columns().join(", ");
    let mut statement = database.prepare(&format!("SELECT {columns} FROM {} ORDER BY rowid", source.table()))?;
    let mut rows = statement.query(())?;
    while let Some(row) = rows.next()? {
        match parse_row(row, source)? {
            Ok((node, test, at, verdict, reason)) => {
                let ordinal = ordinals.entry((node.clone(), test.clone(), at)).or_default();
                let run = run_number(source, at, *ordinal);
                *ordinal += 1;
                let verdict_given = source == Source::Validation;
                found.push(LegacyRow { node, test, at, run, verdict, reason, has_verdict: verdict_given });
            }
            Err(why) => {
                report.skipped += 1;
                if report.skipped_examples.len() < EXAMPLES {
                    report.skipped_examples.push(format!("{}: {why}", source.table()));
                }
            }
        }
    }
    Ok(())
}

/// Returns a unique run id: time, then file, then order. Our own runs have random low bits and later times.
fn run_number(source: Source, at: Timestamp, ordinal: u64) -> RunId {
    let millis = at.millis().cast_unsigned();
    RunId::from_number((millis << 21) | (source.number() << 18) | ordinal.min((1 << 18) - 1))
}

type ParsedRow = (NodeName, TestId, Timestamp, Verdict, ReasonCode);

fn parse_row(row: &rusqlite::Row<'_>, source: Source) -> rusqlite::Result<std::result::Result<ParsedRow, String>> {
    let node = text(row.get_ref(0)?);
    let (test, when, result) = match source {
        Source::Validation => (text(row.get_ref(1)?), row.get_ref(2)?, Some(text(row.get_ref(3)?))),
        Source::Storage => ("storage".to_owned(), row.get_ref(1)?, None),
        Source::Nccl => ("nccl".to_owned(), row.get_ref(1)?, None),
    };
    let at = text(when);
    Ok((|| {
        let name = NodeName::new(node.trim()).map_err(|error| error.to_string())?;
        let test = TestId::new(&path_safe(&test)).map_err(|error| error.to_string())?;
        let at = at
            .trim()
            .parse()
            .ok()
            .filter(|seconds| (1..=LATEST).contains(seconds))
            .map(Timestamp::from_secs)
            .ok_or_else(|| format!("{name}: `{at}` is not a time in seconds since 1970"))?;
        let (verdict, reason) = match result.as_deref().map(|text| text.trim().to_ascii_lowercase()).as_deref() {
            None => (Verdict::Inconclusive, MEASURED_ONLY),
            Some("pass") => (Verdict::Pass, IMPORTED),
            Some("fail") => (Verdict::Fail, IMPORTED),
            Some("incomplete") => (Verdict::Inconclusive, IMPORTED),
            Some(other) => return Err(format!("{name}: `{other}` is not pass, fail or incomplete")),
        };
        Ok((name, test, at, verdict, reason))
    })())
}

fn text(value: ValueRef<'_>) -> String {
    match value {
        ValueRef::Null => String::new(),
        ValueRef::Integer(number) => number.to_string(),
        ValueRef::Real(number) => number.to_string(),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
    }
}

/// Replaces characters that are not allowed in test names: the original has names with spaces (`DL unit test`).
fn path_safe(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    name.trim().chars().map(safe).collect()
}

/// Adds missing rows. With `trust`, existing untrusted rows become trusted.
fn import_rows(tx: &mut Tx<'_>, found: &[LegacyRow], trust: bool, now: Timestamp) -> Result<ImportCounts> {
    let mut keys = Vec::with_capacity(found.len());
    for row in found {
        keys.push((tx.node_id(&row.node, now)?, row.run.number().cast_signed(), tx.test_id(&row.test)?));
    }
    let nodes: Vec<i64> = keys.iter().map(|(node, ..)| *node).collect::<BTreeSet<_>>().into_iter().collect();
    let there = existing_rows(tx, &nodes, &keys)?;
    let before = result_writer::load_state_before(tx, &nodes)?;
    let mut taken = ImportCounts::default();
    let (mut fresh, mut believed) = (Vec::new(), Vec::new());
    for (row, key) in found.iter().zip(&keys) {
        let kind = kind_of(row, trust);
        let entry = NewHistoryRow {
            node: key.0,
            run: row.run,
            test: key.2,
            kind,
            at: row.at,
            duration: Span::ZERO,
            bundle: None,
        };
        match there.get(key) {
            None => {
                taken.added += 1;
                fresh.push(entry);
            }
            Some(outcome) => {
                taken.known += 1;
                if !entry.kind.untrusted && tx.ids.outcome(*outcome)?.untrusted {
                    taken.trusted += 1;
                    believed.push(entry);
                }
            }
        }
    }
    result_writer::write_results(tx, &before, &fresh)?;
    trust_rows(tx, &before, &believed)?;
    Ok(taken)
}

fn kind_of(row: &LegacyRow, trust: bool) -> OutcomeKind {
    let mut kind = OutcomeKind::new(row.verdict, None, row.reason.clone());
    kind.imported = true;
    kind.untrusted = !(trust && row.has_verdict);
    kind
}

/// Returns which of these rows are in history, with their outcome.
fn existing_rows(tx: &mut Tx<'_>, nodes: &[i64], keys: &[(i64, i64, i64)]) -> Result<BTreeMap<(i64, i64, i64), i64>> {
    let runs = || keys.iter().map(|(_, run, _)| *run);
    let (Some(lowest), Some(highest)) = (runs().min(), runs().max()) else { return Ok(BTreeMap::new()) };
    let sql = format!(
        "SELECT node, run, test, outcome FROM history WHERE node IN {{keys}} AND run >= {lowest} AND run <= {highest}"
    );
    let mut there = BTreeMap::new();
    tx.rows_by_key("reading imported rows", &sql, nodes, |row| {
        there.insert((row.int(0)?, row.int(1)?, row.int(2)?), row.int(3)?);
        Ok(())
    })?;
    Ok(there)
}

/// Makes untrusted rows count.
fn trust_rows(tx: &mut Tx<'_>, before: &result_writer::StateBefore, entries: &[NewHistoryRow]) -> Result<()> {
    let mut rows = Vec::with_capacity(entries.len() * 4);
    for entry in entries {
        let outcome = tx.outcome_id(&entry.kind)?;
        rows.extend_from_slice(vals![entry.node, entry.run, entry.test, outcome]);
    }
    let sqlite = "UPDATE history SET outcome = $4 WHERE node = $1 AND run = $2 AND test = $3";
    let postgres = "UPDATE history h SET outcome = b.outcome \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[], $4::int8[]) AS b (node, run, test, outcome) \
                    WHERE h.node = b.node AND h.run = b.run AND h.test = b.test";
    tx.execute_each("trusting imported rows", (sqlite, postgres), &[ColumnType::Int; 4], &rows)?;
    result_writer::count_newly_trusted(tx, entries)?;
    let tests: BTreeSet<(i64, i64)> = entries.iter().map(|entry| (entry.node, entry.test)).collect();
    let tests: Vec<(i64, i64)> = tests.into_iter().collect();
    result_writer::recompute_latest(tx, &tests, before)
}
