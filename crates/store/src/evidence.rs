//! The raw documents behind results: compressed, capped, and kept as long as a case needs them. Most lie in bundles;
//! those that are large or that a case rests on stand alone.

use std::{
    io::Read,
    sync::{Mutex, MutexGuard, PoisonError},
};

use doctor_core::{
    ids::{CaseId, NodeName, RunId},
    time::Timestamp,
};

use super::{
    Store,
    bundle::{self, Arrival},
    db::{Kind, Tx, Val, vals},
    error::{Result, StoreError},
    records::{EvidenceRow, JudgedResult},
};

/// The most that is kept of one document, compressed.
const CAP: usize = 1 << 20;
/// Fast: a result waits for this.
const LEVEL: i32 = 1;
/// No document is larger than this before compression; what claims to be is not ours.
const MOST: usize = 64 << 20;

/// A document ready to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packed {
    pub(super) bytes: Vec<u8>,
    pub(super) truncated: bool,
}

impl Packed {
    pub(super) fn new(document: &[u8]) -> Result<Self> {
        let mut kept = document.len().min(MOST);
        loop {
            let bytes = compress(&document[..kept])?;
            if bytes.len() <= CAP {
                return Ok(Self { bytes, truncated: kept < document.len() });
            }
            // Noise compresses evenly: cut in proportion, and a little more so that this ends.
            kept = kept / 16 * (CAP * 15 / bytes.len()).clamp(1, 15);
        }
    }
}

/// Compressors that nobody uses just now. Setting one up costs more than compressing a usual document, and so does one
/// whose tables have left the processor's cache: the one that was used last is taken first, so that many threads share
/// as few as there are processors.
static IDLE: Mutex<Vec<zstd::bulk::Compressor<'static>>> = Mutex::new(Vec::new());
/// So many are kept for the next one. More exist only while more compress at once.
const IDLE_COMPRESSORS: usize = 16;

pub(super) fn compress(document: &[u8]) -> Result<Vec<u8>> {
    let fail =
        |error: std::io::Error| StoreError::Refused { operation: "compressing evidence", why: error.to_string() };
    let idle = idle_compressors().pop();
    let mut compressor = idle.map_or_else(|| zstd::bulk::Compressor::new(LEVEL), Ok).map_err(fail)?;
    let bytes = compressor.compress(document).map_err(fail)?;
    let mut idle = idle_compressors();
    if idle.len() < IDLE_COMPRESSORS {
        idle.push(compressor);
    }
    Ok(bytes)
}

fn idle_compressors() -> MutexGuard<'static, Vec<zstd::bulk::Compressor<'static>>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn decompress(packed: &[u8]) -> Result<Vec<u8>> {
    let fail = |error: std::io::Error| StoreError::Unreadable { what: "evidence", why: error.to_string() };
    let mut document = Vec::new();
    let most = u64::try_from(MOST).unwrap_or(u64::MAX);
    zstd::stream::read::Decoder::new(packed)
        .and_then(|decoder| decoder.take(most).read_to_end(&mut document))
        .map_err(fail)?;
    Ok(document)
}

/// Evidence about to be written: for which node, from which result.
#[derive(Debug)]
pub(super) struct Kept<'a> {
    pub(super) run: RunId,
    pub(super) node: i64,
    pub(super) received: Timestamp,
    pub(super) policy_version: u32,
    pub(super) profile_version: Option<u32>,
    pub(super) packed: &'a Packed,
    pub(super) case: Option<CaseId>,
}

impl<'a> Kept<'a> {
    pub(super) const fn new(arrival: &Arrival<'_>, packed: &'a Packed) -> Self {
        let &JudgedResult { run, received, policy_version, profile_version, .. } = arrival.result;
        Self { run, node: arrival.node, received, policy_version, profile_version, packed, case: arrival.case }
    }
}

pub(super) fn keep(tx: &mut Tx<'_>, all: &[Kept<'_>]) -> Result<()> {
    use Kind::{Blob, Int};
    let mut rows: Vec<Val<'_>> = Vec::with_capacity(all.len() * 8);
    for kept in all {
        rows.extend_from_slice(vals![
            kept.run,
            kept.node,
            kept.received,
            kept.policy_version,
            kept.profile_version,
            kept.packed.truncated,
            kept.case,
            kept.packed.bytes.as_slice()
        ]);
    }
    let into = "evidence (run, node, received, policy, profile, truncated, case_id, body)";
    tx.bulk("keeping evidence", into, &[Int, Int, Int, Int, Int, Int, Int, Blob], &rows, "")
}

