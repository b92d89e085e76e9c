//! `doctor-node record`: saves what the quick checks read as a file tree and values for the fake NVML library, so that
//! `check --root` sees the same machine elsewhere.
//!
//! Unreadable files are absent from the recording too, so the checks give the same result. A recording contains serial
//! numbers and process names: review it before you share it.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs, io,
    os::unix::fs::symlink,
    path::{Component, Path, PathBuf},
};

use doctor_checks::{
    Catalogue, Depth,
    gpu::{FieldValue, GpuQueryResult},
    probe::{Probe, ProbeOutput},
};
use doctor_core::policy::Policy;

use crate::runner::{CLOCK_FILE, ProbeRunner};

#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub struct RecordError {
    path: PathBuf,
    source: io::Error,
}

/// Runs every probe of the quick checks and writes the outputs below `out`.
///
/// # Errors
/// If a file or directory cannot be written.
pub fn record(policy: &Policy, runner: &dyn ProbeRunner, root: &Path, out: &Path) -> Result<(), RecordError> {
    let catalogue = Catalogue::built_in();
    let quick = catalogue.iter().filter(|check| check.spec.depth == Depth::Quick);
    let mut seen = BTreeSet::new();
    let mut probes: Vec<Probe> = quick
        .flat_map(|check| {
            let id = doctor_core::ids::CheckId::new(check.spec.id).ok();
            let params = id.map(|id| catalogue.params(policy, &id).into_owned()).unwrap_or_default();
            (check.probes)(&params)
        })
        .filter(|probe| seen.insert(format!("{probe:?}")))
        .collect();
    probes.extend(["vendor", "class"].map(|name| Probe::Glob { pattern: format!("/sys/bus/pci/devices/*/{name}") }));
    runner.prepare(&probes);
    // Links first: files are written through them, as they were read.
    probes.sort_by_key(|probe| !matches!(probe, Probe::Links { .. }));
    let tree = Tree { real: root, copy: &out.join("root") };
    for probe in &probes {
        tree.record_output(probe, runner.run(probe))?;
    }
    let fields: Vec<String> = probes
        .iter()
        .filter_map(|probe| if let Probe::Gpu { fields } = probe { Some(fields.clone()) } else { None })
        .flatten()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    if let ProbeOutput::Gpus(result) = runner.run(&Probe::Gpu { fields }) {
        write(&out.join("nvml.toml"), nvml_fixture(&result).as_bytes())?;
    }
    Ok(())
}

struct Tree<'a> {
    real: &'a Path,
    copy: &'a Path,
}

