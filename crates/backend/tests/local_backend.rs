//! Tests the local backend on this machine with real `doctor-node job` processes: the contract, and crashes of the controller.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use doctor_backend::{
    Backend, Change, Effect, JobOutput, JobRequest, NodeOp,
    clock::{Clock, SystemClock},
    contract_tests::{self, Length, TestOccupancy, Testbed},
    local::{LocalBackend, LocalConfig},
};
use doctor_checks::{
    document::{Document, RunKey},
    proc_stat::ProcStat,
};
use doctor_core::{
    ids::{NodeName, OpId, RunId, TestId},
    node::Occupancy,
    run::{JobEnd, NonEmpty, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_testbed::programs::doctor_node;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const KEY: RunKey = RunKey::new([7; 32]);

/// A policy with a test that outlasts all of these tests.
const POLICY: &str = "[tests.endless.params]\ncommand = [\"/bin/sleep\", \"600\"]\ntimeout = \"20m\"\n";

struct Local {
    directory: TempDir,
    config: LocalConfig,
}

impl Local {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("policy.toml"), POLICY).unwrap();
        fs::write(at("loadavg"), "0.10 0.10 0.10 1/84 7182\n").unwrap();
        let config = LocalConfig {
            node: Some(NodeName::new("here").unwrap()),
            busy_file: Some(at("busy")),
            load_file: at("loadavg"),
            doctor_node: Some(doctor_node().to_owned()),
            policy: Some(at("policy.toml")),
            ..LocalConfig::new(at("state"), at("share"))
        };
        Self { directory, config }
    }

    fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(path)
    }

    fn open(&self) -> LocalBackend {
        LocalBackend::open(self.config.clone()).unwrap()
    }

    fn request(&self, run: RunId, tests: &[&str]) -> JobRequest {
        let node = NodeName::new("here").unwrap();
        let tests = tests.iter().map(|test| TestId::new(test).unwrap()).collect();
        JobRequest {
            run,
            nodes: NonEmpty::one(node.clone()),
            tests: NonEmpty::new(tests).unwrap(),
            access: Vec::new(),
            limit: Span::minutes(10),
            key: KEY,
            results: None,
            outputs: vec![JobOutput { node, logs: vec![log(run)], document: format!("memory/here/{run}.json").into() }],
        }
    }

    fn document(&self, run: RunId) -> Document {
        let bytes = fs::read(self.at("share/memory/here").join(format!("{run}.json"))).unwrap();
        Document::open(&bytes, &KEY).unwrap()
    }

    /// Leaves the files of a controller that was killed before it started the job.
    fn leave_intent(&self, run: RunId, at: Timestamp) {
        let directory = self.at("state/runs").join(run.to_string());
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("intent.json"), format!("{{\"at\": \"{at}\"}}")).unwrap();
    }
}

fn log(run: RunId) -> PathBuf {
    format!("memory/here/{run}.log").into()
}

fn run_id(number: u64) -> RunId {
    // A recent id, so that it is not pruned as an old one.
    RunId::from_number((u64::try_from(SystemClock.now().millis()).unwrap() << 21) | number)
}

fn stats() -> impl Iterator<Item = ProcStat> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| ProcStat::parse(&fs::read_to_string(entry.path().join("stat")).ok()?))
}

/// Returns the live processes of this run, found by their arguments.
fn processes(run: RunId) -> Vec<u32> {
    processes_with(&run.to_string())
}

fn processes_with(argument: &str) -> Vec<u32> {
    let living = stats().filter(|stat| !stat.has_exited()).map(|stat| stat.pid);
    let has_it = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(argument)
    };
    living.filter(has_it).collect()
}

/// Kills the jobs of a failed test.
impl Drop for Local {
    fn drop(&mut self) {
        let mine = self.directory.path().display().to_string();
        for leader in processes_with(&mine) {
            stats().filter(|stat| stat.session == leader && !stat.has_exited()).for_each(|stat| kill(stat.pid));
        }
    }
}

fn kill(pid: u32) {
    // It may have ended meanwhile.
    let _already_exited = kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL);
}

fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = condition() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}");
}

fn seen(backend: &LocalBackend, run: RunId) -> ObservedJobState {
    backend.poll(&[run]).unwrap().remove(0).state
}

fn wait_ended(backend: &LocalBackend, run: RunId) -> (Option<Timestamp>, JobEnd) {
    wait("the end of the job", || match seen(backend, run) {
        ObservedJobState::Ended { started, how, .. } => Some((started, how)),
        _ => None,
    })
}

fn wait_log(local: &Local, run: RunId, expected: &str) {
    wait(expected, || fs::read_to_string(local.at("share").join(log(run))).ok().filter(|text| text.contains(expected)));
}

impl Local {
    /// Counts the jobs that have written the first line of the run's log.
    fn lines_of_starts(&self, run: RunId) -> usize {
        let text = fs::read_to_string(self.at("share").join(log(run))).unwrap_or_default();
        text.lines().filter(|line| line.contains(" job: run ")).count()
    }
}

