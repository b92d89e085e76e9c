//! Node operations beyond marks: evicting pods, resetting GPUs, rebooting and replacing the machine.
//!
//! The caller repeats an operation with the same id until it is done. Each call first queries the cluster for the progress; no
//! state is kept here. While an operation is not done, the call returns an error that names what it waits for.

use std::time::Duration;

use doctor_backend::{
    BackendError, Change, Effect,
    clock::{Clock as _, SystemClock},
    site_command::{self, HookParams},
};
use doctor_core::{
    ids::{NodeName, OpId},
    time::Span,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{KubeRequestError, KubernetesBackend, MAX_ATTEMPTS},
    config::{Replace, Webhook},
    objects::{ApiNode, FIELD_MANAGER, JobObject, PodObject, Time, job_resource, pod_resource},
    occupancy::uses_gpus,
    repair_job::{self, EvictionClass, Repair, RepairStage},
    taints, webhook,
};

/// The limit for a site's replacement hook. Shorter than the default lease, so that the leader still leads when the hook ends.
const HOOK_LIMIT: Duration = Duration::from_secs(40);
/// A reboot ends its own job, possibly as failed: for this long, a failed job does not mean a failed reboot.
const SHUTDOWN_TIME: Span = Span::minutes(5);

fn permanent_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedPermanent }
}

fn retryable_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedRetry }
}

/// The operation was started, and its effect has not been observed yet.
fn in_progress_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::Unknown }
}

impl KubernetesBackend {
    /// Evicts every pod that can run elsewhere. Done when none is left.
    pub(super) fn evict(&self, node: &NodeName) -> Result<(), BackendError> {
        let operation = "evict";
        let mut left = Vec::new();
        for pod in self.pods_on(operation, node)? {
            let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
            match repair_job::eviction_class(&pod, &self.config) {
                EvictionClass::Exempt => {}
                EvictionClass::Terminating => left.push(format!("{name} is terminating")),
                EvictionClass::Unowned => {
                    left.push(format!("{name} has no controller to recreate it: delete it by hand"));
                }
                EvictionClass::Evictable => match self.evict_one(&pod) {
                    Ok(()) => left.push(format!("{name}: eviction requested")),
                    Err(KubeRequestError { code: Some(404), .. }) => {}
                    // Its disruption budget does not permit it now.
                    Err(KubeRequestError { code: Some(429), error, .. }) => {
                        left.push(format!("{name}: eviction blocked: {}", error.text));
                    }
                    Err(failed) => left.push(format!("{name}: {}", failed.error.text)),
                },
            }
        }
        if left.is_empty() { Ok(()) } else { Err(retryable_error(operation, left.join("; "))) }
    }

    fn evict_one(&self, pod: &PodObject) -> Result<(), KubeRequestError> {
        let (name, namespace) = (pod.name_any(), pod.namespace().unwrap_or_default());
        let eviction = json!({
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": name, "namespace": namespace },
            // Another pod of the same name may exist by now.
            "deleteOptions": { "preconditions": { "uid": pod.uid() } },
        });
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction");
        self.post("evict", &path, &eviction).map(drop)
    }

    /// Lists all pods on the node from the API server.
    fn pods_on(&self, operation: &'static str, node: &NodeName) -> Result<Vec<PodObject>, BackendError> {
        let api: Api<PodObject> = Api::all_with(self.client.clone(), &pod_resource());
        let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
        Ok(self.request(operation, api.list(&here))?.items)
    }

    /// Resets the GPUs or reboots the node through a job on it.
    pub(super) fn repair(&self, node: &NodeName, op: OpId, what: Repair) -> Result<(), BackendError> {
        let operation = what.operation();
        if what.command(&self.config).is_empty() {
            return Err(permanent_error(
                operation,
                format!("no command is configured (`backend.kubernetes.{operation}`)"),
            ));
        }
        let now = self.read_node(operation, node)?;
        let boot = now.status.as_ref().map_or_else(String::new, |status| status.node_info.boot_id.clone());
        let jobs: Api<JobObject> = self.jobs(&job_resource());
        let job = match self.request(operation, jobs.get(&repair_job::job_name(op))) {
            Ok(job) => Some(job),
            Err(KubeRequestError { code: Some(404), .. }) => None,
            Err(failed) => return Err(failed.into()),
        };
        let recorded = taints::recorded_op(now.metadata.annotations.as_ref(), op, operation, &self.config);
        let before = job.as_ref().and_then(|job| repair_job::boot_id_before(job, &self.config)).or(recorded.clone());
        if what == Repair::Reboot && !boot.is_empty() && before.as_ref().is_some_and(|before| *before != boot) {
            return Ok(());
        }
        match job.as_ref().map(repair_job::stage) {
            Some(RepairStage::Failed(text))
                if what == Repair::Reboot && (!is_ready(&now) || failed_recently(job.as_ref())) =>
            {
                Err(in_progress_error(operation, format!("the node may be shutting down: {text}")))
            }
            Some(RepairStage::Failed(text)) => Err(permanent_error(operation, text)),
            Some(RepairStage::Succeeded) if what == Repair::Reset => Ok(()),
            Some(RepairStage::Succeeded) => {
                Err(in_progress_error(operation, "reboot requested; boot ID not changed yet".to_owned()))
            }
            Some(RepairStage::Running) => Err(in_progress_error(operation, "the repair job is running".to_owned())),
            None => {
                self.require_no_pods(operation, node, what == Repair::Reset)?;
                if recorded.is_none() {
                    self.record_op(operation, node, op, &boot)?;
                    self.record_event(&now, if what == Repair::Reset { &Change::Reset } else { &Change::Reboot });
                }
                self.start_repair(what, op, node, &before.unwrap_or(boot))
            }
        }
    }

