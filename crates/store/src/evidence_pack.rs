//! Bundles: many documents, compressed together.
//!
//! Documents of one test are alike; compressed together they take a small part of the space and time that each would
//! take alone. A bundle is small, because reading one document decompresses the whole bundle.
//!
//! Decompressed, a bundle is a four-byte length, that many bytes of JSON listing the results, and the documents in
//! sequence. Bundles of earlier versions list more of each result.

use doctor_core::ids::{CaseId, NodeName, RunId};
use serde::{Deserialize, Serialize};

use super::{
    compression::{Packed, compress, decompress},
    db::{ColumnType, SqlValue, Tx, vals},
    error::{Result, StoreError},
    records::{ClassifiedResult, EvidenceRow},
    standalone_evidence::{self, EvidenceInsert},
};

/// Limits of a bundle: bytes of documents, and number of results.
const MAX_BYTES: usize = 64 << 10;
const MAX_RESULTS: usize = 64;
/// A longer document is stored on its own.
const STANDALONE_MIN_BYTES: usize = 16 << 10;

/// A result, and the length of its document in the bundle; `None` if the document is stored elsewhere.
#[derive(Debug, Serialize)]
struct PackEntry<'a> {
    result: DocumentHeader<&'a NodeName>,
    bytes: Option<usize>,
}

/// [`PackEntry`] as it is read back.
#[derive(Debug, Deserialize)]
struct StoredDocumentEntry {
    result: DocumentHeader<NodeName>,
    bytes: Option<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
struct DocumentHeader<N> {
    run: RunId,
    node: N,
    received: doctor_core::time::Timestamp,
    policy_version: u32,
    profile_version: Option<u32>,
}

/// Compresses the document of a result that must be stored on its own. Compressing a long document takes time, so do
/// not call this under a lock.
pub(super) fn compress_standalone(result: &ClassifiedResult) -> Result<Option<Packed>> {
    // History rows point to bundles; without outcomes there is no history row.
    let unlisted = result.outcomes.is_empty();
    (unlisted || result.evidence.len() > STANDALONE_MIN_BYTES).then(|| Packed::new(&result.evidence)).transpose()
}

/// A result about to be stored.
#[derive(Debug)]
pub(super) struct IncomingResult<'a> {
    pub(super) node: i64,
    pub(super) result: &'a ClassifiedResult,
    pub(super) standalone: Option<&'a Packed>,
    /// Evidence of a case's run is stored with the case.
    pub(super) case: Option<CaseId>,
}

impl IncomingResult<'_> {
    fn is_standalone(&self) -> bool {
        self.standalone.is_some() || self.case.is_some()
    }

    fn packed_size(&self) -> usize {
        if self.is_standalone() { 0 } else { self.result.evidence.len() }
    }

    /// Returns this result's row of `evidence`, with this document.
    const fn evidence_row<'a>(&self, packed: &'a Packed) -> EvidenceInsert<'a> {
        let &ClassifiedResult { run, received, policy_version, profile_version, .. } = self.result;
        EvidenceInsert { run, node: self.node, received, policy_version, profile_version, packed, case: self.case }
    }
}

/// Stores results and their documents. Returns each result's bundle, in order.
pub(super) fn store_results(tx: &mut Tx<'_>, arrivals: &[IncomingResult<'_>]) -> Result<Vec<i64>> {
    let mut ids = Vec::with_capacity(arrivals.len());
    let mut bundles = Vec::new();
    for some in split_into_packs(arrivals) {
        tx.last_pack += 1;
        ids.extend(std::iter::repeat_n(tx.last_pack, some.len()));
        let newest = some.iter().map(|one| one.result.received).max();
        let documents = some.iter().filter(|one| !one.is_standalone()).count() as u64;
        bundles.push((tx.last_pack, newest, documents, pack(some)?));
    }
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(bundles.len() * 4);
    for (id, newest, documents, body) in &bundles {
        rows.extend_from_slice(vals![*id, *newest, *documents, body.as_slice()]);
    }
    let kinds = [ColumnType::Int, ColumnType::Int, ColumnType::Int, ColumnType::Blob];
    tx.insert_many("storing documents", "evidence_pack (id, received, documents, body)", &kinds, &rows, "")?;
    store_standalone(tx, arrivals)?;
    Ok(ids)
}

