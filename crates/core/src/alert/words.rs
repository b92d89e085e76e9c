//! Texts of notes: the headline of a message, a line per note, and the command that shows details.

use std::collections::BTreeMap;

use super::{About, CaseNote, ChangeKind, Note};
use crate::{hostlist, view::plural};

/// Notes listed in one message. The others are counted.
const SPELLED_OUT: usize = 20;

/// Returns the subject of a message in one line.
pub fn headline(notes: &[Note]) -> String {
    match notes {
        [] => "nothing".to_owned(),
        [note] => line(note),
        many => tally(many),
    }
}

/// Counts notes by kind: "3 cases opened (n[1-3]), 1 closed (n9); breaker-open".
pub fn tally(notes: &[Note]) -> String {
    let mut cases: BTreeMap<ChangeKind, Vec<&CaseNote>> = BTreeMap::new();
    let mut others = Vec::new();
    for note in notes {
        match &note.about {
            // The last change is the current state.
            About::Case(case) => {
                if let Some(change) = case.changes.last() {
                    cases.entry(change.what).or_default().push(case);
                }
            }
            About::Service(service) if service.raised => others.push(service.condition.to_string()),
            About::Service(service) => others.push(format!("{} is over", service.condition)),
            About::Trial { .. } => others.push("a test message".to_owned()),
        }
    }
    let cases = cases.into_iter().map(|(kind, cases)| {
        let names: Vec<_> = cases.iter().map(|case| case.node.clone()).collect();
        let word = if cases.len() == 1 { "case" } else { "cases" };
        format!("{} {word} {kind} ({})", cases.len(), shortened(&hostlist::fold(&names), 200))
    });
    let cases: Vec<String> = cases.collect();
    let parts = [cases.join(", "), others.join(", ")];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Formats one note as one line.
pub fn line(note: &Note) -> String {
    match &note.about {
        About::Case(case) => {
            let kinds: Vec<&str> = case.changes.iter().map(|change| change.what.code()).collect();
            let why = match case.findings.first() {
                Some(finding) => format!("{} ({})", finding.text, finding.reason),
                None => case.changes.last().map_or_else(String::new, |change| change.why.clone()),
            };
            format!("{}: case {}, {}: {}", case.node, kinds.join(", "), case.severity, shortened(&why, 300))
        }
        About::Service(service) if service.raised => format!("{}: {}", service.condition, service.text),
        About::Service(service) => format!("{} is over", service.condition),
        About::Trial { by } => format!("test message by {by}; nothing is wrong"),
    }
}

/// Returns the command that shows details.
pub fn command(note: &Note) -> String {
    match &note.about {
        About::Case(case) => format!("doctor why {}", case.node),
        About::Service(service) => service.condition.command().to_owned(),
        About::Trial { .. } => "doctor alert list".to_owned(),
    }
}

/// Formats a message as plain text: each note with its reason, its evidence and the command that shows details.
pub fn paragraphs(notes: &[Note]) -> Vec<String> {
    let mut paragraphs: Vec<String> = notes.iter().take(SPELLED_OUT).map(paragraph).collect();
    if notes.len() > SPELLED_OUT {
        paragraphs.push(format!("and {} more: `doctor cases`", notes.len() - SPELLED_OUT));
    }
    paragraphs
}

fn paragraph(note: &Note) -> String {
    let mut lines = vec![line(note)];
    if let About::Case(case) = &note.about {
        // A closed case requires nothing any more.
        if case.open {
            lines.push(format!("  severity {}", case.severity.described()));
        }
        lines.extend(case.changes.iter().map(|change| format!("  {}: {}", change.what, shortened(&change.why, 500))));
        lines.extend(case.findings.iter().map(|finding| {
            let evidence = shortened(&finding.evidence, 500);
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
fn shortened(text: &str, most: usize) -> String {
    let plain = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    let mut short: String = plain.clone().take(most).collect();
    if plain.count() > most {
        short.push('…');
    }
    short
}
