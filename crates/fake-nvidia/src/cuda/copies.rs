//! Copies between host and GPU, within a GPU and between GPUs.

use std::ptr;

use super::{
    contents::{Content, pattern::Pattern},
    device::Device,
    gpu_model::CopyKind,
    memory::{BadAddress, Memory, Stretch},
};

/// Shorter copies of the host are kept as they are.
const LARGE: usize = 1 << 20;

/// Copies from the host.
///
/// # Safety
/// `from` points to this many readable bytes.
pub(crate) unsafe fn to_device(device: &Device, to: u64, from: *const u8, bytes: usize) -> Result<(), BadAddress> {
    let mut memory = device.memory();
    // SAFETY: guaranteed by the caller; memory of 8 bytes' alignment that is only read.
    let pattern = (bytes >= LARGE && bytes.is_multiple_of(8) && from.align_offset(8) == 0)
        .then(|| Pattern::recognize(to, unsafe { std::slice::from_raw_parts(from.cast::<u64>(), bytes / 8) }))
        .flatten();
    match pattern {
        Some(pattern) => memory.put(to, bytes as u64, Content::Pattern(pattern), 0)?,
        None => {
            let mut words = vec![0u32; bytes / 4];
            // SAFETY: guaranteed by the caller; the words have as many bytes, rounded down.
            unsafe { ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast(), words.len() * 4) };
            memory.write(to, words)?;
        }
    }
    spoil(device, &mut memory, CopyKind::ToDevice, to, bytes as u64)?;
    drop(memory);
    device.spend(bytes as f64 / device.model.rates.h2d);
    Ok(())
}

/// Copies to the host.
///
/// # Safety
/// `to` points to this many writable bytes.
pub(crate) unsafe fn to_host(device: &Device, to: *mut u8, from: u64, bytes: usize) -> Result<(), BadAddress> {
    let memory = device.memory();
    if to.align_offset(4) == 0 {
        // SAFETY: guaranteed by the caller.
        memory.read_into(from, unsafe { std::slice::from_raw_parts_mut(to.cast::<u32>(), bytes / 4) })?;
    } else {
        let words = memory.read(from, bytes as u64 / 4)?;
        // SAFETY: as above; the words have as many bytes, rounded down.
        unsafe { ptr::copy_nonoverlapping(words.as_ptr().cast(), to, words.len() * 4) };
    }
    drop(memory);
    if let Some(fault) = wrong_word(device, CopyKind::ToHost, bytes as u64) {
        // SAFETY: the word is within the copy.
        unsafe {
            let word = to.add(fault.0 as usize).cast::<u32>();
            word.write_unaligned(word.read_unaligned().wrapping_add(fault.1));
        }
    }
    device.spend(bytes as f64 / device.model.rates.d2h);
    Ok(())
}

pub(crate) fn on_device(device: &Device, to: u64, from: u64, bytes: u64) -> Result<(), BadAddress> {
    let mut memory = device.memory();
    let stretch = memory.stretch(from, bytes)?;
    memory.put_stretch(to, &stretch)?;
    spoil(device, &mut memory, CopyKind::OnDevice, to, bytes)?;
    drop(memory);
    // Every byte is read and written.
    device.spend(2.0 * bytes as f64 / device.model.rates.d2d);
    Ok(())
}

/// Copies from one GPU to another. The time is that of `device`, which was asked for it.
pub(crate) fn to_peer(
    device: &Device,
    (far, to): (&Device, u64),
    (near, from): (&Device, u64),
    bytes: u64,
) -> Result<(), BadAddress> {
    let stretch: Stretch = near.memory().stretch(from, bytes)?;
    let mut memory = far.memory();
    memory.put_stretch(to, &stretch)?;
    spoil(device, &mut memory, CopyKind::ToPeer, to, bytes)?;
    drop(memory);
    device.spend(bytes as f64 / device.model.rates.p2p);
    Ok(())
}

/// Returns the offset of the word that arrives wrong, and what is added to it: a copy there and back does not cancel it. Short
/// copies are parameters, not data.
fn wrong_word(device: &Device, kind: CopyKind, bytes: u64) -> Option<(u64, u32)> {
    let fault = device.model.faults.copy.filter(|fault| fault.kind == kind)?;
    (bytes >= LARGE as u64 && fault.offset < bytes).then(|| (fault.offset, 1 << fault.bit))
}

fn spoil(device: &Device, memory: &mut Memory, kind: CopyKind, to: u64, bytes: u64) -> Result<(), BadAddress> {
    match wrong_word(device, kind, bytes) {
        Some((offset, added)) => memory.set_word(to + offset, memory.word(to + offset)?.wrapping_add(added)),
        None => Ok(()),
    }
}
