//! The engine over days: rules that use earlier results are applied as results arrive, and give the same verdicts when
//! results are classified again; evidence that a repair destroys is saved before it.

use std::collections::BTreeMap;

use doctor_core::{
    case::{Case, StepState},
    finding::Verdict,
    ids::NodeName,
    policy::{Allow, Mode, Policy},
    time::Span,
};
use doctor_engine::reclassify::{Scope, reclassify};
use doctor_sim::{
    WorldConfig,
    harness::{Session, SessionConfig},
    simulated_tests,
};
use doctor_store::records::HistoryFilter;

/// Every kind of rule that uses more than the result itself. Noise alone violates them now and then.
const RULES: &str = r#"
version = 3
[tests.gpu-health]
enabled = false
[tests.nccl]
cutoff = "2h"
[limits]
jobs = 12

[[rules]]
id = "beside-peers"
check = "nccl"
metric = "allreduce_bandwidth"
below_percent_of_peers = 100.0
peers_at_least = 4
severity = "monitor"
reason = "slower-than-peers"
text = "{value} of {limit}"

[[rules]]
id = "beside-itself"
check = "nccl"
metric = "nic_bandwidth"
below_percent_of_own = 100.0
own_at_least = 3
severity = "monitor"
reason = "slower-than-itself"
text = "{entity}: {value} of {limit}"

[[rules]]
id = "again-and-again"
check = "nccl"
metric = "allreduce_bandwidth"
below_percent_of_own = 100.0
own_at_least = 1
n_of_last_m = [3, 4]
severity = "monitor"
reason = "slow-again-and-again"
text = "{value} of {limit}"
"#;

#[test]
fn results_are_classified_with_their_history_and_reclassifying_gives_the_same() {
    let mut config = SessionConfig::new(WorldConfig::quiet(8));
    config.policy = Policy::with_site_settings(RULES).unwrap();
    let mut session = Session::new(config).unwrap();
    let until = session.now().plus(Span::days(2));
    session.run_until(until, |_, _| Ok(())).unwrap();

    let rows = session.store().history(&HistoryFilter::default()).unwrap();
    let because =
        |reason: &str| rows.iter().filter(|row| row.verdict == Verdict::Fail && row.reason.as_str() == reason).count();
    assert!(rows.len() > 50, "{}", rows.len());
    // The reason of a result is that of its first finding: with three rules of one severity, the first by name.
    for reason in ["slower-than-itself", "slow-again-and-again", "slower-than-peers"] {
        assert!(because(reason) > 2, "{reason}: {}", because(reason));
    }

    let types: BTreeMap<NodeName, _> = rows.iter().map(|row| (row.node.clone(), simulated_tests::sku())).collect();
    let since = until.minus(Span::days(3));
    let rejudged = reclassify(session.store(), session.settings(), &Scope { nodes: None, since, types }).unwrap();
    assert_eq!(rejudged.changed, [], "a verdict is a function of evidence, rules, profile and past");
    assert_eq!(rejudged.reclassified, rows.len() as u64, "{:?}", rejudged.skipped);
}

#[test]
fn a_support_bundle_is_on_the_share_before_a_reset_or_reboot() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = SessionConfig::new(WorldConfig::of(48).with_seed(11));
    config.share = Some(folder.path().to_owned());
    config.policy.mode = Mode::Act;
    config.policy.allow = Allow { mark: true, drain: true, evict: false, reset: true, reboot: true, replace: false };
    let mut session = Session::new(config).unwrap();
    let until = session.now().plus(Span::days(6));
    session.run_until(until, |_, _| Ok(())).unwrap();

    let destroyed =
        |case: &&Case| case.steps.iter().any(|step| step.what.destroys_evidence() && step.state == StepState::Done);
    let cases = session.store().cases_all(1000).unwrap();
    let destroyed: Vec<&Case> = cases.iter().filter(destroyed).collect();
    assert!(!destroyed.is_empty(), "nothing was repaired in {} cases", cases.len());
    let bundles: Vec<String> = std::fs::read_dir(folder.path().join("handoff"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    for case in destroyed {
        for step in case.steps.iter().filter(|step| step.what.destroys_evidence() && step.state == StepState::Done) {
            let name = format!("{}-{}.tar.gz", case.id, step.repair_step);
            assert!(bundles.contains(&name), "{name} is not among {bundles:?}");
        }
    }
}

#[test]
fn a_controller_that_has_lost_the_lease_leaves_the_published_files_to_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = SessionConfig::new(WorldConfig::of(4).with_seed(3));
    config.share = Some(folder.path().to_owned());
    let list = folder.path().join("metadata/free_nodes.txt");
    let mut session = Session::new(config).unwrap();
    session.cycle().unwrap();
    session.stop().unwrap();
    assert!(list.exists(), "a controller that stops publishes a last time");

    session.cycle().unwrap();
    let later = session.now().plus(Span::minutes(1));
    session.store().acquire("the next one", later, Span::hours(1)).unwrap();
    std::fs::write(&list, "of the next one\n").unwrap();
    let lost = session.stop().unwrap_err();
    assert!(lost.to_string().contains("the next one"), "{lost}");
    assert_eq!(std::fs::read_to_string(&list).unwrap(), "of the next one\n");
}
