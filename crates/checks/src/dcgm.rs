//! dcgm: do the GPUs pass NVIDIA's own diagnostic?
//!
//! What it does: runs `dcgmi diag` of DCGM, 3.x or 4.x, at a level from 1 to 4, and reads each result by GPU and error.
//! Level 1 checks libraries and settings (30 s), 2 adds memory and PCIe (2 to 10 min), 3 stress and power (15 min), 4
//! memory patterns and pulses (45 min to 2 h 15). If no host engine is running, the test starts one and stops it
//! afterwards. The suite `sweep` runs it at level 2, `quarantine` at level 4 as the test `dcgm-level-4`; to run it by hand,
//! use `doctor-node test dcgm --level 2`.
//!
//! From level 2 on it loads the GPUs. It first checks that they are free: a process on a GPU (`gpus-free`, reason
//! `disturbed`) or a GPU partitioned by MIG (`mig-off`) makes the result inconclusive, because the diagnostic would fail
//! for reasons other than the hardware. A process that holds less than 16 MiB of a GPU and uses less than 2 % of its time
//! is monitoring and does not matter. A process that starts during the diagnostic is not noticed.
//!
//! Why it matters: NVIDIA's support and every cloud provider require this diagnostic before they replace a GPU, and its
//! memory test finds bad cells before any counter shows them.
//!
//! What to do: `doctor log RUN` shows DCGM's complete output; `doctor explain dcgm NUMBER` explains an error. Each
//! error has its own finding, `dcgm-NUMBER`, with the severity of our table, as long as DCGM rates it the same;
//! otherwise DCGM's rating applies:
//! - `dcgm-isolate` is `isolate`: hardware that DCGM recommends to take out of service. Keep the log for the support
//!   case.
//! - `dcgm-triage` is `reboot`: reboot and test again; if the error recurs, open a support case. `dcgm-unrated`
//!   likewise: a test failed without a severity, as in all versions up to DCGM 3.1.
//! - `dcgm-reset` is `reset`: the GPU works again after a reset.
//! - `dcgm-monitor`, `dcgm-config` and `dcgm-warned` are `monitor`: a setting, or a test that passed with a warning.
//!
//! A test that DCGM skips, does not run or omits has not passed: the other results are reported, and the verdict is
//! inconclusive. Level 2 requires results of `memory` and `pcie`, level 3 also of `diagnostic`, `targeted_stress` and
//! `targeted_power`, level 4 also of `memtest` and `pulse_test`. DCGM skips some tests on GPUs that it does not know;
//! if it does so on your machines, list them in `may_skip`. A non-zero exit code without a failed result is
//! inconclusive too, and so is a diagnostic that times out. Not applicable where there is no GPU, and where DCGM is
//! not installed (`no-dcgm`), which `doctor status` reports once for the fleet.
//!
//! Parameters, below `[tests.dcgm.params]` in the policy or by `doctor-node test dcgm --set NAME=VALUE`:
//! - `level`, 1 to 4, by default 2; `--level N` on the command line does the same.
//! - `skip`, DCGM tests not to run, such as `["pulse_test"]`; `may_skip`, tests that DCGM may skip, by default
//!   `["eud", "cpu_eud"]`, which have to be installed separately.
//! - `parameters` of DCGM's tests, such as `["memory.minimum_allocation_percentage=90"]`.
//! - `program`, by default `"dcgmi"`, a name or path; `nv-hostengine` is searched for next to it, then by name.
//! - `address` of the host engine, by default `"127.0.0.1:5555"`; or `"unix:///run/nv-hostengine.sock"`. If nothing
//!   listens there, the test starts a host engine at this address.
//! - `timeout` of the diagnostic, by default 5 min, 30 min, 1 h and 3 h for the four levels. The limit of the run is
//!   always longer, so that the test itself can report the timeout.

use doctor_core::{
    access::Access,
    observation::{FailureKind, Observation},
    software::Software,
    time::Span,
};

use crate::{
    dcgm_diag::{self, ExpectedResults},
    dcgm_params::{DcgmParams, Level, canonical_test_name},
    gpu::require_gpus,
    measurements::interpret_measurements,
    probe::{Probe, ProbeOutput},
    check_params,
    software::not_applicable_without,
    spec::{Check, Params, Spec, page_of},
};

/// The usual duration of each level on eight GPUs.
const USUAL_BY_LEVEL: &[Span] = &[Span::from_secs(30), Span::minutes(10), Span::minutes(20), Span::minutes(90)];

const SPEC: Spec =
    Spec::deep("dcgm", "NVIDIA's GPU diagnostics (DCGM)", Span::minutes(10), Span::minutes(40))
        .opt_in()
        .usual_by("level", USUAL_BY_LEVEL)
        .access(&[Access::Gpu]);

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("dcgm.rs")), rules: dcgm_diag::RULES, probes, interpret };

/// Time to query the GPUs and to start and stop a host engine.
const DIAGNOSTIC_OVERHEAD: Span = Span::minutes(5);

