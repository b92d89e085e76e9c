//! dl: do the GPUs compute correct results at full speed, also when warm?
//!
//! What it does: tests all GPUs at the same time with its own kernels, which need NVIDIA's driver (525 or newer) and no
//! CUDA toolkit: patterns over all free memory; matrix products in bf16, fp16, tf32, fp32, int8 and, on Hopper, fp8,
//! with every number checked against known sums; deep-learning layers forward and backward, compared bit for bit on
//! every multiprocessor and against formulas in double precision; copies to and from the host, within the GPU and
//! between GPUs, with the received data compared; then load until the temperature is stable. It takes about 4 s cold
//! and 15 to 25 s warm. It runs when it is named (`doctor-node test dl`), and with the suites that include it
//! (`doctor explain suites`).
//!
//! Each run first plants errors in the GPU's memory: a lost value, a flipped bit, a NaN, and one that is the same in
//! every repeat. If the comparison misses one, the run is inconclusive: a comparison that cannot find errors proves
//! nothing.
//!
//! Why it matters: a GPU that computes wrong results corrupts a training run without a line in any log. One in a
//! thousand does, and some only when they are warm.
//!
//! What to do: `doctor log RUN` shows the location: the address and the bits, or the row, the column and the
//! multiprocessor.
//! - `memory-wrong` is `isolate`: a word differs from what was written although ECC found no error. Replace the GPU.
//! - `product-wrong` and `layer-wrong` are `isolate`: a unit computes wrong results. The same multiprocessor in several
//!   runs indicates a defect of that unit; keep the log for the vendor and replace the GPU.
//! - `copy-wrong` is `isolate`: data changed on PCIe or NVLink. Check `gpu-pcie-replay`, `pcie-aer` and
//!   `nvlink-errors`.
//! - `gpu-failed` is `reboot`: the driver lost the GPU during the test. Its Xid is in the kernel log.
//! - `multiprocessor-slow` is `monitor`, confirmed by a second failure: one takes 15 % longer than the others.
//! - `multiprocessor-missed` is `monitor`: multiprocessors did not run every layer.
//! - `gpu-very-slow` is `reboot`, confirmed by a second failure: a rate below a third of the peak that the chip's vendor
//!   publishes (`peak_…` in the profile). Look for a stuck power limit or clock (`gpu-clocks`, `gpu-power-limit`) and a
//!   PCIe or NVLink that trained with fewer lanes. If a reboot does not cure it, replace the GPU.
//! - `gpu-slow` is `monitor`, confirmed by a second failure: a rate below 93 % of a measured figure in the profile, below
//!   half of the chip's published peak, below 93 % of the median of this node's own last results (at least five), or
//!   below what the smallest such GPU reaches. `doctor-node profile learn --test dl` on a healthy node gives a chip
//!   without measured figures tighter limits than its published peak does.
//! - `gpu-hot` is `monitor`, confirmed by a second failure: thermal slowdown or the power brake was active during more
//!   than a tenth of the load. Check fans, filters and power supplies.
//! - `memory-not-tested` is `monitor`: less than 98 % of the free memory could be allocated.
//!
//! Not applicable where there is no NVIDIA GPU (`no-gpu`), and where all are older than the kernels (`gpu-unsupported`:
//! compute capability below 8.0, such as a V100; DCGM tests these). Inconclusive without the driver, and beside another
//! process (`disturbed`). The test looks for other processes on its GPUs before it starts and every second: one that
//! holds 16 MiB of a GPU's memory or uses 2 % of its time is a disturbance, named with its owner. The rates of that GPU are then not judged; wrong values fail as usual.
//! Monitoring, which holds no GPU memory and uses less than 2 %, does not matter. If other processes use more than 20 %
//! of the processors, rates below their limits are not judged. The same program three times in a row is the finding
//! `disturbed-repeatedly`, `monitor`.
//!
//! Parameters: `heat`, how long the load may last, by default `"20s"`, `"0s"` for the cold test alone; `inject`, one of
//! `"zero"`, `"bit-flip"`, `"not-a-number"` or `"repeated"`, plants such an error in every product to try out the
//! consequences; `trials = 10000` plants that many errors of each kind after the test and counts those that are found.

