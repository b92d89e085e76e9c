//! Slurm's hooks and the controller as real programs: the controller records and acts on a hook's findings, the hook
//! receives the breaker's permit, real slurmctlds accept the output of `doctor deploy slurm`, and
//! `doctor config check --live` queries them.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use doctor_testbed::slurm::{Generation, HealthCheck, Layout, Slurm, SlurmTestbedError};

use crate::{
    this_machine::Service,
    workdir::{CommandOutput, Workdir, doctor_node, wait_until},
};

const DAMAGED: &str = "3,2,999999000000,-;EXT4-fs error (device sda1): ext4_lookup:1855: inode #2\n";

/// Writes a recorded machine below a directory.
fn machine(bed: &Workdir, folder: &str, log: &str) {
    for directory in ["dev", "proc/sys/kernel/random"] {
        fs::create_dir_all(bed.path(&format!("{folder}/{directory}"))).unwrap();
    }
    bed.write(&format!("{folder}/proc/uptime"), "1000000.00 5.0\n");
    bed.write(&format!("{folder}/proc/sys/kernel/random/boot_id"), "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
    bed.write(&format!("{folder}/proc/meminfo"), "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n");
    bed.write(&format!("{folder}/dev/kmsg"), &format!("6,1,1000,-;Linux version 6.8\n{log}"));
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts Slurm. `None`: this machine has none, which is printed; in CI it is a failure.
fn slurm(what: &str, layout: &Layout) -> Option<Slurm> {
    match Slurm::start(layout) {
        Ok(slurm) => Some(slurm),
        Err(why @ SlurmTestbedError::Unsupported { .. }) => {
            why.skip_tests(&format!("{what}, {:?}", layout.generation));
            None
        }
        Err(other) => panic!("{other}"),
    }
}

fn executable(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Writes the settings of a node's agent and hooks below `folder`.
fn settings(bed: &Workdir, folder: &str, node: &str, more: &str) {
    let at = |name: &str| bed.path(&format!("{folder}/{name}"));
    let agent = format!(
        "credential = {:?}\nstate = {:?}\nroot = {:?}\npolicy = {:?}\n",
        bed.path(&format!("keys/{node}.key")),
        at("agent"),
        at("machine"),
        bed.path("policy.toml")
    );
    bed.write(&format!("{folder}/agent.toml"), &agent);
    let hook = format!("agent = {:?}\nstate = {:?}\nfresh = \"1s\"\n{more}", at("agent.toml"), at("hook"));
    bed.write(&format!("{folder}/hook.toml"), &hook);
}

fn hook(bed: &Workdir, moment: &str) -> CommandOutput {
    let mut command = Command::new(doctor_node());
    command.args(["hook", moment, "--config", "here/hook.toml"]).current_dir(bed.path("")).stdin(Stdio::null());
    CommandOutput::from_output(&command.env_clear().env("SLURMD_NODENAME", "here").output().unwrap())
}

#[test]
fn what_a_hook_sees_comes_to_the_controller_by_itself_or_by_the_agent_and_its_permit_comes_back() {
    let bed = Workdir::local();
    bed.write("busy", "");
    bed.policy(
        "[[rules]]\nid = \"site-damage\"\ncheck = \"kernel-log\"\nevent = \"file-system-error\"\nreason = \"damage\"\nseverity = \"isolate\"\n\
         text = \"{value}\"\n",
    );
    let listens = format!("[agents]\nlisten = \"127.0.0.1:{}\"\n[backend", free_port());
    let config = bed.read("doctor.toml").replace("[backend", &listens);
    bed.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
    bed.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
    machine(&bed, "here/machine", "");
    settings(&bed, "here", "here", "[prolog]\nblock = true\n");

    // Without a controller jobs run, and the report is queued.
    let said = hook(&bed, "health");
    assert_eq!(said.code, 0);
    said.stderr_contains("health: healthy").stderr_contains("the controller does not accept it now, it is spooled");
    assert_eq!(hook(&bed, "prolog").code, 0);

    let mut service = Service::start(&bed);
    service.wait_for_log("agent endpoint listening");
    machine(&bed, "here/machine", DAMAGED);
    wait_until("a report of the hook", || hook(&bed, "health").err.contains("; reported"));
    let found = || bed.json(&["why", "here"])["open_findings"].to_string();
    wait_until("the finding", || found().contains("ext4_lookup"));
    // The answer carried the breaker's permit. Only Slurm knows how many nodes are out already, and there is none here.
    let permit = bed.path("here/agent/permit.json");
    assert!(permit.exists(), "{:?}", fs::read_dir(bed.path("here/agent")).unwrap().collect::<Vec<_>>());
    let said = hook(&bed, "prolog");
    assert_eq!(said.code, 0, "{}", said.err);
    said.stderr_contains("prolog: damage (isolate) of kernel-log")
        .stderr_contains("the job is allowed: scontrol failed");

    // While an agent runs, the agent reports.
    let mut command = Command::new(doctor_node());
    command.args(["agent", "--config", "here/agent.toml"]).current_dir(bed.path("")).stdin(Stdio::null()).env_clear();
    let mut agent = Service::spawn(command);
    agent.wait_for_log("reporting as here");
    let verdict = bed.path("here/agent/verdict.json");
    wait_until("the agent's verdict", || verdict.exists());
    fs::remove_file(bed.path("here/hook/verdict.json")).unwrap();
    fs::remove_file(&verdict).unwrap();
    hook(&bed, "health").stderr_contains("damage (isolate) of kernel-log").stderr_contains("the agent reports it");
    wait_until("nothing that waits", || fs::read_dir(bed.path("here/agent/handed")).unwrap().count() == 0);
    assert_eq!(agent.stop().0, Some(0));
    assert_eq!(service.stop().0, Some(0));
}

fn is_taken(generation: Generation) {
    let bed = Workdir::new();
    bed.write("policy.toml", "[agents]\nlook_every = \"2m\"\n[tests.time-sync]\nenabled = false\n");
    bed.write("doctor.toml", "data = \"data\"\npolicy = \"policy.toml\"\n");
    machine(&bed, "node/machine", "");
    // The scripts look for settings in system paths; the tests' settings are here.
    let program = bed.path("bin/doctor-node");
    let config = bed.path("node/hook.toml");
    executable(
        &program,
        &format!("#!/bin/sh\nexec {} \"$@\" --config {}\n", doctor_node().display(), config.display()),
    );
    let (scripts, program) = (bed.path("scripts"), program.to_str().unwrap().to_owned());
    let args =
        ["deploy", "slurm", "--alone", "--block", "--scripts", scripts.to_str().unwrap(), "--doctor-node", &program];
    let printed = bed.json(&args);
    let file = |path: &str| {
        let files = printed["files"].as_array().unwrap().iter();
        files.clone().find(|file| file["path"].as_str().unwrap().ends_with(path)).unwrap().clone()
    };
    for name in ["health", "prolog", "epilog"] {
        let script = file(&format!("/{name}"));
        assert_eq!((script["mode"].as_u64(), script["on"].as_str()), (Some(0o755), Some("every-node")));
        executable(&scripts.join(name), script["text"].as_str().unwrap());
    }
    let state = format!(
        "state = {:?}\nroot = {:?}\n{}",
        bed.path("node/state"),
        bed.path("node/machine"),
        file("/hook.toml")["text"]
            .as_str()
            .unwrap()
            .replace("/etc/cluster-doctor/policy.toml", bed.path("policy.toml").to_str().unwrap())
    );
    fs::write(&config, state).unwrap();
    let said = bed.expect(0, &[&args[..], &["--what", "slurm-conf"]].concat());
    // The bed has SchedulerParameters already: the value is added to them, as the printed comment says.
    let lines = said.out.replace("SchedulerParameters=nohold", "SchedulerParameters=sched_interval=2,nohold");
    let layout =
        Layout { generation, nodes: 1, extra_lines: lines.lines().map(str::to_owned).collect(), ..Layout::default() };
    let Some(slurm) = slurm("what doctor deploy slurm prints", &layout) else { return };
    let shown = slurm.run("scontrol", &["show", "config"]).unwrap();
    for words in [
        format!("HealthCheckProgram      = {}/health", scripts.display()),
        "HealthCheckInterval     = 120 sec".to_owned(),
        format!(" = {}/prolog", scripts.display()),
        format!(" = {}/epilog", scripts.display()),
        "PrologFlags             = Alloc".to_owned(),
        "nohold_on_prolog_fail".to_owned(),
    ] {
        assert!(shown.contains(&words), "{words} is not in {shown}");
    }
    let job = slurm.submit(&["--output=/dev/null", "--wrap=exit 0"]).unwrap();
    slurm.wait_for_job(job, "COMPLETED").unwrap();
    let log = || fs::read_to_string(bed.path("node/state/hook.log")).unwrap_or_default();
    wait_until("the hooks to have run", || {
        [" prolog: healthy", " epilog: healthy"].iter().all(|words| log().contains(words))
    });
}

#[test]
fn what_deploy_slurm_prints_is_taken_by_real_slurmctlds_and_its_hooks_run() {
    Generation::ALL.into_iter().for_each(is_taken);
}

#[test]
fn deploy_slurm_writes_a_folder_for_each_kind_of_machine_and_refuses_what_slurm_would_misread() {
    let bed = Workdir::local();
    bed.expect(0, &["deploy", "slurm", "--out", "site"])
        .stdout_contains("on every node: ")
        .stdout_contains("for slurmctld's machine: ");
    let script = bed.path("site/nodes/usr/lib/cluster-doctor/slurm/health");
    assert_eq!(fs::metadata(&script).unwrap().permissions().mode() & 0o777, 0o755);
    assert!(bed.path("site/controller/etc/systemd/system/doctor.service").exists());
    assert_eq!(bed.read("site/nodes/etc/cluster-doctor/policy.toml"), bed.read("policy.toml"));
    bed.expect(2, &["deploy", "slurm", "--out", "site"]).stderr_contains("is not overwritten");
    bed.expect(2, &["deploy", "slurm", "--scripts", "/a b"]).stderr_contains("no spaces");
    bed.expect(2, &["deploy", "slurm", "--user", "a b"]).stderr_contains("not a valid user name");
}

/// Configures a controller for this cluster with an agent endpoint.
fn controller(bed: &Workdir, slurm: &Slurm) {
    fs::create_dir(bed.path("data")).unwrap();
    bed.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\n[agents]\nlisten = \"127.0.0.1:{}\"\n\
             [backend.slurm]\nprograms = {:?}\nslurm_conf = {:?}\ndoctor_node = {:?}\n",
            free_port(),
            slurm.programs(),
            slurm.conf(),
            doctor_node()
        ),
    );
}

fn drains_by_the_controller(generation: Generation) {
    let bed = Workdir::new();
    // An operator holds one of two nodes; with the default share, the breaker would leave the other to an operator.
    bed.policy("[breaker]\npercent_of_pool = 100.0\n");
    let mut nodes = Vec::new();
    for n in 1..=2 {
        machine(&bed, &format!("node{n}/machine"), "");
        nodes.push(format!("node{n}"));
    }
    let script = bed.path("health");
    let config = bed.path("$SLURMD_NODENAME/hook.toml");
    executable(
        &script,
        &format!("#!/bin/sh\nexec {} hook health --config {}\n", doctor_node().display(), config.display()),
    );
    let health = HealthCheck { program: script, interval: Duration::from_secs(2), states: "ANY".to_owned() };
    let layout = Layout { generation, nodes: 2, health_check: Some(health), ..Layout::default() };
    let Some(slurm) = slurm("a hook with a controller", &layout) else { return };
    controller(&bed, &slurm);
    for node in &nodes {
        bed.expect(0, &["agent", "enroll", node, "--out", "keys", "--yes"]);
        settings(&bed, node, node, "");
    }
    let mut service = Service::start(&bed);
    service.wait_for_log("agent endpoint listening");
    let log = |node: &str| fs::read_to_string(bed.path(&format!("{node}/hook/hook.log"))).unwrap_or_default();
    wait_until("reports of the hooks", || nodes.iter().all(|node| log(node).contains("; reported")));
    // Each hook's report returns the breaker's permit.
    wait_until("a permit", || bed.path("node1/agent/permit.json").exists());

    slurm.run("scontrol", &["update", "nodename=node2", "state=drain", "reason=Maintenance"]).unwrap();
    machine(&bed, "node1/machine", DAMAGED);
    slurm.wait_for_node("node1", "drained", |state| state.contains("DRAIN")).unwrap();
    let shown = slurm.run("scontrol", &["-o", "show", "node", "node1"]).unwrap();
    assert!(shown.contains("Reason=doctor: ") && !shown.contains("[hook]"), "{shown}");
    let shown = slurm.run("scontrol", &["-o", "show", "node", "node2"]).unwrap();
    assert!(shown.contains("Reason=Maintenance"), "{shown}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn slurmds_health_check_reports_a_planted_fault_and_the_controller_drains() {
    Generation::ALL.into_iter().for_each(drains_by_the_controller);
}

#[test]
fn config_check_live_names_what_of_slurms_settings_does_not_go_with_ours() {
    for generation in Generation::ALL {
        let bed = Workdir::new();
        bed.policy("");
        let layout = Layout { generation, nodes: 1, ..Layout::default() };
        let Some(slurm) = slurm("config check --live on Slurm", &layout) else { continue };
        controller(&bed, &slurm);
        let said = bed.expect(1, &["config", "check", "--live"]);
        said.stdout_contains("good     slurm programs: scontrol, squeue, sbatch, scancel answer")
            .stdout_contains("good     slurmctld: answers; Slurm 2");
        said.stdout_contains("good     rights: ").stdout_contains("good     MessageTimeout: 10 s");
        said.stdout_contains("bad      SlurmdTimeout: 10 s is less than twice the MessageTimeout of 10 s")
            .stdout_contains("set SlurmdTimeout=300");
        said.stdout_contains("unknown  HealthCheckProgram: not set")
            .stdout_contains("doctor deploy slurm --what slurm-conf");
    }
}
