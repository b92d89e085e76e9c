//! Outgoing notifications.
//!
//! A note is written in the transaction of the plan that it reports, once per receiver that wants it. The delivery
//! worker combines the waiting notes into a message, stores the message, and only then sends it: after a crash it
//! resends the same message under the same key. One process at a time attempts a message, because an attempt starts by
//! moving the next attempt past its own end.

use std::collections::BTreeMap;

use doctor_core::{
    alert::{Condition, Notification, Route},
    time::Timestamp,
};
use serde::Serialize;

use super::{
    STORE_ID, Store,
    audit::{self, Counter},
    db::{Access, ColumnType, Row, Tx, vals},
    error::{Result, StoreError},
    json,
    operator_commands::meta,
    records::RoutedNote,
};

/// Pairs each note with every receiver that wants it.
pub fn route_notes(routes: &[(String, Route)], notes: &[Notification]) -> Vec<RoutedNote> {
    let pairs = notes.iter().flat_map(|note| routes.iter().map(move |route| (note, route)));
    let accepted = pairs.filter(|(note, (_, route))| route.accepts(note));
    accepted.map(|(note, (receiver, _))| RoutedNote { receiver: receiver.clone(), note: note.clone() }).collect()
}

/// A message that this process may deliver now.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimedMessage {
    pub id: i64,
    /// Unique to the message, and the same at each attempt.
    pub key: String,
    pub composed: Timestamp,
    pub expires: Timestamp,
    /// Including this one.
    pub attempts: u32,
    pub notes: Vec<Notification>,
    /// Messages to this receiver that were given up since the last delivery.
    pub given_up_before: u64,
}

/// The outcome of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeliveryOutcome {
    Delivered,
    /// Retried at `next`.
    Retry {
        next: Timestamp,
        error: String,
    },
    /// Given up.
    GivenUp {
        error: String,
    },
}

/// Delivery state of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MessageState {
    Waiting,
    Delivered,
    GivenUp,
}

impl MessageState {
    const ALL: [Self; 3] = [Self::Waiting, Self::Delivered, Self::GivenUp];

    /// As stored in the database.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Delivered => "delivered",
            Self::GivenUp => "lost",
        }
    }

    fn read(code: &str) -> Result<Self> {
        let unreadable = || StoreError::Unreadable { what: "message", why: format!("`{code}` is not a state") };
        Self::ALL.into_iter().find(|state| state.code() == code).ok_or_else(unreadable)
    }
}

/// A message in a listing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MessageRow {
    pub key: String,
    pub receiver: String,
    pub state: MessageState,
    pub composed: Timestamp,
    pub attempts: u32,
    /// Set while it waits.
    pub next_attempt: Option<Timestamp>,
    pub expires: Timestamp,
    pub ended: Option<Timestamp>,
    pub error: Option<String>,
    pub notes: Vec<Notification>,
}

/// Pending notifications of one receiver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PendingNotifications {
    /// Notes that are in no message yet.
    pub notes: u64,
    /// Undelivered messages.
    pub messages: u64,
    /// When the newest message was composed.
    pub composed: Option<Timestamp>,
}

/// Maximum notes per message; the rest go with the next one.
const MAX_NOTES: i64 = 500;

impl Store {
    /// Returns pending notifications by receiver.
    pub fn pending_alerts(&self) -> Result<BTreeMap<String, PendingNotifications>> {
        let operation = "reading pending notes";
        let notes = "SELECT receiver, COUNT(*) FROM alert_note WHERE message IS NULL GROUP BY receiver";
        let messages = "SELECT receiver, CAST(SUM(CASE WHEN state = 'waiting' THEN 1 ELSE 0 END) AS BIGINT), MAX(composed) \
                        FROM alert_message GROUP BY receiver";
        self.transaction(Access::Read, &mut |tx| {
            let mut waiting: BTreeMap<String, PendingNotifications> = BTreeMap::new();
            tx.rows(operation, notes, &[], |row| {
                waiting.entry(row.text(0)?.to_owned()).or_default().notes = row.unsigned(1)?;
                Ok(())
            })?;
            tx.rows(operation, messages, &[], |row| {
                let entry = waiting.entry(row.text(0)?.to_owned()).or_default();
                entry.messages = row.unsigned(1)?;
                entry.composed = row.opt_timestamp(2)?;
                Ok(())
            })?;
            Ok(waiting)
        })
    }

