//! Runs every command of docs/guide/fleet-steps.md verbatim and in order, on real sshd hosts of which the first is the
//! head node. The test fails if the page and this file differ; commands that need Azure are run by [`fake_azure`].
//!
//! The hosts have the scripts that `doctor fleet cloud-init` gives to machines, in a private `/opt` and `/var/log`.
//! AzNHC, dcgmi, nvidia-smi, mpirun and all_reduce_perf are stand-ins; `mpirun` starts all_reduce_perf on every host
//! through its configured agent.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use doctor_testbed::ssh::SshFleet;
use serde_json::Value;

use crate::{
    azure,
    workdir::{CommandOutput, Workdir, doctor_node},
};

const PAGE: &str = include_str!("../../../../docs/guide/fleet-steps.md");
const HEAD: &str = "host1";

/// Where a command of the page is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Machine {
    Here,
    Head,
    Azure,
}

/// Returns the commands of the page, in order.
fn page_commands() -> Vec<(Machine, &'static str)> {
    let typed = |line: &'static str| match (line.strip_prefix("$ "), line.strip_prefix("head$ ")) {
        (Some(line), _) => {
            Some(line.strip_suffix("☁").map_or((Machine::Here, line), |line| (Machine::Azure, line.trim_end())))
        }
        (None, line) => Some((Machine::Head, line?)),
    };
    PAGE.lines().filter_map(typed).collect()
}

const AZNHC: &str = "echo 'Running health checks for Standard_X SKU...'
echo 'SUCCESS:  nhc:  Health check passed:  check_gpu_count: Expected 8 and found 8'";
/// Prints the level it was given, and fails while the machine has a fault.
const DCGMI: &str = "echo \"level $3\"
if [ -e /var/log/fault ]; then echo '| GPU Memory | Fail - GPU 3 |'; exit 226; fi
echo '| GPU Memory | Pass - All |'";
/// Records the persistence mode.
const NVIDIA_SMI: &str =
    "case $1 in -pm) echo $2 >/var/log/persistence;; *) grep -q 1 /var/log/persistence && echo Enabled;; esac";
