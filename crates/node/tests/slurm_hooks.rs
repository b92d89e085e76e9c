//! The hooks under real slurmds of two generations of Slurm: on machines with planted faults, with an empty
//! environment, and with processes that hang.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use doctor_checks::{credential::Credential, document::RunKey, drain_permit::DrainPermit};
use doctor_core::{
    ids::NodeName,
    time::{Span, Timestamp},
};
use doctor_node::{agent::drain_permit, clock::now};
use doctor_testbed::slurm::{Daemon, Generation, HealthCheck, Layout, Slurm, SlurmTestbedError};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
const OFF_THE_BUS: &str = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.";
const DAMAGED: &str = "EXT4-fs error (device sda1): ext4_lookup:1855: inode #2";
/// The clock is this machine's own, which does not matter here.
const NO_CLOCK: &str = "[tests.time-sync]\nenabled = false\n";
/// A built-in rule requests a reboot for this event; this one isolates the node.
const ISOLATES: &str = "[[rules]]\nid = \"site-xid-79\"\ncheck = \"gpu-xid\"\nevent = \"xid-79\"\nreason = \"xid-79\"\n\
                        severity = \"isolate\"\ntext = \"{value}\"\n";
/// A blocking prolog with enough time for a busy machine: one that runs out of time lets its job start.
const PATIENT_PROLOG: &str = "[prolog]\nblock = true\nlimit = \"2m\"\n";
/// A Slurm that waits for it: it requeues a batch job that the node has not started after this time.
const PATIENT_SLURM: &str = "BatchStartTimeout=300";
/// The longest a permit can last: it must not expire on a busy machine before a prolog has read it.
const PERMITTED: Span = Span::minutes(10);

/// A directory with a machine and settings for each node, and the three scripts that Slurm runs.
struct Site {
    folder: TempDir,
}

impl Site {
    fn new(nodes: usize) -> Self {
        let site = Self { folder: tempfile::tempdir().unwrap() };
        site.write("policy.toml", NO_CLOCK);
        site.write("isolates.toml", &format!("{ISOLATES}{NO_CLOCK}"));
        for node in 1..=nodes {
            site.set_kernel_log(&format!("node{node}"), &[]);
        }
        for kind in ["health", "prolog", "epilog"] {
            // Saves the environment to show how little it contains.
            let env = site.at("env");
            let config = site.at("$SLURMD_NODENAME/hook.toml");
            let text = format!(
                "#!/bin/sh\n/usr/bin/env > {}.{kind}\nexec {PROGRAM} hook {kind} --config {}\n",
                env.display(),
                config.display()
            );
            site.write(kind, &text);
            fs::set_permissions(site.at(kind), fs::Permissions::from_mode(0o755)).unwrap();
        }
        site
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Atomically: a hook may read at any time.
        let temporary = path.with_extension("new");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, path).unwrap();
    }

    /// Sets what the kernel of a node has logged since its boot.
    fn set_kernel_log(&self, node: &str, lines: &[&str]) {
        self.write(&format!("{node}/root/proc/uptime"), "1000000.00 5.0\n");
        self.write(&format!("{node}/root/proc/sys/kernel/random/boot_id"), "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
        let mut log = "6,1,1000,-;Linux version 6.8\n".to_owned();
        for (number, line) in (2..).zip(lines) {
            log.push_str(&format!("3,{number},999999000000,-;{line}\n"));
        }
        self.write(&format!("{node}/root/dev/kmsg"), &log);
    }

    /// Writes the settings of a node without a controller.
    fn write_standalone_settings(&self, node: &str, more: &str) {
        self.write_settings(node, &format!("standalone = true\npolicy = {:?}\n{more}", self.at("policy.toml")));
    }

    /// Writes the settings of a node's hooks, with its own machine.
    fn write_settings(&self, node: &str, more: &str) {
        let (root, state) = (self.at(&format!("{node}/root")), self.at(&format!("{node}/state")));
        self.write(&format!("{node}/hook.toml"), &format!("state = {state:?}\nroot = {root:?}\n{more}"));
    }

    /// Writes the settings of a node whose controller is unreachable, and returns the agent's state directory.
    fn write_reporting_settings(&self, node: &str, more: &str) -> PathBuf {
        let credential = Credential {
            node: NodeName::new(node).unwrap(),
            key: RunKey::new([1; 32]),
            controller: Some("http://127.0.0.1:9".to_owned()),
            fingerprints: Vec::new(),
        };
        let (key, state) = (self.at(&format!("{node}/agent.key")), self.at(&format!("{node}/agent")));
        self.write(&format!("{node}/agent.key"), &credential.text());
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let root = self.at(&format!("{node}/root"));
        let agent = format!(
            "credential = {key:?}\nstate = {state:?}\nroot = {root:?}\npolicy = {:?}\n",
            self.at("isolates.toml")
        );
        self.write(&format!("{node}/agent.toml"), &agent);
        self.write_settings(node, &format!("agent = {:?}\n{more}", self.at(&format!("{node}/agent.toml"))));
        state
    }

    fn layout(&self, generation: Generation, nodes: usize) -> Layout {
        let health =
            HealthCheck { program: self.at("health"), interval: Duration::from_secs(1), states: "ANY".to_owned() };
        Layout { generation, nodes, gpus: 0, health_check: Some(health), ..Layout::default() }
    }

    fn log(&self, node: &str) -> String {
        fs::read_to_string(self.at(&format!("{node}/state/hook.log"))).unwrap_or_default()
    }

    #[track_caller]
    fn wait_for_line(&self, node: &str, text: &str) {
        wait_until(&format!("{node} says {text}"), || self.log(node).contains(text), || self.log(node));
    }
}

