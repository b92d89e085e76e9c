//! Compression of the documents behind results.

use std::{
    io::Read,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::error::{Result, StoreError};

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
