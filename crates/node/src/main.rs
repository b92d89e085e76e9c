//! The command line of `doctor-node`.

use std::{
    ffi::OsString,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use doctor_checks::{document::RunKey, job_file, probe::Probe};
use doctor_core::{
    ids::{CheckId, NodeName, RunId, TestId},
    time::Span,
};
use doctor_node::{
    agent, builtin, check,
    hook::{self, HOOK_ARGUMENT},
    host,
    job::{self, HandOver, Order, place},
    memory,
    policy::load_policy,
    profile::{self, MachineArgs},
    profile_command, repair, report,
    runner::{self, BUILTIN_ARGUMENT, DRIVER_ARGUMENT, HELPER_ARGUMENT, KEY_VARIABLE, LocalRunner},
    stop::Stop,
    test,
};

/// Cluster Doctor on a node: checks this machine and runs validation jobs.
///
/// It holds no credentials of the cluster, and only the agent uses the network. Run it as root to let it read the kernel log and serial numbers.
#[derive(Debug, Parser)]
#[command(name = "doctor-node", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Debug, Subcommand)]
enum Sub {
    Check(CheckArgs),
    Test(TestArgs),
    Record(RecordArgs),
    Agent(AgentArgs),
    Hook(HookArgs),
    Host(HostArgs),
    Job(JobArgs),
    Repair(RepairArgs),
    Report(ReportArgs),
    Profile(ProfileArgs),
}

/// Check this machine now and judge on the spot.
///
/// Exit codes, as Nagios reads them: 0 all checks pass or do not apply; 1 something is worth watching; 2 something
/// takes the node out of service; 3 something could not be judged, nothing that ran applies here, or the command was
/// wrong. The worst wins: 2, then 3, then 1.
#[derive(Debug, Args)]
struct CheckArgs {
    /// Checks to run, such as `disk-space`. Without any: the suite, less what the policy has switched off.
    #[arg(value_name = "NAME")]
    names: Vec<CheckId>,
    /// The same, separated by commas.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<CheckId>,
    /// What to run where no check is named.
    #[arg(long, value_enum, default_value = "quick")]
    suite: check::Suite,
    /// Print JSON instead of a table: one object for each finding, and one for each check that found nothing.
    #[arg(long)]
    json: bool,
    /// Give each check that does not apply a line of its own.
    #[arg(long)]
    all: bool,
    #[command(flatten, next_help_heading = "Machine type")]
    machine: MachineArgs,
    #[command(flatten, next_help_heading = "Place")]
    place: Place,
}

/// Run a test that loads the node, and judge it on the spot.
///
/// Nothing else should use the node meanwhile. What a program prints appears on a terminal as it comes.
/// `doctor explain NAME` tells what a test does; exit codes are those of `check`.
#[derive(Debug, Args)]
struct TestArgs {
    /// Tests or suites to run, one after the other, such as `dl` or `standard`.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<CheckId>,
    /// Set a parameter for this time, such as `mounts=["/data"]` or `pattern_time=30s`. It goes before the policy's.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<test::Setting>,
    /// How deep `dcgm` looks: the same as `--set level=N`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    level: Option<u8>,
    /// Print on standard error what the tests' programs print, also where that is no terminal.
    #[arg(long)]
    echo: bool,
    /// Print JSON instead of a table: one object for each finding, and one for each test that found nothing.
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Machine type")]
    machine: MachineArgs,
    #[command(flatten, next_help_heading = "Place")]
    place: Place,
}

/// What this machine is expected to have: find its profile, write one, compare with one.
///
/// The machine type is told by the cloud's metadata service, then by --label, then by what the firmware calls the
/// product, then by the GPUs. Without a profile, checks that count or compare with one are inconclusive (`no-limit`).
#[derive(Debug, Args)]
struct ProfileArgs {
    #[command(subcommand)]
    what: profile_command::What,
    #[command(flatten, next_help_heading = "Machine type")]
    machine: MachineArgs,
    #[command(flatten, next_help_heading = "Place")]
    place: Place,
}

/// Write down what the checks read of this machine, to look at it elsewhere.
///
/// The folder gets a tree of files, for `check --root FOLDER/root`, and a scene for the stand-in of NVML that the tests
/// of Cluster Doctor use. It holds serial numbers and names of processes: look before you hand it on.
#[derive(Debug, Args)]
struct RecordArgs {
    /// Where to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// Run the tests of one validation run and leave a log and a signed result document.
///
/// This is what a backend starts on the node. The run's key comes from the environment variable DOCTOR_RUN_KEY or
/// from --key-file. Told to stop (SIGTERM), it signs what had finished and exits with 143.
/// By hand: `doctor-node job --suite standard --data DIR`. A run over several nodes names all of them, each with its own --log and
/// --document; which of them this is, is in the environment variable DOCTOR_NODE_NAME or, in Slurm, SLURMD_NODENAME.
///
/// Exit codes: 0 every test ran, whatever it found; 1 the result could not be written; 2 the job could not begin;
/// 3 another process has this run or it was cancelled; 124 over its time limit; 143 told to stop.
#[derive(Debug, Args)]
struct JobArgs {
    /// The run, as the controller calls it.
    #[arg(long, value_name = "ID", required_unless_present = "data")]
    run: Option<RunId>,
    /// This node, as its cluster calls it. With --data, its host name by default.
    #[arg(long = "node", value_name = "NAME", required_unless_present = "data")]
    nodes: Vec<NodeName>,
    /// Tests or suites to run, in this order, separated by commas.
    #[arg(long, visible_alias = "suite", value_name = "NAMES", value_delimiter = ',', required = true)]
    tests: Vec<TestId>,
    /// Where the log grows while the tests run: one for all tests, or one for each, in their order.
    #[arg(long = "log", value_name = "FILE", required_unless_present_any = ["data", "carry"])]
    logs: Vec<PathBuf>,
    /// Where the result document appears at the end.
    #[arg(long = "document", value_name = "FILE", required_unless_present_any = ["data", "carry"])]
    documents: Vec<PathBuf>,
    /// Without a directory that the controller reads: the log goes to standard output, and at the end the document, packed,
    /// between two lines of its own; and into FILE, which is a container's termination message, the document if it fits there.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["logs", "documents", "data"])]
    carry: Option<PathBuf>,
    /// Write as into a shared directory: DIR/TEST/NODE/TEST_NODE_TIME.log for each test, and the document beside the
    /// first. Without a key the document is signed by one that nobody keeps: for people, not for a controller.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["logs", "documents"])]
    data: Option<PathBuf>,
    /// A file that holds the run's key in hexadecimal; it is read once.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// End by itself after this long, such as "30m".
    #[arg(long, value_name = "DURATION")]
    limit: Option<Span>,
    /// Claim the run in this file, and keep there what became of the job.
    #[arg(long, value_name = "FILE")]
    job_file: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

/// Reset the GPUs of this machine or reboot it, by a command of the site's, once, and see whether it helped.
///
/// This is what a backend starts on a node without user work. Example: `doctor-node repair reboot --boot ID -- systemctl reboot`.
///
/// Exit codes: 0 done, or done already; 1 it failed or did not help.
#[derive(Debug, Args)]
struct RepairArgs {
    #[arg(value_enum)]
    what: repair::What,
    /// The boot in which it was asked for, as /proc/sys/kernel/random/boot_id has it: in another one nothing is done.
    #[arg(long, value_name = "ID")]
    boot: Option<String>,
    /// The command is ended after this long.
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    limit: Span,
    /// Be the one process that does this: claim it in this file, and keep there what became of it.
    #[arg(long, value_name = "FILE", requires = "run")]
    job_file: Option<PathBuf>,
    /// What is claimed, as the controller calls it.
    #[arg(long, value_name = "ID", requires = "job_file")]
    run: Option<RunId>,
    /// The command that does it, word by word.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
    #[command(flatten)]
    place: Place,
}

/// Write down what this machine and its vendor's own tool say of it, for whoever repairs it.
///
/// Serials, driver, firmware of GPUs, adapters and board, what its cloud calls it, and what nvidia-bug-report.sh leaves, where that
/// is installed. A backend starts this before a step that destroys what the machine knows.
///
/// Exit codes: 0 written, with whatever could be learnt; 1 nothing could be written.
#[derive(Debug, Args)]
struct ReportArgs {
    /// The folder to write to; it is made.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The vendor's tool is ended after this long.
    #[arg(long, value_name = "DURATION", default_value = "3m")]
    limit: Span,
    /// Where the cloud's metadata service answers; `none`: it is not asked. It is asked only if the firmware says that this is a
    /// cloud.
    #[arg(long, value_name = "URL", env = "DOCTOR_METADATA", default_value = doctor_node::profile::LINK_LOCAL)]
    metadata: String,
    /// Be the one process that does this: claim it in this file, and keep there what became of it.
    #[arg(long, value_name = "FILE", requires = "run")]
    job_file: Option<PathBuf>,
    /// What is claimed, as the controller calls it.
    #[arg(long, value_name = "ID", requires = "job_file")]
    run: Option<RunId>,
    #[command(flatten)]
    place: Place,
}

/// Look at this node again and again, and report to the controller what has changed, until told to stop (SIGTERM).
///
/// Fast checks run every 5 minutes, others at their own period, and those that read the kernel's log as soon as the kernel
/// says something. Nothing that occupies the node is run. Reports that the controller does not take wait on disk.
/// Settings may stand in a file, which is read again when it changes and on SIGHUP; the command line goes first.
///
/// Exit codes: 0 told to stop; 1 it could not begin.
#[derive(Debug, Args)]
struct AgentArgs {
    /// Settings as TOML, by the names of these options. Else: /etc/cluster-doctor/agent.toml, if it is there.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: agent::config::Written,
}

/// Be Slurm's HealthCheckProgram, Prolog or Epilog: look at this node, or use the verdict of a moment ago, and say one line.
///
/// With a controller it reports, and the controller drains under its breaker. With `alone` it drains the node by itself, with
/// a reason that begins with `doctor:`, within the limits of the policy's breaker, and never touches what somebody else has
/// drained. It always comes back within its limit; whatever hangs or cannot be known is no reason to drain or to stop a job.
/// `doctor deploy slurm` prints the scripts and lines for Slurm. Settings: docs/guide/slurm-hooks.md.
///
/// Exit codes: 0 go on; 1 of a prolog with `block`: not on this node, there is a finding that isolates it and the breaker permits.
#[derive(Debug, Args)]
struct HookArgs {
    #[arg(value_enum)]
    moment: hook::Moment,
    /// Settings as TOML. Else: /etc/cluster-doctor/hook.toml, if it is there.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// There is no controller: drain this node by itself. The same as `alone = true` in the file.
    #[arg(long)]
    alone: bool,
}

/// Answer one question of a controller that reaches this machine over SSH: who uses it, or start, follow and end a run.
///
/// The question comes on standard input; people do not need this.
///
/// Exit codes: 0 answered, whatever the answer is; 1 there was no question, or nobody to answer.
#[derive(Debug, Args)]
struct HostArgs {
    /// Where runs and marks of this machine are kept, on a disk of its own.
    #[arg(long, value_name = "DIR")]
    keep: PathBuf,
}

#[derive(Debug, Args)]
struct Place {
    /// Where the file system of this machine is seen, for a container that has its host mounted there.
    #[arg(long, global = true, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// The site's policy file. Without it: the default policy.
    #[arg(long, global = true, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Remember here, from one call to the next: which probes hang in the kernel, so that they do not pile up, and what
    /// counters stood at, so that their growth can be judged.
    #[arg(long, global = true, value_name = "DIR", env = "DOCTOR_NODE_STATE")]
    state: Option<PathBuf>,
    /// NVIDIA's management library, where it is not found by its name.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_NVML", default_value = doctor_gpu::nvml::LIBRARY)]
    nvml: OsString,
    /// DCGM's library, where it is not found by its name: libdcgm.so.4, then libdcgm.so.3.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_DCGM")]
    dcgm: Option<OsString>,
}

impl Place {
    fn runner<'a>(&self, stop: &'a Stop) -> LocalRunner<'a> {
        let runner = LocalRunner::new(&self.root, stop).state(self.state.as_deref()).library(self.nvml.clone());
        runner.dcgm(self.dcgm.clone().unwrap_or_default())
    }
}

fn main() -> ExitCode {
    memory::one_heap();
    let mut args = std::env::args_os();
    match args.nth(1) {
        Some(argument) if argument == HELPER_ARGUMENT => return helper(args),
        Some(argument) if argument == DRIVER_ARGUMENT => return runner::serve_driver_questions(args),
        Some(argument) if argument == BUILTIN_ARGUMENT => return builtin::run(args),
        Some(argument) if argument == HOOK_ARGUMENT => return hook::worker(args),
        _ => {}
    }
    let (result, failure) = match Cli::try_parse() {
        Ok(Cli { command: Sub::Check(args) }) => (check(&args), check::exit::UNKNOWN),
        Ok(Cli { command: Sub::Test(args) }) => (test(&args), check::exit::UNKNOWN),
        Ok(Cli { command: Sub::Record(args) }) => (record(&args), check::exit::UNKNOWN),
        Ok(Cli { command: Sub::Agent(args) }) => (watch(&args), 1),
        Ok(Cli { command: Sub::Hook(args) }) => {
            return ExitCode::from(hook::run(args.moment, args.config.as_deref(), args.alone));
        }
        Ok(Cli { command: Sub::Host(args) }) => {
            (host::answer(&args.keep).map(|()| 0).context("cannot answer the controller"), 1)
        }
        Ok(Cli { command: Sub::Job(args) }) => (job(args), job_file::exit::NOT_BEGUN),
        Ok(Cli { command: Sub::Repair(args) }) => (repair(&args), 1),
        Ok(Cli { command: Sub::Report(args) }) => (report(&args), 1),
        Ok(Cli { command: Sub::Profile(args) }) => (profile(&args), check::exit::UNKNOWN),
        Err(error) => return usage(&error),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("doctor-node: {error:#}");
            ExitCode::from(failure)
        }
    }
}