    /// Composes a message of a receiver's waiting notes, unless one is undelivered.
    pub fn compose_alert(&self, receiver: &str, now: Timestamp, give_up: Timestamp) -> Result<bool> {
        self.write_unfenced(Access::WriteExclusive, |tx| compose(tx, receiver, now, give_up).map(|made| made.is_some()))
    }

    /// Claims a due message for this process until the given time.
    pub fn claim_alert(&self, receiver: &str, now: Timestamp, until: Timestamp) -> Result<Option<ClaimedMessage>> {
        let operation = "claiming a message";
        let due = "SELECT id, composed, expires, attempts FROM alert_message WHERE receiver = $1 AND state = 'waiting' \
                   AND next_attempt_at <= $2 ORDER BY id LIMIT 1";
        let claim = "UPDATE alert_message SET next_attempt_at = $2, attempts = attempts + 1 \
                     WHERE id = $1 AND state = 'waiting' AND next_attempt_at <= $3";
        let sql_lost = "SELECT COUNT(*) FROM alert_message WHERE receiver = $1 AND state = 'lost' AND id > COALESCE( \
                        (SELECT MAX(id) FROM alert_message WHERE receiver = $1 AND state = 'delivered'), 0)";
        self.write_unfenced(Access::Write, |tx| {
            let due = tx.first(operation, due, vals![receiver, now], |row| {
                Ok((row.int(0)?, row.timestamp(1)?, row.timestamp(2)?, row.count(3)?))
            })?;
            let Some((id, composed, give_up, tries)) = due else { return Ok(None) };
            if tx.execute(operation, claim, vals![id, until, now])? == 0 {
                return Ok(None);
            }
            let lost_before = tx.first(operation, sql_lost, vals![receiver], |row| row.unsigned(0))?.unwrap_or(0);
            let (key, notes) = (key(tx, id, composed)?, notes_of(tx, id)?);
            Ok(Some(ClaimedMessage {
                id,
                key,
                composed,
                expires: give_up,
                attempts: tries + 1,
                notes,
                given_up_before: lost_before,
            }))
        })
    }

    /// Records the outcome of an attempt. A message that another process has completed meanwhile is unchanged.
    pub fn record_delivery(&self, id: i64, tried: &DeliveryOutcome, now: Timestamp) -> Result<()> {
        self.write_unfenced(Access::Write, |tx| record_outcome(tx, id, tried, now))
    }

    /// Gives up what waits for receivers that are no longer configured. Returns the number of messages.
    pub fn give_up_removed_receivers(&self, known: &[&str], now: Timestamp) -> Result<u64> {
        let operation = "giving up messages to removed receivers";
        let waiting = self.pending_alerts()?;
        let strangers = waiting
            .iter()
            .filter(|(name, what)| !known.contains(&name.as_str()) && (what.notes > 0 || what.messages > 0));
        let mut lost = 0;
        for (receiver, _) in strangers {
            lost += self.write_unfenced(Access::WriteExclusive, |tx| {
                let mut lost = 0;
                loop {
                    compose(tx, receiver, now, now)?;
                    let sql = "SELECT id FROM alert_message WHERE receiver = $1 AND state = 'waiting'";
                    let ids = tx.all(operation, sql, vals![receiver], |row| row.int(0))?;
                    if ids.is_empty() {
                        return Ok(lost);
                    }
                    for id in ids {
                        let error = format!("receiver {receiver} is no longer configured");
                        record_outcome(tx, id, &DeliveryOutcome::GivenUp { error }, now)?;
                        lost += 1;
                    }
                }
            })?;
        }
        Ok(lost)
    }