fn store_standalone(tx: &mut Tx<'_>, arrivals: &[IncomingResult<'_>]) -> Result<()> {
    let mut packed = Vec::new();
    for arrival in arrivals.iter().filter(|arrival| arrival.is_standalone()) {
        let document = match arrival.standalone {
            Some(packed) => packed.clone(),
            None => Packed::new(&arrival.result.evidence)?,
        };
        packed.push((arrival, document));
    }
    let rows: Vec<EvidenceInsert<'_>> = packed.iter().map(|(arrival, packed)| arrival.evidence_row(packed)).collect();
    standalone_evidence::insert(tx, &rows)
}

/// Splits arrivals into bundles of maximal size, in order.
fn split_into_packs<'a, 'b>(arrivals: &'b [IncomingResult<'a>]) -> Vec<&'b [IncomingResult<'a>]> {
    let mut bundles = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (index, arrival) in arrivals.iter().enumerate() {
        let more = arrival.packed_size();
        if index > first && (bytes + more > MAX_BYTES || index - first == MAX_RESULTS) {
            bundles.push(&arrivals[first..index]);
            (first, bytes) = (index, 0);
        }
        bytes += more;
    }
    if first < arrivals.len() {
        bundles.push(&arrivals[first..]);
    }
    bundles
}

fn pack(arrivals: &[IncomingResult<'_>]) -> Result<Vec<u8>> {
    let refused = |why: String| StoreError::Refused { operation: "storing documents", why };
    let entries: Vec<PackEntry<'_>> = arrivals
        .iter()
        .map(|one| {
            let &ClassifiedResult { run, ref node, received, policy_version, profile_version, .. } = one.result;
            let result = DocumentHeader { run, node, received, policy_version, profile_version };
            PackEntry { result, bytes: (!one.is_standalone()).then_some(one.result.evidence.len()) }
        })
        .collect();
    let mut bytes = vec![0; LENGTH];
    serde_json::to_writer(&mut bytes, &entries).map_err(|error| refused(error.to_string()))?;
    let length = u32::try_from(bytes.len() - LENGTH).map_err(|error| refused(error.to_string()))?;
    bytes[..LENGTH].copy_from_slice(&length.to_le_bytes());
    for arrival in arrivals.iter().filter(|arrival| !arrival.is_standalone()) {
        bytes.extend_from_slice(&arrival.result.evidence);
    }
    compress(&bytes)
}

/// Size of the length prefix.
const LENGTH: usize = size_of::<u32>();

/// Splits a bundle into its list and the documents after it.
fn unpack(body: &[u8]) -> Result<(Vec<StoredDocumentEntry>, Vec<u8>)> {
    let bytes = decompress(body)?;
    let (length, rest) = bytes.split_first_chunk::<LENGTH>().ok_or_else(|| unreadable("it is empty"))?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|error| unreadable(&error.to_string()))?;
    let (list, documents) = rest.split_at_checked(length).ok_or_else(|| unreadable("its list is truncated"))?;
    let list = serde_json::from_slice(list).map_err(|error| unreadable(&error.to_string()))?;
    Ok((list, documents.to_vec()))
}

fn unreadable(why: &str) -> StoreError {
    StoreError::Unreadable { what: "bundle", why: why.to_owned() }
}

/// Returns the document of one result, if it is in the bundle that history names.
pub(super) fn find(tx: &mut Tx<'_>, run: RunId, node: i64) -> Result<Option<EvidenceRow>> {
    let Some(name) = tx.ids.node(node).ok().cloned() else { return Ok(None) };
    let sql = "SELECT b.body FROM history h JOIN evidence_pack b ON b.id = h.evidence_pack \
               WHERE h.node = $1 AND h.run = $2 LIMIT 1";
    let found = tx.first("reading evidence", sql, vals![node, run], |row| document(row.blob(0)?, run, &name))?;
    Ok(found.flatten())
}

fn document(body: &[u8], run: RunId, node: &NodeName) -> Result<Option<EvidenceRow>> {
    let (list, documents) = unpack(body)?;
    let mut first = 0;
    for StoredDocumentEntry { result, bytes } in list {
        let end = first + bytes.unwrap_or(0);
        if result.run == run && result.node == *node && bytes.is_some() {
            let bytes = documents.get(first..end).ok_or_else(|| unreadable("a document is truncated"))?.to_vec();
            let DocumentHeader { received, policy_version, profile_version, .. } = result;
            let row =
                EvidenceRow { bytes, truncated: false, received, policy_version, profile_version, pinned_by: None };
            return Ok(Some(row));
        }
        first = end;
    }
    Ok(None)
}