#[track_caller]
fn wait_until(what: &str, reached: impl Fn() -> bool, details: impl Fn() -> String) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < Duration::from_secs(240), "{what}: {}", last_lines(&details()));
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// Starts Slurm. `None` if this machine has none, which is reported, and in CI is a failure.
fn start(what: &str, layout: &Layout) -> Option<Slurm> {
    match Slurm::start(layout) {
        Ok(slurm) => Some(slurm),
        Err(error @ SlurmTestbedError::Unsupported { .. }) => {
            error.skip_tests(&format!("{what}, {:?}", layout.generation));
            None
        }
        Err(other) => panic!("{other}"),
    }
}

fn show_node(slurm: &Slurm, node: &str) -> String {
    slurm.run("scontrol", &["-o", "show", "node", node]).unwrap()
}

fn is_drained(slurm: &Slurm, node: &str) -> bool {
    slurm.node_state(node).unwrap().contains("DRAIN")
}

fn test_standalone_drain(generation: Generation) {
    let site = Site::new(4);
    for node in ["node1", "node2", "node3", "node4"] {
        site.write_standalone_settings(node, "release = true\n");
    }
    let Some(slurm) = start("a hook that drains alone", &site.layout(generation, 4)) else { return };
    site.wait_for_line("node4", "healthy");
    slurm.run("scontrol", &["update", "nodename=node2", "state=drain", "reason=Maintenance of Bob's"]).unwrap();

    // Two fail; an operator has drained one of them already.
    for node in ["node1", "node2"] {
        site.set_kernel_log(node, &[DAMAGED]);
    }
    slurm.wait_for_node("node1", "drained", |state| state.contains("DRAIN")).unwrap();
    let output = show_node(&slurm, "node1");
    assert!(
        output.contains("Reason=doctor: file-system-error kernel-log: disk:sda1: ")
            && output.contains(" [hook] [root@"),
        "{output}"
    );
    site.wait_for_line("node2", "not touched, state set by others: IDLE+DRAIN, Maintenance of Bob's");
    let env = fs::read_to_string(site.at("env.health")).unwrap();
    assert!(env.contains("SLURMD_NODENAME=node"), "{env}");
    assert!(!env.lines().any(|line| line.starts_with("PATH=")), "Slurm gives no PATH: {env}");

    // A tenth of four nodes is one: a third bad node is left to an operator.
    site.set_kernel_log("node3", &[DAMAGED]);
    site.wait_for_line(
        "node3",
        "not drained, an operator must decide: nodes drained by Cluster Doctor: 1 of 4, limit 1",
    );
    assert_eq!(slurm.node_state("node3").unwrap(), "IDLE");
    assert_eq!(slurm.node_state("node4").unwrap(), "IDLE");

    // The fault is gone and our drain ends; the operator's drain is not ours to end.
    for node in ["node1", "node2", "node3"] {
        site.set_kernel_log(node, &[]);
    }
    slurm.wait_for_node("node1", "resumed", |state| !state.contains("DRAIN")).unwrap();
    let before = site.log("node2").lines().count();
    wait_until("another look at node2", || site.log("node2").lines().count() > before + 1, || site.log("node2"));
    assert!(show_node(&slurm, "node2").contains("Reason=Maintenance of Bob's"));
    assert!(is_drained(&slurm, "node2"));
}

