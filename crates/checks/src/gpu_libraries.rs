//! gpu-libraries: are the driver's libraries intact?
//!
//! What it does: reads the first bytes of every `libcuda.so.*` and `libnvidia-*.so.*` in the usual directories. Each
//! must be an ELF file, not an empty file and not a dangling link.
//!
//! Why it matters: an interrupted installation, or a full disk, leaves libraries of zero bytes. The driver is loaded
//! and healthy; every container that mounts them fails with a message about some other file.
//!
//! What to do: `library-broken` is `isolate`: no job can use the GPUs, and neither a reset nor a reboot restores the
//! files. Reinstall the driver's packages (`apt install --reinstall libnvidia-compute-VERSION`,
//! `dnf reinstall nvidia-driver-cuda-libs`), check the disk that they were written to (`disk-space`), or reimage the
//! node. If only a link is dangling, `ldconfig` cures it.
//!
//! Not applicable without a GPU, or where the libraries are elsewhere and the driver answers through them.

use doctor_core::{
    observation::{Entity, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure},
    time::Span,
};

use crate::{
    gpu::{require_gpus, not_applicable},
    probe::{FileText, Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-libraries", "integrity of the driver's libraries").every(Span::hours(1));

const RULES: &str = r#"
rules = [
  { id = "gpu-libraries-broken", check = "gpu-libraries", event = "library-broken", reason = "library-broken",
    severity = "isolate", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_libraries.rs")), rules: RULES, probes, interpret };

/// The directories of Debian and Ubuntu, of Red Hat and SUSE, and of the GPU operator's container.
pub const LIBRARY_DIRS: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
];
const LIBRARY_PATTERNS: [&str; 2] = ["libcuda.so.*", "libnvidia-*.so.*"];

/// The first four bytes of an ELF file, in hexadecimal.
const ELF_MAGIC: &str = "7f454c46";

fn probes(_: &Params) -> Vec<Probe> {
    let files = LIBRARY_DIRS.iter().flat_map(|dir| LIBRARY_PATTERNS.map(|name| format!("{dir}/{name}")));
    let files = files.map(|pattern| Probe::Bytes { pattern, most: 4 });
    std::iter::once(Probe::gpu(&["uuid"])).chain(files).collect()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let Some((driver, lists)) = outputs.split_first() else {
        return Observation::Failed(ProbeFailure::new(FailureKind::Empty, "the probe returned no files"));
    };
    // A driver that does not answer may do so because of these files: check them all the same.
    let silent = match require_gpus(Some(driver)) {
        Ok(_) => None,
        Err(Observation::Failed(failure)) => Some(failure),
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let (mut intact, mut broken) = (0_u32, Vec::new());
    for list in lists {
        match list {
            ProbeOutput::Files(files) => {
                for file in files {
                    match library_fault(file) {
                        Ok(None) => intact += 1,
                        Ok(Some(fault)) => broken.push(format!("{} {fault}", file.path)),
                        Err(failure) => builder.unreadable(failure),
                    }
                }
            }
            ProbeOutput::Failed(failure) if failure.kind == FailureKind::Missing => {}
            ProbeOutput::Failed(failure) => builder.unreadable(failure.clone()),
            _ => builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, "the answer is not a list of files")),
        }
    }
    if intact > 0 || !broken.is_empty() {
        builder.metric(Metric::count("libraries_whole", Entity::node(), f64::from(intact)));
    }
    if !broken.is_empty() {
        let text = format!("{} broken driver libraries: {}", broken.len(), broken.join(", "));
        builder.event(Event::seen("library-broken", Entity::node(), text));
    }
    builder.build_or(silent.map_or_else(
        || not_applicable("libraries-elsewhere", "the driver's libraries are in none of the standard directories"),
        Observation::Failed,
    ))
}

/// Returns the fault of a library, if any.
fn library_fault(file: &FileText) -> Result<Option<&'static str>, ProbeFailure> {
    match &file.text {
        Ok(bytes) if bytes.trim().eq_ignore_ascii_case(ELF_MAGIC) => Ok(None),
        Ok(bytes) if bytes.trim().is_empty() => Ok(Some("is empty")),
        Ok(_) => Ok(Some("is not a library")),
        // The name was listed but the file could not be opened: a dangling link.
        Err(failure) if failure.kind == FailureKind::Missing => Ok(Some("is a dangling link")),
        Err(failure) => Err(failure.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        gpu::tests::{answer, deaf, none, t},
        classify_fixture::classify_outputs,
    };
    use proptest::prelude::*;

    const ML: &str = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";

    fn check(driver: ProbeOutput, first: ProbeOutput) -> Vec<String> {
        let mut outputs = vec![driver, first];
        outputs.resize(1 + LIBRARY_DIRS.len() * LIBRARY_PATTERNS.len(), found(&[]));
        classify_outputs(&CHECK, &outputs)
    }

    fn gpu() -> ProbeOutput {
        answer(&[&[("uuid", t("GPU-0"))]])
    }

    // soperator #2675.
    #[test]
    fn an_empty_library_is_reported() {
        assert_eq!(check(gpu(), found(&[(ML, "7f454c46")])), ["pass within-limits"]);
        let dead = || deaf(FailureKind::Failed, "libnvidia-ml.so.1: file too short");
        let line = ["fail library-broken isolate node"];
        assert_eq!(check(dead(), found(&[(ML, "")])), line);
        assert_eq!(check(dead(), found(&[(ML, "23212f62")])), line);
        let dangling = FileText { path: ML.to_owned(), text: Err(ProbeFailure::new(FailureKind::Missing, "no")) };
        assert_eq!(check(dead(), ProbeOutput::Files(vec![dangling])), line);
    }

    #[test]
    fn libraries_in_other_directories_are_not_missing() {
        assert_eq!(check(gpu(), found(&[])), ["not-applicable libraries-elsewhere"]);
        assert_eq!(check(none(), found(&[])), ["not-applicable no-gpu"]);
        assert_eq!(check(deaf(FailureKind::Missing, "no library"), found(&[])), ["inconclusive missing"]);
    }

    #[test]
    fn an_unreadable_input_does_not_pass() {
        let denied = FileText { path: ML.to_owned(), text: Err(ProbeFailure::new(FailureKind::Denied, "no")) };
        assert_eq!(check(gpu(), ProbeOutput::Files(vec![denied])), ["inconclusive denied"]);
        assert_eq!(check(gpu(), ProbeOutput::Text(String::new())), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive empty"]);
    }

    proptest! {
        #[test]
        fn only_an_elf_header_passes(bytes in "[0-9a-f]{0,10}") {
            prop_assert_eq!(check(gpu(), found(&[(ML, &bytes)])) == ["pass within-limits"], bytes == ELF_MAGIC);
        }
    }
}
