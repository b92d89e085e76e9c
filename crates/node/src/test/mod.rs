//! `doctor-node test NAME`: runs one test that loads the node, and judges it on the spot.
//!
//! A test is a check of the catalogue that is deep: it takes minutes, and it may occupy the GPUs. That is why it has a
//! command of its own, which has to be given its name, while `check` runs what may run at any time. All the rest is
//! the same: probes, interpretation, rules, table, JSON and exit codes.

use doctor_checks::{Catalogue, Depth};
use doctor_core::{ids::CheckId, policy::Policy, profile::Profile};

use crate::{
    check::{self, Answer, CheckError, Suite},
    runner::ProbeRunner,
};

#[derive(Debug, thiserror::Error)]
pub enum TestError {
    #[error("there is no test `{name}`; there are: {known}")]
    NoSuchTest { name: String, known: String },
    #[error("`{name}` is a check that only reads: `doctor-node check {name}`")]
    IsQuick { name: String },
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// Runs these tests, one after the other, and judges what they saw.
///
/// # Errors
/// If one of them is not a test. Then none is run.
pub fn test(
    names: &[CheckId],
    policy: &Policy,
    profile: Option<&Profile>,
    runner: &dyn ProbeRunner,
) -> Result<Vec<Answer>, TestError> {
    let catalogue = Catalogue::with_site_checks(policy);
    for name in names {
        is_test(&catalogue, name)?;
    }
    // With names, the suite is not asked.
    Ok(check::check(names, Suite::Quick, policy, profile, runner)?)
}

fn is_test(catalogue: &Catalogue, name: &CheckId) -> Result<(), TestError> {
    match catalogue.get(name).map(|check| check.spec.depth) {
        Some(Depth::Deep) => Ok(()),
        Some(Depth::Quick) => Err(TestError::IsQuick { name: name.to_string() }),
        None => {
            let deep = catalogue.iter().filter(|check| check.spec.depth == Depth::Deep);
            let known = deep.map(|check| check.spec.id).collect::<Vec<_>>().join(", ");
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
        Policy::over_defaults(text).unwrap()
    }

    fn run(name: &str, exit: i32) -> Result<Vec<Answer>, TestError> {
        let probe = Probe::Exec { program: "/bin/quota".into(), args: Vec::new(), timeout: Span::from_secs(5) };
        let output = ProbeOutput::Ran { exit: Some(exit), stdout: "93 % used\n".into(), stderr: String::new() };
        test(&[CheckId::new(name).unwrap()], &site(), None, &FixtureRunner::new([(probe, output)]))
    }

    #[test]
    fn a_test_is_judged_as_a_check_is() {
        for (code, verdict, exit) in
            [(0, Verdict::Pass, exit::OK), (1, Verdict::Fail, exit::WARNING), (3, Verdict::Inconclusive, exit::UNKNOWN)]
        {
            let answers = run("quota", code).unwrap();
            assert_eq!((answers[0].verdict, exit_code(&answers)), (verdict, exit), "{answers:?}");
        }
    }

    #[test]
    fn what_is_no_test_is_not_run_and_the_message_says_what_would_be() {
        let unknown = run("quotas", 0).unwrap_err().to_string();
        assert!(unknown.contains("`quotas`") && unknown.contains("aznhc") && unknown.contains("quota"), "{unknown}");
        assert!(!unknown.contains("disk-space"), "checks that only read are no tests: {unknown}");
        let quick = run("memory", 0).unwrap_err().to_string();
        assert!(quick.contains("doctor-node check memory"), "{quick}");
    }
}
