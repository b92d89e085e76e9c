//! Creates, lists and cancels runs, as Kubernetes Jobs or Volcano jobs.

use doctor_backend::{BackendError, Effect, JobRequest};
use doctor_core::{ids::JobId, node::MarkKind};
use kube::{Api, ResourceExt, api::DynamicObject, core::ApiResource};

use super::{
    KubernetesBackend, RunAs,
    cluster::{KubeRequestError, LIST_TIMEOUT},
    evict_and_repair::post_params,
    job, multi_node, names,
    objects::{JobObject, Quantities, job_resource, secret_resource, service_resource},
    occupancy::{is_gpu, parse_whole},
    taints::NodeMarks,
    volcano::{self, VolcanoJob},
};

impl KubernetesBackend {
    /// Returns the GPU resources that each pod of a run requests, all that a node has, and whether we cordoned all of its nodes.
    pub(super) fn gpus_for(&self, request: &JobRequest) -> Result<(Quantities, bool), BackendError> {
        let operation = "submit";
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NotAppliedPermanent };
        let again = |text: String| BackendError { operation, text, effect: Effect::NotAppliedRetry };
        if request.nodes.len() > 1 && self.config.run_as != RunAs::Job {
            return Err(refuse("multi-node runs need `run_as = \"job\"`".to_owned()));
        }
        let (mut gpus, mut cordoned_by_us) = (None, true);
        for name in request.nodes.iter() {
            let found =
                self.watch_cache.read(LIST_TIMEOUT, |nodes, _| nodes.get(name.as_str()).cloned()).map_err(again)?;
            let node = found.ok_or_else(|| refuse(format!("there is no node {name} with GPUs in this cluster")))?;
            let allocatable = node.status.iter().flat_map(|status| status.allocatable.iter());
            let node_gpus: Quantities = allocatable
                .filter(|(name, amount)| is_gpu(name, &self.config) && parse_whole(amount) != Some(0))
                .collect();
            if node_gpus.is_empty() {
                return Err(again(format!("no GPU of {name} is allocatable now")));
            }
            cordoned_by_us &= NodeMarks::from_node(&node, &self.config).marks.has_ours(MarkKind::Cordon);
            match &gpus {
                Some(first) if *first != node_gpus => {
                    return Err(refuse(format!("the GPUs of {name} differ from those of {}", request.nodes.first())));
                }
                _ => gpus = Some(node_gpus),
            }
        }
        Ok((gpus.unwrap_or_default(), cordoned_by_us))
    }

    /// Creates an object that a job needs. One from an earlier attempt is accepted. While an object is missing, the job waits
    /// until it is submitted again or cancelled.
    pub(super) fn create_object(&self, kind: &ApiResource, what: serde_json::Value) -> Result<(), BackendError> {
        let operation = "submit";
        let object: DynamicObject = serde_json::from_value(what).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NotAppliedPermanent,
        })?;
        let api: Api<DynamicObject> = self.jobs(kind);
        match self.request(operation, api.create(&post_params(), &object)) {
            Ok(_) | Err(KubeRequestError { already_exists: true, .. }) => Ok(()),
            Err(KubeRequestError { error, .. }) => Err(BackendError { effect: Effect::Unknown, ..error }),
        }
    }

    pub(super) fn run_resource(&self) -> ApiResource {
        match self.config.run_as {
            RunAs::Job => job_resource(),
            RunAs::Volcano(_) => volcano::job_resource(),
        }
    }

    /// Creates the job of a run. Idempotent: returns the same job when repeated.
    pub(super) fn create_run(&self, request: &JobRequest) -> Result<JobId, BackendError> {
        let operation = "submit";
        let (gpus, cordoned_by_us) = self.gpus_for(request)?;
        let template = self.templates.current(&self.config);
        let manifest = job::manifest(request, &gpus, cordoned_by_us, &template, &self.config);
        let object: DynamicObject = serde_json::from_value(manifest).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NotAppliedPermanent,
        })?;
        let api: Api<DynamicObject> = self.jobs(&self.run_resource());
        let job = match self.request(operation, api.create(&post_params(), &object)) {
            Ok(job) => job,
            // It exists from an earlier attempt.
            Err(failed) if failed.already_exists => {
                let there = self.request(operation, api.get(&names::object_name(request.run)));
                there.map_err(|failed| BackendError { effect: Effect::Unknown, ..failed.error })?
            }
            Err(failed) => return Err(failed.into()),
        };
        let uid = job.uid().unwrap_or_default();
        if request.nodes.len() > 1 {
            self.create_object(&service_resource(), multi_node::headless_service(request, &uid, &self.config))?;
        }
        self.create_object(&secret_resource(), job::secret(request, &uid, &self.config))?;
        Ok(names::job_id(&self.config, request.run))
    }

    pub(super) fn list_runs(&self) -> Result<Vec<JobObject>, BackendError> {
        match self.config.run_as {
            RunAs::Job => self.list("poll", &job_resource()),
            RunAs::Volcano(_) => {
                let jobs: Vec<VolcanoJob> = self.list("poll", &volcano::job_resource())?;
                Ok(jobs.into_iter().map(volcano::to_job).collect())
            }
        }
    }

    /// Has Volcano end its job. A command that exists already is one that Volcano has not processed yet.
    pub(super) fn terminate_in_volcano(&self, job: &DynamicObject) -> Result<(), BackendError> {
        let operation = "cancel";
        if self.config.run_as == RunAs::Job {
            return Ok(());
        }
        let command =
            volcano::terminate_command(&job.name_any(), &self.config.namespace, &job.uid().unwrap_or_default());
        let command = serde_json::from_value(command).map_err(|error| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NotAppliedPermanent,
        })?;
        let commands: Api<DynamicObject> = self.jobs(&volcano::command_resource());
        match self.request(operation, commands.create(&post_params(), &command)) {
            Ok(_) | Err(KubeRequestError { already_exists: true, .. }) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }
}
