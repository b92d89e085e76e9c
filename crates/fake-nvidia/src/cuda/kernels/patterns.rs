//! The memory test: patterns over all of the memory, and the comparison of every word.

use super::{Arguments, KernelError};
use crate::cuda::{
    contents::{
        Content,
        pattern::{Pattern, PatternKind},
    },
    device::Device,
    memory::{Memory, Piece, Stretch},
};

pub(crate) fn fill(device: &Device, kind: PatternKind, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, pairs, seed] = arguments.take()?;
    // The position in a pattern is the address.
    device.memory().put(address, pairs * 16, Content::Pattern(Pattern { kind, seed }), 0)?;
    device.spend((pairs * 16) as f64 / device.model.rates.memory);
    Ok(())
}

pub(crate) fn verify(device: &Device, kind: PatternKind, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, pairs, seed, count, list, room] = arguments.take()?;
    let expected = Pattern { kind, seed };
    let mut memory = device.memory();
    let stretch = memory.stretch(address, pairs * 16)?;
    let mut found = WrongWords { listed: Vec::new(), count: 0, room };
    for piece in &stretch.pieces {
        compare(piece, expected, &stretch, &mut found);
    }
    let mut changed: Vec<u64> = stretch.changed.iter().map(|(address, _)| address & !7).collect();
    changed.dedup();
    for address in changed {
        found.compare(address, expected, memory.read_u64(address)?);
    }
    report(&mut memory, count, list, &found)?;
    drop(memory);
    device.spend((pairs * 16) as f64 / device.model.rates.memory);
    Ok(())
}

/// Compares the words of a piece that no change concerns.
fn compare(piece: &Piece, expected: Pattern, stretch: &Stretch, found: &mut WrongWords) {
    // The same function of the same positions: every word is right.
    if matches!(piece.content, Content::Pattern(pattern) if pattern == expected && piece.origin == 0) {
        return;
    }
    let is_changed = |address: u64| stretch.changed.binary_search_by_key(&address, |(at, _)| *at).is_ok();
    for address in (piece.start..piece.end).step_by(8) {
        let got = u64::from(piece.word(address)) | u64::from(piece.word(address + 4)) << 32;
        if got != expected.word_at(address) && !is_changed(address) && !is_changed(address + 4) {
            found.compare(address, expected, got);
        }
    }
}

struct WrongWords {
    /// Address, expected and found word.
    listed: Vec<[u64; 3]>,
    count: u64,
    room: u64,
}

impl WrongWords {
    fn compare(&mut self, address: u64, pattern: Pattern, got: u64) {
        let expected = pattern.word_at(address);
        if got != expected {
            self.count += 1;
            if self.count <= self.room {
                self.listed.push([address, expected, got]);
            }
        }
    }
}

/// Adds wrong words to those of earlier launches.
fn report(memory: &mut Memory, count: u64, list: u64, found: &WrongWords) -> Result<(), KernelError> {
    if found.count == 0 {
        return Ok(());
    }
    let before = memory.read_u64(count)?;
    let room = found.room.saturating_sub(before) as usize;
    let words = found.listed.iter().take(room).flatten().flat_map(|word| [*word as u32, (word >> 32) as u32]);
    memory.write(list + before * 24, words.collect())?;
    Ok(memory.write_u64(count, before + found.count)?)
}

pub(crate) fn plant_words(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, places, kinds, values, count] = arguments.take()?;
    let mut memory = device.memory();
    for i in 0..count {
        let at = address + memory.read_u64(places + i * 8)? * 8;
        let (kind, value, was) = (memory.word(kinds + i * 4)?, memory.read_u64(values + i * 8)?, memory.read_u64(at)?);
        let now = match kind {
            0 => 0,
            1 => was ^ (1 << (value % 64)),
            2 => (was >> 32 << 32) | u64::from(f32::NAN.to_bits()),
            _ => value,
        };
        memory.set_word(at, now as u32)?;
        memory.set_word(at + 4, (now >> 32) as u32)?;
    }
    Ok(())
}