const KNOWN_PARAMS: [(&str, &str); 7] = [
    ("level", "level = 2"),
    ("skip", "skip = [\"pulse_test\"]"),
    ("may_skip", "may_skip = [\"eud\", \"cpu_eud\"]"),
    ("parameters", "parameters = [\"memory.minimum_allocation_percentage=90\"]"),
    ("program", "program = \"/usr/bin/dcgmi\""),
    ("address", "address = \"127.0.0.1:5555\""),
    ("timeout", "timeout = \"30m\""),
];

/// The configured test.
struct TestParams {
    dcgm_params: DcgmParams,
    /// Tests that DCGM may skip, by canonical name.
    allowed_skips: Vec<String>,
}

fn test_params(params: &Params) -> Result<TestParams, Observation> {
    let example = check_params::reject_unknown(params, &KNOWN_PARAMS)?;
    let level = match check_params::number(params, "level", example("level"))? {
        None => Level::Two,
        Some(number) => {
            let level = Level::ALL.iter().copied().find(|level| f64::from(level.number()) == number);
            level.ok_or_else(|| check_params::invalid_param("level", example("level")))?
        }
    };
    let names = |name: &str| {
        let list = check_params::string_list(params, name, example(name))?;
        let list = list.map(|list| list.iter().map(|name| canonical_test_name(name)).collect::<Vec<_>>());
        let is_name = |name: &String| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if list.as_ref().is_some_and(|list| !list.iter().all(|name| !name.is_empty() && is_name(name))) {
            return Err(check_params::invalid_param(name, example(name)));
        }
        Ok(list)
    };
    let skip = names("skip")?.unwrap_or_default();
    let mut excused = names("may_skip")?.unwrap_or_else(|| vec!["eud".to_owned(), "cpu_eud".to_owned()]);
    let mut parameters = check_params::string_list(params, "parameters", example("parameters"))?.unwrap_or_default();
    // DCGM reads several settings from one argument, separated by semicolons.
    let is_setting = |text: &String| {
        let name = text.split_once('=').map_or("", |(name, _)| name);
        name.contains('.') && !text.contains(';') && !text.starts_with('-')
    };
    if !parameters.iter().all(is_setting) {
        return Err(check_params::invalid_param("parameters", example("parameters")));
    }
    parameters.extend(skip.iter().map(|name| format!("{name}.is_allowed=false")));
    excused.extend(skip);
    let word = |name: &str, default: &str| {
        let word = check_params::string(params, name, example(name))?.unwrap_or_else(|| default.to_owned());
        if word.starts_with('-') { Err(check_params::invalid_param(name, example(name))) } else { Ok(word) }
    };
    let order = DcgmParams {
        level,
        program: word("program", "dcgmi")?,
        address: word("address", "127.0.0.1:5555")?,
        parameters,
        timeout: check_params::duration(params, "timeout", example("timeout"))?.unwrap_or_else(|| level.timeout()),
    };
    Ok(TestParams { dcgm_params: order, allowed_skips: excused })
}

