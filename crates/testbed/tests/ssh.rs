//! The SSH test bed does what tests of Cluster Doctor rely on: hosts are isolated, and each fault is real.

use std::{
    fs,
    process::Output,
    time::{Duration, Instant},
};

use doctor_testbed::ssh::SshFleet;

fn fleet(what: &str, hosts: u8) -> Option<SshFleet> {
    SshFleet::start(hosts).inspect_err(|why| why.skip_tests(what)).ok()
}

fn ran(fleet: &SshFleet, host: &str, command: &str) -> Output {
    fleet.ssh(host, command).output().unwrap()
}

fn stdout_of(fleet: &SshFleet, host: &str, command: &str) -> String {
    let output = ran(fleet, host, command);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn wait(what: &str, mut there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !there() {
        assert!(began.elapsed() < Duration::from_secs(240), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn each_host_is_a_machine_of_its_own() {
    let Some(mut fleet) = fleet("each_host_is_a_machine_of_its_own", 2) else { return };
    assert_eq!(stdout_of(&fleet, "host1", "hostname"), "host1");
    assert_eq!(stdout_of(&fleet, "host2", "echo here > /root/file; hostname"), "host2");
    assert!(fleet.hosts()[1].home().join("file").exists() && !fleet.hosts()[0].home().join("file").exists());
    fleet.hosts()[0].set_load("7.5 0 0 1/1 1\n").unwrap();
    assert!(stdout_of(&fleet, "host1", "cat /proc/loadavg").starts_with("7.5"));
    // A detached process lives until the next boot.
    let started = stdout_of(&fleet, "host1", "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!");
    assert_eq!(stdout_of(&fleet, "host1", &format!("kill -0 {started} && echo yes")), "yes");
    let before = stdout_of(&fleet, "host1", "cat /proc/sys/kernel/random/boot_id");
    fleet.host("host1").unwrap().boot().unwrap();
    assert_ne!(stdout_of(&fleet, "host1", "cat /proc/sys/kernel/random/boot_id"), before);
    assert!(!stdout_of(&fleet, "host1", "cat /proc/[0-9]*/comm").contains("sleep"));
}

#[test]
fn a_host_refuses_hangs_and_loses_its_connections_as_told() {
    let Some(mut fleet) = fleet("a_host_refuses_hangs_and_loses_its_connections_as_told", 2) else { return };
    fleet.host("host1").unwrap().stop();
    let refused = ran(&fleet, "host1", "true");
    assert!(refused.status.code() == Some(255) && complaint(&refused).contains("refused"), "{refused:?}");
    fleet.hosts()[1].hang();
    let hung = ran(&fleet, "host2", "true");
    assert!(hung.status.code() == Some(255) && complaint(&hung).contains("timed out"), "{hung:?}");
    fleet.hosts()[1].unhang();
    fleet.host("host1").unwrap().black_hole().unwrap();
    let began = Instant::now();
    let timed_out = ran(&fleet, "host1", "true");
    assert!(timed_out.status.code() == Some(255) && complaint(&timed_out).contains("timed out"), "{timed_out:?}");
    assert!(began.elapsed() > Duration::from_secs(4), "the connection was refused: {:?}", began.elapsed());
    fleet.host("host1").unwrap().boot().unwrap();
    assert_eq!(stdout_of(&fleet, "host1", "echo back"), "back");
    let mut cut = fleet.ssh("host2", "echo up > /root/up; sleep 600").spawn().unwrap();
    let up = fleet.hosts()[1].home().join("up");
    wait("the command to begin", || fs::read_to_string(&up).is_ok_and(|text| text == "up\n"));
    fleet.hosts()[1].cut_connections().unwrap();
    assert_eq!(cut.wait().unwrap().code(), Some(255));
    assert_eq!(stdout_of(&fleet, "host2", "echo well"), "well");
}

#[test]
fn a_slow_line_is_slow_and_works() {
    let Some(fleet) = fleet("a_slow_line_is_slow_and_works", 1) else { return };
    let slow = fleet.hosts()[0].slow_proxy(Duration::from_millis(50)).unwrap();
    let mut ssh = std::process::Command::new("ssh");
    ssh.arg("-F").arg(fleet.ssh_config()).args(["-o", "BatchMode=yes", "-o"]);
    let alias = format!("HostKeyAlias=[{}]:{}", fleet.hosts()[0].at.ip(), fleet.hosts()[0].at.port());
    ssh.arg(alias).args(["-o", &format!("Port={}", slow.at.port()), "host1", "echo well"]);
    let began = Instant::now();
    let output = ssh.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "well\n", "{}", complaint(&output));
    // The key exchange takes more than four messages, one after the other.
    assert!(began.elapsed() > Duration::from_millis(200), "{:?}", began.elapsed());
}

#[test]
fn nothing_is_left_of_a_fleet() {
    let Some(fleet) = fleet("nothing_is_left_of_a_fleet", 1) else { return };
    let folder = fleet.path("");
    stdout_of(&fleet, "host1", "setsid sleep 600 >/dev/null 2>&1 </dev/null &");
    let name = folder.to_string_lossy().into_owned();
    let named = || {
        let lines = fs::read_dir("/proc").unwrap().flatten();
        lines
            .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
            .any(|line| String::from_utf8_lossy(&line).contains(name.trim_end_matches('/')))
    };
    assert!(named());
    drop(fleet);
    assert!(!folder.exists());
    wait("the processes to be gone", || !named());
}
