//! Measured counts: what is kept of them, when a lower one is accepted, and what the engine expects by them.

use std::collections::BTreeMap;

use doctor_checks::{Catalogue, document::TestEvidence, probe::ProbeOutput};
use doctor_core::{
    classify::Baselines,
    ids::{CheckId, HardwareId, Sku},
    measured_count::MeasuredCount,
    observation::{FailureKind, ProbeFailure},
    plan::Action,
    policy::Policy,
    profile::Profiles,
    reason::WithReason,
    snapshot::CommandKind,
    time::{Span, Timestamp},
};
use doctor_engine::{
    baseline_reader::{BaselineQuery, BaselineReader},
    expectations::{NodesBySku, PeerAgreements},
    settings::Settings,
};

use crate::{
    bed::{StoreTestbed, node},
    suite,
};

suite!(
    counts_are_stored_exactly_and_replaced,
    a_number_of_gpus_that_no_machine_has_does_not_keep_the_nodes_from_loading,
    counts_survive_a_backup,
    a_release_accepts_the_present_counts_but_not_that_all_gpus_are_gone,
    new_hardware_has_no_earlier_counts,
    a_controller_without_the_lease_stores_no_counts,
    a_lower_count_is_expected_only_after_a_week_or_a_release,
    a_count_on_which_five_peers_agree_is_expected,
    a_result_that_could_not_be_read_or_was_not_stored_changes_no_count,
);

fn count(value: f64, since: Timestamp, accepted: f64, accepted_at: Timestamp) -> MeasuredCount {
    MeasuredCount { value, since, accepted, accepted_at }
}

/// Stores a count, first as the accepted one and then with its present value.
fn store(bed: &StoreTestbed, name: &str, metric: &str, accepted: f64, value: f64) {
    let first = MeasuredCount::first(accepted, bed.now.minus(Span::hours(2))).unwrap();
    let now = first.with(value, bed.now.minus(Span::hours(1)), Span::days(7));
    bed.store.record_measured_counts(&bed.lease, &[(node(name), metric.to_owned(), now)], bed.now).unwrap();
}

fn stored(bed: &StoreTestbed, name: &str) -> BTreeMap<String, MeasuredCount> {
    bed.store.measured_counts(&[node(name)]).unwrap().remove(&node(name)).unwrap_or_default()
}

fn accepted(bed: &StoreTestbed, name: &str) -> Vec<(String, f64)> {
    stored(bed, name).into_iter().map(|(metric, count)| (metric, count.accepted)).collect()
}

fn release(bed: &mut StoreTestbed, name: &str) {
    let command = CommandKind::Release { node: node(name) };
    let request = bed.store.add_command(&command, "ann", "repaired", bed.now).unwrap();
    bed.commit(&[WithReason::new(Action::CompleteCommand { command: request }, "operator", "requested by ann")]);
}

fn counts_are_stored_exactly_and_replaced(bed: &mut StoreTestbed) {
    let (then, now) = (bed.now, bed.wait(Span::hours(1)));
    let rows = [
        (node("n1"), "gpu_count".to_owned(), count(8.0, then, 8.0, then)),
        (node("n1"), "gpu_memory_bytes".to_owned(), count(150_754_820_096.0, then, 150_754_820_096.0, then)),
        (node("n2"), "odd".to_owned(), count(0.1 + 0.2, then, 1e300, then)),
    ];
    bed.store.record_measured_counts(&bed.lease, &rows, now).unwrap();
    let changed = (node("n1"), "gpu_count".to_owned(), count(7.0, now, 8.0, then));
    bed.store.record_measured_counts(&bed.lease, std::slice::from_ref(&changed), now).unwrap();
    let all = bed.store.measured_counts(&[node("n1"), node("n2"), node("n3")]).unwrap();
    assert_eq!(all.len(), 2, "nothing was measured on n3");
    assert_eq!(all[&node("n1")]["gpu_count"], changed.2);
    assert_eq!(all[&node("n1")]["gpu_memory_bytes"], rows[1].2);
    assert_eq!(all[&node("n2")]["odd"], rows[2].2);
    assert_eq!(bed.store.measured_counts(&[node("n2")]).unwrap().len(), 1);
    let mut accepted: Vec<_> = bed.store.accepted_counts().unwrap();
    accepted.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
    let accepted: Vec<_> = accepted.iter().map(|(name, metric, value)| (name.as_str(), &**metric, *value)).collect();
    assert_eq!(
        accepted,
        [("n1", "gpu_count", 8.0), ("n1", "gpu_memory_bytes", 150_754_820_096.0), ("n2", "odd", 1e300)]
    );
    let nodes = bed.store.load_nodes().unwrap();
    assert_eq!((nodes[&node("n1")].remembered_gpus, nodes[&node("n2")].remembered_gpus), (8, 0));
    assert_eq!(bed.store.load_nodes_named(&[node("n1")]).unwrap()[&node("n1")].remembered_gpus, 8);
    bed.assert_sound();
}

