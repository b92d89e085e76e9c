//! A multi-node test on a real control plane: an indexed job whose pods find each other, and trials that identify the
//! faulty node. Pods run the real `doctor-node`; their GPUs and NCCL are stand-ins whose ranks really add up over
//! sockets.

use serde_json::{Value, json};

use crate::{
    kubernetes::{Cluster, NAMESPACE},
    kubernetes_flows::configure,
    slurm_several::POLICY,
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

#[test]
fn nodes_are_tested_together_and_the_one_that_fails_with_every_partner_is_named() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    let Some(cluster) = Cluster::start(&workdir, &["gpu-1", "gpu-2", "gpu-3", "bad-1"]) else { return };
    configure(&workdir, &cluster, POLICY);
    let service = Service::start(&workdir);
    let rows = |test: &str| workdir.json(&["history", "--test", test]).as_array().cloned().unwrap_or_default();
    wait_until("every node to be known as good", || workdir.path("doctor.db").exists() && rows("memory").len() == 4);

    workdir.expect(2, &["test", "--nodes", "gpu-1", "collective", "--yes"]).stderr_contains("at least two nodes");
    workdir.expect(2, &["test", "gpu-1", "--test", "collective-nodes", "--yes"]).stderr_contains("--nodes A,B");
    workdir.expect(0, &["test", "--nodes", "gpu-1,bad-1", "collective", "--why", "training is slow", "--yes"]);
    wait_until("the faulty node to be identified", || workdir.doctor(&["audit"]).out.contains("at fault: bad-1"));
    workdir.doctor(&["why", "bad-1"]).stdout_contains("fails together with each of gpu-1, gpu-2, gpu-3");
    for node in ["gpu-1", "gpu-2", "gpu-3"] {
        let why = workdir.doctor(&["why", node]);
        assert!(!why.out.contains("fails together"), "{}", why.out);
    }
    let outcomes = |node: &str| -> Vec<String> {
        let of_node = rows("collective-nodes").into_iter().filter(|row| row["node"] == node);
        of_node.map(|row| format!("{} {}", row["verdict"].as_str().unwrap(), row["reason"].as_str().unwrap())).collect()
    };
    assert_eq!(outcomes("bad-1"), ["inconclusive failed-together"; 3], "with gpu-1 and with two that are good");
    assert!(outcomes("gpu-1").contains(&"pass within-limits".to_owned()), "{:?}", outcomes("gpu-1"));

    let job = cluster.jobs().into_iter().find(|job| job["spec"]["completionMode"] == "Indexed").unwrap();
    assert_eq!(job["spec"]["completions"], 2);
    let name = job["metadata"]["name"].as_str().unwrap();
    let response =
        cluster.plane.request("GET", &format!("/api/v1/namespaces/{NAMESPACE}/services/{name}"), None).unwrap();
    let meeting: Value = serde_json::from_str(&response.text).unwrap();
    assert_eq!(
        (&meeting["spec"]["clusterIP"], &meeting["spec"]["publishNotReadyAddresses"]),
        (&json!("None"), &json!(true))
    );
    assert_eq!(
        meeting["metadata"]["ownerReferences"][0]["uid"], job["metadata"]["uid"],
        "deleted together with the job"
    );

    // Good nodes are confirmed by a single run.
    workdir.expect(0, &["test", "--nodes", "gpu-[1-3]", "--yes"]);
    wait_until("all to pass", || workdir.doctor(&["audit"]).out.contains("all nodes pass together"));
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
