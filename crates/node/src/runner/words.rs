//! Describes probes in words, for messages and as stable identifiers.

use doctor_checks::probe::Probe;

use super::nvml_helper::QUERY_LABEL;

/// Describes a probe; equal probes have equal descriptions.
pub fn describe(probe: &Probe) -> String {
    match probe {
        Probe::Read { path } => format!("read {path}"),
        Probe::List { path } => format!("list {path}"),
        Probe::StatFs { path } => format!("statfs {path}"),
        Probe::Glob { pattern } | Probe::Bytes { pattern, .. } => format!("read {pattern}"),
        Probe::Links { pattern } => format!("follow {pattern}"),
        Probe::Sampled { pattern, .. } => format!("watch {pattern}"),
        Probe::Kmsg => "read the kernel log".to_owned(),
        Probe::Processes => "list processes".to_owned(),
        Probe::ClockDiscipline => "read the clock state".to_owned(),
        // Independent of the fields: a driver that hangs for one query hangs for all.
        Probe::Gpu { .. } => QUERY_LABEL.to_owned(),
        Probe::DcgmHealth { address } => format!("query DCGM at {address}"),
        Probe::Exec { program, args, .. } | Probe::ExecIfExists { program, args, .. } => command_line(program, args),
        Probe::Builtin { test, .. } => format!("test {test}"),
    }
}

pub(super) fn command_line(program: &str, args: &[String]) -> String {
    std::iter::once(program).chain(args.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
}
