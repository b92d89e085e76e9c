//! The service on this machine end to end: real jobs and results, one controller that leads and one that waits.

use std::{
    cell::RefCell,
    io::{BufRead, BufReader},
    process::{Child, Stdio},
};

use crate::workdir::{Workdir, wait_or_explain, wait_until};

#[test]
fn run_tests_this_machine_and_other_commands_show_the_findings() {
    let workdir = Workdir::local();
    workdir.expect(0, &["plan"]).stdout_contains("disk-space").stdout_contains("never tested");
    assert!(!workdir.path("doctor.db").exists(), "planning leaves nothing behind");
    let output = workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    output.stdout_contains("1 result received");
    let rows = workdir.json(&["nodes"]);
    let tests = rows[0]["tests"].as_array().unwrap();
    assert!(tests.len() >= 3, "{rows}");
    assert!(tests.iter().all(|test| test["status"] != "never-tested"), "{rows}");
    let run = workdir.json(&["history"])[0]["run"].as_str().unwrap().to_owned();
    workdir.expect(0, &["log", &run]).stdout_contains("disk-space");
    // Nothing is due, and that is the reason given.
    let plan = workdir.json(&["plan"]);
    assert_eq!(plan["skipped"][0]["code"], "fresh", "{plan}");
    let why = workdir.doctor(&["why", "here"]);
    why.stdout_contains("(fresh): no test is due before");
    assert!(workdir.path("data/metadata/free_nodes.txt").exists());
    assert!(workdir.path("data/metadata/validation.db").exists());
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_job_that_dies_shows_its_last_output_without_secrets() {
    let workdir = Workdir::local();
    let program = workdir.path("doctor-node");
    let script = "#!/bin/sh\necho HF_TOKEN=hunter2 >&2\nprintf 'bell\\a\\n'\nexec /usr/bin/no-doctor-node\n";
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let settings = format!("{}doctor_node = \"{}\"\n", workdir.read("doctor.toml"), program.display());
    workdir.write("doctor.toml", &settings);
    workdir.doctor(&["run", "--wait", "--timeout", "1m"]);
    wait_until("the end of the run", || {
        workdir.doctor(&["run"]);
        workdir.why("here")["without_result"].is_object()
    });
    let ended = workdir.why("here")["without_result"].clone();
    let (run, quote) = (ended["run"].as_str().unwrap(), ended["last_output"].as_str().unwrap());
    assert!(quote.contains("/usr/bin/no-doctor-node: not found") && quote.ends_with("(exit code 127)"), "{ended}");
    workdir.doctor(&["why", "here"]).stdout_contains(quote).stdout_contains(&format!("`doctor log {run}`"));
    let log = workdir.expect(0, &["log", run]);
    log.stdout_contains("== last output of the job on here").stdout_contains("== on here: exit code 127");
    log.stdout_contains("HF_TOKEN=[removed]").stdout_contains("no-doctor-node: not found");
    assert!(!log.out.contains("hunter2") && !log.out.contains('\u{7}'), "{}", log.out);
    let json = workdir.json(&["log", run]);
    assert_eq!((&json[0]["ending"], &json[0]["path"]), (&"exit code 127".into(), &serde_json::Value::Null), "{json}");
    // The log is in the store: it needs no shared directory.
    std::fs::rename(workdir.path("data"), workdir.path("gone")).unwrap();
    workdir.expect(0, &["log", run]).stdout_contains("no-doctor-node: not found");
}

#[test]
fn the_standard_suite_runs_through_the_controller_and_why_explains_each_test() {
    let workdir = Workdir::local();
    let directory = workdir.path("scratch");
    std::fs::create_dir(&directory).unwrap();
    workdir.policy_for(
        &["storage", "fabric", "collective", "dl"],
        &format!(
            "[tests.storage.params]\nsize = \"16MiB\"\n\
             pattern_time = \"1s\"\ndirectories = [\"{}\"]\n",
            directory.display()
        ),
    );
    workdir.expect(0, &["plan"]).stdout_contains("collective-loopback").stdout_contains("storage");
    workdir.expect(0, &["run", "--wait", "--timeout", "3m"]).stdout_contains("1 result received");
    let history = workdir.json(&["history"]);
    let verdict = |test: &str| {
        let row = history.as_array().unwrap().iter().find(|row| row["test"] == test);
        row.unwrap_or_else(|| panic!("no row of {test}: {history}"))["verdict"].as_str().unwrap().to_owned()
    };
    let why = workdir.doctor(&["why", "here"]);
    if std::path::Path::new("/usr/bin/fio").exists() {
        // On a busy machine, a rate that is too low is not judged.
        let is_disturbed =
            history.as_array().unwrap().iter().any(|row| row["test"] == "storage" && row["reason"] == "disturbed");
        assert!(is_disturbed || ["pass", "fail"].contains(&verdict("storage").as_str()), "{history}");
    } else {
        println!("NOT RUN: the storage test in the standard suite: fio is not installed");
    }
    if !std::path::Path::new("/proc/driver/nvidia").exists() {
        assert_eq!([verdict("dl"), verdict("collective-loopback")], ["not-applicable", "not-applicable"]);
        why.stdout_contains("dl").stdout_contains("collective-loopback").stdout_contains("no-gpu");
    }
    let run = history[0]["run"].as_str().unwrap();
    workdir.expect(0, &["log", run]).stdout_contains("storage: ").stdout_contains("dl: ").stdout_contains("fabric: ");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "no files are left behind");
}

