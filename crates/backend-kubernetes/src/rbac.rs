//! The manifests that the service needs in the cluster: its namespace, its account, exactly the permissions that it uses, and the
//! priority class of its jobs. The backend's tests run with these permissions and no others.

use serde_json::{Value, json};

use super::{KubernetesConfig, Replace, RunAs, Share};

/// The service account that receives the permissions.
pub(super) const ACCOUNT: &str = "cluster-doctor";

/// One rule of a role: API group, resource, verbs.
type PermissionRule = (&'static str, &'static str, &'static [&'static str]);

/// Cluster-wide: nodes and our marks on them, pods and their eviction, and the review of agents' tokens.
const CLUSTER_RULES: &[PermissionRule] = &[
    ("", "nodes", &["get", "list", "watch", "patch"]),
    ("", "pods", &["list", "watch"]),
    ("", "pods/eviction", &["create"]),
    ("authentication.k8s.io", "tokenreviews", &["create"]),
    // Used only by `doctor config check --live`.
    ("scheduling.k8s.io", "priorityclasses", &["get"]),
];

/// For events of nodes.
const EVENT_RULE: PermissionRule = ("", "events", &["create"]);

/// For a condition of nodes.
const CONDITION_RULE: PermissionRule = ("", "nodes/status", &["patch"]);

/// For replacement by deleting the Node.
const DELETE_NODE_RULE: PermissionRule = ("", "nodes", &["delete"]);

/// In our namespace: our jobs and their signing keys.
const NAMESPACE_RULES: &[PermissionRule] = &[
    ("batch", "jobs", &["create", "get", "list", "patch"]),
    ("", "secrets", &["create"]),
    // For the pods of a multi-node run to find each other.
    ("", "services", &["create"]),
    // Used only by `doctor config check --live`: the namespace itself, and the policy of jobs.
    ("", "namespaces", &["get"]),
    ("", "configmaps", &["get"]),
    // What is left of a job that ended without a result: the end of its log, and the events of a pod that never started. Without
    // a shared directory, the log also has the results that exceed a termination message.
    ("", "pods/log", &["get"]),
    ("", "events", &["list"]),
];

/// For a shared volume. Used only by `doctor config check --live`.
const VOLUME_CLAIM_RULE: PermissionRule = ("", "persistentvolumeclaims", &["get"]);

/// For runs as Volcano jobs.
const VOLCANO_RULES: &[PermissionRule] =
    &[("batch.volcano.sh", "jobs", &["create", "get", "list", "patch"]), ("bus.volcano.sh", "commands", &["create"])];

/// One permitted verb.
#[cfg(feature = "client")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Permission {
    pub(super) group: &'static str,
    resource_path: &'static str,
    pub(super) verb: &'static str,
    /// In our namespace rather than cluster-wide.
    pub(super) namespaced: bool,
}

#[cfg(feature = "client")]
impl Permission {
    pub(super) fn resource(&self) -> &'static str {
        self.resource_path.split_once('/').map_or(self.resource_path, |(kind, _)| kind)
    }

    pub(super) fn subresource(&self) -> Option<&'static str> {
        self.resource_path.split_once('/').map(|(_, part)| part)
    }
}

#[cfg(feature = "client")]
impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource_path)
    }
}

/// Returns all permissions for these settings, one verb at a time.
#[cfg(feature = "client")]
pub(super) fn permissions(config: &KubernetesConfig) -> Vec<Permission> {
    let of = |rights: Vec<PermissionRule>, namespaced: bool| {
        rights.into_iter().flat_map(move |(group, kind, verbs)| {
            verbs.iter().map(move |verb| Permission { group, resource_path: kind, verb, namespaced })
        })
    };
    of(cluster_rules(config), false).chain(of(namespace_rules(config), true)).collect()
}

fn cluster_rules(config: &KubernetesConfig) -> Vec<PermissionRule> {
    let mut rights = CLUSTER_RULES.to_vec();
    rights.extend(config.write.event.then_some(EVENT_RULE));
    rights.extend(config.write.condition.is_some().then_some(CONDITION_RULE));
    rights.extend((config.replace == Replace::DeleteNode).then_some(DELETE_NODE_RULE));
    rights
}

fn namespace_rules(config: &KubernetesConfig) -> Vec<PermissionRule> {
    let mut rights = NAMESPACE_RULES.to_vec();
    if matches!(config.share, Share::Claim(_)) {
        rights.push(VOLUME_CLAIM_RULE);
    }
    if matches!(config.run_as, RunAs::Volcano(_)) {
        rights.extend(VOLCANO_RULES);
    }
    rights
}

/// Returns the objects that must exist before the service starts, in the order of creation.
pub fn manifests(config: &KubernetesConfig) -> Vec<Value> {
    let namespace = &config.namespace;
    let rules = |rights: &[PermissionRule]| -> Vec<Value> {
        let rule = |(group, kind, verbs): &PermissionRule| json!({ "apiGroups": [group], "resources": [kind], "verbs": verbs });
        rights.iter().map(rule).collect()
    };
    let subjects = json!([{ "kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace }]);
    let rbac = "rbac.authorization.k8s.io";
    let role_of = |kind: &str| json!({ "apiGroup": rbac, "kind": kind, "name": ACCOUNT });
    let version = format!("{rbac}/v1");
    let mut all = vec![
        // Jobs keep state in a hostPath volume, which requires the privileged level.
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace,
            "labels": { "pod-security.kubernetes.io/enforce": "privileged" } } }),
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": ACCOUNT, "namespace": namespace } }),
        json!({ "apiVersion": version, "kind": "ClusterRole", "metadata": { "name": ACCOUNT }, "rules": rules(&cluster_rules(config)) }),
        json!({ "apiVersion": version, "kind": "ClusterRoleBinding", "metadata": { "name": ACCOUNT },
            "roleRef": role_of("ClusterRole"), "subjects": subjects }),
        json!({ "apiVersion": version, "kind": "Role", "metadata": { "name": ACCOUNT, "namespace": namespace },
            "rules": rules(&namespace_rules(config)) }),
        json!({ "apiVersion": version, "kind": "RoleBinding", "metadata": { "name": ACCOUNT, "namespace": namespace },
            "roleRef": role_of("Role"), "subjects": subjects }),
    ];
    all.extend(config.priority_class.as_ref().map(|class| {
        json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": class },
            "value": -1000, "globalDefault": false, "preemptionPolicy": "Never",
            "description": "Cluster Doctor's validation jobs; user pods preempt them." })
    }));
    all
}
