//! SSH access to an instance on which dstack starts nothing, because it reports the GPUs as failing or does not reach it.
//!
//! Such an instance is queried over SSH, and requalification runs of a case start there as on a fleet without a scheduler. It
//! does not count as free: the query only determines whether it is in use, and the planner sends only what a case needs.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use doctor_backend::{BackendError, ssh::Host};
use doctor_backend_ssh::SshBackend;
use doctor_core::{
    ids::{NodeName, RunId},
    node::Occupancy,
};
use doctor_host::occupancy::{blocked_reason, occupancy};

use super::{
    api_types::{Fleet, Health, Instance, InstanceStatus},
    config::{SshFallbackConfig, is_word},
};

/// The most queries about single instances per snapshot; the others follow in the next.
pub(super) const MAX_QUERIES: usize = 32;

#[derive(Debug)]
pub(super) struct SshFallback {
    pub(super) ssh: SshBackend,
    settings: SshFallbackConfig,
    /// Whether the hosts were ever set.
    pub(super) hosts_set: AtomicBool,
}

/// What an SSH query found on an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SshState {
    /// Whether a run may start there, or who uses it.
    pub(super) usage: Usage,
    /// Our runs there.
    pub(super) runs: Vec<RunId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Usage {
    Unused,
    By(String),
    /// Unknown, or a site's lock keeps us off.
    Unknown,
}

impl SshFallback {
    pub(super) fn open(settings: &SshFallbackConfig, policy: Option<&Path>) -> Result<Self, BackendError> {
        let ssh = SshBackend::open(settings.to_ssh_config(), policy)?;
        ssh.set_hosts(Vec::new());
        Ok(Self { ssh, settings: settings.clone(), hosts_set: AtomicBool::new(false) })
    }

    /// Sets the hosts to all instances: a run stays where it started, even if dstack uses the instance again.
    pub(super) fn set_hosts(&self, fleets: &[Fleet]) {
        let all = fleets.iter().flat_map(|fleet| fleet.instances.iter().map(move |instance| (fleet, instance)));
        self.ssh.set_hosts(all.filter_map(|(fleet, instance)| self.host(fleet, instance)).collect());
        self.hosts_set.store(true, Ordering::Relaxed);
    }

    /// Returns `None` if dstack reports no address, or one that is unsafe as an argument of `ssh`.
    fn host(&self, fleet: &Fleet, instance: &Instance) -> Option<Host> {
        let address = instance.hostname.clone().filter(|host| is_word(host))?;
        let (user, port) = fleet.login(&address);
        let settings = &self.settings;
        Some(Host {
            name: NodeName::new(&instance.name).ok()?,
            user: settings.user.clone().or_else(|| user.map(str::to_owned)).filter(|user| is_word(user)),
            port: settings.port.or(port),
            address: Some(address),
            jump: settings.jump.clone(),
            key: settings.key.clone(),
        })
    }

    /// Queries the instances on which dstack starts nothing, and returns the results by name.
    pub(super) fn query(&self, fleets: &[Fleet]) -> BTreeMap<String, SshState> {
        self.set_hosts(fleets);
        let all = fleets.iter().flat_map(|fleet| fleet.instances.iter().map(move |instance| (fleet, instance)));
        let hosts: Vec<Host> = all
            .filter(|(_, instance)| is_skipped_by_dstack(instance))
            .filter_map(|(fleet, instance)| self.host(fleet, instance))
            .take(MAX_QUERIES)
            .collect();
        let most = self.settings.max_load_per_core;
        let states = self.ssh.query_hosts(&hosts).into_iter().filter_map(|(host, status)| {
            // Failing to reach it from here as well is not news.
            let status =
                status.inspect_err(|why| tracing::debug!(node = %host.name, %why, "not reached over SSH")).ok()?;
            let used = match (blocked_reason(&status, most), occupancy(&status, most)) {
                (None, _) => Usage::Unused,
                (Some(_), Occupancy::Busy { by }) => Usage::By(by.to_string()),
                (Some(_), Occupancy::Free | Occupancy::Unknown { .. }) => Usage::Unknown,
            };
            Some((host.name.to_string(), SshState { usage: used, runs: status.active_runs }))
        });
        states.collect()
    }
}

/// Returns whether dstack starts nothing on it although it exists.
pub(super) fn is_skipped_by_dstack(instance: &Instance) -> bool {
    let is_up = matches!(instance.status, InstanceStatus::Idle | InstanceStatus::Busy);
    is_up && (instance.unreachable == Some(true) || instance.health_status == Some(Health::Failure))
}

/// Returns whether dstack reports that no run has any part of it.
pub(super) fn is_unused(instance: &Instance) -> bool {
    instance.status == InstanceStatus::Idle && instance.busy_blocks == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_types::tests::{fleet, instance};

    #[test]
    fn only_instances_that_dstack_skips_are_queried_over_ssh() {
        let with = |change: &dyn Fn(&mut Instance)| {
            let mut instance = instance();
            change(&mut instance);
            (is_skipped_by_dstack(&instance), is_unused(&instance))
        };
        assert_eq!(with(&|_| {}), (false, true));
        assert_eq!(with(&|one| one.health_status = Some(Health::Warning)), (false, true));
        assert_eq!(with(&|one| one.health_status = Some(Health::Failure)), (true, true));
        assert_eq!(with(&|one| one.unreachable = Some(true)), (true, true));
        let failing = |status: InstanceStatus, blocks| {
            with(&|one| {
                one.health_status = Some(Health::Failure);
                one.status = status.clone();
                one.busy_blocks = blocks;
            })
        };
        assert_eq!(failing(InstanceStatus::Busy, 0), (true, false));
        assert_eq!(failing(InstanceStatus::Idle, 1), (true, false));
        assert_eq!(failing(InstanceStatus::Terminating, 0), (false, false));
    }

    #[test]
    fn connection_settings_come_from_the_site_then_from_the_fleet() {
        let folder = tempfile::tempdir().unwrap();
        let fallback = |settings: SshFallbackConfig| SshFallback {
            ssh: SshBackend::open(
                doctor_backend::ssh::SshConfig {
                    doctor_node: Some("/bin/true".into()),
                    state: folder.path().join("s"),
                    ..settings.to_ssh_config()
                },
                None,
            )
            .unwrap(),
            settings,
            hosts_set: AtomicBool::new(false),
        };
        let (fleet, mut instance) = (fleet(), instance());
        let from_fleet = fallback(SshFallbackConfig::default()).host(&fleet, &instance).unwrap();
        assert_eq!((from_fleet.name.as_str(), from_fleet.address.as_deref()), ("bed-0", instance.hostname.as_deref()));
        assert_eq!((from_fleet.user.as_deref(), from_fleet.jump), (Some("root"), None), "as the captured fleet has it");
        let configured = SshFallbackConfig {
            user: Some("ubuntu".to_owned()),
            jump: Some("gate".to_owned()),
            ..SshFallbackConfig::default()
        };
        let configured = fallback(configured).host(&fleet, &instance).unwrap();
        assert_eq!((configured.user.as_deref(), configured.jump.as_deref()), (Some("ubuntu"), Some("gate")));
        for bad in [None, Some("-oProxyCommand=x"), Some("a b"), Some("")] {
            instance.hostname = bad.map(str::to_owned);
            assert_eq!(fallback(SshFallbackConfig::default()).host(&fleet, &instance), None, "{bad:?}");
        }
    }
}
