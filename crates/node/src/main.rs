//! The command line of `doctor-node`.

#[cfg(test)]
mod command_line_file;

use std::{
    ffi::OsString,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use doctor_checks::{document::RunKey, job_file, probe::Probe, result_transport::URL_VARIABLE};
use doctor_core::{
    access::Access,
    ids::{CheckId, NodeName, RunId, TestId},
    time::Span,
};
use doctor_host::trusted_file;
use doctor_node::{
    agent, builtin, check, heap,
    hook::{self, HOOK_ARGUMENT},
    host,
    job::{self, JobParams, ResultTarget, node_paths},
    policy::{load_policy, load_submitted_policy},
    profile::{self, MachineArgs},
    profile_command, repair, report, result_post,
    runner::{self, BUILTIN_ARGUMENT, DRIVER_ARGUMENT, HELPER_ARGUMENT, KEY_VARIABLE, LocalRunner},
    stop::Stop,
    test,
};

/// Check this machine and run validation jobs on it.
///
/// doctor-node holds no cluster credentials. Only the agent, hooks, multi-node tests and queries of a cloud's metadata
/// service use the network. Run it as root so that it can read the kernel log and serial numbers.
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

/// Run checks on this machine now and print their verdicts.
///
/// Exit codes follow Nagios: 0 every check passes or does not apply; 1 a finding is worth watching; 2 a finding takes
/// the node out of service; 3 a check is inconclusive, no check that ran applies here, or the command line is wrong.
/// The worst wins: 2, then 3, then 1.
#[derive(Debug, Args)]
struct CheckArgs {
    /// Checks to run, such as `disk-space`. [default: the suite, without the checks that the policy disables]
    #[arg(value_name = "NAME")]
    names: Vec<CheckId>,
    /// Checks to run, separated by commas.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<CheckId>,
    /// The suite to run if no check is named.
    #[arg(long, value_enum, default_value = "quick")]
    suite: SuiteName,
    /// Run only those checks of the suite that start no program, which takes milliseconds.
    #[arg(long)]
    fast_only: bool,
    /// Print JSON instead of a table: one object per finding, and one per check without findings.
    #[arg(long)]
    json: bool,
    /// Print one line for each check that does not apply.
    #[arg(long)]
    all: bool,
    #[command(flatten, next_help_heading = "Machine type")]
    machine: MachineArgs,
    #[command(flatten, next_help_heading = "Paths")]
    paths: PathArgs,
}

/// The suites of `check`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum SuiteName {
    /// All checks that do not occupy the node
    Quick,
}

/// Run tests that load the node and print their verdicts.
///
/// Nothing else should use the node meanwhile. On a terminal, the output of a test's programs is shown as it arrives.
/// `doctor explain NAME` describes a test. Exit codes are those of `check`.
#[derive(Debug, Args)]
struct TestArgs {
    /// Tests or suites to run, one after the other, such as `dl` or `standard`.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<CheckId>,
    /// Set a test parameter for this invocation, such as `mounts=["/data"]` or `pattern_time=30s`. Overrides the
    /// policy.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<test::Setting>,
    /// Diagnostic level of `dcgm`; same as `--set level=N`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    level: Option<u8>,
    /// Copy the output of the tests' programs to standard error, even if it is not a terminal.
    #[arg(long)]
    echo: bool,
    /// Print JSON instead of a table: one object per finding, and one per test without findings.
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Machine type")]
    machine: MachineArgs,
    #[command(flatten, next_help_heading = "Paths")]
    paths: PathArgs,
}

/// Show, learn or compare the hardware profile of this machine.
///
/// The machine type comes from the cloud's metadata service, then from --label, then from the firmware's product name,
/// then from the GPUs. Without a profile, what checks compare with one is not judged (`no-expectation`).
#[derive(Debug, Args)]
struct ProfileArgs {
    #[command(subcommand)]
    subcommand: profile_command::ProfileCommand,
    #[command(flatten, next_help_heading = "Machine type")]
    machine: MachineArgs,
    #[command(flatten, next_help_heading = "Paths")]
    paths: PathArgs,
}

/// Record what the checks read on this machine, for replay elsewhere.
///
/// The output directory gets a file tree for `check --root DIR/root` and values for the fake NVML library of Cluster
/// Doctor's tests. The recording contains serial numbers and process names: review it before you share it.
#[derive(Debug, Args)]
struct RecordArgs {
    /// Output directory.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    paths: PathArgs,
}

