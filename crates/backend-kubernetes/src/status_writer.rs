//! Writes a node's status on the Node object: labels for selection, annotations for reading, a condition for controllers that
//! repair nodes, and events.
//!
//! Labels and annotations are one merge patch without a resourceVersion: only we write these fields, and a foreign change to them
//! is not reverted.

use doctor_backend::{
    BackendError, Change, Effect, RenderedStatus, StatusWriter,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::NodeName,
    node::MarkKind,
    node_status::{NodeHealth, NodeStatus, OperatorNote},
    time::Timestamp,
};
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{KubeRequestError, KubernetesBackend},
    config::KubernetesConfig,
    objects::{ApiNode, CachedNode, FIELD_MANAGER},
};

/// The annotation with the number of the written status.
const STATUS_NUMBER: &str = "shown";

impl StatusWriter for KubernetesBackend {
    fn status_hash(&self, node: &NodeName) -> Option<u64> {
        let name = self.config.prefixed(STATUS_NUMBER);
        let read = |node: &CachedNode| {
            let (number, of) = node.metadata.annotations.get(&name)?.split_once('.')?;
            // A status written under other settings has to be written again.
            u64::from_str_radix(number, 16).ok().filter(|_| of == settings_code(&self.config))
        };
        self.watch_cache.with_node(node.as_str(), read)?
    }

    fn write(&self, node: &NodeName, what: &RenderedStatus) -> Result<(), BackendError> {
        let operation = "write the status to the node";
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        if let Some(kind) = &self.config.write.condition {
            let now = self.request(operation, self.nodes().get(node.as_str()))?;
            if !has_condition(&now, kind, &what.status) {
                let patch = json!({ "status": { "conditions": [condition(kind, &what.status, SystemClock.now())] } });
                self.request(
                    operation,
                    self.nodes().patch_status(node.as_str(), &parameters, &Patch::Strategic(patch)),
                )?;
            }
        }
        let patch = Patch::Merge(patch(what, &self.config));
        // Thousands of nodes are written when the service is first installed, so only the metadata is returned. The watch
        // delivers the change soon, and writing the same status once more would change nothing.
        match self.request(operation, self.nodes().patch_metadata(node.as_str(), &parameters, &patch)) {
            Ok(_) => Ok(()),
            Err(KubeRequestError { code: Some(404), .. }) => {
                let text = format!("there is no node {node}");
                Err(BackendError { operation, text, effect: Effect::NotAppliedPermanent })
            }
            Err(failed) => Err(failed.into()),
        }
    }
}

impl KubernetesBackend {
    /// Records a change as an event of the node. A failure is only logged.
    pub(super) fn record_event(&self, node: &ApiNode, change: &Change) {
        if !self.config.write.event {
            return;
        }
        let event = event(node, change, SystemClock.now());
        if let Err(failed) = self.post("write an event", "/api/v1/namespaces/default/events", &event) {
            tracing::debug!(error = %failed.error, "event not written");
        }
    }
}

fn patch(what: &RenderedStatus, config: &KubernetesConfig) -> Value {
    let node_status = &what.status;
    let or_nothing = |there: bool, value: Value| if there { value } else { Value::Null };
    let mut labels = serde_json::Map::new();
    if config.write.label {
        labels.insert(config.prefixed("status"), json!(node_status.status.code()));
        labels.insert(config.prefixed("severity"), json!(node_status.severity.map(|severity| severity.code())));
    }
    let mut annotations = serde_json::Map::new();
    annotations.insert(config.prefixed(STATUS_NUMBER), json!(format!("{:016x}.{}", what.hash, settings_code(config))));
    if config.write.annotation {
        annotations.insert(config.prefixed("results"), json!(what.text));
        let advice = node_status.advice.map(|advice| advice.code());
        let result = json!({ "recommendation": advice, "case": node_status.case, "findings": node_status.findings });
        annotations
            .insert(config.prefixed("quarantine-result"), or_nothing(advice.is_some(), json!(result.to_string())));
    }
    json!({ "metadata": { "labels": labels, "annotations": annotations } })
}

/// Encodes the parts that are switched on, to detect changed settings.
fn settings_code(config: &KubernetesConfig) -> String {
    let write = &config.write;
    let condition = write.condition.as_deref().unwrap_or_default();
    let mark = |on: bool, letter: &'static str| if on { letter } else { "" };
    format!("{}{}{condition}", mark(write.label, "l"), mark(write.annotation, "a"))
}

/// `True` means healthy, as with `Ready`.
const fn condition_status(status: NodeHealth) -> &'static str {
    match status {
        NodeHealth::Pass => "True",
        NodeHealth::Fail => "False",
        NodeHealth::Unknown => "Unknown",
    }
}

