//! The health of a host, from the files of its last checks: AzNHC, DCGM and our own.
//!
//! Each check has a log and a `.status` file, to which every run appends a line: a time and `passed` or `failed`, or
//! `healthy`, `unhealthy` or `unknown`. The last line counts, but is not trusted by itself: a wrapper may write
//! `passed` in every case (the one that these files come from did). A `passed` therefore counts only if the log of the
//! same run shows that something was checked and reports no fault. What is missing, unreadable, too old or in the
//! future is unknown, never healthy.

use std::fmt::Write as _;

use doctor_backend::ssh::shell_quote;
use doctor_checks::{dcgm_text_output::DcgmTextOutput, nhc, probe::ProbeOutput};
use doctor_core::{
    observation::Observation,
    time::{Span, Timestamp},
};
use serde::Serialize;

/// The origin of a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    Aznhc,
    Dcgm,
    /// `doctor-node check`; if it has not run, the host's summary of the other two.
    Own,
}

impl Source {
    pub const ALL: [Self; 3] = [Self::Aznhc, Self::Dcgm, Self::Own];

    pub const fn code(self) -> &'static str {
        match self {
            Self::Aznhc => "aznhc",
            Self::Dcgm => "dcgm",
            Self::Own => "own",
        }
    }

    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.code() == code)
    }

    /// Returns the name of its log; its status file has the suffix `.status`.
    pub const fn log(self) -> &'static str {
        match self {
            Self::Aznhc => "aznhc-health.log",
            Self::Dcgm => "dcgmi-diag.log",
            Self::Own => "doctor-check.log",
        }
    }
}

/// The log in which a host's scripts summarise the other checks.
const SUMMARY_LOG: &str = "node-health.log";
const SUMMARY_STATUS: &str = "sum-status";

/// The health of a host or of one source. Ordered, so that the worst is the maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    Healthy,
    Unknown,
    Unhealthy,
}

impl Health {
    pub const ALL: [Self; 3] = [Self::Healthy, Self::Unknown, Self::Unhealthy];

    pub const fn code(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unknown => "unknown",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// The status from one source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    pub source: Source,
    pub health: Health,
    pub why: String,
    /// The age by the host's clock.
    pub age: Option<Span>,
}

/// The number of bytes read from the end of a log.
const MAX_LOG_BYTES: usize = 256 * 1024;
const MAX_STATUS_BYTES: usize = 4 * 1024;
/// Allowance for header lines and messages of the shell.
const HEADER_ALLOWANCE: usize = 4 * 1024;
/// How far in the future a time may be, because the clock may have been set.
const MAX_CLOCK_SKEW: Span = Span::minutes(5);
const MAX_LINE_CHARS: usize = 200;

/// The limit in bytes of a host's output for [`read`].
pub const MAX_OUTPUT_BYTES: usize = (Source::ALL.len() + 1) * (MAX_LOG_BYTES + MAX_STATUS_BYTES + HEADER_ALLOWANCE);

/// Returns the shell script that prints a host's time and the ends of its files. `word` must not occur in the files.
pub fn script(word: &str, folder: &str, sources: &[Source]) -> String {
    let mut script = format!(
        "f() {{ if [ ! -e \"$1\" ]; then echo \"{word} $2 missing\"; elif [ ! -f \"$1\" ] || [ ! -r \"$1\" ]; then \
         echo \"{word} $2 unreadable\"; else echo \"{word} $2 there\"; tail -c \"$3\" \"$1\"; echo; fi; }}; \
         echo \"{word} now $(date -u +%Y-%m-%dT%H:%M:%SZ) $(date +%Y-%m-%dT%H:%M:%SZ)\""
    );
    for source in sources {
        let log = format!("{}/{}", folder.trim_end_matches('/'), source.log());
        let (path, code) = (shell_quote(&log), source.code());
        // Writing to a `String` cannot fail.
        let _written =
            write!(script, "; f {path}.status {code}-status {MAX_STATUS_BYTES}; f {path} {code}-log {MAX_LOG_BYTES}");
    }
    if sources.contains(&Source::Own) {
        let path = shell_quote(&format!("{}/{SUMMARY_LOG}", folder.trim_end_matches('/')));
        let _written = write!(script, "; f {path}.status {SUMMARY_STATUS} {MAX_STATUS_BYTES}");
    }
    script
}

/// One file of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StatusFile<'a> {
    Missing,
    Unreadable,
    Content(&'a str),
    /// The output has no such file.
    NotReported,
}

/// The parsed output of a host.
struct HostOutput<'a> {
    /// The host's time in UTC, and as its local time.
    now: Option<(Timestamp, Timestamp)>,
    sections: Vec<(&'a str, &'a str, &'a str)>,
}

impl<'a> HostOutput<'a> {
    fn parse(word: &str, text: &'a str) -> Self {
        let mut output = Self { now: None, sections: Vec::new() };
        let start = format!("{word} ");
        // Sections begin at header lines; the script adds a newline to a file that does not end with one.
        let mut rest = text;
        while let Some(at) = find_line(rest, &start) {
            let after = &rest[at + start.len()..];
            let (header, body) = after.split_once('\n').unwrap_or((after, ""));
            let end = find_line(body, &start).unwrap_or(body.len());
            let mut fields = header.split_ascii_whitespace();
            match (fields.next(), fields.next(), fields.next()) {
                (Some("now"), Some(utc), Some(local)) => {
                    output.now = utc.parse().ok().zip(local.parse().ok());
                }
                (Some(name), Some(state), None) => output.sections.push((name, state, &body[..end])),
                _ => {}
            }
            rest = &body[end..];
        }
        output
    }

