//! Verifies that every captured case gives the expected verdict.
//!
//! A case is `fixtures/CHECK/CASE.toml`: the source of its outputs, the expected verdict and reasons, and the outputs
//! of the check's probes in order, inline or in a text file next to it. A new case is a new file; nothing here lists
//! them.
#![expect(clippy::disallowed_methods, reason = "a test reads its fixtures")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use doctor_checks::{
    Catalogue, Params,
    probe::{FileSystemSpace, ProbeOutput},
};
use doctor_core::{
    classify::classify,
    finding::Verdict,
    ids::CheckId,
    observation::{FailureKind, ProbeFailure},
    policy::Policy,
    reason::ReasonCode,
};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    source: Source,
    expect: Expect,
    #[serde(default)]
    params: Params,
    outputs: Vec<Output>,
}

/// Every fixture must give its source.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Source {
    Captured { tool: String, version: String, machine: String, date: String, changed: Option<String> },
    MadeByHand { made_by_hand: String },
}

impl Source {
    fn is_complete(&self) -> bool {
        let fields = match self {
            Self::Captured { tool, version, machine, date, changed } => {
                vec![tool, version, machine, date, changed.as_ref().unwrap_or(tool)]
            }
            Self::MadeByHand { made_by_hand } => vec![made_by_hand],
        };
        fields.iter().all(|field| !field.trim().is_empty())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    verdict: Verdict,
    /// The reasons of all findings, in any order.
    reasons: BTreeSet<ReasonCode>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Output {
    File(PathBuf),
    Text(String),
    StatFs(FileSystemSpace),
    Failed(FailureKind),
}

impl Output {
    fn load(self, directory: &Path) -> ProbeOutput {
        match self {
            Self::File(name) => ProbeOutput::Text(fs::read_to_string(directory.join(name)).unwrap()),
            Self::Text(text) => ProbeOutput::Text(text),
            Self::StatFs(space) => ProbeOutput::StatFs(space),
            Self::Failed(kind) => ProbeOutput::Failed(ProbeFailure::new(kind, "as the fixture says")),
        }
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Returns the directories of cases. A directory with a README holds outputs for a parser's own tests.
fn directories() -> Vec<PathBuf> {
    let all = files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"));
    all.into_iter().filter(|directory| !directory.join("README.md").exists()).collect()
}

#[test]
fn every_captured_case_has_its_expected_verdict() {
    let policy = Policy::built_in();
    let catalogue = Catalogue::built_in();
    let rules = catalogue.rules(&policy).unwrap();
    let mut cases = 0;
    for directory in directories() {
        let id = CheckId::new(directory.file_name().unwrap().to_str().unwrap()).unwrap();
        let check = catalogue.get(&id).unwrap_or_else(|| panic!("fixtures of an unknown check {id}"));
        for path in files(&directory).into_iter().filter(|path| path.extension().is_some_and(|end| end == "toml")) {
            let name = path.display();
            let case: Case =
                toml::from_str(&fs::read_to_string(&path).unwrap()).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(case.source.is_complete(), "{name}: the source is not given");
            let outputs: Vec<_> = case.outputs.into_iter().map(|output| output.load(&directory)).collect();
            assert_eq!(outputs.len(), (check.probes)(&case.params).len(), "{name}: one output for each probe");
            let judged = classify(&rules, None, &id, &(check.interpret)(&case.params, &outputs));
            assert_eq!(judged.verdict, case.expect.verdict, "{name}: {judged:?}");
            let reasons: BTreeSet<_> = judged.findings.iter().map(|finding| finding.reason.clone()).collect();
            assert_eq!(reasons, case.expect.reasons, "{name}: {judged:?}");
            cases += 1;
        }
    }
    assert!(cases >= 20, "only {cases} cases were found");
}

#[test]
fn every_file_of_a_case_is_used() {
    for directory in directories() {
        let (cases, texts): (Vec<_>, Vec<_>) =
            files(&directory).into_iter().partition(|path| path.extension().is_some_and(|end| end == "toml"));
        let cases: String = cases.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        for text in texts {
            let name = text.file_name().unwrap().to_str().unwrap();
            assert!(cases.contains(&format!("file = \"{name}\"")), "{} belongs to no case", text.display());
        }
    }
}
