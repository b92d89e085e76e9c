//! The types of the dstack server's responses. Pure. Unknown words are kept, and never count as good ones.

use std::borrow::Cow;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use doctor_core::{ids::RunId, node::Declared, time::Timestamp};
use serde::{Deserialize, Deserializer, de};

/// A fleet with its instances, including those that are still being created.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Fleet {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) created_at: String,
    #[serde(default)]
    spec: FleetSpec,
    #[serde(default)]
    pub(super) instances: Vec<Instance>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct FleetSpec {
    #[serde(default)]
    configuration: FleetConfiguration,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct FleetConfiguration {
    ssh_config: Option<SshFleet>,
    nodes: Option<Nodes>,
    idle_duration: Option<i64>,
}

/// The hosts of an SSH fleet, and their login.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SshFleet {
    user: Option<String>,
    port: Option<u16>,
    hosts: Vec<HostEntry>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum HostEntry {
    Host { hostname: String, user: Option<String>, port: Option<u16> },
    Other(de::IgnoredAny),
}

#[derive(Debug, Clone, Deserialize)]
struct Nodes {
    min: Option<usize>,
}

/// What dstack does with idle instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdlePolicy {
    Keep,
    /// Terminates them after this many seconds.
    TerminateAfter(i64),
}

/// For fleets that set none: `DEFAULT_FLEET_TERMINATION_IDLE_TIME` of dstack 0.22.
const DEFAULT_IDLE_SECONDS: i64 = 72 * 60 * 60;

impl Fleet {
    /// Returns whether its instances are hosts of an SSH fleet.
    pub(super) const fn is_ssh(&self) -> bool {
        self.spec.configuration.ssh_config.is_some()
    }

    /// Returns the login user and port of a host, if the fleet sets them.
    pub(super) fn login(&self, host: &str) -> (Option<&str>, Option<u16>) {
        let Some(fleet) = &self.spec.configuration.ssh_config else { return (None, None) };
        let entry = fleet.hosts.iter().find_map(|listed| match listed {
            HostEntry::Host { hostname, user, port } if hostname == host => Some((user.as_deref(), *port)),
            HostEntry::Host { .. } | HostEntry::Other(_) => None,
        });
        let (user, port) = entry.unwrap_or_default();
        (user.or(fleet.user.as_deref()), port.or(fleet.port))
    }

    pub(super) fn idle_policy(&self) -> IdlePolicy {
        let configuration = &self.spec.configuration;
        // A fleet at its minimum size keeps its instances.
        let at_least = configuration.nodes.as_ref().and_then(|nodes| nodes.min);
        let active = self.instances.iter().filter(|instance| instance.status.is_active()).count();
        match configuration.idle_duration.unwrap_or(DEFAULT_IDLE_SECONDS) {
            _ if self.is_ssh() || at_least.is_some_and(|least| active <= least) => IdlePolicy::Keep,
            seconds @ 0.. => IdlePolicy::TerminateAfter(seconds),
            // Disabled.
            _ => IdlePolicy::Keep,
        }
    }
}