    fn file(&self, name: &str) -> StatusFile<'a> {
        match self.sections.iter().find(|(known, ..)| *known == name) {
            Some((_, "missing", _)) => StatusFile::Missing,
            Some((_, "there", text)) => StatusFile::Content(text),
            Some(_) => StatusFile::Unreadable,
            None => StatusFile::NotReported,
        }
    }
}

/// Returns the position of the first line that begins with `start`.
fn find_line(text: &str, start: &str) -> Option<usize> {
    if text.starts_with(start) {
        return Some(0);
    }
    text.match_indices('\n').map(|(at, _)| at + 1).find(|at| text[*at..].starts_with(start))
}

/// Parses the output of [`script`]. A result older than `limit` is unknown, except a failure: the lack of a newer check
/// does not repair anything.
pub fn read(word: &str, text: &str, sources: &[Source], limit: Span) -> Vec<Status> {
    let output = HostOutput::parse(word, text);
    sources.iter().map(|source| status(*source, &output, limit)).collect()
}

/// Returns the worst status; unknown if there is none.
pub fn worst(all: &[Status]) -> Health {
    all.iter().map(|status| status.health).max().unwrap_or(Health::Unknown)
}

fn status(source: Source, output: &HostOutput<'_>, limit: Span) -> Status {
    let unknown = |why: String| Status { source, health: Health::Unknown, why, age: None };
    let (name, seen) = match output.file(&format!("{}-status", source.code())) {
        // Without our own status, the host's summary of the other checks may report a fault.
        StatusFile::Missing if source == Source::Own => (SUMMARY_LOG, output.file(SUMMARY_STATUS)),
        seen => (source.log(), seen),
    };
    let text = match seen {
        StatusFile::Content(text) => text,
        StatusFile::Missing => return unknown(format!("there is no {}.status: it never ran here", source.log())),
        StatusFile::Unreadable => return unknown(format!("{name}.status cannot be read")),
        StatusFile::NotReported => return unknown("not in the host's output".to_owned()),
    };
    let Some(line) = text.lines().rev().map(str::trim).find(|line| !line.is_empty()) else {
        return unknown(format!("{name}.status is empty"));
    };
    let (time, verdict) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let verdict = verdict.trim();
    let Some(age) = output.now.and_then(|now| age(time, now)) else {
        return unknown(format!("its last line is `{}`, without a valid time", short(line)));
    };
    let (health, why) = match verdict {
        "failed" | "unhealthy" => {
            (Health::Unhealthy, first_fault(source, output).unwrap_or_else(|| verdict.to_owned()))
        }
        "unknown" => (Health::Unknown, "the check reported unknown".to_owned()),
        // On hosts set up by other tools, the summary reports health whatever was checked.
        "passed" | "healthy" if name == SUMMARY_LOG => {
            (Health::Unknown, format!("our check never ran here; {name} says {verdict}, but another tool wrote it"))
        }
        "passed" | "healthy" if age > limit => (Health::Unknown, format!("{verdict}, but older than {limit}")),
        "passed" | "healthy" => verify_with_log(source, output, verdict),
        _ => (Health::Unknown, format!("its last line is `{}`, which is not a status", short(line))),
    };
    Status { source, health, why, age: Some(age) }
}

