//! What the service needs in the cluster, as objects to apply: its namespace, its account, exactly the rights that it uses,
//! and the priority class of its jobs. The backend's tests run with these rights and no others.

use serde_json::{Value, json};

use super::KubernetesConfig;

/// Whom the rights are given to.
const ACCOUNT: &str = "cluster-doctor";

/// One line of a role: group, kind, what may be done with it.
type Right = (&'static str, &'static str, &'static [&'static str]);

/// Everywhere: who uses a node, and our marks on it.
const IN_THE_CLUSTER: [Right; 2] =
    [("", "nodes", &["get", "list", "watch", "patch"]), ("", "pods", &["list", "watch"])];

/// In our namespace: our jobs and the keys they sign with.
const IN_OUR_NAMESPACE: [Right; 2] =
    [("batch", "jobs", &["create", "get", "list", "patch"]), ("", "secrets", &["create"])];

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
        json!({ "apiVersion": version, "kind": "ClusterRole", "metadata": { "name": ACCOUNT }, "rules": rules(&IN_THE_CLUSTER) }),
        json!({ "apiVersion": version, "kind": "ClusterRoleBinding", "metadata": { "name": ACCOUNT },
            "roleRef": role_of("ClusterRole"), "subjects": subjects }),
        json!({ "apiVersion": version, "kind": "Role", "metadata": { "name": ACCOUNT, "namespace": namespace },
            "rules": rules(&IN_OUR_NAMESPACE) }),
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
