//! The outputs of a layer, which every replica has.

use std::sync::OnceLock;

#[derive(Debug)]
pub(crate) struct LayerOutput {
    /// The bits of one replica's numbers.
    numbers: Vec<u32>,
    fingerprint: OnceLock<u64>,
}

impl LayerOutput {
    pub(crate) fn new(numbers: Vec<u32>) -> Self {
        Self { numbers, fingerprint: OnceLock::new() }
    }

    /// Returns how many numbers a replica has.
    pub(crate) fn count(&self) -> u64 {
        self.numbers.len() as u64
    }

    pub(crate) fn word(&self, position: u64) -> u32 {
        self.numbers[(position % self.count()) as usize]
    }

    /// Reads consecutive words.
    pub(super) fn read(&self, position: u64, mut to: &mut [u32]) {
        let mut from = &self.numbers[(position % self.count()) as usize..];
        while !to.is_empty() {
            let (now, later) = to.split_at_mut(from.len().min(to.len()));
            now.copy_from_slice(&from[..now.len()]);
            (to, from) = (later, &self.numbers);
        }
    }

    /// Returns the fingerprint of a replica.
    pub(crate) fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| {
            self.numbers.iter().zip(0..).fold(0, |sum, (bits, place)| sum.wrapping_add(fingerprint_term(place, *bits)))
        })
    }
}

/// Returns the part of one number in its replica's fingerprint, which is the sum of all.
pub(crate) const fn fingerprint_term(place: u32, bits: u32) -> u64 {
    const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;
    let x = ((place as u64) << 32) | bits as u64;
    let x = (x ^ (x >> 32)).wrapping_mul(FACTOR);
    let x = (x ^ (x >> 32)).wrapping_mul(FACTOR);
    x ^ (x >> 32)
}
