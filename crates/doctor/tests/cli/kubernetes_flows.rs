//! The workflows of the seeds on a real control plane: small batches, jobs that wait too long, nodes taken by users,
//! and what remains after a crash at the worst moment.

use doctor_testbed::kubernetes::kubelet::Exit;
use serde_json::{Value, json};

use crate::{
    kubernetes::{Cluster, NAMESPACE},
    this_machine::Service,
    workdir::{Workdir, wait_or_explain, wait_until},
};

/// Configures a service for this cluster with the printed permissions and this beginning of its policy.
pub(crate) fn configure(workdir: &Workdir, cluster: &Cluster, policy: &str) {
    configure_with(workdir, cluster, policy, "");
}

/// The same, with further settings of the backend.
fn configure_with(workdir: &Workdir, cluster: &Cluster, policy: &str, settings: &str) {
    workdir.policy_for(&["memory"], policy);
    let kubeconfig = cluster.plane.kubeconfig_for_service_account(NAMESPACE, "cluster-doctor").unwrap();
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"5s\"\n\
             [backend.kubernetes]\nkubeconfig = \"{}\"\nshare = {{ host-path = \"/data\" }}\npolicy_map = \"policy\"\n{settings}",
            kubeconfig.display()
        ),
    );
}

impl Cluster {
    fn list(&self, path: &str) -> Vec<Value> {
        let response = self.plane.request("GET", path, None).unwrap();
        let list: Value = serde_json::from_str(&response.text).unwrap();
        list["items"].as_array().cloned().unwrap_or_default()
    }

    pub(crate) fn jobs(&self) -> Vec<Value> {
        self.list(&format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs"))
    }

    fn taints(&self, node: &str) -> String {
        self.node(node)["spec"]["taints"].to_string()
    }
}

fn is_over(job: &Value) -> bool {
    let conditions = job["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Complete" || one["type"] == "Failed"))
}

