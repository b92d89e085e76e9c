//! Findings about a mount: event codes for rules, and lines for the log.

use std::io;

use doctor_checks::fio::{FioRun, Side};
use doctor_core::observation::FailureKind;

use super::passes::Pass;

/// Why the test of a mount ended early.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// The mount is faulty.
    Wrong(Wrong, String),
    /// The mount could not be tested.
    Unread(FailureKind, String),
}

/// Faults of a mount; each is an event for which the check has a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    Corrupt,
    IoError,
    ReadOnly,
    Stalled,
    NoSpace,
    Missing,
}

impl Wrong {
    pub(super) const fn code(self) -> &'static str {
        match self {
            Self::Corrupt => "storage-corrupt",
            Self::IoError => "storage-io-error",
            Self::ReadOnly => "storage-read-only",
            Self::Stalled => "storage-stalled",
            Self::NoSpace => "storage-no-space",
            Self::Missing => "storage-missing",
        }
    }
}

/// Maps an error of the kernel to a fault of the mount. Errors that are not the mount's say nothing about it.
pub(super) fn of_errno(errno: i32, doing: &str) -> Told {
    let text = || format!("{doing}: {}", words(errno));
    match errno {
        // fio's error for a wrong checksum.
        libc::EILSEQ => Told::Wrong(Wrong::Corrupt, format!("{doing} read back other bytes than were written")),
        libc::EROFS => Told::Wrong(Wrong::ReadOnly, text()),
        libc::ENOSPC | libc::EDQUOT => Told::Wrong(Wrong::NoSpace, text()),
        libc::ENOENT | libc::ENOTDIR => Told::Wrong(Wrong::Missing, text()),
        // A disk, a file system, or a lost server.
        libc::EIO
        | libc::EREMOTEIO
        | libc::EBADMSG
        | libc::EUCLEAN
        | libc::ENODATA
        | libc::ENXIO
        | libc::ENODEV
        | libc::ESTALE
        | libc::ETIMEDOUT
        | libc::ENOTCONN
        | libc::ESHUTDOWN
        | libc::ECONNABORTED
        | libc::EHOSTDOWN => Told::Wrong(Wrong::IoError, text()),
        libc::EACCES | libc::EPERM => Told::Unread(FailureKind::Denied, text()),
        _ => Told::Unread(FailureKind::Failed, text()),
    }
}

/// Returns the kernel's text for an error, without its number.
pub(super) fn words(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.split_once(" (os error").map_or(text.as_str(), |(words, _)| words).to_owned()
}

/// Formats a pass as one line of the log.
pub(super) fn of_pass(pass: Pass, run: &FioRun) -> String {
    match pass {
        Pass::Verify => format!("{} written, read back and identical", bytes(run.read.bytes)),
        Pass::Measure(_) => {
            let both = run.read.and(run.write);
            let sides = [("read ", run.read), ("write ", run.write)];
            let mut latencies: Vec<_> =
                sides.iter().filter_map(|(name, side)| Some((*name, of_latency(side)?))).collect();
            if let [(name, _)] = &mut latencies[..] {
                // With one direction the pattern's name shows which.
                *name = "";
            }
            let latencies: Vec<_> = latencies.into_iter().map(|(name, text)| format!("{name}{text}")).collect();
            let [rate, operations] =
                [format!("{:.3} GB/s", both.bytes_per_second / 1e9), format!("{:.0} IOPS", both.per_second)];
            format!("{rate:>11} {operations:>12}  {}", latencies.join(" | "))
        }
    }
}

fn of_latency(side: &Side) -> Option<String> {
    let latency = side.latency?;
    let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let [p50, p99, p999] = [latency.p50, latency.p99, latency.p999].map(milliseconds);
    Some(format!("p50 {p50} p99 {p99} p99.9 {p999} ms"))
}

/// Formats `1.5 GiB`.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")];
    let of = |(unit, name): (u64, &str)| {
        let whole = format!("{:.1}", count as f64 / unit as f64);
        format!("{} {name}", whole.trim_end_matches(".0"))
    };
    UNITS.into_iter().find(|(unit, _)| count >= *unit).map_or_else(|| format!("{} KiB", count >> 10), of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::Catalogue;
    use doctor_core::ids::CheckId;

    #[test]
    fn an_error_of_the_kernel_is_told_as_what_it_says_of_the_mount_and_has_a_rule() {
        let catalogue = Catalogue::built_in();
        let storage = catalogue.get(&CheckId::new("storage").unwrap()).unwrap();
        for (errno, wrong) in [
            (libc::EILSEQ, Wrong::Corrupt),
            (libc::EROFS, Wrong::ReadOnly),
            (libc::ENOSPC, Wrong::NoSpace),
            (libc::EDQUOT, Wrong::NoSpace),
            (libc::EIO, Wrong::IoError),
            (libc::ESTALE, Wrong::IoError),
            (libc::ENOENT, Wrong::Missing),
        ] {
            let Told::Wrong(told, text) = of_errno(errno, "randread: fio") else { panic!("{errno}") };
            assert_eq!(told, wrong);
            assert!(text.starts_with("randread: fio"), "{text}");
            let rule = format!("event = \"{}\"", wrong.code());
            assert!(storage.rules.contains(&rule), "{rule}");
        }
        assert!(storage.rules.contains(&format!("event = \"{}\"", Wrong::Stalled.code())));
        assert!(matches!(of_errno(libc::EACCES, "x"), Told::Unread(FailureKind::Denied, _)));
        assert!(matches!(of_errno(libc::EMFILE, "x"), Told::Unread(FailureKind::Failed, _)), "not the mount's fault");
    }

    #[test]
    fn sizes_are_written_as_people_read_them() {
        for (count, text) in [(0, "0 KiB"), (5 << 20, "5 MiB"), (3 << 29, "1.5 GiB"), (10 << 40, "10 TiB")] {
            assert_eq!(bytes(count), text);
        }
    }
}