/// Returns the age of a time; `None` if it is invalid or in the future. Without a zone it is in the host's local time.
fn age(time: &str, (utc, local): (Timestamp, Timestamp)) -> Option<Span> {
    let (at, now) = match time.parse::<Timestamp>() {
        Ok(at) => (at, utc),
        Err(_) => (format!("{time}Z").parse().ok()?, local),
    };
    (at <= now.plus(MAX_CLOCK_SKEW)).then(|| now.since(at))
}

/// Verifies a good status with the log of the same run.
fn verify_with_log(source: Source, output: &HostOutput<'_>, verdict: &str) -> (Health, String) {
    let log = match output.file(&format!("{}-log", source.code())) {
        StatusFile::Content(log) => last_run(log),
        // Our own check writes its status only from its results.
        _ if source == Source::Own => return (Health::Healthy, verdict.to_owned()),
        _ => return (Health::Unknown, format!("{verdict}, but there is no {} that confirms it", source.log())),
    };
    let unverified =
        || (Health::Unknown, format!("{verdict}, but {} does not show that anything was checked", source.log()));
    match source {
        Source::Own => (Health::Healthy, verdict.to_owned()),
        Source::Aznhc => match parse_nhc_log(log) {
            NhcLog::Fault(text) => (Health::Unhealthy, format!("{verdict}, but {text}")),
            NhcLog::Passed => (Health::Healthy, verdict.to_owned()),
            NhcLog::Unclear(text) => (Health::Unknown, format!("{verdict}, but {text}")),
            NhcLog::Empty => unverified(),
        },
        Source::Dcgm => {
            let table = DcgmTextOutput::parse(log);
            match (table.failed.first().or(table.not_run.first()), table.passed) {
                (Some(fault), _) if !table.failed.is_empty() => {
                    (Health::Unhealthy, format!("{verdict}, but {}", short(fault)))
                }
                (Some(fault), _) => (Health::Unknown, format!("{verdict}, but {}", short(fault))),
                (None, 0) => unverified(),
                (None, _) if table.hardware_passed == 0 => {
                    (Health::Unknown, format!("{verdict}, but no test of the hardware has passed"))
                }
                (None, _) if !table.warned.is_empty() => {
                    (Health::Healthy, format!("{verdict}, with a warning: {}", short(&table.warned[0])))
                }
                (None, _) => (Health::Healthy, verdict.to_owned()),
            }
        }
    }
}

enum NhcLog {
    Fault(String),
    Unclear(String),
    Passed,
    Empty,
}

fn parse_nhc_log(log: &str) -> NhcLog {
    let ran = ProbeOutput::Ran { exit: Some(0), stdout: log.to_owned(), stderr: String::new() };
    match nhc::interpret(Some(&ran)) {
        Observation::Measured { events, .. } if !events.is_empty() => NhcLog::Fault(short(&events[0].text)),
        Observation::Measured { failures: unread, .. } if !unread.is_empty() => NhcLog::Unclear(short(&unread[0].text)),
        Observation::Measured { .. } => NhcLog::Passed,
        Observation::NotApplicable(why) => NhcLog::Unclear(short(&why.text)),
        Observation::Failed(failure) if failure.kind == doctor_core::observation::FailureKind::Empty => NhcLog::Empty,
        Observation::Failed(failure) => NhcLog::Unclear(short(&failure.text)),
    }
}

