//! The command line as its callers use it: exit codes, the log while a job runs, and the document at its end.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt},
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use doctor_checks::{
    document::{Document, RunKey},
    job_file::exit,
    result_transport::{self, TerminationMessage},
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
const KEY: RunKey = RunKey::new([3; 32]);

/// A machine as a file tree.
fn tree(meminfo: &str, kmsg: &str) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("proc/meminfo", meminfo);
    write("proc/uptime", "1000.00 900.00\n");
    write("proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n");
    write("sys/class/dmi/id/board_serial", "J1020304\n");
    write("dev/kmsg", kmsg);
    root
}

const GOOD_MEMORY: &str = "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n";
const LOW_MEMORY: &str = "MemTotal: 8000000 kB\nMemAvailable: 7000 kB\n";
const QUIET: &str = "6,1,0,-;booted\n";
const DAMAGED: &str = "3,1,900000000,-;EXT4-fs error (device sda1): ext4_lookup:1855: inode #2\n";

fn check(root: &Path, args: &[&str]) -> Output {
    Command::new(PROGRAM).arg("check").args(args).arg("--root").arg(root).output().unwrap()
}

#[test]
fn a_hook_without_a_report_target_fails_no_job() {
    let state = tempfile::tempdir().unwrap();
    let config = state.path().join("hook.toml");
    for text in ["nonsense", &format!("state = {:?}\nagent = \"/no/such/file\"\n", state.path())] {
        fs::write(&config, text).unwrap();
        for kind in ["health", "prolog", "epilog"] {
            let full = fs::File::options().write(true).open("/dev/full").unwrap();
            let mut hook = Command::new(PROGRAM);
            let status = hook.args(["hook", kind, "--config"]).arg(&config).stderr(full).status().unwrap();
            assert_eq!(status.code(), Some(0), "{kind} with {text}");
        }
    }
}

#[test]
fn check_exits_as_nagios_reads_it() {
    let both = ["memory", "kernel-log"];
    for (meminfo, kmsg, names, code) in [
        (GOOD_MEMORY, QUIET, &both[..], 0),
        (LOW_MEMORY, QUIET, &both[..], 1),
        (GOOD_MEMORY, DAMAGED, &both[..], 2),
        (LOW_MEMORY, DAMAGED, &both[..], 2),
        (GOOD_MEMORY, "", &both[..], 3),
        (LOW_MEMORY, "", &both[..], 3),
        (GOOD_MEMORY, QUIET, &["no-such-check"][..], 3),
        (GOOD_MEMORY, QUIET, &["--no-such-option"][..], 3),
    ] {
        let output = check(tree(meminfo, kmsg).path(), names);
        assert_eq!(output.status.code(), Some(code), "{meminfo} {kmsg} {names:?}: {output:?}");
    }
    let help = Command::new(PROGRAM).arg("--help").output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&help.stdout).contains("__"), "internals are hidden");
}

#[test]
fn check_prints_the_same_results_as_a_table_or_json() {
    let root = tree(LOW_MEMORY, DAMAGED);
    let table = check(root.path(), &["memory", "kernel-log"]);
    let table = String::from_utf8_lossy(&table.stdout);
    assert!(table.contains("file-system-error: disk:sda1: EXT4-fs error"), "{table}");
    let json = check(root.path(), &["memory", "kernel-log", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json[0]["check"], "memory");
    assert_eq!(json[0]["verdict"], "fail");
    let rows = json.as_array().unwrap();
    let damaged = rows.iter().find(|row| row["reason"] == "file-system-error").unwrap();
    assert_eq!((damaged["severity"].as_str(), damaged["verdict"].as_str()), (Some("reboot"), Some("fail")));
    assert_eq!(damaged["entity"], "disk:sda1");
}

/// Runs AzNHC the way `doctor-node test` finds it: a program at a path that the policy names.
fn aznhc(script: &str) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("run-health-checks.sh");
    let policy = directory.path().join("policy.toml");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let params = format!("[tests.aznhc.params]\nprogram = {:?}\n", program.to_str().unwrap());
    fs::write(&policy, params).unwrap();
    let root = tree(GOOD_MEMORY, QUIET);
    let mut command = Command::new(PROGRAM);
    command.args(["test", "aznhc", "--json", "--root"]).arg(root.path()).arg("--policy").arg(&policy);
    command.output().unwrap()
}

