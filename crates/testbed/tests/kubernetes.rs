//! The control plane and the fake kubelet do what tests of Cluster Doctor rely on: real scheduling, real preemption,
//! real RBAC, and an API server that can be down for a while.

use std::{
    fmt::Debug,
    fs,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use doctor_testbed::kubernetes::{
    ControlPlane, KubernetesTestbedError, Setup,
    kubelet::{Exit, FakeNode, Kubelet, PodBehavior, connect},
};
use k8s_openapi::{
    api::{
        batch::v1::Job,
        coordination::v1::Lease,
        core::v1::{ContainerStateTerminated, Node, Pod},
        scheduling::v1::PriorityClass,
    },
    serde::{Serialize, de::DeserializeOwned},
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, PostParams},
    runtime::wait::{Condition, await_condition, conditions},
};
use serde_json::{Value, json};

/// How long a test may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

static PLANE: LazyLock<Result<ControlPlane, KubernetesTestbedError>> =
    LazyLock::new(|| ControlPlane::programs().and_then(|programs| ControlPlane::start(&programs)));

/// Serialises the tests, because one of them kills the API server.
static TURN: Mutex<()> = Mutex::new(());

/// Returns the control plane that the tests share, or `None` if it cannot be built, which is reported. In CI that is a
/// failure, and everywhere if the control plane is built but does not start.
fn plane() -> Option<(MutexGuard<'static, ()>, &'static ControlPlane)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match &*PLANE {
        Ok(plane) => Some((turn, plane)),
        Err(why) => {
            why.skip_tests("kubernetes");
            None
        }
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, work).await.expect("in time") })
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + Debug + Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

/// Creates a pod whose PriorityClass is new. The API server admits it once its own watch has reported the class.
async fn create_with_new_class(pods: &Api<Pod>, pod: Value) -> Pod {
    let pod: Pod = serde_json::from_value(pod).unwrap();
    loop {
        match pods.create(&PostParams::default(), &pod).await {
            Err(kube::Error::Api(status)) if status.message.contains("no PriorityClass with name") => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            created => return created.unwrap(),
        }
    }
}

async fn wait<K>(api: &Api<K>, name: &str, until: impl Condition<K>) -> Option<K>
where
    K: kube::Resource + Clone + Debug + Send + DeserializeOwned + 'static,
{
    await_condition(api.clone(), name, until).await.unwrap()
}

/// A pod that requests all GPUs of the only node it may run on.
fn whole_node(node: &str) -> Value {
    json!({
        "nodeSelector": { "kubernetes.io/hostname": node },
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "containers": [{ "name": "main", "image": "none", "resources": { "limits": { "nvidia.com/gpu": "8" } } }],
    })
}

fn pod(name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": spec })
}

fn terminated(pod: &Pod) -> ContainerStateTerminated {
    let containers = pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap();
    containers[0].state.as_ref().unwrap().terminated.clone().unwrap()
}

fn has_phase(expected: &'static str) -> impl Condition<Pod> {
    move |pod: Option<&Pod>| {
        pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref()).is_some_and(|phase| phase == expected)
    }
}

fn has_taint(expected: &'static str) -> impl Condition<Node> {
    move |node: Option<&Node>| {
        let taints = node.and_then(|node| node.spec.as_ref()?.taints.as_ref());
        taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == expected))
    }
}

#[test]
fn a_job_is_scheduled_by_the_real_scheduler_and_completes() {
    let Some((_turn, plane)) = plane() else { return };
    let nodes = vec![FakeNode::gpu("job-1").with_lease()];
    let kubelet = Kubelet::start(plane.admin(), nodes, |_| PodBehavior::RunFor {
        lasts: Duration::from_millis(50),
        then: Exit::code(0).with_message("all well"),
    });
    let _kubelet = kubelet.unwrap();
    block_on(async {
        let client = connect(plane.admin()).await.unwrap();
        let jobs: Api<Job> = Api::default_namespaced(client.clone());
        let pods: Api<Pod> = Api::default_namespaced(client);
        let job = json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "validation" },
            "spec": { "backoffLimit": 0, "template": { "spec": whole_node("job-1") } },
        });
        create(&jobs, job).await;
        wait(&jobs, "validation", conditions::is_job_completed()).await;
        let ran = pods.list(&ListParams::default().labels("job-name=validation")).await.unwrap().items;
        assert_eq!(ran.len(), 1);
        assert_eq!(ran[0].spec.as_ref().unwrap().node_name.as_deref(), Some("job-1"));
        assert_eq!(terminated(&ran[0]).message.as_deref(), Some("all well"));

        jobs.delete("validation", &DeleteParams::background()).await.unwrap();
        let meta = &ran[0].metadata;
        wait(&pods, meta.name.as_deref().unwrap(), conditions::is_deleted(meta.uid.as_deref().unwrap())).await;
    });
}

