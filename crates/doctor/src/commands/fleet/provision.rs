//! `doctor fleet provision`: creates a cluster in Azure from one file, or prints the plan.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use doctor_fleet::{
    azure::{self, Cluster, Files, Inventory, Plan, Progress, Provisioned},
    hostfiles::write_atomically,
};

use serde_json::json;

use super::azure::{AzArgs, cluster, read};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::plural,
};

/// Create a cluster of GPU machines in Azure from one file: network, load balancer, scale set, head node, keys, host
/// files.
///
/// Without --yes nothing is changed: every `az` call is printed as it would be run. Existing resources are kept, so a
/// second run does nothing, and a run after an interruption continues. Afterwards the head node logs in to every node
/// without a prompt, and knows each by the host key that was read through Azure.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Cluster file: TOML, or KEY=value if its name ends in .env.
    #[arg(value_name = "FILE", required_unless_present = "example")]
    cluster: Option<PathBuf>,
    /// Only print the calls; exit code 0.
    #[arg(long, conflicts_with = "yes")]
    plan: bool,
    /// Plan as if nothing existed, without querying Azure.
    #[arg(long, requires = "plan")]
    fresh: bool,
    /// Create the cluster.
    #[arg(long, short)]
    yes: bool,
    /// Exchange keys and rewrite host files even if nothing seems to have changed, as after a machine was reinstalled.
    #[arg(long)]
    again: bool,
    /// Directory of the files for `az` and `ssh`. Default: named after the scale set, beside FILE.
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    /// Print a commented cluster file.
    #[arg(long, conflicts_with_all = ["cluster", "plan", "yes"])]
    example: bool,
    #[command(flatten)]
    az: AzArgs,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet provision --example > cluster.toml
  doctor fleet provision cluster.toml --plan          # every call of az, in its order
  doctor fleet provision cluster.toml --yes
  doctor fleet provision cluster-config.env --plan --fresh";

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let Some(path) = &args.cluster else {
        context.out.print(azure::EXAMPLE)?;
        return Ok(Exit::Ok);
    };
    let cluster = cluster(path)?;
    let default_folder = path.parent().unwrap_or(Path::new("")).join(&cluster.scale_set);
    let files = Files { folder: args.files.clone().unwrap_or(default_folder) };
    let cloud_init = cloud_init(&cluster)?;
    if !cluster.ssh_key.is_file() && !args.fresh {
        let why = "is not a file, expected a public key; `ssh-keygen -t ed25519` creates one";
        return Err(Failure::Usage(format!("`ssh_key`: {} {why}", cluster.ssh_key.display())));
    }
    let az = args.az.az();
    if args.yes {
        let provisioned = azure::provision(&cluster, &az, &files, &cloud_init, args.again, &print_progress)?;
        let written = write_ssh_files(&cluster, &files, &provisioned)?;
        show_result(context, &cluster, &provisioned, &files, written)?;
        return Ok(Exit::Ok);
    }
    let seen = if args.fresh { Inventory::default() } else { azure::read_inventory(&cluster, &az)? };
    let plan = azure::plan(&cluster, &seen, &files)?;
    show_plan(context, &cluster, &plan)?;
    if args.plan || plan.is_done() { Ok(Exit::Ok) } else { Err(Failure::NotConfirmed) }
}

fn cloud_init(cluster: &Cluster) -> Result<String> {
    let Some(path) = &cluster.cloud_init else { return Ok(azure::cloud_init(cluster)) };
    let text = read(path)?;
    match azure::check_cloud_init(&text) {
        Ok(()) => Ok(text),
        Err(azure::CloudInitError::UnknownKey(error)) => Err(Failure::Cluster { path: path.clone(), error }),
        Err(other) => Err(Failure::Usage(format!("{}: {other}", path.display()))),
    }
}

/// Prints progress to standard error; a failure to write it is ignored.
fn print_progress(progress: &Progress<'_>) {
    let mut err = std::io::stderr().lock();
    let _printed = match progress {
        Progress::Begun { step, number, of } => writeln!(err, "[{number}/{of}] {} {}", step.part.label(), step.name),
        Progress::Done { took: elapsed, .. } => writeln!(err, "      done in {} s", elapsed.as_secs()),
        Progress::Waiting { why } => writeln!(err, "waiting: {why}"),
    };
}

