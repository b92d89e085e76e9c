//! Tests `doctor config check --live` on a complete cluster, and on clusters that lack something.

use std::path::PathBuf;

use doctor_backend::inspection::{InspectionItem, InspectionStatus};
use doctor_backend_kubernetes::{Inspection, KubernetesConfig, Share, inspect, manifests};

use serde_json::{Value, json};

use crate::{Cluster, cluster};

/// A separate namespace with an account that has these permissions.
struct Site {
    config: KubernetesConfig,
}

impl Site {
    /// `without`: a resource and a verb to omit from the permissions.
    fn new(cluster: &Cluster, name: &str, without: Option<(&str, &str)>) -> Self {
        let config = KubernetesConfig {
            namespace: name.to_owned(),
            priority_class: Some(name.to_owned()),
            share: Share::Claim("data".to_owned()),
            policy_map: Some("policy".to_owned()),
            ..KubernetesConfig::default()
        };
        for mut object in manifests(&config) {
            // Cluster-wide objects get a name per test.
            if ["ClusterRole", "ClusterRoleBinding"].iter().any(|kind| object["kind"] == *kind) {
                object["metadata"]["name"] = json!(name);
                if object["roleRef"].is_object() {
                    object["roleRef"]["name"] = json!(name);
                }
            }
            for rule in object["rules"].as_array_mut().into_iter().flatten() {
                let matching = without.filter(|(kind, _)| rule["resources"][0] == *kind);
                if let (Some((_, verb)), Some(verbs)) = (matching, rule["verbs"].as_array_mut()) {
                    verbs.retain(|one| one != verb);
                    // A rule must have a verb.
                    if verbs.is_empty() {
                        verbs.push(json!("deletecollection"));
                    }
                }
            }
            cluster.plane.create(&object);
        }
        Self { config }
    }

    /// Inspects the cluster as the service's account.
    fn inspect(&self, cluster: &Cluster) -> Inspection {
        let account = cluster.plane.kubeconfig_for_service_account(&self.config.namespace, "cluster-doctor").unwrap();
        inspect(&KubernetesConfig { kubeconfig: Some(account), ..self.config.clone() })
    }

    fn make_claim(&self, cluster: &Cluster) {
        let (namespace, size) = (&self.config.namespace, json!({ "storage": "1Gi" }));
        let modes = json!(["ReadWriteMany"]);
        cluster.plane.create(&json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": namespace },
            "spec": { "capacity": size, "accessModes": modes, "hostPath": { "path": "/data" }, "storageClassName": "",
                "claimRef": { "namespace": namespace, "name": "data" } },
        }));
        cluster.plane.create(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "data", "namespace": namespace },
            "spec": { "accessModes": modes, "storageClassName": "", "volumeName": namespace,
                "resources": { "requests": size } },
        }));
    }

    fn make_policy(&self, cluster: &Cluster, data: &Value) {
        cluster.plane.create(&json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": { "name": "policy", "namespace": self.config.namespace },
        }));
    }
}

fn bad(inspection: &Inspection) -> Vec<&InspectionItem> {
    inspection.findings.iter().filter(|found| found.status == InspectionStatus::Bad).collect()
}

fn found<'a>(inspection: &'a Inspection, what: &str) -> &'a InspectionItem {
    let found = inspection.findings.iter().find(|found| found.subject.contains(what));
    found.unwrap_or_else(|| panic!("nothing of {what}: {:?}", inspection.findings))
}

#[test]
fn with_the_printed_rights_and_the_configured_objects_the_inspection_is_good() {
    let Some(cluster) = cluster() else { return };
    let site = Site::new(cluster, "all-well", None);
    site.make_claim(cluster);
    site.make_policy(cluster, &json!({ "policy.toml": "" }));
    crate::until("the claim to be bound", || {
        let claim = cluster.get("/api/v1/namespaces/all-well/persistentvolumeclaims/data");
        claim["status"]["phase"] == "Bound"
    });
    let inspection = site.inspect(cluster);
    assert_eq!(bad(&inspection), Vec::<&InspectionItem>::new());
    let unknown = inspection.findings.iter().filter(|found| found.status == InspectionStatus::Unknown);
    assert_eq!(unknown.map(|found| found.subject.as_str()).collect::<Vec<_>>(), ["image"], "{:?}", inspection.findings);
    assert!(found(&inspection, "rights").text.starts_with("all "), "{:?}", inspection.findings);
    let nodes: Vec<&str> = inspection.nodes.as_ref().unwrap().iter().map(|node| node.as_str()).collect();
    assert_eq!(nodes, ["gpu-1", "gpu-2", "gpu-3"]);
}

#[test]
fn each_missing_right_is_reported_with_its_remedy() {
    let Some(cluster) = cluster() else { return };
    for (namespace, kind, verb) in [("no-patch", "nodes", "patch"), ("no-review", "tokenreviews", "create")] {
        let inspection = Site::new(cluster, namespace, Some((kind, verb))).inspect(cluster);
        let missing = found(&inspection, &format!("right to {verb} {kind}"));
        assert_eq!(missing.status, InspectionStatus::Bad);
        assert_eq!(missing.remedy.as_deref(), Some("doctor deploy kubernetes --what rights | kubectl apply -f -"));
        assert!(inspection.findings.iter().all(|found| found.subject != "rights"), "{:?}", inspection.findings);
    }
    // What may not be read is unknown, and the missing permission is bad.
    let inspection = Site::new(cluster, "no-look", Some(("persistentvolumeclaims", "get"))).inspect(cluster);
    assert_eq!(found(&inspection, "volume claim").status, InspectionStatus::Unknown);
    assert_eq!(found(&inspection, "right to get persistentvolumeclaims").status, InspectionStatus::Bad);
}

#[test]
fn a_configured_object_that_is_missing_is_reported_with_its_remedy() {
    let Some(cluster) = cluster() else { return };
    let site = Site::new(cluster, "half-made", None);
    site.make_policy(cluster, &json!({ "other.toml": "" }));
    let path = "/apis/scheduling.k8s.io/v1/priorityclasses/half-made";
    assert!(cluster.plane.request("DELETE", path, None).unwrap().is_success());
    let inspection = site.inspect(cluster);
    let subjects: Vec<&str> = bad(&inspection).iter().map(|found| found.subject.as_str()).collect();
    assert_eq!(subjects, ["volume claim data", "priority class half-made", "policy in ConfigMap policy"]);
    assert!(bad(&inspection).iter().all(|found| found.remedy.is_some()));
    cluster.plane.create(&json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 10,
        "metadata": { "name": "half-made" } }));
    let inspection = site.inspect(cluster);
    let class = found(&inspection, "priority class");
    assert!(class.status == InspectionStatus::Bad && class.text.contains("its value is 10"), "{class:?}");
}

#[test]
fn a_cluster_that_does_not_answer_is_bad_and_no_item_is_good() {
    let config = KubernetesConfig { kubeconfig: Some(PathBuf::from("no/such/file")), ..KubernetesConfig::default() };
    let inspection = inspect(&config);
    assert_eq!(inspection.findings.iter().map(|found| found.status).collect::<Vec<_>>(), [InspectionStatus::Bad]);
    assert_eq!((inspection.nodes, inspection.agent_pods), (None, None));
}
