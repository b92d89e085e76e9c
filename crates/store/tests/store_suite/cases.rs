//! Cases, the breaker and operator commands, on every kind of store.

use doctor_core::{
    case::{
        Case, CaseOutcome, CaseState, OperatorRequest, Repair, RepairStep, RequestedRepair, SentRepair, StepKind,
        StepState,
    },
    finding::{Severity, Verdict},
    ids::{CaseId, OpId, PoolName},
    lifecycle::NodeState,
    node::Hold,
    plan::{Action, Notice},
    reason::WithReason,
    snapshot::{Breaker, CommandKind, Pause},
    time::Span,
};

use doctor_store::SendPermit;

use crate::{
    bed::{StoreTestbed, finding, hardware, node, test},
    suite,
};

suite!(
    a_case_is_stored_step_by_step_and_closing_it_frees_the_node,
    a_case_is_rebound_when_its_hardware_moves_to_another_name,
    the_breaker_counts_our_quarantines_and_not_those_of_operators,
    operator_commands_are_read_back_and_audited,
    a_requested_repair_is_sent_once_and_not_during_a_pause,
    a_withdrawn_step_and_command_are_gone_and_audited,
);

pub(crate) fn new_case(bed: &mut StoreTestbed, name: &str) -> Case {
    bed.ids.set_time(bed.now);
    Case {
        id: bed.ids.case(),
        hardware: hardware(name).id().unwrap(),
        node: node(name),
        opened: bed.now,
        severity: Severity::Reset,
        findings: vec![finding("gpu", "gpu-hot", 3)],
        repair_step: RepairStep::Reset,
        steps: Vec::new(),
        state: CaseState::Open,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    }
}

pub(crate) fn open_case(bed: &mut StoreTestbed, name: &str) -> Case {
    let case = new_case(bed, name);
    let to = NodeState::Quarantined;
    bed.commit(&[
        WithReason::new(Action::OpenCase(case.clone()), "confirmed", "hot"),
        WithReason::new(Action::SetState { node: node(name), to, case: Some(case.id) }, "confirmed", "hot"),
    ]);
    case
}

