//! Outgoing notifications, on every kind of store.

use std::collections::BTreeMap;

use doctor_core::{
    alert::{Condition, Mute, Notification, Subject},
    case::CaseOutcome,
    plan::Action,
    reason::WithReason,
    time::{Span, Timestamp},
};
use doctor_store::{
    StoreError,
    outbox::{DeliveryOutcome, MessageState},
    records::RoutedNote,
};

use crate::{
    bed::{StoreTestbed, node},
    cases::open_case,
    suite,
};

suite!(
    notes_become_one_message_and_later_ones_wait_for_the_next,
    a_message_is_claimed_by_one_worker_and_keeps_its_key,
    lost_messages_are_counted_and_reported_with_the_next_message,
    messages_to_a_removed_receiver_are_recorded_as_lost,
    a_service_condition_and_its_notifications_are_written_together,
    a_snooze_ends_once_and_closing_a_case_ends_its_mute,
    messages_survive_a_backup,
);

fn trial(receiver: &str, by: &str) -> RoutedNote {
    let about = Subject::Test { by: by.to_owned() };
    RoutedNote { receiver: receiver.to_owned(), note: Notification { at: Timestamp::from_secs(1), subject: about } }
}

/// Queues notes as the service alerts do.
fn queue(bed: &StoreTestbed, notes: &[RoutedNote]) {
    let known = bed.store.alert_conditions().unwrap();
    assert!(bed.store.replace_conditions(&known, &known, notes).unwrap());
}

fn by(notes: &[Notification]) -> Vec<&str> {
    notes
        .iter()
        .map(|note| match &note.subject {
            Subject::Test { by } => by.as_str(),
            _ => panic!("only trials are notified here"),
        })
        .collect()
}

const MINUTE: Span = Span::minutes(1);

fn notes_become_one_message_and_later_ones_wait_for_the_next(bed: &mut StoreTestbed) {
    let (store, now) = (bed.store.clone(), bed.now);
    assert!(!store.compose_alert("chat", now, now.plus(MINUTE)).unwrap(), "without notes there is no message");
    queue(bed, &[trial("chat", "1"), trial("pager", "1"), trial("chat", "2")]);
    let waiting = store.pending_alerts().unwrap();
    assert_eq!((waiting["chat"].notes, waiting["pager"].notes), (2, 1));
    assert!(store.compose_alert("chat", now, now.plus(MINUTE)).unwrap());
    queue(bed, &[trial("chat", "3")]);
    assert!(!store.compose_alert("chat", now, now.plus(MINUTE)).unwrap(), "one delivery is in progress");
    let first = store.claim_alert("chat", now, now.plus(MINUTE)).unwrap().unwrap();
    assert_eq!((by(&first.notes), first.attempts, first.given_up_before), (vec!["1", "2"], 1, 0));
    store.record_delivery(first.id, &DeliveryOutcome::Delivered, now).unwrap();
    assert!(store.compose_alert("chat", now, now.plus(MINUTE)).unwrap());
    let second = store.claim_alert("chat", now, now.plus(MINUTE)).unwrap().unwrap();
    assert_eq!(by(&second.notes), ["3"]);
    assert_ne!(first.key, second.key);
    assert_eq!(store.counters().unwrap().alerts_delivered, 1);
}

fn a_message_is_claimed_by_one_worker_and_keeps_its_key(bed: &mut StoreTestbed) {
    let (store, now) = (bed.store.clone(), bed.now);
    queue(bed, &[trial("chat", "1")]);
    store.compose_alert("chat", now, now.plus(Span::hours(1))).unwrap();
    let until = now.plus(MINUTE);
    let first = store.claim_alert("chat", now, until).unwrap().unwrap();
    assert_eq!(store.claim_alert("chat", now.plus(Span::from_secs(59)), until).unwrap(), None);
    // The first claimant died.
    let again = store.claim_alert("chat", until, until.plus(MINUTE)).unwrap().unwrap();
    assert_eq!((again.key.as_str(), again.attempts), (first.key.as_str(), 2));
    let next = until.plus(Span::from_secs(5));
    store.record_delivery(again.id, &DeliveryOutcome::Retry { next, error: "500".to_owned() }, until).unwrap();
    assert_eq!(store.claim_alert("chat", until, next).unwrap(), None, "its next attempt is later");
    let rows = store.alert_messages(10, false).unwrap();
    assert_eq!((rows.len(), rows[0].state, rows[0].next_attempt), (1, MessageState::Waiting, Some(next)));
    assert_eq!(rows[0].error.as_deref(), Some("500"));
    store.record_delivery(again.id, &DeliveryOutcome::Delivered, next).unwrap();
    // The late first claimant cannot change a completed message.
    store.record_delivery(first.id, &DeliveryOutcome::GivenUp { error: "late".to_owned() }, next).unwrap();
    assert_eq!(store.alert_messages(10, true).unwrap()[0].state, MessageState::Delivered);
    assert_eq!(store.alert_messages(10, false).unwrap(), []);
    let counters = store.counters().unwrap();
    assert_eq!((counters.alerts_delivered, counters.alerts_given_up), (1, 0));
}

