//! Parses the output of `dcgmi diag -j`, in each of DCGM's three formats.
//!
//! Up to 3.1 a warning is plain text without a severity; from 3.2 on each warning has a number and a severity; from 4.0
//! on the root has another name and results are grouped by entity. In all formats: a test that was skipped, did not run
//! or is missing has not passed, an empty list of results is not healthy, an unknown severity is not harmless, and a
//! later pass does not cancel an earlier failure. The exit code alone fails no test, but a non-zero exit code prevents
//! a pass.

use std::collections::{BTreeMap, BTreeSet};

use doctor_core::{
    observation::{Entity, EntityKind, Event, FailureKind, Metric, Observation, ObservationBuilder, ProbeFailure},
    reason::ReasonCode,
};
use serde_json::Value;

use crate::{
    dcgm_params::canonical_test_name,
    gpu::Gpu,
    measurements::{MAX_MEASUREMENTS_BYTES, exit_failure},
    probe::ProbeOutput,
    tables::{self, DcgmSeverity},
};

/// Default rules of the check that uses [`interpret`].
pub const RULES: &str = include_str!("tables/dcgm_rules.toml");

/// The expected results of a diagnostic, to detect missing ones. Tests are given by [`canonical_test_name`] name.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpectedResults<'a> {
    /// Tests that must have a result.
    pub expected_tests: &'a [&'a str],
    /// Tests that may be missing.
    pub allowed_skips: &'a [String],
}

/// Interprets a diagnostic. `gpus` are the machine's GPUs, which map DCGM's indices (the same as NVML's) to bus ids.
pub fn interpret(output: Option<&ProbeOutput>, gpus: &[Gpu], scope: ExpectedResults<'_>) -> Observation {
    let (text, exit, stderr) = match output {
        Some(ProbeOutput::Ran { exit, stdout, stderr }) => (stdout, *exit, stderr.as_str()),
        Some(ProbeOutput::Text(text)) => (text, Some(0), ""),
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return could_not(FailureKind::Unparseable, "the probe returned no output of dcgmi"),
    };
    if text.len() > MAX_MEASUREMENTS_BYTES {
        return could_not(FailureKind::TooLong, "the output of dcgmi exceeds the output limit");
    }
    let Some(document) = find_diagnostic(text) else { return no_diagnostic(text, exit, stderr) };
    let mut reading = DiagnosticReader {
        gpus,
        builder: ObservationBuilder::default(),
        tally: Tally::default(),
        events: BTreeMap::new(),
        tests_run: BTreeSet::new(),
        tested_entities: BTreeSet::new(),
        skipped: BTreeMap::new(),
    };
    reading.walk(&document, 0);
    reading.report_missing(scope);
    reading.check_exit_code(exit, stderr);
    reading.into_observation()
}

fn could_not(kind: FailureKind, text: impl Into<String>) -> Observation {
    Observation::Failed(ProbeFailure::new(kind, text))
}

/// Returns the first JSON object that holds a diagnostic; other text may precede and follow it. Returns `None` if an
/// object is truncated: a complete object inside it is only part of the diagnostic and must not be taken for all of it.
fn find_diagnostic(text: &str) -> Option<Value> {
    const ROOTS: [&str; 4] = ["DCGM Diagnostic", "DCGM GPU Diagnostic", CATEGORIES, RUNTIME_ERROR];
    // Limits the attempts: real output never has so many braces before the diagnostic, and hostile text could cause
    // quadratic work.
    for (at, _) in text.match_indices('{').take(64) {
        match serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>().next()? {
            Ok(value) if ROOTS.iter().any(|key| value.get(key).is_some()) => return Some(value),
            Err(error) if error.is_eof() => return None,
            Ok(_) | Err(_) => {}
        }
    }
    None
}

const CATEGORIES: &str = "test_categories";
const RUNTIME_ERROR: &str = "runtime_error";

fn no_diagnostic(text: &str, exit: Option<i32>, stderr: &str) -> Observation {
    if exit != Some(0) {
        // `Error: unable to establish a connection to the specified host` appears on either stream.
        let detail = if stderr.trim().is_empty() { text } else { stderr };
        return Observation::Failed(exit_failure(exit, detail));
    }
    if text.trim().is_empty() {
        return could_not(FailureKind::Empty, "dcgmi printed nothing");
    }
    let excerpt: String = text.trim().chars().take(200).collect();
    could_not(FailureKind::Unparseable, format!("no diagnostic result in the output of dcgmi: {excerpt}"))
}

