//! `doctor deploy systemd`: prints the units of a small site, or writes them into a directory for distribution.

use std::path::{Path, PathBuf};

use doctor_core::time::Span;
use doctor_store::StoreUrl;
use serde_json::json;

use crate::{
    config::{Config, ConfigSource},
    context::Context,
    deploy::{
        files::{check_path, check_user, render, write_files},
        systemd::{RunMode, SystemdPart, SystemdSite},
    },
    exit::Exit,
    failure::{Failure, Result},
};

/// Print systemd units for a site without Kubernetes: the controller as a service or as a timer that runs single
/// cycles, and the agent on nodes.
///
/// Writable paths, and whether jobs run on this machine, come from the configuration. The units explain their
/// restrictions where the reason is not obvious. Nothing is changed; docs/guide/operations.md describes the
/// installation.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Print only this part.
    #[arg(long, value_name = "PART", default_value = "all")]
    what: SystemdPart,
    /// Use a timer instead of a service: it starts `doctor run` this long after the previous run ended. Agents need the
    /// service.
    #[arg(long, value_name = "LENGTH")]
    timer: Option<Span>,
    /// User that the controller runs as.
    #[arg(long, value_name = "USER", default_value = "root")]
    user: String,
    /// Path of doctor.
    #[arg(long, value_name = "FILE", default_value = "/usr/bin/doctor")]
    doctor: PathBuf,
    /// Path of doctor-node on the nodes.
    #[arg(long, value_name = "FILE", default_value = "/usr/bin/doctor-node")]
    doctor_node: PathBuf,
    /// Write the files below this new directory, in one directory per kind of machine.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  doctor deploy systemd > /etc/systemd/system/doctor.service       # the service alone
  doctor deploy systemd --timer 10m --out site && cp site/controller/etc/systemd/system/* /etc/systemd/system
  doctor deploy systemd --what agent > doctor-node-agent.service   # then to every node";

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    check_path(&args.doctor)?;
    check_path(&args.doctor_node)?;
    check_user(&args.user)?;
    if args.timer.is_some_and(|every| every < Span::from_secs(10)) {
        return Err(Failure::Usage("--timer is too short for a cycle, expected 10s or more".to_owned()));
    }
    let files = site(context.config()?, &context.config_source()?, args)?.files(args.what);
    match &args.out {
        None if context.out.is_json() => context.out.json(&json!({ "files": files }))?,
        None => context.out.print(&render(&files))?,
        Some(folder) => {
            let written = write_files(folder, &files)?;
            let paths: Vec<&PathBuf> = written.iter().map(|(path, _)| path).collect();
            context.out.show(&json!({ "written": paths }), |page| {
                for (path, on) in &written {
                    page.line(format!("{}: {}", on.label(), path.display()));
                }
                let unit = if args.timer.is_some() { "doctor-run.timer" } else { "doctor.service" };
                page.line(format!("Next: copy them, then systemctl daemon-reload && systemctl enable --now {unit}"));
            })?;
        }
    }
    Ok(Exit::Ok)
}

fn site(config: &Config, source: &ConfigSource, args: &Args) -> Result<SystemdSite> {
    let mut writes = vec![config.data.clone()];
    if let StoreUrl::Sqlite(path) = &config.store {
        writes.extend(path.parent().map(Path::to_owned));
    }
    writes.extend(config.backend.writes());
    // Relative paths refer to the operator's directory, not to that of the service.
    writes.retain(|path| path.is_absolute());
    writes.sort();
    writes.dedup();
    writes.iter().try_for_each(|path| check_path(path))?;
    let file = match source {
        ConfigSource::File(path) if path.is_absolute() => path.clone(),
        ConfigSource::File(_) | ConfigSource::BuiltIn { .. } => "/etc/cluster-doctor/doctor.toml".into(),
    };
    check_path(&file)?;
    Ok(SystemdSite {
        run_mode: args.timer.map_or(RunMode::Service, RunMode::Timer),
        user: args.user.clone(),
        config: file,
        writable_paths: writes,
        doctor: args.doctor.clone(),
        doctor_node: args.doctor_node.clone(),
        jobs_run_locally: config.backend.runs_here(),
        agents: config.agents.listen.is_some() && args.timer.is_none(),
    })
}
