//! The GPUs that a Node declares: by the capacity of whole GPUs, and by the count in a label. Pure.
//!
//! Only whole GPUs count. A partition (MIG) is not a GPU, and with the device plugin's strategy `single` both the capacity
//! `nvidia.com/gpu` and the label `nvidia.com/gpu.count` count partitions; with time-slicing or MPS the capacity counts each GPU
//! several times. The names are those of NVIDIA's GPU feature discovery:
//! <https://github.com/NVIDIA/k8s-device-plugin/blob/main/docs/gpu-feature-discovery/README.md>. ResourceSlices (dynamic resource
//! allocation) are not read.

use doctor_core::node::Declared;

use super::{
    config::KubernetesConfig,
    objects::CachedNode,
    occupancy::{is_gpu, parse_whole},
};

/// The GPU's model; with partitions such as `A100-SXM4-40GB-MIG-1g.5gb`, with shared GPUs such as `Tesla-T4-SHARED`.
const PRODUCT_LABEL: &str = "nvidia.com/gpu.product";
/// `none`, `time-slicing` or `mps`.
const SHARING_LABEL: &str = "nvidia.com/gpu.sharing-strategy";
/// GPUs of other makers, which no check counts.
const OTHER_MAKERS: [&str; 2] = ["amd.com/", "gpu.intel.com/"];

/// Returns what the node declares; `None` if it does not say how many whole GPUs it has. A capacity of zero says nothing: a
/// device plugin that died leaves it.
pub(super) fn declared(node: &CachedNode, config: &KubernetesConfig) -> Option<Declared> {
    let label = |name: &str| node.metadata.labels.get(name);
    let product = label(PRODUCT_LABEL).unwrap_or_default();
    if product.contains("-MIG-") || has_partitions(node, config) {
        return None;
    }
    let counted = label(&config.gpu_count_label).and_then(parse_whole).unwrap_or(0);
    let shared = product.ends_with("-SHARED") || label(SHARING_LABEL).is_some_and(|how| how != "none");
    let offered = if shared { 0 } else { whole_gpus(node, config) };
    // A label may be older than the capacity, and the reverse: neither counts more GPUs than there were.
    Declared::gpus(u32::try_from(counted.max(offered)).ok()?)
}

/// Returns the GPU resources of the node's capacity.
fn capacity<'a>(node: &'a CachedNode, config: &'a KubernetesConfig) -> impl Iterator<Item = (&'a str, u64)> {
    let amounts = node.status.iter().flat_map(|status| status.capacity.iter());
    amounts
        .filter(|(name, _)| is_gpu(name, config) && !OTHER_MAKERS.iter().any(|maker| name.starts_with(maker)))
        .map(|(name, amount)| (name, parse_whole(amount).unwrap_or(0)))
}

fn is_partition(resource: &str) -> bool {
    resource.rsplit('/').next().is_some_and(|name| name.starts_with("mig-"))
}

fn has_partitions(node: &CachedNode, config: &KubernetesConfig) -> bool {
    capacity(node, config).any(|(name, amount)| is_partition(name) && amount > 0)
}

fn whole_gpus(node: &CachedNode, config: &KubernetesConfig) -> u64 {
    capacity(node, config)
        .filter(|(name, _)| !is_partition(name) && !name.ends_with(".shared"))
        .fold(0, |all, (_, amount)| all.saturating_add(amount))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Written by hand; the labels are those that GPU feature discovery documents.
    fn gpus(labels: &Value, capacity: &Value) -> Option<u32> {
        let node: CachedNode = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "gpu-1", "labels": labels },
            "spec": {},
            "status": { "capacity": capacity },
        }))
        .unwrap();
        declared(&node, &KubernetesConfig::default()).and_then(|declared| declared.gpus)
    }

    #[test]
    fn whole_gpus_are_declared_by_the_capacity_or_the_label() {
        let (count, gpu) = ("nvidia.com/gpu.count", "nvidia.com/gpu");
        for (labels, capacity, expected) in [
            (json!({}), json!({ gpu: "8", "cpu": "96" }), Some(8)),
            (json!({ count: "8" }), json!({ gpu: "8" }), Some(8)),
            (json!({ count: "8" }), json!({}), Some(8)),
            // A dead device plugin declares nothing, and the label still does.
            (json!({}), json!({ gpu: "0" }), None),
            (json!({ count: "8" }), json!({ gpu: "0" }), Some(8)),
            (json!({ count: "0" }), json!({ gpu: "0" }), None),
            (json!({ "nvidia.com/gpu.present": "true" }), json!({ "cpu": "96" }), None),
            // One of the two is outdated.
            (json!({ count: "8" }), json!({ gpu: "7" }), Some(8)),
            (json!({ count: "4" }), json!({ gpu: "8" }), Some(8)),
            (json!({ count: "many" }), json!({ gpu: "8" }), Some(8)),
            (json!({}), json!({ gpu: "many" }), None),
            (json!({}), json!({ gpu: "99999999999" }), None),
            // AMD's GPUs are not counted by any check.
            (json!({}), json!({ "amd.com/gpu": "8" }), None),
        ] {
            assert_eq!(gpus(&labels, &capacity), expected, "{labels} {capacity}");
        }
    }

    #[test]
    fn partitions_and_shares_are_not_counted_as_gpus() {
        let (count, gpu) = ("nvidia.com/gpu.count", "nvidia.com/gpu");
        for (labels, capacity, expected) in [
            // Strategy `single`: eight GPUs in seven parts each.
            (
                json!({ "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb", count: "56" }),
                json!({ gpu: "56" }),
                None,
            ),
            // The same strategy while no GPU is partitioned.
            (
                json!({ "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", count: "8" }),
                json!({ gpu: "8" }),
                Some(8),
            ),
            // Strategy `mixed`: whole GPUs beside partitions.
            (json!({ count: "8" }), json!({ gpu: "7", "nvidia.com/mig-3g.20gb": "2" }), None),
            (json!({}), json!({ "nvidia.com/mig-1g.5gb": "56" }), None),
            (json!({}), json!({ gpu: "8", "nvidia.com/mig-1g.5gb": "0" }), Some(8)),
            // Time-slicing and MPS: each GPU is offered ten times.
            (
                json!({ "nvidia.com/gpu.product": "Tesla-T4-SHARED", "nvidia.com/gpu.replicas": "10", count: "4" }),
                json!({ gpu: "40" }),
                Some(4),
            ),
            (json!({ "nvidia.com/gpu.sharing-strategy": "mps", count: "4" }), json!({ gpu: "40" }), Some(4)),
            (json!({ "nvidia.com/gpu.sharing-strategy": "time-slicing" }), json!({ gpu: "40" }), None),
            (json!({ "nvidia.com/gpu.sharing-strategy": "none", count: "8" }), json!({ gpu: "8" }), Some(8)),
        ] {
            assert_eq!(gpus(&labels, &capacity), expected, "{labels} {capacity}");
        }
    }
}
