//! The Slurm test bed does what tests of Cluster Doctor rely on, and leaves nothing behind, even if its process is killed.

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use doctor_testbed::slurm::{Daemon, Generation, Layout, Rest, Slurm, SlurmTestbedError};

/// Set for the child process that holds a Slurm until it is killed.
const HOLDS: &str = "DOCTOR_BED_HOLDS_SLURM";

/// Starts a Slurm, or reports that there is none; in CI that is a failure.
fn slurm(what: &str, layout: &Layout) -> Option<Slurm> {
    match Slurm::start(layout) {
        Ok(slurm) => Some(slurm),
        Err(why @ SlurmTestbedError::Unsupported { .. }) => {
            why.skip_tests(what);
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Returns the processes whose command line or working directory contains the folder of a Slurm.
fn processes_in(folder: &Path) -> Vec<String> {
    let folder = folder.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let cwd = fs::read_link(entry.path().join("cwd")).unwrap_or_default();
        (line.contains(folder) || cwd.starts_with(folder)).then_some(line)
    });
    processes.collect()
}

fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let began = Instant::now();
    while !reached() {
        assert!(began.elapsed() < Duration::from_secs(240), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn runs_jobs_and_loses_nothing(generation: Generation, version: &str) {
    let layout = Layout { generation, ..Layout::default() };
    let Some(slurm) = slurm(&format!("Slurm {version}"), &layout) else { return };
    assert!(slurm.run("sinfo", &["--version"]).unwrap().contains(version));
    assert_eq!(slurm.nodes(), ["node1", "node2", "node3", "node4"]);
    for node in slurm.nodes() {
        assert_eq!(slurm.node_state(node).unwrap(), "IDLE");
    }

    let folder = slurm.conf().parent().unwrap().to_owned();
    let output = folder.join("said");
    let options = ["--exclusive", "--gres=gpu:8", "--nodelist=node2", "--output"];
    let job = "--wrap=echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES; exec sleep 600";
    let job = slurm.submit(&[options.as_slice(), &[output.to_str().unwrap(), job]].concat()).unwrap();
    slurm.wait_for_job(job, "RUNNING").unwrap();
    assert_eq!(slurm.node_state("node2").unwrap(), "ALLOCATED");
    wait_until("the job says where it is", || fs::read_to_string(&output).is_ok_and(|text| text.ends_with('\n')));
    assert_eq!(fs::read_to_string(&output).unwrap(), "node2 0,1,2,3,4,5,6,7\n");

    // The daemons restore their saved state: the job continues.
    slurm.kill(Daemon::Munge).unwrap();
    assert_eq!(slurm.pids(Daemon::Munge), Vec::<u32>::new());
    slurm.stop(Daemon::Controller).unwrap();
    slurm.restart(Daemon::Munge).unwrap();
    slurm.restart(Daemon::Controller).unwrap();
    slurm.wait_for_node("node1", "idle", |state| state == "IDLE").unwrap();
    assert_eq!(slurm.job_state(job).unwrap(), "RUNNING");
    slurm.run("scancel", &[&job.to_string()]).unwrap();
    slurm.wait_for_node("node2", "idle", |state| state == "IDLE").unwrap();

    let stays = slurm.submit(&["--exclusive", "--wrap=exec sleep 600"]).unwrap();
    slurm.wait_for_job(stays, "RUNNING").unwrap();
    assert!(!processes_in(&folder).is_empty(), "leftovers would be detected");
    drop(slurm);
    assert_eq!(processes_in(&folder), Vec::<String>::new());
    assert!(!folder.exists());
}

#[test]
fn the_slurm_of_debian_12_runs_jobs_and_leaves_nothing_behind() {
    runs_jobs_and_loses_nothing(Generation::Debian12, "22.05");
}

#[test]
fn the_slurm_of_debian_13_runs_jobs_and_leaves_nothing_behind() {
    runs_jobs_and_loses_nothing(Generation::Debian13, "24.11");
}

fn reboots(generation: Generation) {
    let layout = Layout { generation, nodes: 2, gpus: 1, ..Layout::default() };
    let Some(slurm) = slurm("Slurm reboots its nodes", &layout) else { return };
    let reboot = ["reboot", "ASAP", "nextstate=RESUME", "reason=bed", "node1"];
    let before = slurm.pids(Daemon::Node("node1"));
    slurm.run("scontrol", &reboot).unwrap();
    wait_until("another slurmd", || {
        let now = slurm.pids(Daemon::Node("node1"));
        !now.is_empty() && now != before
    });
    slurm.wait_for_node("node1", "idle", |state| state == "IDLE").unwrap();
    assert_eq!(slurm.reboots(), ["node1"]);

    slurm.set_returns_from_reboot("node1", false).unwrap();
    slurm.run("scontrol", &reboot).unwrap();
    wait_until("no slurmd", || slurm.pids(Daemon::Node("node1")).is_empty());
    slurm.wait_for_node("node1", "rebooting", |state| state.contains("REBOOT_ISSUED")).unwrap();
    assert_eq!(slurm.node_state("node2").unwrap(), "IDLE");
}

#[test]
fn a_node_of_debian_12_reboots_and_comes_back_unless_told_not_to() {
    reboots(Generation::Debian12);
}

#[test]
fn a_node_of_debian_13_reboots_and_comes_back_unless_told_not_to() {
    reboots(Generation::Debian13);
}

#[test]
fn a_controller_can_have_thousands_of_nodes_without_a_slurmd() {
    for generation in Generation::ALL {
        let layout = Layout { generation, nodes: 5_000, slurmds: false, ..Layout::default() };
        let Some(slurm) = slurm("a large Slurm", &layout) else { return };
        let nodes = slurm.run("scontrol", &["show", "node", "-o"]).unwrap();
        assert_eq!(nodes.lines().count(), 5_000);
        assert!(nodes.lines().all(|line| line.contains("State=IDLE") && line.contains("Gres=gpu:h100:8")));
    }
}

/// Requests the nodes from slurmrestd and returns the first line and the rest of its reply.
fn ask_for_nodes(mut stream: impl io::Read + io::Write, version: &str, head: &str) -> (String, String) {
    let request = format!("GET /slurm/{version}/nodes HTTP/1.1\r\nHost: bed\r\nConnection: close\r\n{head}\r\n");
    // Sent in one piece: slurmrestd can reject the first half of a line that arrives in two.
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    // slurmrestd may close the connection before the last byte is read. The reply is complete all the same.
    let _closed = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let (status, rest) = answer.split_once("\r\n").unwrap();
    (status.to_owned(), rest.to_owned())
}

/// Each release with its API version.
const INTERFACES: [(Generation, &str); 2] = [(Generation::Debian12, "v0.0.38"), (Generation::Debian13, "v0.0.42")];

#[test]
fn slurmrestd_answers_on_its_socket() {
    for (generation, version) in INTERFACES {
        let layout = Layout { generation, nodes: 1, gpus: 0, rest: Some(Rest::Socket), ..Layout::default() };
        let Some(slurm) = slurm("slurmrestd", &layout) else { return };
        let socket = UnixStream::connect(slurm.rest_socket()).unwrap();
        let (status, nodes) = ask_for_nodes(socket, version, "");
        assert!(status.contains(" 200 ") && nodes.contains("node1"), "{status} {nodes}");
    }
}

#[test]
fn slurmrestd_accepts_a_token_and_stops_with_its_slurm() {
    for (generation, version) in INTERFACES {
        let layout = Layout { generation, nodes: 1, gpus: 0, rest: Some(Rest::Token), ..Layout::default() };
        let Some(slurm) = slurm("slurmrestd", &layout) else { return };
        let folder = slurm.conf().parent().unwrap().to_owned();
        let url = slurm.rest_url();
        let address = url.strip_prefix("http://").unwrap();
        let token = format!("X-SLURM-USER-NAME: root\r\nX-SLURM-USER-TOKEN: {}\r\n", slurm.token("root").unwrap());
        let (status, nodes) = ask_for_nodes(TcpStream::connect(address).unwrap(), version, &token);
        assert!(status.contains(" 200 ") && nodes.contains("node1"), "{status} {nodes}");
        let (status, nodes) = ask_for_nodes(TcpStream::connect(address).unwrap(), version, "");
        assert!(status.contains(" 401 ") && !nodes.contains("node1"), "{status} {nodes}");

        slurm.kill(Daemon::Rest).unwrap();
        // Not tested by its port: another process may have taken it, and a connecting socket may even be assigned it.
        assert_eq!(slurm.pids(Daemon::Rest), Vec::<u32>::new());
        slurm.restart(Daemon::Rest).unwrap();
        wait_until("it listens again", || TcpStream::connect(address).is_ok());
        drop(slurm);
        assert_eq!(processes_in(&folder), Vec::<String>::new());
    }
}

#[test]
fn nothing_is_left_of_a_slurm_whose_process_was_killed() {
    let name = "nothing_is_left_of_a_slurm_whose_process_was_killed";
    if std::env::var_os(HOLDS).is_some() {
        return hold();
    }
    if let Err(why) = Slurm::can_start(Generation::Debian12) {
        return why.skip_tests(name);
    }
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(HOLDS, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(holder.stdout.take().unwrap()).lines().map(Result::unwrap);
    let folder = lines.filter_map(|line| line.split_once("holding ").map(|(_, folder)| PathBuf::from(folder))).next();
    let folder = folder.expect("it says where its files are");
    assert!(!processes_in(&folder).is_empty(), "leftovers would be detected");
    holder.kill().unwrap();
    holder.wait().unwrap();
    wait_until("its processes are gone", || processes_in(&folder).is_empty());
    wait_until("its files are gone", || !folder.exists());
}

/// Runs in the child process that is killed.
fn hold() {
    let slurm = Slurm::start(&Layout { nodes: 1, rest: Some(Rest::Socket), ..Layout::default() }).unwrap();
    let job = slurm.submit(&["--wrap=exec sleep 600"]).unwrap();
    slurm.wait_for_job(job, "RUNNING").unwrap();
    println!("holding {}", slurm.conf().parent().unwrap().display());
    loop {
        std::thread::park();
    }
}