fn a_case_is_stored_step_by_step_and_closing_it_frees_the_node(bed: &mut StoreTestbed) {
    bed.run_test("n1", "gpu", Verdict::Fail);
    let case = open_case(bed, "n1");
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    assert_eq!((stored.state, stored.case, stored.state_since), (NodeState::Quarantined, Some(case.id), bed.now));

    let (mark, reset) = (bed.ids.op(), bed.ids.op());
    let step = |step, op| Action::Step { case: case.id, node: node("n1"), step, op, attempts: 1 };
    bed.commit(&[WithReason::new(step(StepKind::Mark, mark), "confirmed", "hot")]);
    bed.store.record_step(&bed.lease, case.id, mark, Ok(()), bed.now).unwrap();
    bed.commit(&[WithReason::new(step(StepKind::Reset, reset), "next", "try")]);
    bed.store.record_step(&bed.lease, case.id, reset, Err("driver is stuck"), bed.now).unwrap();
    bed.commit(&[WithReason::new(Action::Escalate { case: case.id, to: RepairStep::Reboot }, "failed", "up")]);
    let proposed = bed.ids.op();
    let propose = Action::Propose { case: case.id, node: node("n1"), step: StepKind::Reboot, op: proposed };
    bed.commit(&[WithReason::new(propose, "not-allowed", "ask")]);
    bed.commit(&[WithReason::new(
        Action::CompleteStep { case: case.id, op: proposed, done: true },
        "seen",
        "rebooted",
    )]);
    let (prove, drain) = (bed.ids.op(), bed.ids.op());
    bed.commit(&[WithReason::new(step(StepKind::Requalify, prove), "proof", "prove it")]);
    bed.commit(&[WithReason::new(step(StepKind::Drain, drain), "case", "drain it")]);
    let stored = bed.store.case(case.id).unwrap().unwrap();
    let steps: Vec<_> = stored.steps.iter().map(|step| (step.what, step.state, step.repair_step)).collect();
    assert_eq!(
        steps,
        [
            (StepKind::Mark, StepState::Done, RepairStep::Reset),
            (StepKind::Reset, StepState::Failed, RepairStep::Reset),
            (StepKind::Reboot, StepState::Done, RepairStep::Reboot),
            // A bookkeeping step is done with the plan; a step that touches the cluster is not.
            (StepKind::Requalify, StepState::Done, RepairStep::Reboot),
            (StepKind::Drain, StepState::Intended, RepairStep::Reboot)
        ]
    );
    assert_eq!(stored.steps[1].text, "driver is stuck");
    let unknown = bed.ids.op();
    assert!(bed.store.record_step(&bed.lease, case.id, unknown, Ok(()), bed.now).is_err());

    bed.wait(Span::hours(1));
    bed.run_test("n1", "disk", Verdict::Fail);
    bed.commit(&[WithReason::new(Action::RaiseSeverity { case: case.id, node: node("n1") }, "worse", "disk too")]);
    assert_eq!(bed.store.case(case.id).unwrap().unwrap().findings.len(), 2);
    bed.assert_sound();

    let close = Action::CloseCase { case: case.id, node: node("n1"), how: CaseOutcome::Returned };
    bed.commit(&[WithReason::new(close, "proved", "well")]);
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    assert_eq!((stored.case, stored.findings.len()), (None, 0));
    let closed_at = bed.now;
    assert_eq!(bed.store.cases(closed_at.minus(Span::from_secs(1))).unwrap().len(), 1);
    assert!(bed.store.cases(closed_at).unwrap().is_empty());
    assert_eq!(bed.store.cases_all(10).unwrap().len(), 1);
    bed.assert_sound();
}

fn a_case_is_rebound_when_its_hardware_moves_to_another_name(bed: &mut StoreTestbed) {
    let case = open_case(bed, "n1");
    bed.commit(&[WithReason::new(
        Action::RebindCase { case: case.id, node: node("n9") },
        "machine-followed",
        "renamed",
    )]);
    let nodes = bed.store.load_nodes().unwrap();
    assert_eq!((nodes[&node("n1")].case, nodes[&node("n9")].case), (None, Some(case.id)));
    assert_eq!(bed.store.case(case.id).unwrap().unwrap().node, node("n9"));
    // Closed under the new name, it changes nothing under the old one.
    let close = Action::CloseCase { case: case.id, node: node("n9"), how: CaseOutcome::Returned };
    bed.commit(&[WithReason::new(close, "proved", "well")]);
    bed.assert_sound();
}

fn the_breaker_counts_our_quarantines_and_not_those_of_operators(bed: &mut StoreTestbed) {
    let since = bed.now;
    let request = bed
        .store
        .add_command(&CommandKind::Quarantine { node: node("n2"), evict: false }, "ada", "smells", bed.now)
        .unwrap();
    let mut actions = Vec::new();
    for name in ["n1", "n2"] {
        let case = new_case(bed, name);
        let op = bed.ids.op();
        let id = case.id;
        actions.push(WithReason::new(Action::OpenCase(case), "x", "x"));
        actions.push(WithReason::new(
            Action::Step { case: id, node: node(name), step: StepKind::Mark, op, attempts: 1 },
            "x",
            "x",
        ));
        actions.push(WithReason::new(
            Action::SetState { node: node(name), to: NodeState::Quarantined, case: Some(id) },
            "x",
            "x",
        ));
    }
    // A mark that was found, not made.
    actions.push(WithReason::new(
        Action::SetState { node: node("n3"), to: NodeState::Quarantined, case: None },
        "mark-adopted",
        "x",
    ));
    actions.push(WithReason::new(Action::CompleteCommand { command: request }, "operator", "asked"));
    bed.commit(&actions);
    assert_eq!(bed.store.nodes_taken_out_since(since).unwrap(), [(node("n1"), bed.now)]);
    assert!(bed.store.nodes_taken_out_since(bed.now.plus(Span::from_millis(1))).unwrap().is_empty());
    assert!(bed.store.open_commands().unwrap().is_empty());
    bed.assert_sound();
}

