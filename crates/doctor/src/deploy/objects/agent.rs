//! The agents: a DaemonSet on GPU nodes, privileged on the node and without permissions in the cluster.

use serde_json::json;

use super::{
    super::template::{Template, TemplateCondition, list, map, text},
    AGENT, AUTHORITY_DIR, CONFIG_DIR, NO_TLS, POLICY, TLS, labels, metadata, mount, object, volume,
};

/// The agent's state directory, which outlives its pod.
const STATE_DIR: &str = "/var/lib/cluster-doctor/agent";
/// The node's root file system in the agent's container.
const HOST_ROOT: &str = "/host";

pub(super) fn objects() -> Vec<Template> {
    let update = map([("rollingUpdate", map([("maxUnavailable", Template::from("10%"))]))]);
    let spec = map([
        ("selector", map([("matchLabels", labels("agent"))])),
        ("updateStrategy", update),
        ("template", map([("metadata", map([("labels", labels("agent"))])), ("spec", agent_pod())])),
    ]);
    vec![
        object("apps/v1", "DaemonSet", metadata(AGENT, "agent"), vec![("spec", spec)])
            .only_if(TemplateCondition::IsSet("agent.enabled")),
    ]
}

fn agent_pod() -> Template {
    let tolerate = |key: Template| map([("key", key), ("operator", "Exists".into())]);
    let token = json!({ "sources": [{ "serviceAccountToken": {
        "audience": "cluster-doctor", "expirationSeconds": 3600, "path": "token" } }] });
    map([
        ("serviceAccountName", Template::from(AGENT)),
        // The projected token below is for the controller only. The API server rejects it, and the agent has no other.
        ("automountServiceAccountToken", false.into()),
        (
            "imagePullSecrets",
            Template::Setting("images.pullSecrets").only_if(TemplateCondition::IsSet("images.pullSecrets")),
        ),
        (
            "priorityClassName",
            Template::Setting("agent.priorityClass").only_if(TemplateCondition::IsSet("agent.priorityClass")),
        ),
        (
            "runtimeClassName",
            Template::Setting("agent.runtimeClass").only_if(TemplateCondition::IsSet("agent.runtimeClass")),
        ),
        ("terminationGracePeriodSeconds", 10.into()),
        ("hostPID", true.into()),
        ("hostNetwork", Template::from(true).only_if(TemplateCondition::IsSet("agent.hostNetwork"))),
        ("dnsPolicy", Template::from("ClusterFirstWithHostNet").only_if(TemplateCondition::IsSet("agent.hostNetwork"))),
        (
            "nodeSelector",
            Template::Setting("agent.nodeSelector").only_if(TemplateCondition::IsSet("agent.nodeSelector")),
        ),
        (
            "tolerations",
            list([
                tolerate(text("{prefix}/unhealthy")),
                tolerate(text("{prefix}/maintenance")),
                tolerate("node.kubernetes.io/unschedulable".into()),
                Template::ItemsOf("agent.tolerations"),
            ]),
        ),
        ("containers", list([agent_container()])),
        (
            "volumes",
            list([
                volume("host", "hostPath", map([("path", "/".into())])),
                volume("state", "hostPath", map([("path", STATE_DIR.into()), ("type", "DirectoryOrCreate".into())])),
                volume("policy", "configMap", map([("name", POLICY.into())])),
                volume("authority", "configMap", map([("name", Template::Setting("tls.authority"))])).only_if(TLS),
                volume("token", "projected", Template::from(token)),
            ]),
        ),
    ])
}

fn agent_container() -> Template {
    let node = json!({ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } });
    let mut host = mount("host", HOST_ROOT, true);
    if let Template::Map(entries) = &mut host {
        // Mounts made on the node later are visible too.
        entries.push(("mountPropagation".to_owned(), "HostToContainer".into()));
    }
    let command = list([
        Template::from("doctor-node"),
        "agent".into(),
        "--controller".into(),
        text("https://cluster-doctor.{Release.Namespace}.svc:{port}").only_if(TLS),
        Template::from("--ca-file").only_if(TLS),
        Template::from("/etc/cluster-doctor-ca/ca.crt").only_if(TLS),
        text("http://cluster-doctor.{Release.Namespace}.svc:{port}").only_if(NO_TLS),
        Template::from("--plain").only_if(NO_TLS),
        "--token".into(),
        "/var/run/secrets/cluster-doctor/token".into(),
        "--node".into(),
        "$(NODE_NAME)".into(),
        "--root".into(),
        HOST_ROOT.into(),
        "--state".into(),
        STATE_DIR.into(),
        "--policy".into(),
        "/etc/cluster-doctor/policy.toml".into(),
    ]);
    map([
        ("name", Template::from("agent")),
        ("image", Template::Setting("images.node")),
        ("imagePullPolicy", Template::Setting("images.pullPolicy")),
        ("command", command),
        ("env", list([Template::from(node)])),
        ("resources", Template::Setting("agent.resources")),
        (
            "securityContext",
            map([("runAsUser", 0.into()), ("privileged", true.into()), ("readOnlyRootFilesystem", true.into())]),
        ),
        (
            "volumeMounts",
            list([
                host,
                mount("state", STATE_DIR, false),
                mount("policy", CONFIG_DIR, true),
                mount("authority", AUTHORITY_DIR, true).only_if(TLS),
                mount("token", "/var/run/secrets/cluster-doctor", true),
            ]),
        ),
    ])
}
