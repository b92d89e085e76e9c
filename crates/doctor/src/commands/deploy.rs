//! `doctor deploy`: prints what a cluster has to have before the service can work there.

use clap::Subcommand;
use doctor_control::backend::kubernetes::{KubernetesConfig, manifests};
use serde_json::json;

use crate::{
    config::BackendChoice,
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Print what to apply to a cluster: nothing is changed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Namespace, account, rights and priority class, for `kubectl apply -f -`. Names are those of the configuration.
    Kubernetes,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match args.what {
        What::Kubernetes => {
            let config = match &context.config()?.backend {
                BackendChoice::Kubernetes(config) => (**config).clone(),
                BackendChoice::Local(_) | BackendChoice::Sim(_) => KubernetesConfig::default(),
            };
            let list = json!({ "apiVersion": "v1", "kind": "List", "items": manifests(&config) });
            let text = serde_json::to_string_pretty(&list).map_err(|error| Failure::Other(error.to_string()))?;
            context.out.print(&format!("{text}\n"))?;
            Ok(Exit::Ok)
        }
    }
}
