//! Gzip encoding of a response, computed once for all clients that accept it, and its decoding for the others.

use miniz_oxide::{
    DataFormat, MZFlush,
    deflate::compress_to_vec,
    inflate::stream::{InflateState, inflate},
};

/// Higher levels take much longer and save about one percent.
const LEVEL: u8 = 6;

/// No name and no time.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];

/// Encodes as RFC 1952: a header without name or time, the deflated bytes, their checksum and length.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut compressed = HEADER.to_vec();
    compressed.extend(compress_to_vec(bytes, LEVEL));
    compressed.extend(checksum(bytes).to_le_bytes());
    #[expect(clippy::cast_possible_truncation, reason = "the format keeps the lowest 32 bits")]
    compressed.extend((bytes.len() as u32).to_le_bytes());
    compressed
}

/// Decodes the output of [`gzip`] piece by piece, so that no reader needs memory for the whole.
pub struct Gunzip<B> {
    compressed: B,
    /// Bytes of `compressed` that were consumed.
    consumed: usize,
    state: Box<InflateState>,
}

impl<B: AsRef<[u8]>> Gunzip<B> {
    pub fn new(compressed: B) -> Self {
        Self { compressed, consumed: HEADER.len(), state: InflateState::new_boxed(DataFormat::Raw) }
    }

    /// Returns the next bytes, at most this many. Empty: there are no more, or the input is not from [`gzip`].
    pub fn next_piece(&mut self, max_length: usize) -> Vec<u8> {
        let mut piece = vec![0; max_length];
        let mut filled = 0;
        while filled < max_length {
            let rest = self.compressed.as_ref().get(self.consumed..).unwrap_or_default();
            let progress = inflate(&mut self.state, rest, &mut piece[filled..], MZFlush::None);
            self.consumed += progress.bytes_consumed;
            filled += progress.bytes_written;
            if progress.status.is_err() || progress.bytes_consumed + progress.bytes_written == 0 {
                break;
            }
        }
        piece.truncate(filled);
        piece
    }
}

impl<B> std::fmt::Debug for Gunzip<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gunzip").field("consumed", &self.consumed).finish_non_exhaustive()
    }
}

/// CRC-32 with the reversed polynomial 0xEDB88320.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut n = 0;
    while n < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "n is below 256")]
        let mut value = n as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { 0xEDB8_8320 ^ (value >> 1) } else { value >> 1 };
            bit += 1;
        }
        table[n] = value;
        n += 1;
    }
    table
};

fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| TABLE[usize::from(sum.to_le_bytes()[0] ^ byte)] ^ (sum >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32_and_the_bytes_round_trip() {
        assert_eq!(checksum(b"123456789"), 0xCBF4_3926);
        let text = b"node0001,".repeat(1000);
        let compressed = gzip(&text);
        assert!(compressed.len() < text.len() / 20 && compressed.starts_with(&[0x1f, 0x8b, 8]));
        let decompressed = miniz_oxide::inflate::decompress_to_vec(&compressed[10..compressed.len() - 8]).unwrap();
        assert_eq!(decompressed, text);
    }

    #[test]
    fn a_compressed_text_is_read_in_pieces() {
        let text: Vec<u8> = (0..50_000_u32).flat_map(|number| number.to_string().into_bytes()).collect();
        let mut reader = Gunzip::new(gzip(&text));
        let (mut read, mut lengths) = (Vec::new(), Vec::new());
        loop {
            let piece = reader.next_piece(64 << 10);
            if piece.is_empty() {
                break;
            }
            lengths.push(piece.len());
            read.extend(piece);
        }
        assert_eq!(read, text);
        assert!(lengths[..lengths.len() - 1].iter().all(|length| *length == 64 << 10), "{lengths:?}");
        assert!(Gunzip::new(b"not gzip").next_piece(10).is_empty());
        assert!(Gunzip::new([0xff; 40]).next_piece(10).is_empty());
    }
}
