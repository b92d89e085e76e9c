//! The cost of validation per day, compared with the faults it found.

use serde::Serialize;

use crate::{
    case::{Case, CaseState},
    time::{Span, Timestamp},
};

const DAY: Span = Span::days(1);

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BudgetView {
    /// Midnight UTC.
    pub since: Timestamp,
    pub until: Timestamp,
    /// `None`: there is no limit.
    pub node_hours_per_day: Option<f64>,
    pub node_hours: f64,
    pub faults: u32,
    /// `None`: no fault was found.
    pub node_hours_per_fault: Option<f64>,
    pub days: Vec<BudgetDay>,
}

/// One day, in UTC.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BudgetDay {
    pub day: Timestamp,
    pub node_hours: f64,
    /// Cases opened with at least one finding; an operator's quarantine of a node without findings does not count.
    pub faults: u32,
    pub closed: u32,
}

/// The part of a case that is counted here: there may be many thousands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaseSpan {
    pub opened: Timestamp,
    pub closed: Option<Timestamp>,
    /// The case has at least one finding.
    pub fault: bool,
}

impl From<&Case> for CaseSpan {
    fn from(case: &Case) -> Self {
        Self { opened: case.opened, closed: closed_at(case), fault: !case.findings.is_empty() }
    }
}

/// Computes the budget from the midnight before `since` until now. `spent`: node time by day.
pub fn budget(
    spent: &[(Timestamp, Span)],
    cases: &[CaseSpan],
    limit: Option<f64>,
    (since, now): (Timestamp, Timestamp),
) -> BudgetView {
    let first = midnight(since);
    let mut days = Vec::new();
    let mut day = first;
    while day <= now {
        let inside = |at: Timestamp| midnight(at) == day;
        let millis: Span = spent.iter().filter(|(at, _)| inside(*at)).map(|(_, spent)| *spent).sum();
        let found = cases.iter().filter(|case| inside(case.opened) && case.fault).count();
        let closed = cases.iter().filter(|case| case.closed.is_some_and(inside)).count();
        days.push(BudgetDay { day, node_hours: millis.as_hours(), faults: count(found), closed: count(closed) });
        day = day.plus(DAY);
    }
    let node_hours: f64 = days.iter().map(|day| day.node_hours).sum();
    let faults: u32 = days.iter().map(|day| day.faults).sum();
    BudgetView {
        since: first,
        until: now,
        node_hours_per_day: limit,
        node_hours,
        faults,
        node_hours_per_fault: (faults > 0).then(|| node_hours / f64::from(faults)),
        days,
    }
}

fn midnight(at: Timestamp) -> Timestamp {
    Timestamp::from_millis(at.millis().div_euclid(DAY.millis()) * DAY.millis())
}

const fn closed_at(case: &Case) -> Option<Timestamp> {
    match case.state {
        CaseState::Closed { at, .. } => Some(at),
        CaseState::Open => None,
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
