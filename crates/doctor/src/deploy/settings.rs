//! The settings of a deployment: meaning, default and accepted values. The chart's values, their schema, the reference
//! page and `--set` are all generated from this table.

mod value_type;

use serde_json::{Map, Value};

pub(super) use self::value_type::ValueType;

/// One setting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    /// Its path in the chart's values.
    pub name: &'static str,
    pub value_type: ValueType,
    /// The default as JSON.
    pub default: &'static str,
    pub description: &'static str,
}

use ValueType::{
    AccessModes, AnyName, Condition, Files, Flag, Image, Labels, Lines, Name, Objects, OneOf, Path, Port, Prefix,
    Resources, Size, User,
};

const fn setting(name: &'static str, accepts: ValueType, default: &'static str, about: &'static str) -> Setting {
    Setting { name, value_type: accepts, default, description: about }
}

/// Every setting, in the order of values.yaml.
pub(super) const ALL: &[Setting] = &[
    setting("images.controller", Image, r#""cluster-doctor:latest""#, "The image with `doctor`."),
    setting(
        "images.node",
        Image,
        r#""cluster-doctor-node:latest""#,
        "The image with `doctor-node`, for the agent and for jobs.",
    ),
    setting(
        "images.pullPolicy",
        OneOf(&["Always", "IfNotPresent", "Never"]),
        r#""IfNotPresent""#,
        "When images are pulled.",
    ),
    setting("images.pullSecrets", Objects, "[]", "Image pull secrets, such as {name: registry}."),
    setting(
        "namespace.create",
        Flag,
        "false",
        "Create the namespace, with the pod security labels that the agent needs. Not together with `helm --create-namespace`.",
    ),
    setting("prefix", Prefix, r#""cluster-doctor.io""#, "Prefix of our labels, annotations and taints on nodes."),
    setting("port", Port, "7443", "Port of the agent endpoint."),
    setting("probePort", Port, "7444", "Port of the health probes, which only the kubelet needs."),
    setting(
        "networkPolicy.enabled",
        Flag,
        "true",
        "Let only agents and validation jobs reach the controller, by a NetworkPolicy; the kubelet of its node always may. Without effect where the network plugin enforces none.",
    ),
    setting(
        "networkPolicy.agentsFrom",
        Objects,
        "[]",
        "networkPolicy: further sources of agents' reports, such as {ipBlock: {cidr: 10.0.0.0/16}} for nodes outside of the cluster. With agent.hostNetwork, agents have the addresses of their nodes, and the port is open to all.",
    ),
    setting(
        "networkPolicy.ingress",
        Objects,
        "[]",
        "networkPolicy: further rules, such as {from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}], ports: [{port: 9464}]} for the API or Prometheus.",
    ),
    setting(
        "tls.kind",
        OneOf(&["secret", "none"]),
        r#""secret""#,
        "secret: agents report over TLS, with the certificate of `tls.secret`. none: over HTTP, and who can listen on the cluster's network can read their tokens.",
    ),
    setting(
        "tls.secret",
        Name,
        r#""cluster-doctor-tls""#,
        "secret: the Secret with the keys `tls.crt` and `tls.key`. It must exist: `doctor deploy kubernetes --what certificate` prints one.",
    ),
    setting(
        "tls.authority",
        Name,
        r#""cluster-doctor-ca""#,
        "secret: the ConfigMap whose key `ca.crt` holds the certificates that agents trust. It must exist: it is printed with the Secret.",
    ),
    setting(
        "store.kind",
        OneOf(&["sqlite", "postgres"]),
        r#""sqlite""#,
        "sqlite: one controller, its database on a block volume. postgres: two controllers, of which one leads.",
    ),
    setting(
        "store.secret",
        Name,
        r#""cluster-doctor-store""#,
        "postgres: the Secret whose key `url` is postgres://USER:PASSWORD@HOST/DATABASE. It must exist.",
    ),
    setting(
        "store.claim",
        Name,
        r#""cluster-doctor-store""#,
        "sqlite: the claim of the block volume. A network file system is rejected.",
    ),
    setting("store.create", Flag, "true", "sqlite: create that claim."),
    setting("store.storageClass", AnyName, r#""""#, "sqlite: its storage class. Empty: the cluster's default."),
    setting("store.size", Size, r#""10Gi""#, "sqlite: its size."),
    setting(
        "data.kind",
        OneOf(&["claim", "host-path", "none"]),
        r#""claim""#,
        "Storage of the directory that jobs and the controller share. claim: a volume. host-path: a directory that is the same on every node. none: nothing is shared; results and logs are read from the pods.",
    ),
    setting("data.claim", Name, r#""cluster-doctor-data""#, "claim: name of the claim."),
    setting("data.create", Flag, "true", "claim: create it."),
    setting(
        "data.storageClass",
        AnyName,
        r#""""#,
        "claim: its storage class, one that every node can mount. Empty: the cluster's default.",
    ),
    setting("data.size", Size, r#""100Gi""#, "claim: its size."),
    setting(
        "data.accessModes",
        AccessModes,
        r#"["ReadWriteMany"]"#,
        "claim: its access modes. Jobs run on every node.",
    ),
    setting(
        "data.hostPath",
        Path,
        r#""/mnt/cluster-doctor""#,
        "host-path: its path on every node. It must belong to `controller.user`.",
    ),
    setting(
        "priorityClass.name",
        Name,
        r#""cluster-doctor""#,
        "The priority class of jobs, lower than that of user pods.",
    ),
    setting("priorityClass.create", Flag, "true", "Create it, with the value -1000."),
    setting(
        "controller.user",
        User,
        "65532",
        "The user and group that the controller runs as; the group is also the fsGroup of its volumes.",
    ),
    setting(
        "controller.resources",
        Resources,
        r#"{"requests":{"cpu":"100m","memory":"128Mi"},"limits":{"memory":"1Gi"}}"#,
        "Resource requests and limits of the controller.",
    ),
    setting(
        "controller.env",
        Objects,
        "[]",
        "Additional environment variables, such as the token of a webhook, as {name, valueFrom}.",
    ),
    setting(
        "controller.accountAnnotations",
        Labels,
        "{}",
        "Annotations of its service account, such as the cloud role that may terminate instances.",
    ),
    setting("controller.nodeSelector", Labels, "{}", "Node selector of the controller."),
    setting("controller.tolerations", Objects, "[]", "Taints that the controller tolerates."),
    setting(
        "write.taint",
        Flag,
        "true",
        "Taint bad nodes to keep work off them. Without the taint, marks do not affect scheduling.",
    ),
    setting("write.label", Flag, "true", "Write the labels `status` and `severity` on each node."),
    setting("write.annotation", Flag, "true", "Write the annotations `results` and `quarantine-result` on each node."),
    setting("write.event", Flag, "true", "Create an event of the node on each change; grants the permission."),
    setting(
        "write.condition",
        Condition,
        r#""""#,
        "Type of a node condition that is True on healthy nodes, for systems that repair nodes by conditions; grants the permission. Empty: none.",
    ),
    setting(
        "replace",
        OneOf(&["none", "delete-node", "aws", "own"]),
        r#""none""#,
        "How a machine is replaced, if the policy allows it. delete-node: delete the Node, for Karpenter; grants the permission. aws: run the program `aws`. own: your `replace` in settings.kubernetes.",
    ),
    setting(
        "volcano",
        Flag,
        "false",
        "Grant the permissions to run Volcano jobs, for your `run_as` in settings.kubernetes.",
    ),
    setting("agent.enabled", Flag, "true", "Run an agent on every node."),
    setting(
        "agent.nodeSelector",
        Labels,
        r#"{"nvidia.com/gpu.present":"true"}"#,
        "Node selector of the agents. With Helm, set a label of the default to null to remove it.",
    ),
    setting(
        "agent.tolerations",
        Objects,
        r#"[{"key":"nvidia.com/gpu","operator":"Exists"}]"#,
        "Tolerations of the agents, in addition to those for our taints and for cordons.",
    ),
    setting(
        "agent.resources",
        Resources,
        r#"{"requests":{"cpu":"10m","memory":"16Mi"},"limits":{"memory":"256Mi"}}"#,
        "Resource requests and limits of an agent. It never requests a GPU.",
    ),
    setting(
        "agent.hostNetwork",
        Flag,
        "false",
        "Use the node's network. Needed only for a DCGM host engine that listens on the node's loopback address.",
    ),
    setting(
        "agent.runtimeClass",
        AnyName,
        r#""""#,
        "Runtime class of the agents. Usually none: the agent finds the driver's library on the node.",
    ),
    setting("agent.priorityClass", AnyName, r#""""#, "The priority class of agents."),
    setting(
        "settings.service",
        Lines,
        r#""""#,
        "Lines for doctor.toml, such as cycle = \"1m\" or a [retention] section.",
    ),
    setting(
        "settings.kubernetes",
        Lines,
        r#""""#,
        "Lines for the section [backend.kubernetes] of doctor.toml, such as pool_label = \"pool\".",
    ),
    setting(
        "policy",
        Lines,
        r#""""#,
        "policy.toml: tests, rules and permitted actions, for the controller, agents and jobs.",
    ),
    setting(
        "template",
        Lines,
        r#""""#,
        "Job template of runs in YAML: volumes, RDMA resources, sidecars, security context. Empty: the template that `doctor deploy kubernetes --what template` prints.",
    ),
    setting("profiles", Files, "{}", "Your own machine profiles: NAME.toml and its text."),
];

/// An invalid setting or value.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingError {
    #[error("`{0}` is not of the form SETTING=VALUE, such as store.size=20Gi")]
    Syntax(String),
    #[error("unknown setting `{name}`; similar settings: {near}")]
    Unknown { name: String, near: String },
    #[error("`{name}` is {value}, expected {expected}")]
    Value { name: &'static str, value: String, expected: String },
}

impl Setting {
    pub(super) fn default_value(&self) -> Value {
        serde_json::from_str(self.default).expect("every default in the table is valid JSON; a test checks it")
    }

    /// Parses a value from the command line: text for text settings, otherwise JSON.
    pub(super) fn parse(&self, written: &str) -> Result<Value, SettingError> {
        let value = match self.value_type {
            OneOf(_) | Image | Name | AnyName | Condition | Prefix | Size | Path | Lines => {
                Value::String(written.to_owned())
            }
            Flag | Port | User | Files | Labels | Objects | Resources | AccessModes => {
                serde_json::from_str(written).map_err(|_| self.invalid_value(written))?
            }
        };
        self.check(&value).map(|()| value)
    }

    pub(super) fn check(&self, value: &Value) -> Result<(), SettingError> {
        if self.value_type.accepts(value) { Ok(()) } else { Err(self.invalid_value(&value.to_string())) }
    }

    fn invalid_value(&self, value: &str) -> SettingError {
        SettingError::Value { name: self.name, value: value.to_owned(), expected: self.value_type.description() }
    }
}

/// Returns the setting of this name.
pub(super) fn find(name: &str) -> Result<&'static Setting, SettingError> {
    let unknown = || {
        let group = name.split('.').next().unwrap_or_default();
        let mut near: Vec<&str> =
            ALL.iter().map(|setting| setting.name).filter(|known| known.split('.').next() == Some(group)).collect();
        if near.is_empty() {
            near = ALL.iter().filter_map(|setting| setting.name.split('.').next()).collect();
            near.dedup();
        }
        SettingError::Unknown { name: name.to_owned(), near: near.join(", ") }
    };
    ALL.iter().find(|setting| setting.name == name).ok_or_else(unknown)
}

/// Checks a namespace name.
///
/// # Errors If it is not a valid namespace name.
pub(super) fn check_namespace(namespace: &str) -> Result<(), SettingError> {
    if Name.accepts(&namespace.into()) && !namespace.contains('.') && namespace.len() <= 63 {
        return Ok(());
    }
    let expected = "at most 63 lowercase letters, digits and -".to_owned();
    Err(SettingError::Value { name: "namespace", value: namespace.to_owned(), expected })
}

/// Returns all settings with their defaults.
pub(super) fn defaults() -> Value {
    let mut values = Value::Object(Map::new());
    for setting in ALL {
        set_at_path(&mut values, setting.name, setting.default_value());
    }
    values
}

/// Stores a value under its path.
pub(super) fn set_at_path(values: &mut Value, name: &str, value: Value) {
    match name.split_once('.') {
        Some((group, rest)) => set_at_path(&mut values[group], rest, value),
        None => values[name] = value,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_default_is_accepted_by_its_setting() {
        for setting in ALL {
            setting.check(&setting.default_value()).unwrap();
            assert!(setting.description.ends_with('.'), "{}", setting.name);
        }
        assert_eq!(defaults()["store"]["size"], "10Gi");
    }

    #[test]
    fn a_rejected_value_is_named_with_the_accepted_ones() {
        for (name, written, expected) in [
            ("store.size", "ten", "20Gi"),
            ("store.kind", "mysql", "sqlite, postgres"),
            ("port", "http", "1 to 65535"),
            ("port", "0", "1 to 65535"),
            ("controller.user", "0", "other than root's"),
            ("images.node", "a b", "an image"),
            ("agent.tolerations", "{}", "a list of objects"),
            ("profiles", r#"{"../x.toml": ""}"#, "texts by file name"),
            ("data.hostPath", "mnt", "an absolute path"),
            ("prefix", "", "a domain"),
        ] {
            let error = find(name).unwrap().parse(written).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(expected), "{error}");
        }
        let error = find("store.sise").unwrap_err().to_string();
        assert!(error.contains("store.size"), "{error}");
        assert!(find("stroe").unwrap_err().to_string().contains("store"));
        assert_eq!(find("agent.hostNetwork").unwrap().parse("true").unwrap(), true);
        assert_eq!(find("profiles").unwrap().parse(r#"{"a.toml": "x"}"#).unwrap(), json!({ "a.toml": "x" }));
    }
}
