//! A period divided into slots of equal length, for plots.

use serde::Serialize;

use super::period::{Period, closed_at, spent};
use crate::{
    finding::Verdict,
    time::{Span, Timestamp},
};

/// What happened in one slot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Slot {
    pub at: Timestamp,
    pub pass: u32,
    pub fail: u32,
    pub inconclusive: u32,
    pub cases_opened: u32,
    pub cases_closed: u32,
    pub node_hours: f64,
}

/// Largest number of slots that a plot can show.
const MAX_SLOTS: i64 = 120;
/// Natural slot lengths.
const LENGTHS: [Span; 4] = [Span::hours(1), Span::hours(6), Span::days(1), Span::days(7)];

/// Divides the period into slots of the shortest length that gives at most `MAX_SLOTS` of them.
pub(super) fn slots(period: &Period, since: Timestamp, until: Timestamp) -> Vec<Slot> {
    let total = until.since(since).millis();
    let length = LENGTHS.into_iter().find(|length| total.div_euclid(length.millis()) < MAX_SLOTS);
    let length = length.unwrap_or_else(|| Span::from_millis(total / MAX_SLOTS)).millis().max(1);
    let count = (total + length - 1) / length;
    let begins = (0..count).map(|index| since.plus(Span::from_millis(index * length)));
    let mut slots: Vec<Slot> = begins
        .map(|at| Slot { at, pass: 0, fail: 0, inconclusive: 0, cases_opened: 0, cases_closed: 0, node_hours: 0.0 })
        .collect();
    let slot_at = |at: Timestamp| {
        let inside = at >= since && at < until;
        usize::try_from(at.since(since).millis() / length).ok().filter(|_| inside)
    };
    for result in &period.results {
        let Some(slot) = slot_at(result.at).and_then(|index| slots.get_mut(index)) else { continue };
        match result.verdict {
            Verdict::Pass => slot.pass += 1,
            Verdict::Fail => slot.fail += 1,
            Verdict::Inconclusive => slot.inconclusive += 1,
            Verdict::NotApplicable => {}
        }
    }
    for case in &period.cases {
        if let Some(slot) = slot_at(case.opened).and_then(|index| slots.get_mut(index)) {
            slot.cases_opened += 1;
        }
        if let Some(slot) = closed_at(case).and_then(slot_at).and_then(|index| slots.get_mut(index)) {
            slot.cases_closed += 1;
        }
    }
    for slot in &mut slots {
        let end = slot.at.plus(Span::from_millis(length)).min(until);
        slot.node_hours = period.runs.iter().map(|run| spent(run, slot.at, end)).sum::<Span>().as_hours();
    }
    slots
}