fn condition_reason(node_status: &NodeStatus) -> String {
    // A condition's reason must be a single CamelCase word.
    let reason = node_status.findings.first().map_or(node_status.status.code(), |worst| worst.reason.as_str());
    let words = reason.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

fn condition(kind: &str, node_status: &NodeStatus, now: Timestamp) -> Value {
    let now = now.to_string();
    let finding = node_status.findings.first().map(|worst| format!("{}: {}", worst.check, worst.text));
    let parts: Vec<String> = node_status.operator.iter().map(OperatorNote::text).chain(finding).collect();
    let message = parts.join("; ");
    json!({
        "type": kind, "status": condition_status(node_status.status), "reason": condition_reason(node_status), "message": message,
        "lastTransitionTime": now, "lastHeartbeatTime": now,
    })
}

fn has_condition(node: &ApiNode, kind: &str, node_status: &NodeStatus) -> bool {
    let conditions = node.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let (status, reason) = (condition_status(node_status.status), condition_reason(node_status));
    conditions.iter().any(|known| known.matches(kind, status) && known.reason == reason)
}

fn event(node: &ApiNode, change: &Change, now: Timestamp) -> Value {
    let name = node.name_any();
    let (reason, kind, summary) = match change {
        Change::Mark(mark) if mark.kind == MarkKind::Maintenance => ("MaintenanceBegan", "Normal", "is being tested"),
        Change::Mark(_) => ("MarkedUnhealthy", "Warning", "is marked unhealthy and gets no new pods"),
        Change::Unmark(mark) if mark.kind == MarkKind::Maintenance => ("MaintenanceEnded", "Normal", "has been tested"),
        Change::Unmark(_) => ("Returned", "Normal", "passed requalification and returns to service"),
        Change::Drain => ("Drained", "Warning", "is drained for repair"),
        Change::Undrain => ("Undrained", "Normal", "accepts new pods again"),
        Change::Evict => ("Evicting", "Warning", "has its pods evicted for repair"),
        Change::Reset => ("ResettingGpus", "Warning", "has its GPUs reset"),
        Change::Reboot => ("Rebooting", "Warning", "is being rebooted"),
        Change::Replace => ("Replacing", "Warning", "is being replaced"),
    };
    let case = match change {
        Change::Mark(mark) | Change::Unmark(mark) => mark.case,
        _ => None,
    };
    let case = case.map_or_else(String::new, |case| format!(", case {case}"));
    let now = now.to_string();
    json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": { "generateName": format!("{name}.doctor."), "namespace": "default" },
        "involvedObject": { "apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid() },
        "reason": reason, "type": kind, "message": format!("{name} {summary}{case}: `doctor why {name}`"),
        "source": { "component": FIELD_MANAGER }, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{case::Advice, finding::Severity, ids::TestId, node_status::StatusFinding, view::TestStatus};

    /// Larger than any real node's status.
    fn much() -> NodeStatus {
        let id = |n: usize| TestId::new(&format!("{}{n}", "a-long-name-of-a-test-".repeat(2))).unwrap();
        let finding = |n| StatusFinding {
            check: id(n),
            reason: "a-reason-that-is-quite-long".to_owned(),
            severity: Severity::Isolate,
            entity: "gpu:GPU-00000000-0000-0000-0000-000000000000".to_owned(),
            text: "\"".repeat(256),
            confirmed: true,
        };
        NodeStatus {
            status: NodeHealth::Fail,
            severity: Some(Severity::Isolate),
            state: "quarantined",
            case: None,
            operator: None,
            advice: Some(Advice::Replace),
            passed: 1,
            not_applicable: 0,
            not_judged: 0,
            findings: (0..32).map(finding).collect(),
            more_findings: 9,
            not_known: (0..128).map(|n| (id(n), TestStatus::NeverTested)).collect(),
            more_not_known: 9,
            agent_silent: true,
        }
    }

    #[test]
    fn an_annotation_stays_below_the_documented_size() {
        let patch = patch(&RenderedStatus::new(much()), &KubernetesConfig::default());
        let annotations = patch["metadata"]["annotations"].as_object().unwrap();
        for (name, value) in annotations {
            assert!(value.as_str().unwrap().len() < 32 * 1024, "{name}");
        }
        assert_eq!(patch["metadata"]["labels"]["cluster-doctor.io/status"], "fail");
        assert!(
            annotations["cluster-doctor.io/quarantine-result"]
                .as_str()
                .unwrap()
                .contains("\"recommendation\":\"replace\"")
        );
    }

    #[test]
    fn disabled_outputs_are_not_written_and_obsolete_values_are_removed() {
        let well =
            NodeStatus { advice: None, severity: None, findings: Vec::new(), status: NodeHealth::Pass, ..much() };
        let mut config = KubernetesConfig::default();
        let all = patch(&RenderedStatus::new(well.clone()), &config);
        assert_eq!(all["metadata"]["labels"]["cluster-doctor.io/severity"], Value::Null);
        assert_eq!(all["metadata"]["annotations"]["cluster-doctor.io/quarantine-result"], Value::Null);
        (config.write.label, config.write.annotation) = (false, false);
        let none = patch(&RenderedStatus::new(well), &config);
        assert_eq!(none["metadata"]["labels"], json!({}));
        assert_eq!(none["metadata"]["annotations"].as_object().unwrap().len(), 1, "only the number of the status");
    }

    #[test]
    fn a_condition_is_written_once() {
        let bad = much();
        let written = condition("AcceleratorHealthy", &bad, Timestamp::from_secs(1_794_700_800));
        assert_eq!((&written["status"], &written["reason"]), (&json!("False"), &json!("AReasonThatIsQuiteLong")));
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n" }, "spec": {},
            "status": { "conditions": [written] } });
        let node: ApiNode = serde_json::from_value(node).unwrap();
        assert!(has_condition(&node, "AcceleratorHealthy", &bad));
        assert!(!has_condition(&node, "AcceleratorHealthy", &NodeStatus { status: NodeHealth::Unknown, ..bad }));
    }
}
