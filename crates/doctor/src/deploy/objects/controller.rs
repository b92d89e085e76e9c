//! The controller: one replica with SQLite, two with PostgreSQL. Unless `data.kind` is host-path, the pod complies with
//! the restricted Pod Security Standard.

use serde_json::json;

use super::{
    super::template::{Template, TemplateCondition, list, map, string_list},
    CLAIM, CONFIG_DIR, CONTROLLER, HOST_PATH, NO_SHARED_DIRECTORY, POLICY, POSTGRES, PROFILES, SQLITE, TLS, TLS_DIR,
    labels, metadata, mount, object, volume,
};

/// Not below [`CONFIG_DIR`]: that is one volume, into which no other can be mounted.
const PROFILES_DIR: &str = "/etc/cluster-doctor-profiles";
/// Mode 0440: only the controller's group reads the key.
const KEY_MODE: i64 = 0o440;

pub(super) fn objects() -> Vec<Template> {
    let name = || metadata(CONTROLLER, "controller");
    let selector = || map([("matchLabels", labels("controller"))]);
    let rolling = map([
        ("type", Template::from("RollingUpdate")),
        ("rollingUpdate", map([("maxSurge", 1.into()), ("maxUnavailable", 0.into())])),
    ]);
    let spec = map([
        ("replicas", Template::from(1).only_if(SQLITE)),
        ("replicas", Template::from(2).only_if(POSTGRES)),
        // One node at a time can mount a block volume, so the old controller stops before the new one starts.
        ("strategy", map([("type", Template::from("Recreate"))]).only_if(SQLITE)),
        ("strategy", rolling.only_if(POSTGRES)),
        ("selector", selector()),
        ("template", map([("metadata", map([("labels", labels("controller"))])), ("spec", controller_pod())])),
    ]);
    let port =
        map([("name", Template::from("agents")), ("port", Template::Setting("port")), ("targetPort", "agents".into())]);
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
        network_policy(),
    ]
}

/// Who may connect to the controller. The node of a pod always may, which is how the kubelet reaches the probes.
fn network_policy() -> Template {
    let port = || list([map([("port", Template::Setting("port"))])]);
    let agents = map([("podSelector", map([("matchLabels", labels("agent"))]))]);
    // Jobs post their results. Their pods are of no component.
    let jobs = json!({ "podSelector": {
        "matchLabels": { "app.kubernetes.io/name": "cluster-doctor" },
        "matchExpressions": [{ "key": "app.kubernetes.io/component", "operator": "DoesNotExist" }] } });
    let rules = list([
        map([("from", list([agents, jobs.into(), Template::ItemsOf("networkPolicy.agentsFrom")])), ("ports", port())]),
        // Agents with the network of their node have its addresses, which no selector names.
        map([("ports", port())]).only_if(TemplateCondition::IsSet("agent.hostNetwork")),
        Template::ItemsOf("networkPolicy.ingress"),
    ]);
    let spec = map([
        ("podSelector", map([("matchLabels", labels("controller"))])),
        ("policyTypes", string_list(["Ingress"])),
        ("ingress", rules),
    ]);
    object("networking.k8s.io/v1", "NetworkPolicy", metadata(CONTROLLER, "controller"), vec![("spec", spec)])
        .only_if(TemplateCondition::IsSet("networkPolicy.enabled"))
}

