//! Creates, lists and cancels runs, as Kubernetes Jobs or Volcano jobs.

use doctor_backend::{BackendError, Effect, JobRequest};
use doctor_core::{ids::JobId, node::MarkKind};
use kube::{Api, ResourceExt, api::DynamicObject, core::ApiResource};

use super::{
    KubernetesBackend, RunAs,
    acts::written_by_us,
    cluster::{Failed, PATIENCE},
    job,
    marks::Standing,
    names,
    objects::{Amounts, JobObject, job_resource, secret_resource, service_resource},
    occupancy::{is_gpu, whole},
    several,
    volcano::{self, VolcanoJob},
};

impl KubernetesBackend {
    /// Returns the GPU resources that each pod of a run requests, all that a node has, and whether we cordoned all of its nodes.
    pub(super) fn taken_by(&self, request: &JobRequest) -> Result<(Amounts, bool), BackendError> {
        let operation = "submit";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NoneGiveUp };
        let again = |text: String| BackendError { operation, text, effect: Effect::NoneTryAgain };
        if request.nodes.len() > 1 && self.config.run_as != RunAs::Job {
            return Err(refuse("multi-node runs need `run_as = \"job\"`".to_owned()));
        }
        let (mut gpus, mut cordoned_by_us) = (None, true);
        for name in request.nodes.iter() {
            let found = self.watched.now(PATIENCE, |nodes, _| nodes.get(name.as_str()).cloned()).map_err(again)?;
            let node = found.ok_or_else(|| refuse(format!("there is no node {name} with GPUs in this cluster")))?;
            let allocatable = node.status.iter().flat_map(|status| status.allocatable.iter());
            let its: Amounts =
                allocatable.filter(|(name, amount)| is_gpu(name, &self.config) && whole(amount) != Some(0)).collect();
            if its.is_empty() {
                return Err(again(format!("no GPU of {name} is allocatable now")));
            }
            cordoned_by_us &= Standing::of(&node, &self.config).marks.has_ours(MarkKind::Cordon);
            match &gpus {
                Some(first) if *first != its => {
                    return Err(refuse(format!("the GPUs of {name} differ from those of {}", request.nodes.first())));
                }
                _ => gpus = Some(its),
            }
        }
        Ok((gpus.unwrap_or_default(), cordoned_by_us))
    }

    /// Creates an object that a job needs. One from an earlier attempt is accepted. While an object is missing, the job waits
    /// until it is submitted again or cancelled.
    pub(super) fn make(&self, kind: &ApiResource, what: serde_json::Value) -> Result<(), BackendError> {
        let operation = "submit";
        let made: DynamicObject = serde_json::from_value(what).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NoneGiveUp,
        })?;
        let api: Api<DynamicObject> = self.jobs(kind);
        match self.ask(operation, api.create(&written_by_us(), &made)) {
            Ok(_) | Err(Failed { exists: true, .. }) => Ok(()),
            Err(Failed { error, .. }) => Err(BackendError { effect: Effect::Unknown, ..error }),
        }
    }

    pub(super) fn kind_of_runs(&self) -> ApiResource {
        match self.config.run_as {
            RunAs::Job => job_resource(),
            RunAs::Volcano(_) => volcano::job_resource(),
        }
    }

    /// Creates the job of a run. Idempotent: returns the same job when repeated.
    pub(super) fn make_run(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        let operation = "submit";
        let (gpus, cordoned_by_us) = self.taken_by(request)?;
        let template = self.templates.now(&self.config);
        let manifest = job::manifest(request, &gpus, cordoned_by_us, &template, &self.config);
        let made: DynamicObject = serde_json::from_value(manifest).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NoneGiveUp,
        })?;
        let api: Api<DynamicObject> = self.jobs(&self.kind_of_runs());
        let job = match self.ask(operation, api.create(&written_by_us(), &made)) {
            Ok(job) => job,
            // It exists from an earlier attempt.
            Err(failed) if failed.exists => {
                let there = self.ask(operation, api.get(&names::object_name(request.run)));
                there.map_err(|failed| BackendError { effect: Effect::Unknown, ..failed.error })?
            }
            Err(failed) => return Err(failed.into()),
        };
        let uid = job.uid().unwrap_or_default();
        if request.nodes.len() > 1 {
            self.make(&service_resource(), several::service(request, &uid, &self.config))?;
        }
        self.make(&secret_resource(), job::secret(request, &uid, &self.config))?;
        Ok(names::job_id(&self.config, request.run))
    }

    pub(super) fn list_runs(&self) -> Result<Vec<JobObject>, BackendError> {
        match self.config.run_as {
            RunAs::Job => self.list("poll", &job_resource()),
            RunAs::Volcano(_) => {
                let told: Vec<VolcanoJob> = self.list("poll", &volcano::job_resource())?;
                Ok(told.into_iter().map(volcano::as_job).collect())
            }
        }
    }

    /// Has Volcano end its job. A command that exists already is one that Volcano has not processed yet.
    pub(super) fn tell_volcano(&self, job: &DynamicObject) -> Result<(), BackendError> {
        let operation = "cancel";
        if self.config.run_as == RunAs::Job {
            return Ok(());
        }
        let command = volcano::end_it(&job.name_any(), &self.config.namespace, &job.uid().unwrap_or_default());
        let command = serde_json::from_value(command).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NoneGiveUp,
        })?;
        let commands: Api<DynamicObject> = self.jobs(&volcano::command_resource());
        match self.ask(operation, commands.create(&written_by_us(), &command)) {
            Ok(_) | Err(Failed { exists: true, .. }) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }
}
