//! The last output of jobs that ended without a complete result. It is deleted with its run.

use std::sync::Arc;

use doctor_core::{
    ids::{NodeName, RunId},
    last_output::LastOutput,
    run::RunEnd,
    time::Timestamp,
};

use super::{
    Store,
    db::{Row, Tx, vals},
    error::Result,
    fencing::Lease,
    id_cache::IdCache,
    records::EndedWithoutResult,
    runs,
};

/// What to do with output that is stored for the run already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Earlier {
    /// It is that of an earlier attempt.
    Replace,
    /// It was taken before the job was cancelled, which may have destroyed the rest.
    Keep,
}

impl Store {
    /// Stores the last output of a run's job, by node. A run that was deleted or a node that is not of the run is ignored.
    pub fn record_job_output(
        &self,
        lease: &Lease,
        run: RunId,
        outputs: &[LastOutput],
        earlier: Earlier,
        at: Timestamp,
    ) -> Result<()> {
        let operation = "storing the output of a job";
        self.write(lease, |tx| {
            let names = Arc::clone(&tx.ids);
            if earlier == Earlier::Replace {
                tx.execute(operation, "DELETE FROM job_output WHERE run = $1", vals![run])?;
            }
            for output in outputs {
                let Some(node) = names.node_id(&output.node) else { continue };
                let sql = "INSERT INTO job_output (run, node, at, ending, text) SELECT run, node, CAST($3 AS BIGINT), \
                           CAST($4 AS TEXT), CAST($5 AS TEXT) FROM run_node WHERE run = $1 AND node = $2 \
                           ON CONFLICT (run, node) DO NOTHING";
                tx.execute(operation, sql, vals![run, node, at, output.ending.as_deref(), &output.text])?;
            }
            Ok(())
        })
    }

    /// Returns the last output of a run's job, by node. Empty: none was kept.
    pub fn job_output(&self, run: RunId) -> Result<Vec<LastOutput>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = "SELECT node, ending, text FROM job_output WHERE run = $1 ORDER BY node";
            tx.all("reading the output of a job", sql, vals![run], |row| output(row, &names, 0))
        })
    }

    /// Returns the newest run of a node that ended without a complete result and has output.
    pub fn last_without_result(&self, node: &NodeName) -> Result<Option<EndedWithoutResult>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let Some(id) = names.node_id(node) else { return Ok(None) };
            let sql = format!("{ENDED} AND o.node = $1 ORDER BY o.run DESC LIMIT 1");
            tx.first(READING, &sql, vals![id], |row| ended(row, &names))
        })
    }

    /// Returns runs since this time that ended without a complete result and have output, by node, newest first.
    pub fn without_result_since(&self, since: Timestamp, limit: u32) -> Result<Vec<EndedWithoutResult>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = format!("{ENDED} AND o.run >= $1 ORDER BY o.run DESC, o.node LIMIT $2");
            tx.all(READING, &sql, vals![RunId::born_at(since), limit], |row| ended(row, &names))
        })
    }
}

/// Returns the line to be shown of the last output of a run's job, on its first node that has one.
pub(super) fn quote(tx: &mut Tx<'_>, run: RunId) -> Result<Option<String>> {
    let names = Arc::clone(&tx.ids);
    let sql = "SELECT node, ending, text FROM job_output WHERE run = $1 ORDER BY node LIMIT 4";
    let found = tx.all("reading the output of a job", sql, vals![run], |row| output(row, &names, 0))?;
    Ok(found.iter().find_map(LastOutput::quote))
}

const READING: &str = "reading runs without a result";

/// A run with a row here may have been submitted again and completed: that one has no `end_kind`.
const ENDED: &str = "SELECT o.node, o.ending, o.text, r.id, r.tests, r.ended, r.end_kind, r.end_reason \
                     FROM job_output o JOIN run r ON r.id = o.run WHERE r.end_kind IS NOT NULL";

fn output(row: &Row<'_>, names: &IdCache, first: usize) -> Result<LastOutput> {
    Ok(LastOutput {
        node: names.node(row.int(first)?)?.clone(),
        ending: row.opt_text(first + 1)?.map(str::to_owned),
        text: row.text(first + 2)?.to_owned(),
    })
}

fn ended(row: &Row<'_>, names: &IdCache) -> Result<EndedWithoutResult> {
    let tests = runs::decode_ids(row.text(4)?)?.into_iter().map(|test| names.test(test).cloned());
    let end: RunEnd = runs::parse_end(row.opt_text(6)?, row.opt_text(7)?)?;
    Ok(EndedWithoutResult {
        run: row.run(3)?,
        tests: tests.collect::<Result<_>>()?,
        ended: row.opt_timestamp(5)?.unwrap_or(row.run(3)?.born()),
        end,
        output: output(row, names, 0)?,
    })
}
