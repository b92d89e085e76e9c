//! Upgrades: who migrates a store, what a crash leaves, and what programs of another schema do.
//!
//! The migrations of a later program are invented here. Tests open a store with them through the same code as a
//! controller, so that the path of a migration is exercised before there is one.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use doctor_core::{
    finding::Verdict,
    node::Hold,
    time::{Span, Timestamp},
};
use doctor_store::{LeaseError, Migration, MigrationBackup, PlannedBackup, Store, StoreError, StoreUrl};
use rusqlite::Connection;

use crate::{
    bed::{StoreTestbed, node, postgres},
    released,
};

/// The schema of this program.
const NOW: i64 = Store::SCHEMA;

/// A later program's migrations: the first only adds, the second renames what this program reads.
const ADDED: Migration = Migration {
    sql: "ALTER TABLE node ADD COLUMN rack TEXT;
          CREATE TABLE maintenance (node {ref} NOT NULL REFERENCES node (id), since BIGINT NOT NULL, PRIMARY KEY (node)) {compact};
          INSERT INTO maintenance (node, since) SELECT id, state_since FROM node WHERE hold IS NOT NULL;
          CREATE INDEX history_by_run ON history (run, node, test);",
    readable_since: NOW,
};
const RENAMED: Migration = Migration {
    sql: "ALTER TABLE token RENAME TO api_token; UPDATE audit_log SET origin = 'unknown' WHERE origin IS NULL;",
    readable_since: NOW + 2,
};
const COMPATIBLE: &[Migration] = &[ADDED];
const LATER: &[Migration] = &[ADDED, RENAMED];
const BROKEN: &[Migration] =
    &[ADDED, Migration { sql: "DELETE FROM skip_reason; INSERT INTO no_such_table VALUES (1);", readable_since: NOW }];

/// Its last check is part of the commit, which fails.
const UNCOMMITTABLE: &[Migration] = &[Migration {
    sql: "CREATE TABLE guest (node {ref} REFERENCES node (id) DEFERRABLE INITIALLY DEFERRED);
          INSERT INTO guest (node) VALUES (424242);",
    readable_since: NOW,
}];

const TTL: Span = Span::minutes(1);

fn beside() -> MigrationBackup {
    MigrationBackup::Auto { postgres: "/nonexistent".into() }
}

/// Each kind of database that more than one process can open, with some content.
fn stores() -> Vec<StoreTestbed> {
    let mut beds: Vec<StoreTestbed> = std::iter::once(StoreTestbed::file()).chain(StoreTestbed::postgres()).collect();
    for bed in &mut beds {
        for number in 0..20 {
            bed.run_test(&format!("n{number}"), "disk", Verdict::Pass);
        }
        bed.plan("n1", &["disk"]);
    }
    beds
}

/// Where the backup of this test bed is written: beside SQLite, into the bed's directory for PostgreSQL.
fn backup_of(bed: &StoreTestbed) -> MigrationBackup {
    match bed.url() {
        StoreUrl::Sqlite(_) => beside(),
        StoreUrl::Postgres(_) => MigrationBackup::Directory(bed.folder.path().to_owned()),
    }
}

fn open_later(bed: &StoreTestbed, migrations: &'static [Migration]) -> Store {
    Store::open_as_later_program(bed.url(), backup_of(bed), migrations).unwrap()
}

/// Returns the schema of a store as any program can read it.
fn schema_of(url: &StoreUrl) -> i64 {
    Store::peek(url).unwrap().schema.unwrap()
}

fn hold_at(at: Timestamp) -> Hold {
    Hold { by: "ann".to_owned(), why: "visitors".to_owned(), since: at, until: None }
}

fn backups_in(folder: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = names.filter(|path| path.to_string_lossy().contains(".schema-")).collect();
    found.sort();
    found
}

