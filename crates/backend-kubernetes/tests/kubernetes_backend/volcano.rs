//! Tests runs as Volcano jobs, with its own CRDs, controller and scheduler.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use doctor_backend::Backend;
use doctor_backend_kubernetes::{KubernetesBackend, KubernetesConfig, RunAs, Volcano, manifests};
use doctor_core::{
    ids::RunId,
    run::{JobEnd, ObservedJobState},
};
use doctor_testbed::kubernetes::{ControlPlane, kubelet::Exit};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::{Cluster, NAMESPACE, ids, polled, request, until};

/// A Volcano program. It ends with the test, and its log is printed if the test fails.
struct Program {
    name: &'static str,
    child: Child,
    log: NamedTempFile,
}

impl Program {
    fn start(folder: &Path, name: &'static str, cluster: &Cluster, arguments: &[String]) -> Self {
        let log = NamedTempFile::new().unwrap();
        let child = Command::new(folder.join(name))
            .arg(format!("--kubeconfig={}", cluster.plane.admin().display()))
            .args(["--leader-elect=false", "--enable-healthz=false"])
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(log.reopen().unwrap())
            .spawn()
            .unwrap();
        Self { name, child, log }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let log = fs::read_to_string(self.log.path()).unwrap_or_default();
            eprintln!("{} (had it ended? {ended:?}) wrote:\n{log}", self.name);
        }
    }
}

/// Starts a cluster with Volcano, in which our account has the needed permissions.
fn with_volcano(config: &KubernetesConfig) -> Option<(Cluster, [Program; 2])> {
    let folder = ControlPlane::volcano().inspect_err(|why| why.skip_tests("jobs of Volcano's")).ok()?;
    let cluster = Cluster::start(&["v-1"])?;
    for file in fs::read_dir(folder.join("crd")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        let kind: Value = serde_saphyr::from_str(&text).unwrap();
        cluster.plane.create(&kind);
    }
    let queue = json!({ "apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue",
        "metadata": { "name": "validation" }, "spec": { "weight": 1 } });
    until("the kinds to be known", || {
        let path = "/apis/scheduling.volcano.sh/v1beta1/queues";
        let response = cluster.plane.request("POST", path, Some(&queue)).unwrap();
        response.is_success() || response.status == 409
    });
    let role = manifests(config).into_iter().find(|object| object["kind"] == "Role").unwrap();
    let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/cluster-doctor");
    assert!(cluster.plane.request("PATCH", &path, Some(&json!({ "rules": role["rules"] }))).unwrap().is_success());
    let controllers = "--controllers=+job-controller,+gc-controller,+queue-controller".to_owned();
    let scratch = format!("--cache-dump-dir={}", cluster.plane.admin().parent().unwrap().display());
    let programs = [
        Program::start(&folder, "vc-controller-manager", &cluster, &[controllers]),
        Program::start(&folder, "vc-scheduler", &cluster, &[scratch]),
    ];
    // A job that arrives while Volcano's programs are starting may be left pending by them.
    for queue in ["default", "validation"] {
        let path = format!("/apis/scheduling.volcano.sh/v1beta1/queues/{queue}");
        until("Volcano to open its queues", || {
            let response = cluster.plane.request("GET", &path, None).unwrap();
            let queue: Value = serde_json::from_str(&response.text).unwrap_or_default();
            response.is_success() && queue["status"]["state"] == "Open"
        });
    }
    Some((cluster, programs))
}

impl Cluster {
    fn volcano_job(&self, run: RunId) -> Value {
        self.get(&format!("/apis/batch.volcano.sh/v1alpha1/namespaces/{NAMESPACE}/jobs/doctor-{run}"))
    }

    fn pods_of_run(&self, run: RunId) -> Vec<Value> {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io%2Frun%3D{run}");
        self.get(&path)["items"].as_array().unwrap().clone()
    }
}

#[test]
fn runs_are_volcano_jobs_where_configured_and_end_with_their_volcano_state() {
    let volcano = Volcano {
        queue: Some("validation".to_owned()),
        scheduler: "volcano".to_owned(),
        plugins: [("env".to_owned(), Vec::new())].into(),
    };
    let run_as = RunAs::Volcano(volcano);
    let Some((cluster, _volcano)) =
        with_volcano(&KubernetesConfig { run_as: run_as.clone(), ..KubernetesConfig::default() })
    else {
        return;
    };
    let backend = KubernetesBackend::open(KubernetesConfig { run_as, ..cluster.config() }).unwrap();
    let mut ids = ids(41);
    let mut running = || {
        let run = ids.run();
        until("the job to be taken", || backend.submit(&request(run, "v-1", "endless")).is_ok());
        backend.submit(&request(run, "v-1", "endless")).unwrap();
        until("the job to run", || matches!(polled(&backend, run), ObservedJobState::Running { .. }));
        // Until Volcano has recorded the running pod, it recreates a disrupted one: it counts missing pods before it evaluates
        // policies.
        until("Volcano to know that it runs", || {
            let status = &cluster.volcano_job(run)["status"];
            (&status["state"]["phase"], &status["running"]) == (&json!("Running"), &json!(1))
        });
        run
    };

    let run = running();
    let job = cluster.volcano_job(run);
    assert_eq!(job["spec"]["queue"], "validation");
    let pods = cluster.pods_of_run(run);
    assert_eq!(
        (pods.len(), &pods[0]["spec"]["nodeName"], &pods[0]["spec"]["priority"]),
        (1, &json!("v-1"), &json!(-1000))
    );
    assert_eq!(pods[0]["spec"]["schedulerName"], "volcano");
    cluster.kubelet.end_pod(NAMESPACE, pods[0]["metadata"]["name"].as_str().unwrap(), Exit::code(0)).unwrap();
    until("the job to end", || matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Exited, .. }));

    // A cancelled job remains, with its end, and owns the secret with its key.
    let run = running();
    backend.cancel(run).unwrap();
    until("the job to be ended", || {
        matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Killed, .. })
    });
    assert_eq!(cluster.volcano_job(run)["status"]["state"]["phase"], "Terminated");
    backend.cancel(run).unwrap();
    let secret = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/secrets/doctor-{run}"));
    assert_eq!(secret["metadata"]["ownerReferences"][0]["apiVersion"], "batch.volcano.sh/v1alpha1");

    // A disrupted pod is not recreated.
    let run = running();
    let pod = cluster.pods_of_run(run).remove(0);
    cluster.delete(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", pod["metadata"]["name"].as_str().unwrap()));
    until("the job to be over", || {
        matches!(polled(&backend, run), ObservedJobState::Ended { how: JobEnd::Preempted, .. })
    });
    assert_eq!(cluster.started.lock().unwrap().get(&run.to_string()), Some(&1));
    assert!(backend.cancel(ids.run()).is_ok(), "cancelling a missing job succeeds");
}
