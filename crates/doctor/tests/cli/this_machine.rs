//! The service on this machine end to end: real jobs and results, one controller that leads and one that waits.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
};

use crate::workdir::{Workdir, wait_until};

#[test]
fn one_command_tests_this_machine_and_the_others_show_what_was_found() {
    let bed = Workdir::local();
    bed.expect(0, &["plan"]).stdout_contains("disk-space").stdout_contains("never tested");
    assert!(!bed.path("doctor.db").exists(), "planning leaves nothing behind");
    let said = bed.expect(0, &["run", "--wait", "--timeout", "1m"]);
    said.stdout_contains("1 result received");
    let rows = bed.json(&["nodes"]);
    let tests = rows[0]["tests"].as_array().unwrap();
    assert!(tests.len() >= 3, "{rows}");
    assert!(tests.iter().all(|test| test["standing"] != "never-tested"), "{rows}");
    let run = bed.json(&["history"])[0]["run"].as_str().unwrap().to_owned();
    bed.expect(0, &["log", &run]).stdout_contains("disk-space");
    // Nothing is due, and that is the reason given.
    let plan = bed.json(&["plan"]);
    assert_eq!(plan["passed_over"][0]["code"], "fresh", "{plan}");
    let why = bed.doctor(&["why", "here"]);
    why.stdout_contains("(fresh): no test is due before");
    assert!(bed.path("data/metadata/free_nodes.txt").exists());
    assert!(bed.path("data/metadata/validation.db").exists());
    bed.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn the_standard_suite_runs_through_the_controller_and_why_explains_each_test() {
    let bed = Workdir::local();
    let directory = bed.path("scratch");
    std::fs::create_dir(&directory).unwrap();
    bed.policy_for(
        &["storage", "fabric", "collective", "dl"],
        &format!(
            "[suites.standard]\nevery = \"7d\"\n[suites.sweep]\ntests = []\n[tests.storage.params]\nsize = \"16MiB\"\n\
             pattern_time = \"1s\"\ndirectories = [\"{}\"]\n",
            directory.display()
        ),
    );
    bed.expect(0, &["plan"]).stdout_contains("collective-loopback").stdout_contains("storage");
    bed.expect(0, &["run", "--wait", "--timeout", "3m"]).stdout_contains("1 result received");
    let history = bed.json(&["history"]);
    let verdict = |test: &str| {
        let row = history.as_array().unwrap().iter().find(|row| row["test"] == test);
        row.unwrap_or_else(|| panic!("no row of {test}: {history}"))["verdict"].as_str().unwrap().to_owned()
    };
    let why = bed.doctor(&["why", "here"]);
    if std::path::Path::new("/usr/bin/fio").exists() {
        assert!(["pass", "fail"].contains(&verdict("storage").as_str()), "{history}");
    } else {
        println!("NOT RUN: the storage test in the standard suite: fio is not installed");
    }
    if !std::path::Path::new("/proc/driver/nvidia").exists() {
        assert_eq!([verdict("dl"), verdict("collective-loopback")], ["inconclusive", "inconclusive"]);
        why.stdout_contains("dl").stdout_contains("collective-loopback").stdout_contains("missing");
    }
    let run = history[0]["run"].as_str().unwrap();
    bed.expect(0, &["log", run]).stdout_contains("storage: ").stdout_contains("dl: ").stdout_contains("fabric: ");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "no files are left behind");
}

#[test]
fn an_imported_history_is_history_and_makes_nothing_fresh() {
    let bed = Workdir::local();
    bed.expect(0, &["run", "--wait", "--timeout", "1m"]);
    // A controller publishes a copy at its start and then every ten minutes, so a new controller publishes one.
    bed.expect(0, &["run"]);
    let published = "data/metadata/validation.db";
    bed.expect(6, &["import", published, "--store", "other.db"]).stderr_contains("Would import 1 file");
    assert!(!bed.path("other.db").exists(), "asking leaves nothing behind");
    bed.expect(0, &["import", published, "--store", "other.db", "--yes"]).stdout_contains("as untrusted history");
    bed.expect(0, &["history", "--store", "other.db"]).stdout_contains("imported, untrusted");
    let rows = bed.json(&["nodes", "--store", "other.db"]);
    let tests = rows[0]["tests"].as_array().unwrap();
    assert!(tests.iter().all(|test| test["standing"] == "never-tested"), "{rows}");
}

#[test]
fn an_operators_wish_comes_first_and_is_answered() {
    let bed = Workdir::local();
    bed.expect(0, &["run", "--wait", "--timeout", "1m"]);
    bed.expect(0, &["test", "here", "--test", "memory", "--why", "curious", "--yes"]);
    bed.expect(0, &["run", "--wait", "--timeout", "1m"]).stdout_contains("requested by ann: curious");
    let history = bed.json(&["history", "--test", "memory"]);
    assert_eq!(history.as_array().unwrap().len(), 2);
    assert_eq!(bed.json(&["status"])["requests"], 0);
}

