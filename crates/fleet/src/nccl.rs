//! An all-reduce over hosts with `mpirun` and NVIDIA's `all_reduce_perf`: the command line, and the classification of
//! its output.
//!
//! Sizes and variables are those with which vendors test such machines: 8 GiB, ten times, one process per GPU. The bus
//! bandwidth of the largest size is classified. Wrong sums fail at any bandwidth; a table that is incomplete, not
//! validated or missing is inconclusive; without a limit every bandwidth is inconclusive.

use std::{ffi::OsString, path::PathBuf, process::Command, time::Duration};

use doctor_backend::process::{self, Group, HeadBuffer, Limits, ProcessEnd};
use doctor_backend::ssh::SshConfig;
use doctor_checks::nccl_tests::{self, NcclTestsError};
use doctor_core::{finding::Verdict, ids::NodeName, snapshot::TrialResult};
use serde::Serialize;

/// The tolerance of the rules of the test `collective`.
const TOLERANCE: f64 = 0.95;
const GB: f64 = 1e9;

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    pub mpirun: PathBuf,
    /// The path of `all_reduce_perf` on the hosts.
    pub program: String,
    /// Per host.
    pub gpus: u32,
    /// In the notation of nccl-tests: `8G`.
    pub min_size: String,
    pub max_size: String,
    /// The number of iterations per size.
    pub cycles: u32,
    pub environment: Vec<(String, String)>,
    /// Additional arguments for `mpirun`.
    pub extra_args: Vec<String>,
    /// The command with which `mpirun` reaches the hosts.
    pub launch_agent: String,
    pub limit: Duration,
    /// Whether the caller is root.
    pub as_root: bool,
}

/// The output limit, for the table and NCCL's warnings.
const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// The time for `mpirun` to end its processes on the hosts.
const GRACE: Duration = Duration::from_secs(5);

/// Runs an all-reduce over these hosts. `limit` is the expected bandwidth in bytes per second.
pub fn run(settings: &Settings, hosts: &[NodeName], limit: Option<f64>) -> NcclTrialResult {
    let mut command = Command::new(&settings.mpirun);
    command.args(mpirun_args(settings, hosts));
    let limits = Limits { grace: GRACE, group: Group::Shared, ..Limits::new(settings.limit) };
    match process::run(
        &mut command,
        Vec::new(),
        limits,
        (HeadBuffer::with_capacity(MAX_OUTPUT_BYTES), HeadBuffer::with_capacity(MAX_OUTPUT_BYTES)),
    ) {
        Ok((ended, out, err)) => classify(ended, &out.text(), &err.text(), settings.limit, limit),
        Err(error) => {
            let why = format!("cannot start {}: {error}", settings.mpirun.display());
            NcclTrialResult::new(Verdict::Inconclusive, why)
        }
    }
}

/// Returns our `ssh` command line without prompts. An unanswered prompt would look like hosts that hang.
pub fn ssh_agent_command(config: &SshConfig) -> String {
    let mut args = vec!["ssh".to_owned()];
    args.extend(config.ssh_config.iter().map(|file| format!("-F {}", file.display())));
    args.push("-o BatchMode=yes".to_owned());
    args.push(format!("-o StrictHostKeyChecking={}", config.host_keys.word()));
    args.extend(config.known_hosts.iter().map(|file| format!("-o UserKnownHostsFile={}", file.display())));
    args.push(format!("-o ConnectTimeout={}", config.connect.to_std().as_secs().max(1)));
    args.join(" ")
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Variables that are harmless everywhere: many channels and several queue pairs for large messages over many network
/// cards, no use of another GPU's card, and NCCL's warnings.
const DEFAULT_ENV: [(&str, &str); 7] = [
    ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    ("NCCL_DEBUG", "WARN"),
    ("NCCL_MIN_NCHANNELS", "32"),
    ("NCCL_IB_QPS_PER_CONNECTION", "4"),
    ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
    ("NCCL_PXN_DISABLE", "1"),
    ("NCCL_IGNORE_CPU_AFFINITY", "1"),
];

/// The topology file of Azure's images for machines with eight H100 or H200.
pub const AZURE_TOPOLOGY: &str = "/opt/microsoft/ndv5-topo.xml";

/// The additional variables for those machines.
const AZURE_ENV: [(&str, &str); 4] = [
    ("NCCL_TOPO_FILE", AZURE_TOPOLOGY),
    ("NCCL_SOCKET_IFNAME", "eth0"),
    ("UCX_TLS", "rc"),
    ("UCX_NET_DEVICES", "mlx5_ib0:1"),
];

/// Returns the environment. Variables of the command line replace ours, or remove them if the value is empty.
pub fn environment(azure: bool, set: &[(String, String)]) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    let azure = if azure { &AZURE_ENV[..] } else { &[] };
    let defaults = DEFAULT_ENV.iter().chain(azure).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    for (name, value) in defaults.chain(set.iter().cloned()) {
        all.retain(|(known, _)| *known != name);
        if !value.is_empty() {
            all.push((name, value));
        }
    }
    all
}