#[test]
fn only_a_controller_that_leads_migrates() {
    for mut bed in stores() {
        let (url, until) = (bed.url().clone(), bed.now.plus(TTL));
        bed.store.release(&bed.lease).unwrap();
        let leader = bed.store.acquire("old/0/0:1:1", bed.now, TTL).unwrap();
        // A later controller waits: it is ready, reads what it can, and changes nothing.
        let standby = open_later(&bed, LATER);
        assert_eq!(standby.awaited_migration().unwrap(), Some(NOW));
        assert_eq!(standby.leader().unwrap(), Some(("old/0/0:1:1".to_owned(), until)));
        assert_eq!(standby.latest_all().unwrap(), bed.store.latest_all().unwrap());
        let refused = standby.hold(&node("n1"), &hold_at(bed.now)).unwrap_err();
        assert!(matches!(refused, StoreError::NotMigrated { found: NOW, .. }), "{refused}");
        let held = standby.acquire("new", bed.now, TTL).unwrap_err();
        assert!(matches!(held, LeaseError::Held { ref by, .. } if by == "old/0/0:1:1"), "{held}");
        assert_eq!(schema_of(&url), NOW);
        bed.store.renew(&leader, bed.now).unwrap();

        // The lease expires: the next attempt takes it, writes the backup and migrates.
        let now = bed.wait(Span::minutes(2));
        let lease = standby.acquire("new", now, TTL).unwrap();
        assert!(lease.fence > leader.fence);
        assert_eq!(schema_of(&url), NOW + 2);
        let report = standby.take_migration_report().unwrap();
        assert_eq!((report.from, report.to), (NOW, NOW + 2));
        let PlannedBackup::File(backup) = report.backup else { panic!("{:?}", report.backup) };
        assert_eq!(schema_of(&StoreUrl::Sqlite(backup)), NOW);
        assert_eq!(standby.take_migration_report(), None, "a report is taken once");
        standby.renew(&lease, now).unwrap();
    }
}

#[test]
fn a_controller_of_the_old_schema_stops_at_its_next_write_and_reads_what_it_still_understands() {
    for mut bed in stores() {
        let until = bed.wait(Span::days(40_000));
        let later = open_later(&bed, COMPATIBLE);
        later.acquire("new", until, TTL).unwrap();
        let store = &bed.store;
        let errors = [
            ("renew", store.renew(&bed.lease, until).unwrap_err()),
            ("hold", store.hold(&node("n1"), &hold_at(until)).unwrap_err()),
            ("running", {
                let run = store.active_runs().unwrap()[0].run.id;
                store.record_running(&bed.lease, run, until).unwrap_err()
            }),
        ];
        for (what, error) in errors {
            assert!(error.is_superseded() && error.is_lease_lost(), "{what}: {error}");
            let text = error.to_string();
            assert!(text.contains(&format!("schema {}", NOW + 1)), "{what}: {text}");
            assert!(text.contains(&format!("knows schemas up to {NOW}")), "{what}: {text}");
        }
        let LeaseError::Store(error) = store.acquire("old", until, TTL).unwrap_err() else { panic!("it is newer") };
        assert!(error.is_superseded(), "{error}");
        assert!(store.holds_lease(&bed.lease, until).unwrap_err().is_lease_lost(), "no effect follows");

        // The migration says that programs of this schema read the result.
        let reader = Store::open_to_read(bed.url()).unwrap();
        for store in [store, &reader] {
            assert_eq!(store.latest_all().unwrap(), later.latest_all().unwrap());
            assert_eq!(store.active_runs().unwrap().len(), 1);
        }
    }
}