#[test]
fn imported_history_does_not_count_as_fresh_results() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    // A controller publishes a copy at its start and then every ten minutes, so a new controller publishes one.
    workdir.expect(0, &["run"]);
    let published = "data/metadata/validation.db";
    workdir.expect(6, &["import", published, "--store", "other.db"]).stderr_contains("Would import 1 file");
    assert!(!workdir.path("other.db").exists(), "asking leaves nothing behind");
    workdir.expect(0, &["import", published, "--store", "other.db", "--yes"]).stdout_contains("as untrusted history");
    workdir.expect(0, &["history", "--store", "other.db"]).stdout_contains("imported, untrusted");
    let rows = workdir.json(&["nodes", "--store", "other.db"]);
    let tests = rows[0]["tests"].as_array().unwrap();
    assert!(tests.iter().all(|test| test["status"] == "never-tested"), "{rows}");
}

#[test]
fn an_operator_command_has_priority_and_is_answered() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    workdir.expect(0, &["test", "here", "--test", "memory", "--why", "curious", "--yes"]);
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]).stdout_contains("requested by ann: curious");
    let history = workdir.json(&["history", "--test", "memory"]);
    assert_eq!(history.as_array().unwrap().len(), 2);
    assert_eq!(workdir.json(&["status"])["commands"], 0);
}

#[test]
fn a_held_machine_is_not_tested() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    workdir.expect(0, &["hold", "here", "--why", "mine", "--yes"]);
    workdir.expect(0, &["test", "here", "--yes"]);
    workdir.expect(0, &["run"]);
    assert_eq!(workdir.json(&["history", "--test", "memory"]).as_array().unwrap().len(), 1);
    workdir.doctor(&["why", "here"]).stdout_contains("held by ann");
}

/// A controller that is killed when the test ends.
pub(crate) struct Service {
    pub(crate) child: Child,
    log: std::sync::mpsc::Receiver<String>,
    seen: String,
}

impl Service {
    pub(crate) fn start(workdir: &Workdir) -> Self {
        Self::spawn(workdir.command(&["serve"]))
    }

    /// Starts any program that logs to standard error and exits on SIGTERM.
    pub(crate) fn spawn(mut command: std::process::Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let (send, log) = std::sync::mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { child, log, seen: String::new() }
    }

    #[track_caller]
    pub(crate) fn wait_for_log(&mut self, part: &str) {
        let (log, seen) = (&self.log, RefCell::new(&mut self.seen));
        let has_part = || {
            let mut seen = seen.borrow_mut();
            seen.extend(log.try_iter().map(|line| line + "\n"));
            seen.contains(part)
        };
        wait_or_explain(&format!("`{part}` in the log"), has_part, || seen.borrow().clone());
    }

    /// Returns how often this text was logged until now.
    pub(crate) fn count_in_log(&mut self, part: &str) -> usize {
        self.seen.extend(self.log.try_iter().map(|line| line + "\n"));
        self.seen.matches(part).count()
    }

    /// Returns the line with this text.
    #[track_caller]
    pub(crate) fn wait_for_line(&mut self, part: &str) -> String {
        self.wait_for_log(part);
        self.seen.lines().find(|line| line.contains(part)).unwrap_or_default().to_owned()
    }

    /// Makes it reload its configuration.
    pub(crate) fn reload(&self) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    }

    /// Whether it has exited, by itself or by a signal.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it ends by itself, and returns its exit code and log.
    pub(crate) fn wait(mut self) -> (Option<i32>, String) {
        self.wait_for_its_end()
    }

    /// Stops it like an init system, and returns its exit code and log.
    pub(crate) fn stop(mut self) -> (Option<i32>, String) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.wait_for_its_end()
    }

    fn wait_for_its_end(&mut self) -> (Option<i32>, String) {
        let mut code = None;
        wait_until("the end", || {
            code = self.child.try_wait().unwrap();
            code.is_some()
        });
        self.seen.extend(self.log.iter().map(|line| line + "\n"));
        (code.and_then(|status| status.code()), std::mem::take(&mut self.seen))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have exited already.
        let _already_exited = self.child.kill();
        let _already_exited = self.child.wait();
    }
}

