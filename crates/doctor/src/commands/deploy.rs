//! `doctor deploy`: prints the manifests and files that a cluster needs.

mod slurm;
mod systemd;

use clap::Subcommand;
use serde_json::{Value, json};

use crate::{
    context::Context,
    deploy::{DeployPart, deployment_from_config, objects_yaml},
    exit::Exit,
    failure::Result,
};

/// Print the manifests or files of a deployment. Nothing is changed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    target: Target,
}

#[derive(Debug, Subcommand)]
enum Target {
    Kubernetes(KubernetesArgs),
    Slurm(slurm::Args),
    Systemd(systemd::Args),
}

/// Print namespace, permissions, configuration, volumes, controller and agents as YAML for `kubectl apply -f -`.
///
/// The controller in the cluster gets the local configuration ([backend.kubernetes], policy, profiles). The chart in
/// deploy/helm/cluster-doctor creates the same objects with the same settings.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
struct KubernetesArgs {
    /// Print only this part.
    #[arg(long, value_name = "PART", default_value = "all")]
    what: DeployPart,
    /// Image with `doctor-node`, for agents and jobs (images.node).
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// Image with `doctor` (images.controller).
    #[arg(long, value_name = "IMAGE")]
    controller_image: Option<String>,
    /// Namespace of all objects. Default: from the configuration.
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// The namespace exists already.
    #[arg(long)]
    no_namespace: bool,
    /// Run two controllers on PostgreSQL, with the URL in the key `url` of this Secret (store.kind, store.secret).
    #[arg(long, value_name = "SECRET")]
    postgres: Option<String>,
    /// Storage class of the shared volume; every node must be able to mount it (data.storageClass).
    #[arg(long, value_name = "CLASS")]
    storage_class: Option<String>,
    /// Any other chart setting, such as agent.hostNetwork=true; values that are not text are JSON. May be repeated.
    #[arg(long, value_name = "SETTING=VALUE")]
    set: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  doctor deploy kubernetes --what rights | kubectl apply -f -
  doctor deploy kubernetes --what certificate | kubectl create -f -   # once: the certificate for the agents' reports
  doctor deploy kubernetes --image registry.example.com/cluster-doctor-node:0.3.0 \\
      --controller-image registry.example.com/cluster-doctor:0.3.0 --storage-class efs | kubectl apply -f -
  doctor deploy kubernetes --postgres doctor-db --set data.size=1Ti | kubectl diff -f -
  doctor deploy kubernetes --what values > values.yaml   # for helm install --values
  doctor deploy kubernetes --what template > job.yaml     # to change, and name as `template` in [backend.kubernetes]

Every setting: docs/reference/deployment.md";

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.target {
        Target::Kubernetes(args) => kubernetes(context, args),
        Target::Slurm(args) => slurm::run(context, args),
        Target::Systemd(args) => systemd::run(context, args),
    }
}

fn kubernetes(context: &Context, args: &KubernetesArgs) -> Result<Exit> {
    let mut deployment = deployment_from_config(context.config()?)?;
    if let Some(namespace) = &args.namespace {
        deployment.set_namespace(namespace)?;
    }
    // Helm creates the namespace itself.
    if !args.no_namespace && args.what != DeployPart::Values {
        deployment.set("namespace.create", json!(true))?;
    }
    let postgres = args.postgres.as_ref().map(|_| "postgres".to_owned());
    for (name, value) in [
        ("images.node", &args.image),
        ("images.controller", &args.controller_image),
        ("store.kind", &postgres),
        ("store.secret", &args.postgres),
        ("data.storageClass", &args.storage_class),
    ] {
        if let Some(value) = value {
            deployment.set(name, Value::String(value.clone()))?;
        }
    }
    for written in &args.set {
        deployment.set_from_text(written)?;
    }
    if args.what == DeployPart::Certificate {
        let items = deployment.certificate()?;
        match context.out.is_json() {
            true => context.out.json(&json!({ "apiVersion": "v1", "kind": "List", "items": items }))?,
            false => context.out.print(&objects_yaml(items))?,
        }
    } else if context.out.is_json() {
        context.out.json(&deployment.json(args.what))?;
    } else {
        context.out.print(&deployment.yaml(args.what))?;
    }
    Ok(Exit::Ok)
}
