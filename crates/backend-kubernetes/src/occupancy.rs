//! Determines a node's occupancy from the Node and its pods. Pure.

use std::sync::Arc;

use doctor_core::node::Occupancy;

use super::{
    config::KubernetesConfig,
    objects::{CachedNode, Container, PodSpec, Quantities, Ready},
    taints::NodeMarks,
};

/// The part of a pod that is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodOnNode {
    /// `namespace/name`.
    pub(super) name: Arc<str>,
    /// It has or will have GPUs of the node, by count or by a claim.
    pub(super) uses_gpus: bool,
    /// It is not on the node yet: the scheduler has preempted other pods for it.
    pub(super) nominated: bool,
    /// A job of ours.
    pub(super) ours: bool,
}

/// Returns `Free` only if all evidence agrees.
pub(super) fn occupancy(
    node: &CachedNode,
    node_marks: &NodeMarks,
    tenants: &[PodOnNode],
    demanded_by: Option<&str>,
    config: &KubernetesConfig,
) -> Occupancy {
    let unknown = |why: String| Occupancy::Unknown { why: why.into() };
    let busy = |by: String| Occupancy::Busy { by: by.into() };
    let Some(status) = &node.status else { return unknown("the node has not reported yet".to_owned()) };
    match &status.ready {
        Ready::Yes => {}
        Ready::No(why) => return unknown(format!("not ready: {why}")),
        Ready::Unreported => return unknown("no Ready condition reported".to_owned()),
    }
    if let Some(user) = tenants.iter().find(|tenant| tenant.uses_gpus && !tenant.ours) {
        let by = if user.nominated {
            format!("pod {}, which is about to start", user.name)
        } else {
            format!("pod {}", user.name)
        };
        return busy(by);
    }
    if let Some(by) = demanded_by {
        return busy(format!("pod {by}, which waits for it"));
    }
    if let Some(mark) = node_marks.marks.blocking_foreign_mark() {
        return busy(format!("kept out of service by {}: {}", mark.by, mark.text));
    }
    let expected = expected_gpus(node, config);
    // An unreadable quantity counts as none where it is offered, and as one where it is required.
    let there = gpus(&status.allocatable, 0, config);
    match (expected, there) {
        (0, 0) => unknown("no GPU resource on the node".to_owned()),
        (expected, there) if there < expected => unknown(format!("{there} of {expected} GPUs allocatable")),
        _ => Occupancy::Free,
    }
}

/// Returns how many GPUs the node should have: by its label, or by its capacity.
pub(super) fn expected_gpus(node: &CachedNode, config: &KubernetesConfig) -> u64 {
    let label = node.metadata.labels.get(&config.gpu_count_label);
    let label_count = label.and_then(|count| count.parse().ok()).unwrap_or(0);
    label_count.max(node.status.as_ref().map_or(0, |status| gpus(&status.capacity, 1, config)))
}

/// Returns whether the node is one to manage.
pub(super) fn has_gpus(node: &CachedNode, config: &KubernetesConfig) -> bool {
    let label = node.metadata.labels.get(&config.gpu_present_label);
    // A device plugin that died leaves `nvidia.com/gpu: 0`: the node is still managed, and its state is unknown.
    let once_had = |(name, _): (&str, &str)| is_gpu(name, config);
    label.is_some_and(|present| present == "true")
        || expected_gpus(node, config) > 0
        || node.status.as_ref().is_some_and(|status| status.capacity.iter().any(once_had))
}

/// Returns whether a resource name is configured as a GPU.
pub(super) fn is_gpu(name: &str, config: &KubernetesConfig) -> bool {
    config.gpu_resources.iter().any(|resource| match resource.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == resource,
    })
}

/// Parses a quantity of whole units: `8`, or `3k` for three thousand. `None`: it has another form.
pub(super) fn parse_whole(amount: &str) -> Option<u64> {
    let (digits, scale) = match amount.strip_suffix('k') {
        Some(digits) => (digits, 1_000),
        None => amount.strip_suffix('M').map_or((amount, 1), |digits| (digits, 1_000_000)),
    };
    digits.parse::<u64>().ok()?.checked_mul(scale)
}

/// Sums the configured GPU resources. A GPU partition counts as one, and an unreadable quantity as `unread`.
fn gpus(amounts: &Quantities, unread: u64, config: &KubernetesConfig) -> u64 {
    let of_gpus = amounts.iter().filter(|(name, _)| is_gpu(name, config));
    of_gpus.map(|(_, amount)| parse_whole(amount).unwrap_or(unread)).fold(0, u64::saturating_add)
}

/// Returns how many GPUs a pod requests.
pub(super) fn requested_gpus(pod: &PodSpec, config: &KubernetesConfig) -> u64 {
    let of = |container: &Container| {
        gpus(&container.resources.requests, 1, config).max(gpus(&container.resources.limits, 1, config))
    };
    pod_request(pod, of, gpus(&pod.overhead, 1, config), u64::saturating_add)
}

/// Computes a pod's request as the scheduler does: init containers run one after the other before the others; sidecars run
/// alongside them.
pub(super) fn pod_request<T: Copy + Default + PartialOrd>(
    pod: &PodSpec,
    of: impl Fn(&Container) -> T,
    overhead: T,
    add: impl Fn(T, T) -> T,
) -> T {
    let more = |one: T, other: T| if other > one { other } else { one };
    let (mut staying, mut most_before) = (T::default(), T::default());
    for init in &pod.init_containers {
        if init.restart_policy.as_deref() == Some("Always") {
            staying = add(staying, of(init));
        } else {
            most_before = more(most_before, add(staying, of(init)));
        }
    }
    let together = pod.containers.iter().map(of).fold(staying, &add);
    add(more(together, most_before), overhead)
}

