//! `doctor fleet` on real sshd hosts that answer, refuse, hang or are slow, and whose output must not be trusted. The
//! steps lead from new machines to a tested fleet, as in docs/guide/fleet.md.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    process::Stdio,
    time::{Duration, Instant},
};

use doctor_testbed::ssh;

use crate::{
    slurm_several::POLICY,
    workdir::{CommandOutput, Workdir, doctor_node, wait_until},
};

/// Hosts, and a directory from which they are reached without any configuration of the service.
struct FleetFixture {
    workdir: Workdir,
    fleet: ssh::SshFleet,
}

impl FleetFixture {
    fn new(what: &str, hosts: u8) -> Option<Self> {
        let fleet = ssh::SshFleet::start(hosts).inspect_err(|why| why.skip_tests(what)).ok()?;
        let workdir = Workdir::new();
        fs::copy(fleet.path("hostfile"), workdir.path("hosts")).unwrap();
        fs::copy(fleet.ssh_config(), workdir.path("ssh_config")).unwrap();
        Some(Self { workdir, fleet })
    }

    fn fleet_args<'a>(&self, args: &[&'a str]) -> Vec<&'a str> {
        let (command, options) = args.split_first().unwrap();
        let reach = ["fleet", command, "--hostfile", "hosts", "--ssh-config", "ssh_config"];
        // A long timeout, so that a live host is reached even if this machine is slow.
        let connect_timeout = if options.contains(&"--connect") { &[][..] } else { &["--connect", "30s"] };
        [&reach[..], connect_timeout, options].concat()
    }

    #[track_caller]
    fn expect(&self, code: i32, args: &[&str]) -> CommandOutput {
        self.workdir.expect(code, &self.fleet_args(args))
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> serde_json::Value {
        let args: Vec<&str> = [&["--json"], &self.fleet_args(args)[..]].concat();
        let output = self.workdir.doctor(&args);
        serde_json::from_str(&output.out).unwrap_or_else(|error| panic!("{error}\n{}\n{}", output.out, output.err))
    }

    /// Writes a file in the home directory of a host.
    fn put(&self, host: usize, path: &str, text: &str) {
        let path = self.fleet.hosts()[host - 1].home().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn stop(&mut self, host: &str) {
        self.fleet.host(host).unwrap().stop();
    }
}

#[test]
fn a_command_runs_on_every_host_and_equal_output_is_grouped() {
    let Some(fixture) = FleetFixture::new("commands on SSH hosts", 3) else { return };
    let output = fixture.expect(0, &["exec", "--", "echo same"]);
    assert_eq!((output.out.as_str(), output.err.as_str()), ("host[1-3]: same\n", ""));
    // Several arguments are passed unchanged. One host has other output and exits with the code that ssh uses for its
    // own errors.
    fixture
        .expect(0, &["exec", "--hosts", "host1", "--", "echo", "it's; $HOME"])
        .stdout_contains("host1: it's; $HOME\n");
    let output = fixture.expect(1, &["exec", "--", "hostname; [ $(hostname) != host2 ] || { echo no >&2; exit 255; }"]);
    output
        .stdout_contains("host1: host1\nhost2: host2\n")
        .stderr_contains("host2: no\nhost2: exited with 255\n3 hosts: 2 succeeded, 1 failed");
    let rows = fixture.json(&["exec", "--hosts", "host*", "--", "kill -9 $$"]);
    assert_eq!((rows[0]["ended"].as_str(), rows[0]["code"].as_i64()), (Some("exited"), Some(137)), "{rows}");
    // Sequences that would clear the screen or imitate another host's line are made visible.
    let output =
        fixture.expect(0, &["exec", "--hosts", "host1", "--", "printf 'a\\033[2Jb\\rhost2: c\\n\\302\\2332J'"]);
    assert_eq!(output.out, "host1: a\u{fffd}[2Jb\u{fffd}host2: c\nhost1: \u{fffd}2J\n");
    let output =
        fixture.expect(0, &["exec", "--hosts", "host1", "--most", "1", "--", "head -c 5000 /dev/zero | tr '\\0' x"]);
    assert!(output.out.len() < 1100 && output.err.contains("3976 bytes over the limit were dropped"), "{}", output.err);
    fixture
        .expect(2, &["exec", "--hosts", "host9", "--", "true"])
        .stderr_contains("no host `host9`")
        .stderr_contains("known: host[1-3]");
    let output = fixture.workdir.expect(2, &["fleet", "exec", "--", "true"]);
    output.stderr_contains("--hosts node[01-08] or --hostfile FILE");
    // With the service's configuration, and connections that are kept between commands.
    let (hosts, ssh_config, state) =
        (fixture.fleet.path("hostfile"), fixture.fleet.ssh_config(), fixture.fleet.path("s"));
    let config = format!(
        "[backend.ssh]\nhostfile = \"{}\"\nssh_config = \"{}\"\nstate = \"{}\"\n",
        hosts.display(),
        ssh_config.display(),
        state.display()
    );
    fixture.workdir.write("doctor.toml", &config);
    fixture.workdir.expect(1, &["fleet", "exec", "--", "exit 255"]).stderr_contains("host[1-3]: exited with 255");
    fixture
        .workdir
        .expect(0, &["fleet", "exec", "--hosts", "host[1-2]", "--", "echo again"])
        .stdout_contains("host[1-2]: again\n");
    assert_eq!(fs::read_dir(state.join("c")).unwrap().count(), 3);
}

#[test]
fn hosts_that_refuse_hang_or_are_slow_hold_up_nobody_and_what_is_late_is_ended_there() {
    let Some(mut fixture) = FleetFixture::new("SSH hosts that do not answer", 4) else { return };
    let slow = fixture.fleet.hosts()[3].slow_proxy(Duration::from_millis(40)).unwrap();
    let at = fixture.fleet.hosts()[3].at;
    let config = format!(
        "Host slow\n  HostName {}\n  Port {}\n  HostKeyAlias [{}]:{}\n{}",
        slow.at.ip(),
        slow.at.port(),
        at.ip(),
        at.port(),
        fixture.workdir.read("ssh_config")
    );
    fixture.workdir.write("ssh_config", &config);
    fixture.workdir.write("hosts", "host1\nhost2\nhost3\nslow\n");
    let output = fixture.expect(1, &["exec", "--hosts", "host1", "--deadline", "1s", "--", "echo begun; sleep 600"]);
    output.stdout_contains("host1: begun").stderr_contains("host1: timed out and was terminated");
    wait_until("the command to be gone", || {
        !fixture.expect(0, &["exec", "--hosts", "host1", "--", "cat /proc/[0-9]*/comm; true"]).out.contains("sleep")
    });
    // A broken connection is not mistaken for the end of the command.
    let args = fixture.fleet_args(&["exec", "--hosts", "host1", "--", "echo up > /root/up; sleep 600"]);
    let cut = fixture.workdir.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    let up = fixture.fleet.hosts()[0].home().join("up");
    wait_until("the command to begin", || fs::read_to_string(&up).is_ok_and(|text| text == "up\n"));
    fixture.fleet.hosts()[0].cut_connections().unwrap();
    let cut = CommandOutput::from_output(&cut.wait_with_output().unwrap());
    assert_eq!(cut.code, 1, "{}", cut.err);
    cut.stderr_contains("host1: connection lost: ").stderr_contains("it may still run there");
    fixture.stop("host2");
    fixture.fleet.hosts()[2].hang();
    let began = Instant::now();
    let output = fixture.expect(3, &["exec", "--connect", "10s", "--", "hostname"]);
    output
        .stdout_contains("host1: host1")
        .stdout_contains("slow: host4")
        .stderr_contains("host2: unreachable: ")
        .stderr_contains("host3: unreachable: ");
    output.stderr_contains("refused").stderr_contains("timed out");
    assert!(began.elapsed() < Duration::from_secs(240), "{:?}", began.elapsed());
    let rows = fixture.json(&["exec", "--connect", "10s", "--", "exit 3"]);
    let ends: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["ended"].as_str().unwrap()).collect();
    assert_eq!(ends, ["exited", "not-reached", "not-reached", "exited"], "{rows}");
    fixture.fleet.hosts()[2].unhang();
    // An unknown host key is rejected unless --learn-keys is given.
    fixture.workdir.write("known_hosts", "");
    let config = fixture.workdir.read("ssh_config").replace(
        &fixture.fleet.path("known_hosts").display().to_string(),
        &fixture.workdir.path("known_hosts").display().to_string(),
    );
    fixture.workdir.write("ssh_config", &config);
    fixture.expect(3, &["exec", "--hosts", "host1", "--", "true"]).stderr_contains("host1: unreachable: ");
    fixture.expect(0, &["exec", "--hosts", "host1", "--learn-keys", "--", "true"]);
    fixture.expect(0, &["exec", "--hosts", "host1", "--", "true"]);
}

