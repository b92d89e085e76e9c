//! Allocator settings for long-running processes.
//!
//! Such a process works for a moment and then sleeps, an agent for minutes and a controller for half a minute. With one
//! heap per thread and memory that is never returned, it would hold twice what it uses.

/// Uses one heap for all threads. Call it before the first thread is started.
pub fn use_one_arena() {
    set(MallocOption::ArenaMax, 1);
}

/// Allocates blocks of this size in bytes and above with mmap, and returns them to the system when they are freed.
pub fn set_mmap_threshold(large: i32) {
    // An explicit value also disables glibc's dynamic threshold.
    set(MallocOption::MmapThreshold, large);
    set(MallocOption::TrimThreshold, large);
}

#[derive(Clone, Copy)]
enum MallocOption {
    ArenaMax,
    MmapThreshold,
    TrimThreshold,
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of mallopt(3) exists")]
fn set(knob: MallocOption, value: i32) {
    let knob = match knob {
        MallocOption::ArenaMax => libc::M_ARENA_MAX,
        MallocOption::MmapThreshold => libc::M_MMAP_THRESHOLD,
        MallocOption::TrimThreshold => libc::M_TRIM_THRESHOLD,
    };
    // SAFETY: mallopt takes no pointer and only changes how later allocator calls behave.
    let _done = unsafe { libc::mallopt(knob, value) };
}

/// Returns free memory to the system.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of malloc_trim(3) exists")]
pub fn give_back() {
    // SAFETY: malloc_trim takes no pointer, may be called at any time from any thread, and releases only free memory.
    let _gave_any = unsafe { libc::malloc_trim(0) };
}

/// Other allocators need no settings.
#[cfg(not(target_env = "gnu"))]
fn set(_: MallocOption, _: i32) {}

#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}
