//! What an agent and its helper keep in memory while they wait.
//!
//! A look at a node with a long kernel log takes some megabytes for a moment; an agent's allocator would keep them for the
//! next one, which is minutes away, on every node of a cluster. And a look has one thread that works and one that waits: a
//! heap for each would only be grown twice.

pub(crate) use doctor_host::memory::give_back;
pub use doctor_host::memory::one_heap;

/// For a process that stays, before it has other threads.
pub(crate) fn be_frugal() {
    doctor_host::memory::return_from(64 << 10);
}