/// Also queries the GPUs: DCGM identifies them by index, everything else by PCI address.
fn probes(params: &Params) -> Vec<Probe> {
    let Ok(TestParams { dcgm_params: order, .. }) = test_params(params) else { return Vec::new() };
    let Ok(written) = serde_json::to_string(&order) else { return Vec::new() };
    let timeout = order.timeout + DIAGNOSTIC_OVERHEAD;
    vec![Probe::gpu(&["uuid"]), Probe::Builtin { test: SPEC.id.to_owned(), args: vec![written], timeout }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let TestParams { dcgm_params: order, allowed_skips: excused } = match test_params(params) {
        Ok(parsed) => parsed,
        Err(instead) => return instead,
    };
    let diagnosis = outputs.get(1);
    match (diagnosis, require_gpus(outputs.first())) {
        (_, Err(Observation::NotApplicable(why))) => Observation::NotApplicable(why),
        (Some(ProbeOutput::Failed(failure)), _)
            if matches!(failure.kind, FailureKind::Missing | FailureKind::NotInstalled) =>
        {
            not_applicable_without(Software::Dcgm, Observation::Failed(failure.clone()))
        }
        // The test itself reports instead of DCGM: the GPUs are in use.
        (Some(report @ ProbeOutput::Text(_)), _) => interpret_measurements(params, std::slice::from_ref(report)),
        (diagnosis, gpus) => {
            let scope = ExpectedResults { expected_tests: order.level.expected_tests(), allowed_skips: &excused };
            // If the driver does not answer, no GPU has a name; DCGM's results by index are still valid.
            dcgm_diag::interpret(diagnosis, gpus.unwrap_or_default(), scope)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, none},
        classify_fixture::classify_outputs_with,
        Catalogue,
    };
    use doctor_core::{observation::ProbeFailure, policy::Policy};

    fn params(text: &str) -> Params {
        toml::from_str(text).unwrap()
    }

    fn ran(exit: i32, stdout: &str) -> ProbeOutput {
        ProbeOutput::Ran { exit: Some(exit), stdout: stdout.to_owned(), stderr: String::new() }
    }

    fn judge(settings: &str, diagnosis: ProbeOutput) -> Vec<String> {
        classify_outputs_with(&CHECK, &params(settings), None, &[answer(&[&[], &[]]), diagnosis])
    }

    const FAIL: &str = include_str!("../fixtures/dcgm/v4.1-fail.json");
    const SKIPPED: &str = include_str!("../fixtures/dcgm/v4.1-level-3-skipped.json");

    #[test]
    fn errors_are_findings_of_their_gpu_by_bus_id() {
        let expected = ["fail dcgm-52 isolate gpu:0000:19:00.0", "fail dcgm-isolate isolate gpu:0000:18:00.0"];
        assert_eq!(judge("level = 1", ran(226, FAIL)), expected);
        let unnamed = classify_outputs_with(&CHECK, &Params::new(), None, &[none_on_the_bus_answers(), ran(226, FAIL)]);
        assert_eq!(unnamed, ["fail dcgm-52 isolate gpu:1", "fail dcgm-isolate isolate gpu:0"]);
    }

    fn none_on_the_bus_answers() -> ProbeOutput {
        crate::gpu::tests::deaf(FailureKind::TimedOut, "no answer")
    }

    #[test]
    fn a_level_requires_results_of_all_its_tests() {
        assert_eq!(judge("level = 2\nmay_skip = ['targeted_stress']", ran(0, SKIPPED)), ["pass within-limits"]);
        assert_eq!(judge("level = 2", ran(0, SKIPPED)), ["inconclusive empty"], "it was skipped and is not in `may_skip`");
        assert_eq!(judge("level = 3\nskip = ['Targeted Stress']", ran(0, SKIPPED)), ["inconclusive empty"]);
        let excused = "level = 3\nskip = ['targeted_stress']\nmay_skip = ['diagnostic', 'targeted_power']";
        assert_eq!(judge(excused, ran(0, SKIPPED)), ["pass within-limits"]);
    }

    #[test]
    fn a_diagnostic_that_could_not_run_is_inconclusive() {
        let missing = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no built-in test"));
        assert_eq!(judge("", missing()), ["inconclusive missing"]);
        let not_installed = ProbeFailure::new(FailureKind::NotInstalled, "dcgmi is not installed");
        assert_eq!(judge("", ProbeOutput::Failed(not_installed)), ["not-applicable no-dcgm"]);
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &[none(), missing()]), ["not-applicable no-gpu"]);
        let failed = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Failed, "no GPU"));
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &[none(), failed()]), ["not-applicable no-gpu"]);
        assert_eq!(judge("", failed()), ["inconclusive failed"]);
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &[]), ["inconclusive unparseable"]);
    }

    #[test]
    fn an_order_is_what_the_parameters_say_and_the_run_lasts_longer_than_the_diagnosis() {
        let default = test_params(&Params::new()).ok().unwrap().dcgm_params;
        assert_eq!((default.level, default.timeout), (Level::Two, Span::minutes(30)));
        let set = params("level = 4\nskip = ['pulse_test']\nparameters = ['pcie.test_pinned=false']");
        let order = test_params(&set).ok().unwrap().dcgm_params;
        assert_eq!(order.parameters, ["pcie.test_pinned=false", "pulse_test.is_allowed=false"]);
        let [_, Probe::Builtin { timeout, .. }] = &probes(&set)[..] else { panic!("two probes") };
        assert!(*timeout > order.timeout && CHECK.limit(&set) > *timeout);
        let of_run = |level: u8| {
            let text = format!("[tests.dcgm]\nenabled = true\nparams = {{ level = {level} }}\n");
            let tests = Catalogue::built_in().tests(&Policy::with_site_settings(&text).unwrap());
            tests.into_iter().find(|test| test.id.as_str() == "dcgm").map(|test| (test.limit, test.typical_duration)).unwrap()
        };
        for level in Level::ALL {
            let (limit, usual) = of_run(level.number());
            assert!(limit > level.timeout() && usual < level.timeout(), "level {level:?}: {limit} {usual}");
        }
    }

    #[test]
    fn an_invalid_parameter_is_reported() {
        for text in [
            "level = 5",
            "level = 2.5",
            "level = 'deep'",
            "levels = 2",
            "skip = 'pulse_test'",
            "skip = ['a;b']",
            "skip = ['']",
            "parameters = ['pcie']",
            "parameters = ['a.b=1;c.d=2']",
            "parameters = ['-x.y=1']",
            "program = '-h'",
            "address = ''",
            "timeout = 30",
        ] {
            assert_eq!(judge(text, ran(226, FAIL)), ["inconclusive unparseable"], "{text}");
            assert!(probes(&params(text)).is_empty(), "{text}");
        }
    }
}