fn lost_messages_are_counted_and_reported_with_the_next_message(bed: &mut StoreTestbed) {
    let (store, now) = (bed.store.clone(), bed.now);
    for lost in ["1", "2"] {
        queue(bed, &[trial("chat", lost)]);
        store.compose_alert("chat", now, now).unwrap();
        let message = store.claim_alert("chat", now, now).unwrap().unwrap();
        store.record_delivery(message.id, &DeliveryOutcome::GivenUp { error: "gone".to_owned() }, now).unwrap();
    }
    assert_eq!(store.alerts_given_up_since(now).unwrap(), 2);
    assert_eq!(store.alerts_given_up_since(now.plus(MINUTE)).unwrap(), 0);
    queue(bed, &[trial("chat", "3")]);
    store.compose_alert("chat", now, now.plus(MINUTE)).unwrap();
    let message = store.claim_alert("chat", now, now).unwrap().unwrap();
    assert_eq!(message.given_up_before, 2);
    assert_eq!(store.delete_old_alerts(now.plus(MINUTE)).unwrap(), 2);
    assert_eq!(store.alert_messages(10, true).unwrap().len(), 1, "a waiting message is not deleted");
}

fn messages_to_a_removed_receiver_are_recorded_as_lost(bed: &mut StoreTestbed) {
    let (store, now) = (bed.store.clone(), bed.now);
    queue(bed, &[trial("old", "1")]);
    store.compose_alert("old", now, now.plus(MINUTE)).unwrap();
    queue(bed, &[trial("old", "2"), trial("chat", "1")]);
    assert_eq!(store.give_up_removed_receivers(&["chat"], now).unwrap(), 2);
    assert_eq!(store.give_up_removed_receivers(&["chat"], now).unwrap(), 0);
    let rows = store.alert_messages(10, false).unwrap();
    assert!(rows.iter().all(|row| row.state == MessageState::GivenUp && row.receiver == "old"), "{rows:?}");
    assert_eq!(store.pending_alerts().unwrap()["chat"].notes, 1);
}

fn a_service_condition_and_its_notifications_are_written_together(bed: &mut StoreTestbed) {
    let store = bed.store.clone();
    let none = BTreeMap::new();
    let open = BTreeMap::from([(Condition::BreakerOpen, bed.now)]);
    assert!(store.replace_conditions(&none, &open, &[trial("chat", "1")]).unwrap());
    assert_eq!(store.alert_conditions().unwrap(), open);
    // Another controller observed the same a moment later.
    assert!(!store.replace_conditions(&none, &open, &[trial("chat", "1")]).unwrap());
    assert_eq!(store.pending_alerts().unwrap()["chat"].notes, 1);
}

fn a_snooze_ends_once_and_closing_a_case_ends_its_mute(bed: &mut StoreTestbed) {
    let store = bed.store.clone();
    let case = open_case(bed, "n1");
    let until = bed.now.plus(Span::hours(1));
    let mute = Mute { by: "ann".to_owned(), why: "later".to_owned(), at: bed.now, until: Some(until) };
    store.mute(&case, &mute).unwrap();
    assert_eq!(store.mutes().unwrap().get(&case.id), Some(&mute));
    let notes_for = |_: &doctor_core::case::Case, _: &Mute| vec![trial("chat", "still open")];
    store.end_mute(case.id, bed.now, &notes_for).unwrap();
    assert_eq!(store.mutes().unwrap().len(), 1, "its snooze has not ended");
    store.end_mute(case.id, until, &notes_for).unwrap();
    store.end_mute(case.id, until, &notes_for).unwrap();
    assert_eq!(store.pending_alerts().unwrap()["chat"].notes, 1);
    store.mute(&case, &Mute { until: None, ..mute }).unwrap();
    let close = Action::CloseCase { case: case.id, node: node("n1"), how: CaseOutcome::Returned };
    bed.commit(&[WithReason::new(close, "proved", "well")]);
    assert!(store.mutes().unwrap().is_empty());
    let trail = store.audit(10, Some(&node("n1"))).unwrap();
    assert!(trail.iter().any(|line| line.what == "snooze" && line.by == "ann"), "{trail:?}");
}

fn messages_survive_a_backup(bed: &mut StoreTestbed) {
    queue(bed, &[trial("chat", "1"), trial("chat", "2")]);
    bed.store.compose_alert("chat", bed.now, bed.now.plus(MINUTE)).unwrap();
    queue(bed, &[trial("chat", "3")]);
    let copy = bed.path("copy.db");
    let backed_up: Result<_, StoreError> = bed.store.backup(&copy);
    backed_up.unwrap();
    let restored = doctor_store::Store::open(&doctor_store::StoreUrl::Sqlite(copy)).unwrap();
    let waiting = restored.pending_alerts().unwrap();
    assert_eq!((waiting["chat"].notes, waiting["chat"].messages), (1, 1));
    let rows = (restored.alert_messages(10, true).unwrap(), bed.store.alert_messages(10, true).unwrap());
    assert_eq!(rows.0, rows.1);
}
