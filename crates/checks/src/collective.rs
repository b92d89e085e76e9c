//! collective: do the GPUs compute correct all-reduce sums, at full speed, over the intended path?
//!
//! What it does: runs an all-reduce over all GPUs of the node with NCCL (libnccl.so.2, 2.14 or newer, loaded when the
//! test runs; no CUDA toolkit, MPI or Python), from 1 MiB to 16 GiB. The input is chosen so that every sum is exact and
//! never zero. Every GPU compares each element of each size on the GPU, before and after the timed runs. The test
//! evaluates the bus bandwidth of the largest size in bytes per second (460 GB/s is 460e9), as nccl-tests computes it;
//! the time is that of the slowest GPU. It takes about half a minute. The suite `standard` runs it through the network
//! adapters, as the test `collective-loopback`; to run it by hand, use `doctor-node test collective`.
//!
//! There are three modes: `mode = "nvlink"` stays inside the node; `mode = "loopback"` disables all paths inside the
//! node, so that the data leaves through the node's network adapters and comes back; `mode = "nodes"` spans the GPUs of
//! several nodes. NCCL's log shows which path each connection took. If one took another path (sockets instead of
//! InfiniBand, host memory, NVLink in a loopback), no value is reported: the result is inconclusive and names the path.
//!
//! Each run first plants errors in the data to be compared: a zero, a flipped bit, a NaN, the missing share of one
//! rank. If the comparison misses one, the run is inconclusive: a comparison that cannot find errors proves nothing.
//!
//! Then the GPUs exchange messages in a ring: with three or more GPUs, the test names a link that is slower than the
//! others.
//!
//! Why it matters: training waits for its slowest link in every step, and a wrong sum on one of eight GPUs corrupts the
//! result of all of them without a line in any log. Testing each GPU alone finds neither.
//!
//! What to do: `doctor log RUN` shows the table of sizes, the wrong elements and NCCL's log.
//! - `collective-wrong` is `isolate`: sums were wrong. The text names the GPUs, and the rank whose share is missing if
//!   that explains the error. Check `nvlink-errors`, `gpu-xid` and `pcie-aer`; run `dl` to see whether a GPU computes
//!   wrong results on its own.
//! - `gpu-failed` is `reboot`: the driver lost a GPU during the test. Its Xid is in the kernel log.
//! - `collective-hung` is `monitor`, confirmed by a second failure: a message did not complete within `stall`. The test
//!   was stopped.
//! - `collective-slow` is `monitor`, confirmed by a second failure: less than 95 % of the machine profile
//!   (`nccl_busbw_bytes_per_s`, `nccl_ib_loopback_busbw_bytes_per_s`, `nccl_nodes_busbw_bytes_per_s`), less than 93 %
//!   of the median of this node's own last results (not for several nodes, because the other nodes vary), or less than
//!   any such machine reaches. For a single node check `nvlink-state` and `gpu-clocks`; for the network check
//!   `ib-rate`, `ib-counters` and `pcie-link`.
//! - `link-slow` is `monitor`, confirmed by a second failure: in the ring exchange each GPU sends to the next one while
//!   it receives from the previous one, and this link carries less than 70 % of the median of the others. It is the
//!   link that slows the all-reduce.
//! - `collective-named` and `collective-pair` are `monitor`: after a failed multi-node run, trials in pairs show that this
//!   node fails with two good nodes, or that the path between two nodes is at fault.
//! - `no-gpu-direct` is `monitor`: network adapters do not access GPU memory directly; see `peermem`.
//!
//! Not applicable on nodes without an NVIDIA GPU or with only one, where no data would move, and without NCCL
//! (`no-nccl`), which `doctor status` reports once for the fleet. Inconclusive without the driver.
//! Inconclusive (`disturbed`) beside another process that holds 16 MiB of the memory of one of the GPUs, on any of the
//! nodes, or uses 2 % of its time: bandwidths are then not judged, wrong sums fail as usual. If other processes use more
//! than 20 % of the processors, bandwidths below their limits are not judged. The text names process and owner.
//!
//! Parameters, below `[tests.collective.params]` in the policy or by `doctor-node test collective --set NAME=VALUE`:
//! - `mode`, by default `"nvlink"`; `least` and `most`, by default `"1MiB"` and `"16GiB"`: at most a third of free GPU
//!   memory.
//! - `net`, by default `"IB"`, the network's name in NCCL, such as `"AWS Libfabric"`; `hca`, in the format of
//!   `NCCL_IB_HCA`.
//! - `shared_memory = true` for machines whose GPUs have no peer access.
//! - `library`, the path of libnccl, such as the one in a PyTorch wheel; the environment variable DOCTOR_NCCL has the
//!   same effect.
//! - `nccl_tests = ["/opt/nccl-tests/build/all_reduce_perf"]` uses NVIDIA's program instead, for one node; with a
//!   launcher before it (`["mpirun", "-np", "8", "…"]`) each process gets one GPU.
//! - `stall`, by default `"60s"`; `timeout` of the whole test, by default `"10m"`.
//! - For `nodes`: `rank`, `nodes`, `address`, `names` and `secret_file`, where the launcher's environment does not set
//!   them, and `gather`, by default `"2m"`, how long the nodes wait for each other. The guide has examples for
//!   Kubernetes, Slurm and SSH.

