//! Stores of released programs, migrated to the schema of today.
//!
//! Each folder below `tests/released` is the store of one release, made by its program (`scripts/store-fixture.py`, with
//! the commit in its README). A change of the schema extends [`KEPT_ELSEWHERE`] by what it moves, and nothing else: every
//! value of a release must still be there.

use std::{collections::BTreeMap, fs, path::Path};

use doctor_core::{hex, run::RunState, time::Timestamp};
use doctor_store::{MigrationBackup, Store, StoreUrl, records::HistoryFilter};
use rusqlite::{Connection, types::ValueRef};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::bed::postgres;

/// The content of a table: its columns, and a digest of its rows that does not depend on their order.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct TableDigest {
    columns: Vec<String>,
    rows: usize,
    digest: String,
}

type Tables = BTreeMap<String, TableDigest>;

/// Tables whose rows a start or a migration changes: the leader, the versions, and what is kept by key.
const CHANGED_BY_A_START: [&str; 3] = ["lease", "meta", "schema_version"];

/// Released tables and columns that a later schema keeps under another name: `(released, today)`.
const KEPT_ELSEWHERE: [(&str, &str); 1] = [
    // No released controller has filled it: the queue of verified messages has its name.
    ("ingest_queue.evidence_pack", "ingest_queue.id"),
];

/// Returns the content of a store as its backup has it.
pub(crate) fn digests(store: &Store) -> Tables {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("backup.db");
    store.backup(&file).unwrap();
    digests_of_file(&file)
}

pub(crate) fn digests_of_file(file: &Path) -> Tables {
    let connection = Connection::open(file).unwrap();
    let sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'";
    let mut statement = connection.prepare(sql).unwrap();
    let names: Vec<String> = statement.query_map((), |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    names.into_iter().map(|name| (name.clone(), digest(&connection, &name, &columns(&connection, &name)))).collect()
}

fn columns(connection: &Connection, table: &str) -> Vec<String> {
    let mut statement = connection.prepare(&format!("PRAGMA table_info({table})")).unwrap();
    statement.query_map((), |row| row.get(1)).unwrap().map(Result::unwrap).collect()
}

/// The digest of `scripts/store-fixture.py`.
fn digest(connection: &Connection, table: &str, columns: &[String]) -> TableDigest {
    let mut statement = connection.prepare(&format!("SELECT {} FROM {table}", columns.join(", "))).unwrap();
    let mut rows = statement.query(()).unwrap();
    let mut lines: Vec<Vec<u8>> = Vec::new();
    while let Some(row) = rows.next().unwrap() {
        let values: Vec<Vec<u8>> = (0..columns.len()).map(|index| text(row.get_ref(index).unwrap())).collect();
        lines.push(values.join(&0x1f));
    }
    lines.sort();
    let digest = hex::encode(&Sha256::digest(lines.join(&0x1e)));
    TableDigest { columns: columns.to_vec(), rows: lines.len(), digest }
}

fn text(value: ValueRef<'_>) -> Vec<u8> {
    match value {
        ValueRef::Null => vec![0],
        ValueRef::Integer(number) => number.to_string().into_bytes(),
        ValueRef::Real(number) => panic!("no column of the store is a floating-point number: {number}"),
        ValueRef::Text(text) => text.to_vec(),
        ValueRef::Blob(bytes) => hex::encode(bytes).into_bytes(),
    }
}

fn released(release: &str, file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/released").join(release).join(file);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn unpacked(release: &str, file: &str) -> Vec<u8> {
    zstd::decode_all(&released(release, file)[..]).unwrap()
}

/// Returns what the program of the release had in its store.
fn expected(release: &str, database: &str) -> Tables {
    let mut all: BTreeMap<String, Tables> = serde_json::from_slice(&released(release, "expected.json")).unwrap();
    all.remove(database).unwrap()
}

#[test]
fn the_sqlite_store_of_v0_2_0_keeps_its_meaning() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("doctor.db");
    fs::write(&path, unpacked("v0.2.0", "sqlite.db.zst")).unwrap();
    let expected = expected("v0.2.0", "sqlite");
    assert_eq!(without_leader(&digests_of_file(&path)), without_leader(&expected), "the fixture is as it was made");
    check_upgrade(&StoreUrl::Sqlite(path), folder.path(), &expected);
}