#[test]
fn test_aznhc_runs_it_and_finds_by_fault_code() {
    let failed = "ERROR:  nhc:  Health check failed:  check_gpu_count: Expected 8 and found 7. FaultCode: NHC2009";
    let missing = "ERROR:  nhc:  Health check failed:  check_gpu_bw: nvbandwidth not found. FaultCode: NHCNA";
    let passed =
        "Running health checks for Standard_nd96isr_h100_v5 SKU...\nHealth checks completed with exit code: 0.";
    for (script, code, verdict, reason) in [
        (format!("echo '{failed}' >&2; exit 1"), 2, "fail", "nhc-2009"),
        (format!("echo '{missing}' >&2; exit 1"), 3, "inconclusive", "failed"),
        (format!("echo '{passed}'"), 0, "pass", "within-limits"),
        ("exit 0".to_owned(), 3, "inconclusive", "empty"),
    ] {
        let output = aznhc(&script);
        assert_eq!(output.status.code(), Some(code), "{script}: {output:?}");
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((rows[0]["verdict"].as_str(), rows[0]["reason"].as_str()), (Some(verdict), Some(reason)), "{rows}");
    }
    let root = tree(GOOD_MEMORY, QUIET);
    let not_installed = Command::new(PROGRAM).args(["test", "aznhc", "--root"]).arg(root.path()).output().unwrap();
    assert_eq!(not_installed.status.code(), Some(3), "not installed here: {not_installed:?}");
    assert!(String::from_utf8_lossy(&not_installed.stdout).contains("no-aznhc"), "{not_installed:?}");
}

#[test]
fn a_profile_reveals_a_missing_dimm() {
    let root = tree(GOOD_MEMORY, QUIET);
    let profile = root.path().join("profile.toml");
    fs::write(&profile, "sku = \"hgx\"\nversion = 1\n[expect]\nmem_total_bytes = 8800000000.0\n").unwrap();
    let output = check(root.path(), &["memory", "--profile", profile.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("memory-small"));
}

struct Job {
    directory: TempDir,
    root: TempDir,
}

impl Job {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let policy =
            "[tests.endless.params]\ncommand = [\"/bin/sh\", \"-c\", \"echo here; sleep 600\"]\ntimeout = \"20m\"\n";
        fs::write(directory.path().join("policy.toml"), policy).unwrap();
        Self { directory, root: tree(GOOD_MEMORY, QUIET) }
    }

    fn start(&self, tests: &str, more: &[&str]) -> Child {
        let at = |name: &str| self.directory.path().join(name);
        let mut command = Command::new(PROGRAM);
        command.args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", tests]).args(more);
        command.args([Path::new("--log"), &at("a/b.log"), Path::new("--document"), &at("d/b.json")]);
        command.args([Path::new("--policy"), &at("policy.toml"), Path::new("--root"), self.root.path()]);
        command.env("DOCTOR_RUN_KEY", KEY.to_hex()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("a/b.log")).unwrap_or_default()
    }

    fn document(&self) -> Document {
        Document::open(&fs::read(self.directory.path().join("d/b.json")).unwrap(), &KEY).unwrap()
    }

    fn tests(&self) -> Vec<String> {
        self.document().tests.iter().map(|test| test.test.to_string()).collect()
    }

    fn wait_log(&self, text: &str) {
        for _ in 0..1000 {
            if self.log().contains(text) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("timed out waiting for `{text}`: {}", self.log());
    }
}

fn code(child: Child) -> u8 {
    let status = child.wait_with_output().unwrap().status;
    assert_eq!(status.signal(), None);
    u8::try_from(status.code().unwrap()).unwrap()
}

#[test]
fn a_job_documents_raw_evidence_and_its_hardware() {
    let job = Job::new();
    assert_eq!(code(job.start("memory,kernel-log", &[])), exit::DONE);
    assert_eq!(job.tests(), ["memory", "kernel-log"]);
    let hardware = job.document().hardware;
    assert_eq!(hardware.board_serial.as_deref(), Some("J1020304"));
    assert_eq!(hardware.boot_id.as_deref(), Some("11111111-2222-3333-4444-555555555555"));
    for directory in ["a", "d"] {
        assert_eq!(fs::read_dir(job.directory.path().join(directory)).unwrap().count(), 1, "nothing temporary stays");
    }
}

#[test]
fn a_stopped_job_signs_the_finished_tests() {
    let job = Job::new();
    let child = job.start("memory,endless,kernel-log", &[]);
    // The log shows the program's output while it runs.
    job.wait_log("endless: | here");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(code(child), exit::STOPPED);
    assert_eq!(job.tests(), ["memory"]);
    assert!(job.log().contains("endless: interrupted"), "{}", job.log());
}

#[test]
fn over_its_limit_a_job_signs_what_had_finished() {
    let job = Job::new();
    assert_eq!(code(job.start("memory,endless", &["--limit", "1s"])), exit::OVER_LIMIT);
    assert_eq!(job.tests(), ["memory"]);
}

#[test]
fn without_a_directory_the_document_is_in_the_log_and_in_the_termination_message_if_it_fits() {
    let (job, lots) = (Job::new(), "echo; head -c 200000 /dev/urandom | od -An -tx1");
    let message = job.directory.path().join("message");
    let policy = format!("[tests.lots.params]\ncommand = [\"/bin/sh\", \"-c\", \"{lots}\"]\n");
    fs::write(job.directory.path().join("policy.toml"), policy).unwrap();
    let run = |tests: &str, message: &Path| {
        let mut command = Command::new(PROGRAM);
        command.args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", tests, "--carry"]).arg(message);
        command.arg("--policy").arg(job.directory.path().join("policy.toml")).arg("--root").arg(job.root.path());
        command.env("DOCTOR_RUN_KEY", KEY.to_hex()).output().unwrap()
    };
    let named = |document: &[u8]| Document::open(document, &KEY).unwrap().tests[0].test.to_string();

    let small = run("memory", &message);
    assert_eq!(small.status.code(), Some(0), "{small:?}");
    let log = String::from_utf8(small.stdout).unwrap();
    assert!(result_transport::split_log(&log).0.contains("job: done"), "{log}");
    let parsed = result_transport::parse_termination_message(&fs::read_to_string(&message).unwrap()).unwrap();
    let TerminationMessage::Document(document) = parsed else { panic!("{parsed:?}") };
    assert_eq!((named(&document).as_str(), result_transport::extract_from_log(&log).unwrap()), ("memory", document));

    let large = run("lots", &message);
    assert_eq!(large.status.code(), Some(0), "{large:?}");
    let log = String::from_utf8(large.stdout).unwrap();
    let parsed = result_transport::parse_termination_message(&fs::read_to_string(&message).unwrap()).unwrap();
    let TerminationMessage::InLog { lines } = parsed else { panic!("it fits into a message: {parsed:?}") };
    let log_lines: Vec<&str> = log.lines().collect();
    assert_eq!(
        named(&result_transport::extract_from_log(&log_lines[log_lines.len() - lines..].join("\n")).unwrap()),
        "lots"
    );

    let unwritable = run("memory", Path::new("/no/such/place"));
    assert_eq!(unwritable.status.code(), Some(i32::from(exit::NO_DOCUMENT)), "{unwritable:?}");
}

#[test]
fn an_unknown_test_has_no_evidence() {
    let job = Job::new();
    assert_eq!(code(job.start("tomorrow", &[])), exit::DONE);
    assert!(job.document().tests[0].probes.is_empty());
    assert!(job.log().contains("unknown test"), "{}", job.log());
}

#[test]
fn a_job_without_its_key_does_not_start() {
    let job = Job::new();
    let output = Command::new(PROGRAM)
        .args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", "memory", "--log", "l", "--document", "d"])
        .current_dir(job.directory.path())
        .env_remove("DOCTOR_RUN_KEY")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(i32::from(exit::NOT_BEGUN)));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("set DOCTOR_RUN_KEY or --key-file"), "{stderr}");
}

