//! Selects the hosts that can take part in an all-reduce, and runs it over a subset of them.

use std::time::Duration;

use doctor_backend::ssh::{CommandStatus, Host, RemoteCommand, RootAccess, run_on_each, shell_quote};
use doctor_core::{finding::Verdict, hostlist, ids::NodeName};
use doctor_fleet::{
    nccl::{self, AZURE_TOPOLOGY, NcclTrialResult},
    ranks::{self, Rank},
};
use serde::Serialize;

use super::{Args, Launcher};
use crate::{
    commands::fleet::{Fleet, failure_text, progress::Progress},
    failure::{Failure, Result},
    output::{plural, sanitize},
};

/// A host that can take part.
pub(super) struct ReadyHost {
    pub(super) host: Host,
    address: String,
    gpus: u32,
    azure: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct SkippedHost {
    pub(super) host: NodeName,
    pub(super) why: String,
}

const INSPECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Inspects the hosts. Returns those that can take part, and the reasons why others cannot.
pub(super) fn inspect_hosts(
    fleet: &Fleet,
    hosts: &[Host],
    args: &Args,
    launcher: Launcher,
) -> (Vec<ReadyHost>, Vec<SkippedHost>) {
    let (program, topology) = (shell_quote(&args.program), AZURE_TOPOLOGY);
    let script = format!(
        "echo \"address $SSH_CONNECTION\"; echo \"gpus $(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)\"; \
         [ -e {topology} ] && echo azure; [ -x {program} ] && echo program; true"
    );
    let command =
        RemoteCommand { script: &script, input: b"", limit: INSPECT_TIMEOUT, max_output: 4096, root: RootAccess::No };
    let progress = Progress::new("checked", hosts.len());
    // --print must not write anything on the hosts.
    let check_usage = !args.even_in_use && !args.print;
    let probe = |host: &Host| {
        let result = fleet.run(host, &command);
        let in_use = (check_usage && result.status == CommandStatus::Exited(0))
            .then(|| fleet.client.busy_reason(host))
            .flatten();
        (result, in_use)
    };
    let results = run_on_each(hosts, fleet.config.parallel, probe, |done| progress.show(done));
    let (mut ready, mut left_out) = (Vec::new(), Vec::new());
    for (host, (result, in_use)) in hosts.iter().zip(results) {
        let stdout = String::from_utf8_lossy(&result.stdout);
        let has = |word: &str| stdout.lines().any(|line| line == word);
        let value_of = |name: &str| stdout.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
        let gpus = value_of("gpus ").parse().unwrap_or(0);
        let why = match &result.status {
            CommandStatus::Exited(0) if launcher == Launcher::Mpirun && !has("program") => {
                Some(format!("no {} (--program)", args.program))
            }
            CommandStatus::Exited(0) if launcher == Launcher::Mpirun && gpus == 0 && args.gpus.is_none() => {
                Some("no GPU".to_owned())
            }
            how => failure_text(how).or_else(|| in_use.map(|by| format!("not free: {by} (--even-in-use)"))),
        };
        let address = value_of("address ").split_ascii_whitespace().nth(2).unwrap_or(host.name.as_str()).to_owned();
        match why {
            None => ready.push(ReadyHost { host: host.clone(), address, gpus, azure: has("azure") }),
            Some(why) => left_out.push(SkippedHost { host: host.name.clone(), why: sanitize(&why) }),
        }
    }
    (ready, left_out)
}

/// How an all-reduce is run.
pub(super) enum AllReduceJob<'a> {
    Mpirun(nccl::Settings),
    Ranks { fleet: &'a Fleet, ready: Vec<&'a ReadyHost>, settings: ranks::Settings },
}

impl<'a> AllReduceJob<'a> {
    pub(super) fn new(
        fleet: &'a Fleet,
        args: &Args,
        launcher: Launcher,
        ready: &'a [ReadyHost],
        good: &'a [ReadyHost],
    ) -> Result<Self> {
        let all: Vec<&ReadyHost> = ready.iter().chain(good).collect();
        let limit = args.deadline.to_std();
        if launcher == Launcher::DoctorNode {
            let settings = ranks::Settings { set: args.set.clone(), environment: args.env.clone(), limit };
            return Ok(Self::Ranks { fleet, ready: all, settings });
        }
        if !args.set.is_empty() {
            return Err(Failure::Usage(
                "--set is for --launcher doctor-node; mpirun has --env and --mpi-arg".to_owned(),
            ));
        }
        let gpus = args.gpus.unwrap_or(all[0].gpus);
        if let Some(other) = all.iter().find(|ready| args.gpus.is_none() && ready.gpus != gpus) {
            let (one, other) = (all[0], *other);
            return Err(Failure::Usage(format!(
                "{} has {} and {} has {}; name those of one kind with --hosts, or the number with --gpus",
                one.host.name,
                plural(one.gpus as usize, "GPU"),
                other.host.name,
                plural(other.gpus as usize, "GPU")
            )));
        }
        let azure = all.iter().all(|ready| ready.azure);
        Ok(Self::Mpirun(nccl::Settings {
            mpirun: args.mpirun.clone(),
            program: args.program.clone(),
            gpus,
            min_size: args.least.clone(),
            max_size: args.most.clone(),
            cycles: args.cycles,
            environment: nccl::environment(azure, &args.env),
            extra_args: args.mpi_arg.clone(),
            launch_agent: nccl::ssh_agent_command(&fleet.config),
            limit,
            as_root: nccl::is_root(),
        }))
    }

    /// Returns the command line for display.
    pub(super) fn command_line(&self, hosts: &[NodeName]) -> String {
        match self {
            Self::Mpirun(settings) => {
                let args = nccl::mpirun_args(settings, hosts);
                let args = std::iter::once(settings.mpirun.as_os_str()).chain(args.iter().map(|arg| arg.as_os_str()));
                let plain = |c: char| c.is_ascii_alphanumeric() || "-_=/.,:".contains(c);
                let rendered = args.map(|arg| {
                    let arg = arg.to_string_lossy();
                    if arg.chars().all(plain) && !arg.is_empty() { arg.into_owned() } else { shell_quote(&arg) }
                });
                rendered.collect::<Vec<_>>().join(" ") + "\n"
            }
            Self::Ranks { .. } => {
                format!("doctor-node test collective --set mode=nodes on each of {}\n", hostlist::fold(hosts))
            }
        }
    }

    pub(super) fn run(&self, hosts: &[NodeName], limit: Option<f64>) -> NcclTrialResult {
        match self {
            Self::Mpirun(settings) => nccl::run(settings, hosts, limit),
            Self::Ranks { fleet, ready, settings } => {
                let mut ranks = Vec::new();
                for name in hosts {
                    let Some(ready) = ready.iter().find(|ready| ready.host.name == *name) else { continue };
                    match fleet.client.install_program(&ready.host) {
                        Ok(program) => {
                            ranks.push(Rank { host: ready.host.clone(), address: ready.address.clone(), program });
                        }
                        Err(why) => return NcclTrialResult::new(Verdict::Inconclusive, format!("{name}: {why}")),
                    }
                }
                ranks::run(&fleet.client, &ranks, settings, limit).unwrap_or_else(|error| {
                    NcclTrialResult::new(Verdict::Inconclusive, format!("reading random bytes: {error}"))
                })
            }
        }
    }
}
