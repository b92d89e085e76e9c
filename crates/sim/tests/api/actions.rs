//! Actions of the API: planned first, then done once, and recorded with user, origin, reason and plan.

use doctor_core::{
    ids::NodeName,
    lifecycle::NodeState,
    node::Hold,
    snapshot::CommandKind,
    time::{Span, Timestamp},
};
use serde_json::{Value, json};

use crate::testbed::{OPERATOR, Testbed, live, until};

/// Requests an action twice: for the plan, and with its confirmation.
fn confirmed(bed: &Testbed, action: &str, mut body: Value) -> Value {
    let planned = bed.act(OPERATOR, action, &body);
    assert_eq!(planned.status, 200, "{}", String::from_utf8_lossy(&planned.body));
    let planned = planned.json();
    assert_eq!((&planned["state"], &planned["by"]), (&json!("planned"), &json!("op")), "{planned}");
    body["confirm"] = planned["confirm"].clone();
    let done = bed.act(OPERATOR, action, &body);
    assert_eq!(done.status, 200, "{}", String::from_utf8_lossy(&done.body));
    let done = done.json();
    assert_eq!((&done["state"], &done["changes"]), (&json!("done"), &planned["changes"]), "{done}");
    let again = bed.act(OPERATOR, action, &body);
    assert_eq!(again.status, 409, "a confirmation is valid once");
    done
}

#[test]
fn each_action_is_planned_before_it_is_done_and_audited_with_its_plan() {
    let (bed, _session) = live(6, 1);
    bed.with_tokens();
    let changes = || bed.store.operator_changes().unwrap();
    let before = changes();
    let plan = bed.act(OPERATOR, "hold", &json!({ "nodes": ["node00[1-2]"], "until": "4h", "why": "fan" })).json();
    assert!(plan["text"].as_str().unwrap().starts_with("Would hold 2 nodes (node[001-002]) until"), "{plan}");
    assert_eq!(changes(), before, "a plan changes nothing");

    confirmed(&bed, "hold", json!({ "nodes": ["node00[1-2]"], "until": "4h", "why": "fan" }));
    confirmed(&bed, "release", json!({ "nodes": ["node001"], "why": "mended" }));
    confirmed(&bed, "quarantine", json!({ "nodes": ["node003"], "drain": true, "why": "smells" }));
    // The second node within the hour: more than the breaker would allow.
    confirmed(&bed, "repair", json!({ "nodes": ["node005"], "step": "reboot", "why": "hangs", "confirm_nodes": 1 }));
    confirmed(&bed, "test", json!({ "nodes": ["node004"], "tests": ["dl"], "why": "curious" }));
    confirmed(&bed, "pause", json!({ "pool": "gpu", "for": "4h", "why": "demo" }));
    confirmed(&bed, "resume", json!({ "pool": "gpu", "why": "over" }));
    confirmed(&bed, "close-breaker", json!({ "why": "seen" }));

    let commands: Vec<CommandKind> =
        bed.store.open_commands().unwrap().into_iter().map(|request| request.kind).collect();
    assert!(
        commands.iter().any(|command| matches!(command, CommandKind::Quarantine { evict: true, .. })),
        "{commands:?}"
    );
    assert!(
        commands.iter().any(|command| matches!(command, CommandKind::Test { tests, .. } if tests.len() == 1)),
        "{commands:?}"
    );
    let trail = bed.store.audit(1000, None).unwrap();
    let line = trail.iter().find(|line| line.what == "api-quarantine").unwrap();
    assert_eq!((line.by.as_str(), line.text.as_str(), line.code.as_str()), ("op", "smells", "done"));
    assert_eq!(line.origin.as_deref(), Some("127.0.0.1"));
    assert!(line.plan.as_deref().unwrap().contains("node003: in-service -> quarantined"), "{line:?}");
    for what in ["hold", "release", "quarantine", "repair", "test", "pause", "resume", "close-breaker"] {
        assert_eq!(trail.iter().filter(|line| line.what == format!("api-{what}")).count(), 1, "{what}");
    }
}

#[test]
fn a_command_beyond_the_breakers_limit_needs_the_number_of_its_nodes() {
    let (bed, _session) = live(6, 1);
    bed.with_tokens();
    let one = || bed.act(OPERATOR, "quarantine", &json!({ "nodes": ["node001"], "why": "smells" })).json();
    assert_eq!(one()["confirm_nodes"], Value::Null, "one named node");
    let mut body = json!({ "nodes": ["node00[1-6]"], "why": "smells" });
    for (action, step) in [("quarantine", None), ("repair", Some("reboot"))] {
        body.as_object_mut().unwrap().retain(|name, _| name == "nodes" || name == "why");
        if let Some(step) = step {
            body["step"] = json!(step);
        }
        let commands = bed.store.open_commands().unwrap().len();
        let planned = bed.act(OPERATOR, action, &body).json();
        assert_eq!(planned["confirm_nodes"], 6, "{planned}");
        assert!(planned["limit"].as_str().unwrap().contains("the circuit breaker would allow"), "{planned}");
        body["confirm"] = planned["confirm"].clone();
        for number in [None, Some(5), Some(7)] {
            if let Some(number) = number {
                body["confirm_nodes"] = json!(number);
            }
            let refused = bed.act(OPERATOR, action, &body);
            assert_eq!((refused.status, refused.code().as_str()), (409, "confirm-nodes"), "{number:?}");
            assert_eq!(refused.json()["error"]["accepted"], "confirm_nodes: 6");
        }
        assert_eq!(bed.store.open_commands().unwrap().len(), commands, "nothing was done");
        body["confirm_nodes"] = json!(6);
        let done = bed.act(OPERATOR, action, &body);
        assert_eq!(done.status, 200, "{}", String::from_utf8_lossy(&done.body));
    }
    assert_eq!(bed.store.open_commands().unwrap().len(), 12);
    let last = one();
    assert_eq!(last["confirm_nodes"], 1, "one of six that are requested: {last}");
    assert!(
        last["limit"].as_str().unwrap().contains("after 5 nodes that operators took out within the hour"),
        "{last}"
    );
}

