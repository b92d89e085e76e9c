//! Our record on a node: a part of its `Extra` (or `Comment`) field. Pure.
//!
//! A node has one reason, which disappears when the node is resumed, and a requalification run resumes it inside a reservation of
//! ours. The note keeps what must survive that: the marks and their cases, the text of the reason, and the last changes, so that
//! none is made twice. Slurm keeps the field over restarts.
//!
//! The field is one JSON object whose key `doctor` is ours; other keys are preserved. Text that is not a JSON object belongs to a
//! user, and an unreadable value of `doctor` may be a later version's: neither is overwritten, and neither permits giving the
//! node to users.

use doctor_core::{
    ids::{CaseId, OpId},
    node::MarkKind,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    config::{Notes, SlurmConfig},
    nodes::SlurmNode,
};

/// How many changes are remembered, of marks and of repairs each. The controller does not repeat older ones.
const MAX_RECORDED_CHANGES: usize = 8;
const KEY: &str = "doctor";

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Note {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) marks: Vec<RecordedMark>,
    /// The node was already out of service by an operator, whose drain we must not remove.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) over_foreign: bool,
    /// The reason of the marks.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) reason: String,
    /// Users had the node when we reserved it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) was_open: bool,
    /// Changes of marks.
    #[serde(skip_serializing_if = "ChangeLog::is_empty")]
    pub(super) mark_changes: ChangeLog,
    /// Reboots, resets and replacements. Separate from the marks, which change often during one of these.
    #[serde(skip_serializing_if = "ChangeLog::is_empty")]
    pub(super) node_ops: ChangeLog,
    /// The number of the written status, see `board`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status_number: Option<String>,
    /// The status in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RecordedMark {
    pub(super) kind: MarkKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) case: Option<CaseId>,
}

/// Our part of a node's field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoredNote {
    Absent,
    /// A user's text, or a value that this version cannot read.
    Unreadable,
    Present(Note),
}

impl StoredNote {
    pub(super) const fn is_present(&self) -> bool {
        matches!(self, Self::Present(_))
    }

    /// Returns the note, or an empty one.
    pub(super) fn into_note(self) -> Note {
        match self {
            Self::Present(note) => note,
            Self::Absent | Self::Unreadable => Note::default(),
        }
    }
}

/// The last changes, as `OP/WORD=TEXT`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct ChangeLog(Vec<String>);

impl ChangeLog {
    const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the text recorded for a change, if it was made.
    pub(super) fn get(&self, op: OpId, action: &str) -> Option<&str> {
        let this = format!("{op}/{action}");
        self.0.iter().find_map(|one| match one.strip_prefix(&this)? {
            "" => Some(""),
            rest => rest.strip_prefix('='),
        })
    }

    pub(super) fn record(&mut self, op: OpId, action: &str, text: &str) {
        self.remove(op, action);
        self.0.push(if text.is_empty() { format!("{op}/{action}") } else { format!("{op}/{action}={text}") });
        let surplus = self.0.len().saturating_sub(MAX_RECORDED_CHANGES);
        self.0.drain(..surplus);
    }

    pub(super) fn remove(&mut self, op: OpId, action: &str) {
        let this = format!("{op}/{action}");
        self.0.retain(|one| one.split('=').next() != Some(&this));
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} of the node is used by others: `{text}`; set `notes` of [backend.slurm] to a free field")]
pub(super) struct FieldInUse {
    key: &'static str,
    text: String,
}

impl Note {
    /// Reads the note of a node.
    pub(super) fn read(node: &SlurmNode, config: &SlurmConfig) -> StoredNote {
        let text = field(node, config.notes);
        if text.is_empty() {
            return StoredNote::Absent;
        }
        let Some(mut object) = object(text) else { return StoredNote::Unreadable };
        match object.remove(KEY) {
            None => StoredNote::Absent,
            Some(ours) => serde_json::from_value(ours).map_or(StoredNote::Unreadable, StoredNote::Present),
        }
    }

    /// Returns the field with this note in place of the previous one.
    pub(super) fn to_field(&self, node: &SlurmNode, config: &SlurmConfig) -> Result<String, FieldInUse> {
        let before = field(node, config.notes);
        let in_use = || FieldInUse { key: config.notes.key(), text: before.chars().take(60).collect() };
        if Self::read(node, config) == StoredNote::Unreadable {
            return Err(in_use());
        }
        let mut object = if before.is_empty() { Map::new() } else { object(before).ok_or_else(in_use)? };
        // Serialising strings cannot fail.
        let ours = serde_json::to_value(self).unwrap_or_default();
        match ours.as_object().is_some_and(Map::is_empty) {
            true => drop(object.remove(KEY)),
            false => drop(object.insert(KEY.to_owned(), ours)),
        }
        if object.is_empty() {
            return Ok(String::new());
        }
        // Text that looks like a key of Slurm would split the line when it is parsed.
        Ok(Value::Object(object).to_string().replace('=', "\\u003d"))
    }

