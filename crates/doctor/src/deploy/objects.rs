//! All objects of a deployment as trees: permissions, configuration, storage, the controller and the agents.
//!
//! The table of privileges in `docs/guide/kubernetes.md` gives the reason for each privilege used here.

mod agent;
mod controller;

use doctor_api::self_made_certificate::MadeCertificate;
use serde_json::{Value, json};

use doctor_backend_kubernetes::{KubernetesConfig, Replace, RunAs, Share, Volcano, manifests};

use super::template::{
    Line, NAMESPACE, SettingName, SettingValues, Template, TemplateCondition, map, parse_parts, string_list,
};

/// A group of objects. Groups are applied in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Group {
    /// Namespace, accounts, permissions, priority class.
    Rights,
    /// ConfigMaps.
    Configuration,
    /// Persistent volume claims.
    Storage,
    Controller,
    Agent,
}

impl Group {
    pub(super) const ALL: [Self; 5] = [Self::Rights, Self::Configuration, Self::Storage, Self::Controller, Self::Agent];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Rights => "rights",
            Self::Configuration => "configuration",
            Self::Storage => "storage",
            Self::Controller => "controller",
            Self::Agent => "agent",
        }
    }

    /// Returns the group's objects. Site-specific values that are no setting of the deployment come from `config`.
    pub(super) fn objects(self, config: &KubernetesConfig) -> Vec<Template> {
        match self {
            Self::Rights => permissions(config),
            Self::Configuration => configuration(),
            Self::Storage => storage(),
            Self::Controller => controller::objects(),
            Self::Agent => agent::objects(),
        }
    }
}

const CONTROLLER: &str = "cluster-doctor";
const AGENT: &str = "cluster-doctor-agent";
const POLICY: &str = "cluster-doctor-policy";
const PROFILES: &str = "cluster-doctor-profiles";
/// The configuration directory in the pods of the controller and the agents.
const CONFIG_DIR: &str = "/etc/cluster-doctor";
/// The directories of the controller's certificate and of what the agents trust. They come from different objects: a kubelet may read
/// every Secret of its pods, and a node must not get the controller's key.
const TLS_DIR: &str = "/etc/cluster-doctor-tls";
const AUTHORITY_DIR: &str = "/etc/cluster-doctor-ca";

const SQLITE: TemplateCondition = TemplateCondition::Equals("store.kind", "sqlite");
const POSTGRES: TemplateCondition = TemplateCondition::Equals("store.kind", "postgres");
const CLAIM: TemplateCondition = TemplateCondition::Equals("data.kind", "claim");
const HOST_PATH: TemplateCondition = TemplateCondition::Equals("data.kind", "host-path");
const NO_SHARED_DIRECTORY: TemplateCondition = TemplateCondition::Equals("data.kind", "none");
const TLS: TemplateCondition = TemplateCondition::Equals("tls.kind", "secret");
const NO_TLS: TemplateCondition = TemplateCondition::Equals("tls.kind", "none");

fn labels(component: &str) -> Template {
    map([
        ("app.kubernetes.io/name", Template::from("cluster-doctor")),
        ("app.kubernetes.io/component", component.into()),
    ])
}

fn metadata(name: &str, component: &str) -> Template {
    map([("name", name.into()), ("namespace", Template::Setting(NAMESPACE)), ("labels", labels(component))])
}

fn object(version: &str, kind: &str, metadata: Template, sections: Vec<(&str, Template)>) -> Template {
    let head = [("apiVersion", version.into()), ("kind", kind.into()), ("metadata", metadata)];
    Template::Map(head.into_iter().chain(sections).map(|(key, tree)| (key.to_owned(), tree)).collect())
}

/// Enables a feature in the backend's configuration.
type EnableFeature = fn(&mut KubernetesConfig);

/// The features that need additional permissions, with the condition under which each is enabled.
const FEATURES: [(TemplateCondition, EnableFeature); 5] = [
    (CLAIM, |config| config.share = Share::Claim("any".to_owned())),
    (TemplateCondition::IsSet("write.event"), |config| config.write.event = true),
    (TemplateCondition::IsSet("write.condition"), |config| config.write.condition = Some("Any".to_owned())),
    (TemplateCondition::Equals("replace", "delete-node"), |config| config.replace = Replace::DeleteNode),
    (TemplateCondition::IsSet("volcano"), |config| config.run_as = RunAs::Volcano(Volcano::default())),
];