fn a_number_of_gpus_that_no_machine_has_does_not_keep_the_nodes_from_loading(bed: &mut StoreTestbed) {
    let rows = [("n1", 1e300), ("n2", 8.0)]
        .map(|(name, value)| (node(name), "gpu_count".to_owned(), count(value, bed.now, value, bed.now)));
    bed.store.record_measured_counts(&bed.lease, &rows, bed.now).unwrap();
    let nodes = bed.store.load_nodes().unwrap();
    assert_eq!((nodes[&node("n1")].remembered_gpus, nodes[&node("n2")].remembered_gpus), (u32::MAX, 8));
}

fn counts_survive_a_backup(bed: &mut StoreTestbed) {
    store(bed, "n1", "gpu_count", 8.0, 7.0);
    let path = bed.path("backup.db");
    bed.store.backup(&path).unwrap();
    let other = StoreTestbed::memory();
    other.store.restore(&path).unwrap();
    assert_eq!(stored(&other, "n1"), stored(bed, "n1"));
    assert_eq!(other.store.load_nodes().unwrap()[&node("n1")].remembered_gpus, 8);
}

fn a_release_accepts_the_present_counts_but_not_that_all_gpus_are_gone(bed: &mut StoreTestbed) {
    store(bed, "n1", "gpu_count", 8.0, 0.0);
    store(bed, "n1", "nvme_disks", 8.0, 6.0);
    store(bed, "n1", "cpu_cores", 96.0, 96.0);
    store(bed, "n2", "nvme_disks", 8.0, 6.0);
    let before = stored(bed, "n1")["cpu_cores"];
    release(bed, "n1");
    let owned =
        |list: &[(&str, f64)]| list.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<Vec<_>>();
    assert_eq!(accepted(bed, "n1"), owned(&[("cpu_cores", 96.0), ("gpu_count", 8.0), ("nvme_disks", 6.0)]));
    assert_eq!(stored(bed, "n1")["nvme_disks"].accepted_at, bed.now);
    assert_eq!(stored(bed, "n1")["cpu_cores"], before);
    assert_eq!(accepted(bed, "n2"), owned(&[("nvme_disks", 8.0)]), "another node");
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].remembered_gpus, 8, "it is remembered to have had them");
}

fn new_hardware_has_no_earlier_counts(bed: &mut StoreTestbed) {
    store(bed, "n1", "gpu_count", 8.0, 8.0);
    store(bed, "n2", "gpu_count", 8.0, 8.0);
    let hardware = HardwareId::new("board-SN-other").unwrap();
    let replaced = Action::HardwareReplaced { node: node("n1"), hardware };
    bed.commit(&[WithReason::new(replaced, "machine-exchanged", "new")]);
    assert!(stored(bed, "n1").is_empty() && !stored(bed, "n2").is_empty());
    let nodes = bed.store.load_nodes().unwrap();
    assert_eq!((nodes[&node("n1")].remembered_gpus, nodes[&node("n2")].remembered_gpus), (0, 8));
}

fn a_controller_without_the_lease_stores_no_counts(bed: &mut StoreTestbed) {
    let stale = bed.lease.clone();
    bed.lease = bed.store.acquire("another", bed.now.plus(Span::days(40_000)), Span::days(1)).unwrap();
    let row = (node("n1"), "gpu_count".to_owned(), MeasuredCount::first(8.0, bed.now).unwrap());
    assert!(bed.store.record_measured_counts(&stale, &[row], bed.now).is_err());
    assert!(stored(bed, "n1").is_empty());
}

fn settings() -> Settings {
    Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap()
}

fn sku() -> Sku {
    Sku::new("rack-9").unwrap()
}

/// The evidence of `nvme-count` with this output.
fn evidence(bed: &StoreTestbed, output: ProbeOutput) -> TestEvidence {
    let id = CheckId::new("nvme-count").unwrap();
    let probes = (settings().catalogue.get(&id).unwrap().probes)(&Default::default());
    TestEvidence { test: id, started: bed.now, ended: bed.now, probes: probes.into_iter().zip([output]).collect() }
}

fn disks(count: usize) -> ProbeOutput {
    ProbeOutput::Names((0..count).map(|disk| format!("nvme{disk}")).collect())
}

