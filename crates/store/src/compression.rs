//! Compression of result documents.

use std::{
    io::Read,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::error::{Result, StoreError};

/// Maximum compressed size of a stored document.
const CAP: usize = 1 << 20;
/// Fast, because a result waits for this.
const LEVEL: i32 = 1;
/// Maximum size before compression; no document of ours is larger.
const MAX_DOCUMENT_BYTES: usize = 64 << 20;

/// A compressed document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packed {
    pub(super) bytes: Vec<u8>,
    pub(super) truncated: bool,
}

impl Packed {
    pub(super) fn new(document: &[u8]) -> Result<Self> {
        let mut length = document.len().min(MAX_DOCUMENT_BYTES);
        loop {
            let bytes = compress(&document[..length])?;
            if bytes.len() <= CAP {
                return Ok(Self { bytes, truncated: length < document.len() });
            }
            // Incompressible data shrinks in proportion: cut accordingly, and slightly more so that the loop ends.
            length = length / 16 * (CAP * 15 / bytes.len()).clamp(1, 15);
        }
    }
}

/// Idle compressors, reused last in, first out. Creating one costs more than compressing a usual document, and so does
/// using one whose tables have left the CPU cache. Taking the last used one lets many threads share about as many as
/// there are CPUs.
static IDLE: Mutex<Vec<zstd::bulk::Compressor<'static>>> = Mutex::new(Vec::new());
/// Idle compressors kept. More exist only while more threads compress concurrently.
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
    let most = u64::try_from(MAX_DOCUMENT_BYTES).unwrap_or(u64::MAX);
    zstd::stream::read::Decoder::new(packed)
        .and_then(|decoder| decoder.take(most).read_to_end(&mut document))
        .map_err(fail)?;
    Ok(document)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incompressible_document_is_truncated_to_the_cap_and_marked() {
        let mut state = 1_u64;
        let noise: Vec<u8> = (0..3 << 20)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let packed = Packed::new(&noise).unwrap();
        assert!(packed.truncated && packed.bytes.len() <= CAP);
        assert!(packed.bytes.len() > CAP / 2, "more was dropped than needed: {}", packed.bytes.len());
        let back = decompress(&packed.bytes).unwrap();
        assert!(noise.starts_with(&back));
    }

    #[test]
    fn an_ordinary_document_is_not_truncated() {
        let document = b"{\"run\":\"r0\"}".repeat(100);
        let packed = Packed::new(&document).unwrap();
        assert!(!packed.truncated && packed.bytes.len() < document.len() / 10);
        assert_eq!(decompress(&packed.bytes).unwrap(), document);
    }
}