impl Testbed for Local {
    fn now(&self) -> Timestamp {
        SystemClock.now()
    }

    fn node(&self) -> NodeName {
        NodeName::new("here").unwrap()
    }

    fn set_occupancy(&self, _: &NodeName, desired: TestOccupancy) {
        let (busy, load) = (self.at("busy"), self.at("loadavg"));
        let _absent = fs::remove_file(&busy);
        fs::write(&load, "0.10 0.10 0.10 1/84 7182\n").unwrap();
        match desired {
            TestOccupancy::Free => {}
            TestOccupancy::Busy => fs::write(&busy, "").unwrap(),
            TestOccupancy::Unknown => fs::remove_file(&load).unwrap(),
        }
    }

    fn set_foreign_mark(&self, _: &NodeName, present: bool) {
        let mark = r#"{"by": "ops", "text": "fan noise", "blocks": true}"#;
        fs::write(self.at("state/foreign.json"), if present { format!("[{mark}]") } else { "[]".to_owned() }).unwrap();
    }

    fn job(&self, run: RunId, length: Length) -> JobRequest {
        self.request(run, if length == Length::Short { &["memory"] } else { &["endless"] })
    }

    fn jobs_started(&self, run: RunId) -> usize {
        // A process is observed running before it has written its first line.
        wait("the first line of a log", || (self.lines_of_starts(run) > 0 || processes(run).is_empty()).then_some(()));
        self.lines_of_starts(run)
    }

    fn lose_job(&self, run: RunId) {
        processes(run).into_iter().for_each(kill);
    }

    fn let_time_pass(&self) {
        std::thread::sleep(Duration::from_millis(10));
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        Some(Box::new(self.open()))
    }
}

#[test]
fn the_local_backend_fulfils_the_contract() {
    let local = Local::new();
    assert_eq!(contract_tests::violations(&local.open(), &local), []);
}

#[test]
fn a_job_leaves_a_log_and_a_document_that_its_key_opens() {
    let local = Local::new();
    let backend = local.open();
    let run = run_id(1);
    backend.submit(&local.request(run, &["memory", "disk-space"])).unwrap();
    assert_eq!(wait_ended(&backend, run).1, JobEnd::Exited);
    let document = local.document(run);
    let tests: Vec<_> = document.tests.iter().map(|test| test.test.as_str()).collect();
    assert_eq!((document.run, document.node.as_str(), &tests[..]), (run, "here", &["memory", "disk-space"][..]));
    assert!(document.hardware.boot_id.is_some());
}

#[test]
fn a_job_whose_program_is_missing_says_so() {
    let mut local = Local::new();
    let program = local.at("doctor-node");
    fs::write(&program, "#!/bin/sh\nexec /usr/bin/no-doctor-node \"$@\"\n").unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    local.config.doctor_node = Some(program);
    let (backend, run) = (local.open(), run_id(30));
    let request = local.request(run, &["memory"]);
    backend.submit(&request).unwrap();
    assert_eq!(wait_ended(&backend, run), (None, JobEnd::Failed));
    let run = contract_tests::run_of(request, SystemClock.now());
    let outputs = backend.remaining_output(&run).unwrap();
    let [output] = &outputs[..] else { panic!("{outputs:?}") };
    let quote = output.quote().unwrap();
    assert!(quote.contains("/usr/bin/no-doctor-node: not found") && quote.ends_with("(exit code 127)"), "{quote}");
}

#[test]
fn a_cancelled_job_signs_the_finished_tests() {
    let local = Local::new();
    let backend = local.open();
    let run = run_id(2);
    backend.submit(&local.request(run, &["memory", "endless", "disk-space"])).unwrap();
    wait_log(&local, run, "endless: /bin/sleep");
    backend.cancel(run).unwrap();
    assert!(matches!(wait_ended(&backend, run), (Some(_), JobEnd::Killed)));
    let document = local.document(run);
    assert_eq!(document.tests.iter().map(|test| test.test.as_str()).collect::<Vec<_>>(), ["memory"]);
}

#[test]
fn a_job_that_was_killed_is_lost_and_leaves_nothing_running() {
    let local = Local::new();
    let backend = local.open();
    let run = run_id(3);
    backend.submit(&local.request(run, &["endless"])).unwrap();
    wait_log(&local, run, "endless: /bin/sleep");
    // Between fork and exec, its child briefly has the same arguments.
    let leader = wait("one process of this run", || match processes(run)[..] {
        [leader] => Some(leader),
        _ => None,
    });
    let sleeper = || stats().find(|stat| stat.session == leader && stat.pid != leader && !stat.has_exited());
    wait("the sleep to be there", sleeper);
    kill(leader);
    assert_eq!(wait_ended(&backend, run).1, JobEnd::Lost);
    assert_eq!(sleeper(), None);
}