#[test]
fn nothing_runs_on_an_unreachable_host_and_root_is_explicit() {
    let Some(mut fixture) = FleetFixture::new("commands that were not begun on SSH hosts", 2) else { return };
    // The host's output is lost, so the command must not start: otherwise it could not be reported as not executed.
    fixture.put(1, ".bashrc", "exec >/dev/null\n");
    let output = fixture.expect(3, &["exec", "--hosts", "host1", "--deadline", "1s", "--", "touch /root/begun"]);
    output.stderr_contains("host1: unreachable: it does not answer");
    fixture.put(1, ".bashrc", "");
    fixture.expect(0, &["exec", "--hosts", "host1", "--", "[ ! -e /root/begun ]"]);
    // An unprivileged user logs in to the second host.
    let second = fixture.fleet.host("host2").unwrap();
    let config = second.home().with_file_name("sshd_config");
    let forced =
        "ForceCommand exec setpriv --reuid=65534 --regid=65534 --clear-groups sh -c \"$SSH_ORIGINAL_COMMAND\"\n";
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text + forced).unwrap();
    second.boot().unwrap();
    fixture.expect(0, &["exec", "--", "id", "-u"]).stdout_contains("host1: 0\nhost2: 65534\n");
    let output = fixture.expect(1, &["exec", "--root", "--", "id", "-u"]);
    output.stderr_contains("host2: the login user is not root, and `as_root` under [backend.ssh] is empty");
    assert_eq!(output.out, "host1: 0\n");
    fixture
        .expect(1, &["gather", "/etc/hostname", "--root", "--out", "names"])
        .stdout_contains("host2: ")
        .stdout_contains("is not root");
}