#[test]
fn slurmds_health_check_drains_a_bad_node_and_never_touches_an_operators_drain() {
    Generation::ALL.into_iter().for_each(test_standalone_drain);
}

/// Concurrent drains become visible to each other a moment later: only as many stay as the limit allows.
#[test]
fn nodes_that_fail_together_drain_no_more_than_the_limit() {
    let site = Site::new(8);
    for node in 1..=8 {
        site.write_standalone_settings(&format!("node{node}"), "");
    }
    let mut layout = site.layout(Generation::Debian12, 8);
    // With shorter intervals slurmctld has no time to see that a resumed node responds.
    layout.health_check.as_mut().unwrap().interval = Duration::from_secs(4);
    let Some(slurm) = start("nodes that fail together", &layout) else { return };
    for node in 1..=8 {
        site.set_kernel_log(&format!("node{node}"), &[DAMAGED]);
    }
    let names: Vec<String> = (1..=8).map(|node| format!("node{node}")).collect();
    let settled =
        |name: &String| ["; drained", "drain reverted", "not drained"].iter().any(|text| site.log(name).contains(text));
    wait_until(
        "all to have looked",
        || names.iter().all(settled),
        || format!("{:?}", names.iter().map(|name| site.log(name)).collect::<Vec<_>>()),
    );
    let drained = || names.iter().filter(|name| is_drained(&slurm, name)).count();
    wait_until("one to be out", || drained() == 1, || format!("{} are out", drained()));
    let runs = |name: &String| site.log(name).lines().count();
    let before: Vec<usize> = names.iter().map(runs).collect();
    let ran_again = || names.iter().zip(&before).all(|(name, before)| runs(name) > before + 1);
    let states = || {
        names
            .iter()
            .map(|name| format!("{name} {}: {}\n", slurm.node_state(name).unwrap(), runs(name)))
            .collect::<String>()
    };
    wait_until("further looks", ran_again, || format!("{before:?}\n{}", states()));
    assert_eq!(drained(), 1);
}

fn test_blocking_prolog(generation: Generation) {
    let site = Site::new(1);
    let state = site.write_reporting_settings("node1", PATIENT_PROLOG);
    let mut layout = site.layout(generation, 1);
    layout.health_check = None;
    layout.prolog = Some(site.at("prolog"));
    layout.extra_lines.push(PATIENT_SLURM.to_owned());
    let Some(slurm) = start("a prolog that may block", &layout) else { return };
    let submit = || slurm.submit(&["--output=/dev/null", "--nodelist=node1", "--wrap=exit 0"]).unwrap();
    let run_job = || slurm.wait_for_job(submit(), "COMPLETED").unwrap();
    fs::create_dir_all(&state).unwrap();
    let store_permit =
        |at: Timestamp| drain_permit::store(&state, Some(DrainPermit { duration: PERMITTED }), at).unwrap();

    run_job();
    site.wait_for_line("node1", "prolog: healthy");
    // A recent verdict would be reused: delete it to force a new check.
    let delete_verdict = || fs::remove_file(site.at("node1/state/verdict.json")).unwrap();
    site.set_kernel_log("node1", &[OFF_THE_BUS]);
    delete_verdict();
    run_job();
    site.wait_for_line("node1", "the job is allowed: no fresh drain permit");
    store_permit(now().minus(PERMITTED).minus(Span::minutes(5)));
    run_job();
    assert!(!is_drained(&slurm, "node1"), "a stale permit is none");
    assert!(!site.log("node1").contains("is blocked on this node"));

    store_permit(now());
    let blocked_job = submit();
    site.wait_for_line("node1", "the job is blocked on this node");
    slurm.wait_for_node("node1", "drained", |state| state.contains("DRAIN")).unwrap();
    let output = show_node(&slurm, "node1");
    assert!(output.contains("Reason=doctor: xid-79 gpu-xid: "), "{output}");
    wait_for_requeue(&slurm, blocked_job);
    // The node is repaired, and the waiting job runs: the previous hook's verdict must not drain the node again.
    site.set_kernel_log("node1", &[]);
    slurm.run("scontrol", &["update", "nodename=node1", "state=resume"]).unwrap();
    // Slurm delays a requeued job by two minutes. Two seconds are necessary: slurmd has revoked the job's credential
    // and rejects a new one that slurmctld issues within the same second. The job then fails ("Job credential
    // revoked").
    slurm.run("scontrol", &["update", &format!("jobid={blocked_job}"), "starttime=now+2"]).unwrap();
    slurm.run("scontrol", &["release", &blocked_job.to_string()]).unwrap();
    slurm.wait_for_job(blocked_job, "COMPLETED").unwrap();
    assert_eq!(site.log("node1").matches("the job is blocked on this node").count(), 1, "{}", site.log("node1"));
}

