//! Findings about a mount: event codes for rules, and lines for the log.

use std::io;

use doctor_checks::fio::{FioDirection, FioRun};
use doctor_core::observation::FailureKind;

use super::passes::Pass;

/// Why the test of a mount ended early.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MountFailure {
    /// The mount is faulty.
    Fault(MountFault, String),
    /// The mount could not be tested.
    NoResult(FailureKind, String),
}

/// Faults of a mount; each is an event for which the check has a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountFault {
    Corrupt,
    IoError,
    ReadOnly,
    Stalled,
    NoSpace,
    Missing,
}

impl MountFault {
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
pub(super) fn from_errno(errno: i32, operation: &str) -> MountFailure {
    let text = || format!("{operation}: {}", errno_text(errno));
    match errno {
        // fio's error for a wrong checksum.
        libc::EILSEQ => {
            MountFailure::Fault(MountFault::Corrupt, format!("{operation} read back other bytes than were written"))
        }
        libc::EROFS => MountFailure::Fault(MountFault::ReadOnly, text()),
        libc::ENOSPC | libc::EDQUOT => MountFailure::Fault(MountFault::NoSpace, text()),
        libc::ENOENT | libc::ENOTDIR => MountFailure::Fault(MountFault::Missing, text()),
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
        | libc::EHOSTDOWN => MountFailure::Fault(MountFault::IoError, text()),
        libc::EACCES | libc::EPERM => MountFailure::NoResult(FailureKind::Denied, text()),
        _ => MountFailure::NoResult(FailureKind::Failed, text()),
    }
}

/// Returns the kernel's text for an error, without its number.
pub(super) fn errno_text(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.split_once(" (os error").map_or(text.as_str(), |(message, _)| message).to_owned()
}

/// Formats a pass as one line of the log.
pub(super) fn pass_line(pass: Pass, run: &FioRun) -> String {
    match pass {
        Pass::Verify => format!("{} written, read back and identical", format_bytes(run.read.bytes)),
        Pass::Measure(_) => {
            let both = run.read.combine(run.write);
            let sides = [("read ", run.read), ("write ", run.write)];
            let mut latencies: Vec<_> =
                sides.iter().filter_map(|(name, side)| Some((*name, latency_text(side)?))).collect();
            if let [(name, _)] = &mut latencies[..] {
                // With one direction the pattern's name shows which.
                *name = "";
            }
            let latencies: Vec<_> = latencies.into_iter().map(|(name, text)| format!("{name}{text}")).collect();
            let [rate, operations] =
                [format!("{:.3} GB/s", both.bytes_per_second / 1e9), format!("{:.0} IOPS", both.iops)];
            format!("{rate:>11} {operations:>12}  {}", latencies.join(" | "))
        }
    }
}

fn latency_text(side: &FioDirection) -> Option<String> {
    let latency = side.latency?;
    let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let [p50, p99, p999] = [latency.p50, latency.p99, latency.p999].map(milliseconds);
    Some(format!("p50 {p50} p99 {p99} p99.9 {p999} ms"))
}

/// Formats `1.5 GiB`.
pub(super) fn format_bytes(count: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")];
    let of = |(unit, name): (u64, &str)| {
        let number = format!("{:.1}", count as f64 / unit as f64);
        format!("{} {name}", number.trim_end_matches(".0"))
    };
    UNITS.into_iter().find(|(unit, _)| count >= *unit).map_or_else(|| format!("{} KiB", count >> 10), of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::Catalogue;
    use doctor_core::ids::CheckId;

    #[test]
    fn a_kernel_error_maps_to_a_mount_fault_that_has_a_rule() {
        let catalogue = Catalogue::built_in();
        let storage = catalogue.get(&CheckId::new("storage").unwrap()).unwrap();
        for (errno, expected) in [
            (libc::EILSEQ, MountFault::Corrupt),
            (libc::EROFS, MountFault::ReadOnly),
            (libc::ENOSPC, MountFault::NoSpace),
            (libc::EDQUOT, MountFault::NoSpace),
            (libc::EIO, MountFault::IoError),
            (libc::ESTALE, MountFault::IoError),
            (libc::ENOENT, MountFault::Missing),
        ] {
            let MountFailure::Fault(fault, text) = from_errno(errno, "randread: fio") else { panic!("{errno}") };
            assert_eq!(fault, expected);
            assert!(text.starts_with("randread: fio"), "{text}");
            let rule = format!("event = \"{}\"", expected.code());
            assert!(storage.rules.contains(&rule), "{rule}");
        }
        assert!(storage.rules.contains(&format!("event = \"{}\"", MountFault::Stalled.code())));
        assert!(matches!(from_errno(libc::EACCES, "x"), MountFailure::NoResult(FailureKind::Denied, _)));
        assert!(
            matches!(from_errno(libc::EMFILE, "x"), MountFailure::NoResult(FailureKind::Failed, _)),
            "not the mount's fault"
        );
    }

    #[test]
    fn sizes_are_formatted_with_units() {
        for (count, text) in [(0, "0 KiB"), (5 << 20, "5 MiB"), (3 << 29, "1.5 GiB"), (10 << 40, "10 TiB")] {
            assert_eq!(format_bytes(count), text);
        }
    }
}
