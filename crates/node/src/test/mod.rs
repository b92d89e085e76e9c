//! `doctor-node test NAME`: runs tests that load the node and classifies them locally.
//!
//! A test is a deep check of the catalogue: it takes minutes and may occupy the GPUs. It therefore has its own command
//! and must be named, while `check` runs what may run at any time. Everything else is shared: probes, interpretation,
//! rules, table, JSON and exit codes.

use std::str::FromStr;

use doctor_checks::{Catalogue, Depth};
use doctor_core::{ids::CheckId, policy::Policy, profile::Profile};

use crate::{
    check::{self, CheckError, CheckResult, Suite},
    runner::ProbeRunner,
};

#[derive(Debug, thiserror::Error)]
pub enum TestError {
    #[error("unknown test or suite `{name}`; known: {known}")]
    NoSuchTest { name: String, known: String },
    #[error("`{name}` is a check that only reads: `doctor-node check {name}`")]
    NotATest { name: String },
    #[error("--level is for the test `dcgm`, which is not among the named tests")]
    LevelWithoutDcgm,
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// A parameter from the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    name: String,
    value: toml::Value,
}

#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a setting; expected NAME=VALUE, such as `pattern_time=30s` or `mounts=[\"/data\"]`")]
pub struct BadSetting(String);

impl FromStr for Setting {
    type Err = BadSetting;

    /// Parses the value as TOML. A value that is not TOML is taken as a string, so that words need no quotes in a
    /// shell.
    fn from_str(text: &str) -> Result<Self, BadSetting> {
        let (name, value) = text.split_once('=').ok_or_else(|| BadSetting(text.to_owned()))?;
        let (name, value) = (name.trim(), value.trim());
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c)) {
            return Err(BadSetting(text.to_owned()));
        }
        let read = toml::from_str::<toml::Table>(&format!("value = {value}")).ok();
        let value = read.and_then(|mut table| table.remove("value")).unwrap_or_else(|| value.into());
        Ok(Self { name: name.to_owned(), value })
    }
}

/// Expands suites into their tests.
pub fn expand_suites(names: &[CheckId], policy: &Policy) -> Vec<CheckId> {
    Catalogue::with_site_checks(policy).expand(names)
}

/// Overrides the policy's parameters with those of the command line.
pub fn set(policy: &mut Policy, names: &[CheckId], settings: &[Setting]) {
    for name in names.iter().filter(|_| !settings.is_empty()) {
        let params = &mut policy.tests.entry(name.clone()).or_default().params;
        params.extend(settings.iter().map(|Setting { name, value }| (name.clone(), value.clone())));
    }
}

/// Overrides the policy's level of `dcgm`. Other tests have no levels.
///
/// # Errors
/// If `names` does not contain `dcgm`.
pub fn set_level(policy: &mut Policy, names: &[CheckId], level: u8) -> Result<(), TestError> {
    let dcgm = names.iter().find(|name| name.as_str() == "dcgm").ok_or(TestError::LevelWithoutDcgm)?;
    let level = Setting { name: "level".to_owned(), value: i64::from(level).into() };
    set(policy, std::slice::from_ref(dcgm), &[level]);
    Ok(())
}

/// Runs these tests one after the other and classifies the observations.
///
/// # Errors
/// If one of them is not a test; then none is run.
pub fn test(
    names: &[CheckId],
    policy: &Policy,
    profile: Option<&Profile>,
    runner: &dyn ProbeRunner,
) -> Result<Vec<CheckResult>, TestError> {
    let catalogue = Catalogue::with_site_checks(policy);
    for name in names {
        is_test(&catalogue, name)?;
    }
    // The suite is ignored if there are names.
    Ok(check::check(names, Suite::Quick, policy, profile, runner)?)
}

fn is_test(catalogue: &Catalogue, name: &CheckId) -> Result<(), TestError> {
    match catalogue.get(name).map(|check| check.spec.depth) {
        Some(Depth::Deep) => Ok(()),
        Some(Depth::Quick) => Err(TestError::NotATest { name: name.to_string() }),
        None => {
            let deep = catalogue.iter().filter(|check| check.spec.depth == Depth::Deep);
            let suites = catalogue.suites().keys().map(CheckId::as_str);
            let known = deep.map(|check| check.spec.id).chain(suites).collect::<Vec<_>>().join(", ");
            Err(TestError::NoSuchTest { name: name.to_string(), known })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::{exit, exit_code},
        runner::FixtureRunner,
    };
    use doctor_checks::probe::{Probe, ProbeOutput};
    use doctor_core::{finding::Verdict, time::Span};

    fn site() -> Policy {
        let text = "[tests.quota.params]\ncommand = [\"/bin/quota\"]\ntimeout = \"5s\"\n";
        Policy::with_site_settings(text).unwrap()
    }

    fn run(name: &str, exit: i32) -> Result<Vec<CheckResult>, TestError> {
        let probe = Probe::Exec { program: "/bin/quota".into(), args: Vec::new(), timeout: Span::from_secs(5) };
        let output = ProbeOutput::Ran { exit: Some(exit), stdout: "93 % used\n".into(), stderr: String::new() };
        test(&[CheckId::new(name).unwrap()], &site(), None, &FixtureRunner::new([(probe, output)]))
    }

    #[test]
    fn a_test_is_classified_like_a_check() {
        for (code, verdict, exit) in
            [(0, Verdict::Pass, exit::OK), (1, Verdict::Fail, exit::WARNING), (3, Verdict::Inconclusive, exit::UNKNOWN)]
        {
            let results = run("quota", code).unwrap();
            assert_eq!((results[0].verdict, exit_code(&results)), (verdict, exit), "{results:?}");
        }
    }

    #[test]
    fn a_command_line_setting_overrides_the_policys() {
        let mut policy = site();
        let settings: Vec<Setting> =
            ["timeout=9s", "mounts = [\"/data\"]", "rate=500", "verify=false"].map(|text| text.parse().unwrap()).into();
        set(&mut policy, &[CheckId::new("quota").unwrap()], &settings);
        let params = &policy.tests["quota"].params;
        assert_eq!(params["timeout"].as_str(), Some("9s"));
        assert_eq!(params["mounts"][0].as_str(), Some("/data"));
        assert_eq!((params["rate"].as_integer(), params["verify"].as_bool()), (Some(500), Some(false)));
        assert!(params.contains_key("command"), "the others stay");
        for invalid in ["timeout", "=9s", "a b=1", "a.b=1"] {
            let error = invalid.parse::<Setting>().unwrap_err().to_string();
            assert!(error.contains("NAME=VALUE"), "{error}");
        }
    }

    #[test]
    fn an_unknown_test_is_rejected_with_the_list_of_known_ones() {
        let unknown = run("quotas", 0).unwrap_err().to_string();
        assert!(unknown.contains("`quotas`") && unknown.contains("aznhc") && unknown.contains("quota"), "{unknown}");
        assert!(!unknown.contains("disk-space"), "checks that only read are no tests: {unknown}");
        let quick = run("memory", 0).unwrap_err().to_string();
        assert!(quick.contains("doctor-node check memory"), "{quick}");
    }
}