#[test]
fn a_held_machine_is_left_alone() {
    let bed = Workdir::local();
    bed.expect(0, &["run", "--wait", "--timeout", "1m"]);
    bed.expect(0, &["hold", "here", "--why", "mine", "--yes"]);
    bed.expect(0, &["test", "here", "--yes"]);
    bed.expect(0, &["run"]);
    assert_eq!(bed.json(&["history", "--test", "memory"]).as_array().unwrap().len(), 1);
    bed.doctor(&["why", "here"]).stdout_contains("held by ann");
}

/// A controller that is killed when the test ends.
pub(crate) struct Service {
    child: Child,
    log: std::sync::mpsc::Receiver<String>,
    seen: String,
}

impl Service {
    pub(crate) fn start(bed: &Workdir) -> Self {
        Self::spawn(bed.command(&["serve"]))
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
        wait_until(&format!("`{part}` (in {})", self.seen), || {
            self.seen.extend(self.log.try_iter().map(|line| line + "\n"));
            self.seen.contains(part)
        });
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

    /// Stops it like an init system, and returns its exit code and log.
    pub(crate) fn stop(mut self) -> (Option<i32>, String) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
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
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

fn use_short_intervals(bed: &Workdir) {
    let config = bed.read("doctor.toml").replace("[backend", "cycle = \"1s\"\nlease = \"5s\"\n[backend");
    bed.write("doctor.toml", &config);
    bed.policy("version = 1\n");
}

#[test]
fn a_service_leads_reloads_and_stops_when_told_to() {
    let bed = Workdir::local();
    use_short_intervals(&bed);
    let mut service = Service::start(&bed);
    service.wait_for_log("started");
    wait_until("a result", || {
        bed.path("doctor.db").exists() && bed.json(&["history"]).as_array().is_some_and(|rows| !rows.is_empty())
    });
    assert_eq!(bed.json(&["status"])["leader"]["is"], "leads");
    // Another controller on the same store stays passive, and so does a single cycle.
    bed.expect(5, &["run"]).stderr_contains("another controller leads");
    let mut second = Service::start(&bed);
    second.wait_for_log("another controller leads; this one waits");

    bed.policy("version = 2\n[limits]\njobs = -1\n");
    service.wait_for_log("the last valid configuration stays in force");
    service.wait_for_log("line 3, column 8");
    wait_until("the remark in status", || {
        bed.doctor(&["status"]).out.contains("the last valid configuration stays in force")
    });
    bed.policy("version = 3\n");
    service.wait_for_log("configuration reloaded policy=3");

    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("stopped"), "{log}");
    second.wait_for_log("this controller leads now");
    assert_eq!(second.stop().0, Some(0));
    assert_eq!(bed.json(&["status"])["leader"]["is"], "no-leader");
}

#[test]
fn a_log_is_followed_while_its_test_runs_and_ends_with_it() {
    let bed = Workdir::local();
    use_short_intervals(&bed);
    bed.policy(
        "[tests.slow.params]\ncommand = [\"/bin/sh\", \"-c\", \"sleep 3; echo fine\"]\n\
         [tests.disk-space]\nenabled = false\n[tests.memory]\nenabled = false\n",
    );
    let service = Service::start(&bed);
    let mut run = String::new();
    wait_until("a running run", || {
        let why = bed.path("doctor.db").exists().then(|| bed.doctor(&["why", "here", "--json"]).out);
        let why: serde_json::Value = why.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        run = why["run"]["run"].as_str().unwrap_or_default().to_owned();
        why["run"]["state"] == "running"
    });
    bed.expect(0, &["log", &run, "--follow"]).stdout_contains("slow");
    let results = bed.json(&["history", "--test", "slow"]);
    assert_eq!(results[0]["run"], run.as_str(), "the run had ended: {results}");
    assert_eq!(results[0]["verdict"], "pass", "{results}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_share_that_goes_missing_is_said_once_with_the_way_out() {
    let bed = Workdir::local();
    use_short_intervals(&bed);
    let mut service = Service::start(&bed);
    wait_until("a result", || {
        bed.path("doctor.db").exists() && bed.json(&["history"]).as_array().is_some_and(|rows| !rows.is_empty())
    });
    std::fs::rename(bed.path("data"), bed.path("away")).unwrap();
    service.wait_for_log("create the directory or set `data`");
    wait_until("the problem in status", || bed.doctor(&["status"]).out.contains("opening the shared directory"));
    std::fs::rename(bed.path("away"), bed.path("data")).unwrap();
    service.wait_for_log("problems resolved");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(log.matches("opening the shared directory").count(), 1, "{log}");
}

#[test]
fn a_service_that_was_killed_is_followed_by_the_next_at_once() {
    let bed = Workdir::local();
    use_short_intervals(&bed);
    let config = bed.read("doctor.toml").replace("lease = \"5s\"", "lease = \"1h\"");
    bed.write("doctor.toml", &config);
    let mut service = Service::start(&bed);
    wait_until("leadership", || bed.path("doctor.db").exists() && bed.json(&["status"])["leader"]["is"] == "leads");
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    bed.expect(0, &["run", "--wait", "--timeout", "1m"]);
    let history = bed.json(&["history", "--test", "memory"]);
    assert_eq!(history.as_array().unwrap().len(), 1, "nothing lost, nothing doubled");
}