    /// Returns messages, newest first; all, or only undelivered ones.
    pub fn alert_messages(&self, limit: u32, all: bool) -> Result<Vec<MessageRow>> {
        let operation = "reading messages";
        let only = if all { "" } else { "WHERE state <> 'delivered' " };
        let sql = format!(
            "SELECT id, receiver, state, composed, attempts, next_attempt_at, expires, ended, last_error \
             FROM alert_message {only}ORDER BY id DESC LIMIT $1"
        );
        self.transaction(Access::Read, &mut |tx| {
            let mut rows = tx.all(operation, &sql, vals![limit], |row| Ok((row.int(0)?, read_message(row)?)))?;
            for (id, row) in &mut rows {
                (row.key, row.notes) = (key(tx, *id, row.composed)?, notes_of(tx, *id)?);
            }
            Ok(rows.into_iter().map(|(_, row)| row).collect())
        })
    }

    /// Returns the number of messages given up since this time.
    pub fn alerts_given_up_since(&self, since: Timestamp) -> Result<u64> {
        let sql = "SELECT COUNT(*) FROM alert_message WHERE state = 'lost' AND ended >= $1";
        let lost = self.transaction(Access::Read, &mut |tx| {
            tx.first("counting lost messages", sql, vals![since], |row| row.unsigned(0))
        })?;
        Ok(lost.unwrap_or(0))
    }

    /// Deletes messages that ended before this time.
    pub fn delete_old_alerts(&self, before: Timestamp) -> Result<u64> {
        let operation = "deleting messages";
        let notes = "DELETE FROM alert_note WHERE message IN (SELECT id FROM alert_message WHERE ended < $1)";
        self.write_unfenced(Access::Write, |tx| {
            tx.execute(operation, notes, vals![before])?;
            tx.execute(operation, "DELETE FROM alert_message WHERE ended < $1", vals![before])
        })
    }

    /// Returns the service's active conditions that were notified, and since when.
    pub fn alert_conditions(&self) -> Result<BTreeMap<Condition, Timestamp>> {
        self.transaction(Access::Read, &mut read_conditions)
    }

    /// Replaces the active conditions and queues their notifications in one transaction. Returns `false` and writes
    /// nothing if another process has changed them since they were `before`.
    pub fn replace_conditions(
        &self,
        before: &BTreeMap<Condition, Timestamp>,
        after: &BTreeMap<Condition, Timestamp>,
        notes: &[RoutedNote],
    ) -> Result<bool> {
        let operation = "writing service conditions";
        self.write_unfenced(Access::WriteExclusive, |tx| {
            if read_conditions(tx)? != *before {
                return Ok(false);
            }
            tx.execute(operation, "DELETE FROM alert_condition", &[])?;
            for (condition, since) in after {
                let sql = "INSERT INTO alert_condition (name, since) VALUES ($1, $2)";
                tx.execute(operation, sql, vals![condition.code(), *since])?;
            }
            queue(tx, notes)?;
            Ok(true)
        })
    }
}

/// Queues notes for delivery.
pub(super) fn queue(tx: &mut Tx<'_>, notes: &[RoutedNote]) -> Result<()> {
    let bodies: Result<Vec<String>> = notes.iter().map(|note| json::write(&note.note)).collect();
    let bodies = bodies?;
    let mut rows = Vec::with_capacity(notes.len() * 2);
    for (note, body) in notes.iter().zip(&bodies) {
        rows.extend_from_slice(vals![&note.receiver, body]);
    }
    tx.insert_many("writing notes", "alert_note (receiver, body)", &[ColumnType::Text; 2], &rows, "")
}