#[test]
fn a_file_is_gathered_from_every_host_and_who_does_not_bring_it_is_named() {
    let Some(mut fixture) = FleetFixture::new("gathering files from SSH hosts", 4) else { return };
    fixture.put(1, "log.status", "2026-11-15T03:00:00 unhealthy\n2026-11-16T03:00:00 healthy\n");
    fixture.put(2, "log.status", "2026-11-16T03:00:01 unhealthy");
    fixture.put(4, "log.status", &"x".repeat(2 << 20));
    let output = fixture
        .expect(1, &["gather", "/root/log.status", "--last", "1", "--most", "1", "--out", "cluster-health.status"]);
    output
        .stdout_contains("2 of 4 hosts sent /root/log.status")
        .stdout_contains("host3: no such file")
        .stdout_contains("host4: larger than 1 MiB");
    assert_eq!(
        fixture.workdir.read("cluster-health.status"),
        "host1 2026-11-16T03:00:00 healthy\nhost2 2026-11-16T03:00:01 unhealthy\n\
         # host3: no such file\n# host4: larger than 1 MiB (--most)\n"
    );
    fixture.stop("host3");
    let output = fixture.expect(3, &["gather", "/root/log.status", "--out", "all/"]);
    output.stdout_contains("3 of 4 hosts").stdout_contains("host3: unreachable: ");
    assert_eq!(fixture.workdir.read("all/host2/log.status"), "2026-11-16T03:00:01 unhealthy");
    assert_eq!(fs::read(fixture.workdir.path("all/host4/log.status")).unwrap().len(), 2 << 20);
    assert!(!fixture.workdir.path("all/host3").exists());
    // An unreadable file is reported as such, also with --last.
    let rows = fixture.json(&["gather", "/proc/self/mem", "--hosts", "host1", "--last", "1", "--out", "none"]);
    assert_eq!(rows[0]["brought"], "failed", "{rows}");
    assert!(rows[0]["why"].as_str().unwrap().contains("Input/output error"), "{rows}");
    let left = fs::read_dir(fixture.workdir.path(""))
        .unwrap()
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with(".gather"));
    assert!(
        !left
            && !fs::read_dir(fixture.workdir.path("all"))
                .unwrap()
                .flatten()
                .any(|entry| entry.file_name().to_string_lossy().starts_with('.'))
    );
    let rows = fixture.json(&["gather", "/root", "--hosts", "host1", "--out", "none"]);
    assert_eq!(rows[0]["brought"], "not-a-file", "{rows}");
}

