//! The measured cluster: 5,000 nodes with eight GPUs and 20,000 pods, as kubelets, a GPU operator and pod controllers
//! would write them. Pure functions, which also give the expected occupancy of each node.

use serde_json::{Map, Value, json};

pub(super) const NODES: usize = 5_000;
pub(super) const PODS: usize = 20_000;
/// One of each on every node; none of them uses GPUs.
const DAEMONS: [(&str, &str); 3] =
    [("kube-system", "cni-agent"), ("gpu-operator", "device-plugin"), ("monitoring", "dcgm-exporter")];
/// The number of users' namespaces.
const TEAMS: usize = 8;
/// As many as a kubelet reports.
const IMAGES: usize = 50;

/// The state in which a node is created, and thus its expected occupancy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// A pod uses all of its GPUs.
    Taken,
    Idle,
    /// Cordoned by an operator.
    Cordoned,
    /// Reported as not ready by its kubelet.
    NotReady,
    /// One GPU is not allocatable.
    ShortOfGpus,
}

impl State {
    pub(super) const fn of(node: usize) -> Self {
        if node % 50 == 7 {
            Self::NotReady
        } else if node % 100 == 13 {
            Self::Cordoned
        } else if node % 250 == 21 {
            Self::ShortOfGpus
        } else if node.is_multiple_of(25) {
            Self::Idle
        } else {
            Self::Taken
        }
    }

    /// Returns the occupancy that `doctor nodes` prints.
    pub(super) const fn seen_as(self) -> &'static str {
        match self {
            Self::Taken | Self::Cordoned => "busy",
            Self::Idle => "free",
            Self::NotReady | Self::ShortOfGpus => "unknown",
        }
    }
}

pub(super) fn node_name(node: usize) -> String {
    format!("gpu-{node:04}.cluster.internal")
}

/// Returns all namespaces with pods, except kube-system.
pub(super) fn namespaces() -> Vec<String> {
    let daemons = DAEMONS.iter().map(|(namespace, _)| (*namespace).to_owned());
    let mut all: Vec<String> = daemons.chain((0..TEAMS).map(team)).collect();
    // The API server creates this one itself.
    all.retain(|namespace| namespace != "kube-system");
    all
}

fn team(number: usize) -> String {
    format!("team-{number}")
}

/// Returns a node as its kubelet registers it.
pub(super) fn node(number: usize) -> Value {
    let name = node_name(number);
    let state = State::of(number);
    let mut spec = json!({
        "podCIDR": format!("10.{}.{}.0/24", number / 250, number % 250),
        "podCIDRs": [format!("10.{}.{}.0/24", number / 250, number % 250)],
        "providerID": format!("cloud:///zone-{}/i-{number:016x}", number % 3),
    });
    if state == State::Cordoned {
        spec["unschedulable"] = json!(true);
        spec["taints"] = json!([{ "key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule",
            "timeAdded": "2026-11-01T09:00:00Z" }]);
    }
    let gpus = if state == State::ShortOfGpus { "7" } else { "8" };
    let amounts = |gpus: &str, cpu: &str, memory: &str| {
        json!({ "cpu": cpu, "memory": memory, "ephemeral-storage": "28120508532Ki", "hugepages-1Gi": "0",
            "hugepages-2Mi": "0", "nvidia.com/gpu": gpus, "rdma/hca": "8", "pods": "110" })
    };
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": "hgx-h100-8", "topology.kubernetes.io/region": "region-1",
                "topology.kubernetes.io/zone": format!("zone-{}", number % 3),
                "cluster-doctor.io/pool": format!("pool-{}", number % 4),
            },
            "annotations": {
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
                "node.alpha.kubernetes.io/ttl": "300",
                "csi.volume.kubernetes.io/nodeid": format!("{{\"block.csi.example\":\"i-{number:016x}\"}}"),
            },
        },
        "spec": spec,
        "status": {
            "capacity": amounts("8", "192", "2113478736Ki"),
            "allocatable": amounts(gpus, "190", "2110123456Ki"),
            "conditions": conditions(state, number),
            "addresses": [
                { "type": "InternalIP", "address": format!("172.16.{}.{}", number / 250, number % 250) },
                { "type": "Hostname", "address": name },
            ],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": 10250 } },
            "nodeInfo": {
                "machineID": format!("{number:032x}"), "systemUUID": format!("4c4c4544-0000-4000-8000-{number:012x}"),
                "bootID": format!("b0070000-0000-4000-8000-{number:012x}"), "kernelVersion": "6.8.0-1021-generic",
                "osImage": "Ubuntu 24.04.2 LTS", "containerRuntimeVersion": "containerd://2.0.4",
                "kubeletVersion": "v1.36.4", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
            },
            "images": images(number),
        },
    })
}

