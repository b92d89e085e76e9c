//! M16: one cycle of the service on 200 SSH hosts of which 20 are dead, from the start of the program to its end.
//!
//! Each host is a real sshd with its own address, key, processes and home, on loopback. Of the dead ones, a third
//! refuse connections, a third accept them and send nothing, and a third do not answer at all. Both ends of every
//! connection are on this machine, so the CPU time of a handshake counts twice.
//!
//! `wall_s` is a cycle without open connections; `kept_wall_s` is the next one, which reuses them, as all cycles of a
//! running service do. `dead_add_s` is the cost of the dead hosts: `wall_s` less the same cycle without them.
//! `first_wall_s` is the very first cycle, which copies `doctor-node` to every host.
//!
//! Correctness check: every host has the right occupancy, and a connection is kept to each live one.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use doctor_testbed::ssh::{SshFleet, SshTestbedError};
use serde_json::{Value, json};

use crate::{
    Measured,
    figure::Figure,
    one_cycle::{CycleSample, Service},
    shipped,
    stopwatch::{median, spread},
};

const HOSTS: u8 = 200;
/// One host in this many is dead.
const DEAD_EVERY: usize = 10;
/// A cycle without connections takes as long as its handshakes; the others are quick.
const COLD_REPEATS: usize = 5;
const REUSED_REPEATS: usize = 9;
const MEGABYTE: f64 = 1e6;
/// The limit for connections to end.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) fn run() -> Result<Measured> {
    let programs = shipped::folder()?;
    eprintln!("  starting {HOSTS} hosts");
    let mut fleet = match SshFleet::start(HOSTS) {
        Ok(fleet) => fleet,
        Err(SshTestbedError::Unsupported { why }) => return Ok(Measured::NotAvailable(why)),
        Err(other) => return Err(other).context("starting the hosts"),
    };
    let bench = Bench::new(&fleet, &programs)?;
    eprintln!("  installing doctor-node on {HOSTS} hosts");
    let first = bench.all.run_cycle()?;
    bench.all.compare(&(0..usize::from(HOSTS)).map(|host| (name(host), "free")).collect())?;
    break_dead_hosts(&mut fleet)?;
    eprintln!("  checking: every host has the expected occupancy");
    bench.all.run_cycle()?;
    bench.check()?;

    eprintln!("  measuring");
    let (mut cold, mut living, mut reused) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..COLD_REPEATS {
        bench.hang_up()?;
        living.push(bench.living.run_cycle()?);
        bench.hang_up()?;
        cold.push(bench.all.run_cycle()?);
        bench.check()?;
    }
    for _ in 0..REUSED_REPEATS {
        reused.push(bench.all.run_cycle()?);
    }
    bench.check()?;
    let (connections, memory) = (bench.sockets()?.len(), bench.memory_of_connections()?);
    let inputs = json!({
        "hosts": HOSTS, "dead": dead().count(), "refusing": dead().filter(|host| failure_of(*host) == HostFailure::Refuses).count(),
        "hanging": dead().filter(|host| failure_of(*host) == HostFailure::Hangs).count(),
        "black_holes": dead().filter(|host| failure_of(*host) == HostFailure::BlackHole).count(),
        "connect": "5s", "parallel": 32, "cores": thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "ssh": version(), "store": "SQLite", "mode": "observe", "both_ends_on_this_machine": true,
    });
    Ok(Measured::Figures(figures(&SshSamples { first, cold, living, reused, connections, memory }, &inputs)))
}

/// How a dead host behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostFailure {
    Refuses,
    Hangs,
    BlackHole,
}

fn dead() -> impl Iterator<Item = usize> {
    (0..usize::from(HOSTS)).filter(|host| host % DEAD_EVERY == DEAD_EVERY - 1)
}

fn failure_of(host: usize) -> HostFailure {
    [HostFailure::Refuses, HostFailure::Hangs, HostFailure::BlackHole][host / DEAD_EVERY % 3]
}

fn name(host: usize) -> String {
    format!("host{}", host + 1)
}

fn break_dead_hosts(fleet: &mut SshFleet) -> Result<()> {
    for host in dead() {
        let one = &mut fleet.hosts_mut()[host];
        match failure_of(host) {
            HostFailure::Refuses => one.stop(),
            HostFailure::Hangs => {
                one.cut_connections().context("closing its connections")?;
                one.hang();
            }
            HostFailure::BlackHole => one.black_hole().context("dropping its packets")?,
        }
    }
    Ok(())
}

/// Two services that share connections: one for all hosts, one for the live ones.
struct Bench {
    all: Service,
    living: Service,
    sockets: PathBuf,
}

impl Bench {
    fn new(fleet: &SshFleet, programs: &Path) -> Result<Self> {
        let state = fleet.path("s");
        let living: String = (0..usize::from(HOSTS))
            .filter(|host| dead().all(|dead| dead != *host))
            .map(|host| name(host) + "\n")
            .collect();
        fs::write(fleet.path("living"), living).context("writing the list of live hosts")?;
        let service = |hostfile: &str| {
            let settings = format!(
                "[backend.ssh]\nhostfile = \"{}\"\nssh_config = \"{}\"\ndoctor_node = \"{}\"\nstate = \"{}\"\n",
                fleet.path(hostfile).display(),
                fleet.ssh_config().display(),
                programs.join("doctor-node").display(),
                state.display()
            );
            Service::new(&programs.join("doctor"), &settings)
        };
        Ok(Self { all: service("hostfile")?, living: service("living")?, sockets: state.join("c") })
    }

