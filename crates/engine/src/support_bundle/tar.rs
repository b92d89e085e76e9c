//! A tar archive of a few files in memory, in the format that every tar reads (POSIX ustar).

use doctor_core::time::Timestamp;

use super::BundleFile;

const BLOCK: usize = 512;
/// Maximum length of a name in this format; ours are far shorter, and a longer one is truncated.
const NAME: usize = 100;

/// Archives all files below one folder.
pub(super) fn tar(folder: &str, parts: &[BundleFile], at: Timestamp) -> Vec<u8> {
    let mut archive = Vec::new();
    for part in parts {
        archive.extend(header(&format!("{folder}/{}", part.name), part.bytes.len(), at));
        archive.extend(&part.bytes);
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    // Two empty blocks mark the end.
    archive.resize(archive.len() + 2 * BLOCK, 0);
    archive
}

fn header(name: &str, size: usize, at: Timestamp) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |offset: usize, bytes: &[u8]| header[offset..offset + bytes.len()].copy_from_slice(bytes);
    let mut end = name.len().min(NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    put(0, &name.as_bytes()[..end]);
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, format!("{:011o}\0", at.secs().max(0)).as_bytes());
    // The checksum is computed with its own field filled with spaces.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    use super::*;
    use crate::gzip::gzip;

    #[test]
    fn the_archive_unpacks_with_the_system_tar() {
        let folder = tempfile::tempdir().unwrap();
        let part = |name: &str, bytes: &[u8]| BundleFile { name: name.to_owned(), bytes: bytes.to_vec() };
        let parts = [part("a.txt", b"one"), part("logs/empty", b""), part("logs/long", &[b'x'; 1500])];
        let packed = gzip(&tar("case-1", &parts, Timestamp::from_secs(1_700_000_000)));
        let mut command = Command::new("tar");
        command.args(["-xzf", "-", "-C"]).arg(folder.path()).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&packed).unwrap();
        assert!(child.wait().unwrap().success());
        for part in &parts {
            assert_eq!(std::fs::read(folder.path().join("case-1").join(&part.name)).unwrap(), part.bytes);
        }
    }
}
