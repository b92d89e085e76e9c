//! Runs the service for one cycle in its own process and measures it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

/// The limit for one cycle on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// The sampling interval of peak memory, which is gone when the process ends.
const PAUSE: Duration = Duration::from_millis(2);

/// The cost of one cycle, from the start of the program to its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CycleSample {
    pub(crate) wall: Duration,
    /// CPU time of the service itself.
    pub(crate) own: Duration,
    /// CPU time of the programs that it started and waited for.
    pub(crate) programs: Duration,
    /// Peak anonymous memory in bytes.
    pub(crate) peak_rss_anon: u64,
    /// Peak resident memory in bytes.
    pub(crate) peak_rss: u64,
}

pub(crate) struct Service {
    program: PathBuf,
    folder: TempDir,
}

impl Service {
    /// Creates a service with its own store and this backend configuration. It only observes: it starts no jobs and
    /// marks no nodes, on which the first cycles on a large cluster would otherwise spend their time.
    pub(crate) fn new(program: &Path, backend: &str) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a folder for the service")?;
        let settings = format!("store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\n{backend}");
        for (name, text) in
            [("policy.toml", "version = 1\nmode = \"observe\"\n[limits]\njobs = 0\n"), ("doctor.toml", &settings)]
        {
            fs::write(folder.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        fs::create_dir(folder.path().join("data")).context("creating the shared directory")?;
        Ok(Self { program: program.to_owned(), folder })
    }

    /// Runs one cycle.
    pub(crate) fn run_cycle(&self) -> Result<CycleSample> {
        let log = File::create(self.folder.path().join("log")).context("creating the service's log")?;
        let mut command = self.doctor();
        command.args(["serve", "--cycles", "1"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut child = command.spawn().context("starting doctor serve")?;
        let sample = watch(child.id());
        if sample.is_err() {
            // The process may have ended already.
            let _gone = child.kill();
        }
        let ended = child.wait().context("waiting for doctor serve")?;
        ensure!(ended.success(), "doctor serve ended with {ended}: {}", self.log_tail());
        sample
    }

    /// Verifies the occupancy of each node.
    pub(crate) fn compare(&self, expected: &BTreeMap<String, &'static str>) -> Result<()> {
        let output = self.doctor().args(["--json", "nodes"]).output().context("running doctor nodes")?;
        ensure!(output.status.success(), "doctor nodes: {}", String::from_utf8_lossy(&output.stderr).trim());
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).context("reading the nodes")?;
        let named = |row: &Value| Some((row["node"].as_str()?.to_owned(), row["occupancy"].as_str()?.to_owned()));
        let seen: BTreeMap<String, String> = rows.iter().filter_map(named).collect();
        ensure!(seen.len() == expected.len(), "{} nodes, expected {}: {}", seen.len(), expected.len(), self.log_tail());
        for (name, used) in expected {
            let seen = seen.get(name).map(String::as_str);
            ensure!(seen == Some(*used), "{name} is {seen:?}, expected {used}: {}", self.log_tail());
        }
        Ok(())
    }

    fn doctor(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(self.folder.path()).env_clear().env("PATH", "/usr/bin:/bin");
        command.arg("--config").arg(self.folder.path().join("doctor.toml"));
        command
    }

    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }
}

/// Samples a process until it ends. The caller must not reap it before, because that discards its counters.
fn watch(pid: u32) -> Result<CycleSample> {
    let began = Instant::now();
    let (mut most_anonymous, mut most_resident) = (0, 0);
    loop {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let bytes = |what: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
            line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        most_anonymous = bytes("RssAnon").max(most_anonymous);
        most_resident = bytes("VmHWM").max(most_resident);
        let path = format!("/proc/{pid}/stat");
        let stat = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
        if fields.first() == Some(&"Z") {
            let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
            let (Some(user), Some(system), Some(their_user), Some(their_system)) =
                (ticks(11), ticks(12), ticks(13), ticks(14))
            else {
                bail!("{path} has no CPU times")
            };
            let time = |ticks| Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1));
            return Ok(CycleSample {
                wall: began.elapsed(),
                own: time(user + system),
                programs: time(their_user + their_system),
                peak_rss_anon: most_anonymous,
                peak_rss: most_resident,
            });
        }
        ensure!(began.elapsed() < PATIENCE, "a cycle does not end");
        thread::sleep(PAUSE);
    }
}
