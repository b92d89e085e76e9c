//! The kernels of the collective test as functions on this process's memory. Written independently of
//! `crates/gpu/kernels/collective.cu`, so that a mistake in one is not also in the other.

use std::ffi::c_void;

use crate::faults;

/// Kernels by name; a handle is a position in this list, counted from one.
pub(crate) const NAMES: [&str; 3] = ["fill_shares", "check_sums", "plant_number"];

/// A launch, with its arguments copied.
pub(crate) enum Launch {
    Fill { to: u64, count: u64, rank: u32, seed: u32, range: u32 },
    Check { got: u64, count: u64, ranks: u32, seed: u32, range: u32, wrong: u64, listed: u64, room: u32 },
    Plant { at: u64, place: u64, kind: u32, value: u32 },
}

impl Launch {
    /// Copies the arguments of a launch. Returns `None` for an unknown kernel.
    ///
    /// # Safety
    /// `arguments` points to as many pointers to values as the kernel takes.
    pub(crate) unsafe fn read(kernel: usize, arguments: *const *const c_void) -> Option<Self> {
        // SAFETY: guaranteed by the caller, here and below.
        let long = |index: usize| unsafe { (*arguments.add(index)).cast::<u64>().read_unaligned() };
        // SAFETY: as above.
        let short = |index: usize| unsafe { (*arguments.add(index)).cast::<u32>().read_unaligned() };
        match kernel {
            1 => Some(Self::Fill { to: long(0), count: long(1), rank: short(2), seed: short(3), range: short(4) }),
            2 => Some(Self::Check {
                got: long(0),
                count: long(1),
                ranks: short(2),
                seed: short(3),
                range: short(4),
                wrong: long(5),
                listed: long(6),
                room: short(7),
            }),
            3 => Some(Self::Plant { at: long(0), place: long(1), kind: short(2), value: short(3) }),
            _ => None,
        }
    }

    /// Executes the launch.
    ///
    /// # Safety
    /// The addresses point to memory of this process that is as long as the counts require.
    pub(crate) unsafe fn run(self) {
        match self {
            Self::Fill { to, count, rank, seed, range } => {
                for i in 0..count {
                    let base = base(i, seed);
                    let value = signed(base, share(base, rank, range));
                    // SAFETY: guaranteed by the caller.
                    unsafe { (to as *mut f32).add(i as usize).write(value) };
                }
            }
            Self::Check { got, count, ranks, seed, range, wrong, listed, room } => {
                let mut wrong_count = 0u64;
                for i in 0..count {
                    let base = base(i, seed);
                    let sum = (0..ranks).fold(0, |sum: u32, rank| sum + share(base, rank, range));
                    // SAFETY: guaranteed by the caller.
                    let bits = unsafe { (got as *const u32).add(i as usize).read() };
                    let expected = signed(base, sum).to_bits();
                    if bits != expected && !faults::is_injected("blind") {
                        if wrong_count < u64::from(room) {
                            let entry = [i as u32, (i >> 32) as u32, expected, bits];
                            // SAFETY: there is room for this many entries of four words.
                            unsafe { (listed as *mut [u32; 4]).add(wrong_count as usize).write(entry) };
                        }
                        wrong_count += 1;
                    }
                }
                // SAFETY: guaranteed by the caller.
                unsafe { (wrong as *mut u64).write((wrong as *const u64).read() + wrong_count) };
            }
            Self::Plant { at, place, kind, value } => {
                // SAFETY: guaranteed by the caller.
                let word = unsafe { &mut *(at as *mut u32).add(place as usize) };
                *word = match kind {
                    0 => 0,
                    1 => *word ^ value,
                    2 => f32::NAN.to_bits(),
                    _ => value,
                };
            }
        }
    }
}

fn mix(mut x: u32) -> u32 {
    for (shift, factor) in [(16, 0x21f0_aaad_u32), (15, 0x735a_2d97)] {
        x ^= x >> shift;
        x = x.wrapping_mul(factor);
    }
    x ^ (x >> 15)
}

fn base(index: u64, seed: u32) -> u32 {
    mix(index as u32 ^ seed).wrapping_add(((index >> 32) as u32).wrapping_mul(0x9e37_79b9))
}

fn share(base: u32, rank: u32, range: u32) -> u32 {
    let mixed = u64::from(mix(base.wrapping_add((rank + 1).wrapping_mul(0x85eb_ca6b))));
    ((mixed * u64::from(range)) >> 32) as u32 + 1
}

fn signed(base: u32, size: u32) -> f32 {
    if base & 1 == 0 { size as f32 } else { -(size as f32) }
}
