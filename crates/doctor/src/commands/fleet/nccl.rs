//! `doctor fleet nccl`: runs an all-reduce over the hosts, and locates the faulty host if it fails.

mod job;

use std::{path::PathBuf, sync::Mutex};

use clap::ValueEnum;
use doctor_backend::ssh::Host;
use doctor_checks::collective_params::Mode;
use doctor_core::{
    fault_localization::FaultLocation,
    finding::Verdict,
    hostlist::{self, Selector},
    ids::{NodeName, Sku},
    time::Span,
};
use doctor_fleet::{localization_trials::search, nccl::NcclTrialResult};
use serde::Serialize;

use self::job::{AllReduceJob, ReadyHost, SkippedHost, inspect_hosts};
use super::{Fleet, HostArgs, progress::Progress};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, sanitize},
};

/// Run an all-reduce over the hosts, check that it is correct and fast enough, and locate the faulty host if not.
///
/// It runs NVIDIA's all_reduce_perf on the hosts with the local `mpirun`, 8 GiB ten times with one process per GPU; or,
/// without MPI, `doctor-node` on every host. The bus bandwidth of the largest size is compared with the machine type's
/// profile or --expect; without a limit the result is inconclusive. If the hosts fail together, they are tested in
/// pairs with known good hosts (--good), or with hosts that prove good, until the faulty host or pair is identified.
///
/// A host in use, by the service's rule for a free host (docs/guide/ssh.md), is left out unless --even-in-use is given.
/// That check needs root there, by login or by `as_root`. Exit codes: 0 correct and fast enough; 1 it fails; 3
/// inconclusive, or some hosts were left out.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Program that runs it. Default: mpirun if found, otherwise doctor-node.
    #[arg(long, value_enum)]
    launcher: Option<Launcher>,
    /// Expected bus bandwidth over these hosts, in GB/s. Default: from the machine type's profile.
    #[arg(long, value_name = "GB/S", value_parser = bandwidth)]
    expect: Option<f64>,
    /// Machine type. Default: `sku` of [backend.ssh].
    #[arg(long, value_name = "NAME")]
    sku: Option<Sku>,
    /// Known good hosts of the same list, to pair the others with.
    #[arg(long, value_name = "HOSTS")]
    good: Vec<Selector>,
    /// Do not locate the faulty host after a failure.
    #[arg(long)]
    no_pairs: bool,
    /// Number of pairs in parallel.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    pairs: u8,
    /// Time limit of one all-reduce, after which it counts as hung.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    deadline: Span,
    /// Environment variable for every process; with an empty value it is unset.
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Include hosts that are in use or whose use is unknown; by default they are left out.
    #[arg(long)]
    even_in_use: bool,
    /// Print what would be run, and run nothing.
    #[arg(long)]
    print: bool,
    /// Path of Open MPI's mpirun.
    #[arg(long, value_name = "PROGRAM", default_value = "mpirun", help_heading = "By mpirun")]
    mpirun: PathBuf,
    /// Path of all_reduce_perf on the hosts.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/opt/nccl-tests/build/all_reduce_perf",
        help_heading = "By mpirun"
    )]
    program: String,
    /// GPUs per host. Default: all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "By mpirun")]
    gpus: Option<u32>,
    /// Smallest message size, in the notation of nccl-tests.
    #[arg(long, value_name = "SIZE", default_value = "8G", help_heading = "By mpirun")]
    least: String,
    /// Largest message size.
    #[arg(long, value_name = "SIZE", default_value = "8G", help_heading = "By mpirun")]
    most: String,
    /// Number of iterations per size.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "By mpirun")]
    cycles: u32,
    /// Additional argument for mpirun.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true, help_heading = "By mpirun")]
    mpi_arg: Vec<String>,
    /// Parameter of the test `collective`, such as most=8GiB or net=Socket.
    #[arg(long = "set", value_name = "NAME=VALUE", help_heading = "By doctor-node")]
    set: Vec<String>,
    #[command(flatten)]
    host_args: HostArgs,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet nccl --hostfile hostfile --sku nd96isr_h200_v5 --expect 480
  doctor fleet nccl --hosts 'gpu[01-08]' --good 'gpu[40-41]' --print
  doctor fleet nccl --launcher doctor-node --set most=8GiB";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Launcher {
    Mpirun,
    DoctorNode,
}

fn bandwidth(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    number.map(|number| number * 1e9).ok_or_else(|| "use GB/s, such as 431.5".to_owned())
}

