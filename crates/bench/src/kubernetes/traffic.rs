//! M3: the traffic between service and API server in ten minutes, against listing all nodes and pods once, as a program
//! without watches would do in every cycle.
//!
//! Ten minutes are assembled from parts, each measured at a forwarder: an idle period (watches are renewed, bookmarks
//! arrive), scaled to ten minutes, and the changes of ten minutes, played in one go. Kinds of change are separate,
//! because their costs differ:
//!
//! - `percent_of_list`: one in a hundred pods changes once: it ends.
//! - `…_nodes_too`: and one in a hundred nodes: it is cordoned or becomes not ready.
//! - `…_turnover`: one in a hundred pods is replaced, with all events of both: end; creation, binding, image pull,
//!   running.
//! - `…_heartbeats`: one in a hundred pods changes once, and every kubelet reports its node every five minutes although
//!   nothing changed, a cost of every client that watches nodes.
//!
//! No validation jobs are started: they add a list of a few jobs per cycle, which depends only on their number.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    cluster::{Cluster, Part},
    counting_proxy::{CountingProxy, Traffic},
    population::{self, NODES, PODS, Pod, State, node_name, training},
    service::{Service, Validation, as_made},
};
use crate::{Measured, figure::Figure};

const TEN_MINUTES: f64 = 600.0;
/// Watches are renewed every twenty seconds, so this contains one renewal of each kind.
const IDLE: Duration = Duration::from_millis(20_500);
/// Without traffic for this long, all events are delivered and two cycles have processed them.
const QUIET: Duration = Duration::from_millis(2_500);
/// At its first start the service writes every node once.
const PATIENCE: Duration = Duration::from_secs(120);
/// One in a hundred.
const CHANGED_PODS: usize = PODS / 100;
const CHANGED_NODES: usize = NODES / 100;
/// Of every node in ten minutes.
const HEARTBEATS: f64 = 2.0;

pub(crate) fn run() -> Result<Measured> {
    let cluster = match Cluster::start()? {
        Ok(cluster) => cluster,
        Err(why) => return Ok(Measured::NotAvailable(why)),
    };
    let mut service = Service::start(&cluster, Validation::None)?;
    eprintln!("  checking: the service sees every node as created");
    service.wait_until_seen(&as_made())?;
    let first = wait_until_quiet(&service.proxy)?;

    eprintln!("  measuring: no changes");
    let (began, writes) = (Instant::now(), cluster.node_writes()?);
    let list = cluster.list("/api/v1/nodes")?.len() + cluster.list("/api/v1/pods")?.len();
    thread::sleep(IDLE.saturating_sub(began.elapsed()));
    let (idle, idle_s) = (service.proxy.traffic().since(first), began.elapsed().as_secs_f64());
    let idle_writes = cluster.node_writes()? - writes;

    let change = Change::chosen();
    let mut measure = |what: &str, play: &dyn Fn() -> Result<()>| -> Result<Traffic> {
        eprintln!("  measuring: {what}");
        service.running.check()?;
        let before = service.proxy.traffic();
        play()?;
        Ok(wait_until_quiet(&service.proxy)?.since(before))
    };
    let ended = measure("one in a hundred pods ends", &|| change.end(&cluster))?;
    let changed = measure("one in a hundred nodes changes", &|| change.nodes(&cluster))?;
    let came = measure("as many pods are created as have ended", &|| change.create_pods(&cluster))?;
    let beats = measure("one in a hundred kubelets reports its node", &|| change.heartbeats(&cluster))?;
    eprintln!("  checking: the service sees every node as changed");
    service.stop_and_compare(&change.seen_as())?;
    ensure!(idle.connections == 0 && ended.connections == 0, "watches were restarted: {idle:?}, {ended:?}");

    let idle_bytes = idle.bytes() as f64 / idle_s * TEN_MINUTES;
    let beat = beats.bytes() as f64 / CHANGED_NODES as f64;
    let percent = |bytes: f64| bytes * 100.0 / list as f64;
    let inputs = json!({
        "nodes": NODES, "pods": PODS, "list_bytes": list, "first_look_bytes": first.bytes(), "idle_bytes_10_min": idle_bytes.round(),
        "changed_pods": CHANGED_PODS, "ended_bytes": ended.bytes(), "came_bytes": came.bytes(),
        "changed_nodes": CHANGED_NODES, "changed_nodes_bytes": changed.bytes(),
        "heartbeat_bytes": beat.round(), "idle_s": idle_s, "cycle_s": 1, "jobs": 0,
    });
    let figure = |name: &str, value, unit, note: &str| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note: note.to_owned(),
    };
    let churn = idle_bytes + ended.bytes() as f64;
    Ok(Measured::Figures(vec![
        figure(
            "percent_of_list",
            percent(churn),
            "%",
            "TLS bytes both ways in ten minutes, with 1 % of pods changing once, relative to a JSON list of both",
        ),
        figure(
            "idle_writes_per_s",
            idle_writes as f64 / idle_s,
            "1/s",
            "writes to nodes without changes, as counted by the API server",
        ),
        figure(
            "percent_of_list_nodes_too",
            percent(churn + changed.bytes() as f64),
            "%",
            "also with 1 % of nodes changing once",
        ),
        figure(
            "percent_of_list_turnover",
            percent(churn + came.bytes() as f64),
            "%",
            "with 1 % of pods replaced: one event for the old pod, four for the new one",
        ),
        figure(
            "percent_of_list_heartbeats",
            percent(churn + beat * HEARTBEATS * NODES as f64),
            "%",
            "with 1 % of pods changing once, and every kubelet reporting its node twice, by the cost of one report",
        ),
    ]))
}