    /// Fails while the node has pods that the operation would terminate. A reboot terminates all pods; a reset only
    /// those that use GPUs.
    fn require_no_pods(&self, operation: &'static str, node: &NodeName, gpus_only: bool) -> Result<(), BackendError> {
        let pods = self.pods_on(operation, node)?;
        let stays = |pod: &&PodObject| {
            repair_job::eviction_class(pod, &self.config) != EvictionClass::Exempt
                && (!gpus_only || uses_gpus(&pod.spec, &self.config))
        };
        let left: Vec<String> = pods
            .iter()
            .filter(stays)
            .map(|pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()))
            .collect();
        match left.as_slice() {
            [] => Ok(()),
            left => Err(retryable_error(
                operation,
                format!(
                    "{} would be terminated: evict first (`allow.evict`, or `doctor repair --drain`)",
                    left.join(", ")
                ),
            )),
        }
    }

    fn start_repair(&self, what: Repair, op: OpId, node: &NodeName, boot: &str) -> Result<(), BackendError> {
        let operation = what.operation();
        let job: DynamicObject = serde_json::from_value(repair_job::manifest(what, op, node, boot, &self.config))
            .map_err(|error| permanent_error(operation, error.to_string()))?;
        let api: Api<DynamicObject> = self.jobs(&job_resource());
        match self.request(operation, api.create(&post_params(), &job)) {
            Ok(_) | Err(KubeRequestError { already_exists: true, .. }) => {
                Err(in_progress_error(operation, "repair job created".to_owned()))
            }
            Err(failed) => Err(failed.into()),
        }
    }

    /// Replaces the machine behind the node by the configured method.
    pub(super) fn replace(&self, node: &NodeName, op: OpId) -> Result<(), BackendError> {
        let operation = "replace";
        let now = match self.read_node(operation, node) {
            // Deleting it was the whole operation.
            Err(error) if error.effect == Effect::NotAppliedPermanent && self.config.replace == Replace::DeleteNode => {
                return Ok(());
            }
            other => other?,
        };
        if taints::recorded_op(now.metadata.annotations.as_ref(), op, operation, &self.config).is_some() {
            return Ok(());
        }
        // For a node that is not ready, the planner has already considered its last known pods.
        if is_ready(&now) {
            self.require_no_pods(operation, node, false)?;
        }
        let params = hook_values(&now, node, op);
        match &self.config.replace {
            Replace::None => {
                return Err(permanent_error(
                    operation,
                    "no method is configured (`backend.kubernetes.replace`)".to_owned(),
                ));
            }
            Replace::DeleteNode => return self.delete_node(operation, &now),
            Replace::Aws => site_command::run(operation, &Replace::aws_command(), &params, HOOK_LIMIT)?,
            Replace::Command(args) => site_command::run(operation, args, &params, HOOK_LIMIT)?,
            Replace::Webhook(hook) => call_webhook(operation, hook, &params)?,
        }
        self.record_event(&now, &Change::Replace);
        // If this fails, the caller repeats the operation, and the cloud reports that the machine is already gone.
        self.record_op(operation, node, op, "done").map_err(|failed| in_progress_error(operation, failed.text))
    }

    /// Deletes the Node object. Karpenter and other node provisioners then terminate its machine.
    fn delete_node(&self, operation: &'static str, node: &ApiNode) -> Result<(), BackendError> {
        let same = kube::api::Preconditions { uid: node.uid(), ..kube::api::Preconditions::default() };
        let parameters = DeleteParams { preconditions: Some(same), ..DeleteParams::default() };
        match self.request(operation, self.nodes().delete(&node.name_any(), &parameters)) {
            // It may remain until its finalizers have run.
            Ok(_) | Err(KubeRequestError { code: Some(404), .. }) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }

    /// Reads the node from the API server.
    pub(super) fn read_node(&self, operation: &'static str, node: &NodeName) -> Result<ApiNode, BackendError> {
        match self.request(operation, self.nodes().get(node.as_str())) {
            Ok(now) => Ok(now),
            Err(KubeRequestError { code: Some(404), .. }) => {
                Err(permanent_error(operation, format!("there is no node {node}")))
            }
            Err(failed) => Err(failed.into()),
        }
    }

    /// Records on the node that this operation was started.
    fn record_op(&self, what: &'static str, node: &NodeName, op: OpId, text: &str) -> Result<(), BackendError> {
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        for _ in 0..MAX_ATTEMPTS {
            let now = self.read_node(what, node)?;
            let patch = Patch::Merge(taints::record_op_patch(&now.metadata, op, what, text, &self.config));
            match self.request(what, self.nodes().patch(node.as_str(), &parameters, &patch)) {
                Ok(_) => return Ok(()),
                Err(KubeRequestError { code: Some(409), .. }) => {}
                Err(failed) => return Err(failed.into()),
            }
        }
        Err(retryable_error(what, format!("{node} was modified concurrently {MAX_ATTEMPTS} times")))
    }
}

