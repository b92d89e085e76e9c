//! What the allocator is told by a process that stays.
//!
//! Such a process works for a moment and then waits, an agent for minutes and a controller for half of one. An allocator that
//! keeps a heap for each thread, and keeps what it once had, holds twice of what is used.

/// Before any other thread is there: one heap for all.
pub fn one_heap() {
    set(Knob::Heaps, 1);
}

/// What is larger than this, in bytes, comes from the system and goes back at once.
pub fn return_from(large: i32) {
    // Setting it also keeps the allocator from raising it by what it sees.
    set(Knob::MapFrom, large);
    set(Knob::TrimFrom, large);
}

#[derive(Clone, Copy)]
enum Knob {
    Heaps,
    MapFrom,
    TrimFrom,
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of mallopt(3) exists")]
fn set(knob: Knob, value: i32) {
    let knob = match knob {
        Knob::Heaps => libc::M_ARENA_MAX,
        Knob::MapFrom => libc::M_MMAP_THRESHOLD,
        Knob::TrimFrom => libc::M_TRIM_THRESHOLD,
    };
    // SAFETY: it takes no pointer, and only changes how later calls of the allocator behave.
    let _done = unsafe { libc::mallopt(knob, value) };
}

/// Returns to the system what is free.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe binding of malloc_trim(3) exists")]
pub fn give_back() {
    // SAFETY: it takes no pointer, may be called at any time from any thread, and only releases what nobody uses.
    let _gave_any = unsafe { libc::malloc_trim(0) };
}

/// Other allocators do this by themselves.
#[cfg(not(target_env = "gnu"))]
fn set(_: Knob, _: i32) {}

#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}
