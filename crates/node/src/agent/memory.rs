//! Giving memory back. A look at a node with a long kernel log takes some megabytes for a moment; the allocator would keep
//! them for the next one, which is minutes away, on every node of a cluster.

/// Before any other thread is there: one heap for all, and what is large comes from the system and goes back at once.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of mallopt(3) exists")]
pub(super) fn be_frugal() {
    // Setting it also keeps the allocator from raising it by what it sees.
    const LARGE: i32 = 64 << 10;
    for (what, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LARGE)] {
        // SAFETY: it takes no pointer, and only changes how later calls of the allocator behave.
        let _done = unsafe { libc::mallopt(what, value) };
    }
}

/// Returns to the system what is free.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of malloc_trim(3) exists")]
pub(super) fn give_back() {
    // SAFETY: it takes no pointer, may be called at any time from any thread, and only releases what nobody uses.
    let _gave_any = unsafe { libc::malloc_trim(0) };
}

/// Other allocators do this by themselves.
#[cfg(not(target_env = "gnu"))]
pub(super) const fn be_frugal() {}

#[cfg(not(target_env = "gnu"))]
pub(super) const fn give_back() {}