/// A wrong command line says nothing about the node: for Nagios that is 3, where clap would exit with 2, "critical". A
/// scheduler takes a hook that exits with anything but 0 for a failed node, so a hook that is called wrongly complains
/// and lets the job begin.
fn usage(error: &clap::Error) -> ExitCode {
    let wrong = error.use_stderr();
    // Nobody is left to tell if this cannot be printed.
    let _said = error.print();
    let hook = std::env::args_os().nth(1).is_some_and(|word| word == "hook");
    if wrong && !hook { ExitCode::from(check::exit::UNKNOWN) } else { ExitCode::SUCCESS }
}

fn check(args: &CheckArgs) -> anyhow::Result<u8> {
    let policy = load_policy(args.place.policy.as_deref())?;
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    let runner = args.place.runner(&stop);
    let profile = profile::choose(&args.machine, args.place.state.as_deref(), &runner)?.profile;
    let names: Vec<_> = args.names.iter().chain(&args.only).cloned().collect();
    let answers = check::check(&names, args.suite, &policy, profile.as_ref(), &runner)?;
    shown(&answers, args.json, args.all)
}

fn test(args: &TestArgs) -> anyhow::Result<u8> {
    let mut policy = load_policy(args.place.policy.as_deref())?;
    let names = test::named(&args.names, &policy);
    test::set(&mut policy, &names, &args.set);
    if let Some(level) = args.level {
        test::set_level(&mut policy, &names, level)?;
    }
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    let say = |line: &str| eprintln!("{line}");
    let mut runner = args.place.runner(&stop);
    if args.echo || std::io::stderr().is_terminal() {
        runner = runner.echo(&say);
    }
    let profile = profile::choose(&args.machine, args.place.state.as_deref(), &runner)?.profile;
    let answers = test::test(&names, &policy, profile.as_ref(), &runner)?;
    shown(&answers, args.json, true)
}