/// Returns the fault in the log, for display.
fn first_fault(source: Source, output: &HostOutput<'_>) -> Option<String> {
    let StatusFile::Content(log) = output.file(&format!("{}-log", source.code())) else { return None };
    let log = last_run(log);
    match source {
        Source::Aznhc => match parse_nhc_log(log) {
            NhcLog::Fault(text) | NhcLog::Unclear(text) => Some(text),
            NhcLog::Passed | NhcLog::Empty => None,
        },
        Source::Dcgm => DcgmTextOutput::parse(log).failed.first().map(|fault| short(fault)),
        Source::Own => log.lines().find(|line| line.contains("  fail  ")).map(|line| short(line.trim())),
    }
}

/// The beginnings of the line that ends a run's part of a log.
const RUN_END_LINES: [&str; 6] = [
    "Health checks passed",
    "Health checks failed with exit code",
    "dcgmi diag passed",
    "dcgmi diag failed with exit code",
    "doctor-node check passed",
    "doctor-node check failed with exit code",
];

/// Returns the shell script that runs our own check and writes its result where [`script`] reads it. `program` is
/// `doctor-node`.
pub fn check_script(program: &str, folder: &str) -> String {
    let log = shell_quote(&format!("{}/{}", folder.trim_end_matches('/'), Source::Own.log()));
    let program = shell_quote(program);
    // Exit codes as in Nagios: 1 is a warning and takes no host out of service, 3 is unknown.
    format!(
        "L={log}; O=$({program} check 2>&1); R=$?; \
         case $R in 0|1) W=passed; N=\"passed (exit code $R)\";; 2) W=failed; N=\"failed with exit code 2\";; \
         *) W=unknown; N=\"failed with exit code $R\";; esac; \
         printf \"%s\\ndoctor-node check %s\\n\" \"$O\" \"$N\" >> \"$L\" && \
         printf \"%s %s\\n\" \"$(date -u +%Y-%m-%dT%H:%M:%SZ)\" $W >> \"$L.status\""
    )
}

/// Returns the last run's part of a log to which every run appends.
fn last_run(log: &str) -> &str {
    let (mut start, mut at) = (0, 0);
    for line in log.split_inclusive('\n') {
        at += line.len();
        if RUN_END_LINES.iter().any(|end| line.starts_with(end)) && !log[at..].trim().is_empty() {
            start = at;
        }
    }
    &log[start..]
}

