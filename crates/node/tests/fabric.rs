//! The fabric test on a simulated machine: its ports are a file tree, and each test writes its own `ib_write_bw` and
//! `fi_pingpong`. If libfabric is installed, its real program moves data over TCP; the real perftest shows its output
//! without a device. These tests have never run on a machine with an adapter.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use doctor_checks::proc_stat::ProcStat;
use doctor_testbed::fake_machine::{FakeMachine, InstalledMachine, PORTS, ib};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");
const NO_LIBRARY: &str = "libdoctor-has-none.so.1";
/// Output for a port that moves 394.61 Gbit/s.
const GOOD_OUTPUT: &str = include_str!("../../checks/fixtures/perftest/gbits-duration.txt");
const ERROR_OUTPUT: &str = include_str!("../../checks/fixtures/perftest/completion-error.txt");

fn not_run(what: &str, reason: &str) {
    println!("NOT RUN: {what}: {reason}");
    assert!(std::env::var_os("CI").is_none(), "in CI this must run");
}

fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(value) = poll() {
            return value;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}");
}

fn wait_for_exit(pid: u32) {
    let proc_stat = || ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?);
    wait_for(&format!("process {pid} to go"), || proc_stat().is_none_or(|stat| stat.has_exited()).then_some(()));
}

/// A machine with a network, and the tools to test it.
struct Testbed {
    machine: InstalledMachine,
    folder: TempDir,
    settings: Vec<String>,
}

impl Testbed {
    /// The client of `ib_write_bw` runs this script in the fixture's directory, with the device in `$device` and its
    /// own pid in the file `client`. A device that does not exist is rejected, as by perftest.
    fn new(machine: &FakeMachine, client: &str) -> Self {
        let testbed = Self::without_tools(machine);
        fs::write(testbed.file("well.txt"), GOOD_OUTPUT).unwrap();
        fs::write(testbed.file("broken.txt"), ERROR_OUTPUT).unwrap();
        let refuse = "if [ ! -e root/sys/class/infiniband/$device ]; then\n\
                      echo \" IB device $device not found\" >&2; exit 1; fi";
        testbed.tool("ib_write_bw", &format!("echo \"$*\" >> calls\n{refuse}"), client);
        testbed
    }

    fn without_tools(fake: &FakeMachine) -> Self {
        let machine = fake.install(Path::new(PROGRAM), Path::new(NO_LIBRARY));
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        std::os::unix::fs::symlink(machine.path("root"), folder.path().join("root")).unwrap();
        Self { machine, folder, settings: vec!["duration=3s".to_owned()] }
    }

