//! Which access to the machine a check needs, derived from its probes.
//!
//! Most of `/proc` and `/sys` shows the machine in a container too. Everything else that a probe reads is the machine's
//! only where the container was given it. A job says which access it has; a probe that needs more is not run, because
//! its answer would be about the container.

use doctor_core::{
    access::{Access, Place},
    observation::{FailureKind, ProbeFailure},
};

use crate::{
    probe::Probe,
    spec::{Check, Depth, Params, Spec},
};

/// Parts of `/proc` and `/sys` that differ from container to container.
const NAMESPACED: [&str; 7] =
    ["/proc/mounts", "/proc/net", "/proc/self", "/proc/1", "/sys/class/net", "/sys/fs/cgroup", "/sys/firmware"];

/// Returns the access that a probe needs. A program or a built-in test needs what its check declares.
pub fn of_probe(probe: &Probe) -> &'static [Access] {
    match probe {
        Probe::Read { path }
        | Probe::List { path }
        | Probe::Glob { pattern: path }
        | Probe::Bytes { pattern: path, .. }
        | Probe::Links { pattern: path }
        | Probe::Sampled { pattern: path, .. } => {
            if is_the_same_in_containers(path) {
                &[]
            } else {
                &[Access::HostRoot]
            }
        }
        Probe::StatFs { .. } => &[Access::HostRoot],
        Probe::Kmsg => &[Access::KernelLog],
        Probe::Processes => &[Access::HostPid],
        Probe::Gpu { .. } | Probe::DcgmHealth { .. } => &[Access::Gpu],
        Probe::ClockDiscipline | Probe::Exec { .. } | Probe::ExecIfExists { .. } | Probe::Builtin { .. } => &[],
    }
}

fn is_the_same_in_containers(path: &str) -> bool {
    let is_below = |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    ["/proc", "/sys"].into_iter().any(is_below) && !NAMESPACED.into_iter().any(is_below)
}

impl Check {
    /// Returns the failure of a probe of this check that a job with this access cannot run; `None` if it can. A built-in
    /// test reports by itself what it lacks.
    pub fn denied(&self, probe: &Probe, given: &[Access]) -> Option<ProbeFailure> {
        let declared = match probe {
            Probe::Exec { .. } | Probe::ExecIfExists { .. } => self.spec.access,
            _ => &[],
        };
        let missing = of_probe(probe).iter().chain(declared).find(|access| !given.contains(access))?;
        let text = format!(
            "this job was not given {} (access `{missing}`): deploy the agent on the node, or give jobs this access",
            missing.label()
        );
        Some(ProbeFailure::new(FailureKind::Denied, text))
    }

    /// Returns the access that the check needs under these parameters, in a fixed order.
    pub fn access(&self, params: &Params) -> Vec<Access> {
        let probes = (self.probes)(params);
        let needs = |access: &Access| {
            self.spec.access.contains(access) || probes.iter().any(|probe| of_probe(probe).contains(access))
        };
        Access::ALL.iter().copied().filter(needs).collect()
    }
}

impl Spec {
    /// Returns where the check normally runs. The agent runs what reads only.
    pub const fn place(&self) -> Place {
        match self.depth {
            Depth::Quick if !self.exclusive => Place::Agent,
            Depth::Quick | Depth::Deep => Place::Job,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Catalogue;
    use doctor_core::{ids::CheckId, policy::Policy};

    fn access_of(id: &str) -> Vec<Access> {
        let catalogue = Catalogue::with_site_checks(&Policy::built_in());
        catalogue.get(&CheckId::new(id).unwrap()).unwrap().access(&Params::new())
    }

    #[test]
    fn a_checks_access_follows_from_what_it_reads() {
        use Access::{Gpu, HostPid, HostRoot, KernelLog, Mounts, Rdma};
        for (id, access) in [
            ("memory", &[][..]),
            ("cpu-online", &[]),
            ("disk-space", &[HostRoot]),
            ("mounts", &[HostRoot]),
            ("net-link", &[HostRoot]),
            ("gpu-count", &[Gpu]),
            ("gpu-xid", &[Gpu, KernelLog]),
            ("gpu-processes", &[Gpu, HostPid]),
            ("fabric-manager", &[HostRoot, HostPid]),
            ("kernel-log", &[KernelLog]),
            ("nvme-health", &[HostRoot]),
            ("dl", &[Gpu]),
            ("dl-long", &[Gpu]),
            ("fabric", &[Rdma]),
            ("collective-loopback", &[Gpu, Rdma]),
            ("storage", &[Mounts]),
        ] {
            assert_eq!(access_of(id), access, "{id}");
        }
    }

    #[test]
    fn a_test_that_starts_a_program_of_ours_declares_what_it_needs() {
        for check in Catalogue::built_in().iter() {
            let starts = |probe: &Probe| {
                matches!(probe, Probe::Exec { .. } | Probe::ExecIfExists { .. } | Probe::Builtin { .. })
            };
            if (check.probes)(&Params::new()).iter().any(starts) {
                assert!(!check.spec.access.is_empty(), "{}", check.spec.id);
            }
        }
    }

    #[test]
    fn a_probe_without_its_access_is_denied_and_the_text_names_it() {
        let catalogue = Catalogue::built_in();
        let kind = |check: &str, probe: &Probe, given: &[Access]| {
            let check = catalogue.get(&CheckId::new(check).unwrap()).unwrap();
            check.denied(probe, given).map(|failure| failure.kind)
        };
        let check = catalogue.get(&CheckId::new("kernel-log").unwrap()).unwrap();
        let text = check.denied(&Probe::Kmsg, &[Access::Gpu]).unwrap().text;
        assert!(text.contains("kernel-log") && text.contains("agent"), "{text}");
        let denied = Some(FailureKind::Denied);
        assert_eq!(kind("kernel-log", &Probe::Kmsg, &[Access::KernelLog]), None);
        assert_eq!(kind("memory", &Probe::read("/proc/meminfo"), &[]), None);
        assert_eq!(kind("memory", &Probe::read("/proc/1/status"), &[]), denied);
        assert_eq!(kind("memory", &Probe::read("/proc/10/status"), &[]), None, "a prefix is a whole name");
        assert_eq!(kind("memory", &Probe::glob("/dev/nvidia*"), &[]), denied);
        let nvme = (catalogue.get(&CheckId::new("nvme-health").unwrap()).unwrap().probes)(&Params::new());
        assert_eq!(kind("nvme-health", nvme.last().unwrap(), &[]), denied, "a program needs what its check declares");
        let dl = Probe::Builtin { test: "dl".into(), args: Vec::new(), timeout: doctor_core::time::Span::minutes(1) };
        assert_eq!(kind("dl", &dl, &[]), None, "the test finds no GPU by itself");
    }

    #[test]
    fn the_agent_runs_what_reads_and_jobs_run_what_loads() {
        let place = |id: &str| Catalogue::built_in().get(&CheckId::new(id).unwrap()).unwrap().spec.place();
        assert_eq!((place("gpu-count"), place("dl")), (Place::Agent, Place::Job));
    }
}