/// Runs the program on every host through the given agent and with the given arguments; the slowest host sets the
/// bandwidth.
const MPIRUN: &str = r##"agent=ssh
while [ $# -gt 0 ]; do
  case $1 in --host) hosts=$2; shift;; plm_rsh_agent) agent=$2; shift;; /*) break;; esac
  shift
done
rates=$(mktemp)
for host in $(echo "$hosts" | tr , ' '); do $agent "${host%:*}" "$@" </dev/null >>"$rates" || exit 1; done
rate=$(sort -n "$rates" | head -n 1)
rm "$rates"
echo "# nThread 1 nGpus 1 minBytes 8589934592 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0"
echo "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
echo "  8589934592    2147483648     float     sum      -1    35920  239.14  $rate      0    35915  239.17  $rate      0"
echo "# Out of bounds values : 0 OK""##;

/// Three machines as `provision` leaves them, and the directory from which that was done.
struct FleetFixture {
    workdir: Workdir,
    fleet: SshFleet,
    roots: Vec<PathBuf>,
}

fn put(path: &Path, text: &str, mode: u32) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

impl FleetFixture {
    fn new() -> Option<Self> {
        let mut fleet =
            SshFleet::start(3).inspect_err(|why| why.skip_tests("the steps of the guide on SSH hosts")).ok()?;
        let roots = fleet.hosts_mut().iter_mut().map(|host| host.private_folders().unwrap()).collect();
        let workdir = Workdir::new();
        // Checks that any machine passes, whatever else is wrong with the one that runs this test.
        workdir.policy_for(&["clock-source", "memory"], "");
        Some(Self { workdir, fleet, roots })
    }

    fn program(&self, host: usize, path: &str, script: &str) {
        put(&self.roots[host - 1].join(path), &format!("#!/bin/sh\n{script}\n"), 0o755);
    }

    /// Writes what `provision` leaves here and on the machines, from the printed cloud-init file.
    fn create_machines(&self) {
        let config: Value = serde_saphyr::from_str(&self.workdir.read("cloud-init.yaml")).unwrap();
        let files = config["write_files"].as_array().unwrap();
        let policy = self.workdir.path("policy.toml");
        for (root, host) in self.roots.iter().zip(1..) {
            for file in files.iter().filter(|file| file["path"].as_str().unwrap().starts_with("/opt/")) {
                let mode = u32::from_str_radix(file["permissions"].as_str().unwrap(), 8).unwrap();
                put(&root.join(&file["path"].as_str().unwrap()[1..]), file["content"].as_str().unwrap(), mode);
            }
            let checks = format!(
                "[ \"$1\" = host ] || set -- \"$@\" --policy {}; exec {} \"$@\"",
                policy.display(),
                doctor_node().display()
            );
            self.program(host, "usr/local/bin/doctor-node", &checks);
            self.program(host, "usr/local/bin/dcgmi", DCGMI);
            self.program(host, "usr/local/bin/nvidia-smi", NVIDIA_SMI);
            self.program(host, "opt/azurehpc/test/azurehpc-health-checks/run-health-checks.sh", AZNHC);
            let rate = if host == 3 { "198.20" } else { "481.00" };
            self.program(host, "opt/nccl-tests/build/all_reduce_perf", &format!("echo {rate}"));
        }
        // One of them has a fault from the start.
        put(&self.roots[1].join("var/log/fault"), "", 0o644);
        let doctor =
            format!("export DOCTOR_NODE=/usr/local/bin/doctor-node; exec {} \"$@\"", env!("CARGO_BIN_EXE_doctor"));
        self.program(1, "usr/local/bin/doctor", &doctor);
        self.program(1, "usr/local/bin/mpirun", MPIRUN);
        let home = self.fleet.hosts()[0].home();
        let ssh_config = fs::read_to_string(self.fleet.ssh_config()).unwrap();
        put(&home.join(".ssh/config"), &ssh_config, 0o600);
        let (names, addresses): (String, String) =
            self.fleet.hosts().iter().map(|host| (format!("{}\n", host.name), format!("{}\n", host.at.ip()))).unzip();
        put(&home.join("hostfile"), &names, 0o644);
        put(&home.join("hostfile-ip"), &addresses, 0o644);
        put(&self.workdir.path("vmss/ssh_config"), &ssh_config, 0o600);
        self.boot_machines(files);
    }

    /// Starts what the systemd units would start, because these hosts have no systemd. The disks of this machine are
    /// left alone.
    fn boot_machines(&self, files: &[Value]) {
        let units = ["cluster-doctor-boot.service", "cluster-doctor-first-boot.service"].map(|unit| {
            let found = files.iter().find(|file| file["path"].as_str().unwrap().ends_with(unit));
            found.unwrap()["content"].as_str().unwrap()
        });
        let starts = units.iter().flat_map(|unit| unit.lines()).filter_map(|line| line.strip_prefix("ExecStart="));
        let starts: Vec<String> = starts
            .map(|line| line.trim_start_matches('-').replace("/usr/bin/nvidia-smi", "nvidia-smi"))
            .filter(|line| !line.contains("setup-nvme") && !line.contains("/var/lib/"))
            .collect();
        assert_eq!(starts, ["/opt/node-info.sh", "nvidia-smi -pm 1", "/opt/run-health-checks.sh"]);
        for host in self.fleet.hosts() {
            let ran = self.fleet.ssh(&host.name, &starts.join("; ")).output().unwrap();
            assert!(ran.status.success(), "{}: {}", host.name, String::from_utf8_lossy(&ran.stderr));
        }
    }

    /// Types a line into a shell: here, or on the head node after the login that the page shows.
    fn run_line(&self, at: Machine, line: &str) -> CommandOutput {
        let mut shell = match at {
            Machine::Here => Command::new("sh"),
            Machine::Head => Command::new("ssh"),
            Machine::Azure => panic!("{line} is for Azure"),
        };
        match at {
            Machine::Here => shell.args(["-c", line]),
            _ => shell.args(["-F", "vmss/ssh_config", "-o", "BatchMode=yes", HEAD, line]),
        };
        let programs = Path::new(env!("CARGO_BIN_EXE_doctor")).parent().unwrap();
        shell
            .env_clear()
            .env("HOME", self.workdir.path(""))
            .env("PATH", format!("{}:/usr/bin:/bin", programs.display()));
        CommandOutput::from_output(&shell.current_dir(self.workdir.path("")).stdin(Stdio::null()).output().unwrap())
    }

    fn on_head(&self, name: &str) -> String {
        fs::read_to_string(self.fleet.hosts()[0].home().join(name)).unwrap()
    }
}

/// Reads the page's commands, each of which must be the expected one.
struct PageRunner<'a> {
    fixture: &'a FleetFixture,
    rest: std::vec::IntoIter<(Machine, &'static str)>,
}

impl PageRunner<'_> {
    #[track_caller]
    fn next(&mut self, at: Machine, line: &str) {
        assert_eq!(
            self.rest.next(),
            Some((at, line)),
            "the page and this test have the same commands in the same order"
        );
    }

    #[track_caller]
    fn run_step(&mut self, at: Machine, code: i32, line: &str) -> CommandOutput {
        self.next(at, line);
        let output = self.fixture.run_line(at, line);
        assert_eq!(output.code, code, "{line}\n{}\n{}", output.out, output.err);
        output
    }

    #[track_caller]
    fn here(&mut self, line: &str) -> CommandOutput {
        self.run_step(Machine::Here, 0, line)
    }

    #[track_caller]
    fn head(&mut self, code: i32, line: &str) -> CommandOutput {
        self.run_step(Machine::Head, code, line)
    }
}

#[test]
fn every_step_of_the_fleet_guide_works_as_printed() {
    let Some(fixture) = FleetFixture::new() else { return };
    let mut page = PageRunner { fixture: &fixture, rest: page_commands().into_iter() };
    provision(&mut page);
    check_health(&mut page);
    check_again(&mut page);
    test_network(&mut page);

    page.head(0, "doctor fleet hosts --hosts 'host[1-2]'")
        .stdout_contains("- host3 127.0.1.3")
        .stdout_contains("were written: 2 hosts queried");
    assert_eq!(
        (fixture.on_head("hostfile"), fixture.on_head("hostfile-ip")),
        ("host1\nhost2\n".into(), "127.0.1.1\n127.0.1.2\n".into())
    );
    page.head(0, "doctor fleet exec --hostfile hostfile -- uptime").stdout_contains("load average");
    page.next(Machine::Azure, azure::DESTROY_PLAN);
    page.next(Machine::Azure, azure::DESTROY);
    assert_eq!(page.rest.next(), None, "a command of the page that is not tested");
}

/// Steps 1 to 3.
fn provision(page: &mut PageRunner<'_>) {
    page.here("doctor fleet provision --example > cluster.toml");
    page.here("doctor fleet cloud-init cluster.toml > cloud-init.yaml");
    page.here("doctor fleet cloud-init --check cloud-init.yaml").stdout_contains("known to cloud-init");
    page.here("doctor fleet provision cluster.toml --plan --fresh")
        .stdout_contains("az vmss create")
        .stdout_contains("host files and host keys on the head node");
    page.next(Machine::Azure, azure::PROVISION);
    page.fixture.create_machines();
    // The login precedes every later line on the head node.
    page.here("ssh -F vmss/ssh_config host1");
    let output = page.head(0, "doctor fleet exec --hostfile hostfile -- hostname");
    output.stdout_contains("host1: host1\nhost2: host2\nhost3: host3\n");
}

/// Steps 4 and 5.
fn check_health(page: &mut PageRunner<'_>) {
    let fixture = page.fixture;
    page.head(0, "doctor fleet gather /var/log/node-info.log --last 1 --out node-info --hostfile hostfile");
    assert!(
        fixture.on_head("node-info").lines().nth(2).unwrap().starts_with("host3 host3 "),
        "{}",
        fixture.on_head("node-info")
    );
    page.head(0, "doctor fleet exec --root --hostfile hostfile -- /opt/node-info.sh");
    let persistence =
        "doctor fleet exec --hostfile hostfile -- nvidia-smi --query-gpu=persistence_mode --format=csv,noheader";
    page.head(0, persistence).stdout_contains("host[1-3]: Enabled");

    page.head(
        0,
        "doctor fleet gather /var/log/node-health.log.status --last 1 --out cluster-health.status --hostfile hostfile",
    );
    let healths: Vec<String> = fixture
        .on_head("cluster-health.status")
        .lines()
        .map(|line| line.split(' ').nth(2).unwrap().to_owned())
        .collect();
    assert_eq!(healths, ["healthy", "unhealthy", "healthy"]);
    let unwell = page.head(0, "grep -v ' healthy$' cluster-health.status");
    assert!(unwell.out.starts_with("host2 ") && unwell.out.lines().count() == 1, "{}", unwell.out);
    let health = page.head(1, "doctor fleet health --hostfile hostfile");
    health.stdout_contains("3 hosts: 2 healthy, 0 unknown, 1 unhealthy");
    page.head(0, "doctor fleet exec --hostfile hostfile --hosts host2 -- tail -n 5 /var/log/dcgmi-diag.log")
        .stdout_contains("Fail - GPU 3");
    page.head(0, "doctor fleet gather /var/log/dcgmi-diag.log --out diags/ --hostfile hostfile");
    assert!(fixture.on_head("diags/host2/dcgmi-diag.log").contains("Fail - GPU 3"));
}

/// Step 6, after host2 was repaired.
fn check_again(page: &mut PageRunner<'_>) {
    fs::remove_file(page.fixture.roots[1].join("var/log/fault")).unwrap();
    let deep = "doctor fleet exec --root --hostfile hostfile --hosts host2 --deadline 3h -- /opt/run-dcgmi.sh 4";
    page.head(0, deep).stdout_contains("host2: /var/log/dcgmi-diag.log: passed");
    let log = fs::read_to_string(page.fixture.roots[1].join("var/log/dcgmi-diag.log")).unwrap();
    assert!(log.contains("level 4\n"), "{log}");
    let aznhc = page.head(0, "doctor fleet exec --root --hostfile hostfile --deadline 30m -- /opt/run-aznhc.sh");
    aznhc.stdout_contains("host[1-3]: /var/log/aznhc-health.log: passed");
    page.head(0, "doctor fleet exec --root --hostfile hostfile -- /opt/check-node-health.sh");
    let all = page.head(0, "doctor fleet exec --root --hostfile hostfile --deadline 90m -- /opt/run-health-checks.sh");
    all.stdout_contains("host[1-3]: /var/log/doctor-check.log: passed")
        .stdout_contains("host[1-3]: /var/log/dcgmi-diag.log: passed");
    page.head(0, "doctor fleet health --hostfile hostfile").stdout_contains("3 hosts: 3 healthy");
    page.head(0, "doctor fleet health --run --sources own --hostfile hostfile").stdout_contains("3 hosts: 3 healthy");
}

/// Step 7.
fn test_network(page: &mut PageRunner<'_>) {
    let command = page.head(0, "doctor fleet nccl --hostfile hostfile --print");
    command
        .stdout_contains("mpirun --allow-run-as-root -np 3 --host host1:1,host2:1,host3:1")
        .stdout_contains("-b 8G -e 8G");
    let slow = page.head(1, "doctor fleet nccl --hostfile hostfile --expect 480");
    slow.stdout_contains("host[1-3]: fail: 198.2 GB/s").stdout_contains("at fault: host3\n");
    let passing = page.head(0, "doctor fleet nccl --hostfile hostfile --hosts 'host[1-2]' --expect 480");
    passing.stdout_contains("host[1-2]: pass: 481.0 GB/s");
}