use doctor_core::{access::Access, observation::{FailureKind, Observation}, time::Span};

use crate::{
    gpu::{not_applicable, not_applicable_without_gpu},
    measurements::interpret_measurements,
    probe::{Probe, ProbeOutput},
    check_params::{number, invalid_param, string},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec =
    Spec::deep("dl", "GPU arithmetic, memory and copies: correct and fast", Span::from_secs(30), Span::minutes(15))
        .opt_in()
        .access(&[Access::Gpu]);

macro_rules! rules {
    ($($rate:literal $label:literal $unit:literal floor $floor:literal peak $peak:literal,)*) => {
        concat!(r#"
rules = [
  { id = "dl-memory-wrong", check = "dl", event = "memory-wrong", reason = "memory-wrong", severity = "isolate", text = "{entity}: {value}" },
  { id = "dl-product-wrong", check = "dl", event = "product-wrong", reason = "product-wrong", severity = "isolate", text = "{entity}: {value}" },
  { id = "dl-layer-wrong", check = "dl", event = "layer-wrong", reason = "layer-wrong", severity = "isolate", text = "{entity}: {value}" },
  { id = "dl-copy-wrong", check = "dl", event = "copy-wrong", reason = "copy-wrong", severity = "isolate", text = "{entity}: {value}" },
  { id = "dl-gpu-failed", check = "dl", event = "gpu-failed", reason = "gpu-failed", severity = "reboot", text = "{entity}: {value}" },
  { id = "dl-multiprocessor-slow", check = "dl", event = "multiprocessor-slow", reason = "multiprocessor-slow",
    severity = "monitor", confirm = 2, text = "{entity}: {value}" },
  { id = "dl-memory-tested", check = "dl", metric = "memory_tested_percent", below = 98.0, reason = "memory-not-tested",
    severity = "monitor", text = "{entity}: {value} % of the free memory tested, expected at least {limit} %" },
  { id = "dl-layers-missed", check = "dl", metric = "layers_multiprocessors_missed", above = 0.0, reason = "multiprocessor-missed",
    severity = "monitor", text = "{entity}: {value} multiprocessors (SMs) did not run every layer" },
  { id = "dl-slowed", check = "dl", metric = "load_slowed_percent", above = 10.0, reason = "gpu-hot", severity = "monitor",
    where_measured = true, confirm = 2, text = "{entity}: hardware slowdown during {value} % of the load, limit {limit} %" },
"#, $(
            "  { id = \"dl-", $rate, "-floor\", check = \"dl\", metric = \"", $rate, "\", below = ", $floor,
            ", where_measured = true, backstop = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2, text = \"{entity}: ", $label,
            " {value}", $unit, ", expected at least {limit}", $unit, " on any GPU\" },\n",
            "  { id = \"dl-", $rate, "-profile\", check = \"dl\", metric = \"", $rate, "\", below_percent_of_profile = 93.0,",
            " where_measured = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2, text = \"{entity}: ", $label,
            " {value}", $unit, ", expected at least {limit}", $unit, " (93 % of this machine type's profile)\" },\n",
            "  { id = \"dl-", $rate, "-third-of-peak\", check = \"dl\", metric = \"", $rate, "\", below_percent_of_profile = 33.3,",
            " profile_metric = \"", $peak, "\", where_measured = true,\n    reason = \"gpu-very-slow\", severity = \"reboot\", confirm = 2,",
            " text = \"{entity}: ", $label, " {value}", $unit, ", expected at least {limit}", $unit, " (a third of the chip's peak)\" },\n",
            "  { id = \"dl-", $rate, "-half-of-peak\", check = \"dl\", metric = \"", $rate, "\", below_percent_of_profile = 50.0,",
            " profile_metric = \"", $peak, "\", where_measured = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2,",
            " text = \"{entity}: ", $label, " {value}", $unit, ", expected at least {limit}", $unit, " (half of the chip's peak)\" },\n",
            "  { id = \"dl-", $rate, "-own\", check = \"dl\", metric = \"", $rate, "\", below_percent_of_own = 93.0,",
            " where_measured = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2, text = \"{entity}: ", $label,
            " {value}", $unit, ", expected at least {limit}", $unit, " (93 % of its past median)\" },\n",
        )* "]\n")
    };
}

// The floors are well below the smallest GPU that the kernels support: a GPU below them is broken, whatever its model.
const RULES: &str = rules![
    "gemm_bf16_flop_per_s" "matrix product bf16" "flop/s" floor "1e13" peak "peak_gemm_bf16_flop_per_s",
    "gemm_bf16_warm_flop_per_s" "matrix product bf16, warm," "flop/s" floor "1e13" peak "peak_gemm_bf16_flop_per_s",
    "gemm_fp16_flop_per_s" "matrix product fp16" "flop/s" floor "1e13" peak "peak_gemm_fp16_flop_per_s",
    "gemm_tf32_flop_per_s" "matrix product tf32" "flop/s" floor "5e12" peak "peak_gemm_tf32_flop_per_s",
    "gemm_fp32_flop_per_s" "matrix product fp32" "flop/s" floor "2e12" peak "peak_gemm_fp32_flop_per_s",
    "gemm_fp8_flop_per_s" "matrix product fp8" "flop/s" floor "1e14" peak "peak_gemm_fp8_flop_per_s",
    "gemm_int8_flop_per_s" "matrix product int8" "op/s" floor "1e13" peak "peak_gemm_int8_flop_per_s",
    "memory_bytes_per_s" "memory test" "B/s" floor "1e11" peak "peak_memory_bytes_per_s",
    "h2d_bytes_per_s" "copy from host to GPU" "B/s" floor "2e9" peak "peak_host_copy_bytes_per_s",
    "d2h_bytes_per_s" "copy from GPU to host" "B/s" floor "2e9" peak "peak_host_copy_bytes_per_s",
    "d2d_bytes_per_s" "copy within the GPU" "B/s" floor "1e11" peak "peak_memory_bytes_per_s",
    "p2p_bytes_per_s" "copy between GPUs" "B/s" floor "1e9" peak "peak_p2p_bytes_per_s",
];

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("dl.rs")), rules: RULES, probes, interpret };

