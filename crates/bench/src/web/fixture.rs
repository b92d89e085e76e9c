//! A simulated cluster and its controller, each in its own process.

use std::{
    fs::{self, File},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use super::reader::Reader;
use crate::process::{MemoryWatch, Running};

/// The limit for the first cycle on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// The simulation's speed-up: a cycle every five seconds, and a run in half a minute.
const SPEED: &str = "60";

pub(super) struct WebFixture {
    address: SocketAddr,
    controller: Running,
    memory: MemoryWatch,
    _cluster: Running,
    _folder: TempDir,
}

impl WebFixture {
    pub(super) fn new(program: &Path, nodes: usize) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a temporary folder")?;
        fs::create_dir(folder.path().join("data")).context("creating the shared directory")?;
        let address = free_address()?;
        let settings = format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"5m\"\nlease = \"2d\"\n\
             [web]\nlisten = \"{address}\"\n[backend.sim]\nsocket = \"sim.sock\"\n"
        );
        let policy = "version = 1\n[limits]\njobs = 500\nper_share = 500\n[tests.gpu-health]\nenabled = false\n";
        for (name, text) in [("doctor.toml", settings.as_str()), ("policy.toml", policy)] {
            fs::write(folder.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        let start = |log: &str, args: &[&str]| {
            let log = File::create(folder.path().join(log)).context("creating a log")?;
            let mut command = Command::new(program);
            command.args(args).current_dir(folder.path()).env_clear().env("PATH", "/usr/bin:/bin");
            Running::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
        };
        let count = nodes.to_string();
        let cluster = start(
            "cluster.log",
            &["sim", "serve", "--socket", "sim.sock", "--nodes", &count, "--speed", SPEED, "--data", "data"],
        )?;
        let controller = start("controller.log", &["--config", "doctor.toml", "serve"])?;
        let memory = controller.watch_memory("RssAnon");
        let mut stage = Self { address, controller, memory, _cluster: cluster, _folder: folder };
        stage.wait()?;
        Ok(stage)
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until results come in.
    fn wait(&mut self) -> Result<()> {
        let began = Instant::now();
        while self.results().unwrap_or(0) == 0 {
            if let Err(error) = self.controller.check() {
                let log = fs::read_to_string(self._folder.path().join("controller.log")).unwrap_or_default();
                bail!("{error}: {log}");
            }
            ensure!(began.elapsed() < PATIENCE, "no results arrive");
            thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    fn get(&self, path: &str) -> Result<Value> {
        let answer = Reader::new(self.address, 0).get(path, false)?;
        serde_json::from_slice(&answer.body).with_context(|| format!("reading {path}"))
    }

    /// Returns the number of tested nodes, summed over all tests.
    fn results(&self) -> Result<u64> {
        let rows = self.get("/coverage")?;
        let tested = |row: &Value| {
            ["pass", "fail", "inconclusive"].map(|key| row[key].as_u64().unwrap_or(0)).iter().sum::<u64>()
        };
        Ok(rows.as_array().context("coverage is a list")?.iter().map(tested).sum())
    }

    /// Verifies that every node is reported. Returns the number of results.
    pub(super) fn verify_nodes(&self, nodes: usize) -> Result<u64> {
        let map = self.get("/map")?;
        let rows = map["nodes"].as_array().context("the map has nodes")?;
        ensure!(rows.len() == nodes, "the map has {} nodes, expected {nodes}", rows.len());
        let total = self.get("/status")?["nodes"]["total"].as_u64();
        ensure!(total == u64::try_from(nodes).ok(), "the status counts {total:?} nodes");
        self.results()
    }

    /// Returns the size of the map, plain and with gzip.
    pub(super) fn map_bytes(&self) -> Result<(usize, usize)> {
        let plain = Reader::new(self.address, 0).get("/map", false)?.body.len();
        Ok((plain, Reader::new(self.address, 0).get("/map", true)?.body.len()))
    }

    pub(super) fn peak_rss_anon(&self) -> u64 {
        self.memory.peak()
    }

    pub(super) fn peak_rss(&self) -> Result<u64> {
        self.controller.peak_rss()
    }
}

/// Returns a free address. If another process takes the port, the controller fails to start, which is reported.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("choosing a port")?;
    listener.local_addr().context("choosing a port")
}