#[test]
fn a_controller_killed_between_intent_and_start_starts_the_job_when_it_returns() {
    let local = Local::new();
    let run = run_id(4);
    local.leave_intent(run, SystemClock.now());
    let backend = local.open();
    assert!(matches!(seen(&backend, run), ObservedJobState::Pending { .. }));
    backend.submit(&local.request(run, &["memory"])).unwrap();
    assert_eq!(wait_ended(&backend, run).1, JobEnd::Exited);
    assert_eq!(local.jobs_started(run), 1);
}

#[test]
fn controllers_that_submit_at_the_same_instant_start_one_job() {
    let local = Local::new();
    let run = run_id(5);
    let backends: Vec<_> = (0..8).map(|_| local.open()).collect();
    std::thread::scope(|scope| {
        for backend in &backends {
            scope.spawn(|| backend.submit(&local.request(run, &["memory"])).unwrap());
        }
    });
    assert_eq!(wait_ended(&backends[0], run).1, JobEnd::Exited);
    wait("the other jobs to end", || processes(run).is_empty().then_some(()));
    assert_eq!(local.jobs_started(run), 1);
}

#[test]
fn a_job_cancelled_before_it_came_up_never_runs() {
    let local = Local::new();
    let run = run_id(6);
    let backend = local.open();
    local.leave_intent(run, SystemClock.now());
    backend.cancel(run).unwrap();
    backend.submit(&local.request(run, &["memory"])).unwrap();
    assert_eq!(wait_ended(&backend, run), (None, JobEnd::Killed));
    // A process that the killed controller had started and that comes up only now.
    let late = Command::new(doctor_node())
        .args(["job", "--run", &run.to_string(), "--node", "here", "--tests", "memory"])
        .arg("--log")
        .arg(local.at("share").join(log(run)))
        .arg("--document")
        .arg(local.at("late.json"))
        .arg("--job-file")
        .arg(local.at("state/runs").join(run.to_string()).join("job.json"))
        .env("DOCTOR_RUN_KEY", KEY.to_hex())
        .status()
        .unwrap();
    assert_eq!(late.code(), Some(i32::from(doctor_checks::job_file::exit::NOT_WANTED)));
    assert_eq!(local.jobs_started(run), 0);
}

#[test]
fn a_job_that_cannot_start_fails_at_once() {
    let mut local = Local::new();
    local.config.policy = Some(local.at("no-such-policy.toml"));
    let backend = local.open();
    let run = run_id(7);
    backend.submit(&local.request(run, &["memory"])).unwrap();
    assert_eq!(wait_ended(&backend, run), (None, JobEnd::Failed));
    let output = fs::read_to_string(local.at("state/runs").join(run.to_string()).join("output.txt")).unwrap();
    assert!(output.contains("no-such-policy.toml"), "{output}");
}

#[test]
fn a_job_that_never_starts_is_abandoned() {
    let mut local = Local::new();
    local.config.start_limit = Span::ZERO;
    let run = run_id(8);
    local.leave_intent(run, Timestamp::from_secs(1));
    let backend = local.open();
    assert_eq!(wait_ended(&backend, run), (None, JobEnd::Lost));
    backend.submit(&local.request(run, &["memory"])).unwrap();
    assert_eq!(wait_ended(&backend, run), (None, JobEnd::Lost));
    assert_eq!(local.jobs_started(run), 0);
}

#[test]
fn a_missing_program_is_an_error_that_names_it() {
    let mut local = Local::new();
    local.config.doctor_node = Some(local.at("no-such-program"));
    let error = local.open().submit(&local.request(run_id(9), &["memory"])).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedPermanent);
    assert!(error.to_string().contains("no-such-program is not a program"), "{error}");
}

#[test]
fn an_output_outside_the_shared_directory_is_refused() {
    let local = Local::new();
    let backend = local.open();
    for path in ["/etc/passwd", "../secret", "memory/../../x"] {
        let mut request = local.request(run_id(10), &["memory"]);
        request.outputs[0].document = path.into();
        let error = backend.submit(&request).unwrap_err();
        assert!(error.text.contains("leads out of the shared directory"), "{path}: {error}");
    }
}

#[test]
fn marks_that_cannot_be_read_are_an_error_and_are_not_overwritten() {
    let local = Local::new();
    let backend = local.open();
    fs::write(local.at("state/marks.json"), "{ damaged").unwrap();
    assert!(backend.snapshot().is_err());
    let change = NodeOp { op: OpId::from_number(1), what: Change::Drain };
    assert!(backend.apply(backend.node(), &change).is_err());
    assert_eq!(fs::read_to_string(local.at("state/marks.json")).unwrap(), "{ damaged");
}

#[test]
fn other_users_processes_make_the_node_busy() {
    let local = Local::new();
    let backend = local.open();
    let occupancy = || backend.snapshot().unwrap().remove(0).node.occupancy.clone();
    assert!(occupancy().is_free());
    fs::write(local.at("loadavg"), "9999.0 0.1 0.1 1/84 7182\n").unwrap();
    assert!(matches!(occupancy(), Occupancy::Busy { .. }));
    fs::write(local.at("loadavg"), "soon\n").unwrap();
    assert!(matches!(occupancy(), Occupancy::Unknown { .. }));
}
