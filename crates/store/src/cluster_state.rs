//! The last cluster state the leader observed, for processes that do not lead.
//!
//! It is written every few seconds and repeats nearly the same text for thousands of nodes. It is compressed to a tenth
//! of the JSON while being serialised, so the whole text is never in memory.

use std::io::{self, BufWriter, Read as _, Write as _};

use doctor_core::time::Timestamp;
use serde::Serialize;

use super::{
    Store,
    db::{Access, vals},
    error::{Result, StoreError},
    fencing::Lease,
};

/// Fast, because the control loop waits for this.
const LEVEL: i32 = 1;
/// Limit of the decompressed size. A million nodes need less, so anything larger is not ours.
const MAX_BYTES: u64 = 1 << 30;

impl Store {
    /// Replaces the saved cluster state as a whole.
    pub fn save_cluster_state(&self, lease: &Lease, at: Timestamp, state: &impl Serialize) -> Result<()> {
        let body = compress(state)
            .map_err(|why| StoreError::Refused { operation: "compressing the cluster state", why: why.to_string() })?;
        self.write(lease, |tx| {
            let sql = "INSERT INTO cluster_state (id, at, body) VALUES (1, $1, $2) \
                       ON CONFLICT (id) DO UPDATE SET at = excluded.at, body = excluded.body";
            tx.execute("writing the cluster state", sql, vals![at, body.as_slice()]).map(drop)
        })
    }

    /// Returns when a cycle last saved the cluster state.
    pub fn cluster_state_time(&self) -> Result<Option<Timestamp>> {
        let operation = "reading the time of the cluster state";
        self.transaction(Access::Read, &mut |tx| {
            tx.first(operation, "SELECT at FROM cluster_state", &[], |row| row.timestamp(0))
        })
    }

    /// Returns the last cluster state as JSON, and when it was saved.
    pub fn cluster_state(&self) -> Result<Option<(Timestamp, Vec<u8>)>> {
        let operation = "reading the cluster state";
        self.read(|tx| {
            tx.first(operation, "SELECT at, body FROM cluster_state", &[], |row| {
                let unreadable =
                    |why: io::Error| StoreError::Unreadable { what: "cluster state", why: why.to_string() };
                Ok((row.timestamp(0)?, decompress(row.blob(1)?).map_err(unreadable)?))
            })
        })
    }
}

fn compress(state: &impl Serialize) -> io::Result<Vec<u8>> {
    // Buffered, because serde_json writes a few bytes at a time.
    let mut writer = BufWriter::new(zstd::stream::write::Encoder::new(Vec::new(), LEVEL)?);
    serde_json::to_writer(&mut writer, state)?;
    writer.flush()?;
    writer.into_inner().map_err(io::IntoInnerError::into_error)?.finish()
}

fn decompress(body: &[u8]) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    zstd::stream::read::Decoder::new(body)?.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {MAX_BYTES} bytes")));
    }
    Ok(text)
}