    /// Writes a tool that runs `first`, and then listens as a server or runs `client` as a client.
    fn tool(&self, name: &str, first: &str, client: &str) {
        let test_program = std::env::current_exe().unwrap();
        let script = format!(
            "#!/bin/sh\ncd '{}'\nall=\"$*\"\ndevice=none; port=0; peer=\n\
             while [ $# -gt 0 ]; do case $1 in\n-d) device=${{2%-rdm}}; shift 2;;\n-p|-B|-P) port=$2; shift 2;;\n\
             127.0.0.1) peer=$1; shift;;\n*) shift;;\nesac; done\nset -- $all\n{first}\n\
             if [ -z \"$peer\" ]; then echo $$ > server\n\
             DOCTOR_FAKE_NVIDIA_SERVER=$port exec '{}' --exact stand_in_for_a_server --nocapture; fi\n\
             echo $$ > client\n{client}\n",
            self.folder.path().display(),
            test_program.display()
        );
        let file = self.file("bin").join(name);
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn set(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    fn pid_in(&self, name: &str) -> Option<u32> {
        fs::read_to_string(self.file(name)).ok()?.trim().parse().ok()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["test", "fabric", "--json"]).arg("--root").arg(self.machine.path("root"));
        command.arg("--nvml").arg(NO_LIBRARY);
        for setting in &self.settings {
            command.arg("--set").arg(setting);
        }
        command.env("PATH", format!("{}:/usr/bin:/bin", self.file("bin").display()));
        command
    }

    /// Returns `VERDICT REASON ENTITY TEXT` for each row, and the exit code.
    fn test(&self) -> (Vec<String>, i32) {
        let output = self.command().output().unwrap();
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let field = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
        let line = |row: &Value| ["verdict", "reason", "entity", "text"].map(|key| field(row, key)).join(" ");
        (rows.iter().map(line).collect(), output.status.code().unwrap())
    }

    fn expect_only_row(&self, begins: &str) -> String {
        let (mut rows, code) = self.test();
        assert!(rows.len() == 1 && rows[0].starts_with(begins), "{rows:?} should begin with {begins}");
        let expected = match begins.split(' ').next() {
            Some("pass") => 0,
            Some("fail") => code.clamp(1, 2),
            _ => 3,
        };
        assert_eq!(code, expected, "{rows:?}");
        rows.remove(0)
    }

    fn expect_no_leftovers(&self) {
        for name in ["server", "client", "sleeper"] {
            self.pid_in(name).into_iter().for_each(wait_for_exit);
        }
    }
}

/// Not a test: the server process of a tool. It listens and drops every connection.
#[test]
fn stand_in_for_a_server() {
    let Ok(port) = std::env::var("DOCTOR_FAKE_NVIDIA_SERVER") else { return };
    for connection in TcpListener::bind(("127.0.0.1", port.parse().unwrap())).unwrap().incoming() {
        drop(connection);
    }
}

#[test]
fn every_port_that_is_up_is_tested_and_one_that_is_down_is_not() {
    let machine = FakeMachine::hgx_h100().with(&ib(5, "ports/1/state"), "1: DOWN\n");
    let testbed = Testbed::new(&machine, "cat well.txt");
    testbed.expect_only_row("pass within-limits");
    let calls = fs::read_to_string(testbed.file("calls")).unwrap();
    let of = |device: &str| calls.lines().filter(|line| line.starts_with(&format!("-d {device} -i 1 -p "))).count();
    assert_eq!(of("doctor-none0"), 1, "a device that does not exist comes first, and no client follows: {calls}");
    assert!(calls.starts_with("-d doctor-none0"));
    for n in 0..PORTS {
        assert_eq!(of(&format!("mlx5_{n}")), if n == 5 { 0 } else { 2 }, "{calls}");
    }
    testbed.expect_no_leftovers();
}

#[test]
fn slow_and_broken_ports_and_ports_with_growing_error_counters_are_findings() {
    let slow = Testbed::new(
        &FakeMachine::hgx_h100(),
        "[ $device = mlx5_3 ] && sed 's/394.61/340.00/' well.txt || cat well.txt",
    );
    assert!(slow.expect_only_row("fail loopback-odd link:mlx5_3/1").contains(": 86"));
    let slower = Testbed::new(&FakeMachine::hgx_h100(), "sed 's/394.61/200.00/' well.txt").set("devices=[\"mlx5_0\"]");
    slower.expect_only_row("fail loopback-slow link:mlx5_0/1 link:mlx5_0/1: 50 %");
    let broken = Testbed::new(&FakeMachine::hgx_h100(), "cat broken.txt >&2; exit 1").set("devices=[\"mlx5_2\"]");
    assert!(
        broken.expect_only_row("fail loopback-failed link:mlx5_2/1").contains("no acknowledgement after all retries")
    );
    let counter = "root/sys/class/infiniband/mlx5_1/ports/1/counters/symbol_error";
    let with_errors = Testbed::new(&FakeMachine::hgx_h100(), &format!("echo 40 > {counter}; cat well.txt"));
    let row = with_errors.set("devices=[\"mlx5_1\"]").expect_only_row("fail symbol-errors link:mlx5_1/1");
    assert!(row.contains("symbol_error grew by 40"), "{row}");
}

#[test]
fn a_program_that_does_not_look_at_its_device_proves_nothing() {
    let ignores_device = Testbed::without_tools(&FakeMachine::hgx_h100());
    fs::write(ignores_device.file("well.txt"), GOOD_OUTPUT).unwrap();
    ignores_device.tool("ib_write_bw", "", "cat well.txt");
    assert!(
        ignores_device
            .expect_only_row("inconclusive failed")
            .contains("gives a result for a device that does not exist")
    );
    ignores_device.tool("ib_write_bw", "", "exit 0");
    assert!(ignores_device.expect_only_row("inconclusive failed").contains("does not report a failure"));
    ignores_device.expect_no_leftovers();
}

#[test]
fn a_tool_failure_is_inconclusive_about_the_port() {
    for (client, begins) in [
        ("echo \"Couldn't allocate MR\" >&2; exit 1", "inconclusive failed node link:mlx5_0/1: ib_write_bw ended with"),
        ("exit 0", "inconclusive unparseable"),
        ("cat well.txt; exit 1", "inconclusive failed"),
        ("kill -9 $$", "inconclusive killed"),
        ("yes", "inconclusive too-long"),
    ] {
        Testbed::new(&FakeMachine::hgx_h100(), client).set("devices=[\"mlx5_0\"]").expect_only_row(begins);
    }
    let half = Testbed::new(&FakeMachine::hgx_h100(), "cat well.txt").set("devices=[\"mlx5_0\",\"mlx5_77\"]");
    assert!(half.expect_only_row("inconclusive missing").contains("mlx5_77 of `devices` does not exist"));
    let missing = Testbed::new(&FakeMachine::hgx_h100(), "").set("ib_write_bw=ib-write-missing");
    assert!(missing.expect_only_row("not-applicable no-perftest").contains("it is in the package `perftest`"));
    let mut down = FakeMachine::hgx_h100();
    for n in 0..PORTS {
        down = down.with(&ib(n, "ports/1/state"), "1: DOWN\n");
    }
    assert!(Testbed::new(&down, "cat well.txt").expect_only_row("inconclusive empty").contains("see ib-ports"));
    let none = FakeMachine::hgx_h100().without("/sys/class/infiniband");
    Testbed::new(&none, "cat well.txt").expect_only_row("not-applicable no-rdma");
}

#[test]
fn a_hung_tool_is_killed_in_time_with_its_children() {
    let hung_script = "trap '' TERM; sleep 3600 & echo $! > sleeper; wait";
    let testbed = Testbed::new(&FakeMachine::hgx_h100(), hung_script).set("devices=[\"mlx5_0\"]").set("stall=1s");
    let started = Instant::now();
    assert!(testbed.expect_only_row("fail loopback-stalled link:mlx5_0/1").contains("did not end within 4s"));
    assert!(started.elapsed() < Duration::from_secs(240), "{:?}", started.elapsed());
    testbed.expect_no_leftovers();

    let testbed = Testbed::new(&FakeMachine::hgx_h100(), hung_script);
    for signal in [Signal::TERM, Signal::KILL] {
        let _none = fs::remove_file(testbed.file("client"));
        let mut child = testbed.command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_for("the client to run", || testbed.pid_in("client"));
        kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
        child.wait().unwrap();
        testbed.expect_no_leftovers();
    }
}

/// Two EFA adapters, as the driver of Linux 6.8 shows them. Written by hand.
fn with_efa() -> FakeMachine {
    let mut machine = FakeMachine::hgx_h100().without("/sys/class/infiniband");
    for name in ["rdmap79s0", "rdmap80s0"] {
        let port = format!("/sys/class/infiniband/{name}/ports/1");
        for (file, text) in [
            ("state", "4: ACTIVE\n"),
            ("phys_state", "5: LinkUp\n"),
            ("link_layer", "Unspecified\n"),
            ("rate", "100 Gb/sec (4X EDR)\n"),
            ("hw_counters/rx_drops", "0\n"),
            ("hw_counters/retrans_timeout_events", "0\n"),
        ] {
            machine = machine.with_new(&format!("{port}/{file}"), text);
        }
        machine = machine.linked(&format!("/sys/class/infiniband/{name}/device/driver"), "/sys/bus/pci/drivers/efa");
    }
    machine.with_new("/sys/bus/pci/drivers/efa/uevent", "")
}

#[test]
fn an_efa_adapter_is_tested_with_fi_pingpong() {
    let real = Path::new("/usr/bin/fi_pingpong");
    if !real.exists() {
        return not_run("fi_pingpong", "libfabric-bin is not installed");
    }
    // The real program over TCP, because there is no EFA here. It ignores its domain then, so the script checks the
    // device.
    let testbed = Testbed::without_tools(&with_efa());
    let refuse = "[ -e root/sys/class/infiniband/$device ] || { echo 'fi_getinfo(): ret=-61' >&2; exit 61; }";
    let real = format!("exec {} -p tcp -e msg -I 20 -S 1048576", real.display());
    let tool = format!(
        "echo \"$FI_EFA_ENABLE_SHM_TRANSFER $*\" >> calls\n{refuse}\n\
         [ -z \"$peer\" ] && {real} -B $port\n{real} -P $port $peer"
    );
    testbed.tool("fi_pingpong", &tool, "");
    let (rows, _) = testbed.test();
    let is_a_result = |row: &String| row.starts_with("pass") || row.starts_with("fail loopback-slow link:rdmap");
    assert!(rows.iter().all(is_a_result), "a loaded machine may be slower than EFA: {rows:?}");
    let calls = fs::read_to_string(testbed.file("calls")).unwrap();
    assert!(calls.starts_with("0 -p efa -e rdm -d doctor-none0-rdm -I 1000 -S 1048576 -B "), "{calls}");
    assert_eq!(calls.lines().filter(|line| line.contains(" -d rdmap80s0-rdm ")).count(), 2, "{calls}");
}

#[test]
fn libfabrics_own_program_that_ignores_its_device_is_found_out() {
    let real = Path::new("/usr/bin/fi_pingpong");
    if !real.exists() {
        return not_run("fi_pingpong", "libfabric-bin is not installed");
    }
    let testbed = Testbed::without_tools(&with_efa());
    // Over TCP, libfabric accepts any name as its domain.
    let real = format!("exec {} -p tcp -e msg -d $device -I 20 -S 1048576", real.display());
    testbed.tool("fi_pingpong", &format!("[ -z \"$peer\" ] && {real} -B $port\n{real} -P $port $peer"), "");
    assert!(testbed.expect_only_row("inconclusive failed").contains("gives a result for a device that does not exist"));
}

#[test]
fn without_a_device_the_real_ib_write_bw_prints_the_expected_error() {
    if !Path::new("/usr/bin/ib_write_bw").exists() {
        return not_run("ib_write_bw", "perftest is not installed");
    }
    if Path::new("/sys/class/infiniband").exists() {
        return not_run("ib_write_bw", "there are devices here");
    }
    // The fixture's ports are only files: the real program finds no device, rightly rejects the bogus one, and then the
    // first.
    let testbed = Testbed::without_tools(&FakeMachine::hgx_h100()).set("devices=[\"mlx5_0\"]");
    let row = testbed.expect_only_row("inconclusive failed");
    assert!(row.contains("link:mlx5_0/1: ib_write_bw ended with exit code 1: Unable to find"), "{row}");
}
