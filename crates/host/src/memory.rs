//! What the allocator and the kernel are told by a process that stays.
//!
//! Such a process works for a moment and then waits, an agent for minutes and a controller for half of one. An allocator that
//! keeps a heap for each thread, and keeps what it once had, holds twice of what is used; and of the program itself most is
//! needed once. Neither costs anything to return: the threads wait for disks and servers, not for memory.

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

/// Unmaps the program's own code and constants until they are used again. They are in the kernel's page cache anyway, and most
/// of what a process has of them it needed once.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no safe binding of madvise(2) exists")]
pub fn rest() {
    for (begin, end) in unwritten(&std::fs::read_to_string("/proc/self/smaps").unwrap_or_default()) {
        let address = std::ptr::with_exposed_provenance_mut(begin);
        // SAFETY: a whole mapping of a program or library, which this process cannot write and has never written: what is
        // dropped is read again from the same file, which cannot be written while it runs.
        let _dropped = unsafe { libc::madvise(address, end - begin, libc::MADV_DONTNEED) };
    }
}

#[cfg(not(target_os = "linux"))]
pub fn rest() {}

/// The mappings of programs and libraries that are as their files have them, from a process's `smaps`. What the linker has
/// written into (`Anonymous` tells) would be lost.
fn unwritten(smaps: &str) -> Vec<(usize, usize)> {
    let (mut found, mut mapping) = (Vec::new(), None);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("Anonymous:"), Some(kilobytes)) => found.extend(mapping.take().filter(|_| kilobytes == "0")),
            // Offset, device and inode come between.
            (Some(range), Some("r-xp" | "r--p")) if words.nth(3).is_some_and(|path| path.starts_with('/')) => {
                mapping = range_of(range);
            }
            (Some(range), Some(_)) if range.contains('-') => mapping = None,
            _ => {}
        }
    }
    found
}

fn range_of(text: &str) -> Option<(usize, usize)> {
    let (begin, end) = text.split_once('-')?;
    let (begin, end) = (usize::from_str_radix(begin, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    (begin < end).then_some((begin, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_as_its_file_has_it_is_given_up() {
        let told = |range: &str, rights: &str, path: &str, anonymous: u32| {
            format!("{range} {rights} 00000000 fd:01 5 {path}\nSize: 8 kB\nAnonymous: {anonymous} kB\nVmFlags: rd mr\n")
        };
        let smaps = [
            told("555555554000-555555556000", "r--p", "/usr/bin/doctor-node", 0),
            told("555555556000-55555555a000", "r-xp", "/usr/bin/doctor-node", 0),
            told("55555555a000-55555555c000", "r--p", "/usr/bin/doctor-node", 8),
            told("55555555c000-55555555d000", "rw-p", "/usr/bin/doctor-node", 0),
            told("7ffff7fc5000-7ffff7fc7000", "r-xp", "[vdso]", 0),
            told("7ffff7fc9000-7ffff7fca000", "rwxp", "/lib/x.so", 0),
            told("7ffff7fd0000-7ffff7fd1000", "r-xp", "", 0),
        ];
        let expected = [(0x5555_5555_4000, 0x5555_5555_6000), (0x5555_5555_6000, 0x5555_5555_a000)];
        assert_eq!(unwritten(&smaps.concat()), expected);
    }

    #[test]
    fn the_program_runs_on_after_its_code_was_given_up() {
        let words = std::hint::black_box("as its file has it").to_owned();
        rest();
        assert_eq!((1..=10).sum::<u32>(), 55);
        assert_eq!(words, "as its file has it");
        assert!(!unwritten(&std::fs::read_to_string("/proc/self/smaps").unwrap()).is_empty());
    }
}