/// Run the tests of one validation run; write a log and a signed result document.
///
/// A backend starts this command on the node. The run's key comes from the environment variable DOCTOR_RUN_KEY or from
/// --key-file. On SIGTERM the job signs the results of the tests that have finished and exits with 143. To run it
/// manually: `doctor-node job --suite standard --data DIR`. A multi-node run names all of its nodes, each with its own
/// --log and --document; DOCTOR_NODE_NAME or, in Slurm, SLURMD_NODENAME selects the one that this node is.
///
/// With --results the document is also posted to the controller, for 20 seconds; if it cannot be written either, until
/// the time limit.
///
/// Exit codes: 0 every test ran, whatever it found; 1 the result could not be delivered; 2 the job could not start; 3
/// another process owns this run, or the run was cancelled; 124 time limit exceeded; 143 stopped by a signal.
#[derive(Debug, Args)]
struct JobArgs {
    /// Run id assigned by the controller.
    #[arg(long, value_name = "ID", required_unless_present = "data")]
    run: Option<RunId>,
    /// Name of this node in its cluster. With --data it defaults to the host name.
    #[arg(long = "node", value_name = "NAME", required_unless_present = "data")]
    nodes: Vec<NodeName>,
    /// Tests or suites to run, in this order, separated by commas.
    #[arg(long, visible_alias = "suite", value_name = "NAMES", value_delimiter = ',', required = true)]
    tests: Vec<TestId>,
    /// Log file, written while the tests run: one for all tests, or one per test in their order.
    #[arg(long = "log", value_name = "FILE", required_unless_present_any = ["data", "carry"])]
    logs: Vec<PathBuf>,
    /// Result document, written at the end.
    #[arg(long = "document", value_name = "FILE", required_unless_present_any = ["data", "carry"])]
    documents: Vec<PathBuf>,
    /// Write the log and the packed result document to standard output, for clusters without a shared directory. FILE
    /// is the container's termination message; the document goes there too if it fits.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["logs", "documents", "data"])]
    carry: Option<PathBuf>,
    /// Write with the layout of the shared directory: DIR/TEST/NODE/TEST_NODE_TIME.log per test, and the document
    /// beside the first log. Without a key, a throwaway key signs the document: it is for people to read and no
    /// controller accepts it.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["logs", "documents"])]
    data: Option<PathBuf>,
    /// URL of the controller's agent endpoint, to which the result document is posted as well.
    #[arg(long, value_name = "URL", env = URL_VARIABLE)]
    results: Option<String>,
    /// File that holds the run's key in hexadecimal; read once.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Stop after this time, such as "30m".
    #[arg(long, value_name = "DURATION")]
    limit: Option<Span>,
    /// Claim the run in this file, and record the outcome of the job in it.
    #[arg(long, value_name = "FILE")]
    job_file: Option<PathBuf>,
    /// Access to the machine that this container was given: host-root, gpu, rdma, kernel-log, host-pid, mounts. What
    /// needs more is not read, and is inconclusive (`denied`). [default: all, as outside of a container]
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "DOCTOR_ACCESS")]
    access: Option<Vec<Access>>,
    /// SHA-256 of the policy file, from the program that wrote it for this run. The content is then verified, and not who
    /// could change the file.
    #[arg(long, value_name = "HEX", env = job_file::POLICY_DIGEST_VARIABLE)]
    policy_digest: Option<String>,
    #[command(flatten)]
    paths: PathArgs,
}

/// Run the site's command to reset the GPUs or reboot this machine, once, and verify the effect.
///
/// A backend starts this command on a node without user work. Example:
/// `doctor-node repair reboot --boot ID -- systemctl reboot`.
///
/// Exit codes: 0 done now or earlier; 1 it failed or did not help.
#[derive(Debug, Args)]
struct RepairArgs {
    #[arg(value_enum)]
    what: repair::RepairAction,
    /// Boot id of the request, as in /proc/sys/kernel/random/boot_id. In any other boot the command does nothing.
    #[arg(long, value_name = "ID")]
    boot: Option<String>,
    /// Kill the command after this time.
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    limit: Span,
    /// Claim the operation in this file so that only one process performs it, and record the outcome in it.
    #[arg(long, value_name = "FILE", requires = "run")]
    job_file: Option<PathBuf>,
    /// Id to claim, assigned by the controller.
    #[arg(long, value_name = "ID", requires = "job_file")]
    run: Option<RunId>,
    /// Command to run, with its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
    #[command(flatten)]
    paths: PathArgs,
}

