//! `doctor deploy slurm`: prints the files of a Slurm cluster, or writes them into a directory for distribution.

use std::{
    fs,
    path::{Path, PathBuf},
};

use doctor_store::StoreUrl;

use serde_json::json;

use crate::{
    agent_certificate::EndpointCertificate,
    config::{ConfigSource, LoadedConfig},
    context::Context,
    deploy::{
        files::{DeployFile, check_path, check_user, render, write_files},
        slurm::{AgentTrust, SlurmPart, SlurmSite},
    },
    exit::Exit,
    failure::{Failure, Result},
};

/// Print slurm.conf lines, hook scripts, settings and systemd units, each with the machines it is for.
///
/// The site's policy and the URL of the agent endpoint come from the configuration. Nothing is changed;
/// docs/guide/slurm-hooks.md gives the order of the rollout.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Print only this part.
    #[arg(long, value_name = "PART", default_value = "all")]
    what: SlurmPart,
    /// No controller: the hooks drain their nodes themselves, within the limits of the policy's breaker.
    #[arg(long)]
    standalone: bool,
    /// Let the prolog keep jobs from a node with an isolating finding, while the breaker permits.
    #[arg(long)]
    block: bool,
    /// Nodes get their slurm.conf from slurmctld.
    #[arg(long)]
    configless: bool,
    /// Directory of the scripts on every node, on a local disk.
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/cluster-doctor/slurm")]
    scripts: PathBuf,
    /// Path of doctor-node on the nodes.
    #[arg(long, value_name = "FILE", default_value = "/usr/bin/doctor-node")]
    doctor_node: PathBuf,
    /// User that the controller runs as: root, Slurm's SlurmUser, or with accounting an operator.
    #[arg(long, value_name = "USER", default_value = "root", conflicts_with = "standalone")]
    user: String,
    /// Write the files below this new directory, in one directory per kind of machine.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  doctor deploy slurm --what slurm-conf              # to add to slurm.conf
  doctor deploy slurm --standalone --out site             # no controller; then copy site/nodes to every node
  doctor deploy slurm --block --configless --user slurm --out site";

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    check_path(&args.scripts)?;
    check_path(&args.doctor_node)?;
    check_user(&args.user)?;
    let files = site(context.loaded()?, args)?.files(args.what);
    match &args.out {
        Some(folder) => write_out(context, folder, &files)?,
        None if context.out.is_json() => context.out.json(&json!({ "files": files }))?,
        None => context.out.print(&render(&files))?,
    }
    Ok(Exit::Ok)
}

fn site(loaded: &LoadedConfig, args: &Args) -> Result<SlurmSite> {
    let config = &loaded.config;
    let read = |path: &PathBuf| {
        fs::read_to_string(path).map_err(|source| Failure::File { operation: "reading", path: path.clone(), source })
    };
    let trust = match EndpointCertificate::of(config) {
        Some(EndpointCertificate::SelfMade) => AgentTrust::Pinned,
        Some(EndpointCertificate::Site(_)) => AgentTrust::Authority,
        None if config.agents.is_unencrypted() => AgentTrust::Plain,
        None if config.agents.listen.is_some() => AgentTrust::Loopback,
        // The endpoint is not configured here yet: it will be as shipped.
        None => AgentTrust::Pinned,
    };
    let mut writes = vec![config.data.clone()];
    if let StoreUrl::Sqlite(path) = &config.store {
        writes.extend(path.parent().map(Path::to_owned));
    }
    // Relative paths refer to the operator's directory, not to that of the service.
    writes.retain(|path| path.is_absolute());
    let config_path = match &loaded.source {
        ConfigSource::File(path) if path.is_absolute() => path.clone(),
        ConfigSource::File(_) | ConfigSource::BuiltIn { .. } => "/etc/cluster-doctor/doctor.toml".into(),
    };
    Ok(SlurmSite {
        standalone: args.standalone,
        block_jobs: args.block,
        configless: args.configless,
        script_dir: args.scripts.clone(),
        doctor_node: args.doctor_node.clone(),
        check_interval: loaded.settings.policy.agents.check_every,
        policy: config.policy.as_ref().map(read).transpose()?,
        url: config.agents.url.clone().or_else(|| config.agents.listen_url()),
        trust,
        user: args.user.clone(),
        config: config_path,
        writable_paths: writes,
    })
}

fn write_out(context: &Context, folder: &Path, files: &[DeployFile]) -> Result<()> {
    let written = write_files(folder, files)?;
    let paths: Vec<&PathBuf> = written.iter().map(|(path, _)| path).collect();
    Ok(context.out.show(&json!({ "written": paths }), |page| {
        for (path, on) in &written {
            page.line(format!("{}: {}", on.label(), path.display()));
        }
        page.line("slurm.conf holds lines to add to yours. Order of the rollout: docs/guide/slurm-hooks.md.");
    })?)
}
