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
//! - `gpu-slow` is `monitor`, confirmed by a second failure: a rate below 93 % of the machine profile, below 93 % of
//!   the median of this node's own last results (at least five), or below what the smallest such GPU reaches.
//! - `gpu-hot` is `monitor`, confirmed by a second failure: thermal slowdown or the power brake was active during more
//!   than a tenth of the load. Check fans, filters and power supplies.
//! - `memory-not-tested` is `monitor`: less than 98 % of the free memory could be allocated.
//!
//! Inconclusive without a GPU or its driver.
//!
//! Parameters: `heat`, how long the load may last, by default `"20s"`, `"0s"` for the cold test alone; `inject`, one of
//! `"zero"`, `"bit-flip"`, `"not-a-number"` or `"repeated"`, plants such an error in every product to try out the
//! consequences; `trials = 10000` plants that many errors of each kind after the test and counts those that are found.

use doctor_core::{observation::Observation, time::Span};

use crate::{
    measurements::interpret_measurements,
    probe::{Probe, ProbeOutput},
    check_params::{number, invalid_param, string},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec =
    Spec::deep("dl", "GPU arithmetic, memory and copies: correct and fast", Span::from_secs(30), Span::minutes(15)).opt_in();

macro_rules! rules {
    ($($rate:literal $label:literal $unit:literal floor $floor:literal,)*) => {
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
            ", where_measured = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2, text = \"{entity}: ", $label,
            " {value}", $unit, ", expected at least {limit}", $unit, " on any GPU\" },\n",
            "  { id = \"dl-", $rate, "-profile\", check = \"dl\", metric = \"", $rate, "\", below_percent_of_profile = 93.0,",
            " where_measured = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2, text = \"{entity}: ", $label,
            " {value}", $unit, ", expected at least {limit}", $unit, " (93 % of this machine type's profile)\" },\n",
            "  { id = \"dl-", $rate, "-own\", check = \"dl\", metric = \"", $rate, "\", below_percent_of_own = 93.0,",
            " where_measured = true,\n    reason = \"gpu-slow\", severity = \"monitor\", confirm = 2, text = \"{entity}: ", $label,
            " {value}", $unit, ", expected at least {limit}", $unit, " (93 % of its past median)\" },\n",
        )* "]\n")
    };
}

// The floors are well below the smallest GPU that the kernels support: a GPU below them is broken, whatever its model.
const RULES: &str = rules![
    "gemm_bf16_flop_per_s" "matrix product bf16" "flop/s" floor "1e13",
    "gemm_bf16_warm_flop_per_s" "matrix product bf16, warm," "flop/s" floor "1e13",
    "gemm_fp16_flop_per_s" "matrix product fp16" "flop/s" floor "1e13",
    "gemm_tf32_flop_per_s" "matrix product tf32" "flop/s" floor "5e12",
    "gemm_fp32_flop_per_s" "matrix product fp32" "flop/s" floor "2e12",
    "gemm_fp8_flop_per_s" "matrix product fp8" "flop/s" floor "1e14",
    "gemm_int8_flop_per_s" "matrix product int8" "op/s" floor "1e13",
    "memory_bytes_per_s" "memory test" "B/s" floor "1e11",
    "h2d_bytes_per_s" "copy from host to GPU" "B/s" floor "2e9",
    "d2h_bytes_per_s" "copy from GPU to host" "B/s" floor "2e9",
    "d2d_bytes_per_s" "copy within the GPU" "B/s" floor "1e11",
    "p2p_bytes_per_s" "copy between GPUs" "B/s" floor "1e9",
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
    vec![Probe::Builtin { test: "dl".to_owned(), args, timeout: TIMEOUT + heat }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    match test_params(params) {
        Err(instead) => instead,
        Ok(_) => interpret_measurements(params, outputs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use doctor_core::observation::{FailureKind, ProbeFailure};

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

    #[test]
    fn a_single_wrong_value_isolates_the_node() {
        let event = r#"{"code":"product-wrong","entity":"gpu:0000:1b:00.0","at":null,"text":"bf16: row 3, column 5"}"#;
        assert_eq!(classify_outputs(&CHECK, &[measured(TESTED, event)]), ["fail product-wrong isolate gpu:0000:1b:00.0"]);
    }

    #[test]
    fn a_missing_driver_is_inconclusive() {
        let missing = ProbeFailure::new(FailureKind::Missing, "libcuda.so.1 cannot be loaded");
        assert_eq!(classify_outputs(&CHECK, &[ProbeOutput::Failed(missing)]), ["inconclusive missing"]);
    }

    #[test]
    fn parameters_reach_the_test_and_invalid_ones_are_reported() {
        let params: Params = toml::from_str("heat = '1m'\ninject = 'not-a-number'\ntrials = 5").unwrap();
        let [Probe::Builtin { args, timeout, .. }] = &probes(&params)[..] else { panic!("one test") };
        assert_eq!(args.join(" "), "--heat=1m --inject=not-a-number --trials=5");
        assert_eq!(*timeout, Span::minutes(6));
        for wrong in ["heat = 5", "heat = 'long'", "trials = -1", "trials = 0.5", "inject = 3"] {
            let params: Params = toml::from_str(wrong).unwrap();
            assert!(matches!(interpret(&params, &[]), Observation::Failed(_)), "{wrong}");
        }
    }
}