fn conditions(state: State, number: usize) -> Value {
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        json!({ "type": kind, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": format!("2026-11-15T08:{:02}:{:02}Z", number / 60 % 60, number % 60),
            "lastTransitionTime": "2026-10-01T06:30:00Z" })
    };
    let ready = if state == State::NotReady {
        condition("Ready", "False", "KubeletNotReady", "container runtime network not ready: no network plugin")
    } else {
        condition("Ready", "True", "KubeletReady", "kubelet is posting ready status")
    };
    json!([
        condition("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        condition("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        condition("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ready,
    ])
}

/// Returns images with two names each, by digest and by tag, as containerd reports them.
fn images(number: usize) -> Vec<Value> {
    let image = |image: usize| {
        let name = format!("registry.internal.example/ml-platform/training-{}", (number + image) % 400);
        let digest = format!("{:016x}", ((number % 7 * 1000 + image) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        json!({ "names": [format!("{name}@sha256:{}", digest.repeat(4)), format!("{name}:2026.{image}")],
            "sizeBytes": 1_234_567 * (image + 3) })
    };
    (0..IMAGES).map(image).collect()
}

/// Returns the labels of a GPU operator and of feature discovery: the bulk of a GPU node's labels.
pub(super) fn operator_labels(number: usize) -> Value {
    let mut labels = Map::new();
    let mut put = |key: &str, value: String| labels.insert(key.to_owned(), json!(value));
    for (key, value) in [
        ("count", "8"),
        ("present", "true"),
        ("product", "NVIDIA-H100-80GB-HBM3"),
        ("memory", "81559"),
        ("family", "hopper"),
        ("machine", "HGX-H100"),
        ("replicas", "1"),
        ("sharing-strategy", "none"),
        ("compute.major", "9"),
        ("compute.minor", "0"),
        ("deploy.driver", "true"),
        ("deploy.dcgm", "true"),
        ("deploy.dcgm-exporter", "true"),
        ("deploy.device-plugin", "true"),
        ("deploy.gpu-feature-discovery", "true"),
        ("deploy.node-status-exporter", "true"),
        ("deploy.operator-validator", "true"),
    ] {
        put(&format!("nvidia.com/gpu.{key}"), value.to_owned());
    }
    for (key, value) in
        [("driver.major", "580"), ("driver.minor", "82"), ("runtime.major", "13"), ("runtime.minor", "0")]
    {
        put(&format!("nvidia.com/cuda.{key}"), value.to_owned());
    }
    put("nvidia.com/gfd.timestamp", format!("{}", 1_794_000_000 + number));
    for feature in [
        "cpu-cpuid.ADX",
        "cpu-cpuid.AESNI",
        "cpu-cpuid.AMXBF16",
        "cpu-cpuid.AMXINT8",
        "cpu-cpuid.AMXTILE",
        "cpu-cpuid.AVX",
        "cpu-cpuid.AVX2",
        "cpu-cpuid.AVX512BF16",
        "cpu-cpuid.AVX512BW",
        "cpu-cpuid.AVX512CD",
        "cpu-cpuid.AVX512DQ",
        "cpu-cpuid.AVX512F",
        "cpu-cpuid.AVX512VL",
        "cpu-cpuid.AVX512VNNI",
        "cpu-cpuid.FMA3",
        "cpu-cpuid.SHA",
        "cpu-hardware_multithreading",
        "kernel-config.NO_HZ",
        "memory-numa",
        "network-sriov.capable",
        "pci-10de.present",
        "pci-15b3.present",
        "rdma.available",
        "rdma.capable",
        "storage-nonrotationaldisk",
        "system-os_release.ID",
    ] {
        put(&format!("feature.node.kubernetes.io/{feature}"), "true".to_owned());
    }
    json!({ "metadata": { "labels": labels } })
}

/// A pod and its node.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: usize,
    pub(super) takes_gpus: bool,
}

/// Returns all pods: the daemons of every node, a training pod on each node in use, and others without GPUs.
pub(super) fn pods() -> Vec<Pod> {
    let mut pods = Vec::with_capacity(PODS);
    for node in 0..NODES {
        for (namespace, name) in DAEMONS {
            let name = format!("{name}-{node:05}");
            pods.push(Pod { namespace: namespace.to_owned(), name, node, takes_gpus: false });
        }
        if State::of(node) == State::Taken {
            pods.push(training(node, "train"));
        }
    }
    for node in 0..PODS - pods.len() {
        let name = format!("prepare-{node:05}");
        pods.push(Pod { namespace: team(node % TEAMS), name, node, takes_gpus: false });
    }
    pods
}

/// Returns a pod that uses all GPUs of a node.
pub(super) fn training(node: usize, job: &str) -> Pod {
    Pod { namespace: team(node % TEAMS), name: format!("{job}-worker-{node:05}"), node, takes_gpus: true }
}

impl Pod {
    /// Returns the object as its controller creates it; `placed`: with a node assigned.
    pub(super) fn object(&self, placed: bool) -> Value {
        let Self { namespace, name, node, takes_gpus } = self;
        let owner = name.rsplit_once('-').map_or(name.as_str(), |(owner, _)| owner);
        let variable = |number: usize| json!({ "name": format!("SETTING_{number}"), "value": format!("/mnt/shared/{owner}/{number}") });
        let mut container = json!({
            "name": "main", "image": format!("registry.internal.example/ml-platform/{owner}:2026.11"),
            "imagePullPolicy": "IfNotPresent",
            "command": ["/usr/bin/launch", "--config", "/etc/job/config.yaml", "--rendezvous", format!("{owner}.{namespace}:29500")],
            "env": (0..12).map(variable).collect::<Vec<_>>(),
            "resources": { "requests": { "cpu": "8", "memory": "64Gi" }, "limits": { "memory": "128Gi" } },
            "volumeMounts": [{ "name": "shm", "mountPath": "/dev/shm" }, { "name": "config", "mountPath": "/etc/job" }],
        });
        if *takes_gpus {
            container["resources"]["limits"]["nvidia.com/gpu"] = json!("8");
            container["resources"]["limits"]["rdma/hca"] = json!("8");
        }
        let mut spec = json!({
            "restartPolicy": if *takes_gpus { "Never" } else { "Always" },
            "terminationGracePeriodSeconds": 30,
            "containers": [container],
            "tolerations": [{ "key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule" }],
            "volumes": [{ "name": "shm", "emptyDir": { "medium": "Memory" } },
                { "name": "config", "configMap": { "name": format!("{owner}-config") } }],
        });
        if placed {
            spec["nodeName"] = json!(node_name(*node));
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": namespace,
                "labels": { "app.kubernetes.io/name": owner, "app.kubernetes.io/part-of": "ml-platform",
                    "training.kubeflow.org/job-name": owner, "training.kubeflow.org/replica-index": node.to_string(),
                    "training.kubeflow.org/replica-type": "worker" },
                "annotations": { "k8s.v1.cni.cncf.io/networks": "rail-0,rail-1,rail-2,rail-3,rail-4,rail-5,rail-6,rail-7",
                    "prometheus.io/scrape": "true", "prometheus.io/port": "9400" },
                "ownerReferences": [{ "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": owner,
                    "uid": format!("00000000-0000-4000-9000-{node:012x}"), "controller": true, "blockOwnerDeletion": true }],
            },
            "spec": spec,
        })
    }

    /// Returns the status while its image is pulled.
    pub(super) fn creating(&self) -> Value {
        self.status("Pending", &json!({ "waiting": { "reason": "ContainerCreating" } }))
    }

    pub(super) fn running(&self) -> Value {
        self.status("Running", &json!({ "running": { "startedAt": "2026-11-15T08:00:05Z" } }))
    }

    pub(super) fn ended(&self) -> Value {
        let end = json!({ "terminated": { "exitCode": 0, "reason": "Completed", "startedAt": "2026-11-15T08:00:05Z",
            "finishedAt": "2026-11-15T09:00:05Z" } });
        self.status("Succeeded", &end)
    }

    fn status(&self, phase: &str, state: &Value) -> Value {
        let Self { node, name, .. } = self;
        let ready = if phase == "Running" { "True" } else { "False" };
        let condition = |kind: &str, status: &str| json!({ "type": kind, "status": status, "lastProbeTime": null, "lastTransitionTime": "2026-11-15T08:00:00Z" });
        let address = format!("10.{}.{}.{}", node / 250, node % 250, name.len());
        json!({ "status": {
            "phase": phase, "qosClass": "Burstable", "startTime": "2026-11-15T08:00:00Z",
            "hostIP": format!("172.16.{}.{}", node / 250, node % 250),
            "hostIPs": [{ "ip": format!("172.16.{}.{}", node / 250, node % 250) }],
            "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [condition("PodReadyToStartContainers", "True"), condition("Initialized", "True"),
                condition("Ready", ready), condition("ContainersReady", ready), condition("PodScheduled", "True")],
            "containerStatuses": [{ "name": "main", "ready": phase == "Running", "started": phase == "Running",
                "restartCount": 0, "state": state, "lastState": {},
                "image": "registry.internal.example/ml-platform/training:2026.11",
                "imageID": format!("registry.internal.example/ml-platform/training@sha256:{}", "5f".repeat(32)),
                "containerID": format!("containerd://{}", "a9".repeat(32)) }],
        } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn the_population_has_its_size_and_every_node_state() {
        let pods = pods();
        assert_eq!(pods.len(), PODS);
        let names: BTreeSet<(&str, &str)> =
            pods.iter().map(|pod| (pod.namespace.as_str(), pod.name.as_str())).collect();
        assert_eq!(names.len(), PODS, "names are unique");
        let taken: BTreeSet<usize> = pods.iter().filter(|pod| pod.takes_gpus).map(|pod| pod.node).collect();
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for node in 0..NODES {
            assert_eq!(taken.contains(&node), State::of(node) == State::Taken, "{node}");
            *seen.entry(State::of(node).seen_as()).or_default() += 1;
        }
        assert_eq!(seen, BTreeMap::from([("busy", 4680), ("free", 200), ("unknown", 120)]));
    }

    #[test]
    fn a_node_object_is_as_large_as_in_a_real_gpu_cluster() {
        let bytes = node(1).to_string().len();
        assert!((9_000..20_000).contains(&bytes), "{bytes}");
    }
}
