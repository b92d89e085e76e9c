//! Findings about a program that disturbs the same test of a node again and again.
//!
//! A disturbed result is inconclusive, and the test is retried. If the same program disturbed the last results, too,
//! retries do not help: the newest result then carries a finding that names it. The programs are those of the stored
//! evidence, so that the finding can be derived again.

use std::collections::BTreeSet;

use doctor_checks::document::Document;
use doctor_core::{
    classify::{DISTURBED_LIMIT, disturbed_repeatedly},
    finding::Verdict,
    ids::{NodeName, TestId},
    observation::{Event, FailureKind, Observation},
    reason::ReasonCode,
};
use doctor_store::{
    Store, StoreError,
    records::{ClassifiedResult, HistoryFilter},
};

use crate::settings::Settings;

/// Adds a finding to each disturbed result whose disturber also disturbed the results before it.
///
/// # Errors
/// If the store cannot be read.
pub(crate) fn add_findings<'a>(
    store: &Store,
    settings: &Settings,
    results: impl IntoIterator<Item = &'a mut ClassifiedResult>,
) -> Result<(), StoreError> {
    for result in results {
        if !result.outcomes.iter().any(|outcome| is_disturbed(outcome.verdict, &outcome.reason)) {
            continue;
        }
        let Ok(document) = Document::parse_stored(&result.evidence) else { continue };
        for outcome in result.outcomes.iter_mut().filter(|outcome| is_disturbed(outcome.verdict, &outcome.reason)) {
            let now = disturbances(settings, &document, &outcome.test);
            if let Some(event) = repeated(store, settings, &result.node, &outcome.test, now)? {
                outcome.findings.push(disturbed_repeatedly(&outcome.test, &event));
            }
        }
    }
    Ok(())
}

fn is_disturbed(verdict: Verdict, reason: &ReasonCode) -> bool {
    verdict == Verdict::Inconclusive && reason.as_str() == FailureKind::Disturbed.code()
}

/// Returns the first of these disturbances whose disturber is also in the results before it.
fn repeated(
    store: &Store,
    settings: &Settings,
    node: &NodeName,
    test: &TestId,
    mut now: Vec<Event>,
) -> Result<Option<Event>, StoreError> {
    let earlier = DISTURBED_LIMIT - 1;
    let filter = HistoryFilter {
        node: Some(node.clone()),
        test: Some(test.clone()),
        limit: u32::try_from(earlier).ok(),
        ..HistoryFilter::default()
    };
    let rows = store.history(&filter)?;
    if rows.len() < earlier || !rows.iter().all(|row| is_disturbed(row.verdict, &row.reason)) {
        return Ok(None);
    }
    for row in &rows {
        let stored = match row.run {
            Some(run) => store.evidence(run, node)?.filter(|stored| !stored.truncated),
            None => None,
        };
        let document = stored.and_then(|stored| Document::parse_stored(&stored.bytes).ok());
        let events = document.map_or_else(Vec::new, |document| disturbances(settings, &document, test));
        let disturbers: BTreeSet<&str> = events.iter().filter_map(|event| event.key.as_deref()).collect();
        now.retain(|event| event.key.as_deref().is_some_and(|key| disturbers.contains(key)));
    }
    Ok(now.into_iter().next())
}