#[test]
fn a_document_that_cannot_be_written_has_its_own_exit_code() {
    let job = Job::new();
    // Another node may have planted it.
    std::os::unix::fs::symlink(job.root.path(), job.directory.path().join("d")).unwrap();
    assert_eq!(code(job.start("memory", &[])), exit::NO_DOCUMENT);
    assert!(job.log().contains("the result could not be written"), "{}", job.log());
    assert!(!job.root.path().join("b.json").exists(), "the link is not followed");
}

#[test]
fn a_symlink_at_the_logs_path_is_not_followed() {
    let job = Job::new();
    let secret = job.directory.path().join("secret");
    fs::write(&secret, "untouched").unwrap();
    fs::create_dir_all(job.directory.path().join("a")).unwrap();
    std::os::unix::fs::symlink(&secret, job.directory.path().join("a/b.log")).unwrap();
    assert_eq!(code(job.start("memory", &[])), exit::DONE);
    assert_eq!(fs::read_to_string(secret).unwrap(), "untouched");
    assert_eq!(job.tests(), ["memory"], "without a log the tests run all the same");
}

#[test]
fn a_manual_suite_writes_a_log_per_test_and_continues_after_a_failure() {
    let directory = tempfile::tempdir().unwrap();
    let root = tree(GOOD_MEMORY, QUIET);
    let policy = directory.path().join("policy.toml");
    fs::write(
        &policy,
        "[tests.bad.params]\ncommand = [\"/bin/false\"]\n[tests.good.params]\ncommand = [\"/bin/echo\", \"well\"]\n\
         [suites.both]\ntests = [\"bad\", \"good\"]\n",
    )
    .unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["job", "--suite", "both,memory", "--node", "n1", "--data"]).arg(directory.path().join("data"));
    command.arg("--policy").arg(&policy).arg("--root").arg(root.path()).env_remove("DOCTOR_RUN_KEY");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(i32::from(exit::DONE)), "{}", String::from_utf8_lossy(&output.stderr));
    let document = String::from_utf8(output.stdout).unwrap();
    let document = Path::new(document.trim());
    assert!(document.starts_with(directory.path().join("data/bad/n1")), "{}", document.display());
    let text = fs::read_to_string(document).unwrap();
    let body: serde_json::Value = serde_json::from_str(text.split_once('\n').unwrap().1).unwrap();
    let ran: Vec<_> = body["tests"].as_array().unwrap().iter().map(|test| test["test"].as_str().unwrap()).collect();
    assert_eq!(ran, ["bad", "good", "memory"]);
    for test in ran {
        let logs = fs::read_dir(directory.path().join("data").join(test).join("n1")).unwrap();
        let logs: Vec<_> =
            logs.map(|entry| entry.unwrap().path()).filter(|path| path.extension().unwrap() == "log").collect();
        assert_eq!(logs.len(), 1, "{test}");
        let log = fs::read_to_string(&logs[0]).unwrap();
        assert!(log.contains(&format!(" {test}: ")), "{log}");
    }
}