fn short(text: &str) -> String {
    let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.chars().take(MAX_LINE_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WORD: &str = "word-17";
    const NOW: &str = "word-17 now 2026-11-16T03:00:00Z 2026-11-16T05:00:00Z\n";
    const FAULT: &str =
        "ERROR:  nhc:  Health check failed:  check_gpu_count: Expected 8 and found 7. FaultCode: NHC2009\n";
    const FINE: &str = "SUCCESS:  nhc:  Health check passed:  check_gpu_count: Expected 8 and found 8\n";

    fn one(source: Source, status: &str, log: &str) -> (Health, String) {
        let code = source.code();
        let part = |name: &str, text: &str| match text {
            "" => format!("{WORD} {code}-{name} missing\n"),
            text => format!("{WORD} {code}-{name} there\n{text}\n"),
        };
        let text = format!("{NOW}{}{}", part("status", status), part("log", log));
        let all = read(WORD, &text, &[source], Span::days(7));
        (all[0].health, all[0].why.clone())
    }

    #[test]
    fn a_missing_aznhc_is_unknown_and_never_passed() {
        let (health, why) = one(Source::Aznhc, "", "");
        assert!(health == Health::Unknown && why.contains("never ran"), "{why}");
        let (health, why) = one(Source::Aznhc, "2026-11-16T04:00:00 passed\n", "");
        assert!(health == Health::Unknown && why.contains("no aznhc-health.log"), "{why}");
        let log = "docker: command not found\nHealth checks passed\n";
        let (health, why) = one(Source::Aznhc, "2026-11-16T04:00:00 passed\n", log);
        assert!(health == Health::Unknown && why.contains("does not show that anything was checked"), "{why}");
        let other =
            "The vm SKU 'standard_d4' is currently not supported by Azure health checks.\nHealth checks passed\n";
        assert_eq!(one(Source::Aznhc, "2026-11-16T04:00:00 passed\n", other).0, Health::Unknown);
    }

    #[test]
    fn a_wrapper_that_always_writes_passed_is_not_believed() {
        let (health, why) =
            one(Source::Aznhc, "2026-11-16T04:00:00 passed\n", &format!("{FINE}{FAULT}Health checks passed\n"));
        assert!(health == Health::Unhealthy && why.contains("Expected 8 and found 7"), "{why}");
        let table = "| Denylist | Pass |\n| GPU Memory | Fail - GPU 3 |\ndcgmi diag passed\n";
        let (health, why) = one(Source::Dcgm, "2026-11-16T04:00:00 passed", table);
        assert!(health == Health::Unhealthy && why.contains("GPU Memory: Fail - GPU 3"), "{why}");
    }

    #[test]
    fn a_diagnosis_that_skipped_the_hardware_is_unknown() {
        let table = "| Denylist | Pass |\n| GPU Memory | Skip - All |\ndcgmi diag passed\n";
        let (health, why) = one(Source::Dcgm, "2026-11-16T04:00:00 passed", table);
        assert!(health == Health::Unknown && why.contains("no test of the hardware"), "{why}");
    }

    #[test]
    fn only_the_last_run_counts() {
        let mended = format!("{FAULT}Health checks failed with exit code 1\n{FINE}Health checks passed\n");
        let status = "2026-11-15T04:00:00 failed\n2026-11-16T04:00:00 passed\n\n";
        assert_eq!(one(Source::Aznhc, status, &mended), (Health::Healthy, "passed".to_owned()));
        let broken = format!("{FINE}Health checks passed\n{FAULT}Health checks failed with exit code 1\n");
        let (health, why) = one(Source::Aznhc, "2026-11-16T04:00:00 failed\n", &broken);
        assert!(health == Health::Unhealthy && why.contains("NHC2009"), "{why}");
        let diag = "| Memory | Fail |\ndcgmi diag failed with exit code 226\n| Memory | Pass |\ndcgmi diag passed\n";
        assert_eq!(one(Source::Dcgm, "2026-11-16T04:00:00 passed", diag).0, Health::Healthy);
    }

    #[test]
    fn times_use_the_hosts_clock_and_old_results_are_not_healthy() {
        let age = |status: &str| {
            let text = format!("{NOW}{WORD} own-status there\n{status}\n{WORD} own-log missing\n");
            let all = read(WORD, &text, &[Source::Own], Span::days(7));
            (all[0].health, all[0].age)
        };
        assert_eq!(age("2026-11-16T04:00:00 healthy"), (Health::Healthy, Some(Span::hours(1))), "local time");
        assert_eq!(age("2026-11-16T02:00:00Z healthy"), (Health::Healthy, Some(Span::hours(1))), "in UTC");
        assert_eq!(age("2026-11-08T04:00:00 healthy"), (Health::Unknown, Some(Span::days(8) + Span::hours(1))));
        assert_eq!(age("2026-11-08T04:00:00 unhealthy").0, Health::Unhealthy, "a failure remains a failure with age");
        assert_eq!(age("2026-11-17T04:00:00 healthy"), (Health::Unknown, None), "tomorrow's");
        let sum = format!(
            "{NOW}{WORD} own-status missing\n{WORD} own-log missing\n{WORD} sum-status there\n2026-11-16T04:00:00 healthy\n"
        );
        assert_eq!(read(WORD, &sum, &[Source::Own], Span::days(7))[0].health, Health::Unknown, "others' sum");
        let bad = sum.replace(" healthy", " unhealthy");
        assert_eq!(read(WORD, &bad, &[Source::Own], Span::days(7))[0].health, Health::Unhealthy);
        for line in ["healthy", "2026-11-16T04:00:00 fine", "2026-11-16T04:00:00", "soon passed", "?"] {
            assert_eq!(age(line).0, Health::Unknown, "{line}");
        }
    }

    #[test]
    fn a_file_cannot_forge_another_and_missing_output_is_unknown() {
        let forged = "2026-11-16T04:00:00 failed\nword-99 aznhc-status there\n2026-11-16T04:00:00 passed";
        assert_ne!(one(Source::Aznhc, forged, &format!("{FAULT}\n")).0, Health::Healthy);
        let cut = read(WORD, NOW, &Source::ALL, Span::days(7));
        assert!(cut.iter().all(|status| status.health == Health::Unknown && status.why.contains("host's output")));
        assert_eq!((worst(&cut), worst(&[])), (Health::Unknown, Health::Unknown));
    }

    #[test]
    fn the_script_finds_the_files_of_a_real_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("aznhc-health.log"), format!("{FINE}Health checks passed")).unwrap();
        std::fs::write(at("aznhc-health.log.status"), "2026-01-01T00:00:00Z passed\n").unwrap();
        std::fs::create_dir(at("dcgmi-diag.log.status")).unwrap();
        let script = script(WORD, &folder.path().display().to_string(), &Source::ALL);
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        let all = read(WORD, &String::from_utf8(output.stdout).unwrap(), &Source::ALL, Span::days(36_500));
        let health: Vec<Health> = all.iter().map(|status| status.health).collect();
        assert_eq!(health, [Health::Healthy, Health::Unknown, Health::Unknown], "{all:?}");
        assert!(all[1].why.contains("cannot be read") && all[2].why.contains("never ran"), "{all:?}");
    }

    #[test]
    fn our_own_check_writes_the_format_that_is_parsed() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, program) = (folder.path().display().to_string(), folder.path().join("it's doctor-node"));
        for (code, health) in [(0, Health::Healthy), (1, Health::Healthy), (2, Health::Unhealthy), (3, Health::Unknown)]
        {
            std::fs::write(&program, format!("#!/bin/sh\necho \"memory  fail            monitor\n1 check: 1 fail, 0 inconclusive\"\nexit {code}\n"))
                .unwrap();
            std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            let run = |script: &str| std::process::Command::new("sh").args(["-c", script]).output().unwrap();
            assert!(run(&check_script(&program.display().to_string(), &directory)).status.success());
            let stdout = run(&script(WORD, &directory, &[Source::Own])).stdout;
            let statuses = read(WORD, &String::from_utf8(stdout).unwrap(), &[Source::Own], Span::days(7));
            assert_eq!(statuses[0].health, health, "{statuses:?}");
        }
        let run = |script: &str| std::process::Command::new("sh").args(["-c", script]).output().unwrap();
        std::fs::write(&program, "#!/bin/sh\necho \"memory  fail            monitor\"\nexit 3\n").unwrap();
        assert!(run(&check_script(&program.display().to_string(), &directory)).status.success());
        let log = std::fs::read_to_string(folder.path().join("doctor-check.log")).unwrap();
        assert!(last_run(&log).ends_with("failed with exit code 3\n") && last_run(&log).lines().count() == 2, "{log}");
    }

    #[test]
    fn every_code_reads_back() {
        assert!(Source::ALL.iter().all(|source| Source::from_code(source.code()) == Some(*source)));
        assert_eq!(Health::ALL.map(Health::code), ["healthy", "unknown", "unhealthy"]);
    }

    proptest! {
        #[test]
        fn only_an_explicit_pass_is_healthy(
            text in "(word-17 |aznhc|-status|-log| there| missing|\n|2026-11-16T04:00:00 |failed|health|x){0,40}",
        ) {
            let all = read(WORD, &format!("{NOW}{text}"), &Source::ALL, Span::days(7));
            prop_assert_eq!(all.len(), 3);
            prop_assert!(all.iter().all(|status| status.health != Health::Healthy), "{:?}", all);
        }
    }
}