pub(super) fn uses_gpus(pod: &PodSpec, config: &KubernetesConfig) -> bool {
    requested_gpus(pod, config) > 0 || !pod.resource_claims.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config() -> KubernetesConfig {
        KubernetesConfig::default()
    }

    fn node(change: impl FnOnce(&mut Value)) -> CachedNode {
        let mut node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "gpu-1", "resourceVersion": "7", "labels": { "nvidia.com/gpu.present": "true" } },
            "spec": {},
            "status": {
                "capacity": { "cpu": "96", "nvidia.com/gpu": "8" }, "allocatable": { "cpu": "95", "nvidia.com/gpu": "8" },
                "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }],
            },
        });
        change(&mut node);
        serde_json::from_value(node).unwrap()
    }

    fn seen(node: &CachedNode, tenants: &[PodOnNode]) -> Occupancy {
        occupancy(node, &NodeMarks::from_node(node, &config()), tenants, None, &config())
    }

    fn tenant(uses_gpus: bool, ours: bool) -> PodOnNode {
        PodOnNode { name: "team/train-0".into(), uses_gpus, nominated: false, ours }
    }

    #[test]
    fn only_a_ready_schedulable_whole_and_unused_node_is_free() {
        let healthy = node(|_| {});
        assert_eq!(seen(&healthy, &[]), Occupancy::Free);
        assert_eq!(seen(&healthy, &[tenant(false, false), tenant(true, true)]), Occupancy::Free);
        let by = |seen: Occupancy| match seen {
            Occupancy::Free => "free".to_owned(),
            Occupancy::Busy { by } => format!("busy: {by}"),
            Occupancy::Unknown { why } => format!("unknown: {why}"),
        };
        assert_eq!(by(seen(&healthy, &[tenant(true, false)])), "busy: pod team/train-0");
        let nominated = PodOnNode { nominated: true, ..tenant(true, false) };
        assert_eq!(by(seen(&healthy, &[nominated])), "busy: pod team/train-0, which is about to start");
        for (change, expected) in [
            (("/status/conditions/0/status", json!("Unknown")), "unknown: not ready: KubeletReady"),
            (("/status/conditions", json!([])), "unknown: no Ready condition reported"),
            (("/status", Value::Null), "unknown: the node has not reported yet"),
            (("/status/allocatable", json!({ "nvidia.com/gpu": "7" })), "unknown: 7 of 8 GPUs allocatable"),
            (("/status/allocatable", json!({})), "unknown: 0 of 8 GPUs allocatable"),
            (("/spec", json!({ "unschedulable": true })), "busy: kept out of service by another client: cordoned"),
            (
                ("/spec", json!({ "taints": [{ "key": "team", "value": "ml", "effect": "NoSchedule" }] })),
                "busy: kept out of service by taint team: team=ml:NoSchedule",
            ),
            (("/spec", json!({ "taints": [{ "key": "nvidia.com/gpu", "effect": "NoSchedule" }] })), "free"),
            (("/spec", json!({ "taints": [{ "key": "team", "effect": "PreferNoSchedule" }] })), "free"),
        ] {
            let changed = node(|node| *node.pointer_mut(change.0).unwrap() = change.1.clone());
            assert_eq!(by(seen(&changed, &[])), expected, "{change:?}");
        }
        let dead = node(|node| node["status"]["capacity"] = json!({ "nvidia.com/gpu": "0" }));
        assert!(
            has_gpus(&dead, &config())
                && !has_gpus(
                    &node(|node| {
                        node["status"]["capacity"] = json!({ "cpu": "96" });
                        node["metadata"]["labels"] = json!({});
                    }),
                    &config()
                )
        );
        let labelled = node(|node| node["metadata"]["labels"]["nvidia.com/gpu.count"] = json!("16"));
        assert_eq!(by(seen(&labelled, &[])), "unknown: 8 of 16 GPUs allocatable");
    }

    #[test]
    fn the_gpus_of_a_pod_are_counted_as_the_scheduler_counts_them() {
        let pod = |text: Value| serde_json::from_value::<PodSpec>(text).unwrap();
        let takes = |count: u32| json!({ "resources": { "limits": { "nvidia.com/gpu": count.to_string() } } });
        let stays = |count: u32| json!({ "restartPolicy": "Always", "resources": { "requests": { "nvidia.com/gpu": count.to_string() } } });
        for (spec, expected) in [
            (json!({ "containers": [takes(2), takes(3)] }), 5),
            (json!({ "containers": [takes(2)], "initContainers": [takes(4)] }), 4),
            (json!({ "containers": [takes(2)], "initContainers": [stays(1), takes(4)] }), 5),
            (json!({ "containers": [takes(2)], "initContainers": [takes(4), stays(3)] }), 5),
            (json!({ "containers": [takes(2)], "overhead": { "nvidia.com/gpu": "1" } }), 3),
            (json!({ "containers": [{}] }), 0),
            (json!({ "containers": [{ "resources": { "limits": { "nvidia.com/gpu": "3k" } } }] }), 3000),
            (json!({ "containers": [{ "resources": { "limits": { "nvidia.com/gpu": "what" } } }] }), 1),
            (
                json!({ "containers": [{ "resources": { "limits": { "nvidia.com/mig-1g.10gb": "2", "cpu": "4" } } }] }),
                2,
            ),
        ] {
            assert_eq!(requested_gpus(&pod(spec.clone()), &config()), expected, "{spec}");
        }
        let claim = pod(json!({ "containers": [{}], "resourceClaims": [{ "name": "gpu", "resourceClaimName": "x" }] }));
        assert!(uses_gpus(&claim, &config()));
    }
}
