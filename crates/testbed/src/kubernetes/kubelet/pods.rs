//! The lifecycle of a pod on a simulated node: running, ended, removed.
//!
//! One task watches all bound pods. Each pod of our nodes has its own task, which the watch notifies of a deletion. As
//! with a real kubelet, a deleted pod first ends, which is reported, and only then is removed: a Job's controller
//! counts the reported result.

use std::{
    collections::BTreeSet,
    sync::{
        PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use futures_util::{StreamExt as _, pin_mut};
use k8s_openapi::{
    api::core::v1::{Container, Pod},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::{ActivePods, ConstantBackoff, Exit, PodBehavior, retry};

/// The exit code of a container that ends on SIGTERM.
const TERMINATED: i32 = 143;

/// A message to a pod's task.
#[derive(Debug)]
pub(super) enum PodCommand {
    /// End the containers now.
    End(Exit),
    /// The pod is being deleted.
    Delete,
    /// The pod no longer exists.
    Gone,
}

/// Watches for pods on our nodes and starts a task for each.
pub(super) async fn run_pods<F>(client: Client, nodes: BTreeSet<String>, playing: ActivePods, play: F)
where
    F: Fn(&Pod) -> PodBehavior,
{
    let bound = watcher::Config::default().fields("spec.nodeName!=");
    let events = watcher(Api::<Pod>::all(client.clone()), bound).backoff(ConstantBackoff);
    pin_mut!(events);
    let addresses = AtomicU32::new(1);
    let ours =
        |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()).is_some_and(|n| nodes.contains(n));
    let mut listed: Option<BTreeSet<String>> = None;
    while let Some(event) = events.next().await {
        let pod = match event {
            Ok(watcher::Event::Init) => {
                listed = Some(BTreeSet::new());
                continue;
            }
            Ok(watcher::Event::InitDone) => {
                // Pods that were removed while the watch was down.
                if let Some(there) = listed.take() {
                    forget(&playing, |uid| !there.contains(uid));
                }
                continue;
            }
            Ok(watcher::Event::Delete(pod)) => {
                let deleted_uid = pod.uid();
                forget(&playing, |uid| deleted_uid.as_deref() == Some(uid));
                continue;
            }
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => pod,
            // The watch restarts by itself.
            Err(_) => continue,
        };
        if let (Some(listed), Some(uid)) = (&mut listed, pod.uid()) {
            listed.insert(uid);
        }
        if ours(&pod) {
            handle_pod(&client, &playing, &addresses, pod, &play);
        }
    }
}

/// Starts a task for a new pod, and notifies that of a known one of its deletion.
fn handle_pod(
    client: &Client,
    playing: &ActivePods,
    addresses: &AtomicU32,
    pod: Pod,
    play: &impl Fn(&Pod) -> PodBehavior,
) {
    let (Some(uid), key) = (pod.uid(), format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())) else {
        return;
    };
    let deleted = pod.metadata.deletion_timestamp.is_some();
    let mut playing = playing.lock().unwrap_or_else(PoisonError::into_inner);
    if playing.get(&key).is_none_or(|(known, _)| *known != uid) {
        let (orders, commands) = unbounded_channel();
        let play = if is_over(&pod) { None } else { Some(play(&pod)) };
        let task = PodTask { client: client.clone(), pod, uid: uid.clone(), address: address(addresses), commands };
        tokio::spawn(task.run_to_end(play));
        if let Some((_, before)) = playing.insert(key.clone(), (uid, orders)) {
            drop(before.send(PodCommand::Gone));
        }
    }
    if let Some((_, orders)) = playing.get(&key).filter(|_| deleted) {
        // A task that has ended needs no message.
        drop(orders.send(PodCommand::Delete));
    }
}

fn forget(playing: &ActivePods, is_deleted: impl Fn(&str) -> bool) {
    let mut playing = playing.lock().unwrap_or_else(PoisonError::into_inner);
    playing.retain(|_, (uid, orders)| {
        let is_deleted = is_deleted(uid);
        if is_deleted {
            drop(orders.send(PodCommand::Gone));
        }
        !is_deleted
    });
}

/// Returns an address that no other pod of this kubelet has.
fn address(counter: &AtomicU32) -> String {
    let [_, high, middle, low] = counter.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    format!("100.{}.{middle}.{low}", 64 | (high & 63))
}

/// Returns whether a pod has ended already, for example before the kubelet was started.
fn is_over(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"))
}

struct PodTask {
    client: Client,
    pod: Pod,
    uid: String,
    address: String,
    commands: UnboundedReceiver<PodCommand>,
}

/// Why a pod's containers stop.
enum PodStop {
    Ended(Exit),
    Deleted,
    Gone,
}

impl PodTask {
    /// Runs from the first container to the end of the pod. Without a play, the pod has ended before.
    async fn run_to_end(mut self, play: Option<PodBehavior>) {
        let stop = match play {
            None => PodStop::Ended(Exit::code(0)),
            Some(play) => {
                let began = Timestamp::now();
                let stop = self.run(play, began).await;
                match &stop {
                    PodStop::Ended(exit) => self.report(self.ended(began, exit)).await,
                    PodStop::Deleted => self.report(self.ended(began, &Exit::code(TERMINATED))).await,
                    PodStop::Gone => {}
                }
                stop
            }
        };
        match stop {
            PodStop::Gone => return,
            PodStop::Deleted => {}
            PodStop::Ended(_) => loop {
                match self.commands.recv().await {
                    Some(PodCommand::Delete) => break,
                    Some(PodCommand::End(_)) => {}
                    Some(PodCommand::Gone) | None => return,
                }
            },
        }
        self.remove().await;
    }

    async fn run(&mut self, play: PodBehavior, began: Timestamp) -> PodStop {
        let ends = match play {
            PodBehavior::StayWaiting { reason, message } => {
                self.report(self.waiting(&reason, &message)).await;
                None
            }
            PodBehavior::RunUntilEnded => {
                self.report(self.running(began)).await;
                None
            }
            PodBehavior::RunFor { lasts, then } => {
                self.report(self.running(began)).await;
                Some((lasts, then))
            }
        };
        let command = self.commands.recv();
        let order = match ends {
            None => command.await,
            Some((lasts, then)) => match tokio::time::timeout(lasts, command).await {
                Ok(order) => order,
                Err(_) => return PodStop::Ended(then),
            },
        };
        match order {
            Some(PodCommand::End(exit)) => PodStop::Ended(exit),
            Some(PodCommand::Delete) => PodStop::Deleted,
            Some(PodCommand::Gone) | None => PodStop::Gone,
        }
    }

    fn running(&self, began: Timestamp) -> Value {
        json!({
            "phase": "Running",
            "startTime": began,
            "podIP": self.address,
            "podIPs": [{ "ip": self.address }],
            "conditions": conditions("True", None),
            "initContainerStatuses": self.init_containers(began),
            "containerStatuses": self.containers(true, &json!({ "running": { "startedAt": began } })),
        })
    }

    fn waiting(&self, reason: &str, message: &str) -> Value {
        json!({
            "phase": "Pending",
            "startTime": Timestamp::now(),
            "conditions": conditions("False", Some("ContainersNotReady")),
            "containerStatuses": self.containers(false, &json!({ "waiting": { "reason": reason, "message": message } })),
        })
    }

    fn ended(&self, began: Timestamp, exit: &Exit) -> Value {
        let (phase, reason) = if exit.code == 0 { ("Succeeded", "Completed") } else { ("Failed", "Error") };
        let state = terminated(began, exit.code, exit.reason.as_deref().unwrap_or(reason), &exit.message);
        json!({
            "phase": phase,
            "conditions": conditions("False", (exit.code == 0).then_some("PodCompleted").or(Some("PodFailed"))),
            "initContainerStatuses": self.init_containers(began),
            "containerStatuses": self.containers(false, &state),
        })
    }

    fn containers(&self, ready: bool, state: &Value) -> Vec<Value> {
        let containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        containers.map(|container| status(container, ready, state)).collect()
    }

    fn init_containers(&self, began: Timestamp) -> Vec<Value> {
        let state = terminated(began, 0, "Completed", "");
        let containers = self.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        containers.map(|container| status(container, true, &state)).collect()
    }

    /// Updates the pod's status. The uid keeps the update from reaching another pod of the same name.
    async fn report(&self, status: Value) {
        let patch = Patch::Strategic(json!({ "metadata": { "uid": self.uid }, "status": status }));
        let (pods, name, parameters) = (self.pods(), self.pod.name_any(), PatchParams::default());
        let reported = retry(|| pods.patch_status(&name, &parameters, &patch)).await;
        self.log_failure("reporting its status", reported.map(drop));
    }

    /// Removes the pod from the API server for good.
    async fn remove(&self) {
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: Some(self.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let (pods, name) = (self.pods(), self.pod.name_any());
        let removed = retry(|| pods.delete(&name, &now)).await;
        self.log_failure("removing it", removed.map(drop));
    }

    /// Ignores errors for a pod that is gone or was replaced. Prints others, so that a failed test shows them.
    fn log_failure(&self, operation: &str, outcome: kube::Result<()>) {
        match outcome {
            Ok(()) => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => eprintln!("pod {}: {operation}: {error}", self.pod.name_any()),
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.pod.namespace().unwrap_or_default())
    }
}

fn conditions(ready: &str, reason: Option<&str>) -> Value {
    let now = Timestamp::now();
    let condition = |kind: &str, status: &str, reason: Option<&str>| json!({ "type": kind, "status": status, "reason": reason, "lastTransitionTime": now });
    json!([
        condition("Initialized", "True", None),
        condition("Ready", ready, reason),
        condition("ContainersReady", ready, reason),
    ])
}

fn terminated(began: Timestamp, code: i32, reason: &str, message: &str) -> Value {
    json!({ "terminated": {
        "exitCode": code, "reason": reason, "message": message, "startedAt": began, "finishedAt": Timestamp::now(),
    } })
}

fn status(container: &Container, ready: bool, state: &Value) -> Value {
    json!({
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    })
}
