//! The settings of a deployment: meaning, default and accepted values. The chart's values, their schema, the reference
//! page and `--set` are all generated from this table.

mod accepts;

use serde_json::{Map, Value};

pub(super) use self::accepts::Accepts;

/// One setting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    /// Its path in the chart's values.
    pub name: &'static str,
    pub accepts: Accepts,
    /// The default as JSON.
    pub default: &'static str,
    pub about: &'static str,
}

use Accepts::{
    AccessModes, AnyName, Condition, Files, Flag, Image, Labels, Lines, Name, Objects, OneOf, Path, Port, Prefix,
    Resources, Size, User,
};

const fn setting(name: &'static str, accepts: Accepts, default: &'static str, about: &'static str) -> Setting {
    Setting { name, accepts, default, about }
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
    setting("images.pullSecrets", Objects, "[]", "Secrets to pull them with, such as {name: registry}."),
    setting(
        "namespace.create",
        Flag,
        "false",
        "Make the namespace too, with the pod security labels that the agent needs. Not together with `helm --create-namespace`.",
    ),
    setting("prefix", Prefix, r#""cluster-doctor.io""#, "Of our labels, annotations and taints on nodes."),
    setting("port", Port, "7443", "Where agents report, and where health is asked."),
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
        "postgres: the Secret whose key `url` is postgres://USER:PASSWORD@HOST/DATABASE. Make it yourself.",
    ),
    setting(
        "store.claim",
        Name,
        r#""cluster-doctor-store""#,
        "sqlite: the claim of the block volume. A network file system is refused.",
    ),
    setting("store.create", Flag, "true", "sqlite: make that claim."),
    setting("store.storageClass", AnyName, r#""""#, "sqlite: its storage class. Empty: the cluster's default."),
    setting("store.size", Size, r#""10Gi""#, "sqlite: its size."),
    setting(
        "data.kind",
        OneOf(&["claim", "host-path", "none"]),
        r#""claim""#,
        "What holds the directory that jobs and the controller share: a volume, or a directory that is the same on every node. none: nothing is shared, results and logs come with the pods.",
    ),
    setting("data.claim", Name, r#""cluster-doctor-data""#, "claim: its name."),
    setting("data.create", Flag, "true", "claim: make it."),
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
        "claim: who may mount it. Jobs run on every node.",
    ),
    setting(
        "data.hostPath",
        Path,
        r#""/mnt/cluster-doctor""#,
        "host-path: where it is on every node. It must belong to `controller.user`.",
    ),
    setting("priorityClass.name", Name, r#""cluster-doctor""#, "The priority class of jobs: below everybody's."),
    setting("priorityClass.create", Flag, "true", "Make it, with -1000."),
    setting(
        "controller.user",
        User,
        "65532",
        "The user and group that the controller runs as; the volumes are given to the group.",
    ),
    setting(
        "controller.resources",
        Resources,
        r#"{"requests":{"cpu":"100m","memory":"128Mi"},"limits":{"memory":"1Gi"}}"#,
        "What the controller gets.",
    ),
    setting(
        "controller.env",
        Objects,
        "[]",
        "More of its environment, such as the token of a webhook, as {name, valueFrom}.",
    ),
    setting(
        "controller.accountAnnotations",
        Labels,
        "{}",
        "Annotations of its account, such as the role with which a cloud lets it terminate machines.",
    ),
    setting("controller.nodeSelector", Labels, "{}", "Where the controller may run."),
    setting("controller.tolerations", Objects, "[]", "Taints that the controller tolerates."),
    setting(
        "write.taint",
        Flag,
        "true",
        "Keep work off a bad node by a taint. Without it a mark is only ours to read.",
    ),
    setting("write.label", Flag, "true", "Say on each node how it is, by the labels `status` and `severity`."),
    setting(
        "write.annotation",
        Flag,
        "true",
        "Say on each node what was found, by the annotations `results` and `quarantine-result`.",
    ),
    setting("write.event", Flag, "true", "Tell changes as events of nodes; the right to do so is given."),
    setting(
        "write.condition",
        Condition,
        r#""""#,
        "A condition of nodes of this type, True where all is well, for systems that repair nodes by it; the right to do so is given. Empty: none.",
    ),
    setting(
        "replace",
        OneOf(&["none", "delete-node", "aws", "own"]),
        r#""none""#,
        "How a machine is replaced, where the policy allows it. delete-node: the Node is deleted, for Karpenter, and the right to do so is given. aws: by the program `aws`. own: a `replace` of yours in settings.kubernetes.",
    ),
    setting(
        "volcano",
        Flag,
        "false",
        "Give the rights to run jobs of Volcano's, for a `run_as` of yours in settings.kubernetes.",
    ),
    setting("agent.enabled", Flag, "true", "Run an agent on every node."),
    setting(
        "agent.nodeSelector",
        Labels,
        r#"{"nvidia.com/gpu.present":"true"}"#,
        "Which nodes get an agent. With Helm, null takes a label of the default away.",
    ),
    setting(
        "agent.tolerations",
        Objects,
        r#"[{"key":"nvidia.com/gpu","operator":"Exists"},{"key":"amd.com/gpu","operator":"Exists"}]"#,
        "Taints that the agent tolerates beside ours and a cordon.",
    ),
    setting(
        "agent.resources",
        Resources,
        r#"{"requests":{"cpu":"10m","memory":"16Mi"},"limits":{"memory":"256Mi"}}"#,
        "What an agent gets. It never asks for a GPU.",
    ),
    setting(
        "agent.hostNetwork",
        Flag,
        "false",
        "In the node's network: only for a DCGM host engine that listens on the node's loopback alone.",
    ),
    setting(
        "agent.runtimeClass",
        AnyName,
        r#""""#,
        "A runtime class. None is needed: the driver's library is found on the node.",
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
        "policy.toml: what is tested, how it is judged, what may be done. For the controller, agents and jobs.",
    ),
    setting(
        "template",
        Lines,
        r#""""#,
        "A Job in YAML into which each run is put: volumes, RDMA resources, side cars, security context. Empty: the one that `doctor deploy kubernetes --what template` prints.",
    ),
    setting("profiles", Files, "{}", "Machine types of your own: NAME.toml and its text."),
];

/// An invalid setting or value.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadValue {
    #[error("`{0}` is not of the form SETTING=VALUE, such as store.size=20Gi")]
    Form(String),
    #[error("there is no setting `{name}`; near it: {near}")]
    Unknown { name: String, near: String },
    #[error("`{name}` is {value}, expected {expected}")]
    Value { name: &'static str, value: String, expected: String },
}

impl Setting {
    pub(super) fn default_value(&self) -> Value {
        serde_json::from_str(self.default).expect("every default in the table is JSON, which a test holds")
    }

    /// Parses a value from the command line: text for text settings, otherwise JSON.
    pub(super) fn read(&self, written: &str) -> Result<Value, BadValue> {
        let value = match self.accepts {
            OneOf(_) | Image | Name | AnyName | Condition | Prefix | Size | Path | Lines => {
                Value::String(written.to_owned())
            }
            Flag | Port | User | Files | Labels | Objects | Resources | AccessModes => {
                serde_json::from_str(written).map_err(|_| self.refuse(written))?
            }
        };
        self.check(&value).map(|()| value)
    }

    pub(super) fn check(&self, value: &Value) -> Result<(), BadValue> {
        if self.accepts.takes(value) { Ok(()) } else { Err(self.refuse(&value.to_string())) }
    }

    fn refuse(&self, value: &str) -> BadValue {
        BadValue::Value { name: self.name, value: value.to_owned(), expected: self.accepts.words() }
    }
}

/// Returns the setting of this name.
pub(super) fn find(name: &str) -> Result<&'static Setting, BadValue> {
    let unknown = || {
        let group = name.split('.').next().unwrap_or_default();
        let mut near: Vec<&str> =
            ALL.iter().map(|setting| setting.name).filter(|known| known.split('.').next() == Some(group)).collect();
        if near.is_empty() {
            near = ALL.iter().filter_map(|setting| setting.name.split('.').next()).collect();
            near.dedup();
        }
        BadValue::Unknown { name: name.to_owned(), near: near.join(", ") }
    };
    ALL.iter().find(|setting| setting.name == name).ok_or_else(unknown)
}

/// Checks a namespace name.
///
/// # Errors If it is not a valid namespace name.
pub(super) fn check_namespace(namespace: &str) -> Result<(), BadValue> {
    if Name.takes(&namespace.into()) && !namespace.contains('.') && namespace.len() <= 63 {
        return Ok(());
    }
    let expected = "at most 63 small letters, digits and -".to_owned();
    Err(BadValue::Value { name: "namespace", value: namespace.to_owned(), expected })
}

/// Returns all settings with their defaults.
pub(super) fn defaults() -> Value {
    let mut values = Value::Object(Map::new());
    for setting in ALL {
        put(&mut values, setting.name, setting.default_value());
    }
    values
}

/// Stores a value under its path.
pub(super) fn put(values: &mut Value, name: &str, value: Value) {
    match name.split_once('.') {
        Some((group, rest)) => put(&mut values[group], rest, value),
        None => values[name] = value,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_default_is_one_that_its_setting_takes() {
        for setting in ALL {
            setting.check(&setting.default_value()).unwrap();
            assert!(setting.about.ends_with('.'), "{}", setting.name);
        }
        assert_eq!(defaults()["store"]["size"], "10Gi");
    }

    #[test]
    fn a_value_that_is_not_taken_is_named_with_what_would_be() {
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
            let error = find(name).unwrap().read(written).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(expected), "{error}");
        }
        let error = find("store.sise").unwrap_err().to_string();
        assert!(error.contains("store.size"), "{error}");
        assert!(find("stroe").unwrap_err().to_string().contains("store"));
        assert_eq!(find("agent.hostNetwork").unwrap().read("true").unwrap(), true);
        assert_eq!(find("profiles").unwrap().read(r#"{"a.toml": "x"}"#).unwrap(), json!({ "a.toml": "x" }));
    }
}
