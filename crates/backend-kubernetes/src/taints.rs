//! Marks on a node: tells ours from foreign ones, and builds the patches that set and remove ours. Pure.
//!
//! A mark is ours if our annotation records it and the node still has it: once an operator removes a taint, it is not ours any
//! more. A patch includes the resourceVersion of the node that it was computed from, so that no concurrent change is overwritten;
//! the list of taints can only be written as a whole (server-side apply treats it as one field).

use std::collections::BTreeMap;

use doctor_backend::Change;
use doctor_core::{
    ids::{CaseId, OpId},
    node::{ForeignMark, MarkKind, Marks, OurMark},
};
use kube::core::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    config::KubernetesConfig,
    objects::{CachedNode, Taint},
};

/// Taints that follow from a cordon or from the node's readiness, which are evaluated directly.
const DERIVED_TAINTS: [&str; 3] =
    ["node.kubernetes.io/unschedulable", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
/// How many changes are remembered on the node. The controller does not repeat older ones.
const MAX_RECORDED_CHANGES: usize = 8;

/// A mark of ours, as recorded in the annotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RecordedMark {
    kind: MarkKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    case: Option<CaseId>,
    /// The node was already cordoned by another client, whose cordon we must not remove.
    #[serde(rename = "over", default, skip_serializing_if = "std::ops::Not::not")]
    over_foreign: bool,
}

/// The marks of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeMarks {
    pub(super) marks: Marks,
}

impl NodeMarks {
    pub(super) fn from_node(node: &CachedNode, config: &KubernetesConfig) -> Self {
        let written = recorded_marks(node, config);
        let ours = written
            .iter()
            .filter(|mark| has_mark(node, mark.kind, config))
            .map(|mark| OurMark { kind: mark.kind, case: mark.case })
            .collect();
        let mut foreign: Vec<ForeignMark> =
            node.spec.taints.iter().filter_map(|taint| foreign_taint(taint, &written, config)).collect();
        let cordon = written.iter().find(|mark| mark.kind == MarkKind::Cordon);
        if node.spec.unschedulable && !(cordon.is_some_and(|mark| !mark.over_foreign) && node.spec.cordon_is_ours) {
            foreign.push(ForeignMark { by: "another client".to_owned(), text: "cordoned".to_owned(), blocks: true });
        }
        foreign.sort();
        // One is kept for each node.
        foreign.shrink_to_fit();
        Self { marks: Marks { ours, foreign } }
    }
}

/// Returns the marks in our annotation.
fn recorded_marks(node: &CachedNode, config: &KubernetesConfig) -> Vec<RecordedMark> {
    // If it cannot be parsed, no mark is ours: the taints then count as foreign and are left alone.
    annotation(node, &config.prefixed("marks")).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

fn annotation<'a>(node: &'a CachedNode, name: &str) -> Option<&'a str> {
    node.metadata.annotations.get(name)
}

fn has_mark(node: &CachedNode, kind: MarkKind, config: &KubernetesConfig) -> bool {
    match our_taint(kind, config) {
        // Without taints, the annotation is the only record.
        Some(_) if !config.write.taint => true,
        Some(ours) => node.spec.taints.iter().any(|taint| is_same(taint, &ours)),
        None => node.spec.unschedulable && node.spec.cordon_is_ours || is_over_foreign(node, config),
    }
}

/// Returns whether our cordon is on top of a foreign one that is still there.
fn is_over_foreign(node: &CachedNode, config: &KubernetesConfig) -> bool {
    let over = |mark: &RecordedMark| mark.kind == MarkKind::Cordon && mark.over_foreign;
    node.spec.unschedulable && recorded_marks(node, config).iter().any(over)
}

fn our_taint(kind: MarkKind, config: &KubernetesConfig) -> Option<Taint> {
    let taint = |name| {
        Some(Taint {
            key: config.prefixed(name),
            value: Some("true".to_owned()),
            effect: "NoSchedule".to_owned(),
            time_added: None,
        })
    };
    match kind {
        MarkKind::Unhealthy => taint("unhealthy"),
        MarkKind::Maintenance => taint("maintenance"),
        MarkKind::Cordon => None,
    }
}

