//! Allocator settings that keep the idle agent and its helper small.
//!
//! A check cycle on a node with a long kernel log needs some megabytes for a moment. The allocator would keep them
//! until the next cycle, minutes later, on every node of a cluster. A cycle has one working and one waiting thread: a
//! heap for each would only be grown twice.

pub(crate) use doctor_host::heap::give_back;
pub use doctor_host::heap::use_one_arena;

/// Sets the allocator up for a long-running process. Call it before other threads start.
pub(crate) fn limit_memory() {
    doctor_host::heap::set_mmap_threshold(64 << 10);
}