/// Waits until a query that still works fails.
fn error_of<T>(mut query: impl FnMut() -> Result<T, StoreError>) -> StoreError {
    let began = Instant::now();
    loop {
        match query() {
            Err(error) => return error,
            Ok(_) => assert!(began.elapsed() < Duration::from_secs(120), "the query still works"),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_reader_names_both_versions_where_it_would_misread_a_newer_store() {
    for mut bed in stores() {
        let reader = Store::open_to_read(bed.url()).unwrap();
        assert!(reader.tokens().unwrap().is_empty());
        let until = bed.wait(Span::days(40_000));
        open_later(&bed, LATER).acquire("new", until, TTL).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let errors = [
            Store::open_to_read(bed.url()).unwrap_err(),
            Store::open(bed.url()).unwrap_err(),
            reader.tokens().unwrap_err(),
            reader.active_runs().unwrap_err(),
            // A query of one statement finds it out within a second.
            error_of(|| reader.latest_all()),
            error_of(|| bed.store.latest_of(&node("n1"))),
        ];
        for error in errors {
            let text = error.to_string();
            let (theirs, ours) =
                (format!("schema {} (written by doctor {version})", NOW + 2), format!("(doctor {version})"));
            assert!(text.contains(&theirs) && text.contains(&ours), "{text}");
        }
    }
}

/// Creates a store of schema 11 with one node, by the script of that schema.
fn create_first_schema(url: &StoreUrl) {
    let script = include_str!("../../src/migrations/0001.sql");
    let words = match url {
        StoreUrl::Sqlite(_) => {
            ["INTEGER PRIMARY KEY AUTOINCREMENT", "INTEGER", "INTEGER", "BLOB", "WITHOUT ROWID", "--"]
        }
        StoreUrl::Postgres(_) => {
            ["INTEGER GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY", "BIGINT", "INTEGER", "BYTEA", "", ""]
        }
    };
    let places = ["{serial}", "{number}", "{ref}", "{blob}", "{compact}", "{only-postgres}"];
    let script = places.iter().zip(words).fold(script.to_owned(), |text, (place, word)| text.replace(place, word));
    let rows = "INSERT INTO node (name, state, state_since) VALUES ('n1', '\"in-service\"', 0)";
    let version =
        "CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY); INSERT INTO schema_version VALUES (11)";
    run_sql(url, &format!("{script};{version};{rows}"));
}

#[test]
fn a_command_of_this_program_reads_an_older_store_and_says_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("doctor.db");
    let urls = std::iter::once(StoreUrl::Sqlite(path)).chain(postgres::new_database());
    for url in urls {
        create_first_schema(&url);
        let reader = Store::open_to_read(&url).unwrap();
        assert_eq!(reader.node_names().unwrap(), [node("n1")]);
        // The outputs of jobs are kept since schema 12.
        let missing = reader.last_without_result(&node("n1")).unwrap_err();
        assert!(matches!(missing, StoreError::NotMigrated { found: 11, needed: NOW }), "{missing}");
        assert!(missing.to_string().contains("doctor db migrate"), "{missing}");
        let refused = Store::open(&url).unwrap_err();
        assert!(matches!(refused, StoreError::NotMigrated { .. }), "an operator's command does not migrate: {refused}");
        let folder = MigrationBackup::Directory(folder.path().to_owned());
        let planned = Store::plan_migration(&url, &folder).unwrap().unwrap();
        assert_eq!((planned.from, planned.to, schema_of(&url)), (11, NOW, 11));
        let controller = Store::open_to_lead(&url, folder).unwrap();
        controller.acquire("new", Timestamp::from_secs(1_794_800_000), TTL).unwrap();
        assert_eq!(controller.take_migration_report().unwrap().backup, planned.backup);
        assert_eq!(schema_of(&url), NOW);
        assert_eq!(reader.last_without_result(&node("n1")).unwrap(), None);
        assert!(controller.verify().unwrap().is_consistent());
    }
}

#[test]
fn a_failed_migration_leaves_the_store_its_leader_and_no_backup() {
    for mut bed in stores() {
        let until = bed.wait(Span::days(40_000));
        let before = released::digests(&bed.store);
        let later = open_later(&bed, BROKEN);
        let LeaseError::Store(error) = later.acquire("new", until, TTL).unwrap_err() else { panic!("it is broken") };
        assert!(error.to_string().contains("migrating the schema"), "{error}");
        assert_eq!(schema_of(bed.url()), NOW);
        assert_eq!(released::digests(&bed.store), before);
        bed.store.renew(&bed.lease, bed.now).unwrap();
        assert_eq!(backups_in(bed.folder.path()), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_migration_whose_commit_fails_leaves_no_backup_however_often_it_is_tried() {
    for mut bed in stores() {
        let until = bed.wait(Span::days(40_000));
        let later = open_later(&bed, UNCOMMITTABLE);
        for _ in 0..2 {
            let LeaseError::Store(error) = later.acquire("new", until, TTL).unwrap_err() else { panic!("no commit") };
            assert!(error.to_string().contains("committing"), "{error}");
            assert_eq!(backups_in(bed.folder.path()), [] as [PathBuf; 0]);
        }
        assert_eq!(schema_of(bed.url()), NOW);
        bed.store.renew(&bed.lease, bed.now).unwrap();
    }
}

/// A connection that has a lock with which every other lock on the lease collides.
fn lock_lease(url: &StoreUrl) -> Box<dyn std::any::Any> {
    match url {
        StoreUrl::Sqlite(path) => {
            let connection = Connection::open(path).unwrap();
            connection.execute_batch("BEGIN IMMEDIATE").unwrap();
            Box::new(connection)
        }
        StoreUrl::Postgres(text) => {
            let mut client = ::postgres::Client::connect(text, ::postgres::NoTls).unwrap();
            client.batch_execute("BEGIN; SELECT id FROM lease FOR UPDATE").unwrap();
            Box::new(client)
        }
    }
}

#[test]
fn a_controller_that_waits_locks_nothing_whatever_its_version_and_its_ttl() {
    for bed in stores() {
        bed.store.release(&bed.lease).unwrap();
        let leader = bed.store.acquire("old/0/0:1:1", bed.now, TTL.times(10)).unwrap();
        let waiting = [open_later(&bed, LATER), Store::open(bed.url()).unwrap()];
        let lock = lock_lease(bed.url());
        for standby in &waiting {
            // A lock could not be had.
            let held = standby.acquire("new", bed.now, TTL).unwrap_err();
            assert!(matches!(held, LeaseError::Held { ref by, .. } if by == "old/0/0:1:1"), "{held:?}");
        }
        drop(lock);
        bed.store.renew(&leader, bed.now).unwrap();
    }
}

#[test]
fn a_backup_reports_progress_and_only_the_migration_itself_counts_as_migrating() {
    for mut bed in stores() {
        let until = bed.wait(Span::days(40_000));
        let later = open_later(&bed, LATER);
        let (in_backup, in_migration) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let hook = {
            let (store, folder) = (later.clone(), bed.folder.path().to_owned());
            let (in_backup, in_migration) = (Arc::clone(&in_backup), Arc::clone(&in_migration));
            move || {
                let is_written = backups_in(&folder).iter().any(|path| path.extension() == Some("tmp".as_ref()));
                match store.is_migrating() {
                    true => in_migration.fetch_add(1, Ordering::Relaxed),
                    false => in_backup.fetch_add(u32::from(is_written), Ordering::Relaxed),
                };
            }
        };
        later.with_progress(hook).acquire("new", until, TTL).unwrap();
        assert!(in_backup.load(Ordering::Relaxed) > 0, "a copy that hangs would count as alive");
        assert!(in_migration.load(Ordering::Relaxed) > 0, "its end is reported before it counts as ended");
        assert!(!later.is_migrating());
    }
}

#[test]
fn a_probe_writes_into_no_store_that_a_newer_program_has_migrated() {
    for mut bed in stores() {
        let until = bed.wait(Span::days(40_000));
        let later = open_later(&bed, LATER);
        later.probe_write().expect("a controller that waits to migrate is ready");
        bed.store.probe_write().unwrap();
        later.acquire("new", until, TTL).unwrap();
        later.probe_write().unwrap();
        let error = bed.store.probe_write().unwrap_err();
        assert!(error.is_superseded(), "{error}");
    }
}

#[test]
fn a_controller_waits_for_the_migration_of_another_one_and_a_command_reports_it_on_postgresql() {
    let Some(StoreUrl::Postgres(text)) = postgres::new_database() else { return };
    let url: StoreUrl = format!("{text}?options=-c%20lock_timeout%3D1s").parse().unwrap();
    Store::open(&url).unwrap();
    let connect = || ::postgres::Client::connect(&text, ::postgres::NoTls).unwrap();
    let (mut migrating, mut admin) = (connect(), connect());
    // As a process that migrates.
    migrating.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(7301117)").unwrap();
    let refused = Store::open(&url).unwrap_err();
    assert!(matches!(refused, StoreError::SchemaLocked), "{refused:?}");
    let controller = thread::spawn(move || Store::open_to_lead(&url, MigrationBackup::None).map(drop));
    let began = Instant::now();
    // Longer than the limit on locks.
    let waits = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
                 AND clock_timestamp() - query_start > interval '3 s'";
    while admin.query_one(waits, &[]).unwrap().get::<_, i64>(0) == 0 {
        assert!(!controller.is_finished(), "{:?}", controller.join());
        assert!(began.elapsed() < Duration::from_secs(300), "the controller does not wait");
        thread::sleep(Duration::from_millis(20));
    }
    migrating.batch_execute("COMMIT").unwrap();
    controller.join().unwrap().unwrap();
}

#[test]
fn a_controller_waits_for_the_migration_of_another_one_and_a_command_reports_it_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let url = StoreUrl::Sqlite(folder.path().join("doctor.db"));
    Store::open(&url).unwrap();
    // As a process that migrates.
    let migrating = lock_lease(&url);
    let controller = thread::spawn({
        let url = url.clone();
        move || Store::open_to_lead(&url, MigrationBackup::None).map(drop)
    });
    // Longer than a statement of the controller waits for the lock.
    for _ in 0..2 {
        let refused = Store::open(&url).unwrap_err();
        assert!(matches!(refused, StoreError::WriterBusy { .. }), "{refused:?}");
    }
    assert!(!controller.is_finished(), "{:?}", controller.join());
    drop(migrating);
    controller.join().unwrap().unwrap();
}

#[test]
fn a_store_without_room_for_its_backup_keeps_its_schema() {
    for mut bed in stores() {
        let until = bed.wait(Span::days(40_000));
        // The process file system has no free block.
        let later = Store::open_as_later_program(bed.url(), MigrationBackup::Directory("/proc".into()), LATER).unwrap();
        let LeaseError::Store(error) = later.acquire("new", until, TTL).unwrap_err() else {
            panic!("there is no room")
        };
        assert!(matches!(error, StoreError::NoMigrationBackup { from: NOW, .. }), "{error}");
        assert!(error.to_string().contains("in /proc, where 0 MB are free"), "{error}");
        assert_eq!(schema_of(bed.url()), NOW);
        bed.store.renew(&bed.lease, bed.now).unwrap();
    }
}

#[test]
fn a_backup_is_what_the_store_was_with_its_mode_and_restores_it() {
    for mut bed in stores() {
        let (before, active) = (released::digests(&bed.store), bed.store.active_runs().unwrap());
        if let StoreUrl::Sqlite(path) = bed.url() {
            fs::set_permissions(path, fs::Permissions::from_mode(0o640)).unwrap();
        }
        let until = bed.wait(Span::days(40_000));
        let later = open_later(&bed, LATER);
        later.acquire("new", until, TTL).unwrap();
        let PlannedBackup::File(backup) = later.take_migration_report().unwrap().backup else { panic!("no backup") };
        let mode = fs::metadata(&backup).unwrap().permissions().mode() & 0o777;
        match bed.url() {
            StoreUrl::Sqlite(path) => {
                let name = format!("{}.schema-{NOW}.bak", path.display());
                assert_eq!((backup.display().to_string(), mode), (name, 0o640));
            }
            StoreUrl::Postgres(_) => assert_eq!(mode, 0o600, "it holds the keys of active runs"),
        }
        assert_eq!(backups_in(bed.folder.path()), std::slice::from_ref(&backup), "no temporary file is left");
        assert_eq!(released::digests_of_file(&backup), before);
        let restored = Store::open_in_memory().unwrap();
        restored.restore(&backup).unwrap();
        assert_eq!(restored.active_runs().unwrap(), active, "with the keys of the runs");
        assert!(restored.verify().unwrap().is_consistent());
    }
}

/// Writers of both kinds run while a later controller takes over: what was acknowledged is in the migrated store, and
/// nothing is written after it.
#[test]
fn a_write_during_a_migration_lands_before_it_or_fails_by_the_schema() {
    for bed in stores() {
        bed.store.release(&bed.lease).unwrap();
        let written = AtomicU32::new(0);
        let began = Instant::now();
        let (now, url) = (bed.now, bed.url().clone());
        thread::scope(|scope| {
            let write = || {
                loop {
                    let held = Store::open(&url).and_then(|store| store.hold(&node("n1"), &hold_at(now)));
                    match held {
                        Ok(()) => {
                            written.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) if error.is_superseded() => return,
                        // SQLite's one writer is busy.
                        Err(StoreError::Sqlite { .. } | StoreError::WriterBusy { .. }) => {}
                        Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
                    }
                    assert!(began.elapsed() < Duration::from_secs(300), "no write finds the new schema");
                }
            };
            let writers = [scope.spawn(write), scope.spawn(write), scope.spawn(write)];
            while written.load(Ordering::Relaxed) < 20 {
                assert!(began.elapsed() < Duration::from_secs(300), "nothing is written");
                thread::sleep(Duration::from_millis(1));
            }
            let later = open_later(&bed, LATER);
            later.acquire("new", now, TTL).unwrap();
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            let audited = later.audit(1_000_000, None).unwrap();
            let holds = audited.iter().filter(|line| line.text.contains("visitors")).count();
            assert_eq!(holds, written.load(Ordering::Relaxed) as usize, "acknowledged and stored");
        });
    }
}

#[test]
fn a_migration_killed_at_any_instant_leaves_the_old_or_the_new_schema() {
    let kills: u32 = std::env::var("DOCTOR_MIGRATION_KILLS").map_or(12, |text| text.parse().unwrap());
    for bed in stores() {
        bed.store.release(&bed.lease).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let saved = folder.path().join("saved.db");
        bed.store.backup(&saved).unwrap();
        let (mut old, mut new, mut usual) = (0, 0, Duration::ZERO);
        let original = another_store(bed.url(), &saved, &folder.path().join("original"));
        let before = released::digests(&Store::open(&original.url).unwrap());
        for number in 0..=kills {
            let copy = another_store(bed.url(), &saved, &folder.path().join(format!("{number}")));
            let began = Instant::now();
            let mut child = migrate_in_child(&copy);
            if number == 0 {
                assert!(child.wait().unwrap().success(), "a migration that is not killed");
                usual = began.elapsed();
                assert_eq!(schema_of(&copy.url), NOW + 2);
                continue;
            }
            // The instant itself, not a wait: from the start to a little after the usual end.
            thread::sleep(usual.mul_f64(1.1 * f64::from(number) / f64::from(kills)));
            let _ended = child.kill();
            child.wait().unwrap();
            wait_for_its_sessions(&copy.url);
            let found = schema_of(&copy.url);
            let backups = backups_in(&copy.folder);
            let complete: Vec<&PathBuf> =
                backups.iter().filter(|path| path.extension() == Some("bak".as_ref())).collect();
            if found == NOW {
                old += 1;
                let store = Store::open(&copy.url).unwrap();
                assert_eq!(released::digests(&store), before);
            } else {
                new += 1;
                assert_eq!((found, complete.len()), (NOW + 2, 1), "a migrated store has its backup");
                let later = Store::open_as_later_program(&copy.url, MigrationBackup::None, LATER).unwrap();
                assert!(later.verify().unwrap().is_consistent());
            }
            for backup in complete {
                assert_eq!(released::digests_of_file(backup), before);
            }
            // The next controller finishes, whatever the killed one left.
            let later = Store::open_as_later_program(&copy.url, copy.backup.clone(), LATER).unwrap();
            later.acquire("next", Timestamp::from_secs(1_794_900_000), TTL).unwrap();
            assert_eq!(schema_of(&copy.url), NOW + 2);
            assert!(!backups_in(&copy.folder).iter().any(|path| path.extension() == Some("tmp".as_ref())));
        }
        println!("{}: {kills} kills within {usual:?}: {old} with the old schema, {new} with the new", bed.url());
    }
}

/// Waits until the server has noticed that its client is gone, and has rolled back or committed.
fn wait_for_its_sessions(url: &StoreUrl) {
    let StoreUrl::Postgres(text) = url else { return };
    let mut client = ::postgres::Client::connect(text, ::postgres::NoTls).unwrap();
    let sql = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let began = Instant::now();
    while client.query_one(sql, &[]).unwrap().get::<_, i64>(0) > 0 {
        assert!(began.elapsed() < Duration::from_secs(300), "a session of the killed process does not end");
        thread::sleep(Duration::from_millis(5));
    }
}

struct CopiedStore {
    url: StoreUrl,
    folder: PathBuf,
    backup: MigrationBackup,
}

/// Restores a backup into a new store of the same kind.
fn another_store(like: &StoreUrl, saved: &Path, folder: &Path) -> CopiedStore {
    fs::create_dir(folder).unwrap();
    let (url, backup) = match like {
        StoreUrl::Sqlite(_) => (StoreUrl::Sqlite(folder.join("doctor.db")), beside()),
        StoreUrl::Postgres(_) => (postgres::new_database().unwrap(), MigrationBackup::Directory(folder.to_owned())),
    };
    Store::open(&url).unwrap().restore(saved).unwrap();
    CopiedStore { url, folder: folder.to_owned(), backup }
}

const CHILD_STORE: &str = "DOCTOR_TEST_MIGRATED_STORE";
const CHILD_BACKUP: &str = "DOCTOR_TEST_BACKUP_FOLDER";

fn migrate_in_child(copy: &CopiedStore) -> std::process::Child {
    let text = match &copy.url {
        StoreUrl::Sqlite(path) => path.display().to_string(),
        StoreUrl::Postgres(text) => text.clone(),
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "upgrades::a_process_that_migrates", "--nocapture"]);
    if let MigrationBackup::Directory(folder) = &copy.backup {
        command.env(CHILD_BACKUP, folder);
    }
    command.env(CHILD_STORE, text).stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null());
    command.spawn().unwrap()
}

/// The process that the test above kills. Without its variable it is a test with nothing to do.
#[test]
fn a_process_that_migrates() {
    let Ok(url) = std::env::var(CHILD_STORE) else { return };
    let backup = match std::env::var(CHILD_BACKUP) {
        Ok(folder) => MigrationBackup::Directory(folder.into()),
        Err(_) => beside(),
    };
    let store = Store::open_as_later_program(&url.parse().unwrap(), backup, LATER).unwrap();
    store.acquire(&doctor_store::this_process(), Timestamp::from_secs(1_794_800_000), TTL).unwrap();
}

/// Runs statements beside the store.
fn run_sql(url: &StoreUrl, sql: &str) {
    match url {
        StoreUrl::Sqlite(path) => Connection::open(path).unwrap().execute_batch(sql).unwrap(),
        StoreUrl::Postgres(text) => {
            ::postgres::Client::connect(text, ::postgres::NoTls).unwrap().batch_execute(sql).unwrap();
        }
    }
}
