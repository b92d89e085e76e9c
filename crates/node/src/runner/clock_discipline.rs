//! The synchronisation state of the kernel's clock, from adjtimex(2). Reading needs no privileges.

use std::{io, path::Path};

/// STA_UNSYNC: the clock is not synchronised.
const UNSYNCHRONISED: i32 = 64;

/// The clock's state in a recording of a machine.
pub const CLOCK_FILE: &str = "/run/cluster-doctor/adjtimex";

pub(super) fn read(root: &Path) -> io::Result<String> {
    if root != Path::new("/")
        && let Ok(recorded) = std::fs::read_to_string(root.join(CLOCK_FILE.trim_start_matches('/')))
    {
        return Ok(recorded);
    }
    let clock = read_adjtimex()?;
    let in_nanoseconds = clock.status & libc::STA_NANO != 0;
    let offset = if in_nanoseconds { clock.offset / 1000 } else { clock.offset };
    Ok(format!(
        "synchronized {}\noffset_us {offset}\nmax_error_us {}\nestimated_error_us {}\nfrequency_ppm {:.3}\n",
        u8::from(clock.status & UNSYNCHRONISED == 0),
        clock.maxerror,
        clock.esterror,
        clock.freq as f64 / 65_536.0,
    ))
}

#[expect(unsafe_code, reason = "no safe binding of adjtimex(2) exists")]
fn read_adjtimex() -> io::Result<libc::timex> {
    // SAFETY: all-zero bytes are a valid `timex`, which has only numbers; with `modes` zero the kernel changes nothing
    // and only fills it.
    let mut clock: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live `timex`.
    match unsafe { libc::adjtimex(&raw mut clock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(clock),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_its_line() {
        let text = read(Path::new("/")).unwrap();
        for name in ["synchronized", "offset_us", "max_error_us", "estimated_error_us", "frequency_ppm"] {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            assert!(line.trim().parse::<f64>().is_ok(), "{text}");
        }
    }
}
