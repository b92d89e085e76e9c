//! Upgrades as operators see them: a rolling update of controllers, and stores of another schema under every command.
//!
//! There is no released program with a later schema, so a process of this test stands for it: it runs the engine on the
//! simulated cluster as `doctor serve` does, and opens the store with invented migrations. The programs of the old schema
//! are real ones.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_backend::{clock::Clock, progress::Progress};
use doctor_core::{policy::Policy, time::Span};
use doctor_engine::{
    cycle::{CycleError, Engine},
    deps::EngineDeps,
    settings::Settings,
    share::Share,
};
use doctor_sim::{EffectKind, RemoteSim, Tolerances, check_effects, read_effects, simulated_tests};
use doctor_store::{Migration, MigrationBackup, Store, StoreUrl};
use doctor_testbed::postgres::{Server, Setup};
use rusqlite::Connection;

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// The schema of this program.
const NOW: i64 = Store::SCHEMA;

/// The migration of the later program, whose engine is that of this one: it does not use the table that is renamed.
const LATER: &[Migration] = &[Migration {
    sql: "ALTER TABLE node ADD COLUMN rack TEXT; CREATE INDEX history_by_run ON history (run, node, test);
          ALTER TABLE token RENAME TO api_token;",
    readable_since: NOW + 1,
}];

/// The directory of a test, whose later program reads where its store is.
const CHILD: &str = "DOCTOR_TEST_LATER_CONTROLLER";

/// A process that is killed when the test ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have exited already.
        let _already_exited = self.0.kill();
        let _already_exited = self.0.wait();
    }
}

/// A directory for controllers on a served cluster of twelve nodes, whose every effect is recorded. An hour there takes two
/// seconds, and a lease of two hours four.
fn site(store: &str) -> (Workdir, Killed) {
    let workdir = Workdir::new();
    fs::create_dir(workdir.path("data")).unwrap();
    workdir.write("policy.toml", POLICY);
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"{store}\"\nmigration_backup = \"./\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"5m\"\nlease = \"2h\"\n\
             [backend.sim]\nsocket = \"sim.sock\"\n"
        ),
    );
    let args = ["sim", "serve", "--socket", "sim.sock", "--nodes", "12", "--speed", "1800", "--data", "data"];
    let args = [&args[..], &["--effects", "effects.jsonl", "--seed", "5"]].concat();
    let mut child = workdir.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("Serving a simulated cluster"), "{first}");
    (workdir, Killed(child))
}

/// Tests are due often, so that effects are always in flight.
const POLICY: &str = "mode = \"act\"\nallow = { drain = true, reset = true, reboot = true }\nlimits = { jobs = 12, per_share = 6 }\n\
                      [tests.storage]\ncutoff = \"2h\"\n[tests.dl]\ncutoff = \"3h\"\n[tests.nccl]\ncutoff = \"4h\"\n";

fn submitted(workdir: &Workdir) -> usize {
    let effects = read_effects(&workdir.path("effects.jsonl")).unwrap();
    effects.iter().filter(|effect| matches!(effect.what, EffectKind::Submitted { .. })).count()
}

fn signal(service: &Service, signal: &str) {
    assert!(Command::new("kill").args([signal, &service.pid().to_string()]).status().unwrap().success());
}

