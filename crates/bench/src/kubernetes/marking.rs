//! M14: marking 750 nodes in one cycle, against a bare loop of patches in the same run on the same API server.
//!
//! Our path is that of every cycle after planning: the intents of all marks are committed to the store; then, for each
//! node, the executor checks the lease, patches the node from the watch cache and records the step, with as many
//! workers as the service has. Only the plan is generated here, because the circuit breaker exists to stop 750 marks.
//! Two bare loops are measured beside it: one patch at a time, and as many at a time as our workers.
//!
//! Afterwards every node to be marked has exactly our mark, and nothing else has changed on any node.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use doctor_backend::{
    Effect,
    clock::{Clock, SystemClock},
};
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig};
use doctor_checks::Catalogue;
use doctor_core::{
    case::{Case, CaseState, RepairStep, StepKind, StepState},
    finding::Severity,
    ids::{HardwareId, IdSource, NodeName},
    node::MarkKind,
    plan::Action,
    policy::Policy,
    profile::Profiles,
    reason::WithReason,
    snapshot::Snapshot,
    time::Span,
};
use doctor_engine::{
    cluster_state::{self, ObserveError},
    execute::Executor,
    settings::Settings,
};
use doctor_store::{Lease, Store, StoreUrl, records::CycleIntent};
use serde_json::{Value, json};

use super::{
    cluster::Cluster,
    population::{NODES, PODS, State, node_name},
    service::as_made,
};
use crate::{
    Measured,
    figure::Figure,
    stopwatch::{median, spread},
};

/// Nodes that are marked in one cycle.
const MARKED: usize = 750;
/// Each round marks different nodes.
const ROUNDS: usize = 3;
/// The default number of workers of the service.
const WORKERS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) fn run() -> Result<Measured> {
    let cluster = match Cluster::start()? {
        Ok(cluster) => cluster,
        Err(why) => return Ok(Measured::NotAvailable(why)),
    };
    let marker = Marker::new(&cluster)?;
    eprintln!("  checking: the backend sees every node as created");
    let before = cluster.nodes()?;
    let mut snapshot = marker.take_snapshot()?;
    compare(&snapshot)?;

    let usable: Vec<usize> = (0..NODES).filter(|node| matches!(State::of(*node), State::Taken | State::Idle)).collect();
    let (baseline, ours) = usable.split_at(MARKED);
    let baseline: Vec<String> = baseline.iter().map(|node| node_name(*node)).collect();
    let (mut alone, mut together, mut marked) = (Vec::new(), Vec::new(), Vec::new());
    for (round, nodes) in ours.chunks_exact(MARKED).take(ROUNDS).enumerate() {
        eprintln!("  measuring: round {} of {ROUNDS}", round + 1);
        // Each variant comes first once.
        for turn in 0..3 {
            let value = format!("{round}-{turn}");
            match (round + turn) % 3 {
                0 => alone.push(rate(|| cluster.patch_nodes(&baseline, 1, |_| bare_patch(&value)))?),
                1 => together.push(rate(|| cluster.patch_nodes(&baseline, WORKERS, |_| bare_patch(&value)))?),
                _ => marked.push(marker.mark(nodes, &snapshot)?),
            }
        }
        snapshot = marker.take_snapshot()?;
    }
    eprintln!("  checking: every node has exactly its mark");
    let ours: Vec<String> = ours[..ROUNDS * MARKED].iter().map(|node| node_name(*node)).collect();
    prove(&before, &cluster.nodes()?, &ours, &baseline)?;
    marker.verify_marks(&snapshot, &ours)?;

    let inputs = json!({
        "nodes": NODES, "pods": PODS, "marked": MARKED, "rounds": ROUNDS, "workers": WORKERS, "store": "SQLite",
        "bare_loop_per_s": median(&alone), "bare_loop_of_8_per_s": median(&together),
    });
    let figure = |name: &str, value, unit, note: String| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note,
    };
    let ratios = |to: &[f64]| -> Vec<f64> { marked.iter().zip(to).map(|(ours, baseline)| ours / baseline).collect() };
    let (to_loop, to_eight) = (ratios(&alone), ratios(&together));
    let how = "commit of the intents, lease, patch and record: rate of marks by the rate of a loop that only patches, more is better";
    Ok(Measured::Figures(vec![
        figure("ratio_to_bare_loop", median(&to_loop), "", format!("{how}, one at a time; {}", spread(&to_loop))),
        figure("nodes_per_s", median(&marked), "1/s", format!("from plan to record; {}", spread(&marked))),
        figure(
            "ratio_to_bare_loop_of_8",
            median(&to_eight),
            "",
            format!("{how}, eight at a time; {}", spread(&to_eight)),
        ),
    ]))
}

