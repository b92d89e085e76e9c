//! Notes of a plan: one for each case that changes, and none for what did not change.

use std::collections::BTreeMap;

use super::cluster::{Cluster, NOW, Spans, acting, bad, free, name};
use crate::{
    alert::{self, CaseNotification, ChangeKind, Condition, Mute, Notification, Route, ServiceFacts, Subject},
    case::RepairStep,
    finding::{Severity, Verdict},
    ids::CaseId,
    plan::plan,
    snapshot::{Breaker, Snapshot},
    time::Span,
};

/// Returns the notes of the cluster's next plan, after which a minute passes.
fn next_notes(cluster: &mut Cluster, muted: &BTreeMap<CaseId, Mute>) -> Vec<Notification> {
    let notes = alert::case_notifications(&cluster.snapshot, &cluster.plan().actions, muted);
    cluster.cycle();
    notes
}

fn case_of(note: &Notification) -> &CaseNotification {
    match &note.subject {
        Subject::Case(case) => case,
        other => panic!("{other:?} is about no case"),
    }
}

fn kinds(notes: &[Notification]) -> Vec<String> {
    let kinds =
        |case: &CaseNotification| case.changes.iter().map(|change| change.what.code()).collect::<Vec<_>>().join("+");
    notes.iter().map(|note| format!("{} {}", case_of(note).node, kinds(case_of(note)))).collect()
}

fn none() -> BTreeMap<CaseId, Mute> {
    BTreeMap::new()
}

#[test]
fn a_case_is_notified_at_each_change_of_state_and_in_no_other_cycle() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reset)).machine("J1"));
    let mut all = Vec::new();
    for _ in 0..40 {
        all.extend(kinds(&next_notes(&mut cluster, &none())));
        if !cluster.snapshot.runs.is_empty() {
            cluster.ends("a", Verdict::Fail);
        }
    }
    assert_eq!(all, ["a opened", "a escalated", "a escalated", "a escalated"]);
    assert_eq!(cluster.snapshot.cases[0].repair_step, RepairStep::Replace);
}

#[test]
fn cases_that_open_in_one_cycle_are_notified_with_findings_and_command() {
    let nodes = ["a", "b"].map(|name| free(name).fresh().found(bad("dl", Severity::Reset)));
    let mut cluster = nodes.into_iter().fold(acting().fillers(30), Cluster::node);
    let notes = next_notes(&mut cluster, &none());
    assert_eq!(kinds(&notes), ["a opened", "b opened"]);
    let case = case_of(&notes[0]);
    assert!(case.open && case.findings.len() == 1 && case.more_findings == 0);
    assert_eq!(case.findings[0].check, "dl");
    assert_eq!(alert::command(&notes[0]), "doctor why a");
    assert_eq!(alert::headline(&notes), "2 cases opened (a,b)");
    let text = &alert::paragraphs(&notes)[0];
    assert!(text.contains("\n  severity reset: GPU reset needed\n"), "{text}");
    let json = serde_json::to_string(&notes).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Notification>>(&json).unwrap(), notes);
}

#[test]
fn a_handed_over_case_is_notified_and_its_end_even_if_acknowledged() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Isolate)));
    cluster = cluster.policy(|policy| policy.allow.replace = false);
    let mut all = Vec::new();
    for _ in 0..8 {
        all.extend(kinds(&next_notes(&mut cluster, &none())));
    }
    assert!(all.iter().any(|line| line.contains("handed-over")), "{all:?}");
    let case = cluster.snapshot.cases[0].id;
    let mute = Mute { by: "ann".into(), why: "seen".into(), at: NOW, until: None };
    let acknowledged = BTreeMap::from([(case, mute)]);
    cluster.ask(crate::snapshot::CommandKind::Release { node: name("a") });
    let mut after = Vec::new();
    for _ in 0..12 {
        let notes = next_notes(&mut cluster, &acknowledged);
        let text = alert::paragraphs(&notes).concat();
        assert!(!text.contains("out of service until repaired"), "a closed case requires nothing: {text}");
        after.extend(kinds(&notes));
        if !cluster.snapshot.runs.is_empty() {
            cluster.ends("a", Verdict::Pass);
        }
    }
    assert_eq!(after, ["a closed"]);
}

#[test]
fn a_snoozed_case_is_not_notified_until_the_snooze_ends() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reset)).machine("J1"));
    next_notes(&mut cluster, &none());
    let case = cluster.snapshot.cases[0].clone();
    let until = cluster.snapshot.at.plus(10.minutes());
    let mute = Mute { by: "ann".into(), why: "tomorrow".into(), at: NOW, until: Some(until) };
    let snoozed = BTreeMap::from([(case.id, mute.clone())]);
    let mut quiet = 0;
    let mut later = Vec::new();
    for _ in 0..40 {
        let is_over = cluster.snapshot.at >= until;
        let notes = next_notes(&mut cluster, &snoozed);
        if is_over {
            later.extend(kinds(&notes));
        } else {
            quiet += notes.len();
        }
        if !cluster.snapshot.runs.is_empty() {
            cluster.ends("a", Verdict::Fail);
        }
    }
    assert_eq!(quiet, 0);
    assert!(!later.is_empty());
    let note = alert::still_open(&case, &mute, until).unwrap();
    assert_eq!(kinds(&[note]), ["a still-open"]);
}

