//! What the newest results of a test say about the fleet: nodes on which it did not apply for a certain reason, and how
//! long it takes.

use std::{collections::BTreeMap, sync::Arc};

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, TestId},
    reason::ReasonCode,
    time::Span,
};

use super::{
    Store,
    db::{Tx, vals},
    error::Result,
};

/// Results per test from which its duration is computed. More change it by seconds.
const SAMPLE: i64 = 200;

/// A test, a reason, and the nodes whose newest result has it.
type NodesByReason = (TestId, ReasonCode, Vec<NodeName>);

impl Store {
    /// Returns the nodes on which one of these tests was last found not applicable for one of these reasons.
    pub fn nodes_not_applicable(&self, tests: &[TestId], reasons: &[ReasonCode]) -> Result<Vec<NodesByReason>> {
        self.read(|tx| {
            let ids = Arc::clone(&tx.ids);
            let of_reason = |id: &i64| ids.outcome(*id).is_ok_and(|kind| reasons.contains(&kind.reason));
            let outcomes: Vec<i64> = ids.outcomes_with(Verdict::NotApplicable).filter(of_reason).collect();
            // On most fleets all software is installed.
            if outcomes.is_empty() {
                return Ok(Vec::new());
            }
            let mut found: BTreeMap<(&TestId, ReasonCode), Vec<NodeName>> = BTreeMap::new();
            for test in tests {
                let Some(id) = ids.test_id(test) else { continue };
                let sql = format!(
                    "SELECT l.node, l.outcome FROM node n CROSS JOIN latest_result l \
                     WHERE l.node = n.id AND l.test = $1 AND l.outcome IN ({})",
                    list(&outcomes)
                );
                tx.rows("reading results that did not apply", &sql, vals![id], |row| {
                    let reason = ids.outcome(row.int(1)?)?.reason.clone();
                    found.entry((test, reason)).or_default().push(ids.node(row.int(0)?)?.clone());
                    Ok(())
                })?;
            }
            Ok(found.into_iter().map(|((test, reason), nodes)| (test.clone(), reason, nodes)).collect())
        })
    }

    /// Returns how long each of these tests takes on average, from newest results that are a pass or fail. A test
    /// without such a result is omitted.
    pub fn mean_durations(&self, tests: &[TestId]) -> Result<BTreeMap<TestId, Span>> {
        self.read(|tx| {
            let ids = Arc::clone(&tx.ids);
            let outcomes: Vec<i64> =
                [Verdict::Pass, Verdict::Fail].into_iter().flat_map(|verdict| ids.outcomes_with(verdict)).collect();
            let mut means = BTreeMap::new();
            for test in tests {
                let Some(id) = ids.test_id(test).filter(|_| !outcomes.is_empty()) else { continue };
                if let Some(mean) = mean_duration(tx, id, &outcomes)? {
                    means.insert(test.clone(), mean);
                }
            }
            Ok(means)
        })
    }
}

/// Imported results have no duration.
fn mean_duration(tx: &mut Tx<'_>, test: i64, outcomes: &[i64]) -> Result<Option<Span>> {
    let sql = format!(
        "SELECT h.duration_ms FROM node n CROSS JOIN latest_result l CROSS JOIN history h \
         WHERE l.node = n.id AND l.test = $1 AND l.outcome IN ({}) \
         AND h.node = l.node AND h.run = l.run AND h.test = l.test AND h.duration_ms > 0 LIMIT $2",
        list(outcomes)
    );
    let durations = tx.all("reading durations", &sql, vals![test, SAMPLE], |row| row.int(0))?;
    let count = i64::try_from(durations.len()).unwrap_or(i64::MAX);
    let sum = durations.into_iter().fold(0_i64, i64::saturating_add);
    Ok(sum.checked_div(count).map(Span::from_millis))
}

fn list(ids: &[i64]) -> String {
    ids.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}