#[test]
fn the_host_files_are_made_kept_in_order_and_a_silent_host_stays_in_them() {
    let Some(mut fixture) = FleetFixture::new("host files from SSH hosts", 3) else { return };
    let output = fixture.expect(1, &["hosts", "--check"]);
    output.stdout_contains("+ host1 127.0.1.1").stdout_contains("would change");
    assert!(!fixture.workdir.path("hostfile").exists(), "nothing is written");
    fixture.workdir.write("hosts", "host3\nhost1\n");
    fixture.expect(0, &["hosts"]).stdout_contains("were written: 2 hosts queried, 0 without an answer");
    assert_eq!(
        (fixture.workdir.read("hostfile"), fixture.workdir.read("hostfile-ip")),
        ("host3\nhost1\n".to_owned(), "127.0.1.3\n127.0.1.1\n".to_owned())
    );
    // A host is added and one no longer answers: the order stays, and no host is dropped.
    fixture.workdir.write("hosts", "host[1-3]\n");
    fixture.stop("host3");
    let output = fixture.expect(3, &["hosts"]);
    output.stdout_contains("+ host2 127.0.1.2").stdout_contains("! host3 stays as host3 127.0.1.3: unreachable");
    assert_eq!(
        (fixture.workdir.read("hostfile"), fixture.workdir.read("hostfile-ip")),
        ("host3\nhost1\nhost2\n".to_owned(), "127.0.1.3\n127.0.1.1\n127.0.1.2\n".to_owned())
    );
    // Querying one host does not change the lines of others.
    fixture.expect(0, &["hosts", "--hosts", "host2"]).stdout_contains("are up to date");
    fixture.workdir.write("hosts", "host2\nhost1\n");
    fixture.expect(0, &["hosts"]).stdout_contains("- host3 127.0.1.3");
    assert_eq!(fixture.workdir.read("hostfile"), "host1\nhost2\n");
    // Files that do not match each other are rebuilt, and no host, not even a silent one, gets the address of another.
    fixture.workdir.write("hosts", "host1\nhost2\nhost3\n");
    fixture.workdir.write("hostfile", "host3\nhost1\nhost2\n");
    fixture.workdir.write("hostfile-ip", "127.0.1.1\n127.0.1.2\n");
    fixture
        .expect(3, &["hosts"])
        .stdout_contains("one file has 3 hosts and the other 2: their addresses are ignored; rebuilt");
    assert_eq!(fixture.workdir.read("hostfile-ip"), "127.0.1.3\n127.0.1.1\n127.0.1.2\n");
    fixture.workdir.write("hostfile-ip", "127.0.1.1\n127.0.1.3\n127.0.1.2\n");
    fixture.expect(3, &["hosts"]);
    assert_eq!(
        fixture.workdir.read("hostfile-ip"),
        "127.0.1.3\n127.0.1.1\n127.0.1.2\n",
        "an unreachable host must not keep another host's address"
    );
    // A run that was interrupted between the two files.
    fixture.workdir.write("hostfile", "host1\nhost2\n");
    let next = r#"[{"name": "host1", "address": "127.0.1.1"}, {"name": "host2", "address": "127.0.1.2"}]"#;
    fixture.workdir.write(".hostfile.next", next);
    fixture.workdir.write("hosts", "host1\nhost2\n");
    fixture.expect(1, &["hosts", "--check"]).stdout_contains("stopped between writing the two files; would be rebuilt");
    fixture.expect(0, &["hosts"]).stdout_contains("stopped between writing the two files; rebuilt");
    assert_eq!(fixture.workdir.read("hostfile-ip"), "127.0.1.1\n127.0.1.2\n");
    assert!(!fixture.workdir.path(".hostfile.next").exists());
    fixture.expect(0, &["hosts", "--check"]).stdout_contains("are up to date");
    // A host whose own name differs from the listed one keeps its line while it is silent.
    let at = fixture.fleet.hosts()[1].at;
    let host_entry = format!("Host other\n  HostName {0}\n  Port {1}\n  HostKeyAlias [{0}]:{1}\n", at.ip(), at.port());
    fixture.workdir.write("ssh_config", &(host_entry + &fixture.workdir.read("ssh_config")));
    fixture.workdir.write("hosts", "host1\nother\n");
    fixture.expect(0, &["hosts"]).stdout_contains("are up to date");
    fixture.stop("host2");
    fixture.expect(3, &["hosts"]).stdout_contains("! other stays as host2 127.0.1.2: unreachable");
    assert_eq!(fixture.workdir.read("hostfile"), "host1\nhost2\n");
    fixture.fleet.host("host2").unwrap().boot().unwrap();
    fixture.workdir.write("hosts", "host1\nhost2\n");
    // The written files are valid host files.
    fixture.workdir.expect(0, &["fleet", "exec", "--hostfile", "hostfile", "--ssh-config", "ssh_config", "--", "true"]);
    fixture.workdir.write("hostfile", "host1 user=root\nhost2\n");
    let output = fixture.workdir.expect(2, &["fleet", "hosts", "--hostfile", "hostfile", "--ssh-config", "ssh_config"]);
    output.stderr_contains("has connection settings for host1");
}