#[test]
fn a_pod_of_higher_priority_preempts_one_of_lower_priority() {
    let Some((_turn, plane)) = plane() else { return };
    let kubelet =
        Kubelet::start(plane.admin(), vec![FakeNode::gpu("taken-1")], |_| PodBehavior::RunUntilEnded).unwrap();
    block_on(async {
        let client = connect(plane.admin()).await.unwrap();
        let classes: Api<PriorityClass> = Api::all(client.clone());
        let pods: Api<Pod> = Api::default_namespaced(client);
        let class = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": { "name": "lowest" }, "value": -1000,
        });
        create(&classes, class).await;
        let mut spec = whole_node("taken-1");
        spec["priorityClassName"] = "lowest".into();
        let ours = create_with_new_class(&pods, pod("ours", &spec)).await;
        wait(&pods, "ours", has_phase("Running")).await;

        create(&pods, pod("user", &whole_node("taken-1"))).await;
        wait(&pods, "user", has_phase("Running")).await;
        wait(&pods, "ours", conditions::is_deleted(ours.metadata.uid.as_deref().unwrap())).await;

        kubelet.end_pod("default", "user", Exit::code(137).with_reason("OOMKilled")).unwrap();
        let user = wait(&pods, "user", has_phase("Failed")).await.unwrap();
        assert_eq!(terminated(&user).reason.as_deref(), Some("OOMKilled"));
        assert_eq!(terminated(&user).exit_code, 137);
    });
    let no_more = kubelet.end_pod("default", "ours", Exit::code(0)).unwrap_err();
    assert!(no_more.to_string().contains("default/ours"), "{no_more}");
}

#[test]
fn clients_continue_after_the_api_server_is_killed_and_restarted() {
    let Some((_turn, plane)) = plane() else { return };
    let kubelet = Kubelet::start(plane.admin(), vec![FakeNode::gpu("away-1")], |_| PodBehavior::RunUntilEnded).unwrap();
    block_on(async {
        let client = connect(plane.admin()).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client);
        create(&pods, pod("survivor", &whole_node("away-1"))).await;
        wait(&pods, "survivor", has_phase("Running")).await;

        plane.kill_apiserver().unwrap();
        assert!(pods.get("survivor").await.is_err(), "the API server is down");
        kubelet
            .end_pod("default", "survivor", Exit::code(3).with_message("ended while the API server was down"))
            .unwrap();
        plane.restart_apiserver().unwrap();

        let survivor = wait(&pods, "survivor", has_phase("Failed")).await.unwrap();
        assert_eq!(terminated(&survivor).exit_code, 3);
        // The kubelet's watch sees a deletion again, and the scheduler's watch a new pod.
        pods.delete("survivor", &DeleteParams::default()).await.unwrap();
        wait(&pods, "survivor", conditions::is_deleted(survivor.metadata.uid.as_deref().unwrap())).await;
        create(&pods, pod("newcomer", &whole_node("away-1"))).await;
        wait(&pods, "newcomer", has_phase("Running")).await;
    });
}

#[test]
fn a_node_object_is_what_its_kubelet_reports() {
    let Some((_turn, plane)) = plane() else { return };
    let fake_node = FakeNode::gpu("said-1").label("pool", "training").provider_id("cloud:///zone/i-1");
    let kubelet = Kubelet::start(plane.admin(), vec![fake_node], |_| PodBehavior::RunUntilEnded).unwrap();
    kubelet.set_boot_id("said-1", "after-a-reboot").unwrap();
    kubelet.set_resource("said-1", "nvidia.com/gpu", "7").unwrap();
    kubelet.set_ready("said-1", false).unwrap();
    assert!(kubelet.set_ready("job-1", false).is_err(), "another kubelet's");
    block_on(async {
        let nodes: Api<Node> = Api::all(connect(plane.admin()).await.unwrap());
        // The controller manager acts on the reported condition.
        let node = wait(&nodes, "said-1", has_taint("node.kubernetes.io/not-ready")).await.unwrap();
        assert_eq!(node.metadata.labels.unwrap()["pool"], "training");
        assert_eq!(node.spec.unwrap().provider_id.as_deref(), Some("cloud:///zone/i-1"));
        let status = node.status.unwrap();
        assert_eq!(status.node_info.unwrap().boot_id, "after-a-reboot");
        assert_eq!(status.allocatable.unwrap()["nvidia.com/gpu"].0, "7");
        assert_eq!(status.capacity.unwrap()["cpu"].0, "96");
    });
}

