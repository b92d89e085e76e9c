//! The controller: one replica with SQLite, two with PostgreSQL. Unless `data.kind` is host-path, the pod complies with
//! the restricted Pod Security Standard.

use serde_json::json;

use super::{
    super::tree::{Test, Tree, list, map, words},
    CLAIM, CONTROLLER, ETC, HOST_PATH, NOTHING_SHARED, POLICY, POSTGRES, PROFILES, SQLITE, labels, metadata, mount,
    object, volume,
};

/// Not below [`ETC`]: that is one volume, into which no other can be mounted.
const ETC_PROFILES: &str = "/etc/cluster-doctor-profiles";

pub(super) fn objects() -> Vec<Tree> {
    let name = || metadata(CONTROLLER, "controller");
    let selector = || map([("matchLabels", labels("controller"))]);
    let rolling = map([
        ("type", Tree::from("RollingUpdate")),
        ("rollingUpdate", map([("maxSurge", 1.into()), ("maxUnavailable", 0.into())])),
    ]);
    let spec = map([
        ("replicas", Tree::from(1).when(SQLITE)),
        ("replicas", Tree::from(2).when(POSTGRES)),
        // One node at a time can mount a block volume, so the old controller stops before the new one starts.
        ("strategy", map([("type", Tree::from("Recreate"))]).when(SQLITE)),
        ("strategy", rolling.when(POSTGRES)),
        ("selector", selector()),
        ("template", map([("metadata", map([("labels", labels("controller"))])), ("spec", controller_pod())])),
    ]);
    let port = map([("name", Tree::from("agents")), ("port", Tree::Setting("port")), ("targetPort", "agents".into())]);
    vec![
        object("apps/v1", "Deployment", name(), vec![("spec", spec)]),
        object(
            "v1",
            "Service",
            name(),
            vec![("spec", map([("selector", labels("controller")), ("ports", list([port]))]))],
        ),
        // Always allow one eviction: a controller that cannot be evicted would block the drain of its node.
        object(
            "policy/v1",
            "PodDisruptionBudget",
            name(),
            vec![("spec", map([("maxUnavailable", 1.into()), ("selector", selector())]))],
        ),
    ]
}

fn controller_pod() -> Tree {
    let user = || Tree::Setting("controller.user");
    let apart = json!({ "podAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 100,
        "podAffinityTerm": { "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": {
            "app.kubernetes.io/name": "cluster-doctor", "app.kubernetes.io/component": "controller" } } } }] } });
    let claim = |name: &'static str| map([("claimName", Tree::Setting(name))]);
    let of = |name: &str| map([("configMap", map([("name", name.into())]))]);
    map([
        ("serviceAccountName", Tree::from(CONTROLLER)),
        ("imagePullSecrets", Tree::Setting("images.pullSecrets").when(Test::Has("images.pullSecrets"))),
        ("terminationGracePeriodSeconds", 60.into()),
        (
            "securityContext",
            map([
                ("runAsNonRoot", true.into()),
                ("runAsUser", user()),
                ("runAsGroup", user()),
                ("fsGroup", user()),
                ("fsGroupChangePolicy", "OnRootMismatch".into()),
                ("seccompProfile", map([("type", "RuntimeDefault".into())])),
            ]),
        ),
        ("nodeSelector", Tree::Setting("controller.nodeSelector").when(Test::Has("controller.nodeSelector"))),
        ("tolerations", Tree::Setting("controller.tolerations").when(Test::Has("controller.tolerations"))),
        ("affinity", Tree::from(apart).when(POSTGRES)),
        ("containers", list([controller_container()])),
        (
            "volumes",
            list([
                volume("configuration", "projected", map([("sources", list([of(CONTROLLER), of(POLICY)]))])),
                volume("profiles", "configMap", map([("name", PROFILES.into())])),
                volume("data", "persistentVolumeClaim", claim("data.claim")).when(CLAIM),
                volume("data", "hostPath", map([("path", Tree::Setting("data.hostPath"))])).when(HOST_PATH),
                // Published copies and logs are not kept: with nothing shared and no store volume they have no place.
                volume("data", "emptyDir", map([])).when(NOTHING_SHARED).when(POSTGRES),
                volume("store", "persistentVolumeClaim", claim("store.claim")).when(SQLITE),
                volume("temporary", "emptyDir", map([])),
            ]),
        ),
    ])
}

fn controller_container() -> Tree {
    let probe = |path: &str, period: i64, failures: i64| {
        map([
            ("httpGet", map([("path", path.into()), ("port", "agents".into())])),
            ("periodSeconds", period.into()),
            ("timeoutSeconds", 5.into()),
            ("failureThreshold", failures.into()),
        ])
    };
    let configured = map([("name", "DOCTOR_CONFIG".into()), ("value", "/etc/cluster-doctor/doctor.toml".into())]);
    let from_secret = map([
        ("name", Tree::from("DOCTOR_STORE")),
        ("valueFrom", map([("secretKeyRef", map([("name", Tree::Setting("store.secret")), ("key", "url".into())]))])),
    ]);
    map([
        ("name", Tree::from("controller")),
        ("image", Tree::Setting("images.controller")),
        ("imagePullPolicy", Tree::Setting("images.pullPolicy")),
        ("command", words(["doctor", "serve"])),
        ("env", list([configured, from_secret.when(POSTGRES), Tree::Each("controller.env")])),
        ("ports", list([map([("name", "agents".into()), ("containerPort", Tree::Setting("port"))])])),
        // Schema migrations run before the agent endpoint opens.
        ("startupProbe", probe("/healthz", 5, 120)),
        ("livenessProbe", probe("/healthz", 30, 3)),
        ("readinessProbe", probe("/readyz", 10, 3)),
        ("resources", Tree::Setting("controller.resources")),
        (
            "securityContext",
            map([
                ("allowPrivilegeEscalation", false.into()),
                ("readOnlyRootFilesystem", true.into()),
                ("capabilities", map([("drop", words(["ALL"]))])),
            ]),
        ),
        (
            "volumeMounts",
            list([
                mount("configuration", ETC, true),
                mount("profiles", ETC_PROFILES, true),
                mount("data", "/data", false).when(CLAIM),
                mount("data", "/data", false).when(HOST_PATH),
                mount("data", "/data", false).when(NOTHING_SHARED).when(POSTGRES),
                beside_the_store().when(NOTHING_SHARED).when(SQLITE),
                mount("store", "/var/lib/cluster-doctor", false).when(SQLITE),
                mount("temporary", "/tmp", false),
            ]),
        ),
    ])
}

/// Mounts a directory of the store's volume for published copies and logs, if nothing is shared.
fn beside_the_store() -> Tree {
    map([("name", Tree::from("store")), ("mountPath", "/data".into()), ("subPath", "data".into())])
}