fn operator_commands_are_read_back_and_audited(bed: &mut StoreTestbed) {
    let (store, now) = (bed.store.clone(), bed.now);
    let before = store.operator_changes().unwrap();
    let hold = Hold { by: "ada".to_owned(), why: "debugging".to_owned(), since: now, until: None };
    store.hold(&node("n1"), &hold).unwrap();
    assert_eq!(store.load_nodes_named(&[node("n1"), node("unknown")]).unwrap()[&node("n1")].hold, Some(hold));
    store.unhold(&node("n1"), "ada", "done", now).unwrap();
    assert_eq!(store.load_nodes().unwrap()[&node("n1")].hold, None);

    let everywhere = Pause {
        pool: None,
        by: "bob".to_owned(),
        why: "demo".to_owned(),
        since: now,
        until: Some(now.plus(Span::hours(4))),
    };
    store.pause(&everywhere).unwrap();
    assert_eq!(store.pauses(now).unwrap(), [everywhere]);
    assert!(store.pauses(now.plus(Span::hours(4))).unwrap().is_empty());
    store.resume(None, "bob", "over", now).unwrap();
    assert!(store.pauses(now).unwrap().is_empty());

    assert_eq!(store.breaker().unwrap(), Breaker::Closed { since: None });
    bed.commit(&[WithReason::new(Action::OpenBreaker, "breaker-opened", "3 nodes in an hour")]);
    assert_eq!(store.breaker().unwrap(), Breaker::Open { since: now, why: "3 nodes in an hour".to_owned() });
    store.close_breaker("ada", "looked at all three", now).unwrap();
    assert_eq!(store.breaker().unwrap(), Breaker::Closed { since: Some(now) });

    assert!(!store.agent_silence_reported().unwrap());
    bed.commit(&[WithReason::new(Action::Notice(Notice::AgentsSilent { silent: 5, total: 9 }), "agents-silent", "x")]);
    assert!(store.agent_silence_reported().unwrap());
    bed.commit(&[WithReason::new(Action::Notice(Notice::AgentsBack), "agents-back", "x")]);
    assert!(!store.agent_silence_reported().unwrap());

    store
        .add_command(
            &CommandKind::Test { node: node("n2"), tests: vec![test("disk")], run: None },
            "eve",
            "new disk",
            now,
        )
        .unwrap();
    let requests = store.open_commands().unwrap();
    assert_eq!((requests.len(), requests[0].by.as_str()), (1, "eve"));
    assert_eq!(store.operator_changes().unwrap(), before + 6);
    let audited: Vec<_> = store.audit(100, None).unwrap().into_iter().map(|row| (row.by, row.what)).collect();
    for (by, what) in
        [("ada", "hold"), ("bob", "pause"), ("bob", "resume"), ("ada", "close-breaker"), ("eve", "ask-test")]
    {
        assert!(audited.contains(&(by.to_owned(), what.to_owned())), "{by} {what}: {audited:?}");
    }
}

/// Opens a case on which a reboot is requested, and records the reboot as intended.
fn requested_reboot(bed: &mut StoreTestbed, name: &str) -> (CaseId, OpId) {
    let case = open_case(bed, name);
    let (op, asked) = (bed.ids.op(), bed.ids.op());
    let repair = RequestedRepair { what: Repair::Reboot, op, evict: false, sent: None };
    let request = OperatorRequest { by: "ann".into(), why: "hangs".into(), repair: Some(repair) };
    let request = Action::RequestRepair { case: case.id, node: node(name), op: asked, request };
    bed.commit(&[WithReason::new(request, "operator", "hangs")]);
    let step = Action::Step { case: case.id, node: node(name), step: StepKind::Reboot, op, attempts: 1 };
    bed.commit(&[WithReason::new(step, "operator", "hangs")]);
    (case.id, op)
}