const AZNHC: &str = "SUCCESS:  nhc:  Health check passed:  check_gpu_count: Expected 8 and found 8\n";
const FAULT: &str = "ERROR:  nhc:  Health check failed:  check_gpu_count: Expected 8 and found 7. FaultCode: NHC2009\n";
const DCGM: &str = "| Denylist                  | Pass                                           |\n| GPU Memory | Pass - All |\ndcgmi diag passed\n";

#[test]
fn the_health_of_hosts_is_read_from_their_logs_and_a_passed_without_a_check_is_unknown() {
    let Some(mut fixture) = FleetFixture::new("the health of SSH hosts", 4) else { return };
    let now = fixture.expect(0, &["exec", "--hosts", "host1", "--", "date +%Y-%m-%dT%H:%M:%S"]);
    let now = now.out.trim().strip_prefix("host1: ").unwrap().to_owned();
    for (host, aznhc) in
        [(1, format!("{AZNHC}Health checks passed\n")), (2, format!("{AZNHC}{FAULT}Health checks passed\n"))]
    {
        fixture.put(host, "log/aznhc-health.log", &aznhc);
        fixture.put(host, "log/aznhc-health.log.status", &format!("{now} passed\n"));
        fixture.put(host, "log/dcgmi-diag.log", DCGM);
        fixture.put(host, "log/dcgmi-diag.log.status", &format!("{now} passed\n"));
        fixture.put(host, "log/doctor-check.log.status", &format!("{now} passed\n"));
    }
    // AzNHC is not installed, but its wrapper wrote `passed`.
    fixture.put(3, "log/aznhc-health.log", "run-health-checks.sh: No such file or directory\nHealth checks passed\n");
    fixture.put(3, "log/aznhc-health.log.status", &format!("{now} passed\n"));
    fixture.put(3, "log/dcgmi-diag.log.status", "2020-01-01T00:00:00 passed\n");
    fixture.stop("host4");
    let output = fixture.expect(1, &["health", "--logs", "/root/log"]);
    output
        .stdout_contains("4 hosts: 1 healthy, 2 unknown, 1 unhealthy")
        .stdout_contains("Expected 8 and found 7")
        .stdout_contains("older than 7d");
    output
        .stdout_contains("does not show that anything was checked")
        .stdout_contains("there is no doctor-check.log.status: it never ran here");
    let rows = fixture.json(&["health", "--logs", "/root/log"]);
    let health: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["health"].as_str().unwrap()).collect();
    assert_eq!(health, ["healthy", "unhealthy", "unknown", "unknown"], "{rows}");
    fixture.expect(0, &["health", "--logs", "/root/log", "--hosts", "host1"]).stdout_contains("healthy");
    fixture.expect(3, &["health", "--logs", "/root/log", "--hosts", "host3", "--sources", "aznhc"]);
    fixture.expect(2, &["health", "--sources", "nhc"]).stderr_contains("expected one of aznhc, dcgm, own");
    // Our own check writes the same format; its earlier result does not count.
    fixture.put(1, "log/doctor-check.log.status", "2020-01-01T00:00:00 passed\n");
    let rows = fixture.json(&["health", "--run", "--logs", "/root/log", "--hosts", "host1", "--sources", "own"]);
    assert!(rows[0]["checks"][0]["age"].is_string(), "{rows}");
    let home = fixture.fleet.hosts()[0].home();
    let (log, status) = (home.join("log/doctor-check.log"), home.join("log/doctor-check.log.status"));
    let (log, status) = (fs::read_to_string(log).unwrap(), fs::read_to_string(status).unwrap());
    let word = status.lines().last().unwrap().split(' ').next_back().unwrap();
    assert!(["passed", "failed", "unknown"].contains(&word), "{status}");
    assert!(log.contains("CHECK") && log.contains("\ndoctor-node check "), "{log}");
    assert_eq!(status.lines().count(), 2, "{status}");
    // A check that fails to run is not replaced by an older result.
    let rows = fixture.json(&["health", "--run", "--logs", "/proc/none", "--hosts", "host1", "--sources", "own"]);
    assert!(
        rows[0]["health"] == "unknown"
            && rows[0]["checks"][0]["why"].as_str().unwrap().contains("could not be checked: "),
        "{rows}"
    );
}