/// Waits until Slurm has handled a failed prolog on node1. The hook logs its line before it exits, and only then does
/// slurmd notify slurmctld, with two messages: the job is requeued and held, and the node registers with the failed
/// prolog. An operator's command before the first message is lost. A `resume` before the second one is undone:
/// slurmctld drains the node again.
fn wait_for_requeue(slurm: &Slurm, job: u32) {
    let is_requeued = |output: &str| output.contains(" JobState=PENDING ") && output.contains(" Restarts=1 ");
    let show = || slurm.run("scontrol", &["show", "job", "-o", &job.to_string()]);
    slurm.wait_for("a requeued job", show, is_requeued).unwrap();
    // Nothing shows that the second message has arrived. A slurmd that is stopped waits for the replies to its
    // messages.
    slurm.stop(Daemon::Node("node1")).unwrap();
    slurm.restart(Daemon::Node("node1")).unwrap();
}

#[test]
fn a_prolog_keeps_a_job_from_an_isolated_node_only_while_the_breakers_permit_is_fresh() {
    Generation::ALL.into_iter().for_each(test_blocking_prolog);
}

/// Every node has a permit, and only the hooks themselves count how many use theirs.
#[test]
fn a_fault_on_all_nodes_blocks_jobs_on_no_more_nodes_than_the_breaker_allows() {
    let site = Site::new(4);
    let names = ["node1", "node2", "node3", "node4"];
    for node in names {
        let state = site.write_reporting_settings(node, PATIENT_PROLOG);
        fs::create_dir_all(&state).unwrap();
        drain_permit::store(&state, Some(DrainPermit { duration: PERMITTED }), now()).unwrap();
        site.set_kernel_log(node, &[OFF_THE_BUS]);
    }
    let mut layout = site.layout(Generation::Debian12, 4);
    layout.health_check = None;
    layout.prolog = Some(site.at("prolog"));
    layout.extra_lines.push(PATIENT_SLURM.to_owned());
    let Some(slurm) = start("prologs of a common fault", &layout) else { return };
    for node in names {
        slurm.submit(&["--output=/dev/null", &format!("--nodelist={node}"), "--wrap=exit 0"]).unwrap();
    }
    let logged = |node: &str, text: &str| site.log(node).contains(text);
    let logs = || names.map(|node| site.log(node)).concat();
    let answered = |node: &str| logged(node, "the job is blocked on this node") || logged(node, "the job is allowed");
    wait_until("all to have answered", || names.iter().all(|node| answered(node)), logs);
    let blocked: Vec<&str> = names.into_iter().filter(|node| logged(node, "the job is blocked on this node")).collect();
    assert_eq!(blocked.len(), 1, "{}", logs());
    let drained = || names.into_iter().filter(|node| is_drained(&slurm, node)).collect::<Vec<_>>();
    wait_until("that one to be out", || drained() == blocked, || format!("{:?} are out\n{}", drained(), logs()));
}

/// A mount served by a process that can be stopped.
struct Mount {
    point: TempDir,
    server: Child,
}

impl Mount {
    fn of(folder: &Path) -> Option<Self> {
        let point = tempfile::tempdir().unwrap();
        let server = Command::new("bindfs").arg("-f").arg(folder).arg(point.path()).spawn().ok()?;
        let mut mount = Self { point, server };
        let started = Instant::now();
        loop {
            let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
            if mounts.lines().any(|line| line.split(' ').nth(1) == mount.point.path().to_str()) {
                return Some(mount);
            }
            if !matches!(mount.server.try_wait(), Ok(None)) || started.elapsed() > Duration::from_secs(10) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.server.id().cast_signed()).unwrap(), signal).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        let _unmounted = Command::new("umount").arg("-l").arg(self.point.path()).status();
        let _gone = self.server.kill();
        let _reaped = self.server.wait();
    }
}

