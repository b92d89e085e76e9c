//! The shipped deep tests on a simulated cluster: their names, durations, periods and suites are the real ones. Each
//! measures what one of the simulated tests measures.
//!
//! With them, the default policy is simulated as it is shipped, with DCGM, fio, NCCL and perftest installed on every
//! node, and with one file system that all nodes share and that `storage` tests.

use std::{collections::BTreeMap, sync::LazyLock};

use doctor_checks::{Catalogue, Check, Spec, interpret_measurements};
use doctor_core::{ids::TestId, policy::Policy, time::Span};

use crate::simulated_tests::{self, DL, GPU_HEALTH, NCCL, STORAGE};

/// A shipped test, and the simulated one whose measurements it has.
const TESTS: [(&str, &str); 5] =
    [("collective", NCCL), ("dcgm", DL), ("dl", DL), ("fabric", NCCL), ("storage", STORAGE)];

/// Returns the shipped deep tests and suites, and the check of the agents, which jobs do not run.
pub fn catalogue() -> Catalogue {
    Catalogue::with_built_in_suites(CHECKS.iter().copied())
}

/// Returns the simulated test that a shipped test or a variant of one stands for.
pub(crate) fn stands_for(test: &TestId) -> Option<&'static str> {
    let catalogue = &*CATALOGUE;
    let base = catalogue.base_test(test).unwrap_or(test);
    let simulated = TESTS.iter().find(|(id, _)| *id == base.as_str()).map(|(_, simulated)| *simulated);
    simulated.or((base.as_str() == GPU_HEALTH).then_some(GPU_HEALTH))
}

/// Returns the usual duration of a shipped test, also of those that are not simulated: a job of them delivers no result.
pub(crate) fn typical_duration(test: &TestId) -> Option<Span> {
    static DURATIONS: LazyLock<BTreeMap<TestId, Span>> = LazyLock::new(|| {
        let policy = Policy::built_in();
        let tests = Catalogue::with_site_checks(&policy).tests(&policy);
        tests.into_iter().map(|test| (test.id, test.typical_duration)).collect()
    });
    match test.as_str() {
        GPU_HEALTH => simulated_tests::typical_value(test),
        _ => DURATIONS.get(test).copied(),
    }
}

static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(catalogue);

static CHECKS: LazyLock<Vec<Check>> = LazyLock::new(|| {
    let health = simulated_tests::check(GPU_HEALTH);
    let health = Check { spec: Spec { opt_in: true, ..health.spec }, ..*health };
    TESTS.iter().filter_map(|(id, simulated)| check(id, simulated)).chain([health]).collect()
});

/// Returns the simulated test with the specification of the shipped one. Its rules are leaked once, like those of every
/// other check.
fn check(id: &str, simulated: &'static str) -> Option<Check> {
    let shipped = doctor_checks::CHECKS.iter().find(|check| check.spec.id == id)?;
    let simulated_check = simulated_tests::check(simulated);
    let rules = simulated_check
        .rules
        .replace("id = \"", &format!("id = \"{id}-"))
        .replace(&format!("check = \"{simulated}\""), &format!("check = \"{id}\""));
    Some(Check {
        spec: Spec { shares: simulated_check.spec.shares, shared_param: None, ..shipped.spec },
        page: simulated_check.page,
        rules: String::leak(rules),
        probes: simulated_check.probes,
        interpret: interpret_measurements,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_routine_test_of_the_default_policy_can_be_simulated() {
        let policy = Policy::built_in();
        let shipped = Catalogue::with_site_checks(&policy);
        let deep = |catalogue: &Catalogue| {
            let tests = catalogue.tests(&policy).into_iter().filter(|test| test.routine && test.exclusive);
            tests.map(|test| (test.id, test.cutoff, test.typical_duration, test.maintenance)).collect::<Vec<_>>()
        };
        let simulated = deep(&catalogue());
        assert_eq!(simulated, deep(&shipped));
        for (test, _, duration, _) in simulated {
            assert_eq!(typical_duration(&test), Some(duration), "{test}");
            assert!(stands_for(&test).is_some(), "{test}");
        }
    }

    #[test]
    fn variants_are_simulated_beside_the_real_catalogue() {
        let _real = Catalogue::with_site_checks(&Policy::built_in());
        let own = catalogue();
        let page = |id: &str| own.get(&TestId::new(id).unwrap()).unwrap().page_text();
        assert_eq!(page("collective-loopback"), page("collective"));
        assert_eq!(page("collective"), simulated_tests::check(NCCL).page_text());
    }

    #[test]
    fn every_rule_belongs_to_a_test_and_has_its_own_id() {
        let rules = catalogue().rules(&Policy::built_in()).unwrap();
        let ids: std::collections::BTreeSet<_> = rules.iter().map(|rule| &rule.id).collect();
        assert_eq!(ids.len(), rules.len());
        for (id, _) in TESTS {
            assert!(rules.iter().any(|rule| rule.check.as_str() == id), "{id} has no rule");
        }
    }
}
