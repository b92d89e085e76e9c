//! The agents: a DaemonSet on GPU nodes, privileged on the node and without permissions in the cluster.

use serde_json::json;

use super::{
    super::tree::{Test, Tree, list, map, text},
    AGENT, ETC, POLICY, labels, metadata, mount, object, volume,
};

/// The agent's state directory, which outlives its pod.
const STATE: &str = "/var/lib/cluster-doctor/agent";
/// The node's root file system in the agent's container.
const HOST: &str = "/host";

pub(super) fn objects() -> Vec<Tree> {
    let update = map([("rollingUpdate", map([("maxUnavailable", Tree::from("10%"))]))]);
    let spec = map([
        ("selector", map([("matchLabels", labels("agent"))])),
        ("updateStrategy", update),
        ("template", map([("metadata", map([("labels", labels("agent"))])), ("spec", agent_pod())])),
    ]);
    vec![
        object("apps/v1", "DaemonSet", metadata(AGENT, "agent"), vec![("spec", spec)]).when(Test::Has("agent.enabled")),
    ]
}

fn agent_pod() -> Tree {
    let tolerate = |key: Tree| map([("key", key), ("operator", "Exists".into())]);
    let token = json!({ "sources": [{ "serviceAccountToken": {
        "audience": "cluster-doctor", "expirationSeconds": 3600, "path": "token" } }] });
    map([
        ("serviceAccountName", Tree::from(AGENT)),
        // The projected token below is for the controller only. The API server rejects it, and the agent has no other.
        ("automountServiceAccountToken", false.into()),
        ("imagePullSecrets", Tree::Setting("images.pullSecrets").when(Test::Has("images.pullSecrets"))),
        ("priorityClassName", Tree::Setting("agent.priorityClass").when(Test::Has("agent.priorityClass"))),
        ("runtimeClassName", Tree::Setting("agent.runtimeClass").when(Test::Has("agent.runtimeClass"))),
        ("terminationGracePeriodSeconds", 10.into()),
        ("hostPID", true.into()),
        ("hostNetwork", Tree::from(true).when(Test::Has("agent.hostNetwork"))),
        ("dnsPolicy", Tree::from("ClusterFirstWithHostNet").when(Test::Has("agent.hostNetwork"))),
        ("nodeSelector", Tree::Setting("agent.nodeSelector").when(Test::Has("agent.nodeSelector"))),
        (
            "tolerations",
            list([
                tolerate(text("{prefix}/unhealthy")),
                tolerate(text("{prefix}/maintenance")),
                tolerate("node.kubernetes.io/unschedulable".into()),
                Tree::Each("agent.tolerations"),
            ]),
        ),
        ("containers", list([agent_container()])),
        (
            "volumes",
            list([
                volume("host", "hostPath", map([("path", "/".into())])),
                volume("state", "hostPath", map([("path", STATE.into()), ("type", "DirectoryOrCreate".into())])),
                volume("policy", "configMap", map([("name", POLICY.into())])),
                volume("token", "projected", Tree::from(token)),
            ]),
        ),
    ])
}

fn agent_container() -> Tree {
    let node = json!({ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } });
    let mut host = mount("host", HOST, true);
    if let Tree::Map(entries) = &mut host {
        // Mounts made on the node later are visible too.
        entries.push(("mountPropagation".to_owned(), "HostToContainer".into()));
    }
    let command = list([
        Tree::from("doctor-node"),
        "agent".into(),
        "--controller".into(),
        text("http://cluster-doctor.{Release.Namespace}.svc:{port}"),
        "--token".into(),
        "/var/run/secrets/cluster-doctor/token".into(),
        "--node".into(),
        "$(NODE_NAME)".into(),
        "--root".into(),
        HOST.into(),
        "--state".into(),
        STATE.into(),
        "--policy".into(),
        "/etc/cluster-doctor/policy.toml".into(),
    ]);
    map([
        ("name", Tree::from("agent")),
        ("image", Tree::Setting("images.node")),
        ("imagePullPolicy", Tree::Setting("images.pullPolicy")),
        ("command", command),
        ("env", list([Tree::from(node)])),
        ("resources", Tree::Setting("agent.resources")),
        (
            "securityContext",
            map([("runAsUser", 0.into()), ("privileged", true.into()), ("readOnlyRootFilesystem", true.into())]),
        ),
        (
            "volumeMounts",
            list([
                host,
                mount("state", STATE, false),
                mount("policy", ETC, true),
                mount("token", "/var/run/secrets/cluster-doctor", true),
            ]),
        ),
    ])
}