use doctor_core::{
    access::Access,
    observation::{CodedReason, Event, FailureKind, Observation, ProbeFailure},
    reason::ReasonCode,
    software::Software,
    time::Span,
};

use crate::{
    collective_params::{CollectiveParams, GPU_COUNT_METRIC, Job, Mode},
    gpu::not_applicable_without_gpu,
    measurements::interpret_measurements,
    probe::{Probe, ProbeOutput},
    check_params,
    software::not_applicable_without,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec =
    Spec::deep("collective", "NCCL all-reduce: correct sums and bandwidth", Span::from_secs(40), Span::minutes(20))
        .opt_in()
        .access(&[Access::Gpu, Access::Rdma]);

macro_rules! rules {
    ($($metric:literal $label:literal floor $floor:literal $(own $own:literal)? $(of $all:literal)?,)*) => {
        concat!(r#"
rules = [
  { id = "collective-wrong", check = "collective", event = "collective-wrong", reason = "collective-wrong",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "collective-gpu-failed", check = "collective", event = "gpu-failed", reason = "gpu-failed",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "collective-hung", check = "collective", event = "collective-hung", reason = "collective-hung",
    severity = "monitor", confirm = 2, of_all = true, text = "{value}" },
  { id = "collective-named", check = "collective", event = "named-by-trials", reason = "collective-named",
    severity = "monitor", text = "{value}" },
  { id = "collective-pair", check = "collective", event = "pair-by-trials", reason = "collective-pair",
    severity = "monitor", text = "{value}" },
  { id = "collective-no-gpu-direct", check = "collective", metric = "nccl_without_gpu_direct", above = 0.0,
    where_measured = true, reason = "no-gpu-direct", severity = "monitor",
    text = "{value} connections are staged through host memory (no GPUDirect RDMA)" },
  { id = "collective-link-slow", check = "collective", metric = "nccl_link_percent_of_median", below = 70.0,
    where_measured = true, of_all = true, reason = "link-slow", severity = "monitor", confirm = 2,
    text = "{entity}: {value} % of the other links' median bandwidth, expected at least {limit} %" },
"#, $(
            "  { id = \"collective-", $metric, "-floor\", check = \"collective\", metric = \"", $metric, "\", below = ", $floor,
            ", where_measured = true,", $(" of_", $all, " = true,",)?
            "\n    reason = \"collective-slow\", severity = \"monitor\", confirm = 2,\n    text = \"",
            $label, " {value}B/s, expected at least {limit}B/s on any machine\" },\n",
            "  { id = \"collective-", $metric, "-profile\", check = \"collective\", metric = \"", $metric,
            "\", below_percent_of_profile = 95.0, where_measured = true,", $(" of_", $all, " = true,",)?
            "\n    reason = \"collective-slow\", ",
            "severity = \"monitor\", confirm = 2,\n    text = \"", $label,
            " {value}B/s, expected at least {limit}B/s (95 % of this machine type's profile)\" },\n",
            $("  { id = \"collective-", $metric, "-own\", check = \"collective\", metric = \"", $metric,
            "\", below_percent_of_own = ", $own, ", where_measured = true,\n    reason = \"collective-slow\", ",
            "severity = \"monitor\", confirm = 2,\n    text = \"", $label,
            " {value}B/s, expected at least {limit}B/s (93 % of this node's median)\" },\n",)?
        )* "]\n")
    };
}

const RULES: &str = rules![
    "nccl_busbw_bytes_per_s" "NCCL bus bandwidth" floor "1e9" own "93.0",
    "nccl_ib_loopback_busbw_bytes_per_s" "NCCL loopback bus bandwidth" floor "5e8" own "93.0",
    "nccl_nodes_busbw_bytes_per_s" "NCCL bus bandwidth across nodes" floor "5e8" of "all",
];

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("collective.rs")), rules: RULES, probes, interpret };

