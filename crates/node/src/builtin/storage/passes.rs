//! Runs one pass of fio and reads its result.
//!
//! fio runs all its jobs as threads, so that it has one pid, and is killed when the test ends. This program starts
//! itself first to enter the directory: entering may hang, and would otherwise block the parent in spawning the child.

use std::{
    cell::Cell,
    ffi::OsString,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitCode},
    time::Duration,
};

use doctor_checks::{
    fio::{FioError, FioRun, parse},
    measurements::exit_failure,
    storage_params::{FileLayout, MANY_FILES, Pattern, Sizes, StorageParams},
};
use doctor_core::observation::{FailureKind, ProbeFailure};
use rustix::process::Signal;

use super::SELF_EXE;
use crate::{
    runner::{
        BUILTIN_ARGUMENT, KEY_VARIABLE, MAX_STREAM_BYTES,
        child::{self, ChildOutcome, Echo, Limits},
    },
    stop::{Stop, StopReason},
};

/// The subtask name under which this program enters a directory and executes fio.
pub(in crate::builtin) const ENTER: &str = "storage-enter";

const FIO: &str = "fio";

/// fio engines that keep many operations in flight. Some distributions package them separately.
const ENGINES: [&str; 3] = ["libaio", "io_uring", "posixaio"];

/// Time limit of fio commands that touch no mount.
const FIO_TIMEOUT: Duration = Duration::from_secs(10);
/// Most lines of fio's errors that are logged: it prints one per failed operation.
const MAX_ERROR_LINES: u32 = 5;
const KILL_GRACE: Duration = Duration::from_secs(1);

/// Entry point of the process that executes fio: enters the directory, and runs fio there.
pub(in crate::builtin) fn enter(args: &[OsString]) -> ExitCode {
    // fio must not outlive the test.
    let _kept = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let [directory, args @ ..] = args else { return ExitCode::FAILURE };
    if let Err(error) = std::env::set_current_dir(directory) {
        eprintln!("cannot enter the test's directory: {error}");
        return ExitCode::FAILURE;
    }
    let error = Command::new(FIO).args(args).exec();
    eprintln!("cannot run {FIO}: {error}");
    ExitCode::FAILURE
}

/// The installed fio.
#[derive(Debug, Clone)]
pub(super) struct Fio {
    pub(super) version: String,
    pub(super) engine: &'static str,
}

impl Fio {
    /// Finds fio and a usable engine.
    ///
    /// # Errors
    /// If fio is not installed or has no usable engine.
    pub(super) fn find(stop: &Stop) -> Result<Self, ProbeFailure> {
        let ask = |argument: &str| {
            let mut command = Command::new(FIO);
            command.arg(argument);
            run_fio(&mut command, FIO_TIMEOUT, stop, Echo::default())
        };
        let missing = |text: &str| ProbeFailure::new(FailureKind::Missing, text);
        let version = match ask("--version") {
            Ok(ChildOutcome::Exited { status, stdout, .. }) if status.success() => {
                String::from_utf8_lossy(&stdout).trim().to_owned()
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = "fio is not installed; it is in the package `fio`";
                return Err(ProbeFailure::new(FailureKind::NotInstalled, text));
            }
            _ => return Err(ProbeFailure::new(FailureKind::Failed, "`fio --version` failed")),
        };
        let has = |engine: &&str| {
            let output = ask(&format!("--enghelp={engine}"));
            matches!(output, Ok(ChildOutcome::Exited { status, .. }) if status.success())
        };
        let engine = ENGINES.into_iter().find(|engine| has(engine));
        let engine = engine.ok_or_else(|| missing("fio supports none of the engines libaio, io_uring and posixaio"))?;
        Ok(Self { version, engine })
    }
}

fn run_fio(command: &mut Command, timeout: Duration, stop: &Stop, echo: Echo<'_>) -> std::io::Result<ChildOutcome> {
    command.env("LC_ALL", "C").env_remove(KEY_VARIABLE);
    let limits = Limits { timeout, max_stream_bytes: MAX_STREAM_BYTES, grace: Duration::ZERO, kill_grace: KILL_GRACE };
    child::run(command, &limits, stop, echo)
}

/// One run of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// Writes and reads back, with checksums in every block.
    Verify,
    Measure(Pattern),
}

