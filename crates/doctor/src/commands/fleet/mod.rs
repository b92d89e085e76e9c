//! `doctor fleet`: provisions machines without a scheduler, and works on all of them over SSH.

mod azure;
mod cloud_init;
mod destroy;
mod exec;
mod gather;
mod health;
mod hosts;
mod nccl;
mod progress;
mod provision;

use std::{collections::BTreeMap, fs, path::PathBuf};

use clap::Subcommand;
use doctor_backend::ssh::{
    CommandResult, CommandStatus, Host, HostKeys, RemoteCommand, SshClient, SshConfig, parse_hosts, run_on_each,
};
use doctor_core::{
    hostlist::{self, Selector},
    ids::NodeName,
    time::Span,
};

use crate::{
    backends::BackendChoice,
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};
use progress::Progress;

/// Provision a fleet without a scheduler, work on its hosts over SSH, and destroy it.
///
/// The hosts are those of [backend.ssh] in the configuration, of a host file, or of the command line. `ssh HOST true`
/// must succeed for each without a prompt. docs/guide/fleet.md has the steps from new machines to a tested fleet.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Debug, Subcommand)]
enum FleetCommand {
    Provision(provision::Args),
    Destroy(destroy::Args),
    CloudInit(cloud_init::Args),
    Hosts(hosts::Args),
    Exec(exec::Args),
    Gather(gather::Args),
    Health(health::Args),
    Nccl(nccl::Args),
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        FleetCommand::Provision(args) => provision::run(context, args),
        FleetCommand::Destroy(args) => destroy::run(context, args),
        FleetCommand::CloudInit(args) => cloud_init::run(context, args),
        FleetCommand::Hosts(args) => hosts::run(context, args),
        FleetCommand::Exec(args) => exec::run(context, args),
        FleetCommand::Gather(args) => gather::run(context, args),
        FleetCommand::Health(args) => health::run(context, args),
        FleetCommand::Nccl(args) => nccl::run(context, args),
    }
}

/// The options that select hosts and how they are reached.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Hosts")]
struct HostArgs {
    /// Host file, one host or range per line (docs/guide/ssh.md). Default: from [backend.ssh].
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Only these hosts: node[01-08], or a name with `*`. If neither a file nor [backend.ssh] lists hosts, these are
    /// the hosts.
    #[arg(long, value_name = "HOSTS")]
    hosts: Vec<Selector>,
    /// Configuration file for `ssh -F`.
    #[arg(long, value_name = "FILE")]
    ssh_config: Option<PathBuf>,
    /// Number of hosts in parallel [default: 32, or `parallel` of the configuration].
    #[arg(long, value_name = "N")]
    parallel: Option<usize>,
    /// Connection timeout [default: 5s, or `connect` of the configuration].
    #[arg(long, value_name = "TIME")]
    connect: Option<Span>,
    /// Accept and record the key of a host that is seen for the first time. A changed key is rejected.
    #[arg(long)]
    learn_keys: bool,
}

/// The selected hosts and the SSH client.
struct Fleet {
    hosts: Vec<Host>,
    /// Listed hosts that were not selected.
    others: Vec<Host>,
    config: SshConfig,
    client: SshClient,
}

impl HostArgs {
    fn open(&self, context: &Context) -> Result<Fleet> {
        let config = self.config(context)?;
        let listed = self.read_hosts(&config)?;
        let (hosts, others) = self.select(listed)?;
        let client = match &context.config()?.backend {
            BackendChoice::Ssh(_) => SshClient::with_shared_connections(&config),
            _ => SshClient::new(&config),
        };
        Ok(Fleet { hosts, others, config, client })
    }

    fn config(&self, context: &Context) -> Result<SshConfig> {
        let mut config = match &context.config()?.backend {
            BackendChoice::Ssh(config) => (**config).clone(),
            _ => SshConfig::default(),
        };
        if let Some(file) = &self.ssh_config {
            config.ssh_config = Some(file.clone());
        }
        if let Some(parallel) = self.parallel {
            config.parallel = parallel;
        }
        if let Some(connect) = self.connect {
            config.connect = connect;
        }
        if self.learn_keys {
            config.host_keys = HostKeys::Learn;
        }
        if self.hostfile.is_some() {
            (config.hostfile, config.hosts) = (self.hostfile.clone(), None);
        }
        if config.hostfile.is_none() && config.hosts.is_none() {
            let named = self.hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
            if named.is_empty() {
                let text = "no hosts are configured: use --hosts node[01-08] or --hostfile FILE, or set [backend.ssh]";
                return Err(Failure::Usage(text.to_owned()));
            }
            config.hosts = Some(named);
        }
        config.check().map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(config)
    }

