//! All objects of a deployment as trees: permissions, configuration, storage, the controller and the agents.
//!
//! The table of privileges in `docs/guide/kubernetes.md` gives the reason for each privilege used here.

mod agent;
mod controller;

use serde_json::Value;

use doctor_backend_kubernetes::{KubernetesConfig, Replace, RunAs, Share, Volcano, manifests};

use super::tree::{Line, NAMESPACE, Name, Test, Tree, map, parts, words};

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
    pub(super) fn objects(self, config: &KubernetesConfig) -> Vec<Tree> {
        match self {
            Self::Rights => rights(config),
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
const ETC: &str = "/etc/cluster-doctor";

const SQLITE: Test = Test::Is("store.kind", "sqlite");
const POSTGRES: Test = Test::Is("store.kind", "postgres");
const CLAIM: Test = Test::Is("data.kind", "claim");
const HOST_PATH: Test = Test::Is("data.kind", "host-path");
const NOTHING_SHARED: Test = Test::Is("data.kind", "none");

fn labels(component: &str) -> Tree {
    map([("app.kubernetes.io/name", Tree::from("cluster-doctor")), ("app.kubernetes.io/component", component.into())])
}

fn metadata(name: &str, component: &str) -> Tree {
    map([("name", name.into()), ("namespace", Tree::Setting(NAMESPACE)), ("labels", labels(component))])
}

fn object(version: &str, kind: &str, metadata: Tree, rest: Vec<(&str, Tree)>) -> Tree {
    let head = [("apiVersion", version.into()), ("kind", kind.into()), ("metadata", metadata)];
    Tree::Map(head.into_iter().chain(rest).map(|(key, tree)| (key.to_owned(), tree)).collect())
}

/// Enables a feature in the backend's configuration.
type Switch = fn(&mut KubernetesConfig);

/// The features that need additional permissions, with the condition under which each is enabled.
const SWITCHES: [(Test, Switch); 6] = [
    (CLAIM, |config| config.share = Share::Claim("any".to_owned())),
    (NOTHING_SHARED, |config| config.share = Share::None),
    (Test::Has("write.event"), |config| config.write.event = true),
    (Test::Has("write.condition"), |config| config.write.condition = Some("Any".to_owned())),
    (Test::Is("replace", "delete-node"), |config| config.replace = Replace::DeleteNode),
    (Test::Has("volcano"), |config| config.run_as = RunAs::Volcano(Volcano::default())),
];

/// Returns the permissions. The backend defines them, and its tests run with exactly these.
fn rights(config: &KubernetesConfig) -> Vec<Tree> {
    let (namespace, class) = ("@namespace", "@priority-class");
    let mut usual = config.clone();
    (usual.namespace, usual.priority_class) = (namespace.to_owned(), Some(class.to_owned()));
    (usual.write.event, usual.write.condition, usual.replace) = (false, None, Replace::None);
    (usual.run_as, usual.share) = (RunAs::Job, Share::HostPath("/any".into()));
    let switched = SWITCHES.map(|(test, switch)| {
        let mut config = usual.clone();
        switch(&mut config);
        (test, manifests(&config))
    });
    let mut all = Vec::new();
    for (place, manifest) in manifests(&usual).into_iter().enumerate() {
        let kind = manifest["kind"].as_str().unwrap_or_default().to_owned();
        let more = switched.iter().flat_map(|(test, all)| further_rules(&manifest, &all[place], *test)).collect();
        let tree = with_rules(Tree::from(manifest), more);
        let tree = tree.exchange(namespace, NAMESPACE).exchange(class, "priorityClass.name");
        all.push(match kind.as_str() {
            "Namespace" => tree.when(Test::Has("namespace.create")),
            "PriorityClass" => tree.when(Test::Has("priorityClass.create")),
            "ServiceAccount" => annotated(tree, "controller.accountAnnotations"),
            _ => tree,
        });
    }
    // No role is bound to this account: the controller only uses its name to identify its agents.
    let account = [("automountServiceAccountToken", Tree::from(false))];
    all.push(object("v1", "ServiceAccount", metadata(AGENT, "agent"), account.into()).when(Test::Has("agent.enabled")));
    all
}

/// Returns the rules that a role gains when a feature is enabled, each under the condition `then`.
fn further_rules(usual: &Value, switched: &Value, then: Test) -> Vec<Tree> {
    let rules = |role: &Value| role["rules"].as_array().cloned().unwrap_or_default();
    let known = rules(usual);
    let further = rules(switched).into_iter().filter(|rule| !known.contains(rule));
    further.map(|rule| Tree::from(rule).when(then)).collect()
}

fn with_rules(mut role: Tree, more: Vec<Tree>) -> Tree {
    if let Some(Tree::List(rules)) = role.entry("rules") {
        rules.extend(more);
    }
    role
}

/// Adds the annotations of this setting to an object, if there are any.
fn annotated(mut tree: Tree, setting: Name) -> Tree {
    if let Some(Tree::Map(metadata)) = tree.entry("metadata") {
        metadata.push(("annotations".to_owned(), Tree::Setting(setting).when(Test::Has(setting))));
    }
    tree
}

/// Returns the ConfigMaps. They are mounted as files, and the controller reloads changes.
fn configuration() -> Vec<Tree> {
    let line = |line: &'static str| Line::Of(parts(line));
    let doctor = Tree::Lines(vec![
        Line::When(SQLITE, vec![line("store = \"sqlite:/var/lib/cluster-doctor/doctor.db\"")]),
        Line::When(POSTGRES, vec![line("# The store is set by DOCTOR_STORE.")]),
        line("data = \"/data\""),
        line("policy = \"policy.toml\""),
        line("profiles = [\"/etc/cluster-doctor-profiles\"]"),
        Line::Block("settings.service"),
        line(""),
        line("[agents]"),
        line("listen = \"0.0.0.0:{port}\""),
        line("url = \"http://cluster-doctor.{Release.Namespace}.svc:{port}\""),
        line(""),
        line("[backend.kubernetes]"),
        line("namespace = {\"Release.Namespace\"}"),
        line("prefix = {\"prefix\"}"),
        line("image = {\"images.node\"}"),
        line("image_pull_policy = {\"images.pullPolicy\"}"),
        line("priority_class = {\"priorityClass.name\"}"),
        line("policy_map = \"cluster-doctor-policy\""),
        Line::When(Test::Has("template"), vec![line("template = \"template.yaml\"")]),
        Line::When(CLAIM, vec![line("share = { claim = {\"data.claim\"} }")]),
        Line::When(HOST_PATH, vec![line("share = { host-path = {\"data.hostPath\"} }")]),
        Line::When(NOTHING_SHARED, vec![line("share = \"none\"")]),
        line("write.taint = {write.taint}"),
        line("write.label = {write.label}"),
        line("write.annotation = {write.annotation}"),
        line("write.event = {write.event}"),
        Line::When(Test::Has("write.condition"), vec![line("write.condition = {\"write.condition\"}")]),
        Line::When(Test::Is("replace", "delete-node"), vec![line("replace = \"delete-node\"")]),
        Line::When(Test::Is("replace", "aws"), vec![line("replace = \"aws\"")]),
        Line::Block("settings.kubernetes"),
    ]);
    let template = Tree::Setting("template").when(Test::Has("template"));
    let file = |name: &str, component: &str, data: Tree| {
        object("v1", "ConfigMap", metadata(name, component), vec![("data", data)])
    };
    vec![
        file(CONTROLLER, "controller", map([("doctor.toml", doctor), ("template.yaml", template)])),
        file(POLICY, "controller", map([("policy.toml", Tree::Setting("policy"))])),
        file(PROFILES, "controller", Tree::Setting("profiles")),
    ]
}

fn storage() -> Vec<Tree> {
    let claim = |name: &'static str, modes: Tree, class: &'static str, size: &'static str| {
        let metadata = map([
            ("name", Tree::Setting(name)),
            ("namespace", Tree::Setting(NAMESPACE)),
            ("labels", labels("controller")),
            // The claims, and with them the history, outlive the Helm release.
            ("annotations", map([("helm.sh/resource-policy", "keep".into())])),
        ]);
        let spec = map([
            ("accessModes", modes),
            ("storageClassName", Tree::Setting(class).when(Test::Has(class))),
            ("resources", map([("requests", map([("storage", Tree::Setting(size))]))])),
        ]);
        object("v1", "PersistentVolumeClaim", metadata, vec![("spec", spec)])
    };
    vec![
        claim("store.claim", words(["ReadWriteOnce"]), "store.storageClass", "store.size")
            .when(Test::Has("store.create"))
            .when(SQLITE),
        claim("data.claim", Tree::Setting("data.accessModes"), "data.storageClass", "data.size")
            .when(Test::Has("data.create"))
            .when(CLAIM),
    ]
}

fn volume(name: &str, kind: &str, what: Tree) -> Tree {
    Tree::Map(vec![("name".to_owned(), name.into()), (kind.to_owned(), what)])
}

fn mount(name: &str, path: &str, read_only: bool) -> Tree {
    let mut entries = vec![("name".to_owned(), name.into()), ("mountPath".to_owned(), path.into())];
    if read_only {
        entries.push(("readOnly".to_owned(), true.into()));
    }
    Tree::Map(entries)
}