#[test]
fn free_nodes_are_tested_five_at_a_time_and_users_have_priority() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    let nodes = ["gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5", "gpu-6", "slow-1", "stuck-1"];
    let Some(cluster) = Cluster::start(&workdir, &nodes) else { return };
    configure(
        &workdir,
        &cluster,
        "[limits]\npending = \"20s\"\nresult_grace = \"1s\"\n[retry]\nnot_started = \"1h\"\ninconclusive = \"1h\"\n\
         [tests.memory]\nlimit = \"1h\"\n",
    );
    let service = Service::start(&workdir);
    let rows = || workdir.json(&["history", "--test", "memory"]).as_array().cloned().unwrap_or_default();
    let mut most = 0;
    wait_until("six nodes to pass", || {
        let known = workdir.path("doctor.db").exists();
        if known {
            let nodes = workdir.json(&["nodes"]);
            most = most.max(nodes.as_array().map_or(0, |all| all.iter().filter(|node| !node["run"].is_null()).count()));
        }
        known && rows().iter().filter(|row| row["verdict"] == "pass").count() == 6
    });
    assert!((2..=5).contains(&most), "{most} jobs at a time");

    wait_until("the job that cannot start to be given up", || {
        cluster
            .jobs()
            .iter()
            .any(|job| is_over(job) && job["metadata"]["annotations"]["cluster-doctor.io/cancelled"].is_string())
    });
    wait_until("why it was", || workdir.doctor(&["why", "stuck-1"]).out.contains("pending"));
    assert!(rows().iter().all(|row| row["node"] != "stuck-1"), "a run that never started has no history row");

    // A user takes the node of a running job: the scheduler itself preempts ours.
    cluster.plane.create(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "train", "namespace": "default" },
        "spec": { "nodeSelector": { "kubernetes.io/hostname": "slow-1" }, "terminationGracePeriodSeconds": 0,
            "containers": [{ "name": "train", "image": "train", "command": ["train"],
                "resources": { "limits": { "nvidia.com/gpu": "8" } } }] },
    }));
    wait_until("the history row of the active run", || rows().iter().any(|row| row["node"] == "slow-1"));
    let row = rows().into_iter().find(|row| row["node"] == "slow-1").unwrap();
    assert_eq!((&row["verdict"], &row["reason"]), (&json!("inconclusive"), &json!("node-taken")), "{row}");
    wait_until("the user to have the node", || {
        cluster.list("/api/v1/namespaces/default/pods").iter().any(|pod| pod["status"]["phase"] == "Running")
    });
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_controller_killed_between_taint_and_job_leaves_no_taint_and_starts_no_second_job() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    let Some(cluster) = Cluster::start(&workdir, &["gpu-1"]) else { return };
    // The quota rejects jobs, but not the mark that is set before.
    let quota = format!("/api/v1/namespaces/{NAMESPACE}/resourcequotas/none");
    cluster.plane.create(&json!({ "apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": { "name": "none", "namespace": NAMESPACE }, "spec": { "hard": { "count/jobs.batch": "0" } } }));
    wait_until("the quota to be in force", || {
        let response = cluster.plane.request("GET", &quota, None).unwrap();
        response.text.contains("\"used\"")
    });
    configure(&workdir, &cluster, "[suites.sweep]\ntests = [\"memory\"]\nevery = \"6h\"\nmaintenance = true\n");
    let service = Service::start(&workdir);
    wait_until("the taint", || cluster.taints("gpu-1").contains("cluster-doctor.io/maintenance"));
    // SIGKILL: no time for cleanup.
    drop(service);
    assert!(cluster.jobs().is_empty());
    assert!(cluster.plane.request("DELETE", &quota, None).unwrap().is_success());

    let service = Service::start(&workdir);
    let rows = || workdir.json(&["history", "--test", "memory"]).as_array().cloned().unwrap_or_default();
    wait_until("the sweep", || rows().len() == 1);
    assert_eq!(rows()[0]["verdict"], "pass");
    wait_until("the taint to be gone", || !cluster.taints("gpu-1").contains("cluster-doctor"));
    let of_runs: Vec<Value> = cluster
        .jobs()
        .into_iter()
        .filter(|job| job["metadata"]["labels"]["cluster-doctor.io/run"].is_string())
        .collect();
    assert_eq!(of_runs.len(), 1, "one run, one job");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn in_observe_mode_nodes_are_tested_and_not_modified() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    let Some(cluster) = Cluster::start(&workdir, &["gpu-1"]) else { return };
    let sweep = "mode = \"observe\"\n[suites.sweep]\ntests = [\"memory\"]\nevery = \"6h\"\nmaintenance = true\n";
    configure(&workdir, &cluster, sweep);
    let mut service = Service::start(&workdir);
    wait_until("the sweep", || {
        workdir.path("doctor.db").exists()
            && workdir.json(&["history", "--test", "memory"]).as_array().is_some_and(|rows| rows.len() == 1)
    });
    // The effects of the result follow in later cycles.
    workdir.policy_for(&["memory"], &format!("version = 2\n{sweep}"));
    service.wait_for_log("configuration reloaded policy=2");
    let node = cluster.node("gpu-1");
    assert_eq!(node["spec"]["taints"], Value::Null);
    let ours =
        |of: &Value| of.as_object().is_some_and(|all| all.keys().any(|name| name.starts_with("cluster-doctor.io/")));
    assert!(!ours(&node["metadata"]["labels"]) && !ours(&node["metadata"]["annotations"]), "{}", node["metadata"]);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn an_operators_repair_reboots_once_although_the_controller_is_killed_before_and_after() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    let Some(cluster) = Cluster::start(&workdir, &["gpu-1", "gpu-2", "gpu-3"]) else { return };
    // No step is allowed: the operator's command needs no permission.
    let policy = |mode: &str| {
        format!("mode = \"{mode}\"\nallow = {{ mark = false }}\n[repair]\nrequalification = [\"memory\"]\n")
    };
    configure_with(&workdir, &cluster, &policy("observe"), "reboot = [\"systemctl\", \"reboot\"]\n");
    let service = Service::start(&workdir);
    let rows = || workdir.json(&["history", "--test", "memory"]).as_array().cloned().unwrap_or_default();
    wait_until("all nodes to pass", || workdir.path("doctor.db").exists() && rows().len() == 3);
    let repair = ["repair", "gpu-1", "--step", "reboot", "--why", "hangs in NCCL"];
    let confirmed = [&repair[..], &["--yes"]].concat();
    workdir.expect(1, &confirmed).stderr_contains("refused: mode `observe`").stderr_contains("mode = \"recommend\"");
    workdir.policy_for(&["memory"], &policy("recommend"));
    wait_until("the mode to change", || workdir.json(&["status"])["mode"] == "recommend");
    workdir
        .expect(1, &["repair", "gpu-1", "--step", "replace", "--why", "x", "--yes"])
        .stderr_contains("refused: this cluster cannot replace a node")
        .stderr_contains("--step reboot");
    workdir.expect(6, &repair).stderr_contains("Would reboot 1 node (gpu-1).");
    workdir
        .expect(6, &["repair", "gpu-*", "--step", "reboot", "--why", "x", "--yes"])
        .stderr_contains("the circuit breaker would allow 1 now")
        .stderr_contains("--confirm-nodes 3");
    workdir.expect(0, &["pause", "--why", "upgrade", "--yes"]);
    workdir.expect(1, &confirmed).stderr_contains("paused by ann (upgrade)").stderr_contains("`doctor resume --why …`");
    workdir.expect(0, &["resume", "--why", "done", "--yes"]);

    // The quota rejects the job that would reboot the node.
    let quota = format!("/api/v1/namespaces/{NAMESPACE}/resourcequotas/none");
    cluster.plane.create(&json!({ "apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": { "name": "none", "namespace": NAMESPACE }, "spec": { "hard": { "count/jobs.batch": "0" } } }));
    wait_until("the quota to be in force", || {
        let response = cluster.plane.request("GET", &quota, None).unwrap();
        response.text.contains("\"used\"")
    });
    workdir.expect(0, &confirmed).stdout_contains("Requested reboot of 1 node.");
    wait_until("the intent", || workdir.doctor(&["why", "gpu-1"]).out.contains("is being repaired (reboot"));
    wait_until("the operator's words on the node", || {
        let results = cluster.node("gpu-1")["metadata"]["annotations"]["cluster-doctor.io/results"].clone();
        let results: Value = results.as_str().map_or(Value::Null, |text| serde_json::from_str(text).unwrap());
        results["operator"] == json!({ "request": "reboot", "by": "ann", "why": "hangs in NCCL" })
    });
    let repairs = || {
        let jobs = cluster.jobs().into_iter();
        jobs.filter(|job| job["metadata"]["labels"]["cluster-doctor.io/repair"].is_string()).count()
    };
    // SIGKILL before the effect. A pause that begins now stops what was only intended.
    drop(service);
    assert_eq!(repairs(), 0);
    workdir.expect(0, &["pause", "--why", "upgrade", "--yes"]);
    assert!(cluster.plane.request("DELETE", &quota, None).unwrap().is_success());
    let service = Service::start(&workdir);
    wait_until("the pause to be what it waits for", || {
        workdir.doctor(&["why", "gpu-1"]).out.contains("waits for this: everything is paused by ann (upgrade)")
    });
    workdir.doctor(&["audit"]).stdout_contains("was not sent to the cluster: everything is paused by ann");
    assert_eq!(repairs(), 0, "nothing was sent");
    workdir.expect(0, &["resume", "--why", "done", "--yes"]);
    let running_pod = |label: &str| {
        let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=cluster-doctor.io/{label}");
        let pods = cluster.list(&pods);
        let pod = pods.iter().find(|pod| pod["status"]["phase"] == "Running")?;
        Some(pod["metadata"]["name"].as_str().unwrap().to_owned())
    };
    let wait_for_pod = |what: &str, label: &str| {
        let mut pod = None;
        wait_until(what, || {
            pod = running_pod(label);
            pod.is_some()
        });
        pod.unwrap()
    };
    // The node's report comes first. Here it fails, and the repair goes on without it.
    let report = wait_for_pod("the report", "report");
    cluster.kubelet.end_pod(NAMESPACE, &report, Exit::code(1)).unwrap();
    let pod = wait_for_pod("the reboot", "repair");
    // SIGKILL after the effect. A pause that begins now does not stop what was sent.
    drop(service);
    workdir.expect(0, &["pause", "--why", "upgrade", "--yes"]);
    cluster.kubelet.end_pod(NAMESPACE, &pod, Exit::code(0)).unwrap();
    cluster.kubelet.set_boot_id("gpu-1", "11111111-1111-4111-8111-111111111111").unwrap();
    let service = Service::start(&workdir);
    let is_rebooted = || {
        let steps = workdir.json(&["cases", "gpu-1"])[0]["steps"].as_array().cloned().unwrap_or_default();
        steps.iter().any(|step| step["what"] == "reboot" && step["state"] == "done")
    };
    wait_or_explain("the end of the reboot", is_rebooted, || {
        let cases = workdir.json(&["cases", "gpu-1"]);
        format!("{}\n{}\n{cases:#}", workdir.doctor(&["why", "gpu-1"]).out, workdir.doctor(&["audit"]).out)
    });
    workdir.expect(0, &["resume", "--why", "done", "--yes"]);
    wait_until("the node to be back", || workdir.json(&["cases", "--all", "gpu-1"])[0]["state"]["how"] == "returned");
    assert_eq!(repairs(), 1, "rebooted once");
    assert!(!cluster.taints("gpu-1").contains("cluster-doctor"), "{}", cluster.taints("gpu-1"));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