/// Returns the disturbances of one test.
fn disturbances(settings: &Settings, document: &Document, test: &TestId) -> Vec<Event> {
    let evidence = document.tests.iter().find(|evidence| evidence.test == *test);
    let Some((evidence, check)) = evidence.zip(settings.catalogue.get(test)) else { return Vec::new() };
    match check.observe(&settings.catalogue.params(&settings.policy, test), evidence) {
        Observation::Measured { events, .. } => events.into_iter().filter(Event::is_disturbance).collect(),
        Observation::NotApplicable(_) | Observation::Failed(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use doctor_checks::{
        Catalogue,
        document::{Measurements, RunKey},
        probe::{Probe, ProbeOutput},
    };
    use doctor_core::{
        finding::{OpenFinding, Severity},
        ids::{IdSource, RunId},
        node::Hardware,
        observation::{Entity, EntityKind, ProbeFailure},
        plan::Action,
        policy::Policy,
        profile::Profiles,
        reason::WithReason,
        run::{NonEmpty, Outcome, Purpose, Run, RunState},
        time::{Span, Timestamp},
    };
    use doctor_store::{Lease, records::CycleIntent};
    use serde_json::json;

    use super::*;

    /// A node whose test `dl` ends again and again.
    struct Bed {
        store: Store,
        settings: Settings,
        lease: Lease,
        ids: IdSource,
        now: Timestamp,
    }

    impl Bed {
        fn new() -> Self {
            let (store, now) = (Store::open_in_memory().unwrap(), Timestamp::from_secs(1_794_729_600));
            let lease = store.acquire("tests", now, Span::days(1000)).unwrap();
            let settings = Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap();
            Self { store, settings, lease, ids: IdSource::new(1), now }
        }

        fn plan(&mut self) -> RunId {
            self.now = self.now.plus(Span::hours(1));
            self.ids.set_time(self.now);
            let run = Run {
                id: self.ids.run(),
                nodes: NonEmpty::one(node()),
                tests: NonEmpty::one(dl()),
                state: RunState::Planned,
                purpose: WithReason::new(Purpose::Validation, "due", "due"),
                case: None,
                planned: self.now,
                limit: Span::minutes(30),
            };
            let id = run.id;
            let intent = CycleIntent {
                at: self.now,
                actions: &[WithReason::new(Action::Submit(run), "due", "due")],
                keys: &[(id, RunKey::new([1; 32]))].into(),
                attributed_findings: &[],
                changed_reasons: &[],
                policy_version: 1,
                retry: &self.settings.policy.retry,
                notifications: &[],
            };
            self.store.commit(&self.lease, &intent).unwrap();
            id
        }

        /// Ends a run, disturbed by this program if one is given, and returns the findings open against the node.
        fn end_run(&mut self, disturber: Option<&str>) -> Vec<OpenFinding> {
            let run = self.plan();
            let (verdict, reason) = match disturber {
                Some(_) => (Verdict::Inconclusive, FailureKind::Disturbed.code()),
                None => (Verdict::Pass, "within-limits"),
            };
            let outcome = Outcome {
                node: node(),
                test: dl(),
                verdict,
                reason: ReasonCode::fixed(reason),
                at: self.now,
                duration: Span::from_secs(30),
                findings: Vec::new(),
            };
            let mut result = ClassifiedResult {
                run,
                node: node(),
                outcomes: vec![outcome],
                hardware: Hardware::default(),
                evidence: self.evidence(run, disturber),
                complete: true,
                received: self.now,
                policy_version: 1,
                profile_version: None,
            };
            add_findings(&self.store, &self.settings, [&mut result]).unwrap();
            self.store.accept(&self.lease, &[result]).unwrap();
            self.store.load_nodes().unwrap()[&node()].findings.clone()
        }

        fn evidence(&self, run: RunId, disturber: Option<&str>) -> Vec<u8> {
            let gpu = || Entity::new(EntityKind::Gpu, "0000:18:00.0");
            let event = |by: &str| Event::disturbed(gpu(), by, format!("used by {by} (pid {})", self.now.millis()));
            let failure = ProbeFailure::new(FailureKind::Disturbed, "used");
            let measured = Measurements {
                metrics: Vec::new(),
                events: disturber.into_iter().map(event).collect(),
                failures: disturber.map(|_| failure).into_iter().collect(),
            };
            let output = ProbeOutput::Text(serde_json::to_string(&measured).unwrap());
            let check = self.settings.catalogue.get(&dl()).unwrap();
            let probes = (check.probes)(&self.settings.catalogue.params(&self.settings.policy, &dl()));
            let output_of = |probe: &Probe| match probe {
                Probe::Builtin { .. } => output.clone(),
                _ => ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "no answer")),
            };
            let probes: Vec<_> = probes.into_iter().map(|probe| (probe.clone(), output_of(&probe))).collect();
            let document: Document = serde_json::from_value(json!({
                "run": run, "node": node(), "hardware": Hardware::default(), "started": self.now, "ended": self.now,
                "tests": [{ "test": dl(), "started": self.now, "ended": self.now, "probes": probes }],
            }))
            .unwrap();
            document.sign(&RunKey::new([1; 32])).unwrap()
        }
    }

    fn node() -> NodeName {
        NodeName::new("n1").unwrap()
    }

    fn dl() -> TestId {
        TestId::new("dl").unwrap()
    }

    #[test]
    fn the_same_disturber_three_times_in_a_row_is_a_finding_until_a_result_is_undisturbed() {
        let mut bed = Bed::new();
        let python = Some("python3 of uid 1000");
        assert_eq!((bed.end_run(python).len(), bed.end_run(python).len()), (0, 0));
        let open = bed.end_run(python);
        assert_eq!(open.len(), 1, "{open:?}");
        let found = &open[0].finding;
        assert_eq!(
            (found.severity, found.reason.as_str(), open[0].is_confirmed()),
            (Severity::Monitor, "disturbed-repeatedly", true)
        );
        assert!(found.text.starts_with("dl disturbed 3 times in a row by python3 of uid 1000: used by"), "{found:?}");
        assert_eq!(bed.end_run(python)[0].sightings, 2, "it is renewed");
        assert!(bed.end_run(None).is_empty());
    }

    #[test]
    fn disturbances_by_different_programs_or_with_a_result_between_them_are_none() {
        let mut bed = Bed::new();
        let (python, jupyter) = (Some("python3 of uid 1000"), Some("jupyter of uid 1000"));
        for disturber in [python, jupyter, python, None, python, python, jupyter, jupyter] {
            assert!(bed.end_run(disturber).is_empty(), "{disturber:?}");
        }
        assert_eq!(bed.end_run(jupyter).len(), 1);
    }
}
