//! Registers the Kubernetes backend. Without the client, settings can be read and manifests printed, but no cluster can be
//! opened.

use std::path::Path;

use doctor_backend::{
    BackendError,
    inspection::Inspection,
    registration::{BackendKind, OpenedCluster, ServiceSettings},
};
use doctor_core::{policy::Policy, toml_text::TomlError};

use super::KubernetesConfig;

/// A Kubernetes cluster.
#[derive(Debug)]
pub struct Kubernetes;

impl BackendKind for Kubernetes {
    const NAME: &'static str = "kubernetes";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");

    type Config = KubernetesConfig;

    fn resolve(config: &mut KubernetesConfig, beside: &Path, _service: &ServiceSettings<'_>) {
        for path in [&mut config.kubeconfig, &mut config.template].into_iter().flatten() {
            *path = beside.join(&*path);
        }
    }

    fn files(config: &KubernetesConfig) -> Vec<&Path> {
        config.template.as_deref().into_iter().collect()
    }

    fn verify(config: &KubernetesConfig, _service: &ServiceSettings<'_>) -> Result<(), BackendError> {
        with_client::verify(config)
    }

    fn open(config: &KubernetesConfig, _service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
        with_client::open(config)
    }

    fn inspect(config: &KubernetesConfig, _service: &ServiceSettings<'_>, _policy: &Policy) -> Inspection {
        with_client::inspect(config)
    }

    fn check_file(config: &KubernetesConfig, text: &str) -> Result<(), TomlError> {
        with_client::check_template(text, config)
    }
}

#[cfg(feature = "client")]
mod with_client {
    use std::sync::Arc;

    use doctor_backend::{
        BackendError,
        clock::SystemClock,
        inspection::{AgentPods, Inspection},
        registration::OpenedCluster,
    };

    pub(super) use crate::job_template::check_template;
    use crate::{KubernetesBackend, KubernetesConfig};

    pub(super) fn inspect(config: &KubernetesConfig) -> Inspection {
        let crate::Inspection { findings, nodes, agent_pods } = crate::inspect(config);
        let namespace = config.agents.namespace.as_ref().unwrap_or(&config.namespace);
        let agents = AgentPods {
            nodes,
            running: agent_pods,
            account: config.agents.account.clone(),
            logs: format!("kubectl -n {namespace} logs on such a node"),
            deployment: format!(
                "the DaemonSet's node selector and tolerations, kubectl -n {namespace} get daemonset,pods -o wide"
            ),
        };
        Inspection { items: findings, agents: Some(agents), trial: None }
    }

    pub(super) fn verify(config: &KubernetesConfig) -> Result<(), BackendError> {
        KubernetesBackend::verify(config)
    }

    pub(super) fn open(config: &KubernetesConfig) -> Result<OpenedCluster, BackendError> {
        let backend = KubernetesBackend::open(config.clone())?;
        let token_reviewer = Some((backend.token_reviewer(), config.agents.remember));
        Ok(OpenedCluster { backend: Arc::new(backend), clock: Arc::new(SystemClock), token_reviewer })
    }
}

#[cfg(not(feature = "client"))]
mod with_client {
    use doctor_backend::{
        BackendError, Effect,
        inspection::{Inspection, InspectionItem},
        registration::OpenedCluster,
    };
    use doctor_core::toml_text::TomlError;

    use crate::KubernetesConfig;

    const REMEDY: &str = "build it with `make build`, or with `cargo build --release --features kubernetes`";
    const ABSENT: &str = "this program was built without the Kubernetes client: build it with `make build`, or with \
                          `cargo build --release --features kubernetes`";

    fn absent() -> BackendError {
        let operation = "open the Kubernetes backend";
        BackendError { operation, text: ABSENT.to_owned(), effect: Effect::NotAppliedPermanent }
    }

    pub(super) fn verify(_: &KubernetesConfig) -> Result<(), BackendError> {
        Err(absent())
    }

    pub(super) fn open(_: &KubernetesConfig) -> Result<OpenedCluster, BackendError> {
        Err(absent())
    }

    pub(super) fn inspect(_: &KubernetesConfig) -> Inspection {
        let text = "this program was built without the Kubernetes client";
        vec![InspectionItem::bad("cluster", text, REMEDY)].into()
    }

    #[expect(clippy::unnecessary_wraps, reason = "with the client it can fail")]
    pub(super) const fn check_template(_: &str, _: &KubernetesConfig) -> Result<(), TomlError> {
        Ok(())
    }
}