fn a_requested_repair_is_sent_once_and_not_during_a_pause(bed: &mut StoreTestbed) {
    let (case, op) = requested_reboot(bed, "n1");
    let pool = PoolName::new("gpu").unwrap();
    let send = |bed: &mut StoreTestbed, boot: &str| {
        let sent = SentRepair { at: bed.now, boot_id: Some(boot.to_owned()) };
        bed.store.record_sent(&bed.lease, (case, op), &pool, &sent).unwrap()
    };
    let sent = |bed: &StoreTestbed| {
        let case = bed.store.case(case).unwrap().unwrap();
        case.requested_repair().unwrap().1.sent.clone().and_then(|sent| sent.boot_id)
    };
    for (paused, expected) in
        [(None, SendPermit::Paused), (Some("gpu"), SendPermit::Paused), (Some("cpu"), SendPermit::First)]
    {
        let paused = paused.map(|pool| PoolName::new(pool).unwrap());
        let until = Some(bed.now.plus(Span::hours(1)));
        let pause = Pause { pool: paused.clone(), by: "ann".into(), why: "upgrade".into(), since: bed.now, until };
        bed.store.pause(&pause).unwrap();
        assert_eq!(send(bed, "one"), expected, "{paused:?}");
        assert_eq!(sent(bed).is_some(), expected == SendPermit::First);
        bed.store.resume(paused.as_ref(), "ann", "done", bed.now).unwrap();
    }
    assert_eq!(
        (send(bed, "two"), sent(bed).as_deref()),
        (SendPermit::Repeated, Some("one")),
        "the first attempt counts"
    );
    // The cluster refused the only attempt; a pause that has expired does not count.
    bed.store.record_not_sent(&bed.lease, case, op).unwrap();
    let (since, until) = (bed.now.minus(Span::hours(2)), Some(bed.now.minus(Span::hours(1))));
    bed.store.pause(&Pause { pool: None, by: "ann".into(), why: "upgrade".into(), since, until }).unwrap();
    assert_eq!((send(bed, "two"), sent(bed).as_deref()), (SendPermit::First, Some("two")));
    let unknown = bed.ids.op();
    let at = SentRepair { at: bed.now, boot_id: None };
    assert!(bed.store.record_sent(&bed.lease, (case, unknown), &pool, &at).is_err());
    bed.assert_sound();
}

fn a_withdrawn_step_and_command_are_gone_and_audited(bed: &mut StoreTestbed) {
    let (case, op) = requested_reboot(bed, "n1");
    let repair = CommandKind::Repair { node: node("n2"), step: Repair::Reset, evict: false };
    let command = bed.store.add_command(&repair, "ann", "hangs", bed.now).unwrap();
    bed.commit(&[
        WithReason::new(Action::WithdrawStep { case, node: node("n1"), op }, "withdrawn", "paused"),
        WithReason::new(Action::WithdrawCommand { command, node: node("n2") }, "withdrawn", "too old"),
    ]);
    let stored = bed.store.case(case).unwrap().unwrap();
    assert!(stored.steps.iter().all(|step| step.op != op) && stored.requested_repair().is_some(), "{stored:#?}");
    assert!(bed.store.open_commands().unwrap().is_empty());
    for (name, what, text) in [("n1", "withdraw-step", "paused"), ("n2", "withdraw-command", "too old")] {
        let lines = bed.store.audit(10, Some(&node(name))).unwrap();
        assert!(lines.iter().any(|line| line.what == what && line.text == text), "{lines:#?}");
    }
}