fn use_short_intervals(workdir: &Workdir) {
    let config = workdir.read("doctor.toml").replace("[backend", "cycle = \"1s\"\nlease = \"5s\"\n[backend");
    workdir.write("doctor.toml", &config);
    workdir.policy("version = 1\n");
}

#[test]
fn a_service_leads_reloads_and_stops_on_request() {
    let workdir = Workdir::local();
    use_short_intervals(&workdir);
    let mut service = Service::start(&workdir);
    service.wait_for_log("started");
    wait_until("a result", || {
        workdir.path("doctor.db").exists() && workdir.json(&["history"]).as_array().is_some_and(|rows| !rows.is_empty())
    });
    assert_eq!(workdir.json(&["status"])["leader"]["is"], "leads");
    // Another controller on the same store stays passive, and so does a single cycle.
    workdir.expect(5, &["run"]).stderr_contains("another controller leads");
    let mut second = Service::start(&workdir);
    second.wait_for_log("another controller leads; this one waits");

    workdir.policy("version = 2\n[limits]\njobs = -1\n");
    service.wait_for_log("the last valid configuration stays in force");
    service.wait_for_log("line 3, column 8");
    wait_until("the remark in status", || {
        workdir.doctor(&["status"]).out.contains("the last valid configuration stays in force")
    });
    workdir.policy("version = 3\n");
    service.wait_for_log("configuration reloaded policy=3");

    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("stopped"), "{log}");
    second.wait_for_log("this controller leads now");
    assert_eq!(second.stop().0, Some(0));
    assert_eq!(workdir.json(&["status"])["leader"]["is"], "no-leader");
}

#[test]
fn a_log_is_followed_while_its_test_runs_and_ends_with_it() {
    let workdir = Workdir::local();
    use_short_intervals(&workdir);
    workdir.policy(
        "[tests.slow.params]\ncommand = [\"/bin/sh\", \"-c\", \"sleep 3; echo fine\"]\n\
         [tests.disk-space]\nenabled = false\n[tests.memory]\nenabled = false\n",
    );
    let service = Service::start(&workdir);
    let mut run = String::new();
    wait_until("a running run", || {
        let why = workdir.path("doctor.db").exists().then(|| workdir.doctor(&["why", "here", "--json"]).out);
        let why: serde_json::Value = why.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        run = why["run"]["run"].as_str().unwrap_or_default().to_owned();
        why["run"]["state"] == "running"
    });
    workdir.expect(0, &["log", &run, "--follow"]).stdout_contains("slow");
    let results = workdir.json(&["history", "--test", "slow"]);
    assert_eq!(results[0]["run"], run.as_str(), "the run had ended: {results}");
    assert_eq!(results[0]["verdict"], "pass", "{results}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_missing_share_is_reported_once_with_the_remedy() {
    let workdir = Workdir::local();
    use_short_intervals(&workdir);
    let mut service = Service::start(&workdir);
    wait_until("a result", || {
        workdir.path("doctor.db").exists() && workdir.json(&["history"]).as_array().is_some_and(|rows| !rows.is_empty())
    });
    std::fs::rename(workdir.path("data"), workdir.path("away")).unwrap();
    service.wait_for_log("create the directory or set `data`");
    wait_until("the problem in status", || workdir.doctor(&["status"]).out.contains("opening the shared directory"));
    std::fs::rename(workdir.path("away"), workdir.path("data")).unwrap();
    service.wait_for_log("problems resolved");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(log.matches("opening the shared directory").count(), 1, "{log}");
}

#[test]
fn a_killed_service_is_replaced_at_once() {
    let workdir = Workdir::local();
    use_short_intervals(&workdir);
    let config = workdir.read("doctor.toml").replace("lease = \"5s\"", "lease = \"1h\"");
    workdir.write("doctor.toml", &config);
    let mut service = Service::start(&workdir);
    wait_until("leadership", || {
        workdir.path("doctor.db").exists() && workdir.json(&["status"])["leader"]["is"] == "leads"
    });
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    let history = workdir.json(&["history", "--test", "memory"]);
    assert_eq!(history.as_array().unwrap().len(), 1, "nothing lost, nothing doubled");
}