#[derive(Default)]
struct Tally {
    passed: u32,
    failed: u32,
    warned: u32,
    skipped: u32,
}

struct DiagnosticReader<'a> {
    gpus: &'a [Gpu],
    builder: ObservationBuilder,
    tally: Tally,
    events: BTreeMap<(ReasonCode, Entity), Vec<String>>,
    /// Tests with a pass, warning or failure.
    tests_run: BTreeSet<String>,
    /// Entities with such a result.
    tested_entities: BTreeSet<Entity>,
    /// Skipped tests, with the entities and, if given, the reason.
    skipped: BTreeMap<String, (BTreeSet<Entity>, Option<String>)>,
}

impl DiagnosticReader<'_> {
    /// Finds the lists of tests wherever this version puts them: below the root, or in each of several iterations.
    fn walk(&mut self, value: &Value, depth: u32) {
        let fields: Vec<(&str, &Value)> = match value {
            Value::Object(fields) => fields.iter().map(|(name, value)| (name.as_str(), value)).collect(),
            Value::Array(values) => values.iter().map(|value| ("", value)).collect(),
            _ => return,
        };
        for (name, value) in fields {
            match name {
                CATEGORIES => {
                    let tests = list(value).iter().flat_map(|category| list(&category["tests"]));
                    tests.for_each(|test| self.test(test));
                }
                RUNTIME_ERROR => self.builder.unreadable(ProbeFailure::new(FailureKind::Failed, value_text(value))),
                _ if depth < 6 => self.walk(value, depth + 1),
                _ => {}
            }
        }
    }

    fn test(&mut self, test: &Value) {
        let name = test["name"].as_str().unwrap_or("unnamed test");
        let results = list(&test["results"]);
        for result in results {
            self.result(name, result);
        }
        // The summary repeats the results. It counts if there are no results, or if it alone has a failure.
        let summary = &test["test_summary"];
        let failed = |result: &Value| status(result) == Some(Status::Fail);
        if results.is_empty() && summary.get("status").is_some() || failed(summary) && !results.iter().any(failed) {
            self.result(name, summary);
        } else if results.is_empty() {
            self.builder.unreadable(ProbeFailure::new(FailureKind::Empty, format!("{name} returned no result")));
        }
    }

    fn result(&mut self, name: &str, result: &Value) {
        if matches!(status(result), Some(Status::Pass | Status::Warn | Status::Fail)) {
            self.tests_run.insert(canonical_test_name(name));
            self.tested_entities.extend(self.entities(result));
        }
        match status(result) {
            Some(Status::Pass) => self.tally.passed += 1,
            Some(Status::Skip) => {
                self.tally.skipped += 1;
                let entities = self.entities(result);
                let (parts, why) = self.skipped.entry(canonical_test_name(name)).or_default();
                parts.extend(entities);
                *why = why.take().or_else(|| warnings(result).into_iter().map(|warning| warning.text).next());
            }
            Some(Status::NotRun) => {
                self.builder.unreadable(ProbeFailure::new(FailureKind::Failed, format!("{name} did not run")));
            }
            Some(Status::Warn) => {
                self.tally.warned += 1;
                let warning_texts =
                    warnings(result).into_iter().map(|warning| warning.text).collect::<Vec<_>>().join("; ");
                self.add_event(&ReasonCode::fixed("dcgm-warned"), result, &format!("{name} warned: {warning_texts}"));
            }
            Some(Status::Fail) => {
                self.tally.failed += 1;
                let warnings = warnings(result);
                if warnings.is_empty() {
                    self.add_event(
                        &ReasonCode::fixed("dcgm-unrated"),
                        result,
                        &format!("{name} failed without a reason"),
                    );
                }
                for warning in warnings {
                    let code = warning.code();
                    self.add_event(&code, result, &format!("{name} failed: {}", warning.describe()));
                }
            }
            None => {
                let status = value_text(&result["status"]);
                let text = format!("{name} has status `{status}`; expected Pass, Fail, Warn, Skip or Not Run");
                self.builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, text));
            }
        }
    }

    fn add_event(&mut self, code: &ReasonCode, result: &Value, text: &str) {
        let text: String = text.chars().take(400).collect();
        for entity in self.entities(result) {
            let texts = self.events.entry((code.clone(), entity)).or_default();
            // One GPU with thousands of bad cells is one finding with a few examples.
            if texts.len() < 3 && !texts.contains(&text) {
                texts.push(text.clone());
            }
        }
    }

    /// Returns the entities of a result. Older versions write ids as text, several in one string.
    fn entities(&self, result: &Value) -> Vec<Entity> {
        let group = result["entity_group"].as_str().unwrap_or("GPU");
        let ids = ["entity_id", "gpu_id", "gpu_ids"].iter().find_map(|key| match &result[key] {
            Value::Number(id) => Some(id.to_string()),
            Value::String(ids) => Some(ids.clone()),
            _ => None,
        });
        let Some(ids) = ids else { return vec![Entity::node()] };
        let kind = match group {
            "GPU" => EntityKind::Gpu,
            "Switch" | "NvSwitch" => EntityKind::Switch,
            _ => return vec![Entity::node()],
        };
        let entity = |id: &str| {
            let gpu = self.gpus.iter().find(|gpu| kind == EntityKind::Gpu && gpu.index.to_string() == id);
            gpu.map_or_else(|| Entity::new(kind, id), Gpu::entity)
        };
        let all: Vec<_> = ids.split(',').map(str::trim).filter(|id| !id.is_empty()).map(entity).collect();
        if all.is_empty() { vec![Entity::node()] } else { all }
    }

    /// Reports expected results that are missing: they have not passed.
    fn report_missing(&mut self, scope: ExpectedResults<'_>) {
        let excused = |name: &str| scope.allowed_skips.iter().any(|other| other == name);
        for (name, (parts, why)) in self.skipped.iter().filter(|(name, _)| !excused(name)) {
            let parts = parts.iter().map(Entity::to_string).collect::<Vec<_>>().join(", ");
            let why = why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
            let text = format!("DCGM skipped {name} on {parts}{why}");
            self.builder.unreadable(ProbeFailure::new(FailureKind::Empty, text));
        }
        let has_result = |name: &str| self.tests_run.contains(name) || self.skipped.contains_key(name);
        // A diagnostic without any result is reported once, by `conclude`.
        let is_about_something = !self.tests_run.is_empty() || !self.skipped.is_empty();
        for name in scope.expected_tests.iter().filter(|name| is_about_something && !has_result(name) && !excused(name))
        {
            let text = format!("{name} is part of this level and has no result");
            self.builder.unreadable(ProbeFailure::new(FailureKind::Empty, text));
        }
        // Up to 3.3, the tests of libraries and settings name no GPU.
        let names_gpus = self.tested_entities.iter().any(|part| part.kind == EntityKind::Gpu);
        for gpu in self.gpus.iter().map(Gpu::entity).filter(|gpu| names_gpus && !self.tested_entities.contains(gpu)) {
            let text = format!("{gpu} has no result; other GPUs have");
            self.builder.unreadable(ProbeFailure::new(FailureKind::Empty, text));
        }
    }

    /// Reports a non-zero exit code without a failed result: the diagnostic did not finish.
    fn check_exit_code(&mut self, exit: Option<i32>, stderr: &str) {
        if exit != Some(0) && self.tally.failed == 0 {
            let ProbeFailure { kind, text } = exit_failure(exit, stderr);
            self.builder.unreadable(ProbeFailure::new(kind, format!("no test failed, but {text}")));
        }
    }

    fn into_observation(mut self) -> Observation {
        let Tally { passed, failed, warned, skipped } = self.tally;
        for ((code, entity), texts) in self.events {
            self.builder.event(Event { code, entity, at: None, text: texts.join("; "), key: None });
        }
        if passed + failed + warned > 0 {
            let counts = [("passed", passed), ("failed", failed), ("warned", warned), ("skipped", skipped)];
            for (word, count) in counts {
                self.builder.metric(Metric::count(&format!("dcgm_results_{word}"), Entity::node(), f64::from(count)));
            }
        }
        let text = match skipped {
            0 => "the diagnostic has no result".to_owned(),
            count => format!("all {count} tests were skipped"),
        };
        self.builder.build_or(could_not(FailureKind::Empty, text))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Pass,
    Fail,
    Warn,
    Skip,
    NotRun,
}

