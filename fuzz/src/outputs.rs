//! Builds probe outputs from bytes: usually in the form that the runner gives them, so that a check's own parser is
//! reached, and sometimes in another.

use doctor_checks::{
    gpu::{Driver, FieldValue, Gpu, GpuQueryResult},
    probe::{FileSystemSpace, FileText, Probe, ProbeOutput, Process, Sample},
};
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::{Span, Timestamp},
};

use crate::text;

/// Separates the files, GPUs or processes of one output.
const NEXT: u8 = 0xff;
/// Separates the samples of a sampled file.
const NEXT_SAMPLE: u8 = 0xfe;

/// Returns an output of this probe. The first byte decides whether the probe failed.
pub fn output(probe: &Probe, bytes: &[u8]) -> ProbeOutput {
    let (kind, rest) = bytes.split_first().map_or((u8::MAX, bytes), |(first, rest)| (*first, rest));
    match kind {
        0..=15 => ProbeOutput::Failed(failure(kind, rest)),
        // What another version of `doctor-node` may send, in its serialised form.
        16..=23 => serde_json::from_slice(rest).unwrap_or_else(|_| ProbeOutput::Text(text(rest).into_owned())),
        24..=31 => ProbeOutput::Text(text(rest).into_owned()),
        _ => natural(probe, kind, rest),
    }
}

fn failure(kind: u8, bytes: &[u8]) -> ProbeFailure {
    let kinds = FailureKind::ALL;
    ProbeFailure::new(kinds[usize::from(kind) % kinds.len()], text(bytes))
}

fn natural(probe: &Probe, kind: u8, bytes: &[u8]) -> ProbeOutput {
    match probe {
        Probe::Read { .. } | Probe::Kmsg | Probe::ClockDiscipline | Probe::DcgmHealth { .. } => {
            ProbeOutput::Text(text(bytes).into_owned())
        }
        Probe::List { .. } => ProbeOutput::Names(text(bytes).lines().map(str::to_owned).collect()),
        Probe::Glob { pattern } | Probe::Bytes { pattern, .. } => ProbeOutput::Files(files(pattern, bytes)),
        Probe::Links { pattern } => {
            let link = |file: FileText| (file.path, file.text.unwrap_or_default());
            ProbeOutput::Links(files(pattern, bytes).into_iter().map(link).collect())
        }
        Probe::Sampled { pattern, .. } => {
            let samples: Vec<&[u8]> = bytes.split(|byte| *byte == NEXT_SAMPLE).take(8).collect();
            ProbeOutput::Samples((1..).zip(samples).map(|(n, bytes)| sample(pattern, n, bytes)).collect())
        }
        Probe::StatFs { .. } => {
            let mut numbers = bytes.chunks(8).map(|some| some.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
            let mut number = || numbers.next().unwrap_or(0);
            let (size, available, free) = (number(), number(), number());
            ProbeOutput::StatFs(FileSystemSpace { size, available, free, inodes: number(), inodes_free: number() })
        }
        Probe::Processes => ProbeOutput::Processes(bytes.split(|byte| *byte == NEXT).map(process).collect()),
        Probe::Gpu { fields } => ProbeOutput::Gpus(gpus(fields, kind, bytes)),
        Probe::Exec { .. } | Probe::ExecIfExists { .. } | Probe::Builtin { .. } => {
            let (out, err) = bytes.split_at(bytes.iter().position(|byte| *byte == NEXT).unwrap_or(bytes.len()));
            let exit = (kind < 240).then(|| i32::from(kind.saturating_sub(200)));
            ProbeOutput::Ran { exit, stdout: text(out).into_owned(), stderr: text(err).into_owned() }
        }
    }
}

/// Parses files, each of which starts with a line of names for the wildcards of the pattern.
fn files(pattern: &str, bytes: &[u8]) -> Vec<FileText> {
    if bytes.is_empty() {
        return Vec::new();
    }
    let one = |bytes: &[u8]| {
        let input = text(bytes);
        let (names, content) = input.split_once('\n').unwrap_or((&input, ""));
        let mut names = names.split(' ');
        let path = pattern.split('*').collect::<Vec<_>>();
        let (last, open) = path.split_last().expect("splitting gives at least one part");
        let filled: String = open.iter().map(|part| format!("{part}{}", names.next().unwrap_or("0"))).collect();
        let content = match content.strip_prefix('\u{1}') {
            Some(why) => Err(ProbeFailure::new(FailureKind::Failed, why)),
            None => Ok(content.to_owned()),
        };
        FileText { path: format!("{filled}{last}"), text: content }
    };
    let mut files: Vec<FileText> = bytes.split(|byte| *byte == NEXT).take(64).map(one).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files.dedup_by(|a, b| a.path == b.path);
    files
}

fn sample(pattern: &str, n: i64, bytes: &[u8]) -> Sample {
    let (uptime, bytes) = bytes.split_first().map_or((0, bytes), |(first, rest)| (i64::from(*first), rest));
    let at = Timestamp::from_secs(1_800_000_000 + n * 300);
    Sample { at, uptime: Span::minutes(uptime * 5 + n), files: files(pattern, bytes), removed: Vec::new() }
}

fn process(bytes: &[u8]) -> Process {
    let input = text(bytes);
    let mut words = input.splitn(4, ' ');
    let (state, pid) = (words.next().and_then(|word| word.chars().next()), words.next());
    let age = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    Process {
        pid: pid.and_then(|pid| pid.parse().ok()).unwrap_or(2),
        parent: 1,
        user: 0,
        name: words.next().unwrap_or("kthreadd").to_owned(),
        state: state.unwrap_or('S'),
        age: Span::from_secs(age),
        wchan: None,
    }
}

/// Parses GPUs with one line per requested field, in order; a field with a `*` takes a line for each of its links.
fn gpus(fields: &[String], kind: u8, bytes: &[u8]) -> GpuQueryResult {
    let bus = |n: usize| format!("0000:{:02x}:00.0", 0x18 + n);
    let one = |(n, bytes): (usize, &[u8])| {
        let input = text(bytes);
        let mut lines = input.lines();
        let mut reading = || reading(lines.next().unwrap_or_default());
        let mut read = Vec::new();
        for field in fields {
            match field.split_once('*') {
                Some((before, after)) => {
                    let links = usize::from(kind % 4);
                    read.extend((0..links).map(|link| (format!("{before}{link}{after}"), reading())));
                }
                None => read.push((field.clone(), reading())),
            }
        }
        Gpu { index: u32::try_from(n).unwrap_or(0), bus: bus(n), fields: read }
    };
    let gpus: Vec<Gpu> = bytes.split(|byte| *byte == NEXT).take(16).enumerate().map(one).collect();
    let driver = Driver { version: "570.124.06".to_owned(), cuda: Some("12.8".to_owned()), source: "nvml".to_owned() };
    GpuQueryResult { on_pci: (0..gpus.len()).map(bus).collect(), driver: Ok(driver), gpus }
}

fn reading(line: &str) -> FieldValue {
    match line.split_at_checked(1) {
        None | Some(("-", _)) => FieldValue::NotSupported,
        Some(("!", code)) => FieldValue::Failed { code: code.parse().unwrap_or(15), text: line.to_owned() },
        Some(("=", value)) => FieldValue::Text(value.to_owned()),
        Some(_) => match line.parse::<f64>() {
            // JSON has no other numbers.
            Ok(number) if number.is_finite() => FieldValue::Number(number),
            _ => FieldValue::Text(line.to_owned()),
        },
    }
}