/// Suspends the controllers until another one has migrated their store. One that was suspended inside a transaction keeps
/// the database locked; then it is resumed and suspended at another instant.
fn suspend_until_migrated(old: [&Service; 2], url: &StoreUrl) {
    const ATTEMPTS: u32 = 30;
    for _ in 0..ATTEMPTS {
        old.iter().for_each(|service| signal(service, "-STOP"));
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(15) {
            if schema_of(url) > NOW {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        old.iter().for_each(|service| signal(service, "-CONT"));
        std::thread::sleep(Duration::from_millis(37));
    }
    panic!("the new controller does not take over");
}

fn schema_of(url: &StoreUrl) -> i64 {
    Store::peek(url).unwrap().schema.unwrap()
}

#[test]
fn a_rolling_update_with_a_grown_schema_doubles_nothing_on_sqlite() {
    let (workdir, _cluster) = site("doctor.db");
    let url = StoreUrl::Sqlite(workdir.path("doctor.db"));
    check_rolling_update(&workdir, &url);
}

#[test]
fn a_rolling_update_with_a_grown_schema_doubles_nothing_on_postgresql() {
    let server = match Server::start(Setup::default()) {
        Ok(server) => server,
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgresql: {why}");
            return;
        }
    };
    let url = server.create_database("rolling").unwrap();
    let (workdir, _cluster) = site(&url);
    check_rolling_update(&workdir, &url.parse().unwrap());
}

fn check_rolling_update(workdir: &Workdir, url: &StoreUrl) {
    let mut old = Service::start(workdir);
    old.wait_for_log("started");
    wait_until("the old controller to act", || submitted(workdir) >= 10);
    let mut old_standby = Service::start(workdir);
    old_standby.wait_for_log("another controller leads");
    let mut new = Service::spawn(later_controller(workdir, url));
    new.wait_for_log("waiting");
    assert_eq!(schema_of(url), NOW, "a controller that waits migrates nothing");

    // The old controllers are suspended with work in flight, and the lease runs out.
    suspend_until_migrated([&old, &old_standby], url);
    new.wait_for_log("leading");
    assert_eq!(schema_of(url), NOW + 1);
    let before = submitted(workdir);
    wait_until("the new controller to act", || submitted(workdir) >= before + 10);

    // They go on where they were, and step back.
    let message =
        format!("the store has schema {}, this program knows up to {NOW}; a newer controller has taken over", NOW + 1);
    for mut service in [old, old_standby] {
        signal(&service, "-CONT");
        service.wait_for_log(&message);
        let (code, log) = service.wait();
        assert_eq!(code, Some(9), "{log}");
    }
    // A restarted one refuses to start, and every command names both versions.
    let refused = workdir.expect(7, &["serve"]);
    refused.stderr_contains(&format!("schema {}", NOW + 1)).stderr_contains(&format!("knows schemas up to {NOW}"));
    for args in [&["nodes"][..], &["hold", "node001", "--why", "x", "--yes"], &["db", "verify"], &["run"]] {
        workdir.expect(7, args).stderr_contains(&format!("schema {} (written by doctor ", NOW + 1));
    }
    workdir.expect(3, &["status"]).stderr_contains("or newer");
    let version = workdir.json(&["version"]);
    let schemas = [&version["schema"], &version["store"]["schema"]].map(serde_json::Value::as_i64);
    assert_eq!(schemas, [Some(NOW), Some(NOW + 1)], "{version}");

    let before = submitted(workdir);
    wait_until("the new controller to go on", || submitted(workdir) >= before + 5);
    drop(new);
    let store = Store::open_as_later_program(url, MigrationBackup::None, LATER).unwrap();
    let verified = store.verify().unwrap();
    assert!(verified.is_consistent(), "{:#?}", verified.problems);
    let effects = read_effects(&workdir.path("effects.jsonl")).unwrap();
    // How long users waited depends on how busy this machine is, and is not judged here.
    let patient = Tolerances { view: Span::days(99), leave: Span::days(99) };
    let wrong: Vec<String> = check_effects(&effects, patient).iter().map(ToString::to_string).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let known: Vec<_> = store.last_runs(u32::MAX >> 1).unwrap().into_iter().map(|record| record.run.id).collect();
    for effect in &effects {
        if let EffectKind::Submitted { run, .. } = &effect.what {
            assert!(known.contains(run), "{run} has a job and is not in the store");
        }
    }
    assert_eq!(backups_in(&workdir.path("")).len(), 1);
}

fn backups_in(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(".schema-")).collect()
}

