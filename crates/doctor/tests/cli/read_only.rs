//! Reading by a user who may only read: the store's files and their directory are those of another user.

use std::{os::unix::fs::PermissionsExt, path::Path, process::Command};

use crate::{
    this_machine::Service,
    workdir::{CommandOutput, Workdir, demo, wait_until},
};

/// A user without any right of its own.
const NOBODY: &str = "65534";

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Lets every user read the directory and the store in it, and write neither.
fn publish(workdir: &Workdir) {
    set_mode(&workdir.path(""), 0o755);
    for suffix in ["", "-wal", "-shm"] {
        let file = workdir.path(&format!("doctor.db{suffix}"));
        if file.exists() {
            set_mode(&file, 0o644);
        }
    }
}

/// Runs a command as another user. `None`: this machine cannot.
fn as_nobody(workdir: &Workdir, args: &[&str]) -> Option<CommandOutput> {
    // The folder of the build may be closed to other users.
    let program = workdir.path("doctor");
    if !program.exists() {
        let built = env!("CARGO_BIN_EXE_doctor");
        std::fs::hard_link(built, &program).or_else(|_| std::fs::copy(built, &program).map(drop)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]).arg(program).args(args);
    command.current_dir(workdir.path("")).env_clear().env("HOME", "/nonexistent").env("PATH", "/usr/bin:/bin");
    let output = command.output().ok()?;
    let output = CommandOutput::from_output(&output);
    let cannot = output.err.contains("setpriv:");
    (!cannot).then_some(output)
}

fn nobody_can_run(workdir: &Workdir) -> bool {
    publish(workdir);
    let can = as_nobody(workdir, &["--version"]).is_some_and(|output| output.code == 0);
    if !can {
        println!("NOT RUN: reading as another user: it needs root, setpriv and a program that every user may run");
    }
    can
}

#[test]
fn a_user_who_may_only_read_reads_while_the_controller_runs_after_it_stopped_and_after_a_kill() {
    let workdir = Workdir::local();
    if !nobody_can_run(&workdir) {
        return;
    }
    let mut service = Service::start(&workdir);
    service.wait_for_log("started");
    wait_until("the node is observed", || workdir.why("here").is_object());
    publish(&workdir);
    let reads = |when: &str| {
        for args in
            [&["status"][..], &["nodes"], &["why", "here"], &["history"], &["cases"], &["audit"], &["breaker", "show"]]
        {
            let output = as_nobody(&workdir, &[args, &["--config", "doctor.toml"]].concat()).unwrap();
            // `doctor status` has the exit codes of a Nagios plugin; 3 is unknown.
            let largest = if args[0] == "status" { 2 } else { 1 };
            assert!(
                (0..=largest).contains(&output.code),
                "{when}: doctor {}: {}{}",
                args.join(" "),
                output.out,
                output.err
            );
            assert!(
                output.err.is_empty() && !output.out.is_empty(),
                "{when}: doctor {}: {}",
                args.join(" "),
                output.err
            );
        }
        let change = as_nobody(&workdir, &["hold", "here", "--why", "x", "--yes", "--config", "doctor.toml"]).unwrap();
        assert_eq!(change.code, 3, "{when}: {}{}", change.out, change.err);
        change.stderr_contains("permission");
    };
    reads("while the controller runs");
    assert_eq!(service.stop().0, Some(0));
    reads("after it stopped");
    let mut service = Service::start(&workdir);
    service.wait_for_log("started");
    // A log with its header alone is not readable without a repair.
    let log = workdir.path("doctor.db-wal");
    wait_until("the controller writes", || std::fs::metadata(&log).is_ok_and(|log| log.len() > 4096));
    drop(service);
    reads("after a kill");
    std::fs::copy(&log, workdir.path("whole-wal")).unwrap();
    std::fs::File::options().write(true).open(&log).unwrap().set_len(32).unwrap();
    let output = as_nobody(&workdir, &["nodes", "--config", "doctor.toml"]).unwrap();
    assert_eq!(output.code, 3, "{}{}", output.out, output.err);
    output.stderr_contains("was killed when it began to write").stderr_contains("start the controller");
    std::fs::copy(workdir.path("whole-wal"), &log).unwrap();
    assert_eq!(workdir.why("here")["hold"], serde_json::Value::Null);
}

#[test]
fn a_store_without_its_log_files_is_reported_and_not_opened_as_immutable() {
    let workdir = Workdir::local();
    if !nobody_can_run(&workdir) {
        return;
    }
    workdir.expect(0, &["run"]);
    // As in a copy of the file alone, with everything in it. A thread of the program that has just ended may have left a log.
    let store = rusqlite::Connection::open(workdir.path("doctor.db")).unwrap();
    store.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(store);
    for suffix in ["-wal", "-shm"] {
        let _removed_by_sqlite = std::fs::remove_file(workdir.path(&format!("doctor.db{suffix}")));
        assert!(!workdir.path(&format!("doctor.db{suffix}")).exists());
    }
    publish(&workdir);
    let output = as_nobody(&workdir, &["nodes", "--store", "doctor.db", "--config", "/dev/null"]).unwrap();
    assert_eq!(output.code, 3, "{}{}", output.out, output.err);
    output.stderr_contains("doctor.db-wal").stderr_contains("start the controller");
    // With write permission the same store is read, and its log files are there from then on.
    workdir.expect(0, &["nodes", "--store", "doctor.db"]);
    workdir.expect(0, &["pause", "--why", "x", "--yes", "--store", "doctor.db"]);
    publish(&workdir);
    let output = as_nobody(&workdir, &["nodes", "--store", "doctor.db", "--config", "/dev/null"]).unwrap();
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
}

#[test]
fn a_plan_for_a_named_store_is_that_of_its_cluster() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    let store = demo().path("demo/doctor.db").display().to_string();
    // In a directory with the configuration of this machine, a store of the demo is planned as the demo's cluster.
    let plan = workdir.json(&["plan", "--all", "--store", &store]);
    let nodes: Vec<&str> = plan["skipped"].as_array().unwrap().iter().filter_map(|row| row["node"].as_str()).collect();
    assert!(!nodes.contains(&"here") && nodes.iter().any(|node| node.starts_with("node0")), "{plan}");
    workdir
        .expect(0, &["plan", "--store", &store])
        .stderr_contains("planned from the cluster as the controller observed it");
    // A configuration that is named too must be that of the same cluster.
    let other = workdir.expect(2, &["plan", "--store", &store, "--config", "doctor.toml"]);
    other.stderr_contains("the store records another cluster (sim: node[001-024])").stderr_contains("(local: here)");
    workdir.expect(0, &["plan", "--store", "doctor.db", "--config", "doctor.toml"]);
    // A store that no cycle has written to has no cluster.
    workdir.expect(0, &["token", "create", "x", "--yes", "--store", "empty.db"]);
    workdir.expect(3, &["plan", "--store", "empty.db"]).stderr_contains("records no observation of a cluster");
    workdir.expect(3, &["plan", "--store", "missing.db"]).stderr_contains("there is no store at missing.db");
}