fn call_webhook(operation: &'static str, hook: &Webhook, params: &HookParams<'_>) -> Result<(), BackendError> {
    let body: serde_json::Map<String, Value> =
        params.values.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let token = match &hook.token_variable {
        Some(name) => Some(
            std::env::var(name)
                .map_err(|_| permanent_error(operation, format!("environment variable {name} is not set")))?,
        ),
        None => None,
    };
    webhook::call(operation, &hook.url, token.as_deref(), &json!(body), HOOK_LIMIT)
}

pub(super) fn is_ready(node: &ApiNode) -> bool {
    let conditions = node.status.as_ref().map_or(&[][..], |status| &status.conditions);
    conditions.iter().any(|condition| condition.matches("Ready", "True"))
}

fn failed_recently(job: Option<&JobObject>) -> bool {
    let conditions = job.and_then(|job| job.status.as_ref()).map_or(&[][..], |status| &status.conditions);
    let failed = conditions.iter().find(|condition| condition.matches("Failed", "True"));
    let at = failed.and_then(|condition| condition.last_transition_time).map(Time::timestamp);
    at.is_some_and(|at| SystemClock.now().since(at) < SHUTDOWN_TIME)
}

pub(super) fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// Returns the values for a hook. `providerID` is `aws:///us-east-1a/i-0abc`, `gce://project/zone/name`, `azure:///…`.
fn hook_values(node: &ApiNode, name: &NodeName, op: OpId) -> HookParams<'static> {
    let provider = node.spec.provider_id.clone().unwrap_or_default();
    let parts: Vec<&str> =
        provider.split("://").nth(1).unwrap_or_default().split('/').filter(|part| !part.is_empty()).collect();
    let instance = parts.last().map_or_else(String::new, |last| (*last).to_owned());
    let zone = if parts.len() > 1 { parts[parts.len() - 2].to_owned() } else { String::new() };
    let region = match provider.split_once("://").map(|(cloud, _)| cloud) {
        // A zone is its region followed by a letter.
        Some("aws") => zone.strip_suffix(|last: char| last.is_ascii_lowercase()).unwrap_or(&zone).to_owned(),
        Some("gce") => zone.rsplit_once('-').map_or_else(String::new, |(region, _)| region.to_owned()),
        _ => String::new(),
    };
    HookParams {
        values: vec![
            ("node", name.to_string()),
            ("op", op.to_string()),
            ("provider_id", provider),
            ("instance", instance),
            ("zone", zone),
            ("region", region),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::ids::IdSource;

    #[test]
    fn a_hook_receives_the_instance_zone_and_region_from_the_provider_id() {
        let parts_of = |provider: &str| {
            let node: ApiNode = serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n" }, "spec": { "providerID": provider } }))
            .unwrap();
            let params = hook_values(&node, &NodeName::new("n").unwrap(), IdSource::new(1).op());
            let value = |name: &str| params.values.iter().find(|(known, _)| *known == name).unwrap().1.clone();
            (value("instance"), value("zone"), value("region"))
        };
        let of = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        assert_eq!(parts_of("aws:///us-east-1a/i-0abc"), of("i-0abc", "us-east-1a", "us-east-1"));
        assert_eq!(parts_of("gce://proj/europe-west4-a/n1"), of("n1", "europe-west4-a", "europe-west4"));
        assert_eq!(parts_of("kind://docker/kind/worker"), of("worker", "kind", ""));
        assert_eq!(parts_of(""), of("", "", ""));
    }
}
