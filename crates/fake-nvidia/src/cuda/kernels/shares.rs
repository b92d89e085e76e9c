//! The kernels of the collective test: shares, the comparison of sums, and planted errors.

use std::sync::Arc;

use super::{Arguments, KernelError};
use crate::{
    cuda::{
        contents::{Content, sum::Sum},
        device::Device,
        memory::Memory,
    },
    faults,
};

/// Messages up to this many numbers are real numbers that ranks really add; longer ones are kept as functions.
const MOST_REAL: u64 = 1 << 16;

pub(crate) fn fill_shares(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, count, rank, seed, range] = arguments.take()?;
    let share = Sum { ranks: vec![rank as u32], seed: seed as u32, range: range as u32 };
    let mut memory = device.memory();
    if count <= MOST_REAL {
        memory.write(address, (0..count).map(|index| share.value(index).to_bits()).collect())?;
    } else {
        memory.put(address, count * 4, Content::Sum(Arc::new(share)), address)?;
    }
    Ok(())
}

/// A number that is not the expected sum: its place, in two words, and the bits.
type WrongSum = [u32; 4];

pub(crate) fn check_sums(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, count, ranks, seed, range, total, list, room] = arguments.take()?;
    let mut memory = device.memory();
    let wrong = if faults::is_injected("blind") {
        Vec::new()
    } else {
        wrong_sums(&memory, address, count, &Sum::of_all(ranks as u32, seed as u32, range as u32))?
    };
    if wrong.is_empty() {
        return Ok(());
    }
    memory.write(list, wrong.iter().take(room as usize).flatten().copied().collect())?;
    let before = memory.read_u64(total)?;
    Ok(memory.write_u64(total, before + wrong.len() as u64)?)
}

fn wrong_sums(memory: &Memory, address: u64, count: u64, expected: &Sum) -> Result<Vec<WrongSum>, KernelError> {
    let stretch = memory.stretch(address, count * 4)?;
    let mut wrong = Vec::new();
    let mut compare = |at: u64, got: u32| {
        let index = (at - address) / 4;
        let expected = expected.value(index).to_bits();
        if got != expected {
            wrong.push([index as u32, (index >> 32) as u32, expected, got]);
        }
    };
    for piece in &stretch.pieces {
        // The same function of the same positions: every number is right.
        let is_right = matches!(&piece.content, Content::Sum(sum) if **sum == *expected && piece.origin == address);
        let is_changed = |at: u64| stretch.changed.binary_search_by_key(&at, |(changed, _)| *changed).is_ok();
        if !is_right {
            let addresses = (piece.start..piece.end).step_by(4).filter(|at| !is_changed(*at));
            addresses.for_each(|at| compare(at, piece.word(at)));
        }
    }
    stretch.changed.iter().for_each(|(at, got)| compare(*at, *got));
    Ok(wrong)
}

pub(crate) fn plant_number(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, place, kind, value] = arguments.take()?;
    let mut memory = device.memory();
    let (at, value) = (address + place * 4, value as u32);
    let was = memory.word(at)?;
    let now = match kind {
        0 => 0,
        1 => was ^ value,
        2 => f32::NAN.to_bits(),
        _ => value,
    };
    Ok(memory.set_word(at, now)?)
}