#[test]
fn a_node_whose_kubelet_stops_is_tainted_unreachable() {
    let plane = match ControlPlane::programs() {
        Ok(programs) => {
            ControlPlane::start_with(&programs, Setup { node_grace: Duration::from_secs(4), ..Setup::default() })
                .unwrap()
        }
        Err(why) => return why.skip_tests("kubernetes"),
    };
    let nodes = vec![FakeNode::gpu("silent-1").with_lease()];
    let kubelet = Kubelet::start(plane.admin(), nodes, |_| PodBehavior::RunUntilEnded).unwrap();
    block_on(async {
        let client = connect(plane.admin()).await.unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        let leases: Api<Lease> = Api::namespaced(client, "kube-node-lease");
        let renewed = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.renew_time.clone());
        let first = wait(&leases, "silent-1", |lease: Option<&Lease>| lease.is_some()).await.unwrap();
        let again = move |lease: Option<&Lease>| lease.is_some_and(|lease| renewed(lease) > renewed(&first));
        wait(&leases, "silent-1", again).await;

        drop(kubelet);
        wait(&nodes, "silent-1", has_taint("node.kubernetes.io/unreachable")).await;
    });
}

#[test]
fn a_cluster_starts_from_saved_data_which_stays_unchanged_without_controllers() {
    let programs = match ControlPlane::programs() {
        Ok(programs) => programs,
        Err(why) => return why.skip_tests("kubernetes"),
    };
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("data");
    let alone = Setup { controllers: false, ..Setup::default() };
    let first = ControlPlane::start_with(&programs, alone).unwrap();
    assert_eq!(first.pids().len(), 2, "{:?}", first.pids());
    first.create(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "left" } }));
    first.keep_data(&saved).unwrap();
    drop(first);
    for _ in 0..2 {
        let next = ControlPlane::start_with(&programs, Setup { data: Some(&saved), ..alone }).unwrap();
        let there = next.request("GET", "/api/v1/namespaces/left", None).unwrap();
        assert!(there.is_success(), "{there:?}");
        let accounts = next.request("GET", "/api/v1/namespaces/left/serviceaccounts", None).unwrap();
        assert!(accounts.text.contains("\"items\":[]"), "no controller creates accounts: {accounts:?}");
        // Changes to a copy do not affect the saved data.
        assert!(next.request("DELETE", "/api/v1/namespaces/left", None).unwrap().is_success());
    }
}

#[test]
fn a_user_and_a_service_account_have_no_rights_until_granted() {
    let Some((_turn, plane)) = plane() else { return };
    let agent = plane.kubeconfig_for_user("agent", &["readers"]).unwrap();
    let account = plane.kubeconfig_for_service_account("default", "default").unwrap();
    assert!(plane.kubeconfig_for_service_account("default", "missing").is_err());
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": "readers" },
        "rules": [{ "apiGroups": [""], "resources": ["nodes"], "verbs": ["list"] }],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": "readers" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "readers" },
        "subjects": [{ "kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "readers" }],
    });
    let list = async |client: &Client| Api::<Node>::all(client.clone()).list(&ListParams::default()).await;
    block_on(async {
        let (agent, account) = (connect(&agent).await.unwrap(), connect(&account).await.unwrap());
        for (client, name) in [(&agent, "agent"), (&account, "system:serviceaccount:default:default")] {
            let refused = list(client).await.unwrap_err().to_string();
            assert!(refused.contains("forbidden") && refused.contains(name), "{refused}");
        }
        for (kind, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
            let path = format!("/apis/rbac.authorization.k8s.io/v1/{kind}");
            assert_eq!(plane.request("POST", &path, Some(&object)).unwrap().status, 201);
        }
        // The authorizer learns of a binding through its own watch.
        while list(&agent).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(list(&account).await.is_err());
    });
}

#[test]
fn the_control_plane_is_ready_soon_and_is_small() {
    let Some((_turn, plane)) = plane() else { return };
    let mut kib = 0;
    for (part, pid) in plane.pids() {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
        println!("{part}: {} MiB", resident / 1024);
        kib += resident;
    }
    println!("ready after {:.1} s, {} MiB", plane.startup_time().as_secs_f64(), kib / 1024);
    assert_eq!(plane.pids().len(), 4);
    assert!(kib < 2 * 1024 * 1024, "{kib} KiB resident: tests would not fit beside it");
}

#[test]
fn a_missing_program_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("etcd"), "").unwrap();
    let why = ControlPlane::start(folder.path()).unwrap_err();
    assert!(matches!(why, KubernetesTestbedError::Missing { program: "kube-apiserver", .. }), "{why}");
}
