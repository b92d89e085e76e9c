//! What the allocator is told.
//!
//! A look at a node with a long kernel log takes some megabytes for a moment; an agent's allocator would keep them for the
//! next one, which is minutes away, on every node of a cluster. And a look has one thread that works and one that waits: a
//! heap for each would only be grown twice.

/// Before any other thread is there: one heap for all.
pub fn one_heap() {
    set(Knob::Heaps, 1);
}

/// For a process that stays: what is large comes from the system and goes back at once.
pub(crate) fn be_frugal() {
    // Setting it also keeps the allocator from raising it by what it sees.
    const LARGE: i32 = 64 << 10;
    set(Knob::MapFrom, LARGE);
    set(Knob::TrimFrom, LARGE);
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
pub(crate) fn give_back() {
    // SAFETY: it takes no pointer, may be called at any time from any thread, and only releases what nobody uses.
    let _gave_any = unsafe { libc::malloc_trim(0) };
}

/// Other allocators do this by themselves.
#[cfg(not(target_env = "gnu"))]
fn set(_: Knob, _: i32) {}

#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_back() {}
