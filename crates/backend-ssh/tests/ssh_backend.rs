//! Tests the SSH backend on real sshd hosts with real `doctor-node` processes: the contract, what counts as use, failures of
//! hosts and connections, repairs, and multi-node runs.

#[path = "ssh_backend/fixture.rs"]
mod fixture;
#[path = "ssh_backend/multi_node.rs"]
mod multi_node;
#[path = "ssh_backend/repairs.rs"]
mod repairs;
#[path = "ssh_backend/reports.rs"]
mod reports;
#[path = "ssh_backend/silent_hosts.rs"]
mod silent_hosts;

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, Change, Effect, NodeOp, ObservedNode, contract_tests,
    inspection::{InspectionStatus, NodeAspect},
};
use doctor_backend_ssh::{HostKeys, RequiredRepairs, inspect};
use doctor_checks::document::Document;
use doctor_core::{
    ids::OpId,
    node::Occupancy,
    run::{JobEnd, ObservedJobState},
};

use fixture::{Hosts, KEY, node, occupancy, polled, put, run_id, wait, wait_ended, why};

#[test]
fn the_ssh_backend_fulfils_the_contract() {
    let Some(hosts) = Hosts::new("the_ssh_backend_keeps_the_contract", 2) else { return };
    assert_eq!(contract_tests::violations(&hosts.open(), &hosts), []);
}

#[test]
fn a_run_outlives_its_connection_and_its_controller() {
    let Some(hosts) = Hosts::new("a_run_outlives_its_connection_and_its_controller", 1) else { return };
    let run = run_id(1);
    {
        let backend = hosts.open();
        backend.submit(&hosts.request("host1", run, &["memory", "endless"])).unwrap();
        wait("the second test", || hosts.log("host1", run).contains("endless: /bin/sleep").then_some(()));
        hosts.fleet.borrow().hosts()[0].cut_connections().unwrap();
    }
    // The next controller has lost all of the first one's files.
    fs::remove_dir_all(&hosts.config.state).unwrap();
    let backend = hosts.open();
    assert!(matches!(polled(&backend, run).state, ObservedJobState::Running { .. }));
    assert_eq!(backend.snapshot().unwrap()[0].jobs, [run]);
    // The key is in the job's environment, which only its owner can read.
    assert!(!hosts.ssh("host1", "cat /proc/[0-9]*/cmdline").contains(&KEY.to_hex()));
    backend.cancel(run).unwrap();
    let (how, documents) = wait_ended(&backend, run);
    assert_eq!((how, documents.len()), (JobEnd::Killed, 1));
    let document = Document::open(&documents[0], &KEY).unwrap();
    assert_eq!(document.tests.iter().map(|test| test.test.as_str()).collect::<Vec<_>>(), ["memory"]);
    assert_eq!((document.run, document.node.as_str()), (run, "host1"));
    // Its log arrived too, and is dropped when the run is no longer polled.
    let logs = backend.logs(run);
    assert!(
        matches!(&*logs, [(of, text)] if *of == node("host1") && text.contains(" endless: interrupted")),
        "{logs:?}"
    );
    backend.poll(&[]).unwrap();
    assert!(backend.logs(run).is_empty());
}