/// Prints what `all_reduce_perf` prints, with a low bandwidth if host3 takes part.
const MPIRUN: &str = r##"#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = --host ] && hosts=$2; shift; done
rate=430.10 wrong=0
case $hosts in *host3*) rate=198.20; [ ! -e WRONG ] || wrong=7;; esac
[ ! -e SILENT ] || exit 0
[ ! -e HANGS ] || exec sleep 600
echo "# nThread 1 nGpus 1 minBytes 8589934592 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0"
echo "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
for cycle in 1 2 3; do
  echo "  8589934592    2147483648     float     sum      -1    35920  239.14  $rate      $wrong    35915  239.17  418.55      0"
done
if [ $wrong = 0 ]; then echo "# Out of bounds values : 0 OK"; else echo "# Out of bounds values : 21 FAILED"; exit 1; fi
"##;

#[test]
fn with_fake_mpirun_pair_trials_name_the_slow_host_and_missing_output_does_not_pass() {
    let Some(mut fixture) = FleetFixture::new("an all-reduce over SSH hosts", 4) else { return };
    let at = |name: &str| fixture.workdir.path(name).display().to_string();
    fixture.workdir.write(
        "mpirun",
        &MPIRUN.replace("WRONG", &at("wrong")).replace("SILENT", &at("silent")).replace("HANGS", &at("hangs")),
    );
    fs::set_permissions(fixture.workdir.path("mpirun"), fs::Permissions::from_mode(0o755)).unwrap();
    let nccl = ["nccl", "--launcher", "mpirun", "--mpirun", "./mpirun", "--program", "/bin/true"];
    let args = |extra: &[&'static str]| [&nccl[..], extra].concat();
    let output = fixture.expect(0, &args(&["--print"]));
    output
        .stdout_contains("-np 4 --host host1:1,host2:1,host3:1,host4:1 --map-by ppr:1:node")
        .stdout_contains("-b 8G -e 8G")
        .stdout_contains("NCCL_PXN_DISABLE=1");
    let output = fixture.expect(1, &args(&["--expect", "431"]));
    output
        .stdout_contains("host[1-4]: fail: 198.2 GB/s at 8589934592 bytes, less than 95 % of 431.0 GB/s")
        .stdout_contains("at fault: host3\n");
    let view = fixture.json(&args(&["--expect", "431"]));
    assert_eq!((view["verdict"].as_str(), view["at_fault"][0].as_str()), (Some("fail"), Some("host3")), "{view}");
    // Known good hosts outside the tested set.
    let output = fixture.expect(1, &args(&["--expect", "431", "--hosts", "host[2-3]", "--good", "host[1,4]"]));
    output.stdout_contains("at fault: host3\n");
    fixture
        .expect(0, &args(&["--expect", "431", "--hosts", "host[1-2]"]))
        .stdout_contains("host[1-2]: pass: 430.1 GB/s");
    // Without a limit the result is inconclusive, and without a result row it is no pass.
    fixture.expect(3, &args(&[])).stdout_contains("inconclusive: 198.2 GB/s").stdout_contains("no bandwidth limit");
    fixture.workdir.write("wrong", "");
    fixture.expect(1, &args(&["--no-pairs"])).stdout_contains("21 wrong sums");
    fixture.workdir.write("silent", "");
    fixture
        .expect(3, &args(&["--expect", "1"]))
        .stdout_contains("inconclusive: mpirun ended with exit status: 0, and not the output of all_reduce_perf");
    fs::remove_file(fixture.workdir.path("silent")).unwrap();
    // A hang before the start accuses no host: no host was seen to begin.
    fixture.workdir.write("hangs", "");
    let output = fixture.expect(3, &args(&["--expect", "431", "--deadline", "1s"]));
    output.stdout_contains("host[1-4]: inconclusive: mpirun did not start the test within 1 s");
    assert!(!output.out.contains("at fault"), "{}", output.out);
    fs::remove_file(fixture.workdir.path("hangs")).unwrap();
    // A host in use is left out by name, unless --even-in-use is given.
    let mut user = fixture
        .fleet
        .ssh("host2", "exec 3</dev/nvidia0; echo up; read x")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    user.stdout.take().unwrap().read_exact(&mut up).unwrap();
    let busy = ["--expect", "431", "--hosts", "host[1-2,4]"];
    let output = fixture.expect(3, &args(&busy));
    output
        .stdout_contains("host[1,4]: pass")
        .stdout_contains("host2 skipped: not free: process")
        .stdout_contains("holds a GPU (--even-in-use)");
    fixture.expect(0, &args(&[&busy[..], &["--even-in-use"]].concat())).stdout_contains("host[1-2,4]: pass");
    fixture.fleet.hosts()[0].set_load("99.00 0.10 0.10 1/84 7182\n").unwrap();
    let output = fixture.expect(3, &args(&["--hosts", "host[1-2]"]));
    output.stderr_contains("no host can take part; host1: not free: load ");
    fixture.fleet.hosts()[0].set_load("0.10 0.10 0.10 1/84 7182\n").unwrap();
    drop(user.stdin.take());
    user.wait().unwrap();
    fixture.stop("host4");
    let output = fixture.expect(3, &args(&["--expect", "431", "--hosts", "host[1-2,4]"]));
    output.stdout_contains("host[1-2]: pass").stdout_contains("host4 skipped: unreachable");
    // A limit for several hosts does not apply to one that remains alone.
    let output = fixture.expect(3, &args(&["--expect", "431", "--hosts", "host[1,4]"]));
    output.stdout_contains(
        "host1: inconclusive: 430.1 GB/s at 8589934592 bytes, only one host takes part, but --expect is for several",
    );
    fixture
        .expect(3, &["nccl", "--launcher", "mpirun", "--program", "/no/such"])
        .stderr_contains("no /no/such (--program)");
}

/// `doctor-node` on hosts that are all this machine, with stand-ins for its GPUs.
const ON_A_HOST: &str = r#"#!/bin/sh
node=$(hostname | tr -dc 0-9)
export DOCTOR_CUDA=LIBRARY DOCTOR_NCCL=LIBRARY DOCTOR_FAKE_NVIDIA_GPUS=2 DOCTOR_FAKE_NVIDIA_NODE=$((node - 1))
[ "$FAULTY" != "$(hostname)" ] || export DOCTOR_FAKE_NVIDIA_FAULTS="$FAULT"
[ "$1" = host ] || set -- "$@" --policy POLICY
exec PROGRAM "$@"
"#;

#[test]
fn without_mpi_doctor_node_runs_the_all_reduce_over_hosts_with_fake_gpus() {
    let Some(fixture) = FleetFixture::new("an all-reduce by doctor-node over SSH hosts", 2) else { return };
    let standin = doctor_testbed::fake_machine::fake_nvidia_library(doctor_node());
    let wrapped = ON_A_HOST
        .replace("LIBRARY", &standin.display().to_string())
        .replace("PROGRAM", &doctor_node().display().to_string())
        .replace("POLICY", &fixture.workdir.path("policy.toml").display().to_string());
    fixture.workdir.write("node", &wrapped);
    fixture.workdir.write("policy.toml", POLICY);
    let small = ["--set", "least=1024", "--set", "most=16KiB", "--set", "stall=5s", "--set", "gather=60s"];
    let args = |extra: &[&'static str]| [&["nccl", "--launcher", "doctor-node"], &small[..], extra].concat();
    let run = |args: &[&str]| {
        let mut command = fixture.workdir.command(&fixture.fleet_args(args));
        command.env("DOCTOR_NODE", fixture.workdir.path("node"));
        CommandOutput::from_output(&command.output().unwrap())
    };
    // The speed of stand-ins depends on this machine: only the sums can be verified.
    let healthy = run(&args(&[]));
    assert_eq!(healthy.code, 3, "{}\n{}", healthy.out, healthy.err);
    healthy
        .stdout_contains("host[1-2]: inconclusive: ")
        .stdout_contains("at 16384 bytes")
        .stdout_contains("no bandwidth limit");
    // The second host delays the others: of two hosts, the faulty one cannot be identified.
    let hung = run(&args(&["--env", "FAULTY=host2", "--env", "FAULT=hang:2"]));
    assert_eq!(hung.code, 1, "{}\n{}", hung.out, hung.err);
    hung.stdout_contains("host[1-2]: fail: ").stdout_contains("at fault: the path between host1 and host2");
}
