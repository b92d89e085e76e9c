//! What the service needs in the cluster, as objects to apply: its namespace, its account, exactly the rights that it uses,
//! and the priority class of its jobs. The backend's tests run with these rights and no others.

use serde_json::{Value, json};

use super::{KubernetesConfig, Replace, RunAs, Share};

/// Whom the rights are given to.
pub(super) const ACCOUNT: &str = "cluster-doctor";

/// One line of a role: group, kind, what may be done with it.
type Right = (&'static str, &'static str, &'static [&'static str]);

/// Everywhere: who uses a node, our marks on it, and user work that is asked to leave; whose an agent's token is.
const IN_THE_CLUSTER: &[Right] = &[
    ("", "nodes", &["get", "list", "watch", "patch"]),
    ("", "pods", &["list", "watch"]),
    ("", "pods/eviction", &["create"]),
    ("authentication.k8s.io", "tokenreviews", &["create"]),
    // Only `doctor config check --live` looks at this.
    ("scheduling.k8s.io", "priorityclasses", &["get"]),
];

/// For events of nodes.
const TO_TELL: Right = ("", "events", &["create"]);

/// For a condition of nodes.
const TO_SET_CONDITIONS: Right = ("", "nodes/status", &["patch"]);

/// Where a node is replaced by deleting it.
const TO_DELETE_NODES: Right = ("", "nodes", &["delete"]);

/// In our namespace: our jobs and the keys they sign with.
const IN_OUR_NAMESPACE: &[Right] = &[
    ("batch", "jobs", &["create", "get", "list", "patch"]),
    ("", "secrets", &["create"]),
    // By which the pods of a run over several nodes find each other.
    ("", "services", &["create"]),
    // Only `doctor config check --live` looks at these: itself, the policy of jobs.
    ("", "namespaces", &["get"]),
    ("", "configmaps", &["get"]),
];

/// Where a volume is shared; only `doctor config check --live` looks at it.
const TO_SEE_THE_VOLUME: Right = ("", "persistentvolumeclaims", &["get"]);

/// Where nothing is shared: logs of our jobs, with the results that are too long for anything else.
const TO_READ_LOGS: Right = ("", "pods/log", &["get"]);

/// Where runs are jobs of Volcano's.
const FOR_VOLCANO: &[Right] =
    &[("batch.volcano.sh", "jobs", &["create", "get", "list", "patch"]), ("bus.volcano.sh", "commands", &["create"])];

/// One verb that the service uses.
#[cfg(feature = "client")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Needed {
    pub(super) group: &'static str,
    kind: &'static str,
    pub(super) verb: &'static str,
    /// In our namespace, not everywhere.
    pub(super) namespaced: bool,
}

#[cfg(feature = "client")]
impl Needed {
    pub(super) fn resource(&self) -> &'static str {
        self.kind.split_once('/').map_or(self.kind, |(kind, _)| kind)
    }

    pub(super) fn subresource(&self) -> Option<&'static str> {
        self.kind.split_once('/').map(|(_, part)| part)
    }
}

#[cfg(feature = "client")]
impl std::fmt::Display for Needed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.kind)
    }
}

/// Everything that is given for these settings, one verb at a time.
#[cfg(feature = "client")]
pub(super) fn needed(config: &KubernetesConfig) -> Vec<Needed> {
    let of = |rights: Vec<Right>, namespaced: bool| {
        rights.into_iter().flat_map(move |(group, kind, verbs)| {
            verbs.iter().map(move |verb| Needed { group, kind, verb, namespaced })
        })
    };
    of(in_the_cluster(config), false).chain(of(in_our_namespace(config), true)).collect()
}

fn in_the_cluster(config: &KubernetesConfig) -> Vec<Right> {
    let mut rights = IN_THE_CLUSTER.to_vec();
    rights.extend(config.write.event.then_some(TO_TELL));
    rights.extend(config.write.condition.is_some().then_some(TO_SET_CONDITIONS));
    rights.extend((config.replace == Replace::DeleteNode).then_some(TO_DELETE_NODES));
    rights
}

fn in_our_namespace(config: &KubernetesConfig) -> Vec<Right> {
    let mut rights = IN_OUR_NAMESPACE.to_vec();
    match config.share {
        Share::None => rights.push(TO_READ_LOGS),
        Share::Claim(_) => rights.push(TO_SEE_THE_VOLUME),
        Share::HostPath(_) => {}
    }
    if matches!(config.run_as, RunAs::Volcano(_)) {
        rights.extend(FOR_VOLCANO);
    }
    rights
}

/// Everything that has to be there before the service starts, in the order in which it is made.
pub fn manifests(config: &KubernetesConfig) -> Vec<Value> {
    let namespace = &config.namespace;
    let rules = |rights: &[Right]| -> Vec<Value> {
        let rule = |(group, kind, verbs): &Right| json!({ "apiGroups": [group], "resources": [kind], "verbs": verbs });
        rights.iter().map(rule).collect()
    };
    let subjects = json!([{ "kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace }]);
    let rbac = "rbac.authorization.k8s.io";
    let role_of = |kind: &str| json!({ "apiGroup": rbac, "kind": kind, "name": ACCOUNT });
    let version = format!("{rbac}/v1");
    let mut all = vec![
        // Jobs keep what they remember of a node in a directory of the node, which needs this.
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace,
            "labels": { "pod-security.kubernetes.io/enforce": "privileged" } } }),
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": ACCOUNT, "namespace": namespace } }),
        json!({ "apiVersion": version, "kind": "ClusterRole", "metadata": { "name": ACCOUNT }, "rules": rules(&in_the_cluster(config)) }),
        json!({ "apiVersion": version, "kind": "ClusterRoleBinding", "metadata": { "name": ACCOUNT },
            "roleRef": role_of("ClusterRole"), "subjects": subjects }),
        json!({ "apiVersion": version, "kind": "Role", "metadata": { "name": ACCOUNT, "namespace": namespace },
            "rules": rules(&in_our_namespace(config)) }),
        json!({ "apiVersion": version, "kind": "RoleBinding", "metadata": { "name": ACCOUNT, "namespace": namespace },
            "roleRef": role_of("Role"), "subjects": subjects }),
    ];
    all.extend(config.priority_class.as_ref().map(|class| {
        json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": class },
            "value": -1000, "globalDefault": false, "preemptionPolicy": "Never",
            "description": "Validation by Cluster Doctor: every other pod goes first." })
    }));
    all
}
