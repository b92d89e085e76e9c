//! What the allocator is told in a process that stays.
//!
//! A controller reads a cluster's nodes and pods in pages, throws most of each page away, and then waits. An allocator that keeps a
//! heap for each thread, and keeps what it once had, holds twice of what is used. One that returns it costs nothing here: the
//! threads wait for servers and not for memory.

/// What is larger than this comes from the system and goes back at once.
#[cfg(target_env = "gnu")]
const LARGE: i32 = 128 << 10;

/// Before any other thread is there.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of mallopt(3) exists")]
pub(crate) fn be_frugal() {
    for (knob, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LARGE)] {
        // SAFETY: it takes no pointer, and only changes how later calls of the allocator behave.
        let _done = unsafe { libc::mallopt(knob, value) };
    }
}

/// Other allocators do this by themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn be_frugal() {}
