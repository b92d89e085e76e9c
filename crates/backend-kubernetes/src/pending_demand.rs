//! Determines which nodes pending user work needs. Pure.
//!
//! If a user's pod may preempt ours, the scheduler does that by itself. If it may not (its class never preempts, or its scheduler
//! does not), it stays pending although only a job of ours is in its way. This module trusts the scheduler's report that no node
//! fits, since the scheduler knows more, and only asks whether one of our nodes would fit.

use std::collections::HashMap;

use super::{
    config::KubernetesConfig,
    objects::{
        CachedNode, Condition, Container, NodeTerm, PodObject, PodSpec, Quantities, Requirement, Taint, Toleration,
    },
    occupancy::{is_gpu, pod_request, uses_gpus},
};

/// A pod for which its scheduler found no node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PendingPod {
    /// `namespace/name`.
    pub(super) name: String,
    /// Its creation time in milliseconds: the oldest is served first.
    created_millis: i64,
    /// Its requests, by resource name.
    requests: Vec<(String, f64)>,
    selector: Quantities,
    /// Alternatives; empty: no restriction.
    node_terms: Vec<NodeTerm>,
    tolerations: Vec<Toleration>,
}

/// Returns `None` if the pod does not wait for a node, or requests no GPU.
pub(super) fn pending_pod(pod: &PodObject, config: &KubernetesConfig) -> Option<PendingPod> {
    let status = pod.status.as_ref()?;
    let unschedulable = |one: &Condition| {
        one.matches("PodScheduled", "False") && matches!(one.reason.as_str(), "Unschedulable" | "Undetermined")
    };
    let is_pending = status.phase == "Pending" && pod.spec.node_name.is_none() && status.nominated_node_name.is_none();
    let terminating = pod.metadata.deletion_timestamp.is_some();
    if !is_pending || terminating || !status.conditions.iter().any(unschedulable) || !uses_gpus(&pod.spec, config) {
        return None;
    }
    // Which devices satisfy a claim is decided elsewhere.
    if !pod.spec.resource_claims.is_empty() {
        return None;
    }
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let terms =
        affinity.and_then(|affinity| affinity.required.as_ref()).map(|required| required.node_selector_terms.clone());
    let metadata = &pod.metadata;
    Some(PendingPod {
        name: format!(
            "{}/{}",
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default()
        ),
        created_millis: metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_millisecond()),
        requests: resource_requests(&pod.spec),
        selector: pod.spec.node_selector.clone(),
        node_terms: terms.unwrap_or_default(),
        tolerations: pod.spec.tolerations.clone(),
    })
}

fn resource_requests(pod: &PodSpec) -> Vec<(String, f64)> {
    let containers = || pod.containers.iter().chain(&pod.init_containers);
    let mut names: Vec<&str> = containers()
        .flat_map(|one| one.resources.requests.iter().chain(one.resources.limits.iter()))
        .map(|(name, _)| name)
        .collect();
    names.sort_unstable();
    names.dedup();
    let amount = |amounts: &Quantities, name: &str| amounts.get(name).and_then(quantity);
    let requested = |name: &str| {
        let of =
            |one: &Container| amount(&one.resources.requests, name).or_else(|| amount(&one.resources.limits, name));
        pod_request(pod, |one| of(one).unwrap_or(0.0), amount(&pod.overhead, name).unwrap_or(0.0), |a, b| a + b)
    };
    names.into_iter().map(|name| (name.to_owned(), requested(name))).collect()
}

/// Parses a Kubernetes quantity: `8`, `500m`, `1.5Gi`, `2e3`. `None`: it has another form.
fn quantity(text: &str) -> Option<f64> {
    const SCALES: [(&str, f64); 13] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
    ];
    let scaled = SCALES.iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)));
    let (digits, scale) = scaled.unwrap_or((text, 1.0));
    digits.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0).map(|number| number * scale)
}

/// A node that may suit a pending pod.
pub(super) struct CandidateNode<'a> {
    pub(super) node: &'a CachedNode,
    /// Whether a job of ours is on it.
    pub(super) has_our_job: bool,
}

