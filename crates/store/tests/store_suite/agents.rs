//! Agent reports and credentials, on every kind of store.

use doctor_checks::document::{DroppedReports, RunKey, Schema, Versions};
use doctor_core::time::{Span, Timestamp};
use doctor_store::records::{Accepted, AgentAuth, AgentContact, AgentFindings, AgentKey, HistoryFilter};

use crate::{
    bed::{StoreTestbed, finding, hardware, node, test},
    suite,
};

suite!(
    agents_open_and_clear_findings_without_history,
    an_agent_key_is_valid_until_it_is_revoked,
    an_agent_with_a_cluster_token_has_no_key_and_can_be_revoked,
    agent_contacts_are_stored_and_dropped_reports_are_audited,
);

fn agents_open_and_clear_findings_without_history(bed: &mut StoreTestbed) {
    let mut report = AgentFindings {
        node: node("n1"),
        number: 1,
        sent: bed.now,
        received: bed.now,
        by_check: [(test("gpu"), vec![finding("gpu", "gpu-hot", 1)])].into(),
        hardware: hardware("n1"),
        dropped: None,
    };
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    report.received = bed.wait(Span::minutes(1));
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Duplicate, "it was stored before");
    report.number = 2;
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    assert_eq!((stored.findings[0].sightings, stored.findings[0].run), (2, None));
    assert_eq!(stored.hardware, hardware("n1").id());
    assert_eq!(bed.store.audit(10, None).unwrap().len(), 1, "only a change is written to the audit trail");
    // The agent was reinstalled and restarts its numbering.
    (report.number, report.sent) = (1, bed.now);
    report.by_check.insert(test("gpu"), Vec::new());
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    assert!(bed.store.load_nodes().unwrap()[&node("n1")].findings.is_empty());
    assert!(bed.store.history(&HistoryFilter::default()).unwrap().is_empty());
}

fn an_agent_key_is_valid_until_it_is_revoked(bed: &mut StoreTestbed) {
    let (n1, first, second) = (node("n1"), RunKey::new([1; 32]), RunKey::new([2; 32]));
    assert_eq!(bed.store.agent_key(&n1).unwrap(), AgentKey::Unknown);
    assert!(!bed.store.revoke_agent(&n1, "ann", "lost", bed.now).unwrap());
    let operators = bed.store.operator_changes().unwrap();
    let key_now = |bed: &StoreTestbed| match bed.store.agent_key(&node("n1")).unwrap() {
        AgentKey::Enrolled { key, last_contact: None, .. } => key,
        other => panic!("{other:?}"),
    };
    bed.store.enroll_agent(&n1, &first, "ann", "new node", bed.now).unwrap();
    assert_eq!(key_now(bed), first);
    bed.store.enroll_agent(&n1, &second, "ann", "reinstalled", bed.now).unwrap();
    assert_eq!(key_now(bed), second, "one key at a time");
    assert!(bed.store.operator_changes().unwrap() > operators);
    assert!(bed.store.load_nodes().unwrap().is_empty(), "enrolling adds no node to the cluster");

    let at = bed.wait(Span::minutes(1));
    assert!(bed.store.revoke_agent(&n1, "ann", "stolen", at).unwrap());
    assert_eq!(bed.store.agent_key(&n1).unwrap(), AgentKey::Revoked);
    assert_eq!(bed.store.agents().unwrap()[0].revoked, Some(at));
    let actions: Vec<String> = bed.store.audit(10, None).unwrap().into_iter().map(|line| line.what).collect();
    assert_eq!(actions, ["revoke-agent", "enroll-agent", "enroll-agent"]);
}

fn an_agent_with_a_cluster_token_has_no_key_and_can_be_revoked(bed: &mut StoreTestbed) {
    let (n1, n2, key) = (node("n1"), node("n2"), RunKey::new([1; 32]));
    bed.store.enroll_agent(&n1, &key, "ann", "new node", bed.now).unwrap();
    let operators = bed.store.operator_changes().unwrap();
    for _ in 0..2 {
        bed.store.register_agents(&[(n1.clone(), bed.now), (n2.clone(), bed.now)]).unwrap();
    }
    assert!(matches!(bed.store.agent_key(&n1).unwrap(), AgentKey::Enrolled { key: known, .. } if known == key));
    assert_eq!(bed.store.agent_key(&n2).unwrap(), AgentKey::ClusterToken { last_contact: None });
    let auth: Vec<AgentAuth> = bed.store.agents().unwrap().iter().map(|agent| agent.auth).collect();
    assert_eq!(auth, [AgentAuth::Key, AgentAuth::Token]);
    assert_eq!(bed.store.operator_changes().unwrap(), operators, "no operator was involved");
    let actions: Vec<String> = bed.store.audit(10, None).unwrap().into_iter().map(|line| line.what).collect();
    assert_eq!(actions, ["introduce-agent", "enroll-agent"], "once, and only for the new one");

    assert!(bed.store.revoke_agent(&n2, "ann", "taken over", bed.now).unwrap());
    bed.store.register_agents(&[(n2.clone(), bed.now)]).unwrap();
    assert_eq!(bed.store.agent_key(&n2).unwrap(), AgentKey::Revoked, "only an operator can enroll it again");
}

fn agent_contacts_are_stored_and_dropped_reports_are_audited(bed: &mut StoreTestbed) {
    let contact = |number: u64, at: Timestamp| AgentContact {
        at,
        number,
        sent: at,
        versions: Versions { program: "0.1.0".to_owned(), schema: Schema::CURRENT, policy: 7, queued: 0 },
    };
    for name in ["n1", "n2", "n3"] {
        bed.store.enroll_agent(&node(name), &RunKey::new([1; 32]), "ann", "x", bed.now).unwrap();
    }
    bed.store.revoke_agent(&node("n2"), "ann", "x", bed.now).unwrap();
    let at = bed.wait(Span::minutes(1));
    let all: Vec<_> = ["n1", "n2", "n9"].map(|name| (node(name), contact(5, at))).into();
    bed.store.record_agent_contacts(&bed.lease, &all).unwrap();
    let known: Vec<_> = bed.store.agents().unwrap().into_iter().map(|agent| agent.last_contact).collect();
    assert_eq!(known, [Some(contact(5, at)), None, None], "neither revoked nor unknown agents are recorded");

    let dropped = DroppedReports { reports: 12, checks: [(test("gpu"), 9)].into(), from: at, to: at };
    let report = AgentFindings {
        node: node("n1"),
        number: 1,
        sent: at,
        received: at,
        by_check: [].into(),
        hardware: hardware("n1"),
        dropped: Some(dropped),
    };
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    let line = &bed.store.audit(1, None).unwrap()[0];
    assert_eq!(line.what, "reports-dropped");
    assert!(line.text.contains("12 reports") && line.text.contains("gpu 9"), "{}", line.text);
}
