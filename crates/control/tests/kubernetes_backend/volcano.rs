//! Runs as jobs of Volcano's, with its own definitions and its own controller. Its scheduler is played: it would let the job in,
//! and Kubernetes' own gives the pod its place.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread,
};

use doctor_bed::kubernetes::{ControlPlane, kubelet::Exit};
use doctor_control::backend::{
    Backend,
    kubernetes::{KubernetesBackend, KubernetesConfig, RunAs, Volcano, manifests},
};
use doctor_core::{
    ids::RunId,
    run::{JobEnd, JobSeen},
};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::{Cluster, NAMESPACE, ids, polled, request, until};

/// Ends with the test. What it wrote is shown if the test fails.
struct Controller {
    child: Child,
    log: NamedTempFile,
}

impl Drop for Controller {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let log = fs::read_to_string(self.log.path()).unwrap_or_default();
            eprintln!("Volcano's controller (had it ended? {ended:?}) wrote:\n{log}");
        }
    }
}

/// A cluster with Volcano in it, for which our account has the rights.
fn with_volcano(config: &KubernetesConfig) -> Option<(Cluster, Controller)> {
    let folder = ControlPlane::volcano().inspect_err(|why| why.not_run("jobs of Volcano's")).ok()?;
    let cluster = Cluster::start(&["v-1"])?;
    for file in fs::read_dir(folder.join("crd")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        let kind: Value = serde_saphyr::from_str(&text).unwrap();
        cluster.plane.make(&kind);
    }
    let queue = json!({ "apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue",
        "metadata": { "name": "validation" }, "spec": { "weight": 1 } });
    until("the kinds to be known", || {
        let path = "/apis/scheduling.volcano.sh/v1beta1/queues";
        let made = cluster.plane.request("POST", path, Some(&queue)).unwrap();
        made.is_success() || made.status == 409
    });
    let role = manifests(config).into_iter().find(|object| object["kind"] == "Role").unwrap();
    let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/cluster-doctor");
    assert!(cluster.plane.request("PATCH", &path, Some(&json!({ "rules": role["rules"] }))).unwrap().is_success());
    let log = NamedTempFile::new().unwrap();
    let child = Command::new(folder.join("vc-controller-manager"))
        .arg(format!("--kubeconfig={}", cluster.plane.admin().display()))
        .args(["--leader-elect=false", "--enable-healthz=false", "--scheduler-name=default-scheduler"])
        .args(["--controllers=+job-controller,+gc-controller"])
        .stdout(Stdio::null())
        .stderr(log.reopen().unwrap())
        .spawn()
        .unwrap();
    Some((cluster, Controller { child, log }))
}

impl Cluster {
    fn volcano_job(&self, run: RunId) -> Value {
        self.get(&format!("/apis/batch.volcano.sh/v1alpha1/namespaces/{NAMESPACE}/jobs/doctor-{run}"))
    }

    /// What Volcano's scheduler does first. Its controller acts when it sees the change, and overlooks one that comes while it is
    /// busy with the job; a scheduler would look again, and so does this.
    fn let_in(&self, run: RunId) {
        let groups = format!("/apis/scheduling.volcano.sh/v1beta1/namespaces/{NAMESPACE}/podgroups");
        let uid = self.volcano_job(run)["metadata"]["uid"].as_str().unwrap().to_owned();
        let path = format!("{groups}/doctor-{run}-{uid}");
        let set = |phase: &str| {
            let patch = json!({ "status": { "phase": phase } });
            self.plane.request("PATCH", &path, Some(&patch)).unwrap().is_success()
        };
        let mut looks = 0;
        until("the group to be let in", || {
            looks += 1;
            if looks % 60 == 1 {
                set("Pending");
                set("Inqueue");
            }
            !self.pods_of_run(run).is_empty()
        });
    }

    fn pods_of_run(&self, run: RunId) -> Vec<Value> {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io%2Frun%3D{run}");
        self.get(&path)["items"].as_array().unwrap().clone()
    }
}

#[test]
fn runs_are_jobs_of_volcanos_where_that_is_configured_and_end_as_they_ended_there() {
    let volcano = Volcano {
        queue: Some("validation".to_owned()),
        scheduler: "default-scheduler".to_owned(),
        plugins: [("env".to_owned(), Vec::new())].into(),
    };
    let run_as = RunAs::Volcano(volcano);
    let Some((cluster, _controller)) =
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
        cluster.let_in(run);
        until("the job to run", || matches!(polled(&backend, run), JobSeen::Running { .. }));
        // While Volcano has not taken that in, it makes a pod anew that is taken away: it looks at what is missing before it looks at why.
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
    cluster.kubelet.end_pod(NAMESPACE, pods[0]["metadata"]["name"].as_str().unwrap(), Exit::code(0)).unwrap();
    until("the job to end", || matches!(polled(&backend, run), JobSeen::Ended { how: JobEnd::Exited, .. }));

    // Cancelled: it stays, with its end, and what it signs with goes with it.
    let run = running();
    backend.cancel(run).unwrap();
    until("the job to be ended", || matches!(polled(&backend, run), JobSeen::Ended { how: JobEnd::Killed, .. }));
    assert_eq!(cluster.volcano_job(run)["status"]["state"]["phase"], "Terminated");
    backend.cancel(run).unwrap();
    let secret = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/secrets/doctor-{run}"));
    assert_eq!(secret["metadata"]["ownerReferences"][0]["apiVersion"], "batch.volcano.sh/v1alpha1");

    // Its pod is taken away: it is not made anew.
    let run = running();
    let pod = cluster.pods_of_run(run).remove(0);
    cluster.delete(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", pod["metadata"]["name"].as_str().unwrap()));
    until("the job to be over", || matches!(polled(&backend, run), JobSeen::Ended { how: JobEnd::Displaced, .. }));
    assert_eq!(cluster.started.lock().unwrap().get(&run.to_string()), Some(&1));
    assert!(backend.cancel(ids.run()).is_ok(), "what is not there needs no end");
}