fn compose(tx: &mut Tx<'_>, receiver: &str, now: Timestamp, give_up: Timestamp) -> Result<Option<i64>> {
    let operation = "composing a message";
    let under_way = "SELECT id FROM alert_message WHERE receiver = $1 AND state = 'waiting' LIMIT 1";
    if tx.first(operation, under_way, vals![receiver], |row| row.int(0))?.is_some() {
        return Ok(None);
    }
    let pending = "SELECT id FROM alert_note WHERE receiver = $1 AND message IS NULL ORDER BY id LIMIT $2";
    let pending = tx.all(operation, pending, vals![receiver, MAX_NOTES], |row| row.int(0))?;
    let Some(last) = pending.last() else { return Ok(None) };
    let sql = "INSERT INTO alert_message (receiver, composed, expires, state, attempts, next_attempt_at) \
               VALUES ($1, $2, $3, 'waiting', 0, $2)";
    let id = tx.insert(operation, sql, vals![receiver, now, give_up])?;
    let sql = "UPDATE alert_note SET message = $1 WHERE receiver = $2 AND message IS NULL AND id <= $3";
    tx.execute(operation, sql, vals![id, receiver, *last])?;
    Ok(Some(id))
}

fn record_outcome(tx: &mut Tx<'_>, id: i64, tried: &DeliveryOutcome, now: Timestamp) -> Result<()> {
    let operation = "recording a delivery attempt";
    let (sql, vals, counter) = match tried {
        DeliveryOutcome::Retry { next, error } => {
            let sql =
                "UPDATE alert_message SET next_attempt_at = $2, last_error = $3 WHERE id = $1 AND state = 'waiting'";
            (sql, vals![id, *next, error].to_vec(), None)
        }
        DeliveryOutcome::Delivered => {
            let sql = "UPDATE alert_message SET state = 'delivered', ended = $2, last_error = NULL \
                       WHERE id = $1 AND state = 'waiting'";
            (sql, vals![id, now].to_vec(), Some(Counter::AlertsDelivered))
        }
        DeliveryOutcome::GivenUp { error } => {
            let sql = "UPDATE alert_message SET state = 'lost', ended = $2, last_error = $3 \
                       WHERE id = $1 AND state = 'waiting'";
            (sql, vals![id, now, error].to_vec(), Some(Counter::AlertsLost))
        }
    };
    let changed = tx.execute(operation, sql, &vals)?;
    match counter {
        Some(counter) => audit::add_counts(tx, &[(counter, changed)]),
        None => Ok(()),
    }
}

fn read_conditions(tx: &mut Tx<'_>) -> Result<BTreeMap<Condition, Timestamp>> {
    let rows = tx.all("reading service conditions", "SELECT name, since FROM alert_condition", &[], |row| {
        // A condition that only a newer program knows counts as over.
        Ok(Condition::from_code(row.text(0)?).zip(Some(row.timestamp(1)?)))
    })?;
    Ok(rows.into_iter().flatten().collect())
}

fn read_message(row: &Row<'_>) -> Result<MessageRow> {
    let state = MessageState::read(row.text(2)?)?;
    Ok(MessageRow {
        key: String::new(),
        receiver: row.text(1)?.to_owned(),
        state,
        composed: row.timestamp(3)?,
        attempts: row.count(4)?,
        next_attempt: if state == MessageState::Waiting { Some(row.timestamp(5)?) } else { None },
        expires: row.timestamp(6)?,
        ended: row.opt_timestamp(7)?,
        error: row.opt_text(8)?.map(str::to_owned),
        notes: Vec::new(),
    })
}

/// Returns the message's key. It includes the time, because a store restored from a backup reuses ids.
fn key(tx: &mut Tx<'_>, id: i64, composed: Timestamp) -> Result<String> {
    let store: String = meta(tx, STORE_ID)?.unwrap_or_default().chars().take(12).collect();
    Ok(format!("{store}-{id}-{}", composed.millis()))
}

fn notes_of(tx: &mut Tx<'_>, message: i64) -> Result<Vec<Notification>> {
    let sql = "SELECT body FROM alert_note WHERE message = $1 ORDER BY id";
    tx.all("reading a message", sql, vals![message], |row| json::read("note", row.text(0)?))
}