    fn sockets(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.sockets).context("listing the connections")?;
        Ok(entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?)
    }

    fn check(&self) -> Result<()> {
        let seen = |host| if dead().any(|dead| dead == host) { "unknown" } else { "free" };
        let expected: BTreeMap<String, &'static str> =
            (0..usize::from(HOSTS)).map(|host| (name(host), seen(host))).collect();
        self.all.compare(&expected)?;
        let (open, alive) = (self.sockets()?.len(), usize::from(HOSTS) - dead().count());
        ensure!(open == alive, "{open} connections are open, expected one for each of {alive} live hosts");
        Ok(())
    }

    /// Closes all kept connections.
    fn hang_up(&self) -> Result<()> {
        for socket in self.sockets()? {
            let mut ssh = Command::new("ssh");
            ssh.args(["-F", "none", "-O", "exit", "-S"]).arg(&socket).arg("none");
            let status = ssh.stdin(Stdio::null()).stderr(Stdio::null()).status().context("starting ssh")?;
            ensure!(status.success() || !socket.exists(), "closing the connection {} failed", socket.display());
        }
        let began = Instant::now();
        while !self.sockets()?.is_empty() {
            ensure!(began.elapsed() < PATIENCE, "connections remain open");
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Returns the memory of the processes that keep connections, in bytes (PSS).
    fn memory_of_connections(&self) -> Result<u64> {
        let sockets = self.sockets.to_string_lossy().into_owned();
        let mut held = 0;
        for entry in fs::read_dir("/proc").context("reading /proc")?.flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if !String::from_utf8_lossy(&line).contains(&sockets) {
                continue;
            }
            // A process that has ended in the meantime counts as zero.
            let text = fs::read_to_string(entry.path().join("smaps_rollup")).unwrap_or_default();
            let pss = text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB"));
            held += pss.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) * 1024;
        }
        ensure!(held > 0, "no process holds connections");
        Ok(held)
    }
}

fn version() -> String {
    let result = Command::new("ssh").arg("-V").output();
    result.map(|output| String::from_utf8_lossy(&output.stderr).trim().to_owned()).unwrap_or_default()
}

/// All measurements.
struct SshSamples {
    first: CycleSample,
    cold: Vec<CycleSample>,
    living: Vec<CycleSample>,
    reused: Vec<CycleSample>,
    connections: usize,
    memory: u64,
}

fn figures(samples: &SshSamples, inputs: &Value) -> Vec<Figure> {
    let of = |cycles: &[CycleSample], part: fn(&CycleSample) -> f64| cycles.iter().map(part).collect::<Vec<f64>>();
    let figure = |name: &str, value: f64, unit, note: String| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note,
    };
    let among = |name: &str, values: &[f64], unit, note: &str| {
        figure(name, median(values), unit, format!("{note}, {}", spread(values)))
    };
    let wall = |cycles: &[CycleSample]| of(cycles, |cycle| cycle.wall.as_secs_f64());
    let (cold, living, reused) = (wall(&samples.cold), wall(&samples.living), wall(&samples.reused));
    let added: Vec<f64> = cold.iter().zip(&living).map(|(all, living)| all - living).collect();
    let all: Vec<CycleSample> = samples.cold.iter().chain(&samples.reused).copied().collect();
    let cpu = |cycle: &CycleSample| (cycle.own + cycle.programs).as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    let connections = samples.connections as f64;
    vec![
        among("wall_s", &cold, "s", "doctor serve --cycles 1, all connections new"),
        among("kept_wall_s", &reused, "s", "the same with the connections of the previous cycle"),
        among("dead_add_s", &added, "s", "wall_s less the same cycle without the dead hosts, in pairs"),
        figure(
            "first_wall_s",
            samples.first.wall.as_secs_f64(),
            "s",
            "once: doctor-node installed on every host".to_owned(),
        ),
        among(
            "cpu_s",
            &of(&samples.cold, cpu),
            "s",
            "of wall_s: the service and the ssh it waited for, without sshd and the ssh that hold connections",
        ),
        among(
            "rss_anon_mb",
            &of(&all, |cycle| cycle.peak_rss_anon as f64 / MEGABYTE),
            "MB",
            "peak RssAnon of doctor serve, in 10^6 bytes",
        ),
        among(
            "rss_mb",
            &of(&all, |cycle| cycle.peak_rss as f64 / MEGABYTE),
            "MB",
            "VmHWM of doctor serve, in 10^6 bytes",
        ),
        figure("connections", connections, "connections", "open after a cycle, one per live host".to_owned()),
        figure(
            "connections_mb",
            samples.memory as f64 / MEGABYTE,
            "MB",
            "Pss of the ssh processes that hold them".to_owned(),
        ),
    ]
}