const DEFAULT_MIN_BYTES: u64 = 1 << 20;
const DEFAULT_MAX_BYTES: u64 = 16 << 30;
const DEFAULT_GATHER: Span = Span::minutes(2);
const DEFAULT_STALL: Span = Span::from_secs(60);
const DEFAULT_TIMEOUT: Span = Span::minutes(10);
/// Time to kill what hangs and to write the report.
const TEST_OVERHEAD: Span = Span::from_secs(30);

const KNOWN_PARAMS: [(&str, &str); 16] = [
    ("mode", "mode = \"loopback\""),
    ("least", "least = \"1MiB\""),
    ("most", "most = \"16GiB\""),
    ("net", "net = \"IB\""),
    ("hca", "hca = \"mlx5_0,mlx5_1\""),
    ("shared_memory", "shared_memory = true"),
    ("library", "library = \"/usr/lib/libnccl.so.2\""),
    ("nccl_tests", "nccl_tests = [\"/opt/nccl-tests/build/all_reduce_perf\"]"),
    ("rank", "rank = 0"),
    ("nodes", "nodes = 4"),
    ("address", "address = \"node01:29481\""),
    ("names", "names = \"node[01-04]\""),
    ("secret_file", "secret_file = \"/run/secrets/rendezvous\""),
    ("gather", "gather = \"2m\""),
    ("stall", "stall = \"60s\""),
    ("timeout", "timeout = \"10m\""),
];

fn example(name: &str) -> &'static str {
    KNOWN_PARAMS.iter().find(|(known, _)| *known == name).map_or("", |(_, example)| *example)
}

fn test_params(params: &Params) -> Result<CollectiveParams, Observation> {
    if let Some(unknown) = params.keys().find(|name| example(name).is_empty()) {
        let known: Vec<_> = KNOWN_PARAMS.iter().map(|(_, example)| *example).collect();
        return Err(check_params::invalid_param(unknown, &known.join("`, `")));
    }
    let word = |name| check_params::string(params, name, example(name));
    let span = |name, default| Ok::<_, Observation>(check_params::duration(params, name, example(name))?.unwrap_or(default));
    let bytes = |name, default| Ok::<_, Observation>(check_params::bytes(params, name, example(name))?.unwrap_or(default));
    let mode = match word("mode")? {
        Some(code) => Mode::from_code(&code)
            .ok_or_else(|| check_params::invalid_param("mode", "mode = \"nvlink\"`, `mode = \"loopback\"`, `mode = \"nodes\""))?,
        None => Mode::Nvlink,
    };
    let nccl_tests = check_params::string_list(params, "nccl_tests", example("nccl_tests"))?.unwrap_or_default();
    if mode == Mode::Nodes && !nccl_tests.is_empty() {
        let text = "`nccl_tests` runs on one node; remove it, or `mode = \"nodes\"`";
        return Err(Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, text)));
    }
    let order = CollectiveParams {
        mode,
        least: bytes("least", DEFAULT_MIN_BYTES)?,
        most: bytes("most", DEFAULT_MAX_BYTES)?,
        net: word("net")?.unwrap_or_else(|| "IB".to_owned()),
        hca: word("hca")?,
        shared_memory: check_params::flag(params, "shared_memory", example("shared_memory"))?.unwrap_or(false),
        library: word("library")?,
        nccl_tests,
        job: job_params(params)?,
        gather: span("gather", DEFAULT_GATHER)?,
        stall: span("stall", DEFAULT_STALL)?,
        timeout: span("timeout", DEFAULT_TIMEOUT)?,
    };
    if order.least > order.most {
        return Err(check_params::invalid_param("least", "least = \"1MiB\"` with a larger `most = \"16GiB\""));
    }
    Ok(order)
}