#[test]
fn a_hung_file_system_or_scontrol_drains_no_node_and_delays_no_job() {
    let site = Site::new(2);
    site.write("share/policy.toml", NO_CLOCK);
    let Some(mount) = Mount::of(&site.at("share")) else {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "bindfs cannot mount here");
        println!("NOT RUN: hooks on a file system that stalls: bindfs cannot mount here");
        return;
    };
    // One reads its policy from a share that stalls; on the other, scontrol hangs.
    let policy = mount.point.path().join("policy.toml");
    let limits = "[health]\nlimit = \"2s\"\n[prolog]\nlimit = \"2s\"\n";
    site.write_settings("node1", &format!("standalone = true\npolicy = {policy:?}\n{limits}"));
    site.write("programs/scontrol", "#!/bin/sh\nexec /bin/sleep 600\n");
    fs::set_permissions(site.at("programs/scontrol"), fs::Permissions::from_mode(0o755)).unwrap();
    site.write_standalone_settings("node2", &format!("slurm_programs = {:?}\n{limits}", site.at("programs")));
    let mut layout = site.layout(Generation::Debian12, 2);
    layout.prolog = Some(site.at("prolog"));
    let Some(slurm) = start("hooks of what hangs", &layout) else { return };
    site.wait_for_line("node1", "health: healthy");
    mount.signal(Signal::STOP);
    for node in ["node1", "node2"] {
        site.set_kernel_log(node, &[OFF_THE_BUS]);
    }
    site.wait_for_line("node1", "inconclusive: the check took longer than 2s");
    site.wait_for_line("node2", "nothing is done: Slurm did not answer in time");
    for node in ["node1", "node2"] {
        let started = Instant::now();
        let job = slurm.submit(&["--output=/dev/null", &format!("--nodelist={node}"), "--wrap=exit 0"]).unwrap();
        slurm.wait_for_job(job, "COMPLETED").unwrap();
        // The hang lasts ten minutes.
        assert!(started.elapsed() < Duration::from_secs(120), "{node}: {:?}", started.elapsed());
        assert_eq!(slurm.node_state(node).unwrap(), "IDLE");
    }
    // The share responds again, and the fault is found.
    mount.signal(Signal::CONT);
    slurm.wait_for_node("node1", "drained", |state| state.contains("DRAIN")).unwrap();
}

fn test_epilog(generation: Generation) {
    let site = Site::new(1);
    let state = site.write_reporting_settings("node1", "[epilog]\nlimit = \"2m\"\n");
    let mut layout = site.layout(generation, 1);
    layout.health_check = None;
    layout.epilog = Some(site.at("epilog"));
    let Some(slurm) = start("an epilog that looks by how the job ended", &layout) else { return };
    let job = |wrap: &str, end: &str| {
        let job = slurm.submit(&["--output=/dev/null", &format!("--wrap={wrap}")]).unwrap();
        slurm.wait_for_job(job, end).unwrap();
        job
    };
    job("exit 0", "COMPLETED");
    site.wait_for_line("node1", "epilog: healthy");
    let exited = job("exit 3", "FAILED");
    site.wait_for_line("node1", &format!("job {exited} ended with code 3; healthy"));
    assert!(!site.log("node1").contains("deeper checks run"));
    let aborted = job("kill -ABRT $$", "FAILED");
    site.wait_for_line("node1", &format!("job {aborted} ended by signal 6; healthy"));
    assert!(site.log("node1").contains("deeper checks run: "), "{}", site.log("node1"));
    let stored = fs::read_to_string(site.at(&format!("node1/state/jobs/{aborted}"))).unwrap();
    assert!(stored.contains("batch 0:6\n"), "{stored}");
    // The controller is unreachable: the report is spooled.
    site.wait_for_line("node1", "the controller does not accept it now, it is spooled");
    let spooled = fs::read_dir(state.join("spool")).unwrap().flatten();
    assert!(spooled.filter(|file| file.file_name().to_string_lossy().ends_with(".report")).count() >= 1);
    assert_eq!(slurm.node_state("node1").unwrap(), "IDLE");
}

#[test]
fn an_epilog_runs_deeper_checks_after_a_job_killed_by_a_hardware_signal() {
    Generation::ALL.into_iter().for_each(test_epilog);
}

#[test]
fn a_hook_with_invalid_arguments_logs_an_error_and_lets_the_job_start() {
    for args in [&["hook", "prologue"][..], &["hook"], &["hook", "prolog", "--confg", "x"]] {
        let output = Command::new(PROGRAM).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}: slurmd's log shows the error");
    }
    let check = Command::new(PROGRAM).args(["check", "--confg"]).output().unwrap();
    assert_eq!(check.status.code(), Some(3), "any other command says that it could not");
}
