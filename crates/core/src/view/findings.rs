//! All open findings of all nodes.

use serde::Serialize;

use super::{Facts, FindingView};
use crate::{
    ids::{CaseId, NodeName, PoolName},
    snapshot::NodeRecord,
};

/// A failing finding and its node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FindingRow {
    pub node: NodeName,
    /// Unknown for a node that is gone.
    pub pool: Option<PoolName>,
    pub state: &'static str,
    pub case: Option<CaseId>,
    #[serde(flatten)]
    pub finding: FindingView,
}

/// Returns the open findings of the selected nodes: worst first, then oldest.
pub fn findings(facts: &Facts, selects: impl Fn(&NodeRecord) -> bool) -> Vec<FindingRow> {
    let mut rows: Vec<FindingRow> = Vec::new();
    for (record, listed) in facts.nodes().filter(|(record, _)| selects(record)) {
        rows.extend(record.findings.iter().map(|open| FindingRow {
            node: record.node.name.clone(),
            pool: listed.then(|| record.node.pool.clone()),
            state: record.state.as_str(),
            case: record.case,
            finding: FindingView::of(open),
        }));
    }
    rows.sort_by(|a, b| {
        let (x, y) = (&a.finding, &b.finding);
        (y.severity, x.first_seen, &a.node, &x.check, &x.entity).cmp(&(
            x.severity,
            y.first_seen,
            &b.node,
            &y.check,
            &y.entity,
        ))
    });
    rows
}
