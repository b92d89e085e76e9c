//! What the allocator and the kernel are told by a process that stays.
//!
//! Such a process works for a moment and then waits, an agent for minutes and a controller for half of one. An allocator that
//! keeps a heap for each thread, and keeps what it once had, holds twice of what is used; and of the program itself most is
//! needed once. To get back what is needed again takes milliseconds, of threads that wait for disks and servers anyway.

use std::sync::OnceLock;

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

/// Where the program and its libraries lie, as far as nothing was ever written there.
static PROGRAM: OnceLock<Vec<(usize, usize)>> = OnceLock::new();

/// Before any other thread is there: where the program lies. What is mapped later is somebody else's, may go away again, and may be
/// written to while we look.
pub fn know_program() {
    PROGRAM.get_or_init(|| unwritten(&std::fs::read_to_string("/proc/self/smaps").unwrap_or_default()));
}

/// Unmaps the program's own code and constants until they are used again. They are in the kernel's page cache anyway, and most
/// of what a process has of them it needed once. Does nothing before [`know_program`].
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no safe binding of madvise(2) exists")]
pub fn unmap_program() {
    for &(begin, end) in PROGRAM.get().into_iter().flatten() {
        let address = std::ptr::with_exposed_provenance_mut(begin);
        // SAFETY: a whole mapping of the program or of a library that came with it, which stays as long as the process does. It
        // cannot be written now, and never was: what is dropped is read again from the same file.
        let _dropped = unsafe { libc::madvise(address, end - begin, libc::MADV_DONTNEED) };
    }
}

#[cfg(not(target_os = "linux"))]
pub fn unmap_program() {}

/// The mappings of programs and libraries that are as their files have them, from a process's `smaps`. What the linker has
/// written into would be lost: `Anonymous` tells what of that is in memory, and `Swap` what is not.
fn unwritten(smaps: &str) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    // While a mapping is read that may be one of them, it is the last that was found.
    let mut is_last = false;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("Anonymous:" | "Swap:"), Some(kilobytes)) if is_last && kilobytes != "0" => {
                found.pop();
                is_last = false;
            }
            (Some(range), Some(rights)) if range.contains('-') && !range.ends_with(':') => {
                // Offset, device and inode come between.
                let is_file = words.nth(3).is_some_and(|path| path.starts_with('/'));
                let range = range_of(range).filter(|_| is_file && matches!(rights, "r-xp" | "r--p"));
                is_last = range.is_some();
                found.extend(range);
            }
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
        let told = |range: &str, rights: &str, path: &str, (anonymous, swap): (u32, u32)| {
            format!(
                "{range} {rights} 00000000 fd:01 5 {path}\nSize: 8 kB\nAnonymous: {anonymous} kB\nSwap: {swap} kB\n\
                 SwapPss: 0 kB\nVmFlags: rd mr\n"
            )
        };
        let smaps = [
            told("555555554000-555555556000", "r--p", "/usr/bin/doctor-node", (0, 0)),
            told("555555556000-55555555a000", "r-xp", "/usr/bin/doctor-node", (0, 0)),
            told("55555555a000-55555555c000", "r--p", "/usr/bin/doctor-node", (8, 0)),
            told("55555555c000-55555555d000", "rw-p", "/usr/bin/doctor-node", (0, 0)),
            told("7ffff7fc0000-7ffff7fc1000", "r--p", "/lib/relocated-and-swapped-out.so", (0, 4)),
            told("7ffff7fc5000-7ffff7fc7000", "r-xp", "[vdso]", (0, 0)),
            told("7ffff7fc9000-7ffff7fca000", "rwxp", "/lib/x.so", (0, 0)),
            told("7ffff7fd0000-7ffff7fd1000", "r-xp", "", (0, 0)),
        ];
        let expected = [(0x5555_5555_4000, 0x5555_5555_6000), (0x5555_5555_6000, 0x5555_5555_a000)];
        assert_eq!(unwritten(&smaps.concat()), expected);
    }

    /// How much of the program is in this process, in kilobytes.
    fn mapped() -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut all, mut ours) = (0, false);
        for line in smaps.lines() {
            let mut words = line.split_ascii_whitespace();
            match (words.next(), words.next()) {
                (Some("Rss:"), Some(kilobytes)) if ours => all += kilobytes.parse::<u64>().unwrap(),
                (Some(range), _) if range_of(range).is_some() => {
                    ours = range_of(range).is_some_and(|range| PROGRAM.get().unwrap().contains(&range));
                }
                _ => {}
            }
        }
        all
    }

    #[test]
    fn the_program_runs_on_after_its_code_was_given_up() {
        let words = std::hint::black_box("as its file has it").to_owned();
        know_program();
        // Other tests run beside this one, and take back what they need.
        let less = (0..100).any(|_| {
            let before = mapped();
            unmap_program();
            mapped() < before
        });
        assert!(less, "nothing was given up");
        assert_eq!((1..=10).sum::<u32>(), 55);
        assert_eq!(words, "as its file has it");
    }
}