/// The evidence of a case: of its own runs, and of the runs whose findings are open against its node.
pub(super) fn pin(tx: &mut Tx<'_>, case: CaseId, node: i64) -> Result<()> {
    let operation = "pinning evidence";
    let sql = "SELECT rn.run, rn.node FROM run_node rn JOIN run r ON r.id = rn.run WHERE r.case_id = $1";
    let mut rests_on = tx.all(operation, sql, vals![case], |row| Ok((row.run(0)?, row.int(1)?)))?;
    let sql = "SELECT run, node FROM finding WHERE node = $1 AND run IS NOT NULL";
    rests_on.extend(tx.all(operation, sql, vals![node], |row| Ok((row.run(0)?, row.int(1)?)))?);
    let rows: Vec<Val<'_>> =
        rests_on.iter().flat_map(|(run, node)| [(*run).into(), (*node).into(), case.into()]).collect();
    let sqlite = "UPDATE evidence SET case_id = $3 WHERE run = $1 AND node = $2 AND case_id IS NULL";
    let postgres = "UPDATE evidence e SET case_id = p.case_id \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[]) AS p (run, node, case_id) \
                    WHERE e.run = p.run AND e.node = p.node AND e.case_id IS NULL";
    tx.each(operation, (sqlite, postgres), &[Kind::Int; 3], &rows)?;
    rests_on.into_iter().try_for_each(|(run, node)| take_out(tx, case, run, node))
}

/// A bundle goes when its time is over; what a case rests on is taken out of it and stays.
fn take_out(tx: &mut Tx<'_>, case: CaseId, run: RunId, node: i64) -> Result<()> {
    let sql = "SELECT 1 FROM evidence WHERE run = $1 AND node = $2";
    if tx.first("pinning evidence", sql, vals![run, node], |_| Ok(()))?.is_some() {
        return Ok(());
    }
    let Some(found) = bundle::find(tx, run, node)? else { return Ok(()) };
    let packed = Packed::new(&found.bytes)?;
    let EvidenceRow { received, policy_version, profile_version, .. } = found;
    let kept = Kept { run, node, received, policy_version, profile_version, packed: &packed, case: Some(case) };
    keep(tx, &[kept])?;
    bundle::took_out(tx, run, node)
}

impl Store {
    /// The raw document behind a result, if it is still kept.
    pub fn evidence(&self, run: RunId, node: &NodeName) -> Result<Option<EvidenceRow>> {
        self.read(|tx| {
            let Some(id) = tx.names.node_number(node) else { return Ok(None) };
            let sql =
                "SELECT body, truncated, received, policy, profile, case_id FROM evidence WHERE run = $1 AND node = $2";
            let alone = tx.first("reading evidence", sql, vals![run, id], |row| {
                let bytes = decompress(row.blob(0)?)?;
                Ok(EvidenceRow {
                    bytes,
                    truncated: row.int(1)? != 0,
                    received: row.moment(2)?,
                    policy_version: row.count(3)?,
                    profile_version: row.opt_int(4)?.map(|_| row.count(4)).transpose()?,
                    pinned_by: row.opt_case(5)?,
                })
            })?;
            alone.map_or_else(|| bundle::find(tx, run, id), |alone| Ok(Some(alone)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_of_noise_is_cut_to_the_cap_and_says_so() {
        let mut state = 1_u64;
        let noise: Vec<u8> = (0..3 << 20)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let packed = Packed::new(&noise).unwrap();
        assert!(packed.truncated && packed.bytes.len() <= CAP);
        assert!(packed.bytes.len() > CAP / 2, "no more is thrown away than needed: {}", packed.bytes.len());
        let back = decompress(&packed.bytes).unwrap();
        assert!(noise.starts_with(&back));
    }

    #[test]
    fn an_ordinary_document_comes_back_whole() {
        let document = b"{\"run\":\"r0\"}".repeat(100);
        let packed = Packed::new(&document).unwrap();
        assert!(!packed.truncated && packed.bytes.len() < document.len() / 10);
        assert_eq!(decompress(&packed.bytes).unwrap(), document);
    }
}