/// Collect hardware details and the vendor's diagnostic report, for a repair or a support case.
///
/// Writes serials, driver, firmware of GPUs, adapters and board, the cloud's name of the machine, and the output of
/// nvidia-bug-report.sh if that is installed. A backend starts this command before a step that destroys state on the
/// machine.
///
/// Exit codes: 0 written, with whatever was available; 1 nothing could be written.
#[derive(Debug, Args)]
struct ReportArgs {
    /// Output directory; created if missing.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Print the report as well, packed, for a job whose log is all that the controller can read.
    #[arg(long)]
    carry: bool,
    /// Kill the vendor's tool after this time.
    #[arg(long, value_name = "DURATION", default_value = "3m")]
    limit: Span,
    /// URL of the cloud's metadata service, or `none`. It is queried only if the firmware identifies a cloud.
    #[arg(long, value_name = "URL", env = "DOCTOR_METADATA", default_value = doctor_node::profile::LINK_LOCAL)]
    metadata: String,
    /// Claim the operation in this file so that only one process performs it, and record the outcome in it.
    #[arg(long, value_name = "FILE", requires = "run")]
    job_file: Option<PathBuf>,
    /// Id to claim, assigned by the controller.
    #[arg(long, value_name = "ID", requires = "job_file")]
    run: Option<RunId>,
    #[command(flatten)]
    paths: PathArgs,
}

/// Check this node continuously and report changes to the controller until stopped (SIGTERM).
///
/// Fast checks run every 5 minutes, others at their own interval; checks that read the kernel log run as soon as the
/// kernel logs a message. The agent runs nothing that occupies the node. Reports that the controller has not accepted
/// are spooled on disk. A configuration file may hold the settings; it is reloaded when it changes and on SIGHUP. The
/// command line overrides it.
///
/// Exit codes: 0 stopped by a signal; 1 the agent could not start.
#[derive(Debug, Args)]
struct AgentArgs {
    /// Settings as TOML, named like these options. [default: /etc/cluster-doctor/agent.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: agent::config::AgentSettings,
}

/// Run as Slurm's HealthCheckProgram, Prolog or Epilog: check this node, or reuse a recent verdict, and print one line.
///
/// With a controller the hook reports, and the controller drains within its breaker. With `standalone` the hook drains the
/// node itself, with a reason that starts with `doctor:`, within the limits of the policy's breaker; it never touches a
/// drain that it did not set. It always returns within its time limit. A check that hangs or is inconclusive neither
/// drains the node nor stops a job. `doctor deploy slurm` prints the scripts and the lines for Slurm. Settings:
/// docs/guide/slurm-hooks.md.
///
/// Exit codes: 0 continue; 1 (prolog with `block` only) do not start the job here: a finding isolates the node and the
/// breaker permits it.
#[derive(Debug, Args)]
struct HookArgs {
    #[arg(value_enum)]
    kind: hook::HookKind,
    /// Settings as TOML. [default: /etc/cluster-doctor/hook.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Work without a controller and drain this node directly. Same as `standalone = true` in the file.
    #[arg(long)]
    standalone: bool,
}

/// Serve one request of a controller that reaches this machine over SSH.
///
/// Requests query the machine's users, or start, follow and end a run. The request is read from standard input.
/// Operators do not need this command.
///
/// Exit codes: 0 answered, whatever the answer; 1 the request was invalid or the answer could not be written.
#[derive(Debug, Args)]
struct HostArgs {
    /// Directory for the runs and marks of this machine, on a local disk if possible.
    #[arg(long, value_name = "DIR")]
    keep: PathBuf,
}

#[derive(Debug, Args)]
struct PathArgs {
    /// Root of this machine's file system, for a container that has the host mounted there.
    #[arg(long, global = true, value_name = "DIR", env = "DOCTOR_ROOT", default_value = "/")]
    root: PathBuf,
    /// The site's policy file. [default: the built-in policy]
    #[arg(long, global = true, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Directory for state between invocations: which probes hang in the kernel, so that they do not pile up, and the
    /// previous values of counters, so that checks can measure their growth.
    #[arg(long, global = true, value_name = "DIR", env = "DOCTOR_NODE_STATE")]
    state: Option<PathBuf>,
    /// Path of NVIDIA's management library, if the loader does not find it by name.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_NVML", default_value = doctor_gpu::nvml::LIBRARY)]
    nvml: OsString,
    /// Path of DCGM's library, if the loader finds neither libdcgm.so.4 nor libdcgm.so.3.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_DCGM")]
    dcgm: Option<OsString>,
}

impl PathArgs {
    fn runner<'a>(&self, stop: &'a Stop) -> LocalRunner<'a> {
        let runner = LocalRunner::new(&self.root, stop).state(self.state.as_deref()).library(self.nvml.clone());
        runner.dcgm(self.dcgm.clone().unwrap_or_default())
    }
}