#[test]
fn a_repair_is_refused_while_its_pool_is_paused_with_what_ends_that() {
    let (bed, _session) = live(3, 1);
    bed.with_tokens();
    confirmed(&bed, "pause", json!({ "pool": "gpu", "why": "upgrade" }));
    let refused = bed.act(OPERATOR, "repair", &json!({ "nodes": ["node001"], "step": "reset", "why": "x" }));
    assert_eq!((refused.status, refused.code().as_str()), (409, "refused"));
    let error = refused.json()["error"].clone();
    assert!(error["text"].as_str().unwrap().contains("paused by op (upgrade)"), "{error}");
    assert_eq!(error["accepted"], "`doctor resume --pool gpu --why …`");
    confirmed(&bed, "quarantine", json!({ "nodes": ["node001"], "why": "smells" }));
}

#[test]
fn an_outdated_plan_is_returned_again_and_nothing_changes() {
    let (bed, mut session) = live(4, 1);
    bed.with_tokens();
    let mut body = json!({ "nodes": ["state=in-service"], "why": "x" });
    let planned = bed.act(OPERATOR, "hold", &body).json();
    let first: Vec<&str> = planned["nodes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let hold = json!({ "nodes": [first[0]], "why": "other" });
    confirmed(&bed, "hold", hold);
    session.cycle().unwrap();
    session.cycle().unwrap();
    let held = || {
        session
            .store()
            .load_nodes()
            .unwrap()
            .values()
            .filter(|node| matches!(node.state, NodeState::Held { .. }))
            .count()
    };
    until("it is held", || held() == 1);
    body["confirm"] = planned["confirm"].clone();
    let response = bed.act(OPERATOR, "hold", &body);
    assert_eq!((response.status, response.code().as_str()), (409, "other-plan"));
    let now = response.json()["error"]["plan"].clone();
    assert_eq!(now["nodes"].as_array().unwrap().len(), first.len() - 1, "{now}");
    assert_eq!(held(), 1, "nothing changed");
    body["confirm"] = now["confirm"].clone();
    assert_eq!(bed.act(OPERATOR, "hold", &body).status, 200, "what is shown now can be confirmed");
    body["why"] = json!("another");
    let other = bed.act(OPERATOR, "hold", &body);
    assert_eq!((other.status, other.code().as_str()), (409, "replayed"), "even for another reason");
    let fresh = bed.act(OPERATOR, "hold", &json!({ "nodes": ["node001"], "why": "a" })).json();
    let forged = json!({ "nodes": ["node001"], "why": "b", "confirm": fresh["confirm"] });
    assert_eq!(bed.act(OPERATOR, "hold", &forged).code(), "other-plan", "another reason is another plan");
    let trail = bed.store.audit(1, None).unwrap().remove(0);
    assert_eq!((trail.what.as_str(), trail.code.as_str(), trail.by.as_str()), ("api-refused", "other-plan", "op"));
}

#[test]
fn a_pause_can_be_confirmed_some_time_after_it_was_planned() {
    let (bed, mut session) = live(3, 1);
    bed.with_tokens();
    let mut body = json!({ "for": "4h", "why": "demo" });
    let planned = bed.act(OPERATOR, "pause", &body).json();
    let later = session.now().plus(Span::minutes(3));
    session.run_until(later, |_, _| Ok(())).unwrap();
    body["confirm"] = planned["confirm"].clone();
    let done = bed.act(OPERATOR, "pause", &body);
    assert_eq!(done.status, 200, "{}", String::from_utf8_lossy(&done.body));
    let until = bed.store.pauses(session.now()).unwrap()[0].until.unwrap();
    assert_eq!(until, done.json()["at"].as_str().unwrap().parse::<Timestamp>().unwrap().plus(Span::hours(4)));
    let planned = bed.act(OPERATOR, "pause", &json!({ "for": "4h", "why": "demo" })).json();
    let other = json!({ "for": "5h", "why": "demo", "confirm": planned["confirm"] });
    assert_eq!(bed.act(OPERATOR, "pause", &other).code(), "other-plan", "another length is another plan");
}

#[test]
fn a_node_held_in_the_meantime_requires_a_new_confirmation() {
    let (bed, session) = live(3, 1);
    bed.with_tokens();
    let mut body = json!({ "nodes": ["node00[1-2]"], "why": "fan" });
    let planned = bed.act(OPERATOR, "hold", &body).json();
    assert_eq!(planned["changes"][1], "node002: in-service -> held", "{planned}");
    let node = NodeName::new("node002").unwrap();
    let hold = Hold { by: "ann".to_owned(), why: "noise".to_owned(), since: session.now(), until: None };
    bed.store.hold(&node, &hold).unwrap();
    let before = bed.store.operator_changes().unwrap();
    body["confirm"] = planned["confirm"].clone();
    let response = bed.act(OPERATOR, "hold", &body);
    assert_eq!((response.status, response.code().as_str()), (409, "other-plan"));
    let now = response.json()["error"]["plan"].clone();
    assert_eq!(now["changes"][1], "node002: already held by ann (noise); this hold replaces it", "{now}");
    assert_eq!(bed.store.operator_changes().unwrap(), before, "nothing changed");
    body["confirm"] = now["confirm"].clone();
    assert_eq!(bed.act(OPERATOR, "hold", &body).status, 200);
}