#[test]
fn a_user_of_a_host_is_detected() {
    let Some(hosts) = Hosts::new("a_user_of_a_host_is_detected", 1) else { return };
    let backend = hosts.open();
    assert_eq!(why(&occupancy(&backend, "host1")), "free");
    let ssh_session = |options: &[&str], command: &str| -> Child {
        let mut ssh = Command::new("ssh");
        ssh.arg("-F").arg(hosts.fleet.borrow().ssh_config()).args(options).args(["host1", command]);
        ssh.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let wait_busy = |expected: &str| {
        wait(expected, || match occupancy(&backend, "host1") {
            Occupancy::Busy { by } if by.contains(expected) => Some(()),
            _ => None,
        });
    };
    let wait_free = || wait("the host to be free", || occupancy(&backend, "host1").is_free().then_some(()));
    let end = |mut child: Child| {
        child.kill().unwrap();
        child.wait().unwrap();
        hosts.fleet.borrow().hosts()[0].cut_connections().unwrap();
    };

    let gpu_user = ssh_session(&[], "exec 3</dev/nvidia0; read x");
    wait_busy("holds a GPU");
    end(gpu_user);
    wait_free();
    let cpu_user = ssh_session(&["-tt"], "while :; do :; done");
    wait_busy("uses the CPU at a terminal");
    end(cpu_user);
    wait_free();
    let idle_shell = ssh_session(&["-tt"], "touch /run/waits; read x");
    wait("the shell to wait", || hosts.ssh("host1", "ls /run").contains("waits").then_some(()));
    assert_eq!(why(&occupancy(&backend, "host1")), "free");
    end(idle_shell);
    hosts.ssh("host1", "touch /run/site-lock");
    assert_eq!(why(&occupancy(&backend, "host1")), "/run/site-lock exists");
}

#[test]
fn hosts_that_fail_are_unknown_and_cost_one_connect_time_out() {
    let Some(mut hosts) = Hosts::new("hosts_that_fail_are_unknown_and_cost_one_connect_time_out", 5) else { return };
    hosts.config.motd = Some("/root/motd".into());
    let backend = hosts.open();
    for seen in backend.snapshot().unwrap() {
        assert_eq!(why(&seen.node.occupancy), "free", "{}", seen.node.name);
    }
    let run = run_id(2);
    backend.submit(&hosts.request("host2", run, &["endless"])).unwrap();
    let drain = NodeOp { op: OpId::from_number(1), what: Change::Drain };
    backend.apply(&node("host3"), &drain).unwrap();
    assert_eq!(backend.snapshot().unwrap()[1].jobs, [run]);
    assert!(hosts.ssh("host3", "cat /root/motd .cluster-doctor/hosts/host3-*/lock").contains("cordon"));
    {
        let mut fleet = hosts.fleet.borrow_mut();
        for host in ["host2", "host3", "host4"] {
            fleet.host(host).unwrap().cut_connections().unwrap();
        }
        fleet.host("host2").unwrap().stop();
        fleet.host("host3").unwrap().hang();
        // Emulates another machine than the one whose key is known.
        let text = fs::read_to_string(fleet.path("known_hosts")).unwrap();
        let keys: Vec<&str> = text.lines().filter_map(|line| line.split_once(' ')).map(|(_, key)| key).collect();
        fs::write(fleet.path("known_hosts"), text.replace(keys[3], keys[4])).unwrap();
    }
    let began = Instant::now();
    let nodes = backend.snapshot().unwrap();
    assert!(began.elapsed() < Duration::from_secs(240), "{:?}", began.elapsed());
    let reasons: Vec<_> = nodes.iter().map(|seen| why(&seen.node.occupancy)).collect();
    assert!(reasons[0] == "free" && reasons[4] == "free", "{reasons:?}");
    for (number, expected) in [(1, "refused"), (2, "timed out"), (3, "ey verification failed")] {
        assert!(reasons[number].contains(expected), "{reasons:?}");
        assert!(matches!(nodes[number].node.occupancy, Occupancy::Unknown { .. }));
    }
    // Their last answers remain in use until they respond again.
    assert_eq!(nodes[1].jobs, [run]);
    assert_eq!(nodes[2].node.marks.ours.len(), 1);
    assert!(matches!(polled(&backend, run).state, ObservedJobState::Unknown { .. }));
    let error = backend.submit(&hosts.request("host2", run_id(3), &["memory"])).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
    // After a reboot the host responds, and the run is lost.
    hosts.fleet.borrow_mut().host("host2").unwrap().boot().unwrap();
    assert_eq!(wait_ended(&backend, run).0, JobEnd::Lost);
    hosts.fleet.borrow().hosts()[2].unhang();
    let undrain = NodeOp { op: OpId::from_number(2), what: Change::Undrain };
    wait("host3 to answer", || backend.apply(&node("host3"), &undrain).ok());
    assert!(!hosts.ssh("host3", "ls -R . .cluster-doctor").contains("motd"));
}

#[test]
fn hosts_with_a_shared_home_do_not_see_each_others_runs_or_marks() {
    let Some(hosts) = Hosts::new("hosts_with_one_home_see_neither_each_others_runs_nor_marks", 2) else { return };
    {
        // As on a shared file system.
        let mut fleet = hosts.fleet.borrow_mut();
        let shared = fleet.hosts()[0].home();
        let second = fleet.host("host2").unwrap();
        second.stop();
        fs::remove_dir_all(second.home()).unwrap();
        std::os::unix::fs::symlink(shared, second.home()).unwrap();
        second.boot().unwrap();
    }
    let (backend, runs) = (hosts.open(), [run_id(31), run_id(32)]);
    backend.submit(&hosts.request("host1", runs[0], &["endless"])).unwrap();
    backend.apply(&node("host1"), &NodeOp { op: OpId::from_number(1), what: Change::Drain }).unwrap();
    let marks = |seen: &[ObservedNode]| seen.iter().map(|seen| seen.node.marks.ours.len()).collect::<Vec<_>>();
    let jobs = |seen: &[ObservedNode]| seen.iter().map(|seen| seen.jobs.clone()).collect::<Vec<_>>();
    let seen = backend.snapshot().unwrap();
    assert_eq!((marks(&seen), jobs(&seen)), (vec![1, 0], vec![vec![runs[0]], vec![]]));
    // The end of one host's run does not affect the other's.
    backend.submit(&hosts.request("host2", runs[1], &["endless"])).unwrap();
    wait("both to run", || {
        runs.iter().all(|run| matches!(polled(&backend, *run).state, ObservedJobState::Running { .. })).then_some(())
    });
    backend.cancel(runs[1]).unwrap();
    assert_eq!(wait_ended(&backend, runs[1]).0, JobEnd::Killed);
    assert!(matches!(polled(&backend, runs[0]).state, ObservedJobState::Running { .. }));
    assert_eq!(jobs(&backend.snapshot().unwrap()), [vec![runs[0]], vec![]]);
}

#[test]
fn an_unknown_host_key_is_accepted_only_in_learn_mode() {
    let Some(mut hosts) = Hosts::new("an_unknown_host_is_believed_only_if_it_is_to_be_learnt", 1) else { return };
    hosts.config.known_hosts = Some(hosts.fleet.borrow().path("learnt"));
    let unknown = occupancy(&hosts.open(), "host1");
    assert!(matches!(unknown, Occupancy::Unknown { .. }) && why(&unknown).contains("verification"), "{unknown:?}");
    hosts.config.host_keys = HostKeys::Learn;
    assert_eq!(why(&occupancy(&hosts.open(), "host1")), "free");
    assert!(fs::read_to_string(hosts.fleet.borrow().path("learnt")).unwrap().contains("ed25519"));
}

#[test]
fn login_output_and_a_modified_program_are_not_accepted_as_a_response() {
    let Some(hosts) = Hosts::new("a_login_that_prints_and_a_program_that_was_changed", 1) else { return };
    let backend = hosts.open();
    assert_eq!(why(&occupancy(&backend, "host1")), "free");
    let program = hosts.ssh("host1", "ls .cluster-doctor/bin/doctor-node-*");
    hosts.ssh("host1", "echo 'echo Welcome; echo doctor-node host' > .bashrc");
    assert_eq!(why(&occupancy(&backend, "host1")), "free");
    // Exit code 255 after a truncated answer, and after none.
    let change = |script: &str| {
        let text = format!("printf '#!/bin/sh\\n{script}\\n' > x; chmod +x x; mv x {}", program.trim());
        hosts.ssh("host1", &text);
    };
    change("echo doctor-node host 1; read q; printf \"{\"; exit 255");
    let error = backend.submit(&hosts.request("host1", run_id(4), &["memory"])).unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{error}");
    change("exit 255");
    let error = backend.submit(&hosts.request("host1", run_id(5), &["memory"])).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
    // An answer to another request.
    change("echo doctor-node host 1; read q; echo {}");
    assert!(why(&occupancy(&backend, "host1")).contains("cannot parse its response"));
    // A missing program is installed again.
    hosts.ssh("host1", "rm -r .cluster-doctor/bin");
    assert_eq!(why(&occupancy(&backend, "host1")), "free");
}

/// The testbed has no systemd: this checks the arguments that it would get.
#[test]
fn with_systemd_a_run_gets_its_own_scope() {
    let Some(hosts) = Hosts::new("where_systemd_runs_a_run_is_in_a_scope_of_its_own", 1) else { return };
    let home = hosts.fleet.borrow().hosts()[0].home();
    fs::create_dir(home.join("bin")).unwrap();
    let exec_rest = "while [ \"$1\" != -- ]; do shift; done; shift; exec \"$@\"";
    put(&home.join("bin/systemd-run"), &format!("#!/bin/sh\necho \"$@\" >>/root/told-systemd\n{exec_rest}\n"));
    put(&home.join("bin/systemctl"), "#!/bin/sh\necho \"systemctl $*\" >>/root/told-systemd\necho noise\n");
    fs::write(home.join(".bashrc"), "PATH=/root/bin:$PATH\n").unwrap();
    hosts.ssh("host1", "mkdir -p /run/systemd/system");
    let (backend, run) = (hosts.open(), run_id(6));
    backend.submit(&hosts.request("host1", run, &["endless"])).unwrap();
    wait("the run", || matches!(polled(&backend, run).state, ObservedJobState::Running { .. }).then_some(()));
    let read_log = || fs::read_to_string(home.join("told-systemd")).unwrap();
    let log = read_log();
    let unit = format!("--unit=cluster-doctor-{run}-");
    for expected in ["--scope", "--collect", "--property=KillMode=control-group", &unit, " -- ", "/doctor-node-"] {
        assert!(log.contains(expected), "`{expected}` is not in {log}");
    }
    assert!(!log.contains(&KEY.to_hex()));
    backend.cancel(run).unwrap();
    assert_eq!(wait_ended(&backend, run).0, JobEnd::Killed);
    assert!(read_log().contains(&format!("systemctl stop --no-block cluster-doctor-{run}-*.scope")), "{}", read_log());
}

#[test]
fn a_job_that_cannot_start_logs_the_reason() {
    let Some(hosts) = Hosts::new("a_job_that_cannot_begin_says_why_in_its_log", 1) else { return };
    let home = hosts.fleet.borrow().hosts()[0].home();
    fs::create_dir(home.join("bin")).unwrap();
    put(&home.join("bin/systemd-run"), "#!/bin/sh\necho Failed to connect to bus >&2\nexit 1\n");
    fs::write(home.join(".bashrc"), "PATH=/root/bin:$PATH\n").unwrap();
    hosts.ssh("host1", "mkdir -p /run/systemd/system");
    let (backend, run) = (hosts.open(), run_id(7));
    backend.submit(&hosts.request("host1", run, &["memory"])).unwrap();
    assert_eq!(wait_ended(&backend, run).0, JobEnd::Failed);
    assert_eq!(backend.logs(run), [(node("host1"), "Failed to connect to bus\n".to_owned())]);
    let run = contract_tests::run_of(hosts.request("host1", run, &["memory"]), run.born());
    let outputs = backend.remaining_output(&run).unwrap();
    let [output] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(output.quote().as_deref(), Some("Failed to connect to bus (exit code 1)"));
}

#[test]
fn inspect_reports_problems_without_changing_hosts() {
    let Some(mut hosts) = Hosts::new("what_hosts_lack_is_found_without_changing_them", 4) else { return };
    hosts.config.reset = vec!["no-such-program".to_owned()];
    hosts.config.known_hosts = Some(hosts.fleet.borrow().path("known"));
    {
        let mut fleet = hosts.fleet.borrow_mut();
        let keys = fs::read_to_string(fleet.path("known_hosts")).unwrap();
        let lines: Vec<&str> = keys.lines().collect();
        // The second has another key, the third has no known key, the fourth is down.
        let second = lines[1].split_once(' ').unwrap().0;
        let other = lines[0].split_once(' ').unwrap().1;
        fs::write(fleet.path("known"), format!("{}\n{second} {other}\n{}\n", lines[0], lines[3])).unwrap();
        fleet.host("host4").unwrap().stop();
    }
    let inspection = inspect(&hosts.config, RequiredRepairs { reset: true, reboot: true });
    let (items, trial) = (inspection.items, inspection.trial.unwrap());
    assert_eq!(trial.node, node("host1"), "the one that answers");
    assert_eq!(trial.found[&NodeAspect::Rights].status, InspectionStatus::Good, "{trial:?}");
    assert_eq!(trial.found[&NodeAspect::Clock].status, InspectionStatus::Good, "{trial:?}");
    assert_eq!(trial.found[&NodeAspect::Program].status, InspectionStatus::Unknown, "{trial:?}");
    let messages: Vec<String> =
        items.iter().map(|item| format!("{} {}: {}", item.status.as_str(), item.subject, item.text)).collect();
    for part in [
        "bad hosts: 1 of 4: host3: its host key is not known",
        "bad hosts: 1 of 4: host2: its host key has changed",
        "bad hosts: 1 of 4: host4: ssh: connect to host",
        "good rights: root access on 1 host",
        "good doctor-node: 0 of 1 hosts have this version",
        "good clocks: 1 host within",
        "good runs: in systemd scopes on 0 hosts, in separate sessions on 1 host",
        "bad repair: no no-such-program on host1",
        "good repair: /root/reboot is on 1 host",
    ] {
        assert!(messages.iter().any(|line| line.starts_with(part)), "`{part}` is not in {messages:#?}");
    }
    assert!(items.iter().all(|item| item.status == InspectionStatus::Good || item.remedy.is_some()), "{items:#?}");
    let remote = hosts.fleet.borrow().hosts()[0].home().join(".cluster-doctor");
    assert!(!remote.exists() && !hosts.config.state.exists(), "nothing is left behind");
}