impl Pass {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Verify => "verify",
            Self::Measure(pattern) => pattern.code(),
        }
    }

    /// Builds fio's command line.
    fn args(self, fio: &Fio, direct: bool, params: &StorageParams, sizes: Sizes) -> Vec<String> {
        let mut args: Vec<String> = ["--thread", "--group_reporting", "--output-format=json", "--eta=never"]
            .into_iter()
            // Preallocated blocks would be read back without accessing the disk.
            .chain(["--fallocate=none", "--percentile_list=50:99:99.9"])
            .map(str::to_owned)
            .collect();
        let mut set = |name: &str, value: &dyn std::fmt::Display| args.push(format!("--{name}={value}"));
        set("name", &self.name());
        set("ioengine", &fio.engine);
        set("direct", &u8::from(direct));
        let (block, jobs) = match self {
            Self::Verify => {
                set("filename", &"verify");
                set("rw", &"write");
                set("iodepth", &16);
                set("size", &sizes.verified);
                set("verify", &"crc32c");
                set("verify_fatal", &1);
                // Otherwise fio leaves a state file in the current directory.
                set("verify_state_save", &0);
                (1 << 20, 1)
            }
            Self::Measure(pattern) => {
                let facts = pattern.spec();
                match facts.files {
                    FileLayout::One => set("filename", &"one"),
                    FileLayout::Many => set("filename_format", &"many.$jobnum"),
                }
                set("rw", &facts.rw);
                set("rwmixread", &70);
                set("iodepth", &facts.depth);
                set("numjobs", &facts.jobs);
                match (pattern, facts.files) {
                    (Pattern::IodepthWrite1File, _) => set("size", &sizes.set),
                    (Pattern::NumjobsWriteNFiles, _) => set("size", &(sizes.set / MANY_FILES)),
                    // As much as the preceding write pattern had time to write.
                    _ => set("size", &"100%"),
                }
                set("runtime", &format!("{}ms", params.pattern_time.millis()));
                set("time_based", &1);
                (facts.block, u64::from(facts.jobs))
            }
        };
        set("bs", &block);
        let by_operations = params.iops.map(|iops| iops.saturating_mul(block));
        if let Some(rate) = params.rate.into_iter().chain(by_operations).min() {
            set("rate", &(rate / jobs).max(1));
        }
        args
    }
}

/// The outcome of a pass.
#[derive(Debug)]
pub(super) enum Outcome {
    Finished(FioRun),
    /// It did not end within this time and was killed.
    Stalled(Duration),
    /// It did not end and cannot be killed.
    Unkillable {
        pid: u32,
        child: std::process::Child,
    },
    Failed(ProbeFailure),
    Stopped(StopReason),
}

/// The parameters that all passes share.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassParams<'a> {
    pub(super) fio: &'a Fio,
    pub(super) params: &'a StorageParams,
    pub(super) directory: &'a Path,
    pub(super) sizes: Sizes,
    pub(super) stop: &'a Stop,
}

