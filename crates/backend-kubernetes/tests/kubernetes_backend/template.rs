//! Tests jobs from templates: accepted by the API server unchanged, scheduled, and reported correctly.

use std::fs;

use doctor_backend::{Backend, Effect};
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig};
use doctor_core::run::{JobEnd, ObservedJobState};
use doctor_testbed::kubernetes::kubelet::Exit;
use serde_json::{Value, json};

use super::{Cluster, NAMESPACE, cluster, ids, polled, request, until};

const TEMPLATE: &str = "\
apiVersion: batch/v1
kind: Job
metadata:
  annotations: { example.com/owner: gpu-team }
spec:
  template:
    metadata:
      annotations: { example.com/scrape: 'true' }
    spec:
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      imagePullSecrets: [{ name: registry }]
      initContainers:
      - name: exporter
        image: registry.example.com/exporter:1
        restartPolicy: Always
      containers:
      - name: doctor-node
        image: registry.example.com/node:7
        securityContext: { capabilities: { add: [IPC_LOCK] } }
        env: [{ name: NCCL_DEBUG, value: WARN }]
        resources: { limits: { rdma/hca: 8 }, requests: { cpu: 500m } }
        volumeMounts:
        - { name: shm, mountPath: /dev/shm }
        - { name: models, mountPath: /models, readOnly: true }
      volumes:
      - { name: shm, emptyDir: { medium: Memory, sizeLimit: 32Gi } }
      - { name: models, persistentVolumeClaim: { claimName: models } }
";

impl Cluster {
    fn pod_of(&self, run: &str) -> Value {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io%2Frun%3D{run}");
        self.get(&path)["items"][0].clone()
    }

    /// Creates a bound claim, as a storage driver would; the scheduler requires it.
    fn bound_claim(&self, name: &str) {
        let size = json!({ "storage": "1Gi" });
        self.plane.create(&json!({ "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
            "spec": { "capacity": size, "accessModes": ["ReadOnlyMany"], "storageClassName": "by-hand", "hostPath": { "path": "/models" },
                "claimRef": { "namespace": NAMESPACE, "name": name } } }));
        self.plane.create(&json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": { "accessModes": ["ReadOnlyMany"], "storageClassName": "by-hand", "volumeName": name, "resources": { "requests": size } } }));
    }
}

#[test]
fn a_job_from_a_site_template_has_the_fields_of_the_site_and_our_required_fields() {
    let Some(cluster) = cluster() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("job.yaml");
    fs::write(&path, TEMPLATE).unwrap();
    cluster.kubelet.set_resource("gpu-11", "rdma/hca", "8").unwrap();
    cluster.bound_claim("models");
    let config = KubernetesConfig { template: Some(path.clone()), ..cluster.config() };
    let backend = KubernetesBackend::open(config.clone()).unwrap();
    let run = ids(31).run();
    until("the node to be seen", || backend.submit(&request(run, "gpu-11", "endless")).is_ok());
    until("the job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));

    let job = cluster.get(&format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs/doctor-{run}"));
    assert_eq!(job["metadata"]["annotations"]["example.com/owner"], "gpu-team");
    assert_eq!(job["spec"]["backoffLimit"], 0);
    let pod = cluster.pod_of(&run.to_string());
    assert_eq!(pod["spec"]["nodeName"], "gpu-11");
    assert_eq!(pod["spec"]["priority"], -1000);
    assert_eq!(pod["spec"]["hostNetwork"], true);
    assert_eq!(pod["spec"]["imagePullSecrets"], json!([{ "name": "registry" }]));
    assert_eq!(pod["metadata"]["annotations"]["example.com/scrape"], "true");
    assert_eq!(pod["metadata"]["annotations"]["cluster-doctor.io/node"], "gpu-11");
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["image"], "registry.example.com/node:7");
    assert_eq!(container["resources"]["limits"], json!({ "nvidia.com/gpu": "8", "rdma/hca": "8" }));
    assert_eq!(container["securityContext"]["capabilities"]["add"], json!(["IPC_LOCK"]));
    let names = |list: &Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&container["env"]), ["NCCL_DEBUG", "DOCTOR_RUN_KEY", "DOCTOR_ACCESS"]);
    assert_eq!(names(&container["volumeMounts"]), ["shm", "models", "data", "state"]);
    assert_eq!(names(&pod["spec"]["volumes"]), ["shm", "models", "data", "state"]);

    let name = pod["metadata"]["name"].as_str().unwrap();
    cluster.kubelet.end_pod(NAMESPACE, name, Exit::code(0)).unwrap();
    until("the job to end", || matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Exited, .. }));

    fs::write(&path, TEMPLATE.replace("hostNetwork: true", "nodeName: gpu-1")).unwrap();
    let refused = KubernetesBackend::open(config).unwrap_err();
    assert_eq!(refused.effect, Effect::NotAppliedPermanent);
    assert!(refused.text.contains("job.yaml, line 10, column 7: `nodeName`"), "{refused}");
}

#[test]
fn a_job_without_a_template_mounts_dev_shm_from_memory() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let run = ids(32).run();
    until("the node to be seen", || backend.submit(&request(run, "gpu-12", "short")).is_ok());
    until("the job to end", || matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Exited, .. }));
    let spec = &cluster.pod_of(&run.to_string())["spec"];
    assert_eq!(spec["volumes"][0], json!({ "name": "shm", "emptyDir": { "medium": "Memory" } }));
    assert_eq!(spec["containers"][0]["volumeMounts"][0], json!({ "name": "shm", "mountPath": "/dev/shm" }));
}