fn variable(text: &str) -> std::result::Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("use NAME=VALUE")?;
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(fits) {
        return Err("a name consists of letters, digits and _, and does not begin with a digit".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

#[derive(Debug, Serialize)]
struct TrialView {
    hosts: Vec<NodeName>,
    #[serde(flatten)]
    result: NcclTrialResult,
}

#[derive(Debug, Serialize)]
struct NcclView {
    verdict: Verdict,
    limit_bytes_per_s: Option<f64>,
    /// The result of fault localisation; absent if it was not needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    found: Option<String>,
    at_fault: Vec<NodeName>,
    /// Pairs of hosts that fail together, although each succeeds with others.
    pairs_at_fault: Vec<(NodeName, NodeName)>,
    left_out: Vec<SkippedHost>,
    trials: Vec<TrialView>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let fleet = args.host_args.open(context)?;
    let good = select_good_hosts(&fleet, &args.good)?;
    let launcher = args.launcher.unwrap_or_else(|| match program_exists(&args.mpirun) {
        true => Launcher::Mpirun,
        false => Launcher::DoctorNode,
    });
    let limits = Limits::load(context, args, &fleet)?;
    let (ready, mut left_out) = inspect_hosts(&fleet, &fleet.hosts, args, launcher);
    let (good, not_good) = inspect_hosts(&fleet, &good, args, launcher);
    left_out.extend(not_good);
    if ready.is_empty() {
        let why = left_out.first().map_or_else(String::new, |out| format!("; {}: {}", out.host, out.why));
        return Err(Failure::Unreachable(format!("no host can take part{why}")));
    }
    let job = AllReduceJob::new(&fleet, args, launcher, &ready, &good)?;
    let names = |ready: &[ReadyHost]| ready.iter().map(|ready| ready.host.name.clone()).collect::<Vec<NodeName>>();
    if args.print {
        context.out.print(&job.command_line(&names(&ready)))?;
        return Ok(Exit::Ok);
    }
    let view = run_trials(&job, args, (&names(&ready), &names(&good)), &limits, left_out);
    context.out.show(&view, |page| text(page, &view))?;
    Ok(match view.verdict {
        Verdict::Fail => Exit::ProblemsFound,
        Verdict::Pass if view.left_out.is_empty() => Exit::Ok,
        Verdict::Pass | Verdict::Inconclusive | Verdict::NotApplicable => Exit::Unreachable,
    })
}

/// Whether the program exists, searched for as a shell would.
fn program_exists(program: &std::path::Path) -> bool {
    if program.components().count() > 1 {
        return program.is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

fn select_good_hosts(fleet: &Fleet, selectors: &[Selector]) -> Result<Vec<Host>> {
    let mut good: Vec<Host> = Vec::new();
    for selector in selectors {
        let selected: Vec<&Host> = fleet.others.iter().filter(|host| selector.matches_name(&host.name)).collect();
        if selected.is_empty() {
            let others: Vec<NodeName> = fleet.others.iter().map(|host| host.name.clone()).collect();
            let known =
                if others.is_empty() { "none: all hosts are tested".to_owned() } else { hostlist::fold(&others) };
            return Err(Failure::Unknown { what: "other host", name: selector.to_string(), known });
        }
        good.extend(
            selected
                .into_iter()
                .filter(|host| !good.iter().any(|known| known.name == host.name))
                .cloned()
                .collect::<Vec<_>>(),
        );
    }
    Ok(good)
}

/// The expected bandwidths in bytes per second: between hosts, and within one.
#[derive(Debug, Default)]
struct Limits {
    /// From --expect, and whether it applies to several hosts.
    expected: Option<(f64, bool)>,
    between: Option<f64>,
    within: Option<f64>,
}

impl Limits {
    fn load(context: &Context, args: &Args, fleet: &Fleet) -> Result<Self> {
        if let Some(expected) = args.expect {
            return Ok(Self { expected: Some((expected, fleet.hosts.len() > 1)), ..Self::default() });
        }
        let Some(sku) = args.sku.as_ref().or(fleet.config.sku.as_ref()) else { return Ok(Self::default()) };
        let profiles = &context.loaded()?.settings.profiles;
        let Some(profile) = profiles.get(Some(sku)) else {
            let known = doctor_checks::profiles::built_in().names();
            return Err(Failure::Unknown { what: "machine type", name: sku.to_string(), known });
        };
        let limit = |mode: Mode| profile.value(mode.metric());
        Ok(Self { expected: None, between: limit(Mode::Nodes), within: limit(Mode::Nvlink) })
    }

    /// Returns the limit for an all-reduce over this many hosts. --expect for several hosts does not apply if only one
    /// takes part.
    fn for_host_count(&self, hosts: usize) -> Option<f64> {
        match self.expected {
            Some(_) if self.applies_only_between_hosts(hosts) => None,
            Some((expected, _)) => Some(expected),
            None if hosts == 1 => self.within,
            None => self.between,
        }
    }

    /// Whether --expect describes bandwidth between hosts, but only one takes part.
    fn applies_only_between_hosts(&self, hosts: usize) -> bool {
        hosts == 1 && matches!(self.expected, Some((_, true)))
    }
}

fn run_trials(
    job: &AllReduceJob<'_>,
    args: &Args,
    (hosts, good): (&[NodeName], &[NodeName]),
    limits: &Limits,
    left_out: Vec<SkippedHost>,
) -> NcclView {
    let progress = Progress::new("tested", hosts.len());
    let trials: Mutex<Vec<TrialView>> = Mutex::default();
    let attempt = |over: &[NodeName]| {
        let mut judged = job.run(over, limits.for_host_count(over.len()));
        judged.why = match limits.applies_only_between_hosts(over.len()) && judged.verdict == Verdict::Inconclusive {
            true => "only one host takes part, but --expect is for several".to_owned(),
            false => sanitize(&judged.why),
        };
        let outcome = judged.trial_outcome();
        let trial = TrialView { hosts: over.to_vec(), result: judged };
        progress.print_line(&trial_line(&trial));
        trials.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(trial);
        outcome
    };
    let found = if args.no_pairs || hosts.len() == 1 && good.is_empty() {
        attempt(hosts);
        None
    } else {
        let (found, _) = search(hosts, good, usize::from(args.pairs), attempt, |_| {});
        Some(found)
    };
    drop(progress);
    let trials = trials.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let verdict = trials.first().map_or(Verdict::Inconclusive, |trial| trial.result.verdict);
    let (at_fault, pairs_at_fault) = match (&found, trials.first()) {
        (Some(FaultLocation::Nodes(nodes)), _) => (nodes.clone(), Vec::new()),
        (Some(FaultLocation::Pairs(pairs)), _) => (Vec::new(), pairs.clone()),
        (None, Some(trial)) => (trial.result.faulty_hosts.clone(), Vec::new()),
        _ => (Vec::new(), Vec::new()),
    };
    let found = found.filter(|_| verdict == Verdict::Fail).map(|found| found.to_string());
    let limit_bytes_per_s = limits.for_host_count(hosts.len());
    NcclView { verdict, limit_bytes_per_s, found, at_fault, pairs_at_fault, left_out, trials }
}

fn trial_line(trial: &TrialView) -> String {
    let TrialView { hosts, result: judged } = trial;
    let figure = judged.bus_bandwidth_bytes_per_s.map_or_else(String::new, |rate| {
        let bytes = judged.bytes.map_or_else(String::new, |bytes| format!(" at {bytes} bytes"));
        format!("{:.1} GB/s{bytes}, ", rate / 1e9)
    });
    format!("{}: {}: {figure}{}", hostlist::fold(hosts), judged.verdict, judged.why)
}

fn text(page: &mut Page, view: &NcclView) {
    for trial in &view.trials {
        page.line(trial_line(trial));
    }
    if let Some(found) = &view.found {
        page.line(found);
    }
    for out in &view.left_out {
        page.line(format!("{} skipped: {}", out.host, out.why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_multi_host_limit_does_not_apply_to_one_host() {
        let profile = Limits { expected: None, between: Some(400.0), within: Some(480.0) };
        assert_eq!((profile.for_host_count(1), profile.for_host_count(2)), (Some(480.0), Some(400.0)));
        let several = Limits { expected: Some((431.0, true)), ..Limits::default() };
        assert_eq!((several.for_host_count(1), several.for_host_count(2)), (None, Some(431.0)));
        let alone = Limits { expected: Some((431.0, false)), ..Limits::default() };
        assert_eq!(
            (alone.for_host_count(1), alone.for_host_count(2)),
            (Some(431.0), Some(431.0)),
            "a pair with one that is known to be good"
        );
    }

    #[test]
    fn invalid_variables_and_bandwidths_are_rejected() {
        assert_eq!(variable("NCCL_DEBUG=a=b").unwrap(), ("NCCL_DEBUG".to_owned(), "a=b".to_owned()));
        for wrong in ["NCCL", "=1", "1A=2", "A;B=1", "$(id)=1"] {
            assert!(variable(wrong).is_err(), "{wrong}");
        }
        assert!((bandwidth("431.5").unwrap() - 431.5e9).abs() < 1.0);
        for wrong in ["0", "-1", "nan", "fast", "inf"] {
            assert!(bandwidth(wrong).is_err(), "{wrong}");
        }
    }
}