/// Returns the needed nodes and the pod that needs each. A node without our job is reserved for the pod; one with our job is
/// taken only if there is no other. `offers` must be sorted by name.
pub(super) fn demanded_nodes(
    offers: &[CandidateNode<'_>],
    mut waiting: Vec<&PendingPod>,
    config: &KubernetesConfig,
) -> HashMap<String, String> {
    waiting.sort_by(|a, b| (a.created_millis, &a.name).cmp(&(b.created_millis, &b.name)));
    let mut left: Vec<HashMap<&str, f64>> = offers.iter().map(|offer| allocatable(offer.node)).collect();
    let mut demanded = HashMap::new();
    for pod in waiting {
        let find_offer = |ours: bool| {
            let mut candidates = (0..offers.len()).filter(|index| offers[*index].has_our_job == ours);
            candidates.find(|index| fits(pod, offers[*index].node, &left[*index], config))
        };
        let Some(index) = find_offer(false).or_else(|| find_offer(true)) else { continue };
        for (name, amount) in &pod.requests {
            if let Some(available) = left[index].get_mut(name.as_str()) {
                *available -= amount;
            }
        }
        demanded.entry(offers[index].node.name().to_owned()).or_insert_with(|| pod.name.clone());
    }
    demanded
}

fn allocatable(node: &CachedNode) -> HashMap<&str, f64> {
    let amounts = node.status.as_ref().map(|status| status.allocatable.iter());
    amounts.into_iter().flatten().filter_map(|(name, amount)| Some((name, quantity(amount)?))).collect()
}

fn fits(pod: &PendingPod, node: &CachedNode, left: &HashMap<&str, f64>, config: &KubernetesConfig) -> bool {
    let enough = |(name, amount): &(String, f64)| {
        // A resource that the node does not report, such as one of an unknown kind, is assumed sufficient; GPUs are not.
        *amount <= left.get(name.as_str()).copied().unwrap_or(if is_gpu(name, config) { 0.0 } else { f64::INFINITY })
    };
    let labels = &node.metadata.labels;
    let selected = pod.selector.iter().all(|(name, value)| labels.get(name) == Some(value));
    let matched = pod.node_terms.is_empty() || pod.node_terms.iter().any(|term| matches_term(term, node));
    let ours = config.prefixed("maintenance");
    let keeps_off = |taint: &&Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && taint.key != ours;
    let tolerated =
        node.spec.taints.iter().filter(keeps_off).all(|taint| pod.tolerations.iter().any(|one| tolerates(one, taint)));
    pod.requests.iter().all(enough) && selected && matched && tolerated && !node.spec.unschedulable
}

/// An empty term matches nothing, as in the scheduler.
fn matches_term(term: &NodeTerm, node: &CachedNode) -> bool {
    let labels = |name: &str| node.metadata.labels.get(name);
    let fields = |name: &str| (name == "metadata.name").then(|| node.name());
    let has_requirements = !term.match_expressions.is_empty() || !term.match_fields.is_empty();
    has_requirements
        && term.match_expressions.iter().all(|one| matches_requirement(one, labels(&one.key)))
        && term.match_fields.iter().all(|one| matches_requirement(one, fields(&one.key)))
}

fn matches_requirement(one: &Requirement, value: Option<&str>) -> bool {
    let among = |value: &str| one.values.iter().any(|known| known == value);
    let number = |text: &str| text.parse::<i64>().ok();
    let bound = || one.values.first().and_then(|text| number(text));
    match one.operator.as_str() {
        "In" => value.is_some_and(among),
        "NotIn" => !value.is_some_and(among),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => value.and_then(number).zip(bound()).is_some_and(|(value, bound)| value > bound),
        "Lt" => value.and_then(number).zip(bound()).is_some_and(|(value, bound)| value < bound),
        // No node is released for an unknown operator.
        _ => false,
    }
}

fn tolerates(one: &Toleration, taint: &Taint) -> bool {
    let effect = one.effect.as_deref().is_none_or(|effect| effect.is_empty() || effect == taint.effect);
    let key = one.key.as_deref().unwrap_or_default();
    let exists = one.operator.as_deref() == Some("Exists");
    let value = exists || one.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    effect && value && (key == taint.key || (key.is_empty() && exists))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config() -> KubernetesConfig {
        KubernetesConfig::default()
    }

    fn node(name: &str, change: impl FnOnce(&mut Value)) -> CachedNode {
        let mut node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": name, "labels": { "zone": "a", "gen": "4" } }, "spec": {},
            "status": { "allocatable": { "cpu": "95500m", "memory": "2000Gi", "nvidia.com/gpu": "8" } },
        });
        change(&mut node);
        serde_json::from_value(node).unwrap()
    }

    fn pod(name: &str, gpus: u32, change: impl FnOnce(&mut Value)) -> Option<PendingPod> {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "team", "creationTimestamp": "2026-11-15T20:00:00Z" },
            "spec": { "containers": [{ "resources": { "requests": { "cpu": "8", "memory": "100Gi" },
                "limits": { "nvidia.com/gpu": gpus.to_string() } } }] },
            "status": { "phase": "Pending", "conditions": [
                { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes" }] },
        });
        change(&mut pod);
        pending_pod(&serde_json::from_value(pod).unwrap(), &config())
    }

    fn demands(nodes: &[(&CachedNode, bool)], pods: &[PendingPod]) -> Vec<String> {
        let offers: Vec<CandidateNode<'_>> =
            nodes.iter().map(|(node, ours)| CandidateNode { node, has_our_job: *ours }).collect();
        let found = demanded_nodes(&offers, pods.iter().collect(), &config());
        let mut lines: Vec<String> = found.into_iter().map(|(node, pod)| format!("{node} by {pod}")).collect();
        lines.sort();
        lines
    }

    #[test]
    fn a_node_with_our_job_is_demanded_only_if_no_other_node_fits() {
        let (a, b) = (node("a", |_| {}), node("b", |_| {}));
        let one = pod("train", 8, |_| {}).unwrap();
        assert_eq!(demands(&[(&a, true), (&b, true)], std::slice::from_ref(&one)), ["a by team/train"]);
        assert_eq!(demands(&[(&a, true), (&b, false)], std::slice::from_ref(&one)), ["b by team/train"]);
        let two = pod("other", 8, |_| {}).unwrap();
        assert_eq!(demands(&[(&a, true), (&b, false)], &[one, two]), ["a by team/train", "b by team/other"]);
        let small = |name: &str| pod(name, 4, |_| {}).unwrap();
        assert_eq!(demands(&[(&a, true), (&b, true)], &[small("x"), small("y")]), ["a by team/x"], "both fit on one");
    }

    #[test]
    fn only_an_unschedulable_pod_is_pending() {
        assert!(pod("p", 0, |_| {}).is_none(), "it takes no GPU");
        assert!(pod("p", 8, |pod| pod["status"]["conditions"][0]["reason"] = json!("SchedulingGated")).is_none());
        assert!(pod("p", 8, |pod| pod["status"]["conditions"] = json!([])).is_none(), "not yet tried");
        assert!(pod("p", 8, |pod| pod["status"]["nominatedNodeName"] = json!("a")).is_none(), "it is nominated");
        assert!(pod("p", 8, |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-15T20:00:00Z")).is_none());
        assert!(pod("p", 8, |pod| pod["spec"]["nodeName"] = json!("a")).is_none());
    }

    #[test]
    fn a_node_is_not_demanded_by_a_pod_that_would_not_fit() {
        let plain = node("a", |_| {});
        let tainted =
            node("a", |node| node["spec"]["taints"] = json!([{ "key": "team", "value": "x", "effect": "NoSchedule" }]));
        let ours = node("a", |node| {
            node["spec"]["taints"] =
                json!([{ "key": "cluster-doctor.io/maintenance", "value": "true", "effect": "NoSchedule" }]);
        });
        let cordoned = node("a", |node| node["spec"]["unschedulable"] = json!(true));
        let affine = |expression: Value| {
            pod("p", 8, |pod| {
                pod["spec"]["affinity"] = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{ "matchExpressions": [expression] }] } } });
            })
        };
        let tolerant = |toleration: Value| pod("p", 8, |pod| pod["spec"]["tolerations"] = json!([toleration]));
        for (node, waiting, expected) in [
            (&plain, pod("p", 8, |_| {}), true),
            (&plain, pod("p", 9, |_| {}), false),
            (
                &plain,
                pod("p", 8, |pod| pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("96")),
                false,
            ),
            (&plain, pod("p", 8, |pod| pod["spec"]["nodeSelector"] = json!({ "zone": "a" })), true),
            (&plain, pod("p", 8, |pod| pod["spec"]["nodeSelector"] = json!({ "zone": "b" })), false),
            (&plain, affine(json!({ "key": "zone", "operator": "In", "values": ["a", "b"] })), true),
            (&plain, affine(json!({ "key": "zone", "operator": "NotIn", "values": ["a"] })), false),
            (&plain, affine(json!({ "key": "gen", "operator": "Gt", "values": ["3"] })), true),
            (&plain, affine(json!({ "key": "gen", "operator": "Lt", "values": ["3"] })), false),
            (&plain, affine(json!({ "key": "zone", "operator": "Exists" })), true),
            (&plain, affine(json!({ "key": "zone", "operator": "DoesNotExist" })), false),
            (&plain, affine(json!({ "key": "zone", "operator": "Resembles" })), false),
            (&tainted, pod("p", 8, |_| {}), false),
            (
                &tainted,
                tolerant(json!({ "key": "team", "operator": "Equal", "value": "x", "effect": "NoSchedule" })),
                true,
            ),
            (&tainted, tolerant(json!({ "key": "team", "operator": "Equal", "value": "y" })), false),
            (&tainted, tolerant(json!({ "operator": "Exists" })), true),
            (&ours, pod("p", 8, |_| {}), true),
            (&cordoned, pod("p", 8, |_| {}), false),
        ] {
            let waiting = waiting.unwrap();
            assert_eq!(!demands(&[(node, true)], std::slice::from_ref(&waiting)).is_empty(), expected, "{waiting:?}");
        }
    }

    #[test]
    fn quantities_are_parsed_as_kubernetes_writes_them() {
        for (text, number) in [("8", 8.0), ("500m", 0.5), ("1.5Gi", 1_610_612_736.0), ("2k", 2000.0), ("2e3", 2000.0)] {
            assert_eq!(quantity(text), Some(number), "{text}");
        }
        for text in ["", "many", "-1", "1Zi", "inf"] {
            assert_eq!(quantity(text), None, "{text}");
        }
    }
}