fn job_params(params: &Params) -> Result<Job, Observation> {
    let integer = |name, least: f64| {
        let number = check_params::number(params, name, example(name))?;
        let fits = |number: &f64| *number >= least && number.fract() == 0.0 && *number < 1e6;
        match number {
            Some(number) if fits(&number) => Ok(Some(number as u32)),
            Some(_) => Err(check_params::invalid_param(name, example(name))),
            None => Ok(None),
        }
    };
    let word = |name| check_params::string(params, name, example(name));
    Ok(Job {
        rank: integer("rank", 0.0)?,
        nodes: integer("nodes", 1.0)?,
        address: word("address")?,
        names: word("names")?,
        secret_file: word("secret_file")?,
    })
}

fn probes(params: &Params) -> Vec<Probe> {
    let Ok(order) = test_params(params) else { return Vec::new() };
    let Ok(written) = serde_json::to_string(&order) else { return Vec::new() };
    // The test enforces its own timeout. This one applies only if the test does not return even after killing what
    // hangs.
    let timeout = Span::from_millis(order.timeout.millis() + TEST_OVERHEAD.millis());
    vec![Probe::gpu(&["uuid"]), Probe::Builtin { test: SPEC.id.to_owned(), args: vec![written], timeout }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let order = match test_params(params) {
        Ok(order) => order,
        Err(instead) => return instead,
    };
    let measured = interpret_measurements(params, outputs.get(1..).unwrap_or_default());
    let observation = not_applicable_without(Software::Nccl, not_applicable_without_gpu(outputs.first(), measured));
    match &observation {
        Observation::Measured { metrics, events, failures: unread }
            if events.iter().all(Event::is_disturbance) && unread.is_empty() =>
        {
            let alone = metrics.iter().any(|metric| metric.name == GPU_COUNT_METRIC && metric.value == 1.0);
            let figure = metrics.iter().any(|metric| metric.name == order.mode.metric());
            match (figure, alone) {
                (true, _) => observation,
                (false, true) => Observation::NotApplicable(CodedReason {
                    code: ReasonCode::fixed("one-gpu"),
                    text: "the node has one GPU; an all-reduce needs at least two".to_owned(),
                }),
                (false, false) => {
                    let text = format!("the test ended without a value for {}", order.mode.metric());
                    Observation::Failed(ProbeFailure::new(FailureKind::Empty, text))
                }
            }
        }
        _ => observation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        document::Measurements,
        classify_fixture::classify_outputs_with,
        gpu::tests::{answer, none},
        profiles,
    };
    use doctor_core::{
        ids::Sku,
        observation::{Entity, EntityKind, Metric, Unit},
        profile::Profile,
    };

    fn params(text: &str) -> Params {
        toml::from_str(text).unwrap()
    }

    fn measured(mode: Mode, gigabytes: f64, events: Vec<Event>) -> ProbeOutput {
        let node = || Entity::node();
        let metrics = vec![
            Metric::count(GPU_COUNT_METRIC, node(), 8.0),
            Metric::new(mode.metric(), node(), gigabytes * 1e9, Unit::BytesPerSecond),
        ];
        written(&Measurements { metrics, events, failures: Vec::new() })
    }

    fn written(measurements: &Measurements) -> ProbeOutput {
        ProbeOutput::Text(serde_json::to_string(measurements).unwrap())
    }

    fn judged(text: &str, profile: Option<&Profile>, output: ProbeOutput) -> Vec<String> {
        classify_outputs_with(&CHECK, &params(text), profile, &[answer(&[&[], &[]]), output])
    }

    #[test]
    fn right_sums_pass_without_a_profile_and_slow_ones_fail_with_one() {
        assert_eq!(judged("", None, measured(Mode::Nvlink, 300.0, Vec::new())), ["pass within-limits"]);
        let h100 = profiles::built_in().profile(&Sku::new("hgx-h100").unwrap()).unwrap();
        let slow = judged("", Some(&h100), measured(Mode::Nvlink, 300.0, Vec::new()));
        assert_eq!(slow, ["fail collective-slow monitor node"]);
        assert_eq!(judged("", Some(&h100), measured(Mode::Nvlink, 475.0, Vec::new())), ["pass within-limits"]);
        let crawling = judged("mode = 'loopback'", None, measured(Mode::Loopback, 0.2, Vec::new()));
        assert_eq!(crawling, ["fail collective-slow monitor node"]);
    }

    #[test]
    fn every_event_has_its_finding() {
        for (code, severity) in [("collective-wrong", "isolate"), ("gpu-failed", "reboot"), ("collective-hung", "monitor")] {
            let event = vec![Event::seen(code, Entity::new(EntityKind::Gpu, "0000:18:00.0"), "what was seen")];
            let findings = judged("", None, measured(Mode::Nvlink, 475.0, event));
            assert_eq!(findings, [format!("fail {code} {severity} gpu:0000:18:00.0")]);
        }
    }

    #[test]
    fn a_loaded_host_excuses_a_low_bandwidth_and_not_a_missing_one() {
        let busy = || vec![Event::disturbed(Entity::node(), "make of uid 0", "other processes use 80 % of the processors")];
        assert_eq!(judged("", None, measured(Mode::Nvlink, 0.2, busy())), ["inconclusive disturbed"]);
        assert_eq!(judged("", None, measured(Mode::Nvlink, 300.0, busy())), ["pass within-limits"]);
        let none = Measurements { metrics: vec![Metric::count(GPU_COUNT_METRIC, Entity::node(), 8.0)], events: busy(), failures: Vec::new() };
        assert_eq!(judged("", None, written(&none)), ["inconclusive empty"]);
    }

    #[test]
    fn a_single_gpu_is_not_applicable_and_a_missing_bandwidth_does_not_pass() {
        let gpus = |count| written(&Measurements {
            metrics: vec![Metric::count(GPU_COUNT_METRIC, Entity::node(), count)],
            ..Measurements::default()
        });
        assert_eq!(judged("", None, gpus(1.0)), ["not-applicable one-gpu"]);
        assert_eq!(judged("", None, gpus(8.0)), ["inconclusive empty"]);
        // The bandwidth of a mode other than the configured one does not count.
        assert_eq!(judged("mode = 'loopback'", None, measured(Mode::Nvlink, 475.0, Vec::new())), ["inconclusive empty"]);
    }

    #[test]
    fn without_nccl_or_a_gpu_it_is_not_applicable_and_without_the_driver_inconclusive() {
        let failed = |kind| ProbeOutput::Failed(ProbeFailure::new(kind, "it cannot be loaded"));
        assert_eq!(judged("", None, failed(FailureKind::NotInstalled)), ["not-applicable no-nccl"]);
        assert_eq!(judged("", None, failed(FailureKind::Missing)), ["inconclusive missing"]);
        let without = [none(), failed(FailureKind::Missing)];
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &without), ["not-applicable no-gpu"]);
    }

    #[test]
    fn parameters_reach_the_test_and_invalid_ones_are_reported() {
        let set = "mode = 'nodes'\nrank = 3\nnodes = 4\naddress = 'n1:29481'\nmost = '1GiB'\nnet = 'AWS Libfabric'";
        let [_, Probe::Builtin { args, timeout, .. }] = &probes(&params(set))[..] else { panic!("one test") };
        let order: CollectiveParams = serde_json::from_str(&args[0]).unwrap();
        assert_eq!((order.mode, order.job.rank, order.job.nodes, order.most), (Mode::Nodes, Some(3), Some(4), 1 << 30));
        assert!(*timeout > order.timeout, "the test ends before the probe's timeout");
        for wrong in [
            "mode = 'fast'",
            "mode = 3",
            "least = '2GiB'\nmost = '1GiB'",
            "rank = -1",
            "rank = 0.5",
            "nodes = 0",
            "nccl_tests = '/bin/all_reduce_perf'",
            "mode = 'nodes'\nnccl_tests = ['all_reduce_perf']",
            "stall = '0s'",
            "speed = 'high'",
        ] {
            let answer = judged(wrong, None, measured(Mode::Nvlink, 475.0, Vec::new()));
            assert_eq!(answer, ["inconclusive unparseable"], "{wrong}");
            assert!(probes(&params(wrong)).is_empty(), "{wrong}");
        }
    }
}
