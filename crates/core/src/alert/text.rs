//! Texts of notes: the headline of a message, a line per note, and the command that shows details.

use std::collections::BTreeMap;

use super::{CaseNotification, ChangeKind, Notification, Subject};
use crate::{hostlist, view::plural};

/// Notes listed in one message. The others are counted.
const MAX_LISTED: usize = 20;

/// Returns the subject of a message in one line.
pub fn headline(notes: &[Notification]) -> String {
    match notes {
        [] => "nothing".to_owned(),
        [note] => line(note),
        many => summary(many),
    }
}

/// Counts notes by kind: "3 cases opened (n[1-3]), 1 closed (n9); breaker-open".
pub fn summary(notes: &[Notification]) -> String {
    let mut cases: BTreeMap<ChangeKind, Vec<&CaseNotification>> = BTreeMap::new();
    let mut others = Vec::new();
    for note in notes {
        match &note.subject {
            // The last change is the current state.
            Subject::Case(case) => {
                if let Some(change) = case.changes.last() {
                    cases.entry(change.what).or_default().push(case);
                }
            }
            Subject::Service(service) if service.raised => others.push(service.condition.to_string()),
            Subject::Service(service) => others.push(format!("{} is over", service.condition)),
            Subject::Test { .. } => others.push("a test message".to_owned()),
        }
    }
    let cases = cases.into_iter().map(|(kind, cases)| {
        let names: Vec<_> = cases.iter().map(|case| case.node.clone()).collect();
        let noun = if cases.len() == 1 { "case" } else { "cases" };
        format!("{} {noun} {kind} ({})", cases.len(), truncate(&hostlist::fold(&names), 200))
    });
    let cases: Vec<String> = cases.collect();
    let parts = [cases.join(", "), others.join(", ")];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Formats one note as one line.
pub fn line(note: &Notification) -> String {
    match &note.subject {
        Subject::Case(case) => {
            let kinds: Vec<&str> = case.changes.iter().map(|change| change.what.code()).collect();
            let why = match case.findings.first() {
                Some(finding) => format!("{} ({})", finding.text, finding.reason),
                None => case.changes.last().map_or_else(String::new, |change| change.why.clone()),
            };
            format!("{}: case {}, {}: {}", case.node, kinds.join(", "), case.severity, truncate(&why, 300))
        }
        Subject::Service(service) if service.raised => format!("{}: {}", service.condition, service.text),
        Subject::Service(service) => format!("{} is over", service.condition),
        Subject::Test { by } => format!("test message by {by}; nothing is wrong"),
    }
}

/// Returns the command that shows details.
pub fn command(note: &Notification) -> String {
    match &note.subject {
        Subject::Case(case) => format!("doctor why {}", case.node),
        Subject::Service(service) => service.condition.command().to_owned(),
        Subject::Test { .. } => "doctor alert list".to_owned(),
    }
}

/// Formats a message as plain text: each note with its reason, its evidence and the command that shows details.
pub fn paragraphs(notes: &[Notification]) -> Vec<String> {
    let mut paragraphs: Vec<String> = notes.iter().take(MAX_LISTED).map(paragraph).collect();
    if notes.len() > MAX_LISTED {
        paragraphs.push(format!("and {} more: `doctor cases`", notes.len() - MAX_LISTED));
    }
    paragraphs
}

fn paragraph(note: &Notification) -> String {
    let mut lines = vec![line(note)];
    if let Subject::Case(case) = &note.subject {
        // A closed case requires nothing any more.
        if case.open {
            lines.push(format!("  severity {}", case.severity.described()));
        }
        lines.extend(case.changes.iter().map(|change| format!("  {}: {}", change.what, truncate(&change.why, 500))));
        // Often a change says it already.
        let words = case.requested.iter().filter(|text| case.changes.iter().all(|change| !change.why.contains(*text)));
        lines.extend(words.map(|text| format!("  operator: {}", truncate(text, 500))));
        lines.extend(case.findings.iter().map(|finding| {
            let evidence = truncate(&finding.evidence, 500);
            format!("  {} on {}: {evidence}", finding.check, finding.entity)
        }));
        if case.more_findings > 0 {
            lines.push(format!("  and {}", plural(case.more_findings as usize, "more finding")));
        }
        lines.push(format!("  case {}, machine {}", case.case, case.hardware));
    }
    lines.push(format!("  details: {}", command(note)));
    lines.join("\n")
}

/// Shortens text and removes control characters: messages are read on a phone, and text from a node may be long or
/// hostile.
fn truncate(text: &str, most: usize) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = plain.clone().take(most).collect();
    if plain.count() > most {
        short.push('…');
    }
    short
}