/// Returns the arguments for Open MPI's `mpirun`.
pub fn mpirun_args(settings: &Settings, hosts: &[NodeName]) -> Vec<OsString> {
    let gpus = settings.gpus;
    let mut args: Vec<OsString> = Vec::new();
    let mut add = |extra: &[&str]| args.extend(extra.iter().map(OsString::from));
    if settings.as_root {
        // Open MPI requires this flag to run as root.
        add(&["--allow-run-as-root"]);
    }
    let slots: Vec<String> = hosts.iter().map(|host| format!("{host}:{gpus}")).collect();
    add(&["-np", &(hosts.len() * gpus as usize).to_string(), "--host", &slots.join(",")]);
    add(&["--map-by", &format!("ppr:{gpus}:node")]);
    // Start all hosts from here in parallel. HCOLL is off, because MPI's own collectives are not measured.
    add(&[
        "-mca",
        "plm_rsh_no_tree_spawn",
        "1",
        "-mca",
        "plm_rsh_num_concurrent",
        "800",
        "-mca",
        "coll_hcoll_enable",
        "0",
    ]);
    add(&["-mca", "plm_rsh_agent", &settings.launch_agent]);
    add(&["-x", "LD_LIBRARY_PATH"]);
    for (name, value) in &settings.environment {
        add(&["-x", &format!("{name}={value}")]);
    }
    add(&settings.extra_args.iter().map(String::as_str).collect::<Vec<_>>());
    add(&[
        &settings.program,
        "-g",
        "1",
        "-t",
        "1",
        "-b",
        &settings.min_size,
        "-e",
        &settings.max_size,
        "-f",
        "2",
        "-c",
        "1",
    ]);
    add(&["-N", &settings.cycles.to_string(), "-R", "1"]);
    args
}

/// The result of one all-reduce.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NcclTrialResult {
    pub verdict: Verdict,
    pub why: String,
    /// The largest message size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus_bandwidth_bytes_per_s: Option<f64>,
    /// Hosts that failed individually.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faulty_hosts: Vec<NodeName>,
}

impl NcclTrialResult {
    pub fn new(verdict: Verdict, why: impl Into<String>) -> Self {
        Self { verdict, why: why.into(), bytes: None, bus_bandwidth_bytes_per_s: None, faulty_hosts: Vec::new() }
    }

    /// Returns the result as one trial of several.
    pub fn trial_outcome(&self) -> TrialResult {
        match self.verdict {
            Verdict::Pass => TrialResult::Passed,
            Verdict::Fail if !self.faulty_hosts.is_empty() => TrialResult::AtFault(self.faulty_hosts.clone()),
            Verdict::Fail => TrialResult::Failed,
            Verdict::Inconclusive | Verdict::NotApplicable => TrialResult::Inconclusive(self.why.clone()),
        }
    }
}