fn status(result: &Value) -> Option<Status> {
    match result["status"].as_str()?.to_ascii_lowercase().as_str() {
        "pass" => Some(Status::Pass),
        "fail" => Some(Status::Fail),
        "warn" => Some(Status::Warn),
        "skip" | "skipped" => Some(Status::Skip),
        "not run" | "notrun" => Some(Status::NotRun),
        _ => None,
    }
}

struct Warning {
    text: String,
    id: Option<u32>,
    /// The severity number as printed. From DCGM 3.2 on, its scale is the same in every version.
    severity: Option<u64>,
}

impl Warning {
    /// Returns the table's code for this error if the result agrees with the table's severity, otherwise a code for the
    /// result's own severity.
    fn code(&self) -> ReasonCode {
        let row = self.id.filter(|id| *id != 0).and_then(tables::dcgm_error);
        let own = self.severity.and_then(DcgmSeverity::from_number);
        match (row, own) {
            (Some(row), None | Some(DcgmSeverity::None | DcgmSeverity::Unknown)) => code_of_error(row.n),
            (Some(row), Some(own)) if own == row.dcgm => code_of_error(row.n),
            (_, Some(own)) => ReasonCode::fixed(match own {
                DcgmSeverity::Monitor => "dcgm-monitor",
                DcgmSeverity::Isolate => "dcgm-isolate",
                DcgmSeverity::Triage => "dcgm-triage",
                DcgmSeverity::Config => "dcgm-config",
                DcgmSeverity::Reset => "dcgm-reset",
                DcgmSeverity::None | DcgmSeverity::Unknown => "dcgm-unrated",
            }),
            (None, None) => ReasonCode::fixed("dcgm-unrated"),
        }
    }