#[test]
fn the_postgresql_store_of_v0_2_0_keeps_its_meaning() {
    let Some(url) = postgres::new_database() else { return };
    let StoreUrl::Postgres(text) = &url else { panic!("{url}") };
    let dump = String::from_utf8(unpacked("v0.2.0", "postgresql.sql.zst")).unwrap();
    ::postgres::Client::connect(text, ::postgres::NoTls).unwrap().batch_execute(&dump).unwrap();
    let folder = tempfile::tempdir().unwrap();
    check_upgrade(&url, folder.path(), &expected("v0.2.0", "postgresql"));
}

/// The row of the lease is that of the moment at which the fixture or its backup was made.
fn without_leader(tables: &Tables) -> Tables {
    tables.iter().filter(|(name, _)| *name != "lease").map(|(name, table)| (name.clone(), table.clone())).collect()
}

/// Opens the store of a release as a controller of today, and compares each value with what the release had.
fn check_upgrade(url: &StoreUrl, backups: &Path, expected: &Tables) {
    let released_schema = Store::peek(url).unwrap().schema.unwrap();
    let rows = |table: &str| expected[table].rows;
    let now = Timestamp::from_secs(2_000_000_000);

    let store = Store::open_to_lead(url, MigrationBackup::Directory(backups.to_owned())).unwrap();
    let lease = store.acquire("today", now, doctor_core::time::Span::minutes(1)).unwrap();
    assert_eq!(Store::peek(url).unwrap().schema, Some(Store::SCHEMA));
    let migrated = store.take_migration_report();
    assert_eq!(migrated.is_some(), released_schema < Store::SCHEMA);

    let file = backups.join("migrated.db");
    store.backup(&file).unwrap();
    let today = Connection::open(&file).unwrap();
    for (table, content) in expected {
        let name = kept_as(table);
        let columns: Vec<String> =
            content.columns.iter().map(|column| column_of(kept_as(&format!("{table}.{column}")))).collect();
        let found = digest(&today, name, &columns);
        if CHANGED_BY_A_START.contains(&table.as_str()) {
            assert!(found.rows >= content.rows, "{table}");
        } else {
            assert_eq!((found.rows, found.digest), (content.rows, content.digest.clone()), "{table}");
        }
    }
    // What the rows mean, as this program reads them.
    let nodes = store.load_nodes().unwrap();
    assert_eq!(nodes.len(), rows("node"));
    assert_eq!(store.cases_all(u32::MAX >> 1).unwrap().len(), rows("case_record"));
    assert_eq!(store.latest_all().unwrap().len(), rows("latest_result"), "those of runs; agents' are read by node");
    assert_eq!(store.history(&HistoryFilter::default()).unwrap().len(), rows("history"));
    let active = store.active_runs().unwrap();
    let pending: usize = active.iter().map(|active| active.run.nodes.to_vec().len()).sum();
    assert_eq!(pending, rows("pending_results"));
    assert!(active.iter().all(|active| !matches!(active.run.state, RunState::Ended(_))));
    assert_eq!(store.agents().unwrap().len(), rows("agent"));
    let tokens = store.tokens().unwrap();
    assert_eq!(tokens.len(), rows("token"));
    assert!(tokens.iter().any(|token| token.name == "old" && token.revoked.is_some()), "{tokens:?}");
    assert_eq!(store.mutes().unwrap().len(), rows("mute"));
    assert_eq!(store.open_commands().unwrap().len(), rows("operator_command"));
    assert_eq!(store.pauses(now).unwrap().len(), rows("pause"));
    assert_eq!(store.skip_reasons().unwrap().len(), rows("skip_reason"));
    assert_eq!(store.audit(u32::MAX >> 1, None).unwrap().len(), rows("audit_log"));
    let (_, state) = store.cluster_state().unwrap().unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    assert!(state.is_object(), "{state}");
    let outputs = nodes.keys().filter(|node| store.last_without_result(node).unwrap().is_some()).count();
    assert!(outputs > 0, "{} rows of job output", rows("job_output"));
    let verified = store.verify().unwrap();
    assert!(verified.is_consistent(), "{:#?}", verified.problems);
    store.renew(&lease, now).unwrap();
}

/// Returns where a released table, or `table.column`, is kept today.
fn kept_as(released: &str) -> &str {
    KEPT_ELSEWHERE.iter().find(|(name, _)| *name == released).map_or(released, |(_, today)| *today)
}

fn column_of(path: &str) -> String {
    path.rsplit('.').next().unwrap_or(path).to_owned()
}