/// Classifies the output and exit status of `mpirun`. `limit` is the expected bandwidth in bytes per second.
pub fn classify(ended: ProcessEnd, stdout: &str, stderr: &str, time: Duration, limit: Option<f64>) -> NcclTrialResult {
    let status = match ended {
        ProcessEnd::Exited(status) => status,
        // all_reduce_perf prints its participants before it does anything.
        ProcessEnd::TimedOut | ProcessEnd::OutputLimit if !stdout.lines().any(|line| line.starts_with('#')) => {
            let why = format!("mpirun did not start the test within {} s{}", time.as_secs(), last_line(stderr));
            return NcclTrialResult::new(Verdict::Inconclusive, why);
        }
        ProcessEnd::TimedOut | ProcessEnd::OutputLimit => {
            return NcclTrialResult::new(Verdict::Fail, format!("not finished within {} s", time.as_secs()));
        }
    };
    // Final messages may be on either stream; rows of the table are recognised by their columns.
    match nccl_tests::parse(&format!("{stdout}\n{stderr}")) {
        Ok(run) => {
            let overall = classify_bandwidth(run.largest().bytes, run.bus_bandwidth(), run.wrong, limit);
            match overall.verdict {
                Verdict::Fail => overall,
                _ if status.success() => overall,
                _ => NcclTrialResult {
                    verdict: Verdict::Inconclusive,
                    why: format!("complete table, but mpirun ended with {status}{}", last_line(stderr)),
                    ..overall
                },
            }
        }
        Err(NcclTestsError::Failed(line)) => NcclTrialResult::new(Verdict::Fail, line),
        Err(error) => {
            let why = format!("mpirun ended with {status}, and {error}{}", last_line(stderr));
            NcclTrialResult::new(Verdict::Inconclusive, why)
        }
    }
}

/// Classifies a bandwidth.
pub fn classify_bandwidth(bytes: u64, bandwidth: f64, wrong: u64, limit: Option<f64>) -> NcclTrialResult {
    let (verdict, why) = match limit {
        _ if wrong > 0 => (Verdict::Fail, format!("{wrong} wrong sums")),
        None => {
            let text = "no bandwidth limit: the machine type's profile has none, and --expect is not set";
            (Verdict::Inconclusive, text.to_owned())
        }
        Some(limit) if bandwidth < limit * TOLERANCE => {
            let text = format!("less than {:.0} % of {:.1} GB/s", TOLERANCE * 100.0, limit / GB);
            (Verdict::Fail, text)
        }
        Some(limit) => (Verdict::Pass, format!("{:.0} % of {:.1} GB/s or more", TOLERANCE * 100.0, limit / GB)),
    };
    NcclTrialResult {
        bytes: Some(bytes),
        bus_bandwidth_bytes_per_s: Some(bandwidth),
        ..NcclTrialResult::new(verdict, why)
    }
}