/// Ignores the time at which it was added, which says nothing about the owner.
fn is_same(one: &Taint, other: &Taint) -> bool {
    (&one.key, &one.value, &one.effect) == (&other.key, &other.value, &other.effect)
}

fn foreign_taint(taint: &Taint, written: &[RecordedMark], config: &KubernetesConfig) -> Option<ForeignMark> {
    let is_ours = written.iter().any(|mark| our_taint(mark.kind, config).is_some_and(|ours| is_same(taint, &ours)));
    if is_ours || DERIVED_TAINTS.contains(&taint.key.as_str()) {
        return None;
    }
    let keeps_off = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    let value = taint.value.as_ref().map_or_else(String::new, |value| format!("={value}"));
    Some(ForeignMark {
        by: format!("taint {}", taint.key),
        text: format!("{}{value}:{}", taint.key, taint.effect),
        blocks: keeps_off && !config.usual_taints.contains(&taint.key),
    })
}

/// Returns the text recorded on the node for this operation, if any.
pub(super) fn recorded_op(
    annotations: Option<&BTreeMap<String, String>>,
    op: OpId,
    what: &str,
    config: &KubernetesConfig,
) -> Option<String> {
    let this = format!("{op}/{what}=");
    let all = annotations?.get(&config.prefixed("changes"))?;
    all.split(',').find_map(|one| one.strip_prefix(&this)).map(str::to_owned)
}

/// Builds the patch that records it.
pub(super) fn record_op_patch(node: &ObjectMeta, op: OpId, what: &str, text: &str, config: &KubernetesConfig) -> Value {
    let changes = config.prefixed("changes");
    let before = node.annotations.as_ref().and_then(|all| all.get(&changes)).map_or("", String::as_str);
    let done = append_change(before, &format!("{op}/{what}={text}"));
    json!({ "metadata": { "resourceVersion": node.resource_version, "annotations": { changes: done } } })
}

/// Appends a change and keeps only the newest ones.
fn append_change(before: &str, this: &str) -> String {
    let mut done: Vec<&str> = before.split(',').filter(|one| !one.is_empty()).collect();
    done.push(this);
    done[done.len().saturating_sub(MAX_RECORDED_CHANGES)..].join(",")
}

