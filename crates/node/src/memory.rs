//! What the allocator and the kernel are told.
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

/// Unmaps the program's own code until it runs again. An agent waits for minutes after each look, and the code of its
/// checks, most of what it has in memory, is in the kernel's page cache anyway.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no safe binding of madvise(2) exists")]
pub(crate) fn rest() {
    for (begin, end) in code(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default()) {
        let address = std::ptr::with_exposed_provenance_mut(begin);
        // SAFETY: a whole mapping of a file that is executable and was never written: what is dropped is read again from
        // the same file, which cannot be written while it runs.
        let _dropped = unsafe { libc::madvise(address, end - begin, libc::MADV_DONTNEED) };
    }
}

/// The mappings of programs and libraries that hold code and nothing else, from a process's `maps`.
fn code(maps: &str) -> impl Iterator<Item = (usize, usize)> + '_ {
    maps.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next()?, words.next()?);
        // Offset, device and inode come between.
        let path = words.nth(3)?;
        let (begin, end) = range.split_once('-')?;
        let (begin, end) = (usize::from_str_radix(begin, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
        (rights == "r-xp" && path.starts_with('/') && begin < end).then_some((begin, end))
    })
}

/// Other allocators do this by themselves.
#[cfg(not(target_env = "gnu"))]
fn set(_: Knob, _: i32) {}

#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_back() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_given_up() {
        let maps = "555555554000-555555556000 r--p 00000000 fd:01 5 /usr/bin/doctor-node\n\
                    555555556000-55555555a000 r-xp 00002000 fd:01 5 /usr/bin/doctor-node\n\
                    55555555a000-55555555c000 r--p 00006000 fd:01 5 /usr/bin/doctor-node\n\
                    55555555c000-55555555d000 rw-p 00008000 fd:01 5 /usr/bin/doctor-node\n\
                    7ffff7fc5000-7ffff7fc7000 r-xp 00000000 00:00 0 [vdso]\n\
                    7ffff7fc9000-7ffff7fca000 rwxp 00000000 fd:01 9 /lib/x.so\n\
                    7ffff7fd0000-7ffff7fd1000 r-xp 00000000 00:00 0\n";
        assert_eq!(code(maps).collect::<Vec<_>>(), [(0x5555_5555_6000, 0x5555_5555_a000)]);
    }

    #[test]
    fn the_program_runs_on_after_its_code_was_given_up() {
        rest();
        assert_eq!((1..=10).sum::<u32>(), 55);
    }
}