/// Returns the permissions. The backend defines them, and its tests run with exactly these.
fn permissions(config: &KubernetesConfig) -> Vec<Template> {
    let (namespace, class) = ("@namespace", "@priority-class");
    let mut usual = config.clone();
    (usual.namespace, usual.priority_class) = (namespace.to_owned(), Some(class.to_owned()));
    (usual.write.event, usual.write.condition, usual.replace) = (false, None, Replace::None);
    (usual.run_as, usual.share) = (RunAs::Job, Share::HostPath("/any".into()));
    let switched = FEATURES.map(|(test, switch)| {
        let mut config = usual.clone();
        switch(&mut config);
        (test, manifests(&config))
    });
    let mut all = Vec::new();
    for (index, manifest) in manifests(&usual).into_iter().enumerate() {
        let kind = manifest["kind"].as_str().unwrap_or_default().to_owned();
        let rules = switched.iter().flat_map(|(test, all)| additional_rules(&manifest, &all[index], *test)).collect();
        let tree = with_rules(Template::from(manifest), rules);
        let tree = tree.replace_text(namespace, NAMESPACE).replace_text(class, "priorityClass.name");
        all.push(match kind.as_str() {
            "Namespace" => tree.only_if(TemplateCondition::IsSet("namespace.create")),
            "PriorityClass" => tree.only_if(TemplateCondition::IsSet("priorityClass.create")),
            "ServiceAccount" => add_annotations(tree, "controller.accountAnnotations"),
            _ => tree,
        });
    }
    // No role is bound to this account: the controller only uses its name to identify its agents.
    let account = [("automountServiceAccountToken", Template::from(false))];
    all.push(
        object("v1", "ServiceAccount", metadata(AGENT, "agent"), account.into())
            .only_if(TemplateCondition::IsSet("agent.enabled")),
    );
    all
}

/// Returns the rules that a role gains when a feature is enabled, each under the condition `then`.
fn additional_rules(usual: &Value, switched: &Value, then: TemplateCondition) -> Vec<Template> {
    let rules = |role: &Value| role["rules"].as_array().cloned().unwrap_or_default();
    let known = rules(usual);
    let further = rules(switched).into_iter().filter(|rule| !known.contains(rule));
    further.map(|rule| Template::from(rule).only_if(then)).collect()
}

fn with_rules(mut role: Template, added: Vec<Template>) -> Template {
    if let Some(Template::List(rules)) = role.entry("rules") {
        rules.extend(added);
    }
    role
}

/// Adds the annotations of this setting to an object, if there are any.
fn add_annotations(mut tree: Template, setting: SettingName) -> Template {
    if let Some(Template::Map(metadata)) = tree.entry("metadata") {
        metadata
            .push(("annotations".to_owned(), Template::Setting(setting).only_if(TemplateCondition::IsSet(setting))));
    }
    tree
}

