//! Gzip encoding of a response, computed once for all clients that accept it.

use miniz_oxide::deflate::compress_to_vec;

/// Higher levels take much longer and save about one percent.
const LEVEL: u8 = 6;

/// Encodes as RFC 1952: a header without name or time, the deflated bytes, their checksum and length.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut compressed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    compressed.extend(compress_to_vec(bytes, LEVEL));
    compressed.extend(checksum(bytes).to_le_bytes());
    #[expect(clippy::cast_possible_truncation, reason = "the format keeps the lowest 32 bits")]
    compressed.extend((bytes.len() as u32).to_le_bytes());
    compressed
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
}
