//! All current findings.

use std::cmp::Reverse;

use doctor_core::hex;
use doctor_core::{
    finding::Severity,
    ids::{CheckId, NodeName},
    time::Timestamp,
    view::{self, FindingRow},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    answer::Lasts,
    asked::{Form, Param},
    endpoint::{JSON, Look, Page, Route},
    nodes::{CURSOR, LIFE, LIMIT, POOL, SELECT, finding, wanted},
    refusal::Refusal,
    schema::{joined, life, object, or_null, page, text},
};
use crate::response::Made;

pub(super) const LIST: Route = Route {
    path: "/findings",
    name: "findings",
    summary: "Open findings of all nodes",
    about: "Findings that are not cleared: most severe first, then oldest.",
    params: &[
        SELECT,
        POOL,
        LIFE,
        Param::new("check", "only this check", Form::Name),
        Param::new("severity", "only this severity", Form::OneOf(&["monitor", "reset", "reboot", "isolate"])),
        LIMIT,
        CURSOR,
    ],
    lasts: Lasts::WithScene,
    answer: || page(row()),
    kind: JSON,
    read,
};

fn read(look: &Look<'_>) -> Result<Made, Refusal> {
    let (asked, limit) = (look.asked, look.limit());
    let (check, severity): (Option<CheckId>, Option<Severity>) = (asked.get("check")?, asked.get("severity")?);
    let after = asked.text("cursor").map(Place::read).transpose()?;
    let rows = view::findings(&look.scene.facts, wanted(asked)?).into_iter().filter(|row| {
        check.as_ref().is_none_or(|check| row.finding.check == *check)
            && severity.is_none_or(|severity| row.finding.severity == severity)
            && after.as_ref().is_none_or(|after| Place::of(row) > *after)
    });
    let rows: Vec<_> = rows.take(limit as usize + 1).collect();
    Made::told_by_nodes(&Page::of(rows, limit, |row| Place::of(row).written()))
}

/// Position of a finding in the list, independent of other findings, which may appear or clear before the next page is
/// requested. In the order of [`view::findings`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place(Reverse<Severity>, Timestamp, NodeName, CheckId, String);

impl Place {
    fn of(row: &FindingRow) -> Self {
        let finding = &row.finding;
        let (node, check, entity) = (row.node.clone(), finding.check.clone(), finding.entity.clone());
        Self(Reverse(finding.severity), finding.first_seen, node, check, entity)
    }

    fn written(&self) -> String {
        // Strings and a time always serialise.
        hex::encode(&serde_json::to_vec(self).unwrap_or_default())
    }

    fn read(cursor: &str) -> Result<Self, Refusal> {
        let bad = || Refusal::BadParameter { name: "cursor", why: "expected `next` of the previous page".to_owned() };
        serde_json::from_slice(&hex::decode(cursor).ok_or_else(bad)?).map_err(|_| bad())
    }
}

fn row() -> Value {
    let place = object(json!({ "node": text(), "pool": or_null(text()), "life": life(), "case": or_null(text()) }));
    joined(&[place, finding()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_round_trips_and_sorts_as_its_finding() {
        let place = |severity, at, node: &str| {
            let (node, check) = (NodeName::new(node).unwrap(), CheckId::new("gpu-count").unwrap());
            Place(Reverse(severity), Timestamp::from_secs(at), node, check, "gpu 3 \"x\"".to_owned())
        };
        let first = place(Severity::Isolate, 9, "b");
        assert_eq!(Place::read(&first.written()), Ok(first.clone()));
        for later in
            [place(Severity::Monitor, 1, "a"), place(Severity::Isolate, 10, "a"), place(Severity::Isolate, 9, "c")]
        {
            assert!(later > first, "{later:?}");
        }
        for bad in ["0", "7", "zz", "ä", "7b7d"] {
            assert!(Place::read(bad).is_err(), "{bad}");
        }
    }
}