fn shown(answers: &[check::Answer], json: bool, every_line: bool) -> anyhow::Result<u8> {
    if json {
        println!("{}", serde_json::to_string_pretty(&check::rows(answers))?);
    } else {
        print!("{}", check::table(answers, every_line));
    }
    Ok(check::exit_code(answers))
}

fn record(args: &RecordArgs) -> anyhow::Result<u8> {
    let policy = load_policy(args.place.policy.as_deref())?;
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    let runner = LocalRunner::new(&args.place.root, &stop).library(args.place.nvml.clone());
    doctor_node::record::record(&policy, &runner, &args.place.root, &args.out)?;
    println!("recorded below {}", args.out.display());
    Ok(check::exit::OK)
}

fn profile(args: &ProfileArgs) -> anyhow::Result<u8> {
    let policy = load_policy(args.place.policy.as_deref())?;
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    let runner = args.place.runner(&stop);
    let (said, code) = profile_command::run(&args.what, &args.machine, args.place.state.as_deref(), &policy, &runner)?;
    print!("{said}");
    Ok(code)
}

fn repair(args: &RepairArgs) -> anyhow::Result<u8> {
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    let runner = args.place.runner(&stop);
    let (limit, root) = (args.limit.to_std(), args.place.root.as_path());
    let work = || -> anyhow::Result<u8> {
        let done = repair::repair(args.what, args.boot.as_deref(), &args.command, limit, root, &runner)?;
        println!("{done}");
        Ok(0)
    };
    match (&args.job_file, args.run) {
        (Some(path), Some(run)) => job::claimed(path, run, work)?,
        _ => work(),
    }
}

fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    let runner = args.place.runner(&stop);
    let work = || -> anyhow::Result<u8> {
        println!("{}", report::report(&args.out, args.limit, &args.metadata, &runner, &stop)?);
        Ok(0)
    };
    match (&args.job_file, args.run) {
        (Some(path), Some(run)) => job::claimed(path, run, work)?,
        _ => work(),
    }
}

fn watch(args: &AgentArgs) -> anyhow::Result<u8> {
    let stop = Stop::on_signals().context("cannot watch for signals")?;
    agent::run(&args.settings, args.config.as_deref(), &stop)?;
    Ok(0)
}

fn job(args: JobArgs) -> anyhow::Result<u8> {
    // Before anything else: a SIGTERM that comes early must find somebody who listens.
    let mut stop = Stop::on_signals().context("cannot watch for signals")?;
    if let Some(limit) = args.limit {
        stop = stop.after(limit.to_std());
    }
    let policy = load_policy(args.place.policy.as_deref())?;
    let tests = test::named(&args.tests, &policy);
    let by_hand = args.data.is_some();
    let run = args.run.unwrap_or_else(place::new_run);
    let this = NODE_VARIABLES.iter().find_map(|name| std::env::var(name).ok());
    let (node, logs, hand_over) = match (args.data, args.carry) {
        (Some(data), _) => {
            let node = args.nodes.into_iter().next().map_or_else(place::this_node, Ok)?;
            let (logs, document) = place::below(&data, &tests, &node, run).context("--tests names no test")?;
            println!("{}", document.display());
            (node, logs, HandOver::File(document))
        }
        (None, Some(message)) => {
            let which = place::which(&args.nodes, this.as_deref())?;
            (args.nodes[which].clone(), Vec::new(), HandOver::Output { message })
        }
        (None, None) => {
            let (node, logs, document) = place::among(&args.nodes, &args.logs, &args.documents, this.as_deref())?;
            (node, logs, HandOver::File(document))
        }
    };
    let order = Order {
        run,
        node,
        tests,
        key: key(args.key_file.as_deref(), by_hand)?,
        logs,
        hand_over,
        policy,
        root: args.place.root,
        library: args.place.nvml,
        state: args.place.state,
        job_file: args.job_file,
    };
    match job::run(&order, &stop) {
        Err(error) if error.is_result_lost() => {
            eprintln!("doctor-node: {:#}", anyhow::Error::new(error));
            Ok(job_file::exit::NO_DOCUMENT)
        }
        other => Ok(other?),
    }
}