/// Waits until there is no more traffic.
fn wait_until_quiet(wire: &CountingProxy) -> Result<Traffic> {
    let began = Instant::now();
    let (mut before, mut since) = (wire.traffic(), Instant::now());
    while since.elapsed() < QUIET {
        ensure!(began.elapsed() < PATIENCE, "traffic between the service and the API server does not stop");
        thread::sleep(QUIET / 50);
        let now = wire.traffic();
        if now != before {
            (before, since) = (now, Instant::now());
        }
    }
    Ok(before)
}

/// The nodes that change, and how.
struct Change {
    /// Nodes whose pods end.
    ended: Vec<usize>,
    cordoned: Vec<usize>,
    ill: Vec<usize>,
    /// Nodes that get new pods: half of those whose pods ended, and as many that were free.
    taken: Vec<usize>,
    /// Nodes without a change, which only send heartbeats.
    reporting: Vec<usize>,
}

impl Change {
    fn chosen() -> Self {
        let of = |state: State| (0..NODES).filter(move |node| State::of(*node) == state);
        let (taken, idle): (Vec<usize>, Vec<usize>) = (of(State::Taken).collect(), of(State::Idle).collect());
        let ended = taken[..CHANGED_PODS].to_vec();
        let (half, quarter) = (CHANGED_PODS / 2, CHANGED_NODES / 2);
        let (cordoned, ill) = (idle[..quarter].to_vec(), idle[quarter..CHANGED_NODES].to_vec());
        let new = ended[..half].iter().chain(&idle[CHANGED_NODES..][..half]).copied().collect();
        let reporting = taken[CHANGED_PODS..][..CHANGED_NODES].to_vec();
        Self { ended, cordoned, ill, taken: new, reporting }
    }

    fn end(&self, cluster: &Cluster) -> Result<()> {
        let pods: Vec<Pod> = self.ended.iter().map(|node| training(*node, "train")).collect();
        cluster.play(&pods, &[Part::Ended])
    }

    fn nodes(&self, cluster: &Cluster) -> Result<()> {
        cluster.patch_nodes(&names(&self.cordoned), 1, |_| json!({ "spec": { "unschedulable": true } }))?;
        cluster.patch_node_status(&names(&self.ill), |_| report("False", "2026-11-15T08:10:00Z"))
    }

    fn create_pods(&self, cluster: &Cluster) -> Result<()> {
        let pods: Vec<Pod> = self.taken.iter().map(|node| training(*node, "next")).collect();
        cluster.play(&pods, &[Part::Made, Part::Bound, Part::Creating, Part::Running])
    }

    fn heartbeats(&self, cluster: &Cluster) -> Result<()> {
        cluster.patch_node_status(&names(&self.reporting), |_| report("True", "2026-11-15T08:15:00Z"))
    }

    fn seen_as(&self) -> BTreeMap<String, &'static str> {
        let mut seen = as_made();
        for (nodes, used) in
            [(&self.ended, "free"), (&self.cordoned, "busy"), (&self.ill, "unknown"), (&self.taken, "busy")]
        {
            seen.extend(nodes.iter().map(|node| (node_name(*node), used)));
        }
        seen
    }
}

fn names(nodes: &[usize]) -> Vec<String> {
    nodes.iter().map(|node| node_name(*node)).collect()
}

/// Returns a kubelet's status update: all conditions, each with a heartbeat time.
fn report(ready: &str, at: &str) -> Value {
    let mut node = population::node(1);
    let mut conditions = node["status"]["conditions"].take();
    for condition in conditions.as_array_mut().into_iter().flatten() {
        condition["lastHeartbeatTime"] = json!(at);
        if condition["type"] == "Ready" {
            condition["status"] = json!(ready);
        }
    }
    json!({ "status": { "conditions": conditions } })
}
