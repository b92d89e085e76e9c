//! The rights of a job's pod on its node: what its tests need, and no more. Pure.
//!
//! | access | in the pod |
//! |---|---|
//! | `gpu` | all GPUs of the node, by its resources; `hostPID`, because the driver shows only processes of the caller's namespace |
//! | `host-pid` | `hostPID` |
//! | `host-root`, `kernel-log` | `privileged`, and the node's `/` at `/host`, read-only |
//! | `rdma` | `privileged`, unless the template requests devices of a plugin, such as `rdma/hca` |
//! | `mounts` | the node's `/` at `/host`, writable |
//!
//! With `host_access = false` a pod has its GPUs and what the template gives it.

use doctor_core::access::Access;
use serde_json::{Value, json};

use super::{
    config::KubernetesConfig,
    names::{ACCESS_VARIABLE, HOST_PATH, HOST_VOLUME},
};

/// The rights of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobAccess {
    given: Vec<Access>,
    host_pid: bool,
    privileged: bool,
}

impl JobAccess {
    /// Returns the rights for tests that need this access. `has_devices`: the template requests devices of a plugin.
    pub(super) fn new(needed: &[Access], has_devices: bool, config: &KubernetesConfig) -> Self {
        let is_given = |access: &Access| *access == Access::Gpu || (config.host_access && needed.contains(access));
        let given: Vec<Access> = Access::ALL.iter().copied().filter(is_given).collect();
        let privileged = given.iter().any(|access| match access {
            Access::HostRoot | Access::KernelLog => true,
            Access::Rdma => !has_devices,
            Access::Gpu | Access::HostPid | Access::Mounts => false,
        });
        let shows_processes = |access: &Access| matches!(access, Access::Gpu | Access::HostPid);
        Self { given, host_pid: config.host_access && needed.iter().any(shows_processes), privileged }
    }

    /// Returns whether the node's file system is in the pod.
    pub(super) fn has_host(&self) -> bool {
        let shows_host = |access: &Access| matches!(access, Access::HostRoot | Access::KernelLog | Access::Mounts);
        self.given.iter().any(shows_host)
    }

    /// Adds the rights to a pod with our container.
    pub(super) fn apply(&self, pod: &mut Value) {
        if self.host_pid {
            pod["hostPID"] = json!(true);
        }
        let given = self.given.iter().map(|access| access.code()).collect::<Vec<_>>().join(",");
        let container = &mut pod["containers"][0];
        push(&mut container["env"], json!({ "name": ACCESS_VARIABLE, "value": given }));
        if self.privileged {
            container["securityContext"] = json!({ "privileged": true, "runAsUser": 0 });
        }
        if self.has_host() {
            // Mounts made on the node later are visible too.
            let mount = json!({ "name": HOST_VOLUME, "mountPath": HOST_PATH, "mountPropagation": "HostToContainer",
                "readOnly": !self.given.contains(&Access::Mounts) });
            push(&mut container["volumeMounts"], mount);
            push(&mut pod["volumes"], json!({ "name": HOST_VOLUME, "hostPath": { "path": "/" } }));
        }
    }
}

fn push(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        other => *other = json!([item]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(needed: &[Access], has_devices: bool, config: &KubernetesConfig) -> Value {
        let mut pod = json!({ "containers": [{ "env": [{ "name": "KEY" }], "volumeMounts": [] }], "volumes": [] });
        JobAccess::new(needed, has_devices, config).apply(&mut pod);
        pod
    }

    #[test]
    fn a_pod_gets_what_its_tests_need_and_no_more() {
        use Access::{Gpu, HostPid, HostRoot, KernelLog, Mounts, Rdma};
        let config = KubernetesConfig::default();
        for (needed, has_devices, privileged, host) in [
            (&[][..], false, false, None),
            (&[Gpu], false, false, None),
            (&[Gpu, HostPid], false, false, None),
            (&[Gpu, Rdma], false, true, None),
            (&[Gpu, Rdma], true, false, None),
            (&[Mounts], false, false, Some(false)),
            (&[KernelLog], false, true, Some(true)),
            (&[HostRoot, HostPid], false, true, Some(true)),
            (&[HostRoot, Mounts], false, true, Some(false)),
        ] {
            let pod = pod(needed, has_devices, &config);
            let container = &pod["containers"][0];
            assert_eq!(container["securityContext"]["privileged"].as_bool().unwrap_or(false), privileged, "{needed:?}");
            assert_eq!(container["volumeMounts"][0]["readOnly"].as_bool(), host, "{needed:?}");
            assert_eq!(pod["volumes"][0]["hostPath"]["path"].as_str(), host.map(|_| "/"), "{needed:?}");
            let has_processes = needed.contains(&Gpu) || needed.contains(&HostPid);
            assert_eq!(pod["hostPID"].as_bool().unwrap_or(false), has_processes, "{needed:?}");
        }
    }

    #[test]
    fn the_job_is_told_what_it_was_given() {
        let access = |pod: &Value| pod["containers"][0]["env"][1]["value"].as_str().unwrap().to_owned();
        let config = KubernetesConfig::default();
        assert_eq!(access(&pod(&[Access::KernelLog], false, &config)), "gpu,kernel-log");
        let without = KubernetesConfig { host_access: false, ..config };
        let pod = pod(&[Access::KernelLog, Access::Mounts], false, &without);
        assert_eq!(access(&pod), "gpu");
        assert_eq!((&pod["hostPID"], &pod["volumes"]), (&Value::Null, &json!([])));
    }
}