    fn describe(&self) -> String {
        match (self.id, self.id.and_then(tables::dcgm_error)) {
            (Some(id), Some(row)) => format!("{} (DCGM error {id}, {})", self.text, row.name),
            (Some(id), None) => format!("{} (DCGM error {id})", self.text),
            (None, _) => self.text.clone(),
        }
    }
}

fn code_of_error(n: u32) -> ReasonCode {
    ReasonCode::new(&format!("dcgm-{n}")).unwrap_or(ReasonCode::fixed("dcgm-unrated"))
}

/// Parses the warnings: up to 3.1 one text, later a list of objects; deployment tests use another key for the text.
fn warnings(result: &Value) -> Vec<Warning> {
    let warning = |value: &Value| {
        let text = ["warning", "warnings"].iter().find_map(|key| value.get(key)).unwrap_or(value);
        Warning {
            text: value_text(text),
            id: value["error_id"].as_u64().and_then(|id| u32::try_from(id).ok()),
            severity: value["error_severity"].as_u64(),
        }
    };
    match &result["warnings"] {
        Value::Array(all) => all.iter().map(warning).collect(),
        Value::Null => Vec::new(),
        one => vec![warning(one)],
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn value_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned).chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        classify_fixture::classify_outputs,
        gpu::tests::answer,
        spec::{Check, Spec},
    };
    use proptest::prelude::*;

    const CHECK: Check = Check {
        spec: Spec::quick("dcgm", "for these tests"),
        page: "",
        rules: RULES,
        probes: |_| Vec::new(),
        interpret: |_, outputs| {
            let excused = ["eud".to_owned()];
            interpret(outputs.first(), &gpus(), ExpectedResults { expected_tests: &[], allowed_skips: &excused })
        },
    };

    fn gpus() -> Vec<Gpu> {
        let ProbeOutput::Gpus(answer) = answer(&[&[], &[]]) else { panic!("gpus") };
        answer.gpus
    }

    fn ran(exit: i32, stdout: &str) -> Vec<String> {
        classify_outputs(
            &CHECK,
            &[ProbeOutput::Ran { exit: Some(exit), stdout: stdout.to_owned(), stderr: String::new() }],
        )
    }

    #[test]
    fn each_shape_is_read_with_its_own_scale() {
        // This format has no severity: the error is neither harmless nor a reason to return a board.
        assert_eq!(
            ran(226, include_str!("../fixtures/dcgm/v3.1-fail.json")),
            ["fail dcgm-unrated reboot gpu:0000:18:00.0", "fail dcgm-unrated reboot gpu:0000:19:00.0"]
        );
        assert_eq!(
            ran(226, include_str!("../fixtures/dcgm/v3.3-fail.json")),
            ["fail dcgm-30 reboot gpu:0000:19:00.0", "fail dcgm-29 monitor node"]
        );
        // 4.1 still isolates for error 80, which newer versions reset: the result's own severity applies.
        assert_eq!(
            ran(226, include_str!("../fixtures/dcgm/v4.1-fail.json")),
            ["fail dcgm-52 isolate gpu:0000:19:00.0", "fail dcgm-isolate isolate gpu:0000:18:00.0"]
        );
        assert_eq!(ran(0, include_str!("../fixtures/dcgm/v4.1-healthy.json")), ["pass within-limits"]);
    }

    #[test]
    fn json_of_dcgm_4_with_a_failure_is_not_read_as_a_pass_of_nothing() {
        for exit in [0, 205, 226] {
            assert_eq!(ran(exit, include_str!("../fixtures/dcgm/v4.1-fail.json")).len(), 2, "exit code {exit}");
        }
    }

    #[test]
    fn a_test_that_did_not_run_does_not_pass() {
        assert_eq!(ran(0, include_str!("../fixtures/dcgm/all-skipped.json")), ["inconclusive empty"]);
        assert_eq!(ran(0, include_str!("../fixtures/dcgm/not-run.json")), ["inconclusive failed"]);
        assert_eq!(ran(0, include_str!("../fixtures/dcgm/no-results.json")), ["inconclusive empty"]);
        assert_eq!(ran(0, "{\"DCGM Diagnostic\":{}}"), ["inconclusive empty"]);
        assert_eq!(ran(0, ""), ["inconclusive empty"]);
        assert_eq!(ran(0, "{\"something\":{\"else\":[]}}"), ["inconclusive unparseable"]);
        assert_eq!(ran(0, "{\"DCGM Diagnostic\":{\"test_categories\":[{\"tes"), ["inconclusive unparseable"]);
    }

    #[test]
    fn a_diagnostic_that_could_not_run_is_inconclusive() {
        assert_eq!(ran(0, include_str!("../fixtures/dcgm/runtime-error.json")), ["inconclusive failed"]);
        let refused = "Error: unable to establish a connection to the specified host: localhost";
        assert_eq!(ran(1, refused), ["inconclusive failed"]);
        let killed = ProbeOutput::Ran { exit: None, stdout: String::new(), stderr: String::new() };
        assert_eq!(classify_outputs(&CHECK, &[killed]), ["inconclusive killed"]);
        let late = ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "dcgmi"));
        assert_eq!(classify_outputs(&CHECK, &[late]), ["inconclusive timed-out"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    #[test]
    fn text_around_the_json_is_ignored() {
        assert_eq!(ran(1, include_str!("../fixtures/dcgm/text-around.json")), ["fail dcgm-125 reset gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_later_pass_takes_back_no_earlier_failure() {
        assert_eq!(ran(0, include_str!("../fixtures/dcgm/iterations.json")), ["fail dcgm-52 isolate gpu:0000:19:00.0"]);
    }

    /// One failing result with these warnings.
    fn failing(warnings: &str) -> Vec<String> {
        let result = format!("{{\"gpu_id\":\"7\",\"status\":\"Fail\"{warnings}}}");
        ran(
            0,
            &format!(
                "{{\"DCGM GPU Diagnostic\":{{\"test_categories\":[{{\"tests\":[{{\"name\":\"x\",\"results\":[{result}]}}]}}]}}}}"
            ),
        )
    }

    #[test]
    fn a_severity_that_nobody_knows_is_not_healthy() {
        for (warnings, finding) in [
            ("", "dcgm-unrated reboot"),
            (",\"warnings\":[]", "dcgm-unrated reboot"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":999,\"error_severity\":9}]", "dcgm-unrated reboot"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":999,\"error_severity\":3}]", "dcgm-unrated reboot"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":999,\"error_severity\":0}]", "dcgm-unrated reboot"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":999,\"error_severity\":6}]", "dcgm-reset reset"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":4,\"error_severity\":3}]", "dcgm-4 isolate"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":4}]", "dcgm-4 isolate"),
            (",\"warnings\":[{\"warning\":\"x\",\"error_id\":0,\"error_severity\":1}]", "dcgm-monitor monitor"),
            (",\"warnings\":{\"warning\":\"x\",\"error_id\":4}", "dcgm-4 isolate"),
        ] {
            assert_eq!(failing(warnings), [format!("fail {finding} gpu:7")], "{warnings}");
        }
    }

    #[test]
    fn a_summary_that_failed_alone_and_a_new_status_are_not_passed_over() {
        let alone = r#"{"DCGM Diagnostic":{"test_categories":[{"tests":[{"name":"x",
            "results":[{"entity_id":0,"status":"Pass"}],"test_summary":{"status":"Fail"}}]}]}}"#;
        assert_eq!(ran(0, alone), ["fail dcgm-unrated reboot node"]);
        assert_eq!(ran(0, &alone.replace("Fail", "Maybe").replace("Pass", "Perhaps")), ["inconclusive unparseable"]);
        let warned = alone.replace("\"Fail\"", "\"Warn\"").replace("\"Pass\"", "\"Warn\"");
        assert_eq!(ran(0, &warned), ["fail dcgm-warned monitor gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_nonzero_exit_code_prevents_a_pass_and_hides_no_failure() {
        let healthy = include_str!("../fixtures/dcgm/v4.1-healthy.json");
        for exit in [1, 205, 226] {
            assert_eq!(ran(exit, healthy), ["inconclusive failed"], "exit code {exit}");
        }
        let killed = ProbeOutput::Ran { exit: None, stdout: healthy.to_owned(), stderr: String::new() };
        assert_eq!(classify_outputs(&CHECK, &[killed]), ["inconclusive killed"]);
    }

    #[test]
    fn truncated_output_does_not_pass() {
        let full = include_str!("../fixtures/dcgm/iterations.json").replace("Fail", "Pass");
        let full = full.replacen("\"entity_id\":1", "\"entity_id\":0", 1);
        assert_eq!(ran(0, &full), ["pass within-limits"]);
        let truncated = &full[..full.rfind("\"iteration\":1").unwrap()];
        assert_eq!(ran(0, truncated), ["inconclusive unparseable"]);
    }

    #[test]
    fn a_gpu_without_results_has_not_passed() {
        let one = include_str!("../fixtures/dcgm/v4.1-healthy.json").replace("\"entity_id\":1", "\"entity_id\":0");
        assert_eq!(ran(0, &one), ["inconclusive empty"]);
    }

    #[test]
    fn skipped_or_missing_tests_do_not_pass_unless_allowed() {
        let text = include_str!("../fixtures/dcgm/v4.1-level-3-skipped.json");
        let output = ProbeOutput::Ran { exit: Some(0), stdout: text.to_owned(), stderr: String::new() };
        let unread = |promised: &[&str], excused: &[&str]| {
            let excused: Vec<String> = excused.iter().map(|&name| name.to_owned()).collect();
            match interpret(
                Some(&output),
                &gpus(),
                ExpectedResults { expected_tests: promised, allowed_skips: &excused },
            ) {
                Observation::Measured { failures: unread, .. } => {
                    unread.into_iter().map(|failure| failure.text).collect::<Vec<_>>()
                }
                other => panic!("{other:?}"),
            }
        };
        let failures = unread(&["memory", "pcie", "targeted_stress", "diagnostic"], &[]);
        assert_eq!(failures.len(), 2, "{failures:?}");
        assert!(
            failures[0].starts_with("DCGM skipped targeted_stress on gpu:0000:18:00.0, gpu:0000:19:00.0: "),
            "{failures:?}"
        );
        assert_eq!(failures[1], "diagnostic is part of this level and has no result");
        assert!(unread(&["memory", "targeted_stress", "diagnostic"], &["targeted_stress", "diagnostic"]).is_empty());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "([{}\\[\\]\",:]|DCGM Diagnostic|test_categories|tests|status|Fail|.){0,120}") {
            interpret(Some(&ProbeOutput::Text(text)), &[], ExpectedResults::default());
        }
    }
}