    fn read_hosts(&self, config: &SshConfig) -> Result<Vec<Host>> {
        match &self.hostfile {
            // Read here and not by the backend, so that errors name the path given on the command line.
            Some(path) => {
                let failed = |source| Failure::File { operation: "reading the host file", path: path.clone(), source };
                let text = fs::read_to_string(path).map_err(failed)?;
                parse_hosts(&text).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))
            }
            None => config.read_hosts().map_err(|error| Failure::Usage(error.to_string())),
        }
    }

    /// Splits the list into selected and other hosts, in the order of the list.
    fn select(&self, listed: Vec<Host>) -> Result<(Vec<Host>, Vec<Host>)> {
        for selector in &self.hosts {
            let known = || {
                let names: Vec<NodeName> = listed.iter().map(|host| host.name.clone()).collect();
                hostlist::fold(&names)
            };
            let unknown = |name: String| Failure::Unknown { what: "host", name, known: known() };
            match selector {
                Selector::Names(names) => {
                    let missing = names.iter().find(|name| listed.iter().all(|host| host.name != **name));
                    if let Some(name) = missing {
                        return Err(unknown(name.to_string()));
                    }
                }
                Selector::Pattern(_) if !listed.iter().any(|host| selector.matches_name(&host.name)) => {
                    return Err(unknown(selector.to_string()));
                }
                Selector::Pattern(_) => {}
                Selector::Pool(_) | Selector::State(_) => {
                    let text =
                        format!("`{selector}` is for the controller's nodes; use names, such as node[01-08] or gpu-*");
                    return Err(Failure::Usage(text));
                }
            }
        }
        let selected =
            |host: &Host| self.hosts.is_empty() || self.hosts.iter().any(|selector| selector.matches_name(&host.name));
        Ok(listed.into_iter().partition(selected))
    }
}

impl Fleet {
    /// Runs the work on every host and shows the number of finished hosts on a terminal.
    fn for_each_host<T: Send>(&self, what: &'static str, work: impl Fn(&Host) -> T + Sync) -> Vec<T> {
        let progress = Progress::new(what, self.hosts.len());
        run_on_each(&self.hosts, self.config.parallel, work, |done| progress.show(done))
    }

    fn run(&self, host: &Host, order: &RemoteCommand<'_>) -> CommandResult {
        self.client.run(host, order)
    }
}

/// Describes why the command failed on a host; `None` if it exited with 0.
fn failure_text(how: &CommandStatus) -> Option<String> {
    match how {
        CommandStatus::Exited(0) => None,
        CommandStatus::Exited(code) => Some(format!("exited with {code}")),
        CommandStatus::TimedOut { ended: true } => Some("timed out and was terminated".to_owned()),
        CommandStatus::TimedOut { ended: false } => Some("timed out; it may still run there".to_owned()),
        CommandStatus::NotStarted(why) => Some(format!("unreachable: {why}")),
        CommandStatus::ConnectionLost(why) => Some(format!("connection lost: {why}; it may still run there")),
    }
}

/// Groups hosts with the same value under one name: `node[01-14]`. Groups are in the order of their first host.
fn group_by_value<K: Ord>(values: impl IntoIterator<Item = (NodeName, K)>) -> Vec<(String, usize, K)> {
    let mut groups: BTreeMap<K, (usize, Vec<NodeName>)> = BTreeMap::new();
    for (index, (host, key)) in values.into_iter().enumerate() {
        groups.entry(key).or_insert_with(|| (index, Vec::new())).1.push(host);
    }
    let mut groups: Vec<_> = groups.into_iter().map(|(key, (index, hosts))| (index, hosts, key)).collect();
    groups.sort_by_key(|(index, ..)| *index);
    groups.into_iter().map(|(_, hosts, key)| (hostlist::fold(&hosts), hosts.len(), key)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_equal_output_are_grouped_in_order_of_the_first() {
        let name = |text: &str| NodeName::new(text).unwrap();
        let values = [("n3", "b"), ("n1", "a"), ("n2", "a"), ("n4", "b"), ("x", "c")];
        let groups = group_by_value(values.map(|(host, text)| (name(host), text)));
        assert_eq!(groups, [("n[3-4]".to_owned(), 2, "b"), ("n[1-2]".to_owned(), 2, "a"), ("x".to_owned(), 1, "c")]);
    }
}