#[test]
fn a_worsened_case_is_notified_with_its_previous_severity() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reset)).machine("J1"));
    next_notes(&mut cluster, &none());
    cluster.record("a").findings.push(bad("storage", Severity::Isolate));
    let notes = next_notes(&mut cluster, &none());
    let case = case_of(notes.first().expect("a worse finding is a change"));
    assert!(case.changes.iter().any(|change| change.what == ChangeKind::Worsened), "{:?}", case.changes);
    assert_eq!((case.severity_before, case.severity), (Some(Severity::Reset), Severity::Isolate));
    assert_eq!(case.findings[0].severity, Severity::Isolate);
}

#[test]
fn a_receiver_gets_the_notes_that_its_route_accepts() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reboot)));
    let notes = next_notes(&mut cluster, &none());
    let route = |severity, changes: &[ChangeKind]| Route { severity, changes: changes.to_vec(), service: false };
    assert!(Route::default().accepts(&notes[0]));
    assert!(route(Severity::Reboot, &[]).accepts(&notes[0]));
    assert!(!route(Severity::Isolate, &[]).accepts(&notes[0]));
    assert!(route(Severity::Monitor, &[ChangeKind::Opened]).accepts(&notes[0]));
    assert!(!route(Severity::Monitor, &[ChangeKind::Closed]).accepts(&notes[0]));
    let breaker = service(|facts| facts.breaker = Breaker::Open { since: NOW, why: "many".into() });
    assert!(!route(Severity::Monitor, &[]).accepts(&breaker[0]) && Route::default().accepts(&breaker[0]));
}

fn facts() -> ServiceFacts {
    ServiceFacts {
        breaker: Breaker::Closed { since: None },
        agents_silent: false,
        unseen_for: Span::ZERO,
        cycle_old_after: 10.minutes(),
        rejected: 0,
        max_rejected: 10,
        undelivered: 0,
    }
}

fn service(change: impl FnOnce(&mut ServiceFacts)) -> Vec<Notification> {
    let mut facts = facts();
    change(&mut facts);
    alert::condition_changes(&BTreeMap::new(), &alert::conditions(&facts), NOW)
}

#[test]
fn a_service_condition_is_notified_once_when_raised_and_once_when_cleared() {
    assert!(service(|_| {}).is_empty());
    let mut all = facts();
    all.breaker = Breaker::Open { since: NOW, why: "9 nodes".into() };
    (all.agents_silent, all.unseen_for, all.rejected, all.undelivered) = (true, 11.minutes(), 11, 1);
    let there = alert::conditions(&all);
    assert_eq!(there.keys().copied().collect::<Vec<_>>(), Condition::ALL);
    let began = alert::condition_changes(&BTreeMap::new(), &there, NOW);
    assert_eq!(began.len(), Condition::ALL.len());
    let known: BTreeMap<_, _> = Condition::ALL.iter().map(|condition| (*condition, NOW)).collect();
    assert!(alert::condition_changes(&known, &there, NOW.plus(1.minutes())).is_empty());
    let ended = alert::condition_changes(&known, &BTreeMap::new(), NOW.plus(1.hours()));
    assert_eq!(ended.len(), Condition::ALL.len());
    assert!(alert::line(&ended[0]).ends_with("is over"), "{}", alert::line(&ended[0]));
}

#[test]
fn many_cases_give_one_headline_and_the_breaker_one_note() {
    let nodes = (0..40).map(|n| free(&format!("b{n:02}")).fresh().found(bad("dl", Severity::Isolate)));
    let cluster = nodes.fold(acting().fillers(400), Cluster::node);
    let snapshot: &Snapshot = &cluster.snapshot;
    let plan = plan(snapshot, &mut crate::ids::IdSource::new(1));
    let notes = alert::case_notifications(snapshot, &plan.actions, &none());
    let limit = snapshot.policy.breaker.nodes_per_hour as usize;
    assert_eq!(notes.len(), limit, "what the breaker holds back is no case yet");
    let headline = alert::headline(&notes);
    assert!(headline.starts_with(&format!("{limit} cases opened (b[")), "{headline}");
    assert!(alert::paragraphs(&notes).len() <= 21);
}

#[test]
fn text_from_a_node_is_truncated_to_one_line() {
    let mut open = bad("dl", Severity::Reset);
    open.finding.text = format!("\x1b[2J\r\n{}", "x".repeat(10_000));
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(open));
    let notes = next_notes(&mut cluster, &none());
    let line = alert::line(&notes[0]);
    assert!(line.chars().count() < 400 && !line.contains(char::is_control), "{line}");
}