/// Which node of a run over several this is: as the backend says, or as Slurm does.
const NODE_VARIABLES: [&str; 2] = ["DOCTOR_NODE_NAME", "SLURMD_NODENAME"];

fn key(file: Option<&Path>, by_hand: bool) -> anyhow::Result<RunKey> {
    let text = match file {
        Some(path) => {
            std::fs::read_to_string(path).with_context(|| format!("cannot read the key file {}", path.display()))?
        }
        None => match std::env::var(KEY_VARIABLE) {
            Ok(text) => text,
            Err(_) if by_hand => return place::passing_key(),
            Err(_) => bail!("no key for this run: set {KEY_VARIABLE} or give --key-file"),
        },
    };
    // The text itself is a secret and is not quoted.
    RunKey::from_hex(text.trim()).context("the run's key is not 64 hexadecimal digits")
}

fn helper(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let asked = args.next().and_then(|text| text.into_string().ok());
    let probe = asked.and_then(|text| serde_json::from_str::<Probe>(&text).ok());
    let (Some(probe), Some(root), Some(library)) = (probe, args.next(), args.next()) else {
        eprintln!("{HELPER_ARGUMENT} is for doctor-node itself");
        return ExitCode::FAILURE;
    };
    let answer = runner::answer_as_helper(&probe, Path::new(&root), &library);
    match serde_json::to_writer(std::io::stdout().lock(), &answer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