/// Builds the patch for a change; `None` if it was made before.
pub(super) fn patch(node: &CachedNode, op: OpId, what: &Change, config: &KubernetesConfig) -> Option<Value> {
    let changes = config.prefixed("changes");
    let before = annotation(node, &changes).unwrap_or_default();
    let (kind, case, there) = match what {
        Change::Mark(mark) => (mark.kind, mark.case, true),
        Change::Unmark(mark) => (mark.kind, None, false),
        Change::Drain => (MarkKind::Cordon, None, true),
        Change::Undrain => (MarkKind::Cordon, None, false),
        Change::Evict | Change::Reset | Change::Reboot | Change::Replace => return None,
    };
    // One operation may remove several marks.
    let this = format!("{op}/{kind}");
    if before.split(',').any(|one| one == this) {
        return None;
    }
    let done = append_change(before, &this);

    let mut marks = recorded_marks(node, config);
    let (mut spec, mut labels) = (Map::new(), Map::new());
    let marked = has_mark(node, kind, config);
    let had = marks.iter().position(|mark| mark.kind == kind).map(|index| marks.remove(index)).filter(|_| marked);
    match our_taint(kind, config) {
        Some(ours) => {
            // A taint that looks like ours but is not in our annotation is foreign.
            let is_removed = |taint: &Taint| (there || had.is_some()) && is_same(taint, &ours);
            let mut taints: Vec<&Taint> = node.spec.taints.iter().filter(|taint| !is_removed(taint)).collect();
            taints.extend((there && config.write.taint).then_some(&ours));
            spec.insert("taints".to_owned(), json!(taints));
        }
        // A foreign cordon stays, whether it is older or newer than ours.
        None if !there && had.as_ref().is_some_and(|mark| !mark.over_foreign) => {
            spec.insert("unschedulable".to_owned(), Value::Null);
        }
        None if there => {
            spec.insert("unschedulable".to_owned(), json!(true));
        }
        None => {}
    }
    if there {
        // A second cordon operation on our own cordon leaves it ours.
        let over = kind == MarkKind::Cordon && node.spec.unschedulable && had.is_none_or(|mark| mark.over_foreign);
        marks.push(RecordedMark { kind, case, over_foreign: over });
    }
    if kind == MarkKind::Unhealthy && config.write.label {
        labels.insert(config.prefixed("status"), if there { json!("fail") } else { Value::Null });
    }
    let marks = if marks.is_empty() { Value::Null } else { json!(json!(marks).to_string()) };
    let metadata = json!({
        "resourceVersion": node.metadata.resource_version,
        "labels": labels,
        "annotations": { changes: done, config.prefixed("marks"): marks },
    });
    Some(json!({ "metadata": metadata, "spec": spec }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{ids::IdSource, time::Timestamp};

    fn config() -> KubernetesConfig {
        KubernetesConfig::default()
    }

    fn unmarked_node() -> Value {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n", "resourceVersion": "1" }, "spec": {} })
    }

    fn read(node: &Value) -> CachedNode {
        serde_json::from_value(node.clone()).unwrap()
    }

    /// The server's record of who wrote the cordon last.
    fn cordoned_by(manager: &str) -> Value {
        json!([{ "manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
            "fieldsV1": { "f:spec": { "f:unschedulable": {} } } }])
    }

    /// Merges as the server does (RFC 7396).
    fn merge(into: &mut Value, patch: &Value) {
        let Value::Object(patch) = patch else {
            *into = patch.clone();
            return;
        };
        if !into.is_object() {
            *into = json!({});
        }
        for (key, value) in patch {
            if value.is_null() {
                into.as_object_mut().unwrap().remove(key);
            } else {
                merge(&mut into[key], value);
            }
        }
    }

    struct Cluster {
        node: Value,
        ids: IdSource,
    }

    impl Cluster {
        fn new(node: Value) -> Self {
            let mut ids = IdSource::new(5);
            ids.set_time(Timestamp::from_secs(1_000));
            Self { node, ids }
        }

        fn apply(&mut self, what: &Change) {
            let op = self.ids.op();
            let patch = patch(&read(&self.node), op, what, &config()).unwrap();
            let before = self.node["spec"]["unschedulable"].clone();
            merge(&mut self.node, &patch);
            // A writer that changes nothing does not become the owner.
            if self.node["spec"]["unschedulable"] != before {
                self.node["metadata"]["managedFields"] = cordoned_by("cluster-doctor");
            }
            assert_eq!(super::patch(&read(&self.node), op, what, &config()), None, "it was done");
        }

        fn marks(&self) -> Marks {
            NodeMarks::from_node(&read(&self.node), &config()).marks
        }
    }

    fn mark(kind: MarkKind) -> OurMark {
        OurMark { kind, case: None }
    }

    #[test]
    fn our_marks_are_set_and_removed_and_only_the_recorded_operations_remain() {
        let mut cluster = Cluster::new(unmarked_node());
        for kind in [MarkKind::Unhealthy, MarkKind::Maintenance] {
            cluster.apply(&Change::Mark(mark(kind)));
            assert!(cluster.marks().has_ours(kind));
        }
        cluster.apply(&Change::Drain);
        assert_eq!(cluster.node["spec"]["unschedulable"], true);
        assert_eq!(cluster.marks().ours.len(), 3);
        assert_eq!(cluster.marks().foreign, []);
        for change in
            [Change::Unmark(mark(MarkKind::Unhealthy)), Change::Undrain, Change::Unmark(mark(MarkKind::Maintenance))]
        {
            cluster.apply(&change);
        }
        assert_eq!(cluster.marks(), Marks::default());
        assert_eq!(cluster.node["spec"], json!({ "taints": [] }));
        assert_eq!(cluster.node["metadata"]["labels"], json!({}));
        let left = cluster.node["metadata"]["annotations"].as_object().unwrap();
        assert_eq!(left.keys().collect::<Vec<_>>(), ["cluster-doctor.io/changes"]);
    }

    #[test]
    fn a_foreign_cordon_remains_when_ours_is_removed() {
        let mut node = unmarked_node();
        node["spec"] = json!({ "unschedulable": true, "taints": [{ "key": "team", "effect": "NoSchedule" }] });
        node["metadata"]["managedFields"] = cordoned_by("kubectl-cordon");
        let mut cluster = Cluster::new(node);
        let foreign = cluster.marks().foreign;
        assert_eq!(foreign.len(), 2);
        cluster.apply(&Change::Drain);
        cluster.apply(&Change::Drain);
        assert!(cluster.marks().has_ours(MarkKind::Cordon));
        cluster.apply(&Change::Mark(mark(MarkKind::Unhealthy)));
        cluster.apply(&Change::Undrain);
        cluster.apply(&Change::Unmark(mark(MarkKind::Unhealthy)));
        assert_eq!(cluster.marks(), Marks { ours: Vec::new(), foreign });
        assert_eq!(cluster.node["spec"]["unschedulable"], true);
    }

    #[test]
    fn a_mark_that_an_operator_removed_is_no_longer_ours() {
        let mut cluster = Cluster::new(unmarked_node());
        cluster.apply(&Change::Mark(mark(MarkKind::Unhealthy)));
        cluster.apply(&Change::Drain);
        cluster.node["spec"] = json!({});
        assert_eq!(cluster.marks(), Marks::default());
        // A later cordon is the operator's, and so is a taint that looks like ours.
        cluster.node["spec"] = json!({
            "unschedulable": true,
            "taints": [{ "key": "cluster-doctor.io/maintenance", "value": "alice", "effect": "NoExecute" }],
        });
        cluster.node["metadata"]["managedFields"] = cordoned_by("kubectl-cordon");
        let foreign = cluster.marks().foreign;
        assert_eq!((cluster.marks().ours.len(), foreign.len()), (0, 2));
        cluster.apply(&Change::Undrain);
        cluster.apply(&Change::Unmark(mark(MarkKind::Maintenance)));
        cluster.apply(&Change::Unmark(mark(MarkKind::Unhealthy)));
        assert_eq!(cluster.marks(), Marks { ours: Vec::new(), foreign });
        assert_eq!(cluster.node["metadata"]["labels"], json!({}));
    }

    #[test]
    fn one_operation_removes_several_marks() {
        let mut cluster = Cluster::new(unmarked_node());
        cluster.apply(&Change::Mark(mark(MarkKind::Unhealthy)));
        cluster.apply(&Change::Mark(mark(MarkKind::Maintenance)));
        let op = cluster.ids.op();
        for kind in [MarkKind::Unhealthy, MarkKind::Maintenance] {
            let patch = patch(&read(&cluster.node), op, &Change::Unmark(mark(kind)), &config()).unwrap();
            merge(&mut cluster.node, &patch);
        }
        assert_eq!(cluster.marks(), Marks::default());
    }

    #[test]
    fn only_the_latest_operations_are_recorded() {
        let mut cluster = Cluster::new(unmarked_node());
        for _ in 0..20 {
            cluster.apply(&Change::Drain);
            cluster.apply(&Change::Undrain);
        }
        let changes = cluster.node["metadata"]["annotations"]["cluster-doctor.io/changes"].as_str().unwrap();
        assert_eq!(changes.split(',').count(), MAX_RECORDED_CHANGES);
    }
}
