//! Commands on cases: acknowledge and snooze. They silence notifications; the case itself does not change.

use doctor_core::{
    case::Case,
    ids::CaseId,
    time::Timestamp,
    view::{Facts, format_time},
};

use super::{CommandError, Precondition, PreparedCommand, StoreWrite};

/// Prepares to silence the notifications of open cases until then, or until they close.
pub(super) fn mute(facts: &Facts, ids: &[CaseId], until: Option<Timestamp>) -> Result<PreparedCommand, CommandError> {
    let mut cases: Vec<&Case> = ids.iter().map(|id| open_case(facts, *id)).collect::<Result<_, _>>()?;
    cases.sort_by_key(|case| case.id);
    cases.dedup_by_key(|case| case.id);
    let (plan, done) = match until {
        None => ("Would send no more notifications about this until it closes.".to_owned(), "Acknowledged."),
        Some(until) => {
            (format!("Would send no notifications about this until {} UTC.", format_time(until)), "Snoozed.")
        }
    };
    let mut nodes: Vec<_> = cases.iter().map(|case| case.node.clone()).collect();
    nodes.sort();
    nodes.dedup();
    let write = |case: &&Case| StoreWrite::Mute { case: case.id, node: case.node.clone(), until };
    Ok(PreparedCommand {
        plan,
        changes: cases.iter().map(|case| format!("{} on {}: {}", case.id, case.node, worst_finding(case))).collect(),
        done: done.to_owned(),
        next: "`doctor why NODE` shows its progress; a notification is sent when it closes".to_owned(),
        over_limit: None,
        nodes,
        writes: cases.iter().map(write).collect(),
        preconditions: cases.iter().map(|case| Precondition::OpenCase(case.id)).collect(),
    })
}

fn worst_finding(case: &Case) -> &str {
    let worst = case.findings.iter().max_by_key(|finding| finding.severity);
    worst.map_or("requested by an operator", |finding| finding.text.as_str())
}

fn open_case(facts: &Facts, id: CaseId) -> Result<&Case, CommandError> {
    match facts.snapshot.cases.iter().find(|case| case.id == id) {
        Some(case) if case.is_open() => Ok(case),
        Some(case) => {
            Err(CommandError::Usage(format!("case {id} on {} is closed: there is nothing to mute", case.node)))
        }
        None => Err(CommandError::Unknown {
            what: "case",
            name: id.to_string(),
            known: "those that `doctor cases` lists".to_owned(),
        }),
    }
}