    pub(super) fn has(&self, kind: MarkKind) -> bool {
        self.marks.iter().any(|mark| mark.kind == kind)
    }

    /// Returns whether a mark keeps the node from users.
    pub(super) fn keeps_out(&self) -> bool {
        self.marks.iter().any(|mark| mark.kind != MarkKind::Maintenance)
    }
}

fn field(node: &SlurmNode, notes: Notes) -> &str {
    match notes {
        Notes::Extra => &node.extra,
        Notes::Comment => &node.comment,
    }
}

fn object(text: &str) -> Option<Map<String, Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Some(object),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::ids::IdSource;
    use proptest::prelude::*;

    fn node(extra: &str) -> SlurmNode {
        SlurmNode { extra: extra.to_owned(), ..SlurmNode::default() }
    }

    fn config() -> SlurmConfig {
        SlurmConfig::default()
    }

    #[test]
    fn our_note_is_read_back_and_foreign_fields_stay() {
        let mut ids = IdSource::new(3);
        let mut note = Note { reason: "doctor: a State=b \"c\"".to_owned(), ..Note::default() };
        note.marks.push(RecordedMark { kind: MarkKind::Unhealthy, case: Some(ids.case()) });
        let op = ids.op();
        note.node_ops.record(op, "reboot", "123");
        let text = note.to_field(&node("{\"rack\":7}"), &config()).unwrap();
        assert!(!text.contains("State=") && text.contains("\"rack\":7"), "{text}");
        let back = Note::read(&node(&text), &config()).into_note();
        assert_eq!(back, note);
        assert_eq!((back.node_ops.get(op, "reboot"), back.node_ops.get(op, "reset")), (Some("123"), None));
        assert_eq!(Note::default().to_field(&node(&text), &config()).unwrap(), "{\"rack\":7}");
        assert_eq!(Note::default().to_field(&node(""), &config()).unwrap(), "");
    }

    #[test]
    fn a_field_in_use_is_not_overwritten() {
        let error = Note::default().to_field(&node("rack 7"), &config()).unwrap_err().to_string();
        assert!(error.contains("rack 7") && error.contains("`notes`"), "{error}");
        assert_eq!(Note::read(&node("rack 7"), &config()), StoredNote::Unreadable);
        let beside = SlurmConfig { notes: Notes::Comment, ..config() };
        Note::default().to_field(&node("rack 7"), &beside).unwrap();
    }

    #[test]
    fn a_note_of_a_later_version_is_distinguished_from_an_empty_field_and_not_overwritten() {
        let later = node("{\"doctor\":{\"marks\":\"none\"},\"rack\":7}");
        assert_eq!(Note::read(&later, &config()), StoredNote::Unreadable);
        let note = Note { status: Some("pass".to_owned()), ..Note::default() };
        let error = note.to_field(&later, &config()).unwrap_err().to_string();
        assert!(error.contains("\"marks\":\"none\""), "{error}");
        for nothing in ["", "{}", "{\"rack\":7}"] {
            assert_eq!(Note::read(&node(nothing), &config()), StoredNote::Absent, "{nothing}");
        }
    }

    #[test]
    fn only_the_latest_operations_are_recorded_and_each_once() {
        let mut ids = IdSource::new(3);
        let mut note = Note::default();
        let first = ids.op();
        note.mark_changes.record(first, "cordon", "");
        note.mark_changes.record(first, "cordon", "");
        assert_eq!(note.mark_changes.0.len(), 1);
        note.node_ops.record(first, "reboot", "123");
        for _ in 0..20 {
            note.mark_changes.record(ids.op(), "cordon", "");
        }
        assert_eq!((note.mark_changes.0.len(), note.mark_changes.get(first, "cordon")), (MAX_RECORDED_CHANGES, None));
        assert_eq!(note.node_ops.get(first, "reboot"), Some("123"), "however often marks came and went");
        note.node_ops.remove(first, "reboot");
        assert!(note.node_ops.is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_read_back(reason in "\\PC{0,80}", status in proptest::option::of("[a-z]{1,8}")) {
            let note = Note { reason, status, ..Note::default() };
            let text = note.to_field(&node(""), &config()).unwrap();
            prop_assert!(!text.contains('='));
            prop_assert_eq!(Note::read(&node(&text), &config()).into_note(), note);
        }

        #[test]
        fn reading_a_field_never_panics(text in "\\PC{0,200}") {
            let _ = Note::read(&node(&text), &config());
        }
    }
}