impl Tree<'_> {
    fn record_output(&self, probe: &Probe, output: ProbeOutput) -> Result<(), RecordError> {
        match (probe, output) {
            (Probe::Read { path }, ProbeOutput::Text(text)) => self.file(path, text.as_bytes()),
            (Probe::Kmsg, ProbeOutput::Text(text)) => self.file("/dev/kmsg", text.as_bytes()),
            (Probe::ClockDiscipline, ProbeOutput::Text(text)) => self.file(CLOCK_FILE, text.as_bytes()),
            (Probe::List { path }, ProbeOutput::Names(names)) => {
                self.folder(path)?;
                names.iter().try_for_each(|name| self.name(&format!("{path}/{name}")))
            }
            (Probe::Glob { .. } | Probe::Bytes { .. }, ProbeOutput::Files(files)) => {
                // Copy the raw bytes: the probe's output is their text or hexadecimal form.
                files.iter().filter(|file| file.text.is_ok()).try_for_each(|file| self.copied(probe, &file.path))
            }
            (Probe::Sampled { .. }, ProbeOutput::Samples(samples)) => {
                let files = samples
                    .iter()
                    .flat_map(|sample| &sample.files)
                    .filter_map(|file| Some((&file.path, file.text.as_ref().ok()?)));
                files.into_iter().try_for_each(|(path, text)| self.file(path, text.as_bytes()))
            }
            (Probe::Links { .. }, ProbeOutput::Links(links)) => {
                links.iter().try_for_each(|(path, to)| self.link(path, to))
            }
            (Probe::Processes, ProbeOutput::Processes(processes)) => processes.iter().try_for_each(|process| {
                ["stat", "wchan"].iter().try_for_each(|name| {
                    match fs::read(self.real.join(format!("proc/{}/{name}", process.pid))) {
                        Ok(bytes) => self.file(&format!("/proc/{}/{name}", process.pid), &bytes),
                        // The process has ended, or hides this file.
                        Err(_) => Ok(()),
                    }
                })
            }),
            _ => Ok(()),
        }
    }

    fn copy_path(&self, path: &str) -> PathBuf {
        self.copy.join(path.trim_start_matches('/'))
    }

    fn file(&self, path: &str, bytes: &[u8]) -> Result<(), RecordError> {
        write(&self.copy_path(path), bytes)
    }

    fn copied(&self, probe: &Probe, path: &str) -> Result<(), RecordError> {
        let max_bytes = if let Probe::Bytes { most: max_bytes, .. } = probe { *max_bytes as usize } else { usize::MAX };
        match fs::read(self.real.join(path.trim_start_matches('/'))) {
            Ok(bytes) => self.file(path, &bytes[..bytes.len().min(max_bytes)]),
            Err(_) => Ok(()),
        }
    }

    fn folder(&self, path: &str) -> Result<(), RecordError> {
        let copy = self.copy_path(path);
        fs::create_dir_all(&copy).map_err(|source| RecordError { path: copy, source })
    }

    /// Creates an empty file unless the path exists already.
    fn name(&self, path: &str) -> Result<(), RecordError> {
        let copy = self.copy_path(path);
        if copy.symlink_metadata().is_ok() { Ok(()) } else { write(&copy, b"") }
    }

    fn link(&self, path: &str, to: &str) -> Result<(), RecordError> {
        self.folder(to)?;
        let copy = self.copy_path(path);
        if copy.symlink_metadata().is_ok() {
            return Ok(());
        }
        let up =
            Path::new(path).components().filter(|part| matches!(part, Component::Normal(_))).count().saturating_sub(1);
        let target = "../".repeat(up) + to.trim_start_matches('/');
        let result = copy.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| symlink(target, &copy));
        result.map_err(|source| RecordError { path: copy, source })
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), RecordError> {
    let result = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, bytes));
    result.map_err(|source| RecordError { path: path.to_owned(), source })
}

/// Renders the fixture file that the fake NVML library reads.
fn nvml_fixture(result: &GpuQueryResult) -> String {
    let mut out = String::new();
    match &result.driver {
        Ok(driver) => {
            let cuda = driver.cuda.as_deref().and_then(|text| text.split_once('.'));
            let cuda = cuda.and_then(|(high, low)| {
                Some(u32::from(high.parse::<u16>().ok()?) * 1000 + u32::from(low.parse::<u8>().ok()?) * 10)
            });
            let _infallible = writeln!(out, "driver = {:?}\ncuda = {}", driver.version, cuda.unwrap_or(0));
        }
        // The NVML code is at the end of the error text.
        Err(failure) => {
            let code =
                failure.text.rsplit_once("(NVML ").and_then(|(_, rest)| rest.trim_end_matches(')').parse::<u32>().ok());
            let _infallible = writeln!(out, "init = {}", code.unwrap_or(9));
        }
    }
    for gpu in &result.gpus {
        let _infallible = write!(out, "\n[[gpu]]\nbus = {:?}\n[gpu.fields]\n", gpu.bus);
        for (name, reading) in &gpu.fields {
            let value = match reading {
                FieldValue::Number(value) => format!("{value:?}"),
                FieldValue::Text(text) => format!("{text:?}"),
                FieldValue::Failed { code, .. } => format!("{{ error = {code} }}"),
                FieldValue::NotSupported => continue,
            };
            let _infallible = writeln!(out, "{name:?} = {value}");
        }
    }
    out
}