impl PassParams<'_> {
    pub(super) fn run(&self, pass: Pass, direct: bool) -> Outcome {
        let mut command = Command::new(SELF_EXE);
        command.args([BUILTIN_ARGUMENT, ENTER]).arg(self.directory);
        command.args(pass.args(self.fio, direct, self.params, self.sizes));
        let limit = self.params.pattern_time.to_std() + self.params.stall.to_std();
        let line_count = Cell::new(0);
        let log_line = |line: &str| {
            line_count.set(line_count.get() + 1);
            if line_count.get() <= MAX_ERROR_LINES {
                eprintln!("  fio: {}", line.trim_start_matches("fio: "));
            }
        };
        let echo = Echo { stdout: None, stderr: Some(&log_line) };
        let failed = |kind, text: String| Outcome::Failed(ProbeFailure::new(kind, format!("{}: {text}", pass.name())));
        match run_fio(&mut command, limit, self.stop, echo) {
            Ok(ChildOutcome::Exited { status, stdout, stderr }) => {
                match (parse(&String::from_utf8_lossy(&stdout)), status.code()) {
                    (Ok(run), _) => Outcome::Finished(run),
                    (Err(FioError::NoJson(_)), code) if code != Some(0) => {
                        let ProbeFailure { kind, text } = exit_failure(code, &String::from_utf8_lossy(&stderr));
                        failed(kind, format!("fio: {text}"))
                    }
                    (Err(error @ FioError::TooLong(_)), _) => failed(FailureKind::TooLong, error.to_string()),
                    (Err(error), _) => failed(FailureKind::Unparseable, error.to_string()),
                }
            }
            Ok(ChildOutcome::TimedOut) => Outcome::Stalled(limit),
            Ok(ChildOutcome::Unkillable { pid, child }) => Outcome::Unkillable { pid, child },
            Ok(ChildOutcome::TooLong) => failed(FailureKind::TooLong, "fio printed too much output".to_owned()),
            Ok(ChildOutcome::Stopped(reason)) => Outcome::Stopped(reason),
            Err(error) => failed(FailureKind::Failed, format!("cannot start fio: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::storage_params::StorageTarget;
    use doctor_core::time::Span;

    fn params() -> StorageParams {
        StorageParams {
            targets: vec![StorageTarget::Mount("/data".to_owned())],
            size: 1 << 30,
            pattern_time: Span::from_secs(30),
            stall: Span::from_secs(30),
            verify: true,
            rate: None,
            iops: None,
            timeout: Span::minutes(9),
        }
    }

    fn args(pass: Pass, params: &StorageParams) -> Vec<String> {
        let fio = Fio { version: "fio-3.33".to_owned(), engine: "libaio" };
        pass.args(&fio, true, params, Sizes::fitting(params.size, None).unwrap())
    }

    #[test]
    fn the_patterns_have_the_documented_fio_arguments() {
        let has = |pattern, expected: &[&str]| {
            let args = args(Pass::Measure(pattern), &params());
            for expected in expected.iter().chain(&["--direct=1", "--runtime=30000ms", "--time_based=1", "--thread"]) {
                assert!(args.iter().any(|arg| arg == expected), "{expected} in {args:?}");
            }
        };
        let one = ["--bs=1048576", "--iodepth=128", "--numjobs=1", "--filename=one"];
        has(Pattern::IodepthWrite1File, &[&one[..], &["--rw=write", "--size=268435456"]].concat());
        has(Pattern::IodepthRead1File, &[&one[..], &["--rw=read", "--size=100%"]].concat());
        let many = ["--bs=1048576", "--iodepth=16", "--numjobs=8", "--filename_format=many.$jobnum"];
        has(Pattern::NumjobsWriteNFiles, &[&many[..], &["--rw=write", "--size=33554432"]].concat());
        has(Pattern::NumjobsReadNFiles, &[&many[..], &["--rw=read", "--size=100%"]].concat());
        let random = ["--bs=4096", "--iodepth=64", "--numjobs=1", "--filename=one", "--size=100%"];
        has(Pattern::Randread, &[&random[..], &["--rw=randread"]].concat());
        has(Pattern::Randwrite, &[&random[..], &["--rw=randwrite"]].concat());
        has(Pattern::Randrw, &[&random[..], &["--rw=randrw", "--rwmixread=70"]].concat());
    }

    #[test]
    fn caps_are_divided_among_the_jobs_of_a_pattern_and_the_lower_one_applies() {
        let rate = |pass, rate, iops| {
            let args = args(pass, &StorageParams { rate, iops, ..params() });
            args.iter().find_map(|arg| arg.strip_prefix("--rate=")?.parse::<u64>().ok())
        };
        let (one, many) = (Pass::Measure(Pattern::IodepthRead1File), Pass::Measure(Pattern::NumjobsReadNFiles));
        assert_eq!(rate(one, None, None), None);
        assert_eq!(rate(one, Some(800), None), Some(800));
        assert_eq!(rate(many, Some(800), None), Some(100));
        assert_eq!(rate(one, Some(800 << 20), Some(100)), Some(100 << 20));
        assert_eq!(rate(Pass::Measure(Pattern::Randread), Some(800 << 20), Some(100)), Some(409_600));
        assert_eq!(rate(Pass::Verify, Some(800), Some(1)), Some(800));
        assert_eq!(rate(many, Some(1), None), Some(1), "0 would be no cap");
    }
}
