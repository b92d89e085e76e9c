//! The shared directory as a node's user can make it, and as a file server can leave it: links, pipes and directories in place of
//! the controller's files, and a mount that does not answer.

use std::{
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use doctor_testbed::ports;

use crate::{
    this_machine::Service,
    traces,
    workdir::{CommandOutput, Workdir, doctor_node, wait_until},
};

/// Tells dead from slow.
const LIMIT: Duration = Duration::from_secs(180);

/// Runs a command that must end by itself.
#[track_caller]
fn ends(mut command: Command) -> CommandOutput {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    CommandOutput::from_output(&child.wait_with_output().unwrap())
}

fn make_pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|entry| entry.is_file())
}

/// Commit c2d5b30d wrote the list through the link, over the live database: `db verify` found that it was no database any more.
#[test]
fn a_link_at_a_temporary_name_that_a_node_can_guess_does_not_reach_the_live_database() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait", "--timeout", "2m"]);
    let metadata = workdir.path("data/metadata");
    // The shell's process id is that of the controller, which it becomes.
    let script = "ln -s ../../doctor.db data/metadata/free_nodes.txt.$$.tmp \
                  && ln -s ../../doctor.db data/metadata/.validation.db.$$.tmp \
                  && ln -s ../doctor.db data/.doctor-trial-$$ && exec \"$0\" run";
    let mut command = workdir.command(&[]);
    let program = command.get_program().to_owned();
    let environment: Vec<_> =
        command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
    command = Command::new("/bin/sh");
    command.args(["-c", script]).arg(program).current_dir(workdir.path("")).stdin(Stdio::null());
    command.env_clear().envs(environment);
    let output = ends(command);
    assert_eq!(output.code, 0, "{}\n{}", output.out, output.err);
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
    assert_eq!(fs::read_to_string(metadata.join("free_nodes.txt")).unwrap(), "here\n");
}

/// On commit c2d5b30d the controller waited for ever for the other end of the pipe, and again after each restart.
#[test]
fn what_a_node_puts_in_place_of_published_files_is_named_and_replaced_and_not_waited_for() {
    let workdir = Workdir::local();
    fs::create_dir(workdir.path("data/metadata")).unwrap();
    let (list, copy) = (workdir.path("data/metadata/free_nodes.txt"), workdir.path("data/metadata/validation.db"));
    for planted in ["pipes", "links"] {
        for path in [&list, &copy] {
            let _missing = fs::remove_file(path);
            match planted {
                "pipes" => make_pipe(path),
                _ => symlink("../../doctor.db", path).unwrap(),
            }
        }
        let output = ends(workdir.command(&["run", "--wait", "--timeout", "2m"]));
        assert_eq!(output.code, 1, "{planted}: {}\n{}", output.out, output.err);
        output.stdout_contains("free_nodes.txt was ").stdout_contains("validation.db was ");
        output.stdout_contains("and has been replaced by a file");
        assert!(is_file(&list) && is_file(&copy), "{planted}");
        assert_eq!(fs::read_to_string(&list).unwrap(), "here\n");
        workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
    }
    // A directory cannot be replaced by a file, nor a link by a directory: both are moved aside.
    fs::remove_file(&list).unwrap();
    fs::create_dir(&list).unwrap();
    let output = ends(workdir.command(&["run"]));
    assert_eq!(output.code, 1, "{}\n{}", output.out, output.err);
    output.stdout_contains("free_nodes.txt was a directory and has been moved to ");
    assert_eq!(fs::read_to_string(&list).unwrap(), "here\n");
    let (metadata, elsewhere) = (workdir.path("data/metadata"), workdir.path("elsewhere"));
    fs::rename(&metadata, &elsewhere).unwrap();
    fs::remove_file(elsewhere.join("free_nodes.txt")).unwrap();
    symlink(&elsewhere, &metadata).unwrap();
    let before = fs::read_dir(&elsewhere).unwrap().count();
    let output = ends(workdir.command(&["run"]));
    assert_eq!(output.code, 1, "{}\n{}", output.out, output.err);
    output.stdout_contains("data/metadata was a symbolic link and has been moved to ");
    assert!(is_file(&list) && fs::symlink_metadata(&metadata).unwrap().is_dir());
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), before, "nothing was written through the link");
}

