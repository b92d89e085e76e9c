//! Names in the objects of a run: its job, secret and label, the container, its volumes and variables, and the reasons of the job
//! controller. Pure.

use doctor_core::ids::{JobId, RunId};

use super::config::KubernetesConfig;

/// The shared directory in a job's container.
pub(super) const DATA_PATH: &str = "/data";
/// The node's directory in which jobs keep state from one run to the next.
pub(super) const STATE_PATH: &str = "/var/lib/cluster-doctor/node";
/// The file whose content becomes the container's termination message.
pub(super) const TERMINATION_LOG: &str = "/dev/termination-log";
/// The site's policy in a job's container.
pub(super) const POLICY_PATH: &str = "/etc/cluster-doctor";
/// Why a Kubernetes Job failed: its pod was disrupted; its deadline passed.
pub(super) const POD_FAILURE_POLICY_REASON: &str = "PodFailurePolicy";
pub(super) const DEADLINE_EXCEEDED_REASON: &str = "DeadlineExceeded";
/// The container in the pod, and the keys in the secret.
pub(super) const CONTAINER: &str = "doctor-node";
pub(super) const KEY: &str = "key";
pub(super) const RENDEZVOUS: &str = "rendezvous";
/// Reserved names that a template must not use: the variable with the key, the volumes, and their mount paths.
pub(super) const KEY_VARIABLE: &str = "DOCTOR_RUN_KEY";
pub(super) const VOLUMES: [&str; 4] = ["data", "state", "policy", HOST_VOLUME];
pub(super) const MOUNT_PATHS: [&str; 4] = [DATA_PATH, STATE_PATH, POLICY_PATH, HOST_PATH];
/// The node's file system in a job's container, if the tests need it.
pub(super) const HOST_VOLUME: &str = "host";
pub(super) const HOST_PATH: &str = "/host";
/// The variable that names the access that the job was given. A variable and not an argument, because an older
/// `doctor-node` ignores it.
pub(super) const ACCESS_VARIABLE: &str = "DOCTOR_ACCESS";

/// Returns the name of a run's job, secret and service.
pub(super) fn object_name(run: RunId) -> String {
    format!("doctor-{run}")
}

pub(super) fn job_id(config: &KubernetesConfig, run: RunId) -> JobId {
    JobId(format!("{}/{}", config.namespace, object_name(run)))
}

/// Returns the label by which a run's job and pods are found.
pub(super) fn run_label(config: &KubernetesConfig) -> String {
    config.prefixed("run")
}

/// Returns the run that an object belongs to.
pub(super) fn run_of(metadata: &kube::core::ObjectMeta, config: &KubernetesConfig) -> Option<RunId> {
    metadata.labels.as_ref()?.get(&run_label(config))?.parse().ok()
}