fn last_line(text: &str) -> String {
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("---"));
    last.map_or_else(String::new, |line| format!(": {}", line.chars().take(200).collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    const HEAD: &str = "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n";
    const OK: &str = "# Out of bounds values : 0 OK\n";

    fn ended(code: i32) -> ProcessEnd {
        ProcessEnd::Exited(std::process::ExitStatus::from_raw(code << 8))
    }

    fn row(busbw: &str, wrong: &str) -> String {
        format!(
            "  8589934592    2147483648     float     sum      -1    35920  239.14  {busbw}      {wrong}    35915  239.17  418.55      0\n"
        )
    }

    fn classify_output(code: i32, stdout: &str, limit: Option<f64>) -> (Verdict, String) {
        let judged = classify(ended(code), stdout, "", Duration::from_secs(60), limit);
        (judged.verdict, judged.why)
    }

    #[test]
    fn the_bandwidth_of_the_largest_size_is_compared_with_the_limit() {
        let table = format!("{HEAD}{}{}{OK}", row("418.4", "0"), row("419.0", "0"));
        assert_eq!(classify_output(0, &table, Some(431e9)).0, Verdict::Pass);
        assert_eq!(classify_output(0, &table, Some(480e9)).0, Verdict::Fail);
        let (verdict, why) = classify_output(0, &table, None);
        assert!(verdict == Verdict::Inconclusive && why.contains("no bandwidth limit"), "{why}");
        let judged = classify(ended(0), &table, "", Duration::from_secs(60), None);
        assert_eq!((judged.bytes, judged.bus_bandwidth_bytes_per_s), (Some(8 << 30), Some(418.4e9)));
    }

    #[test]
    fn wrong_values_fail_at_any_speed_and_with_any_exit_code() {
        let table = format!("{HEAD}{}# Out of bounds values : 12 FAILED\n", row("500.0", "12"));
        for code in [0, 1] {
            let (verdict, why) = classify_output(code, &table, Some(431e9));
            assert!(verdict == Verdict::Fail && why.contains("12 wrong sums"), "{why}");
        }
    }

    #[test]
    fn an_incomplete_table_is_inconclusive() {
        for (code, text) in [
            (0, String::new()),
            (0, format!("{HEAD}{OK}")),
            (0, format!("{HEAD}{}", row("500.0", "0"))),
            (1, "bash: all_reduce_perf: No such file or directory\n".to_owned()),
            (1, format!("{HEAD}{}{OK}", row("500.0", "0"))),
            (0, format!("{HEAD}{}{OK}", row("500.0", "N/A"))),
        ] {
            assert_eq!(classify_output(code, &text, Some(431e9)).0, Verdict::Inconclusive, "{text}");
        }
        let hung = classify(ProcessEnd::TimedOut, HEAD, "", Duration::from_secs(60), Some(431e9));
        assert_eq!(hung.trial_outcome(), TrialResult::Failed);
        // It is unknown whether any host was contacted.
        let waits = classify(ProcessEnd::TimedOut, "", "Password: ", Duration::from_secs(60), Some(431e9));
        assert_eq!(
            waits.trial_outcome(),
            TrialResult::Inconclusive("mpirun did not start the test within 60 s: Password:".to_owned())
        );
        let broken = "n2: Test NCCL failure all_reduce.cu:44 'remote process exited or there was a network error'\n";
        let judged = classify(ended(3), HEAD, broken, Duration::from_secs(60), None);
        assert!(judged.verdict == Verdict::Fail && judged.why.contains("n2: Test NCCL failure"), "{judged:?}");
    }

    #[test]
    fn the_command_has_a_process_for_each_gpu_and_the_variables_of_the_site_come_last() {
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let environment = environment(true, &[set("NCCL_DEBUG", "INFO"), set("UCX_TLS", ""), set("MINE", "1")]);
        let settings = Settings {
            mpirun: "mpirun".into(),
            program: "/opt/nccl-tests/build/all_reduce_perf".to_owned(),
            gpus: 8,
            min_size: "8G".to_owned(),
            max_size: "8G".to_owned(),
            cycles: 10,
            environment,
            extra_args: vec!["--bind-to".to_owned(), "numa".to_owned()],
            launch_agent: ssh_agent_command(&SshConfig {
                ssh_config: Some("/x/config".into()),
                ..SshConfig::default()
            }),
            limit: Duration::from_secs(600),
            as_root: false,
        };
        let hosts = doctor_core::hostlist::parse("n[1-2]").unwrap();
        let line: Vec<String> =
            mpirun_args(&settings, &hosts).iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let line = line.join(" ");
        for part in [
            "-np 16 --host n1:8,n2:8 --map-by ppr:8:node",
            "-mca plm_rsh_agent ssh -F /x/config -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=5 -x LD_LIBRARY_PATH",
            "-x NCCL_MIN_NCHANNELS=32",
            "-x NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml",
            "-x NCCL_DEBUG=INFO -x MINE=1 --bind-to numa /opt/nccl-tests",
            "all_reduce_perf -g 1 -t 1 -b 8G -e 8G -f 2 -c 1 -N 10 -R 1",
        ] {
            assert!(line.contains(part), "`{part}` is not in {line}");
        }
        assert!(!line.contains("NCCL_DEBUG=WARN") && !line.contains("UCX_TLS"), "{line}");
    }
}