fn controller_pod() -> Template {
    let user = || Template::Setting("controller.user");
    let apart = json!({ "podAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 100,
        "podAffinityTerm": { "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": {
            "app.kubernetes.io/name": "cluster-doctor", "app.kubernetes.io/component": "controller" } } } }] } });
    let claim = |name: &'static str| map([("claimName", Template::Setting(name))]);
    let of = |name: &str| map([("configMap", map([("name", name.into())]))]);
    map([
        ("serviceAccountName", Template::from(CONTROLLER)),
        (
            "imagePullSecrets",
            Template::Setting("images.pullSecrets").only_if(TemplateCondition::IsSet("images.pullSecrets")),
        ),
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
        (
            "nodeSelector",
            Template::Setting("controller.nodeSelector").only_if(TemplateCondition::IsSet("controller.nodeSelector")),
        ),
        (
            "tolerations",
            Template::Setting("controller.tolerations").only_if(TemplateCondition::IsSet("controller.tolerations")),
        ),
        ("affinity", Template::from(apart).only_if(POSTGRES)),
        ("containers", list([controller_container()])),
        (
            "volumes",
            list([
                volume("configuration", "projected", map([("sources", list([of(CONTROLLER), of(POLICY)]))])),
                volume("profiles", "configMap", map([("name", PROFILES.into())])),
                volume("data", "persistentVolumeClaim", claim("data.claim")).only_if(CLAIM),
                volume("data", "hostPath", map([("path", Template::Setting("data.hostPath"))])).only_if(HOST_PATH),
                // Published copies and logs are not kept: with nothing shared and no store volume they have no place.
                volume("data", "emptyDir", map([])).only_if(NO_SHARED_DIRECTORY).only_if(POSTGRES),
                volume("store", "persistentVolumeClaim", claim("store.claim")).only_if(SQLITE),
                volume(
                    "tls",
                    "secret",
                    map([("secretName", Template::Setting("tls.secret")), ("defaultMode", KEY_MODE.into())]),
                )
                .only_if(TLS),
                // With PostgreSQL, the copy of the history is made here: this is room for two of tens of millions of results. The
                // node's disk is shared with other pods.
                volume("temporary", "emptyDir", map([("sizeLimit", "16Gi".into())])),
            ]),
        ),
    ])
}

fn controller_container() -> Template {
    let probe = |path: &str, period: i64, failures: i64| {
        map([
            ("httpGet", map([("path", path.into()), ("port", "probes".into())])),
            ("periodSeconds", period.into()),
            ("timeoutSeconds", 5.into()),
            ("failureThreshold", failures.into()),
        ])
    };
    let configured = map([("name", "DOCTOR_CONFIG".into()), ("value", "/etc/cluster-doctor/doctor.toml".into())]);
    let from_secret = map([
        ("name", Template::from("DOCTOR_STORE")),
        (
            "valueFrom",
            map([("secretKeyRef", map([("name", Template::Setting("store.secret")), ("key", "url".into())]))]),
        ),
    ]);
    map([
        ("name", Template::from("controller")),
        ("image", Template::Setting("images.controller")),
        ("imagePullPolicy", Template::Setting("images.pullPolicy")),
        ("command", string_list(["doctor", "serve"])),
        ("env", list([configured, from_secret.only_if(POSTGRES), Template::ItemsOf("controller.env")])),
        (
            "ports",
            list([
                map([("name", "agents".into()), ("containerPort", Template::Setting("port"))]),
                map([("name", "probes".into()), ("containerPort", Template::Setting("probePort"))]),
            ]),
        ),
        // A start on a slow machine takes a while.
        ("startupProbe", probe("/healthz", 5, 120)),
        ("livenessProbe", probe("/healthz", 30, 3)),
        ("readinessProbe", probe("/readyz", 10, 3)),
        ("resources", Template::Setting("controller.resources")),
        (
            "securityContext",
            map([
                ("allowPrivilegeEscalation", false.into()),
                ("readOnlyRootFilesystem", true.into()),
                ("capabilities", map([("drop", string_list(["ALL"]))])),
            ]),
        ),
        (
            "volumeMounts",
            list([
                mount("configuration", CONFIG_DIR, true),
                mount("profiles", PROFILES_DIR, true),
                mount("data", "/data", false).only_if(CLAIM),
                mount("data", "/data", false).only_if(HOST_PATH),
                mount("data", "/data", false).only_if(NO_SHARED_DIRECTORY).only_if(POSTGRES),
                data_mount_in_store_volume().only_if(NO_SHARED_DIRECTORY).only_if(SQLITE),
                mount("store", "/var/lib/cluster-doctor", false).only_if(SQLITE),
                mount("tls", TLS_DIR, true).only_if(TLS),
                mount("temporary", "/tmp", false),
            ]),
        ),
    ])
}

/// Mounts a directory of the store's volume for published copies and logs, if nothing is shared.
fn data_mount_in_store_volume() -> Template {
    map([("name", Template::from("store")), ("mountPath", "/data".into()), ("subPath", "data".into())])
}
