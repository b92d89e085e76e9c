//! A simulated cluster in which nothing happens by itself, and its controller, each in its own process.

use std::{
    collections::HashMap,
    fs::{self, File},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use doctor_checks::{Catalogue, document::RunKey};
use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    policy::Policy,
    time::Timestamp,
};
use doctor_store::{
    Store, StoreUrl,
    records::{HistoryFilter, StoredRun},
};
use doctor_testbed::certificates::{Authority, Validity};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{
    messages::{FAILING_CHECK, Messages, Template},
    senders::{Endpoint, wait_until},
};
use crate::process::Running;

/// The limit for the first cycles on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

pub(super) struct Cluster {
    endpoint: Endpoint,
    /// The store, as another process sees it.
    store: Store,
    controller: Running,
    simulation: Running,
    folder: TempDir,
}

impl Cluster {
    pub(super) fn start(program: &Path, url: &StoreUrl, nodes: usize, template: &Template) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a temporary folder")?;
        fs::create_dir(folder.path().join("data")).context("creating the shared directory")?;
        let address = free_address()?;
        let store = Store::open(url).context("creating the store")?;
        let store_text = match url {
            StoreUrl::Sqlite(path) => format!("sqlite:{}", path.display()),
            StoreUrl::Postgres(text) => text.clone(),
        };
        let settings = format!(
            "store = \"{store_text}\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"60s\"\nlease = \"10m\"\n\
             [agents]\nlisten = \"{address}\"\ntls = {{ certificate = \"agents.crt\", key = \"agents.key\" }}\n[backend.sim]\nsocket = \"sim.sock\"\nshipped_tests = true\n"
        );
        // No job starts by itself, so no run ends before its document is posted.
        let world = format!(
            "agents = false\nrepairs = false\ntickets = false\nshipped_tests = true\ncarry_documents = false\n\
             [[pools]]\nname = \"gpu\"\nnodes = {nodes}\nprefix = \"node\"\nsku = \"hgx-h100\"\n\
             [assumptions]\nhard_per_node_day = 0.0\ngray_per_node_day = 0.0\nsdc_per_node_day = 0.0\n\
             utilisation = 0.0\nstart_delay = \"1d\"\n"
        );
        // On a loopback address the endpoint speaks TLS only with a certificate of the site.
        let authority = Authority::new();
        let issued = authority.issue(&[&address.ip().to_string()], Validity::Now);
        let files = [
            ("doctor.toml", settings),
            ("policy.toml", policy(template, nodes)),
            ("world.toml", world),
            ("agents.crt", issued.certificate),
            ("agents.key", issued.key),
        ];
        for (name, text) in files {
            fs::write(folder.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        let start = |log: &str, args: &[&str]| {
            let log = File::create(folder.path().join(log)).context("creating a log")?;
            let mut command = Command::new(program);
            command.args(args).current_dir(folder.path()).env_clear().env("PATH", "/usr/bin:/bin");
            Running::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
        };
        let simulation =
            start("cluster.log", &["sim", "serve", "--socket", "sim.sock", "--world", "world.toml", "--speed", "1"])?;
        let controller = start("controller.log", &["--config", "doctor.toml", "serve"])?;
        let mut cluster =
            Self { endpoint: Endpoint::new(address, &authority.certificate)?, store, controller, simulation, folder };
        cluster.wait_for_nodes(nodes)?;
        Ok(cluster)
    }

    fn wait_for_nodes(&mut self, nodes: usize) -> Result<()> {
        let began = Instant::now();
        while self.store.active_runs()?.is_empty() {
            if let Err(error) = self.controller.check() {
                bail!("{error}: {}", self.log());
            }
            ensure!(began.elapsed() < PATIENCE, "no run is planned on {nodes} nodes: {}", self.log());
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("controller.log")).unwrap_or_default()
    }

    pub(super) const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(super) fn controller(&self) -> u32 {
        self.controller.pid()
    }

    /// Enrolls an agent on every node, as `doctor agent enroll` does.
    pub(super) fn enroll(&self) -> Result<Vec<(NodeName, RunKey)>> {
        let mut agents = Vec::new();
        for (index, node) in self.store.load_nodes()?.into_keys().enumerate() {
            let mut secret = [3; 32];
            secret[..8].copy_from_slice(&(index as u64).to_le_bytes());
            let key = RunKey::new(secret);
            self.store.enroll_agent(&node, &key, "bench", "measuring", Timestamp::from_secs(1_793_491_200))?;
            agents.push((node, key));
        }
        Ok(agents)
    }

    /// Returns runs that the controller has planned on one node each, at most this many.
    pub(super) fn planned_runs(&self, most: usize) -> Result<Vec<StoredRun>> {
        let runs = self.store.active_runs()?.into_iter().filter(|stored| stored.run.nodes.len() == 1);
        Ok(runs.take(most).collect())
    }

    pub(super) fn is_queue_empty(&self) -> Result<bool> {
        Ok(self.store.queued_count()? == 0)
    }

    pub(super) fn wait_until_queue_is_empty(&self) -> Result<()> {
        wait_until(|| self.is_queue_empty())
    }

    /// Stops the cluster from answering until the result is dropped.
    pub(super) fn freeze(&self) -> Result<Frozen> {
        let pid = Pid::from_raw(self.simulation.pid().cast_signed()).context("a process has an id")?;
        kill_process(pid, Signal::STOP).context("stopping the cluster")?;
        Ok(Frozen(pid))
    }

    pub(super) fn verify(&self, messages: &Messages) -> Result<()> {
        let rows = self.store.history(&HistoryFilter::default())?;
        let mut by_run: HashMap<RunId, usize> = HashMap::new();
        for row in rows.iter().filter_map(|row| row.run) {
            *by_run.entry(row).or_default() += 1;
        }
        for run in &messages.sent_runs {
            let record = self.store.run(*run)?.context("a run is missing")?;
            let (found, expected) = (by_run.get(run).copied().unwrap_or(0), record.run.tests.len());
            ensure!(found == expected, "{run} has {found} results in history, expected {expected}");
            ensure!(!self.store.active_runs()?.iter().any(|stored| stored.run.id == *run), "{run} has not ended");
        }
        let check = TestId::new(FAILING_CHECK)?;
        for (node, (number, is_failing)) in &messages.last_reports {
            let latest = self.store.latest_of(node)?;
            let row = latest.iter().find(|row| row.test == check).with_context(|| format!("{node} has no {check}"))?;
            let expected = if *is_failing { Verdict::Fail } else { Verdict::Pass };
            ensure!(row.verdict == expected, "{check} on {node} is {} after report {number}", row.verdict);
            ensure!(latest.len() >= messages.checks(), "{node} has {} results", latest.len());
        }
        let verified = self.store.verify()?;
        ensure!(verified.is_consistent(), "the store is inconsistent: {}", verified.problems.join("; "));
        Ok(())
    }
}

/// A cluster that does not answer.
pub(super) struct Frozen(Pid);

impl Drop for Frozen {
    fn drop(&mut self) {
        // The process is a child that was not waited for, so the id is still its own.
        let _continued = kill_process(self.0, Signal::CONT);
    }
}

/// Runs only what agents run, too, and everywhere at once.
fn policy(template: &Template, nodes: usize) -> String {
    let mut text = format!("version = 1\nmode = \"observe\"\n[limits]\njobs = {nodes}\nper_share = {nodes}\n");
    let policy = Policy::built_in();
    for test in Catalogue::with_site_checks(&policy).tests(&policy) {
        if !template.has(&test.id) {
            text.push_str(&format!("[tests.{}]\nenabled = false\n", test.id));
        }
    }
    text
}

/// Returns a free address. If another process takes the port, the controller fails to start, which is reported.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("choosing a port")?;
    listener.local_addr().context("choosing a port")
}
