//! Failed user jobs by node, stored as evidence and as a risk signal. They never cause a verdict.

use std::sync::Arc;

use doctor_core::{
    ids::NodeName,
    job_failures::{JobFailure, Label},
    time::Timestamp,
};

use super::{
    Store,
    db::{ColumnType, Tx, vals},
    error::Result,
    fencing::Lease,
    json,
};

/// Maximum number read, newest first: a cluster where every job fails shows it with fewer.
const MAX_READ: u32 = 10_000;

impl Store {
    /// Stores job failures that the backend reports. One row per job and node, updated by the latest report.
    pub fn add_job_failures(&self, lease: &Lease, failed: &[(NodeName, JobFailure)], now: Timestamp) -> Result<()> {
        use ColumnType::{Int, Text};
        self.write(lease, |tx| {
            let reported =
                failed.iter().map(|(node, work)| Ok((tx.node_id(node, now)?, work, json::write(&work.how)?)));
            let reported: Vec<(i64, &JobFailure, String)> = reported.collect::<Result<_>>()?;
            let mut rows = Vec::with_capacity(reported.len() * 6);
            for (node, work, how) in &reported {
                let [id, owner, name] = [&work.id, &work.owner, &work.name].map(Label::as_str);
                rows.extend_from_slice(vals![id, *node, owner, name, work.at, how]);
            }
            let into = "job_failure (job, node, owner, name, at, failure_kind)";
            let conflict =
                "ON CONFLICT (job, node) DO UPDATE SET at = excluded.at, failure_kind = excluded.failure_kind";
            tx.insert_many("storing failed user jobs", into, &[Text, Int, Text, Text, Int, Text], &rows, conflict)
        })
    }

    /// Returns failures since this time.
    pub fn job_failures_since(&self, since: Timestamp) -> Result<Vec<(NodeName, JobFailure)>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = "SELECT job, node, owner, name, at, failure_kind FROM job_failure WHERE at >= $1 \
                       ORDER BY at DESC, job, node LIMIT $2";
            tx.all("reading failed user jobs", sql, vals![since, MAX_READ], |row| {
                let work = JobFailure {
                    id: Label::new(row.text(0)?),
                    owner: Label::new(row.text(2)?),
                    name: Label::new(row.text(3)?),
                    at: row.timestamp(4)?,
                    how: json::read("failed user job", row.text(5)?)?,
                };
                Ok((names.node(row.int(1)?)?.clone(), work))
            })
        })
    }
}

/// Deletes a node's failures: they say nothing about the machine that has its name now.
pub(super) fn delete_of_node(tx: &mut Tx<'_>, node: i64) -> Result<()> {
    tx.execute("resetting a node", "DELETE FROM job_failure WHERE node = $1", vals![node]).map(drop)
}

/// Deletes expired failures. Cases have their own copy.
pub(super) fn prune(tx: &mut Tx<'_>, before: Timestamp) -> Result<()> {
    tx.execute("deleting failed user jobs", "DELETE FROM job_failure WHERE at < $1", vals![before]).map(drop)
}