/// Returns patches per second.
fn rate(patch: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    patch()?;
    Ok(MARKED as f64 / began.elapsed().as_secs_f64())
}

/// Returns a patch that always changes the node, because the value differs from the previous one.
fn bare_patch(value: &str) -> Value {
    json!({ "spec": { "taints": [{ "key": "bench.example/bare", "value": value, "effect": "PreferNoSchedule" }] } })
}

/// The components of the service, in this process.
struct Marker {
    backend: KubernetesBackend,
    store: Store,
    lease: Lease,
    settings: Settings,
    /// Kept until the store is closed.
    _folder: tempfile::TempDir,
}

impl Marker {
    fn new(cluster: &Cluster) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a folder for the store")?;
        let kubeconfig = Some(cluster.kubeconfig(cluster.port()?, folder.path())?);
        let backend = KubernetesBackend::open(KubernetesConfig { kubeconfig, ..KubernetesConfig::default() })?;
        let store = Store::open(&StoreUrl::Sqlite(folder.path().join("doctor.db")))?;
        let lease = store.acquire("bench", SystemClock.now(), Span::hours(1))?;
        let settings = Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default())?;
        Ok(Self { backend, store, lease, settings, _folder: folder })
    }

    /// Takes a snapshot. On a busy machine the first lists take longer than the backend lets a cycle wait, hence the retries.
    fn take_snapshot(&self) -> Result<Snapshot> {
        let began = Instant::now();
        loop {
            match cluster_state::observe_now(&self.store, &self.backend, &self.settings, SystemClock.now()) {
                Err(ObserveError::Backend(error))
                    if error.effect == Effect::NotAppliedRetry && began.elapsed() < PATIENCE => {}
                seen => return Ok(seen?),
            }
        }
    }

    /// Returns marks per second.
    fn mark(&self, nodes: &[usize], snapshot: &Snapshot) -> Result<f64> {
        let actions = plan(nodes)?;
        let began = Instant::now();
        let intent = CycleIntent {
            at: SystemClock.now(),
            actions: &actions,
            keys: &BTreeMap::new(),
            attributed_findings: &[],
            changed_reasons: &[],
            policy_version: self.settings.policy.version,
            retry: &self.settings.policy.retry,
            notifications: &[],
        };
        self.store.commit(&self.lease, &intent)?;
        let executor = Executor {
            backend: &self.backend,
            store: &self.store,
            clock: &SystemClock,
            lease: &self.lease,
            progress: &doctor_backend::progress::Progress::default(),
            settings: &self.settings,
            share: None,
            results: None,
            workers: WORKERS,
        };
        let errors = executor.execute(&actions, &BTreeMap::new(), snapshot)?;
        let rate = nodes.len() as f64 / began.elapsed().as_secs_f64();
        ensure!(errors.is_empty(), "{} nodes were not marked: {}", errors.len(), errors[0]);
        Ok(rate)
    }

    /// Verifies that the store has every step as done, and that the backend sees our mark on exactly these nodes.
    fn verify_marks(&self, snapshot: &Snapshot, marked: &[String]) -> Result<()> {
        let bears = snapshot.nodes.iter().filter(|record| record.node.marks.has_ours(MarkKind::Unhealthy));
        let bears: BTreeSet<&str> = bears.map(|record| record.node.name.as_str()).collect();
        let expected: BTreeSet<&str> = marked.iter().map(String::as_str).collect();
        ensure!(bears == expected, "{} nodes have our mark, expected {}", bears.len(), expected.len());
        let done = |case: &&Case| case.steps.iter().all(|step| step.state == StepState::Done) && case.steps.len() == 1;
        let done: BTreeSet<&str> = snapshot.cases.iter().filter(done).map(|case| case.node.as_str()).collect();
        ensure!(done == expected, "{} marks are recorded, expected {}", done.len(), expected.len());
        Ok(())
    }
}