fn later_controller(workdir: &Workdir, url: &StoreUrl) -> Command {
    let store = match url {
        StoreUrl::Sqlite(path) => path.display().to_string(),
        StoreUrl::Postgres(text) => text.clone(),
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "upgrades::a_controller_of_a_later_program", "--nocapture"]);
    command.env(CHILD, store).current_dir(workdir.path("")).stdin(Stdio::null());
    command
}

/// The process that stands for a later program. Without its variable it is a test with nothing to do.
#[test]
fn a_controller_of_a_later_program() {
    let Ok(url) = std::env::var(CHILD) else { return };
    let backup = MigrationBackup::Directory("./".into());
    let store = Store::open_as_later_program(&url.parse().unwrap(), backup, LATER).unwrap();
    let sim = Arc::new(RemoteSim::connect(Path::new("sim.sock"), Duration::from_secs(120)).unwrap());
    let policy = Policy::with_site_settings(POLICY).unwrap();
    let settings = Settings::new(policy, simulated_tests::catalogue(), simulated_tests::profiles()).unwrap();
    let clock: Arc<dyn Clock> = sim.clone();
    let mut number = 0_u64;
    let mut engine = Engine::new(EngineDeps {
        backend: sim,
        store,
        clock,
        share: Some(Share::open(Path::new("data")).unwrap()),
        copy_folder: None,
        settings,
        inboxes: Vec::new(),
        keys: Box::new(move || {
            number += 1;
            let mut key = [7; 32];
            key[..8].copy_from_slice(&number.to_le_bytes());
            key
        }),
        salt: 77,
        holder: doctor_store::this_process(),
        // Of real time: leases count by the database's clock.
        lease: Span::minutes(2),
        progress: Progress::default(),
        workers: 4,
        publish_every: Span::minutes(10),
    });
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    loop {
        let state = match engine.cycle() {
            Ok(_) => "leading",
            Err(CycleError::NotLeader { .. }) => "waiting",
            // A suspended controller may hold a lock; the next cycle retries, as in `doctor serve`.
            Err(CycleError::Store(error)) => {
                eprintln!("store failed: {error}: {:?}", std::error::Error::source(&error));
                "failing"
            }
        };
        let times = seen.entry(state).or_default();
        *times += 1;
        if *times == 1 {
            eprintln!("{state}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Writes a store of schema 11, by the script of that schema.
fn write_first_schema(path: &Path) {
    let script = include_str!("../../../store/src/migrations/0001.sql");
    let words = [
        ("{serial}", "INTEGER PRIMARY KEY AUTOINCREMENT"),
        ("{number}", "INTEGER"),
        ("{ref}", "INTEGER"),
        ("{blob}", "BLOB"),
        ("{compact}", "WITHOUT ROWID"),
        ("{only-postgres}", "--"),
    ];
    let script = words.iter().fold(script.to_owned(), |text, (place, word)| text.replace(place, word));
    let version =
        "CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY); INSERT INTO schema_version VALUES (11)";
    Connection::open(path).unwrap().execute_batch(&format!("{script};{version}")).unwrap();
}

#[test]
fn only_serve_and_run_migrate_and_other_commands_say_who_does() {
    let workdir = Workdir::local();
    write_first_schema(&workdir.path("doctor.db"));
    let schema = || workdir.json(&["version"])["store"]["schema"].clone();
    for args in [
        &["hold", "here", "--why", "x", "--yes"][..],
        &["token", "create", "x", "--yes"],
        &["pause", "--why", "x", "--yes"],
    ] {
        workdir.expect(7, args).stderr_contains("the store has schema 11").stderr_contains("doctor db migrate");
    }
    workdir.doctor(&["nodes"]);
    workdir.doctor(&["status"]);
    workdir.expect(0, &["db", "backup", "before.db"]);
    workdir.expect(0, &["config", "check"]);
    assert_eq!(schema(), 11);
    assert_eq!(backups_in(&workdir.path("")), [] as [&str; 0]);

    let output = workdir.expect(0, &["run"]);
    output.stderr_contains(&format!("migrated the store from schema 11 to {NOW}"));
    assert_eq!(schema(), NOW);
    assert_eq!(backups_in(&workdir.path("")), ["doctor.db.schema-11.bak"]);
    // The backup of an older store restores into a new one.
    workdir.expect(0, &["db", "restore", "before.db", "--store", "restored.db", "--yes"]);
    workdir.expect(0, &["db", "verify", "--store", "restored.db"]);
}

#[test]
fn a_store_is_migrated_by_hand_with_a_plan_and_a_confirmation() {
    let workdir = Workdir::local();
    workdir.expect(3, &["db", "migrate", "--yes"]).stderr_contains("there is no store");
    write_first_schema(&workdir.path("doctor.db"));
    let planned = workdir.expect(6, &["db", "migrate"]);
    planned
        .stderr_contains(&format!("from schema 11 to {NOW}"))
        .stderr_contains("backup before it: ")
        .stderr_contains("doctor.db.schema-11.bak");
    assert_eq!(workdir.json(&["version"])["store"]["schema"], 11);

    // A controller leads: its lease is respected.
    let lease = "UPDATE lease SET holder = 'elsewhere/1/1:1:1', fence = 3, expires = 9999999999999";
    Connection::open(workdir.path("doctor.db")).unwrap().execute_batch(lease).unwrap();
    workdir.expect(6, &["db", "migrate"]).stderr_contains("elsewhere/1/1:1:1 leads until");
    workdir.expect(5, &["db", "migrate", "--yes"]).stderr_contains("another controller leads: elsewhere");
    let free = "UPDATE lease SET holder = '', expires = 0";
    Connection::open(workdir.path("doctor.db")).unwrap().execute_batch(free).unwrap();

    let done = workdir.expect(0, &["db", "migrate", "--yes"]);
    done.stdout_contains("Migrated the store").stdout_contains("doctor.db.schema-11.bak");
    assert_eq!(workdir.json(&["version"])["controller"]["leader"], serde_json::Value::Null, "the lease is free again");
    workdir.expect(0, &["db", "migrate"]).stdout_contains(&format!("Nothing to do: the store has schema {NOW}"));
    workdir.expect(0, &["run"]);
}

#[test]
fn a_service_does_not_start_where_its_backup_has_no_room() {
    let workdir = Workdir::local();
    write_first_schema(&workdir.path("doctor.db"));
    let config = workdir.read("doctor.toml").replace("data =", "migration_backup = \"/proc/\"\ndata =");
    workdir.write("doctor.toml", &config);
    for args in [&["serve"][..], &["config", "check"], &["db", "migrate", "--yes"]] {
        let output = workdir.expect(3, args);
        output.stderr_contains("was not migrated from 11 to").stderr_contains("/proc/, where 0 MB are free");
    }
    assert_eq!(workdir.json(&["version"])["store"]["schema"], 11);
    let done = workdir.expect(0, &["db", "migrate", "--skip-backup", "--yes"]);
    done.stdout_contains("no backup");
}

#[test]
fn of_two_controllers_that_start_on_an_older_store_one_migrates() {
    let workdir = Workdir::local();
    write_first_schema(&workdir.path("doctor.db"));
    let mut services = [Service::start(&workdir), Service::start(&workdir)];
    for service in &mut services {
        service.wait_for_log("started");
    }
    let url = StoreUrl::Sqlite(workdir.path("doctor.db"));
    wait_until("the migration", || schema_of(&url) == NOW);
    wait_until("a cycle", || workdir.why("here").is_object());
    let logs: Vec<String> = services
        .into_iter()
        .map(|service| {
            let (code, log) = service.stop();
            assert_eq!(code, Some(0), "{log}");
            log
        })
        .collect();
    let migrated = logs.iter().filter(|log| log.contains("store migrated")).count();
    assert_eq!((migrated, backups_in(&workdir.path("")).len()), (1, 1), "{logs:#?}");
}