fn main() -> ExitCode {
    heap::use_one_arena();
    let mut args = std::env::args_os();
    match args.nth(1) {
        Some(argument) if argument == HELPER_ARGUMENT => return helper(args),
        Some(argument) if argument == DRIVER_ARGUMENT => return runner::serve_driver_queries(args),
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
            return ExitCode::from(hook::run(args.kind, args.config.as_deref(), args.standalone));
        }
        Ok(Cli { command: Sub::Host(args) }) => {
            (host::serve_request(&args.keep).map(|()| 0).context("cannot answer the controller"), 1)
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

/// Prints a usage error and returns the exit code for it.
///
/// A wrong command line says nothing about the node. Nagios reads that from 3; clap would exit with 2, "critical". A
/// scheduler takes any other code than 0 from a hook for a failed node, so a hook with a wrong command line prints the
/// error and exits with 0.
fn usage(error: &clap::Error) -> ExitCode {
    let is_error = error.use_stderr();
    // A failure to print cannot be reported anywhere.
    let _said = error.print();
    let hook = std::env::args_os().nth(1).is_some_and(|arg| arg == "hook");
    if is_error && !hook { ExitCode::from(check::exit::UNKNOWN) } else { ExitCode::SUCCESS }
}

fn check(args: &CheckArgs) -> anyhow::Result<u8> {
    let policy = load_policy(args.paths.policy.as_deref())?;
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    let runner = args.paths.runner(&stop);
    let profile = profile::select_profile(&args.machine, args.paths.state.as_deref(), &runner)?.profile;
    let names: Vec<_> = args.names.iter().chain(&args.only).cloned().collect();
    let suite = match (args.suite, args.fast_only) {
        (SuiteName::Quick, false) => check::Suite::Quick,
        (SuiteName::Quick, true) => check::Suite::Fast,
    };
    let results = check::check(&names, suite, &policy, profile.as_ref(), &runner)?;
    print_results(&results, args.json, args.all)
}

fn test(args: &TestArgs) -> anyhow::Result<u8> {
    let mut policy = load_policy(args.paths.policy.as_deref())?;
    let names = test::expand_suites(&args.names, &policy);
    test::set(&mut policy, &names, &args.set);
    if let Some(level) = args.level {
        test::set_level(&mut policy, &names, level)?;
    }
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    let log_line = |line: &str| eprintln!("{line}");
    let mut runner = args.paths.runner(&stop);
    if args.echo || std::io::stderr().is_terminal() {
        runner = runner.echo(&log_line);
    }
    let profile = profile::select_profile(&args.machine, args.paths.state.as_deref(), &runner)?.profile;
    let results = test::test(&names, &policy, profile.as_ref(), &runner)?;
    print_results(&results, args.json, true)
}

fn print_results(results: &[check::CheckResult], json: bool, every_line: bool) -> anyhow::Result<u8> {
    if json {
        println!("{}", serde_json::to_string_pretty(&check::rows(results))?);
    } else {
        print!("{}", check::table(results, every_line));
    }
    Ok(check::exit_code(results))
}

fn record(args: &RecordArgs) -> anyhow::Result<u8> {
    let policy = load_policy(args.paths.policy.as_deref())?;
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    let runner = LocalRunner::new(&args.paths.root, &stop).library(args.paths.nvml.clone());
    doctor_node::record::record(&policy, &runner, &args.paths.root, &args.out)?;
    println!("wrote the recording to {}", args.out.display());
    Ok(check::exit::OK)
}

fn profile(args: &ProfileArgs) -> anyhow::Result<u8> {
    let policy = load_policy(args.paths.policy.as_deref())?;
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    let runner = args.paths.runner(&stop);
    let (text, code) =
        profile_command::run(&args.subcommand, &args.machine, args.paths.state.as_deref(), &policy, &runner)?;
    print!("{text}");
    Ok(code)
}

fn repair(args: &RepairArgs) -> anyhow::Result<u8> {
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    let runner = args.paths.runner(&stop);
    let (limit, root) = (args.limit.to_std(), args.paths.root.as_path());
    let work = || -> anyhow::Result<u8> {
        let done = repair::repair(args.what, args.boot.as_deref(), &args.command, limit, root, &runner)?;
        println!("{done}");
        Ok(0)
    };
    match (&args.job_file, args.run) {
        (Some(path), Some(run)) => job::with_claim(path, run, work)?,
        _ => work(),
    }
}

fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    let runner = args.paths.runner(&stop);
    let work = || -> anyhow::Result<u8> {
        println!("{}", report::report(&args.out, &args.paths.root, args.limit, &args.metadata, &runner, &stop)?);
        if args.carry {
            print!("{}", report::carried(&args.out)?);
        }
        Ok(0)
    };
    match (&args.job_file, args.run) {
        (Some(path), Some(run)) => job::with_claim(path, run, work)?,
        _ => work(),
    }
}

fn watch(args: &AgentArgs) -> anyhow::Result<u8> {
    let stop = Stop::on_signals().context("cannot install signal handlers")?;
    agent::run(&args.settings, args.config.as_deref(), &stop)?;
    Ok(0)
}

fn job(args: JobArgs) -> anyhow::Result<u8> {
    // Must come first: an early SIGTERM needs its handler installed.
    let mut stop = Stop::on_signals().context("cannot install signal handlers")?;
    if let Some(limit) = args.limit {
        stop = stop.after(limit.to_std());
    }
    let policy = match (&args.paths.policy, &args.policy_digest) {
        (Some(path), Some(digest)) => load_submitted_policy(path, digest)?,
        (path, _) => load_policy(path.as_deref())?,
    };
    let tests = test::expand_suites(&args.tests, &policy);
    let by_hand = args.data.is_some();
    let run = args.run.unwrap_or_else(node_paths::new_run);
    let own_name = NODE_VARIABLES.iter().find_map(|name| std::env::var(name).ok());
    let (node, logs, hand_over) = match (args.data, args.carry) {
        (Some(data), _) => {
            let node = args.nodes.into_iter().next().map_or_else(node_paths::this_node, Ok)?;
            let (logs, document) =
                node_paths::shared_paths(&data, &tests, &node, run).context("--tests names no test")?;
            println!("{}", document.display());
            (node, logs, ResultTarget::File(document))
        }
        (None, Some(message)) => {
            let index = node_paths::node_index(&args.nodes, own_name.as_deref())?;
            (args.nodes[index].clone(), Vec::new(), ResultTarget::Output { message })
        }
        (None, None) => {
            let (node, logs, document) =
                node_paths::own_paths(&args.nodes, &args.logs, &args.documents, own_name.as_deref())?;
            (node, logs, ResultTarget::File(document))
        }
    };
    // No controller accepts a result of a run that it did not plan.
    let url = args.results.filter(|_| !by_hand);
    let post = url.and_then(|url| match result_post::to(&url, run, node.clone()) {
        Ok(post) => Some(post),
        // The job still has its other way.
        Err(error) => {
            eprintln!("doctor-node: the result cannot be posted: {error}");
            None
        }
    });
    let params = JobParams {
        run,
        node,
        tests,
        key: key(args.key_file.as_deref(), by_hand)?,
        logs,
        result_target: hand_over,
        post,
        policy,
        root: args.paths.root,
        library: args.paths.nvml,
        state: args.paths.state,
        access: args.access.unwrap_or_else(|| Access::ALL.to_vec()),
        job_file: args.job_file,
    };
    match job::run(&params, &stop) {
        Err(error) if error.is_result_lost() => {
            eprintln!("doctor-node: {:#}", anyhow::Error::new(error));
            Ok(job_file::exit::NO_DOCUMENT)
        }
        other => Ok(other?),
    }
}

/// Environment variables that name this node in a multi-node run: the backend's, then Slurm's.
const NODE_VARIABLES: [&str; 2] = ["DOCTOR_NODE_NAME", "SLURMD_NODENAME"];

fn key(file: Option<&Path>, by_hand: bool) -> anyhow::Result<RunKey> {
    let text = match file {
        Some(path) => trusted_file::read_to_string(path)
            .with_context(|| format!("cannot read the key file {}", path.display()))?,
        None => match std::env::var(KEY_VARIABLE) {
            Ok(text) => text,
            Err(_) if by_hand => return node_paths::throwaway_key(),
            Err(_) => bail!("no key for this run: set {KEY_VARIABLE} or --key-file"),
        },
    };
    // The text is a secret: errors must not quote it.
    RunKey::from_hex(text.trim()).context("the run's key is not 64 hexadecimal digits")
}

fn helper(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let request = args.next().and_then(|text| text.into_string().ok());
    let probe = request.and_then(|text| serde_json::from_str::<Probe>(&text).ok());
    let (Some(probe), Some(root), Some(library)) = (probe, args.next(), args.next()) else {
        eprintln!("{HELPER_ARGUMENT} is internal to doctor-node");
        return ExitCode::FAILURE;
    };
    let output = runner::serve_one_probe(&probe, Path::new(&root), &library);
    match serde_json::to_writer(std::io::stdout().lock(), &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