/// On commit c2d5b30d a pipe that was a log was followed by `--follow` for ever, and its name was not told.
#[test]
fn a_log_that_is_a_pipe_or_a_link_is_named_at_once_and_not_opened() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait", "--timeout", "2m"]);
    let run = workdir.json(&["history"])[0]["run"].as_str().unwrap().to_owned();
    let logs = workdir.json(&["log", &run]);
    let logs: Vec<String> =
        logs.as_array().unwrap().iter().map(|log| log["path"].as_str().unwrap().to_owned()).collect();
    assert!(logs.len() >= 2, "{logs:?}");
    workdir.write("secret", "HF_TOKEN=hunter2\n");
    let (first, second) = (workdir.path(&logs[0]), workdir.path(&logs[1]));
    fs::remove_file(&first).unwrap();
    fs::remove_file(&second).unwrap();
    make_pipe(&first);
    symlink(workdir.path("secret"), &second).unwrap();
    for args in [&["log", &run][..], &["log", &run, "--follow"], &["log", &run, "--json"]] {
        let output = ends(workdir.command(args));
        output.stdout_contains("is a named pipe, and a file belongs there");
        output.stdout_contains("is a symbolic link, and a file belongs there");
        assert!(!output.out.contains("hunter2"), "{}", output.out);
        assert_eq!(output.out.matches("is a named pipe").count(), 1, "{}", output.out);
    }
    assert_eq!(workdir.doctor(&["log", &run]).code, 1);
    // The rest of the run's output is still shown.
    if logs.len() > 2 {
        workdir.doctor(&["log", &run]).stdout_contains(": ");
    }
}

#[test]
fn a_document_that_is_a_pipe_is_rejected_and_its_run_ends() {
    let workdir = Workdir::local();
    let script = "#!/bin/sh\nfor arg in \"$@\"; do\n[ \"$was\" = --document ] && mkdir -p \"${arg%/*}\" && mkfifo \"$arg\"\n\
                  was=$arg\ndone\nexit 0\n";
    let program = workdir.path("doctor-node");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let settings = format!("{}doctor_node = \"{}\"\n", workdir.read("doctor.toml"), program.display());
    workdir.write("doctor.toml", &settings);
    workdir.policy("[limits]\nresult_grace = \"1s\"\n");
    let output = ends(workdir.command(&["run", "--wait", "--timeout", "2m"]));
    let kept = fs::read_dir(workdir.path("data/rejected")).unwrap_or_else(|_| panic!("{}\n{}", output.out, output.err));
    let reasons: Vec<String> = kept.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    assert!(!reasons.is_empty() && reasons.iter().all(|reason| reason == "not a regular file\n"), "{reasons:?}");
}

/// A mount served by a process that can be stopped.
struct Mount {
    workdir: Workdir,
    server: Child,
}

