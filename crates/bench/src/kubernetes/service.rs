//! The service in its own process, and the node list that it reports.

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

use super::{
    cluster::Cluster,
    counting_proxy::CountingProxy,
    population::{NODES, State, node_name},
};
use crate::{process::Running, shipped};

/// The limit for the first snapshot of the whole cluster on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);

/// Whether validation jobs are started. Nothing runs them here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Validation {
    /// As many at a time as the default policy allows.
    Default,
    None,
}

pub(super) struct Service {
    pub(super) running: Running,
    pub(super) proxy: CountingProxy,
    program: PathBuf,
    folder: TempDir,
}

impl Service {
    pub(super) fn start(cluster: &Cluster, validation: Validation) -> Result<Self> {
        let program = shipped::doctor()?;
        let folder = tempfile::tempdir().context("creating a folder for the service")?;
        let wire = CountingProxy::start(cluster.port()?)?;
        let kubeconfig = cluster.kubeconfig(wire.port(), folder.path())?;
        let jobs = if validation == Validation::None { "[limits]\njobs = 0\n" } else { "" };
        let settings = format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\n\
             [backend.kubernetes]\nkubeconfig = \"{}\"\n",
            kubeconfig.display()
        );
        for (name, text) in [("policy.toml", format!("version = 1\n{jobs}")), ("doctor.toml", settings)] {
            fs::write(folder.path().join(name), text).with_context(|| format!("writing {name}"))?;
        }
        fs::create_dir(folder.path().join("data")).context("creating the shared directory")?;
        let log = File::create(folder.path().join("log")).context("creating the service's log")?;
        let mut command = doctor(&program, folder.path());
        command.arg("serve").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(Self { running: Running::start(&mut command)?, proxy: wire, program, folder })
    }

    /// Waits until every node is reported with the expected occupancy.
    pub(super) fn wait_until_seen(&mut self, expected: &BTreeMap<String, &'static str>) -> Result<()> {
        let began = Instant::now();
        loop {
            self.running.check().with_context(|| self.log_tail())?;
            let wrong = match self.nodes() {
                Ok(nodes) => match difference(&nodes, expected) {
                    None => return Ok(()),
                    Some(wrong) => wrong,
                },
                // Before the first cycle there is no store and no snapshot.
                Err(why) => format!("{why:#}"),
            };
            if began.elapsed() > PATIENCE {
                bail!("the nodes of the service differ: {wrong}; its log: {}", self.log_tail());
            }
            thread::sleep(PAUSE);
        }
    }

    /// Ends the service and compares the snapshot of its last cycle.
    pub(super) fn stop_and_compare(self, expected: &BTreeMap<String, &'static str>) -> Result<()> {
        let Self { running, folder, program, .. } = self;
        let ended = running.stop()?;
        ensure!(ended.success(), "the service ended with {ended}: {}", last_log_lines(folder.path()));
        match difference(&nodes(&program, folder.path())?, expected) {
            None => Ok(()),
            Some(wrong) => bail!("the nodes of the service differ: {wrong}"),
        }
    }

    pub(super) fn log_tail(&self) -> String {
        last_log_lines(self.folder.path())
    }

    fn nodes(&self) -> Result<BTreeMap<String, String>> {
        nodes(&self.program, self.folder.path())
    }
}

/// Returns the occupancy of each node as `doctor nodes` prints it.
fn nodes(program: &Path, folder: &Path) -> Result<BTreeMap<String, String>> {
    let output = doctor(program, folder).args(["--json", "nodes"]).output().context("running doctor nodes")?;
    ensure!(output.status.success(), "doctor nodes: {}", String::from_utf8_lossy(&output.stderr).trim());
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).context("reading the nodes")?;
    let named = |row: &Value| Some((row["node"].as_str()?.to_owned(), row["occupancy"].as_str()?.to_owned()));
    Ok(rows.iter().filter_map(named).collect())
}

fn doctor(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder).env_clear().arg("--config").arg(folder.join("doctor.toml"));
    command
}

fn last_log_lines(folder: &Path) -> String {
    let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// Returns the expected occupancy of each node before any change.
pub(super) fn as_made() -> BTreeMap<String, &'static str> {
    (0..NODES).map(|node| (node_name(node), State::of(node).seen_as())).collect()
}

/// Returns how many nodes differ, with an example.
fn difference(seen: &BTreeMap<String, String>, expected: &BTreeMap<String, &'static str>) -> Option<String> {
    if seen.len() != expected.len() {
        return Some(format!("{} nodes of {}", seen.len(), expected.len()));
    }
    let is_other = |(name, used): &(&String, &&'static str)| seen.get(*name).is_none_or(|seen| seen != **used);
    let others: Vec<_> = expected.iter().filter(is_other).collect();
    let (name, used) = others.first()?;
    Some(format!("{} nodes differ, such as {name}: {:?}, expected {used}", others.len(), seen.get(*name)))
}