fn show_plan(context: &Context, cluster: &Cluster, plan: &Plan) -> Result<()> {
    let steps = plan.steps.iter().map(|step| {
        let calls: Vec<_> = step.calls.iter().map(azure::AzCommand::args).collect();
        json!({ "part": step.part, "name": step.name, "need": step.need, "calls": calls })
    });
    let steps = steps.collect::<Vec<_>>();
    let open = plan.steps.iter().filter(|step| step.need != azure::AzureStepState::Present).count();
    Ok(context.out.show(&json!({ "cluster": cluster.scale_set, "steps": steps, "notes": plan.notes }), |page| {
        let existing = plan.steps.len() - open;
        page.line(format!(
            "# Cluster {} in {} ({}): {} to do, {existing} done already. Nothing was changed.",
            cluster.scale_set,
            cluster.resource_group,
            cluster.location,
            plural(open, "step")
        ));
        for note in &plan.notes {
            page.line(format!("# {note}"));
        }
        for step in &plan.steps {
            page.line(format!("# {} {}: {}", step.part.label(), step.name, step.need));
            let open_calls = if step.need == azure::AzureStepState::Present { &[] } else { &step.calls[..] };
            for call in open_calls {
                page.line(call.to_string());
            }
        }
    })?)
}

/// Writes the files for reaching the cluster from here. Returns whether they were written.
fn write_ssh_files(cluster: &Cluster, files: &Files, provisioned: &Provisioned) -> Result<bool> {
    let (Some(hosts), Some((at, port))) = (&provisioned.hosts, &provisioned.head_at) else { return Ok(false) };
    let folder = std::path::absolute(&files.folder).unwrap_or_else(|_| files.folder.clone());
    let known = folder.join("known_hosts");
    let texts = [
        ("known_hosts", hosts.external_known_hosts(at, *port, provisioned.balancer.as_deref())),
        ("ssh_config", hosts.ssh_config(cluster, at, *port, &known.display().to_string())),
        ("hostfile", hosts.hostfile()),
        ("hostfile-ip", hosts.hostfile_ip()),
    ];
    for (name, text) in texts {
        let path = folder.join(name);
        write_atomically(&path, text.as_bytes()).map_err(|source| Failure::File {
            operation: "writing",
            path,
            source,
        })?;
    }
    Ok(true)
}

fn show_result(
    context: &Context,
    cluster: &Cluster,
    provisioned: &Provisioned,
    files: &Files,
    written: bool,
) -> Result<()> {
    let view = json!({
        "cluster": cluster.scale_set, "done": provisioned.done, "nodes": provisioned.nodes, "head": provisioned.head,
        "head_at": provisioned.head_at.as_ref().map(|(at, port)| json!({ "address": at, "port": port })),
        "balancer": provisioned.balancer, "files": files.folder,
    });
    Ok(context.out.show(&view, |page| {
        match provisioned.done {
            0 => page.line(format!("Cluster {}: all resources exist, nothing was changed.", cluster.scale_set)),
            done => page.line(format!("Cluster {}: {} done, {} ready.", cluster.scale_set, plural(done, "step"), plural(provisioned.nodes, "node"))),
        };
        let folder = files.folder.display();
        if let Some((at, port)) = &provisioned.head_at {
            page.line(format!("Head node {}: ssh -p {port} {}@{at}", provisioned.head, cluster.admin));
        }
        if let Some(balancer) = &provisioned.balancer {
            page.line(format!("Through the load balancer: ssh -p 50000 {}@{balancer}, and one port higher for each further node", cluster.admin));
        }
        if written {
            page.line(format!("With verified host keys: ssh -F {folder}/ssh_config {}", provisioned.head));
            page.line(format!("Next: doctor fleet health, with hostfile = \"{folder}/hostfile\" and ssh_config = \"{folder}/ssh_config\" in [backend.ssh]"));
        } else if provisioned.done == 0 {
            page.line("Next: if this machine does not have the SSH files, --again exchanges keys and writes them.");
        }
    })?)
}