/// Returns the ConfigMaps. They are mounted as files, and the controller reloads changes.
fn configuration() -> Vec<Template> {
    let line = |line: &'static str| Line::Text(parse_parts(line));
    let doctor = Template::Lines(vec![
        Line::Conditional(SQLITE, vec![line("store = \"sqlite:/var/lib/cluster-doctor/doctor.db\"")]),
        Line::Conditional(POSTGRES, vec![line("# The store is set by DOCTOR_STORE.")]),
        line("data = \"/data\""),
        line("policy = \"policy.toml\""),
        line("profiles = [\"/etc/cluster-doctor-profiles\"]"),
        Line::Lines("settings.service"),
        line(""),
        line("[agents]"),
        line("listen = \"0.0.0.0:{port}\""),
        Line::Conditional(
            TLS,
            vec![
                line("url = \"https://cluster-doctor.{Release.Namespace}.svc:{port}\""),
                line(
                    "tls = { certificate = \"/etc/cluster-doctor-tls/tls.crt\", key = \"/etc/cluster-doctor-tls/tls.key\" }",
                ),
            ],
        ),
        Line::Conditional(
            NO_TLS,
            vec![line("url = \"http://cluster-doctor.{Release.Namespace}.svc:{port}\""), line("plain = true")],
        ),
        line(""),
        line("[probes]"),
        line("listen = \"0.0.0.0:{probePort}\""),
        line(""),
        line("[backend.kubernetes]"),
        line("namespace = {\"Release.Namespace\"}"),
        line("prefix = {\"prefix\"}"),
        line("image = {\"images.node\"}"),
        line("image_pull_policy = {\"images.pullPolicy\"}"),
        line("priority_class = {\"priorityClass.name\"}"),
        line("policy_map = \"cluster-doctor-policy\""),
        Line::Conditional(TemplateCondition::IsSet("template"), vec![line("template = \"template.yaml\"")]),
        Line::Conditional(CLAIM, vec![line("share = { claim = {\"data.claim\"} }")]),
        Line::Conditional(HOST_PATH, vec![line("share = { host-path = {\"data.hostPath\"} }")]),
        Line::Conditional(NO_SHARED_DIRECTORY, vec![line("share = \"none\"")]),
        line("write.taint = {write.taint}"),
        line("write.label = {write.label}"),
        line("write.annotation = {write.annotation}"),
        line("write.event = {write.event}"),
        Line::Conditional(
            TemplateCondition::IsSet("write.condition"),
            vec![line("write.condition = {\"write.condition\"}")],
        ),
        Line::Conditional(TemplateCondition::Equals("replace", "delete-node"), vec![line("replace = \"delete-node\"")]),
        Line::Conditional(TemplateCondition::Equals("replace", "aws"), vec![line("replace = \"aws\"")]),
        Line::Lines("settings.kubernetes"),
    ]);
    let template = Template::Setting("template").only_if(TemplateCondition::IsSet("template"));
    let file = |name: &str, component: &str, data: Template| {
        object("v1", "ConfigMap", metadata(name, component), vec![("data", data)])
    };
    vec![
        file(CONTROLLER, "controller", map([("doctor.toml", doctor), ("template.yaml", template)])),
        file(POLICY, "controller", map([("policy.toml", Template::Setting("policy"))])),
        file(PROFILES, "controller", Template::Setting("profiles")),
    ]
}

fn storage() -> Vec<Template> {
    let claim = |name: &'static str, modes: Template, class: &'static str, size: &'static str| {
        let metadata = map([
            ("name", Template::Setting(name)),
            ("namespace", Template::Setting(NAMESPACE)),
            ("labels", labels("controller")),
            // The claims, and with them the history, outlive the Helm release.
            ("annotations", map([("helm.sh/resource-policy", "keep".into())])),
        ]);
        let spec = map([
            ("accessModes", modes),
            ("storageClassName", Template::Setting(class).only_if(TemplateCondition::IsSet(class))),
            ("resources", map([("requests", map([("storage", Template::Setting(size))]))])),
        ]);
        object("v1", "PersistentVolumeClaim", metadata, vec![("spec", spec)])
    };
    vec![
        claim("store.claim", string_list(["ReadWriteOnce"]), "store.storageClass", "store.size")
            .only_if(TemplateCondition::IsSet("store.create"))
            .only_if(SQLITE),
        claim("data.claim", Template::Setting("data.accessModes"), "data.storageClass", "data.size")
            .only_if(TemplateCondition::IsSet("data.create"))
            .only_if(CLAIM),
    ]
}

/// Returns the Secret and the ConfigMap of a new certificate: the settings `tls.secret` and `tls.authority`. They are no part of the
/// deployment, because each call makes another key.
pub(super) fn certificate(values: &SettingValues, made: &MadeCertificate) -> Vec<Value> {
    let metadata = |name: &Value, component: &str| {
        json!({ "name": name, "namespace": values.namespace,
            "labels": { "app.kubernetes.io/name": "cluster-doctor", "app.kubernetes.io/component": component } })
    };
    let tls = &values.values["tls"];
    vec![
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata(&tls["secret"], "controller"),
            "type": "kubernetes.io/tls", "stringData": { "tls.crt": made.certificate, "tls.key": made.key } }),
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(&tls["authority"], "agent"),
            "data": { "ca.crt": made.certificate } }),
    ]
}

/// Returns the names of the controller's Service.
pub(super) fn service_names(namespace: &str) -> Vec<String> {
    let name = format!("{CONTROLLER}.{namespace}");
    vec![format!("{name}.svc"), format!("{name}.svc.cluster.local"), name, CONTROLLER.to_owned()]
}

fn volume(name: &str, kind: &str, what: Template) -> Template {
    Template::Map(vec![("name".to_owned(), name.into()), (kind.to_owned(), what)])
}

fn mount(name: &str, path: &str, read_only: bool) -> Template {
    let mut entries = vec![("name".to_owned(), name.into()), ("mountPath".to_owned(), path.into())];
    if read_only {
        entries.push(("readOnly".to_owned(), true.into()));
    }
    Template::Map(entries)
}