impl Mount {
    /// Mounts `disk` at `data`. `None`, which is reported, where FUSE is missing.
    fn new(test: &str, workdir: Workdir) -> Option<Self> {
        fs::create_dir(workdir.path("disk")).unwrap();
        let server = Command::new("bindfs").arg("-f").arg(workdir.path("disk")).arg(workdir.path("data")).spawn();
        let mounted = server.ok().and_then(|server| {
            let mut mount = Self { workdir, server };
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(30) && matches!(mount.server.try_wait(), Ok(None)) {
                let point = mount.workdir.path("data").canonicalize().ok()?;
                let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
                if mounts.lines().any(|line| line.split(' ').nth(1) == point.to_str()) {
                    return Some(mount);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            None
        });
        if mounted.is_none() {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "bindfs cannot mount here");
            println!("NOT RUN: {test}: bindfs cannot mount here");
        }
        mounted
    }

    /// Returns whether the server was there.
    fn signal(&self, signal: &str) -> bool {
        Command::new("kill").args([signal, &self.server.id().to_string()]).status().is_ok_and(|sent| sent.success())
    }

    fn hang(&self) {
        assert!(self.signal("-STOP"));
    }

    fn answer(&self) {
        assert!(self.signal("-CONT"));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _answers = self.signal("-CONT");
        let _unmounted = Command::new("umount").arg("-l").arg(self.workdir.path("data")).status();
        let _gone = self.server.kill();
        let _reaped = self.server.wait();
    }
}

/// A process that is ended with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

const OFF_THE_BUS: &str = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.";

/// A cluster of one node with an agent that checks a recorded machine.
fn with_agent(workdir: &Workdir) {
    let port = ports::reserve_one().unwrap();
    let sections = format!(
        "cycle = \"1s\"\nlease = \"1h\"\npublish = \"1s\"\n[probes]\nlisten = \"127.0.0.1:0\"\n[agents]\nlisten = \"127.0.0.1:{port}\"\n[web]\nlisten = \
         \"127.0.0.1:0\"\n[backend"
    );
    let config = workdir.read("doctor.toml").replace("[backend", &sections);
    workdir.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
    workdir.write("busy", "");
    for directory in ["machine/dev", "machine/proc/sys/kernel/random"] {
        fs::create_dir_all(workdir.path(directory)).unwrap();
    }
    workdir.write("machine/dev/kmsg", "6,1,1000,-;Linux version 6.8\n");
    workdir.write("machine/proc/uptime", "1000000.00 5.0\n");
    workdir.write("machine/proc/sys/kernel/random/boot_id", "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
}

fn agent(workdir: &Workdir) -> Service {
    let mut command = Command::new(doctor_node());
    command.arg("agent").args(["--credential", "keys/here.key", "--state", "agent", "--root", "machine"]);
    command.current_dir(workdir.path("")).stdin(Stdio::null()).env_clear();
    Service::spawn(command)
}

fn has_finding(workdir: &Workdir, text: &str) -> bool {
    workdir.json(&["why", "here"])["open_findings"].to_string().contains(text)
}

/// Returns the status line of a health endpoint.
fn health(address: &str, path: &str) -> String {
    let stream = std::net::TcpStream::connect(address.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(&stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut &stream, &mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

/// On commit c2d5b30d the loop waited for the file server until it answered: no report became a finding.
#[test]
fn a_file_server_that_hangs_stops_no_report_and_what_waited_is_published_when_it_answers() {
    let Some(mount) = Mount::new("a hung share and agents", Workdir::local()) else { return };
    let workdir = &mount.workdir;
    with_agent(workdir);
    workdir.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
    let mut service = Service::start(workdir);
    service.wait_for_log("agent endpoint listening");
    let mut agent = agent(workdir);
    agent.wait_for_log("reporting as here to http://127.0.0.1:");
    let probes = service.wait_for_line("health probes listening");
    let probes = probes.rsplit("at=").next().unwrap().trim().to_owned();
    let _api = traces::address(&mut service);
    wait_until("a cycle that knows of the agent", || workdir.json(&["status"])["silent"]["agents"] == 1);
    let list = workdir.path("disk/metadata/free_nodes.txt");
    wait_until("the list", || is_file(&list));

    mount.hang();
    service.wait_for_log("does not answer since ");
    fs::OpenOptions::new()
        .append(true)
        .open(workdir.path("machine/dev/kmsg"))
        .and_then(|mut log| writeln!(log, "3,2,999999000000,-;{OFF_THE_BUS}"))
        .unwrap();
    wait_until("the finding", || has_finding(workdir, "fallen off the bus"));
    // The status shows the problems of the last cycle that has finished.
    wait_until("the problem", || {
        let status = workdir.doctor(&["status"]).out;
        status.contains("the shared directory") && status.contains("does not answer since")
    });
    workdir.expect(0, &["quarantine", "here", "--why", "looks bad", "--yes"]);
    wait_until("the command to be carried out", || workdir.json(&["status"])["commands"] == 0);
    assert!(health(&probes, "/healthz").contains("200"), "{}", health(&probes, "/healthz"));
    fs::remove_file(&list).unwrap();

    mount.answer();
    wait_until("the list to be published again", || is_file(&list));
    service.wait_for_log("problems resolved");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(log.matches("does not answer since").count(), 1, "it is logged once: {log}");
}

#[test]
fn a_file_server_that_hangs_stops_no_drain() {
    let workdir = Workdir::new();
    fs::create_dir(workdir.path("data")).unwrap();
    workdir.write("policy.toml", "mode = \"act\"\nallow = { mark = true, drain = true }\n");
    workdir.write(
        "doctor.toml",
        "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"5m\"\nlease = \"2d\"\npublish = \"10m\"\n\
         [backend.sim]\nsocket = \"sim.sock\"\n",
    );
    let Some(mount) = Mount::new("a hung share and drains", workdir) else { return };
    let workdir = &mount.workdir;
    // Its nodes do not use the share: only the controller does.
    let mut command = workdir.command(&["sim", "serve", "--socket", "sim.sock", "--nodes", "12", "--speed", "3600"]);
    let _cluster = Ended(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    wait_until("the cluster", || workdir.path("sim.sock").exists());
    let mut service = Service::start(workdir);
    service.wait_for_log("started");
    wait_until("the list", || is_file(&workdir.path("disk/metadata/free_nodes.txt")));
    mount.hang();
    service.wait_for_log("does not answer since ");
    workdir.expect(0, &["quarantine", "node003", "--why", "smells", "--yes"]);
    let drained = || {
        let cases = workdir.json(&["cases", "--all", "node003"]);
        let steps = cases.as_array().into_iter().flatten().filter_map(|case| case["steps"].as_array()).flatten();
        steps.filter(|step| step["what"] == "drain" && step["state"] == "done").count()
    };
    wait_until("the drain", || drained() >= 1);
    mount.answer();
    wait_until("a list without the node", || {
        fs::read_to_string(workdir.path("disk/metadata/free_nodes.txt")).is_ok_and(|list| !list.contains("node003"))
    });
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_service_starts_and_stops_beside_a_share_that_hangs_and_commands_end_with_a_clear_error() {
    let Some(mount) = Mount::new("a start beside a hung share", Workdir::local()) else { return };
    let workdir = &mount.workdir;
    workdir.expect(0, &["run", "--wait", "--timeout", "2m"]);
    let run = workdir.json(&["history"])[0]["run"].as_str().unwrap().to_owned();
    mount.hang();
    let says = "does not answer since ";
    ends(workdir.command(&["config", "check"])).stdout_contains(says);
    for args in [&["run"][..], &["log", &run], &["log", &run, "--follow"]] {
        let output = ends(workdir.command(args));
        assert_eq!(output.code, 3, "{args:?}: {}\n{}", output.out, output.err);
        output.stderr_contains(says).stderr_contains("check its mount and its file server");
    }
    let mut service = Service::start(workdir);
    service.wait_for_log(says);
    wait_until("the service to lead", || workdir.json(&["status"])["leader"]["is"] == "leads");
    wait_until("the problem in status", || workdir.doctor(&["status"]).out.contains(says));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");

    // It also starts as a file server comes back.
    let mut service = Service::start(workdir);
    service.wait_for_log(says);
    mount.answer();
    let list = workdir.path("disk/metadata/free_nodes.txt");
    fs::remove_file(&list).unwrap();
    wait_until("the list", || is_file(&list));
    assert_eq!(service.stop().0, Some(0));
}

/// A result that is written while the file server hangs is neither lost nor taken for missing.
#[test]
fn a_result_waits_for_the_file_server() {
    let Some(mount) = Mount::new("a result on a hung share", Workdir::local()) else { return };
    let workdir = &mount.workdir;
    let config = workdir.read("doctor.toml").replace("[backend", "cycle = \"1s\"\nlease = \"1h\"\n[backend");
    workdir.write("doctor.toml", &config);
    workdir.policy(
        "[limits]\nresult_grace = \"1s\"\n[tests.slow.params]\ncommand = [\"/bin/sh\", \"-c\", \"sleep 3; echo fine\"]\n",
    );
    let mut service = Service::start(workdir);
    wait_until("a running run", || {
        let why = workdir.path("doctor.db").exists().then(|| workdir.doctor(&["why", "here", "--json"]).out);
        let why: serde_json::Value = why.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        why["run"]["state"] == "running"
    });
    mount.hang();
    service.wait_for_log("does not answer since ");
    wait_until("the problem in status", || workdir.doctor(&["status"]).out.contains("does not answer since "));
    assert_eq!(workdir.json(&["history", "--test", "slow"]), serde_json::json!([]), "nothing is concluded meanwhile");
    mount.answer();
    wait_until("the result", || {
        workdir.json(&["history", "--test", "slow"]).as_array().is_some_and(|rows| rows.len() == 1)
    });
    assert_eq!(workdir.json(&["history", "--test", "slow"])[0]["verdict"], "pass");
    assert_eq!(service.stop().0, Some(0));
}
