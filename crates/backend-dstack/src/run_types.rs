//! The types of the server's responses about runs: their owners, requests and states. Pure.

use doctor_core::time::Timestamp;
use serde::{Deserialize, de};

use super::api_types::{moment, perhaps_moment, words};

words! {
    /// The status of a job.
    JobStatus {
        Submitted = "submitted",
        Provisioning = "provisioning",
        Pulling = "pulling",
        Running = "running",
        Terminating = "terminating",
        Terminated = "terminated",
        Aborted = "aborted",
        Failed = "failed",
        Done = "done",
    }
}

impl JobStatus {
    pub(super) const fn is_finished(&self) -> bool {
        matches!(self, Self::Terminated | Self::Aborted | Self::Failed | Self::Done)
    }

    /// It has ended or is terminating.
    pub(super) const fn is_terminating(&self) -> bool {
        matches!(self, Self::Terminating) || self.is_finished()
    }
}

words! {
    /// The status of a run.
    RunStatus {
        Pending = "pending",
        Submitted = "submitted",
        Provisioning = "provisioning",
        Running = "running",
        Terminating = "terminating",
        Terminated = "terminated",
        Failed = "failed",
        Done = "done",
    }
}

impl RunStatus {
    /// No stop was requested.
    pub(super) const fn is_active(&self) -> bool {
        matches!(self, Self::Pending | Self::Submitted | Self::Provisioning | Self::Running)
    }
}

/// A run of any user.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Run {
    pub(super) id: String,
    pub(super) user: String,
    pub(super) status: RunStatus,
    pub(super) submitted_at: String,
    pub(super) next_triggered_at: Option<String>,
    pub(super) run_spec: RunSpec,
    #[serde(default)]
    pub(super) jobs: Vec<Job>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct RunSpec {
    pub(super) run_name: Option<String>,
    pub(super) configuration: RunConfiguration,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct RunConfiguration {
    pub(super) fleets: Option<Vec<FleetRef>>,
    pub(super) instances: Option<Vec<Selector>>,
}

/// `fleet` or `{"project": …, "name": "fleet"}`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum FleetRef {
    Name(String),
    Entity { name: String },
}

impl FleetRef {
    pub(super) fn name(&self) -> &str {
        match self {
            // A fleet of another project is written `project/fleet`.
            Self::Name(name) => name.rsplit('/').next().unwrap_or(name),
            Self::Entity { name } => name,
        }
    }
}

/// A selector of instances that a run may have.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Selector {
    Plain(String),
    Name { name: String },
    Hostname { hostname: String },
    Number { fleet: FleetRef, instance: u32 },
    Other(de::IgnoredAny),
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Job {
    pub(super) job_spec: JobSpec,
    #[serde(default)]
    pub(super) job_submissions: Vec<JobSubmission>,
}

impl Job {
    /// Returns the host of the job, while it has one.
    pub(super) fn host(&self) -> Option<&str> {
        let newest = self.job_submissions.last().filter(|newest| !newest.status.is_finished())?;
        newest.job_provisioning_data.as_ref()?.hostname.as_deref()
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct JobSpec {
    pub(super) requirements: Requirements,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Requirements {
    pub(super) resources: ResourceRequest,
}

/// The resources that a job requests; amounts of memory are in GiB.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ResourceRequest {
    pub(super) cpu: Option<CpuRequest>,
    pub(super) memory: Option<Range>,
    pub(super) gpu: Option<GpuRequest>,
    pub(super) disk: Option<DiskRequest>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct CpuRequest {
    pub(super) arch: Option<String>,
    pub(super) count: Option<Range>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct GpuRequest {
    pub(super) vendor: Option<String>,
    pub(super) name: Option<Vec<String>>,
    pub(super) count: Option<Range>,
    pub(super) memory: Option<Range>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct DiskRequest {
    pub(super) size: Option<Range>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Range {
    pub(super) min: Option<f64>,
}

/// One attempt to run a job.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct JobSubmission {
    pub(super) id: String,
    pub(super) status: JobStatus,
    #[serde(deserialize_with = "moment")]
    pub(super) submitted_at: Timestamp,
    #[serde(default, deserialize_with = "perhaps_moment")]
    pub(super) finished_at: Option<Timestamp>,
    /// The server's words for the status: `no capacity`, `exited (127)`.
    pub(super) status_message: Option<String>,
    pub(super) termination_reason: Option<String>,
    /// Details of the reason, such as an error of the registry.
    pub(super) termination_reason_message: Option<String>,
    pub(super) exit_status: Option<i32>,
    pub(super) job_provisioning_data: Option<ProvisioningData>,
}

impl JobSubmission {
    /// Formats how the job ended, or what it waits for, in dstack's words.
    pub(super) fn ending(&self) -> String {
        let parts = [&self.status_message, &self.termination_reason, &self.termination_reason_message];
        let mut parts: Vec<String> = parts.into_iter().flatten().filter(|part| !part.is_empty()).cloned().collect();
        parts.extend(self.exit_status.filter(|code| *code != 0).map(|code| format!("exit code {code}")));
        format!("dstack: {}", if parts.is_empty() { "no reason given".to_owned() } else { parts.join(", ") })
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct ProvisioningData {
    pub(super) hostname: Option<String>,
}

impl Run {
    pub(super) fn name(&self) -> &str {
        self.run_spec.run_name.as_deref().unwrap_or_default()
    }

    /// Returns the newest attempt of its first job, the only job that a run of ours has.
    pub(super) fn latest_submission(&self) -> Option<&JobSubmission> {
        self.jobs.first()?.job_submissions.last()
    }

    /// Describes the run and its owner for messages.
    pub(super) fn description(&self) -> String {
        format!("run {} of {}", self.name(), self.user)
    }
}