/// Returns a case and its first step for each node, as the planner would create them.
fn plan(nodes: &[usize]) -> Result<Vec<WithReason<Action>>> {
    let now = SystemClock.now();
    let mut ids = IdSource::new(now.millis().cast_unsigned());
    ids.set_time(now);
    let mut actions = Vec::with_capacity(2 * nodes.len());
    for number in nodes {
        let node = NodeName::new(&node_name(*number))?;
        let case = Case {
            id: ids.case(),
            hardware: HardwareId::new(&format!("machine-{number}"))?,
            node: node.clone(),
            opened: now,
            severity: Severity::Isolate,
            findings: Vec::new(),
            repair_step: RepairStep::Quarantine,
            steps: Vec::new(),
            state: CaseState::Open,
            boot_id: None,
            advice: None,
            job_failures: Vec::new(),
            request: None,
        };
        let step = Action::Step { case: case.id, node, step: StepKind::Mark, op: ids.op(), attempts: 1 };
        actions.push(WithReason::new(Action::OpenCase(case), "bench", "750 at once"));
        actions.push(WithReason::new(step, "case", "750 at once"));
    }
    Ok(actions)
}

/// Verifies that the backend sees every node as it was created.
fn compare(snapshot: &Snapshot) -> Result<()> {
    let name = |record: &doctor_core::snapshot::NodeRecord| match record.node.occupancy {
        doctor_core::node::Occupancy::Free => "free",
        doctor_core::node::Occupancy::Busy { .. } => "busy",
        doctor_core::node::Occupancy::Unknown { .. } => "unknown",
    };
    let seen: BTreeMap<String, &str> =
        snapshot.nodes.iter().map(|record| (record.node.name.to_string(), name(record))).collect();
    ensure!(seen == as_made(), "the backend does not see the {NODES} nodes as created");
    Ok(())
}

/// Verifies that only our mark was added to our nodes, only the loop's taint to its nodes, and nothing to the rest.
fn prove(
    before: &BTreeMap<String, Value>,
    after: &BTreeMap<String, Value>,
    ours: &[String],
    baseline: &[String],
) -> Result<()> {
    let (ours, baseline): (BTreeSet<&String>, BTreeSet<&String>) = (ours.iter().collect(), baseline.iter().collect());
    ensure!(before.keys().eq(after.keys()), "nodes were added or removed");
    for (name, now) in after {
        let mut now = now.clone();
        let mut then = before[name].clone();
        if !ours.contains(name) && !baseline.contains(name) {
            ensure!(now == then, "{name} was changed");
            continue;
        }
        let taints = |node: &mut Value| node["spec"]["taints"].take().as_array().cloned().unwrap_or_default();
        let (actual, mut expected) = (taints(&mut now), taints(&mut then));
        let metadata = now["metadata"].as_object_mut().context("a node has metadata")?;
        if ours.contains(name) {
            expected.push(json!({ "key": "cluster-doctor.io/unhealthy", "value": "true", "effect": "NoSchedule" }));
            ensure!(actual == expected, "{name} has the taints {actual:?}, expected {expected:?}");
            for (of, key) in [("labels", "status"), ("annotations", "marks"), ("annotations", "changes")] {
                let key = format!("cluster-doctor.io/{key}");
                let there = metadata[of].as_object_mut().and_then(|all| all.remove(&key));
                ensure!(there.is_some(), "{name} has no {key}");
            }
        }
        for node in [&mut now, &mut then] {
            let metadata = node["metadata"].as_object_mut().context("a node has metadata")?;
            metadata.retain(|key, _| !["resourceVersion", "managedFields"].contains(&key.as_str()));
        }
        ensure!(now == then, "{name}: more than its mark was changed: {now}, before {then}");
    }
    Ok(())
}
