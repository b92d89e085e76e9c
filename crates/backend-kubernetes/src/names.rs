//! Names in the objects of a run: its job, secret and label, the container, its volumes and variables, and the reasons that the
//! job controller gives. Pure.

use doctor_core::ids::{JobId, RunId};

use super::config::KubernetesConfig;

/// Where a job sees the shared directory.
pub(super) const DATA: &str = "/data";
/// Where a job keeps what it remembers of the node from one run to the next.
pub(super) const STATE: &str = "/var/lib/cluster-doctor/node";
/// Where a container leaves what is kept of its end, in the pod's own state.
pub(super) const LAST_WORDS: &str = "/dev/termination-log";
/// Where a job finds the site's policy.
pub(super) const POLICY: &str = "/etc/cluster-doctor";
/// Why a job of Kubernetes' failed: its pod was taken away; its time was over.
pub(super) const POD_TAKEN: &str = "PodFailurePolicy";
pub(super) const ENDED: &str = "DeadlineExceeded";
/// The container in the pod, and the key in the secret.
pub(super) const CONTAINER: &str = "doctor-node";
pub(super) const KEY: &str = "key";
pub(super) const RENDEZVOUS: &str = "rendezvous";
/// What a template leaves to us: the variable with the key, names of volumes, and where they are in the container.
pub(super) const KEY_VARIABLE: &str = "DOCTOR_RUN_KEY";
pub(super) const VOLUMES: [&str; 3] = ["data", "state", "policy"];
pub(super) const PLACES: [&str; 3] = [DATA, STATE, POLICY];

/// The name of a run's job, of its secret and of its service.
pub(super) fn object_name(run: RunId) -> String {
    format!("doctor-{run}")
}

pub(super) fn job_id(config: &KubernetesConfig, run: RunId) -> JobId {
    JobId(format!("{}/{}", config.namespace, object_name(run)))
}

/// The label by which a run's job and pods are found.
pub(super) fn run_label(config: &KubernetesConfig) -> String {
    config.own("run")
}

/// The run that an object belongs to.
pub(super) fn run_of(metadata: &kube::core::ObjectMeta, config: &KubernetesConfig) -> Option<RunId> {
    metadata.labels.as_ref()?.get(&run_label(config))?.parse().ok()
}
