//! Slurm's hooks and the controller as real programs: the controller records and acts on a hook's findings, the hook
//! receives the breaker's permit, real slurmctlds accept the output of `doctor deploy slurm`, and
//! `doctor config check --live` queries them.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use doctor_testbed::slurm::{Generation, HealthCheck, Layout, Slurm, SlurmTestbedError};

use crate::{
    slurm_flows::{self, SlurmFixture},
    this_machine::Service,
    workdir::{CommandOutput, Workdir, doctor_node, wait_until},
};

const DAMAGED: &str = "3,2,999999000000,-;EXT4-fs error (device sda1): ext4_lookup:1855: inode #2\n";

/// Writes a recorded machine below a directory.
fn machine(workdir: &Workdir, folder: &str, log: &str) {
    for directory in ["dev", "proc/sys/kernel/random"] {
        fs::create_dir_all(workdir.path(&format!("{folder}/{directory}"))).unwrap();
    }
    workdir.write(&format!("{folder}/proc/uptime"), "1000000.00 5.0\n");
    workdir.write(&format!("{folder}/proc/sys/kernel/random/boot_id"), "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
    workdir.write(&format!("{folder}/proc/meminfo"), "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n");
    workdir.write(&format!("{folder}/dev/kmsg"), &format!("6,1,1000,-;Linux version 6.8\n{log}"));
}

fn free_port() -> u16 {
    doctor_testbed::ports::reserve_one().unwrap()
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
fn settings(workdir: &Workdir, folder: &str, node: &str, extra: &str) {
    let at = |name: &str| workdir.path(&format!("{folder}/{name}"));
    let agent = format!(
        "credential = {:?}\nstate = {:?}\nroot = {:?}\npolicy = {:?}\n",
        workdir.path(&format!("keys/{node}.key")),
        at("agent"),
        at("machine"),
        workdir.path("policy.toml")
    );
    workdir.write(&format!("{folder}/agent.toml"), &agent);
    let hook = format!("agent = {:?}\nstate = {:?}\nfresh = \"1s\"\n{extra}", at("agent.toml"), at("hook"));
    workdir.write(&format!("{folder}/hook.toml"), &hook);
}

fn hook(workdir: &Workdir, moment: &str) -> CommandOutput {
    let mut command = Command::new(doctor_node());
    command.args(["hook", moment, "--config", "here/hook.toml"]).current_dir(workdir.path("")).stdin(Stdio::null());
    CommandOutput::from_output(&command.env_clear().env("SLURMD_NODENAME", "here").output().unwrap())
}

#[test]
fn hook_findings_reach_the_controller_directly_or_through_the_agent_and_permits_return() {
    let workdir = Workdir::local();
    workdir.write("busy", "");
    workdir.policy(
        "[[rules]]\nid = \"site-damage\"\ncheck = \"kernel-log\"\nevent = \"file-system-error\"\nreason = \"damage\"\nseverity = \"isolate\"\n\
         text = \"{value}\"\n",
    );
    let agents_section = format!("[agents]\nlisten = \"127.0.0.1:{}\"\nplain = false\n[backend", free_port());
    let config = workdir.read("doctor.toml").replace("[backend", &agents_section);
    workdir.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
    workdir.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
    machine(&workdir, "here/machine", "");
    settings(&workdir, "here", "here", "[prolog]\nblock = true\n");

    // Without a controller jobs run, and the report is queued.
    let output = hook(&workdir, "health");
    assert_eq!(output.code, 0);
    output.stderr_contains("health: healthy").stderr_contains("the controller does not accept it now, it is spooled");
    assert_eq!(hook(&workdir, "prolog").code, 0);

    let mut service = Service::start(&workdir);
    service.wait_for_log("agent endpoint listening");
    machine(&workdir, "here/machine", DAMAGED);
    wait_until("a report of the hook", || hook(&workdir, "health").err.contains("; reported"));
    let found = || workdir.json(&["why", "here"])["open_findings"].to_string();
    wait_until("the finding", || found().contains("ext4_lookup"));
    // The answer carried the breaker's permit. Only Slurm knows how many nodes are out already, and there is none here.
    let permit = workdir.path("here/agent/permit.json");
    assert!(permit.exists(), "{:?}", fs::read_dir(workdir.path("here/agent")).unwrap().collect::<Vec<_>>());
    // The permit lapses when a cycle is late, and the next answer brings another.
    wait_until("a prolog with a fresh permit", || {
        let output = hook(&workdir, "prolog");
        assert_eq!(output.code, 0, "{}", output.err);
        output.stderr_contains("prolog: damage (isolate) of kernel-log").stderr_contains("the job is allowed: ");
        output.err.contains("the job is allowed: scontrol failed")
    });

    // While an agent runs, the agent reports.
    let mut command = Command::new(doctor_node());
    command
        .args(["agent", "--config", "here/agent.toml"])
        .current_dir(workdir.path(""))
        .stdin(Stdio::null())
        .env_clear();
    let mut agent = Service::spawn(command);
    agent.wait_for_log("reporting as here");
    let verdict = workdir.path("here/agent/verdict.json");
    wait_until("the agent's verdict", || verdict.exists());
    fs::remove_file(workdir.path("here/hook/verdict.json")).unwrap();
    fs::remove_file(&verdict).unwrap();
    hook(&workdir, "health").stderr_contains("damage (isolate) of kernel-log").stderr_contains("the agent reports it");
    wait_until("nothing that waits", || fs::read_dir(workdir.path("here/agent/hook-reports")).unwrap().count() == 0);
    assert_eq!(agent.stop().0, Some(0));
    assert_eq!(service.stop().0, Some(0));
}

/// The controller made its certificate, and enrolment told the agent its key.
fn reports_over_tls(generation: Generation) {
    let layout = Layout { generation, nodes: 2, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("agents over TLS on Slurm", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    slurm_flows::configure(workdir, slurm, slurm.programs(), "");
    let port = free_port();
    let agents_section = format!("[agents]\nlisten = \"127.0.0.1:{port}\"\nplain = false\n[backend");
    workdir.write("doctor.toml", &workdir.read("doctor.toml").replacen("[backend", &agents_section, 1));
    workdir.write(
        "policy.toml",
        "mode = \"act\"\n[allow]\ndrain = true\n[limits]\njobs = 0\n[[rules]]\nid = \"site-damage\"\n\
         check = \"kernel-log\"\nevent = \"file-system-error\"\nreason = \"damage\"\nseverity = \"isolate\"\ntext = \"{value}\"\n",
    );
    let mut service = Service::start(workdir);
    service.wait_for_log("agent endpoint listening");
    wait_until("both nodes", || workdir.json(&["status"])["nodes"]["free"] == 2);
    workdir.expect(0, &["agent", "enroll", "node1", "--out", "keys", "--yes"]);
    machine(workdir, "node1/machine", DAMAGED);
    settings(workdir, "node1", "node1", "");
    let mut command = Command::new(doctor_node());
    command.args(["agent", "--config", "node1/agent.toml"]).current_dir(workdir.path("")).stdin(Stdio::null());
    let mut agent = Service::spawn(command);
    agent.wait_for_log(&format!("reporting as node1 to https://127.0.0.1:{port}"));
    wait_until("the drain", || slurm.node_state("node1").is_ok_and(|state| state.contains("DRAIN")));
    assert!(slurm.node_state("node2").is_ok_and(|state| state == "IDLE"), "{:?}", slurm.node_state("node2"));
    assert_eq!(agent.stop().0, Some(0));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn a_report_over_tls_drains_its_node_on_slurm_22_05() {
    reports_over_tls(Generation::Debian12);
}

#[test]
fn a_report_over_tls_drains_its_node_on_slurm_24_11() {
    reports_over_tls(Generation::Debian13);
}

fn is_accepted(generation: Generation) {
    let workdir = Workdir::new();
    workdir.write("policy.toml", "[agents]\ncheck_every = \"2m\"\n[tests.time-sync]\nenabled = false\n");
    workdir.write("doctor.toml", "data = \"data\"\npolicy = \"policy.toml\"\n");
    machine(&workdir, "node/machine", "");
    // The scripts look for settings in system paths; the tests' settings are here.
    let program = workdir.path("bin/doctor-node");
    let config = workdir.path("node/hook.toml");
    executable(
        &program,
        &format!("#!/bin/sh\nexec {} \"$@\" --config {}\n", doctor_node().display(), config.display()),
    );
    let (scripts, program) = (workdir.path("scripts"), program.to_str().unwrap().to_owned());
    let args = [
        "deploy",
        "slurm",
        "--standalone",
        "--block",
        "--scripts",
        scripts.to_str().unwrap(),
        "--doctor-node",
        &program,
    ];
    let printed = workdir.json(&args);
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
        workdir.path("node/state"),
        workdir.path("node/machine"),
        file("/hook.toml")["text"]
            .as_str()
            .unwrap()
            .replace("/etc/cluster-doctor/policy.toml", workdir.path("policy.toml").to_str().unwrap())
    );
    fs::write(&config, state).unwrap();
    let output = workdir.expect(0, &[&args[..], &["--what", "slurm-conf"]].concat());
    // The bed has SchedulerParameters already: the value is added to them, as the printed comment says.
    let lines = output.out.replace("SchedulerParameters=nohold", "SchedulerParameters=sched_interval=2,nohold");
    let layout =
        Layout { generation, nodes: 1, extra_lines: lines.lines().map(str::to_owned).collect(), ..Layout::default() };
    let Some(slurm) = slurm("what doctor deploy slurm prints", &layout) else { return };
    let stdout = slurm.run("scontrol", &["show", "config"]).unwrap();
    for expected in [
        format!("HealthCheckProgram      = {}/health", scripts.display()),
        "HealthCheckInterval     = 120 sec".to_owned(),
        format!(" = {}/prolog", scripts.display()),
        format!(" = {}/epilog", scripts.display()),
        "PrologFlags             = Alloc".to_owned(),
        "nohold_on_prolog_fail".to_owned(),
    ] {
        assert!(stdout.contains(&expected), "{expected} is not in {stdout}");
    }
    let job = slurm.submit(&["--output=/dev/null", "--wrap=exit 0"]).unwrap();
    slurm.wait_for_job(job, "COMPLETED").unwrap();
    let log = || fs::read_to_string(workdir.path("node/state/hook.log")).unwrap_or_default();
    wait_until("the hooks to have run", || {
        [" prolog: healthy", " epilog: healthy"].iter().all(|expected| log().contains(expected))
    });
}

#[test]
fn real_slurmctlds_accept_the_output_of_deploy_slurm_and_run_its_hooks() {
    Generation::ALL.into_iter().for_each(is_accepted);
}

#[test]
fn deploy_slurm_writes_a_directory_per_machine_kind_and_rejects_unsafe_values() {
    let workdir = Workdir::local();
    workdir
        .expect(0, &["deploy", "slurm", "--out", "site"])
        .stdout_contains("on every node: ")
        .stdout_contains("for slurmctld's machine: ");
    let script = workdir.path("site/nodes/usr/lib/cluster-doctor/slurm/health");
    assert_eq!(fs::metadata(&script).unwrap().permissions().mode() & 0o777, 0o755);
    assert!(workdir.path("site/controller/etc/systemd/system/doctor.service").exists());
    assert_eq!(workdir.read("site/nodes/etc/cluster-doctor/policy.toml"), workdir.read("policy.toml"));
    workdir.expect(2, &["deploy", "slurm", "--out", "site"]).stderr_contains("is not overwritten");
    workdir.expect(2, &["deploy", "slurm", "--scripts", "/a b"]).stderr_contains("no spaces");
    workdir.expect(2, &["deploy", "slurm", "--user", "a b"]).stderr_contains("not a valid user name");
}

/// Configures a controller for this cluster with an agent endpoint.
fn controller(workdir: &Workdir, slurm: &Slurm) {
    fs::create_dir(workdir.path("data")).unwrap();
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\n[agents]\nlisten = \"127.0.0.1:{}\"\nplain = false\n\
             [backend.slurm]\nprograms = {:?}\nslurm_conf = {:?}\ndoctor_node = {:?}\n",
            free_port(),
            slurm.programs(),
            slurm.conf(),
            doctor_node()
        ),
    );
}

fn drains_by_the_controller(generation: Generation) {
    let workdir = Workdir::new();
    // An operator holds one of two nodes; with the default share, the breaker would leave the other to an operator.
    workdir.policy("[breaker]\npercent_of_pool = 100.0\n");
    let mut nodes = Vec::new();
    for n in 1..=2 {
        machine(&workdir, &format!("node{n}/machine"), "");
        nodes.push(format!("node{n}"));
    }
    let script = workdir.path("health");
    let config = workdir.path("$SLURMD_NODENAME/hook.toml");
    executable(
        &script,
        &format!("#!/bin/sh\nexec {} hook health --config {}\n", doctor_node().display(), config.display()),
    );
    let health = HealthCheck { program: script, interval: Duration::from_secs(2), states: "ANY".to_owned() };
    let layout = Layout { generation, nodes: 2, health_check: Some(health), ..Layout::default() };
    let Some(slurm) = slurm("a hook with a controller", &layout) else { return };
    controller(&workdir, &slurm);
    for node in &nodes {
        workdir.expect(0, &["agent", "enroll", node, "--out", "keys", "--yes"]);
        settings(&workdir, node, node, "");
    }
    let mut service = Service::start(&workdir);
    service.wait_for_log("agent endpoint listening");
    let log = |node: &str| fs::read_to_string(workdir.path(&format!("{node}/hook/hook.log"))).unwrap_or_default();
    wait_until("reports of the hooks", || nodes.iter().all(|node| log(node).contains("; reported")));
    // Each hook's report returns the breaker's permit.
    wait_until("a permit", || workdir.path("node1/agent/permit.json").exists());

    slurm.run("scontrol", &["update", "nodename=node2", "state=drain", "reason=Maintenance"]).unwrap();
    machine(&workdir, "node1/machine", DAMAGED);
    slurm.wait_for_node("node1", "drained", |state| state.contains("DRAIN")).unwrap();
    let stdout = slurm.run("scontrol", &["-o", "show", "node", "node1"]).unwrap();
    assert!(stdout.contains("Reason=doctor: ") && !stdout.contains("[hook]"), "{stdout}");
    let stdout = slurm.run("scontrol", &["-o", "show", "node", "node2"]).unwrap();
    assert!(stdout.contains("Reason=Maintenance"), "{stdout}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn the_slurmd_health_check_reports_an_injected_fault_and_the_controller_drains() {
    Generation::ALL.into_iter().for_each(drains_by_the_controller);
}

#[test]
fn config_check_live_names_incompatible_slurm_settings() {
    for generation in Generation::ALL {
        let workdir = Workdir::new();
        workdir.policy("");
        let layout = Layout { generation, nodes: 1, ..Layout::default() };
        let Some(slurm) = slurm("config check --live on Slurm", &layout) else { continue };
        controller(&workdir, &slurm);
        let output = workdir.expect(1, &["config", "check", "--live"]);
        output
            .stdout_contains("good     slurm programs: scontrol, squeue, sbatch, scancel answer")
            .stdout_contains("good     slurmctld: answers; Slurm 2");
        output.stdout_contains("good     rights: ").stdout_contains("good     MessageTimeout: 10 s");
        output
            .stdout_contains("bad      SlurmdTimeout: 10 s is less than twice the MessageTimeout of 10 s")
            .stdout_contains("set SlurmdTimeout=300");
        output
            .stdout_contains("unknown  HealthCheckProgram: not set")
            .stdout_contains("doctor deploy slurm --what slurm-conf");
    }
}
