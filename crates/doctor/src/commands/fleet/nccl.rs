//! `doctor fleet nccl`: an all-reduce over the hosts, and who is at fault when it fails.

mod job;

use std::{path::PathBuf, sync::Mutex};

use clap::ValueEnum;
use doctor_backend::ssh::Host;
use doctor_checks::collective_order::Mode;
use doctor_core::{
    finding::Verdict,
    hostlist::{self, Selector},
    ids::{NodeName, Sku},
    time::Span,
    trials::Found,
};
use doctor_fleet::{
    nccl::Judged,
    search::{self, search},
};
use serde::Serialize;

use self::job::{Job, LeftOut, Ready, prepare};
use super::{Fleet, Reach, progress::Progress};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, harmless},
};

/// An all-reduce over the hosts: is it right, and fast enough? If not, who is at fault?
///
/// By `mpirun` here and NVIDIA's all_reduce_perf on the hosts, 8 GiB ten times with one process for each GPU; or, without
/// MPI, by `doctor-node` on every host. The bus bandwidth of the largest size is held against the machine type's profile or
/// --expect; without a limit nobody can say whether it is good. If the hosts fail together, they are tried in pairs: with hosts
/// that are known to be good (--good), or with those that turn out to be, until the host or the pair at fault can be named.
///
/// Hosts are looked at first: one that is in use, by the rule by which the service calls a host free (docs/guide/ssh.md), takes no part,
/// unless --even-in-use says so. That takes root there, by login or by `as_root`. Exit codes: 0 right and fast enough; 1 it fails; 3 nobody can say, or some
/// hosts could not take part.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// By what it is run. Else: mpirun where it is found, or doctor-node.
    #[arg(long, value_enum)]
    launcher: Option<Launcher>,
    /// What such hosts reach together, in GB/s. Else: what the profile of the machine type says.
    #[arg(long, value_name = "GB/S", value_parser = bandwidth)]
    expect: Option<f64>,
    /// The machine type. Else: `sku` under [backend.ssh].
    #[arg(long, value_name = "NAME")]
    sku: Option<Sku>,
    /// Hosts that are known to be good, of the same list, to try the others with.
    #[arg(long, value_name = "HOSTS")]
    good: Vec<Selector>,
    /// If they fail, do not look for who it is.
    #[arg(long)]
    no_pairs: bool,
    /// So many pairs at the same time.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    pairs: u8,
    /// For each all-reduce; one that takes longer hangs.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    deadline: Span,
    /// A variable for every process; without a value it is not set.
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Also on hosts that somebody uses, or of which nobody can say; else they take no part.
    #[arg(long)]
    even_in_use: bool,
    /// Say what would be run, and run nothing.
    #[arg(long)]
    print: bool,
    /// Open MPI's mpirun.
    #[arg(long, value_name = "PROGRAM", default_value = "mpirun", help_heading = "By mpirun")]
    mpirun: PathBuf,
    /// all_reduce_perf on the hosts.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/opt/nccl-tests/build/all_reduce_perf",
        help_heading = "By mpirun"
    )]
    program: String,
    /// GPUs of each host. Else: as many as they have.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "By mpirun")]
    gpus: Option<u32>,
    /// The smallest message, as nccl-tests takes it.
    #[arg(long, value_name = "SIZE", default_value = "8G", help_heading = "By mpirun")]
    least: String,
    /// The largest.
    #[arg(long, value_name = "SIZE", default_value = "8G", help_heading = "By mpirun")]
    most: String,
    /// How often each size is run.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "By mpirun")]
    cycles: u32,
    /// More words for mpirun.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true, help_heading = "By mpirun")]
    mpi_arg: Vec<String>,
    /// A parameter of the test `collective`, such as most=8GiB or net=Socket.
    #[arg(long = "set", value_name = "NAME=VALUE", help_heading = "By doctor-node")]
    set: Vec<String>,
    #[command(flatten)]
    reach: Reach,
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
        return Err("a name has letters, digits and _, and no digit in front".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

#[derive(Debug, Serialize)]
struct TrialView {
    hosts: Vec<NodeName>,
    #[serde(flatten)]
    judged: Judged,
}

#[derive(Debug, Serialize)]
struct View {
    verdict: Verdict,
    limit_bytes_per_s: Option<f64>,
    /// What came of looking for who is at fault; absent where nobody had to.
    #[serde(skip_serializing_if = "Option::is_none")]
    found: Option<String>,
    at_fault: Vec<NodeName>,
    /// Pairs of which each is well with others.
    pairs_at_fault: Vec<(NodeName, NodeName)>,
    left_out: Vec<LeftOut>,
    trials: Vec<TrialView>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let fleet = args.reach.open(context)?;
    let good = good_ones(&fleet, &args.good)?;
    let launcher = args.launcher.unwrap_or_else(|| match find(&args.mpirun) {
        true => Launcher::Mpirun,
        false => Launcher::DoctorNode,
    });
    let limits = Limits::of(context, args, &fleet)?;
    let (ready, mut left_out) = prepare(&fleet, &fleet.hosts, args, launcher);
    let (good, not_good) = prepare(&fleet, &good, args, launcher);
    left_out.extend(not_good);
    if ready.is_empty() {
        let why = left_out.first().map_or_else(String::new, |out| format!("; {}: {}", out.host, out.why));
        return Err(Failure::Unreachable(format!("no host can take part{why}")));
    }
    let job = Job::new(&fleet, args, launcher, &ready, &good)?;
    let names = |ready: &[Ready]| ready.iter().map(|ready| ready.host.name.clone()).collect::<Vec<NodeName>>();
    if args.print {
        context.out.print(&job.line(&names(&ready)))?;
        return Ok(Exit::Ok);
    }
    let view = tried(&job, args, (&names(&ready), &names(&good)), &limits, left_out);
    context.out.show(&view, |page| text(page, &view))?;
    Ok(match view.verdict {
        Verdict::Fail => Exit::Trouble,
        Verdict::Pass if view.left_out.is_empty() => Exit::Ok,
        Verdict::Pass | Verdict::Inconclusive | Verdict::NotApplicable => Exit::Unreachable,
    })
}

/// As a shell would look for it.
fn find(program: &std::path::Path) -> bool {
    if program.components().count() > 1 {
        return program.is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

fn good_ones(fleet: &Fleet, selectors: &[Selector]) -> Result<Vec<Host>> {
    let mut good: Vec<Host> = Vec::new();
    for selector in selectors {
        let meant: Vec<&Host> = fleet.others.iter().filter(|host| selector.matches_name(&host.name)).collect();
        if meant.is_empty() {
            let others: Vec<NodeName> = fleet.others.iter().map(|host| host.name.clone()).collect();
            let known =
                if others.is_empty() { "none: all are to be tried".to_owned() } else { hostlist::fold(&others) };
            return Err(Failure::Unknown { what: "other host", name: selector.to_string(), known });
        }
        good.extend(
            meant
                .into_iter()
                .filter(|host| !good.iter().any(|known| known.name == host.name))
                .cloned()
                .collect::<Vec<_>>(),
        );
    }
    Ok(good)
}

/// What such hosts reach, in bytes a second: between them, and within one.
#[derive(Debug, Default)]
struct Limits {
    /// By --expect, for as many hosts as were named: one, or several.
    expected: Option<(f64, bool)>,
    between: Option<f64>,
    within: Option<f64>,
}

impl Limits {
    fn of(context: &Context, args: &Args, fleet: &Fleet) -> Result<Self> {
        if let Some(expected) = args.expect {
            return Ok(Self { expected: Some((expected, fleet.hosts.len() > 1)), ..Self::default() });
        }
        let Some(sku) = args.sku.as_ref().or(fleet.config.sku.as_ref()) else { return Ok(Self::default()) };
        let profiles = &context.loaded()?.settings.profiles;
        let Some(profile) = profiles.get(Some(sku)) else {
            let known = doctor_checks::profiles::built_in().names();
            return Err(Failure::Unknown { what: "machine type", name: sku.to_string(), known });
        };
        let limit = |mode: Mode| profile.expect.get(mode.metric()).copied();
        Ok(Self { expected: None, between: limit(Mode::Nodes), within: limit(Mode::Nvlink) })
    }

    /// For an all-reduce over so many hosts: how many were named says nothing if only one of them can take part.
    fn over(&self, hosts: usize) -> Option<f64> {
        match self.expected {
            Some(_) if self.is_for_others(hosts) => None,
            Some((expected, _)) => Some(expected),
            None if hosts == 1 => self.within,
            None => self.between,
        }
    }

    /// What was expected is the way between hosts, and there is only one.
    fn is_for_others(&self, hosts: usize) -> bool {
        hosts == 1 && matches!(self.expected, Some((_, true)))
    }
}

fn tried(
    job: &Job<'_>,
    args: &Args,
    (hosts, good): (&[NodeName], &[NodeName]),
    limits: &Limits,
    left_out: Vec<LeftOut>,
) -> View {
    let progress = Progress::new("tried", hosts.len());
    let trials: Mutex<Vec<TrialView>> = Mutex::default();
    let attempt = |over: &[NodeName]| {
        let mut judged = job.run(over, limits.over(over.len()));
        judged.why = match limits.is_for_others(over.len()) && judged.verdict == Verdict::Inconclusive {
            true => "only one host takes part, and --expect is for several".to_owned(),
            false => harmless(&judged.why),
        };
        let said = judged.said();
        let trial = TrialView { hosts: over.to_vec(), judged };
        progress.say(&line(&trial));
        trials.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(trial);
        said
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
    let verdict = trials.first().map_or(Verdict::Inconclusive, |trial| trial.judged.verdict);
    let (at_fault, pairs_at_fault) = match (&found, trials.first()) {
        (Some(Found::Nodes(nodes)), _) => (nodes.clone(), Vec::new()),
        (Some(Found::Pairs(pairs)), _) => (Vec::new(), pairs.clone()),
        (None, Some(trial)) => (trial.judged.named.clone(), Vec::new()),
        _ => (Vec::new(), Vec::new()),
    };
    let found = found.filter(|_| verdict == Verdict::Fail).map(|found| search::words(&found));
    let limit_bytes_per_s = limits.over(hosts.len());
    View { verdict, limit_bytes_per_s, found, at_fault, pairs_at_fault, left_out, trials }
}

fn line(trial: &TrialView) -> String {
    let TrialView { hosts, judged } = trial;
    let figure = judged.bus_bandwidth_bytes_per_s.map_or_else(String::new, |rate| {
        let bytes = judged.bytes.map_or_else(String::new, |bytes| format!(" at {bytes} bytes"));
        format!("{:.1} GB/s{bytes}, ", rate / 1e9)
    });
    format!("{}: {}: {figure}{}", hostlist::fold(hosts), judged.verdict, judged.why)
}

fn text(page: &mut Page, view: &View) {
    for trial in &view.trials {
        page.line(line(trial));
    }
    if let Some(found) = &view.found {
        page.line(found);
    }
    for out in &view.left_out {
        page.line(format!("{} took no part: {}", out.host, out.why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_between_hosts_is_not_for_one_alone() {
        let profile = Limits { expected: None, between: Some(400.0), within: Some(480.0) };
        assert_eq!((profile.over(1), profile.over(2)), (Some(480.0), Some(400.0)));
        let several = Limits { expected: Some((431.0, true)), ..Limits::default() };
        assert_eq!((several.over(1), several.over(2)), (None, Some(431.0)));
        let alone = Limits { expected: Some((431.0, false)), ..Limits::default() };
        assert_eq!(
            (alone.over(1), alone.over(2)),
            (Some(431.0), Some(431.0)),
            "a pair with one that is known to be good"
        );
    }

    #[test]
    fn what_is_no_variable_and_no_bandwidth_is_refused() {
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