/// Classifies a result with this output, as the engine does; returns its baselines. `is_stored` is whether the result is
/// accepted.
fn report(
    bed: &StoreTestbed,
    agreements: &mut PeerAgreements,
    name: &str,
    output: ProbeOutput,
    is_stored: bool,
) -> Baselines {
    let settings = settings();
    let all = ["n0", "n1", "n2", "n3", "n4", "n5", "n6"].map(node);
    let nodes_by_sku = || NodesBySku::from([(sku(), all.to_vec())]);
    let mut reader = BaselineReader::new(&bed.store, &settings, agreements, nodes_by_sku);
    reader.announce(all.clone());
    let (node, sku, evidence) = (node(name), sku(), evidence(bed, output));
    let query = BaselineQuery { node: &node, sku: Some(&sku), evidence: &evidence, before: bed.now };
    let baselines = reader.load(query).unwrap();
    let counts = reader.take_counts();
    if is_stored {
        reader.add_counts(&node, &counts, bed.now).unwrap();
    }
    reader.write_counts(&bed.lease, bed.now).unwrap();
    baselines
}

/// Returns the accepted count with which the result of `n1` is compared.
fn expected(bed: &StoreTestbed, disks_found: usize) -> Option<f64> {
    let baselines = report(bed, &mut PeerAgreements::default(), "n1", disks(disks_found), true);
    baselines.accepted.get("nvme_disks").copied()
}

fn a_lower_count_is_expected_only_after_a_week_or_a_release(bed: &mut StoreTestbed) {
    assert_eq!(expected(bed, 8), None, "nothing to compare with");
    bed.wait(Span::hours(1));
    assert_eq!(expected(bed, 8), Some(8.0));
    let since_first = stored(bed, "n1")["nvme_disks"].since;
    assert_eq!(since_first, bed.now.minus(Span::hours(1)), "an unchanged count is not written");
    assert_eq!(expected(bed, 6), Some(8.0));
    bed.wait(Span::days(6));
    assert_eq!(expected(bed, 6), Some(8.0));
    bed.wait(Span::days(1));
    assert_eq!(expected(bed, 6), Some(6.0), "it has lasted for a week");
    assert_eq!(expected(bed, 7), Some(7.0), "a higher one is accepted with the result that has it");
    assert_eq!(expected(bed, 5), Some(7.0));
    release(bed, "n1");
    assert_eq!(expected(bed, 5), Some(5.0));
    bed.wait(Span::days(30));
    assert_eq!(expected(bed, 0), Some(5.0));
    bed.wait(Span::days(30));
    assert_eq!(expected(bed, 0), Some(5.0), "that all are gone is not accepted by itself");
}

fn a_count_on_which_five_peers_agree_is_expected(bed: &mut StoreTestbed) {
    let mut agreements = PeerAgreements::default();
    for name in ["n0", "n1", "n2", "n3"] {
        assert!(report(bed, &mut agreements, name, disks(8), true).agreed.is_empty(), "{name}");
    }
    let agreed = |baselines: &Baselines| baselines.agreed.get("nvme_disks").copied();
    assert_eq!(agreed(&report(bed, &mut agreements, "n5", disks(7), true)), None, "four peers");
    assert_eq!(agreed(&report(bed, &mut agreements, "n4", disks(8), true)), None, "four of five peers are four");
    assert_eq!(agreed(&report(bed, &mut agreements, "n5", disks(7), true)), Some(8.0), "five peers");
    assert_eq!(agreed(&report(bed, &mut agreements, "n0", disks(8), true)), None, "four others");
    assert_eq!(agreed(&report(bed, &mut agreements, "n6", disks(0), true)), Some(8.0), "five of six");
    // A fleet that loses its disks at once does not agree on that.
    for name in ["n0", "n1", "n2", "n3", "n4"] {
        report(bed, &mut agreements, name, disks(4), true);
    }
    assert_eq!(agreed(&report(bed, &mut agreements, "n6", disks(0), true)), Some(8.0));
}

fn a_result_that_could_not_be_read_or_was_not_stored_changes_no_count(bed: &mut StoreTestbed) {
    let mut agreements = PeerAgreements::default();
    report(bed, &mut agreements, "n1", disks(8), false);
    assert!(stored(bed, "n1").is_empty(), "not stored");
    report(bed, &mut agreements, "n1", disks(8), true);
    let failed = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "no"));
    let baselines = report(bed, &mut agreements, "n1", failed, true);
    assert_eq!(baselines.accepted["nvme_disks"], 8.0);
    assert_eq!(stored(bed, "n1")["nvme_disks"].value, 8.0);
}