/// Records that a document is now stored on its own.
pub(super) fn mark_extracted(tx: &mut Tx<'_>, run: RunId, node: i64) -> Result<()> {
    let sql = "UPDATE evidence_pack SET documents = documents - 1 \
               WHERE id = (SELECT evidence_pack FROM history WHERE node = $1 AND run = $2 LIMIT 1)";
    tx.execute("pinning evidence", sql, vals![node, run]).map(drop)
}

#[cfg(test)]
mod tests {
    use doctor_core::{node::Hardware, time::Timestamp};

    use super::*;

    fn result(number: u64, evidence: Vec<u8>) -> ClassifiedResult {
        ClassifiedResult {
            run: RunId::from_number(number),
            node: NodeName::new(&format!("n{number}")).unwrap(),
            outcomes: Vec::new(),
            hardware: Hardware::default(),
            evidence,
            complete: true,
            received: Timestamp::from_secs(7),
            policy_version: 3,
            profile_version: Some(2),
        }
    }

    fn arrival(result: &ClassifiedResult) -> IncomingResult<'_> {
        IncomingResult { node: 1, result, standalone: None, case: None }
    }

    #[test]
    fn a_pack_returns_each_document_unchanged() {
        let results: Vec<_> = (0..9).map(|n| result(n, vec![u8::try_from(n).unwrap(); 100 * n as usize])).collect();
        let arrivals: Vec<_> = results.iter().map(arrival).collect();
        let body = pack(&arrivals).unwrap();
        for result in &results {
            let found = document(&body, result.run, &result.node).unwrap().unwrap();
            assert_eq!((&found.bytes, found.policy_version), (&result.evidence, 3));
        }
        assert_eq!(document(&body, results[1].run, &results[2].node).unwrap(), None);
    }

    #[test]
    fn a_pack_of_an_earlier_version_is_read() {
        let one = result(7, b"document".to_vec());
        let list = serde_json::to_vec(&[serde_json::json!({ "result": one, "bytes": 8 })]).unwrap();
        let mut bytes = u32::try_from(list.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend(list);
        bytes.extend(b"document");
        let found = document(&compress(&bytes).unwrap(), one.run, &one.node).unwrap().unwrap();
        assert_eq!((found.bytes, found.policy_version), (b"document".to_vec(), 3));
    }

    #[test]
    fn a_pack_stays_within_its_limits_for_any_input() {
        let small: Vec<_> = (0..200).map(|n| result(n, vec![1; 10])).collect();
        let sizes: Vec<_> =
            split_into_packs(&small.iter().map(arrival).collect::<Vec<_>>()).iter().map(|b| b.len()).collect();
        assert_eq!(sizes, [64, 64, 64, 8]);
        let long: Vec<_> = (0..10).map(|n| result(n, vec![1; STANDALONE_MIN_BYTES])).collect();
        let sizes: Vec<_> =
            split_into_packs(&long.iter().map(arrival).collect::<Vec<_>>()).iter().map(|b| b.len()).collect();
        assert_eq!(sizes, [4, 4, 2]);
        assert!(split_into_packs(&[]).is_empty());
        assert!(compress_standalone(&result(1, vec![1; STANDALONE_MIN_BYTES + 1])).unwrap().is_some());
    }

    #[test]
    fn a_truncated_or_foreign_pack_is_rejected() {
        let one = result(1, vec![7; 50]);
        let body = pack(&[arrival(&one)]).unwrap();
        for bytes in [&body[..body.len() / 2], b"", b"nonsense"] {
            assert!(document(bytes, one.run, &one.node).is_err());
        }
        for list in [&b""[..], &[1, 0], &[255, 255, 255, 255, 1], b"\x02\x00\x00\x00{}"] {
            let error = document(&compress(list).unwrap(), one.run, &one.node).unwrap_err();
            assert!(matches!(error, StoreError::Unreadable { .. }), "{error}");
        }
    }
}
