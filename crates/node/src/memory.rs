//! What an agent keeps in memory while it waits.
//!
//! A look at a node with a long kernel log takes some megabytes for a moment; an agent's allocator would keep them for the
//! next one, which is minutes away, on every node of a cluster. And a look has one thread that works and one that waits: a
//! heap for each would only be grown twice.

use std::sync::atomic::{AtomicBool, Ordering};

pub use doctor_host::memory::one_heap;
pub(crate) use doctor_host::memory::{give_back, unmap_program as rest};

/// For a process that stays, before it has other threads.
pub(crate) fn be_frugal() {
    doctor_host::memory::know_program();
    doctor_host::memory::return_from(64 << 10);
}

/// Whether a look has been taken that is still to be sent.
static LOOKED: AtomicBool = AtomicBool::new(false);

/// A look was taken and has something to say: it has brought much of the program into memory.
pub(crate) fn looked() {
    LOOKED.store(true, Ordering::Relaxed);
}

/// After what a look had to say was sent: once for both.
pub(crate) fn rest_after_a_look() {
    if LOOKED.swap(false, Ordering::Relaxed) {
        rest();
    }
}