/// A machine of a fleet.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Instance {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) instance_num: u32,
    pub(super) hostname: Option<String>,
    pub(super) status: InstanceStatus,
    pub(super) unreachable: Option<bool>,
    /// Absent in servers before 0.19.22.
    pub(super) health_status: Option<Health>,
    pub(super) termination_reason: Option<String>,
    #[serde(deserialize_with = "moment")]
    pub(super) created: Timestamp,
    #[serde(default)]
    pub(super) busy_blocks: u32,
    pub(super) instance_type: Option<InstanceType>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct InstanceType {
    pub(super) name: String,
    pub(super) resources: Resources,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resources {
    pub(super) cpus: u32,
    pub(super) memory_mib: f64,
    pub(super) gpus: Vec<Gpu>,
    pub(super) disk: Disk,
    pub(super) cpu_arch: Option<String>,
}

impl Resources {
    /// Returns what these resources declare. GPUs of other makers than NVIDIA are not counted by any check.
    pub(super) fn declared(&self) -> Option<Declared> {
        let by_nvidia = |gpu: &&Gpu| gpu.vendor.as_deref().is_none_or(|maker| maker.eq_ignore_ascii_case("nvidia"));
        Declared::gpus(u32::try_from(self.gpus.iter().filter(by_nvidia).count()).ok()?)
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Gpu {
    pub(super) name: String,
    pub(super) memory_mib: f64,
    pub(super) vendor: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Disk {
    pub(super) size_mib: f64,
}

/// Declares an enum of the server's words, with a variant for unknown ones. It has no `code`, because only the server writes
/// them.
macro_rules! words {
    ($(#[$doc:meta])* $type:ident { $($variant:ident = $word:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(super) enum $type { $($variant,)* Strange(String) }

        impl $type {
            #[cfg(test)]
            pub(super) const ALL: &[(&str, Self)] = &[$(($word, Self::$variant)),*];

            fn of(word: &str) -> Self {
                match word {
                    $($word => Self::$variant,)*
                    other => Self::Strange(other.to_owned()),
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                std::borrow::Cow::<str>::deserialize(deserializer).map(|word| Self::of(&word))
            }
        }
    };
}

pub(super) use words;

words! {
    /// The status of an instance.
    InstanceStatus {
        Pending = "pending",
        Provisioning = "provisioning",
        Idle = "idle",
        Busy = "busy",
        Terminating = "terminating",
        Terminated = "terminated",
    }
}

impl InstanceStatus {
    const fn is_active(&self) -> bool {
        !matches!(self, Self::Terminating | Self::Terminated)
    }
}

words! {
    /// DCGM's verdict on its GPUs.
    Health {
        Healthy = "healthy",
        Warning = "warning",
        Failure = "failure",
    }
}

/// A page of a log.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct LogPage {
    logs: Vec<LogEvent>,
    pub(super) next_token: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
struct LogEvent {
    message: String,
}

impl LogPage {
    /// Returns the job's output on this page. A message that is not base64 comes from a server that sends plain text.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let plain =
            |event: &LogEvent| STANDARD.decode(&event.message).unwrap_or_else(|_| event.message.clone().into_bytes());
        self.logs.iter().flat_map(plain).collect()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.logs.is_empty()
    }
}

/// An event on the server.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Event {
    message: String,
    #[serde(deserialize_with = "moment")]
    recorded_at: Timestamp,
    #[serde(default)]
    targets: Vec<Target>,
}

#[derive(Debug, Clone, Deserialize)]
struct Target {
    #[serde(rename = "type")]
    kind: String,
}

/// Returns when a job started to run, from its events.
pub(super) fn job_start_time(events: &[Event]) -> Option<Timestamp> {
    let begins = |event: &&Event| event.message.ends_with("-> RUNNING");
    events.iter().filter(begins).map(|event| event.recorded_at).min()
}

/// Returns when a job was last assigned to an instance or left it, from the instance's events.
pub(super) fn last_used(events: &[Event]) -> Option<Timestamp> {
    let of_a_job = |event: &&Event| event.targets.iter().any(|target| target.kind == "job");
    events.iter().filter(of_a_job).map(|event| event.recorded_at).max()
}

/// Recent health checks of an instance.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct HealthChecks {
    health_checks: Vec<HealthCheck>,
}

#[derive(Debug, Clone, Deserialize)]
struct HealthCheck {
    #[serde(default)]
    events: Vec<HealthEvent>,
}

#[derive(Debug, Clone, Deserialize)]
struct HealthEvent {
    message: String,
}

impl HealthChecks {
    /// Returns the messages of the newest check.
    pub(super) fn newest(&self) -> String {
        let events = self.health_checks.first().map_or(&[][..], |check| &check.events);
        events.iter().map(|event| event.message.as_str()).collect::<Vec<_>>().join("; ")
    }
}

/// The token's user.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct CurrentUser {
    pub(super) username: String,
    pub(super) global_role: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct ServerInfo {
    pub(super) server_version: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Project {
    #[serde(default)]
    pub(super) members: Vec<Member>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Member {
    pub(super) user: CurrentUser,
    pub(super) project_role: String,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Secret {
    pub(super) name: String,
}

const PREFIX: &str = "doctor-";

/// Returns the name of the dstack run for a run of ours: a letter first, then letters, digits and dashes, 41 at most.
pub(super) fn run_name(run: RunId) -> String {
    format!("{PREFIX}{run}")
}

/// Returns our run of a dstack run, by its name.
pub(super) fn run_of(name: &str) -> Option<RunId> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

const SECRET_PREFIX: &str = "doctor_";

/// Letters, digits and underscores only: dstack cannot put a secret of another name into an environment.
pub(super) fn secret_name(run: RunId) -> String {
    format!("{SECRET_PREFIX}{run}")
}

pub(super) fn run_of_secret(name: &str) -> Option<RunId> {
    name.strip_prefix(SECRET_PREFIX)?.parse().ok()
}

pub(super) fn moment<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    let text = Cow::<str>::deserialize(deserializer)?;
    text.parse().map_err(de::Error::custom)
}

pub(super) fn perhaps_moment<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
    let text = Option::<Cow<'_, str>>::deserialize(deserializer)?;
    text.map(|text| text.parse().map_err(de::Error::custom)).transpose()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::run_types::{JobStatus, Run, RunStatus};
    use serde_json::{Value, json};

    /// Three hosts of an SSH fleet: one unreachable, one failing, one with a warning.
    pub(crate) const FLEETS: &str = include_str!("fixtures/fleets_list_mixed.json");
    pub(crate) const RUNNING: &str = include_str!("fixtures/run_get_running.json");
    pub(crate) const DONE: &str = include_str!("fixtures/run_get_done.json");
    pub(crate) const FAILED: &str = include_str!("fixtures/run_get_failed.json");
    pub(crate) const STOPPED: &str = include_str!("fixtures/run_get_stopped.json");
    pub(crate) const NO_CAPACITY: &str = include_str!("fixtures/run_get_no_capacity.json");

    pub(crate) fn fleet() -> Fleet {
        serde_json::from_str::<Vec<Fleet>>(FLEETS).unwrap().remove(0)
    }

    /// A healthy, idle and reachable instance.
    pub(crate) fn instance() -> Instance {
        Instance { unreachable: Some(false), health_status: Some(Health::Healthy), ..fleet().instances.remove(0) }
    }

    pub(crate) fn run(text: &str) -> Run {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_recorded_fleet_parses_with_all_its_instances() {
        let fleet = fleet();
        let seen: Vec<_> = fleet
            .instances
            .iter()
            .map(|one| (one.name.as_str(), one.unreachable, one.health_status.clone(), one.hostname.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [
                ("bed-0", Some(false), Some(Health::Warning), Some("10.98.0.1")),
                ("bed-1", Some(false), Some(Health::Failure), Some("10.98.0.2")),
                ("bed-2", Some(true), Some(Health::Healthy), Some("10.98.0.3")),
            ]
        );
        assert!(fleet.is_ssh() && fleet.idle_policy() == IdlePolicy::Keep);
        let resources = &fleet.instances[0].instance_type.as_ref().unwrap().resources;
        assert_eq!((resources.cpus, resources.gpus.len(), resources.gpus[0].name.as_str()), (96, 8, "H100"));
    }

    #[test]
    fn an_instance_declares_its_gpus_of_nvidia() {
        for instance in fleet().instances {
            assert_eq!(instance.instance_type.unwrap().resources.declared(), Declared::gpus(8), "{}", instance.name);
        }
        let declared = |gpus: Value| {
            let resources: Resources = serde_json::from_value(json!({ "cpus": 96, "gpus": gpus })).unwrap();
            resources.declared().and_then(|declared| declared.gpus)
        };
        assert_eq!(declared(json!([])), None);
        assert_eq!(declared(json!([{ "name": "L4" }, { "name": "L4", "vendor": "nvidia" }])), Some(2));
        assert_eq!(declared(json!([{ "name": "MI300X", "vendor": "amd" }])), None);
    }

    #[test]
    fn a_cloud_fleet_terminates_idle_instances_above_its_minimum() {
        let fleet = |configuration: Value| -> Fleet {
            let mut fleet: Value = serde_json::from_str(FLEETS).unwrap();
            fleet[0]["spec"]["configuration"] = configuration;
            serde_json::from_value(fleet[0].clone()).unwrap()
        };
        let terminates = IdlePolicy::TerminateAfter;
        assert_eq!(fleet(json!({ "idle_duration": 600 })).idle_policy(), terminates(600));
        assert_eq!(fleet(json!({})).idle_policy(), terminates(72 * 3600));
        assert_eq!(fleet(json!({ "idle_duration": -1 })).idle_policy(), IdlePolicy::Keep);
        assert_eq!(fleet(json!({ "nodes": { "min": 3, "max": 8 } })).idle_policy(), IdlePolicy::Keep);
        assert_eq!(fleet(json!({ "nodes": { "min": 2, "max": 8 } })).idle_policy(), terminates(72 * 3600));
    }

    #[test]
    fn known_values_round_trip_and_unknown_ones_keep_their_text() {
        fn read<T: for<'de> Deserialize<'de>>(word: &str) -> T {
            serde_json::from_value(json!(word)).unwrap()
        }
        InstanceStatus::ALL.iter().for_each(|(word, known)| assert_eq!(read::<InstanceStatus>(word), *known));
        Health::ALL.iter().for_each(|(word, known)| assert_eq!(read::<Health>(word), *known));
        JobStatus::ALL.iter().for_each(|(word, known)| assert_eq!(read::<JobStatus>(word), *known));
        RunStatus::ALL.iter().for_each(|(word, known)| assert_eq!(read::<RunStatus>(word), *known));
        assert_eq!(read::<InstanceStatus>("draining"), InstanceStatus::Strange("draining".to_owned()));
    }

    #[test]
    fn runs_logs_events_and_health_checks_parse() {
        let running = run(RUNNING);
        let newest = running.latest_submission().unwrap();
        assert_eq!((running.description().as_str(), &newest.status), ("run val3 of admin", &JobStatus::Running));
        let hostname = newest.job_provisioning_data.as_ref().and_then(|data| data.hostname.as_deref());
        assert_eq!(hostname, Some("10.98.0.1"));
        let log: LogPage = serde_json::from_str(include_str!("fixtures/logs_poll.json")).unwrap();
        assert!(String::from_utf8(log.bytes()).unwrap().ends_with("tick 1\ntick 2\n"));
        assert_eq!(log.next_token.as_deref(), Some("3"));
        let checks: HealthChecks = serde_json::from_str(include_str!("fixtures/instance_health_checks.json")).unwrap();
        assert_eq!(checks.newest(), "GPU 5 has a volatile DBE; PCIe replay rate above threshold");
        // Written by hand from the server's source.
        let events: Vec<Event> = serde_json::from_value(json!([
            { "message": "Job unassigned from instance.", "recorded_at": "2026-11-15T01:30:00Z",
              "targets": [{ "type": "job" }, { "type": "instance" }] },
            { "message": "Instance became unreachable", "recorded_at": "2026-11-15T01:40:00Z",
              "targets": [{ "type": "instance" }] },
            { "message": "Job status changed PULLING -> RUNNING", "recorded_at": "2026-11-15T01:20:00Z",
              "targets": [{ "type": "job" }] },
        ]))
        .unwrap();
        assert_eq!(job_start_time(&events), Some("2026-11-15T01:20:00Z".parse().unwrap()));
        assert_eq!(last_used(&events), Some("2026-11-15T01:30:00Z".parse().unwrap()));
    }

    #[test]
    fn run_and_secret_names_are_recognised_and_valid() {
        let run = RunId::from_number(u64::MAX >> 1);
        assert_eq!((run_of(&run_name(run)), run_of_secret(&secret_name(run))), (Some(run), Some(run)));
        assert!(run_name(run).len() <= 41 && !secret_name(run).contains('-'));
        assert_eq!(run_of("doctor-who"), None);
    }
}