const DEFAULT_LOAD_TIME: Span = Span::from_secs(20);

/// Time besides the load: opening eight GPUs without persistence mode takes the longest.
const TIMEOUT: Span = Span::minutes(5);

struct DlParams {
    heat: Span,
    inject: Option<String>,
    trials: u64,
}

fn test_params(params: &Params) -> Result<DlParams, Observation> {
    let example = "heat = \"20s\"";
    let heat = match string(params, "heat", example)? {
        Some(text) => text.parse().map_err(|_| invalid_param("heat", example))?,
        None => DEFAULT_LOAD_TIME,
    };
    let trials = match number(params, "trials", "trials = 10000")? {
        Some(count) if count >= 0.0 && count.fract() == 0.0 && count <= 1e7 => count as u64,
        Some(_) => return Err(invalid_param("trials", "trials = 10000")),
        None => 0,
    };
    Ok(DlParams { heat, inject: string(params, "inject", "inject = \"bit-flip\"")?, trials })
}

fn probes(params: &Params) -> Vec<Probe> {
    let Ok(DlParams { heat, inject, trials }) = test_params(params) else { return Vec::new() };
    let mut args = vec![format!("--heat={heat}")];
    args.extend(inject.map(|kind| format!("--inject={kind}")));
    if trials > 0 {
        args.push(format!("--trials={trials}"));
    }
    vec![Probe::gpu(&["uuid"]), Probe::Builtin { test: "dl".to_owned(), args, timeout: TIMEOUT + heat }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    match test_params(params) {
        Err(instead) => instead,
        Ok(_) => {
            let measured = interpret_measurements(params, outputs.get(1..).unwrap_or_default());
            not_applicable_without_gpu(outputs.first(), unless_unsupported(measured))
        }
    }
}

/// Returns "not applicable" if none of the GPUs is of a kind that the test supports.
fn unless_unsupported(observation: Observation) -> Observation {
    match observation {
        Observation::Failed(failure) if failure.kind == FailureKind::Unsupported => {
            not_applicable("gpu-unsupported", failure.text)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        classify_fixture::{self, classify_outputs_with},
        disturbance::{Disturbance, RatesOf, apply},
        document::Measurements,
        gpu::tests::{answer, none},
        profiles,
    };
    use doctor_core::{
        ids::Sku,
        observation::{Entity, EntityKind, Event, Metric, ProbeFailure, Unit},
    };

    fn classify_outputs(check: &Check, outputs: &[ProbeOutput]) -> Vec<String> {
        classify_fixture::classify_outputs(check, &[&[answer(&[&[]])], outputs].concat())
    }

    fn measured(metrics: &str, events: &str) -> ProbeOutput {
        ProbeOutput::Text(format!(r#"{{"metrics":[{metrics}],"events":[{events}]}}"#))
    }

    const TESTED: &str = concat!(
        r#"{"name":"memory_tested_percent","entity":"gpu:0000:1b:00.0","value":99.9,"unit":"percent"},"#,
        r#"{"name":"layers_multiprocessors_missed","entity":"gpu:0000:1b:00.0","value":0,"unit":"count"}"#
    );

    #[test]
    fn a_gpu_with_correct_results_passes_without_a_profile() {
        assert_eq!(classify_outputs(&CHECK, &[measured(TESTED, "")]), ["pass within-limits"]);
    }

    #[test]
    fn a_rate_below_that_of_any_gpu_is_slow_without_a_profile() {
        let slow = r#",{"name":"gemm_bf16_flop_per_s","entity":"gpu:0000:1b:00.0","value":3e12,"unit":"flop/s"}"#;
        let findings = classify_outputs(&CHECK, &[measured(&format!("{TESTED}{slow}"), "")]);
        assert_eq!(findings, ["fail gpu-slow monitor gpu:0000:1b:00.0"]);
    }

    /// Classifies one rate of a GPU of this machine type or chip.
    fn rate(profile: &str, name: &str, value: f64) -> Vec<String> {
        let profile = profiles::built_in().profile(&Sku::new(profile).unwrap()).unwrap();
        let rate = format!(r#",{{"name":"{name}","entity":"gpu:0000:1b:00.0","value":{value:e},"unit":"flop/s"}}"#);
        let output = measured(&format!("{TESTED}{rate}"), "");
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &[answer(&[&[]]), output])
    }

    const VERY_SLOW: &str = "fail gpu-very-slow reboot gpu:0000:1b:00.0";
    const SLOW: &str = "fail gpu-slow monitor gpu:0000:1b:00.0";

    #[test]
    fn from_a_published_peak_alone_a_third_fails_and_a_half_is_monitored() {
        let bf16 = "gemm_bf16_flop_per_s";
        for (machine, peak) in [("p5.48xlarge", 989.5e12), ("h100-sxm", 989.5e12), ("nc24ads_a100_v4", 312e12)] {
            assert_eq!(rate(machine, bf16, peak * 0.32), [VERY_SLOW, SLOW], "{machine}");
            assert_eq!(rate(machine, bf16, peak * 0.45), [SLOW], "{machine}");
            assert_eq!(rate(machine, bf16, peak * 0.52), ["pass within-limits"], "{machine}");
        }
        assert_eq!(rate("l40s", "d2d_bytes_per_s", 0.3 * 864e9), [VERY_SLOW, SLOW]);
        assert_eq!(rate("hgx-b200", "p2p_bytes_per_s", 0.4 * 900e9), [SLOW]);
    }

    #[test]
    fn from_a_derived_peak_everything_is_only_monitored() {
        let very_slow = "fail gpu-very-slow monitor gpu:0000:1b:00.0";
        assert_eq!(rate("b200", "h2d_bytes_per_s", 20e9), [SLOW, very_slow]);
    }

    #[test]
    fn a_measured_figure_gives_a_tighter_limit_than_the_peak() {
        assert_eq!(rate("h200-sxm", "gemm_bf16_flop_per_s", 650e12), [SLOW]);
        assert_eq!(rate("h200-sxm", "gemm_bf16_flop_per_s", 670e12), ["pass within-limits"]);
        // A real H200 of which another process used more than half.
        assert_eq!(rate("h200-sxm", "gemm_bf16_flop_per_s", 0.44 * 726e12), [VERY_SLOW, SLOW, SLOW]);
    }

    #[test]
    fn a_peak_that_the_profile_does_not_have_decides_nothing() {
        for (machine, name) in [("b300", "gemm_bf16_flop_per_s"), ("l4", "h2d_bytes_per_s"), ("h100-sxm", "p2p_bytes_per_s")] {
            let value = if name.starts_with("gemm") { 4e13 } else { 4e9 };
            assert_eq!(rate(machine, name, value), ["pass partly-judged"], "{machine}");
        }
    }

    #[test]
    fn a_single_wrong_value_isolates_the_node() {
        let event = r#"{"code":"product-wrong","entity":"gpu:0000:1b:00.0","at":null,"text":"bf16: row 3, column 5"}"#;
        assert_eq!(classify_outputs(&CHECK, &[measured(TESTED, event)]), ["fail product-wrong isolate gpu:0000:1b:00.0"]);
    }

    #[test]
    fn rates_beside_another_process_judge_nothing_and_a_wrong_value_fails() {
        let judge = |events: Vec<Event>| {
            let gpu = || Entity::new(EntityKind::Gpu, "0000:1b:00.0");
            let rate = Metric::new("gemm_bf16_flop_per_s", gpu(), 3e12, Unit::FlopPerSecond);
            let tested = Metric::new("memory_tested_percent", gpu(), 40.0, Unit::Percent);
            let mut all = Measurements { metrics: vec![rate, tested], events, failures: Vec::new() };
            let (disturber, by, text) = ("python3 of uid 1000".into(), "python3 (pid 7, user ann)".into(), String::new());
            apply(&mut all, &[Disturbance { entity: gpu(), disturber, by, text }], RatesOf::EachGpu);
            classify_outputs(&CHECK, &[ProbeOutput::Text(serde_json::to_string(&all).unwrap())])
        };
        assert_eq!(judge(Vec::new()), ["inconclusive disturbed"]);
        let gpu = || Entity::new(EntityKind::Gpu, "0000:1b:00.0");
        assert_eq!(judge(vec![Event::seen("multiprocessor-slow", gpu(), "SM 3")]), ["inconclusive disturbed"]);
        assert_eq!(judge(vec![Event::seen("product-wrong", gpu(), "row 3")]), ["fail product-wrong isolate gpu:0000:1b:00.0"]);
    }

    #[test]
    fn a_missing_driver_is_inconclusive_and_a_machine_without_a_gpu_not_applicable() {
        let missing = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "libcuda.so.1 cannot be loaded"));
        assert_eq!(classify_outputs(&CHECK, &[missing()]), ["inconclusive missing"]);
        assert_eq!(classify_fixture::classify_outputs(&CHECK, &[none(), missing()]), ["not-applicable no-gpu"]);
    }

    #[test]
    fn not_applicable_where_every_gpu_is_older_than_the_kernels() {
        let old = || ProbeFailure::new(FailureKind::Unsupported, "gpu:0000:1b:00.0: compute capability 7.0");
        let judge = |measured: &Measurements| {
            classify_outputs(&CHECK, &[ProbeOutput::Text(serde_json::to_string(measured).unwrap())])
        };
        let all_old = Measurements { failures: vec![old(), old()], ..Measurements::default() };
        assert_eq!(judge(&all_old), ["not-applicable gpu-unsupported"]);
        let wrong = Event::seen("product-wrong", Entity::new(EntityKind::Gpu, "0000:3b:00.0"), "row 3");
        let mixed = Measurements { failures: vec![old()], events: vec![wrong], ..Measurements::default() };
        assert_eq!(judge(&mixed)[0], "fail product-wrong isolate gpu:0000:3b:00.0");
    }

    #[test]
    fn parameters_reach_the_test_and_invalid_ones_are_reported() {
        let params: Params = toml::from_str("heat = '1m'\ninject = 'not-a-number'\ntrials = 5").unwrap();
        let [_, Probe::Builtin { args, timeout, .. }] = &probes(&params)[..] else { panic!("one test") };
        assert_eq!(args.join(" "), "--heat=1m --inject=not-a-number --trials=5");
        assert_eq!(*timeout, Span::minutes(6));
        for wrong in ["heat = 5", "heat = 'long'", "trials = -1", "trials = 0.5", "inject = 3"] {
            let params: Params = toml::from_str(wrong).unwrap();
            assert!(matches!(interpret(&params, &[]), Observation::Failed(_)), "{wrong}");
        }
    }
}
