//! The GPUs of this machine according to the PCI bus and to the driver, through NVML or, without its library,
//! `nvidia-smi`.

use std::{
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

use doctor_checks::{
    LIBRARY_PLACES,
    gpu::{Gpu, GpuQueryResult, normalize_bus_id},
    nvidia_smi,
    probe::ProbeOutput,
};
use doctor_core::observation::FailureKind;
use doctor_gpu::nvml::Nvml;

/// Further directories of driver libraries for containers: the GPU operator's on ARM, and Google's nodes.
const MORE_PLACES: [&str; 2] = ["/run/nvidia/driver/usr/lib/aarch64-linux-gnu", "/home/kubernetes/bin/nvidia/lib64"];
const NVIDIA: &str = "0x10de";
/// The upper byte of a PCI class: a display controller, with or without a connector.
const DISPLAY: &str = "0x03";

/// Queries the driver, which may hang. Calls `begins` with the index and bus id of each GPU before querying it.
pub(super) fn query_driver(
    root: &Path,
    library: &OsStr,
    fields: &[String],
    begins: &mut dyn FnMut(u32, &str),
) -> GpuQueryResult {
    let on_pci = on_pci(root);
    match Nvml::open(&resolve_library(root, library)) {
        Ok(nvml) => nvml.query(fields, on_pci, begins),
        Err(failure) => GpuQueryResult { on_pci, driver: Err(failure), gpus: Vec::new() },
    }
}

/// Whether a query may reach a driver, and so hang: its device exists, a GPU is on the bus for which a library would
/// load the driver, or the library is configured by path. Otherwise a library can at most report that there is no
/// driver.
pub(super) fn may_have_driver(root: &Path, library: &OsStr) -> bool {
    let has_device = || [root, Path::new("/")].iter().any(|root| root.join("dev/nvidiactl").exists());
    !is_name(library) || has_device() || !on_pci(root).is_empty()
}

fn is_name(library: &OsStr) -> bool {
    Path::new(library).components().count() == 1
}

/// Resolves a bare library name on the machine below `root`: a container image has no library, because it must match
/// the host's driver.
fn resolve_library(root: &Path, library: &OsStr) -> OsString {
    if root == Path::new("/") || !is_name(library) {
        return library.to_owned();
    }
    let mut candidates = LIBRARY_PLACES
        .iter()
        .chain(&MORE_PLACES)
        .map(|directory| root.join(directory.trim_start_matches('/')).join(library));
    let path = candidates.find(|candidate| candidate.exists());
    path.map_or_else(|| library.to_owned(), PathBuf::into_os_string)
}

/// Returns `output`, or the answer of `nvidia-smi` if there are GPUs but no library. `exec` runs a program within its
/// limits.
pub(super) fn or_nvidia_smi(
    output: ProbeOutput,
    fields: &[String],
    exec: impl FnOnce(&str, &[String]) -> ProbeOutput,
) -> ProbeOutput {
    let ProbeOutput::Gpus(GpuQueryResult { on_pci, driver: Err(failure), gpus }) = output else { return output };
    let is_worth_it = failure.kind == FailureKind::Missing && !on_pci.is_empty();
    let smi_output = is_worth_it.then(|| exec("nvidia-smi", &["-q".to_owned(), "-x".to_owned()]));
    let driver = match smi_output {
        Some(ProbeOutput::Ran { stdout, .. }) => match nvidia_smi::parse_query(&stdout, fields, on_pci.clone()) {
            Ok(result) => return ProbeOutput::Gpus(result),
            Err(_) => failure,
        },
        // Report a hung driver as such: the missing library is the lesser fault.
        Some(ProbeOutput::Failed(smi_failure))
            if matches!(smi_failure.kind, FailureKind::TimedOut | FailureKind::Abandoned) =>
        {
            smi_failure
        }
        _ => failure,
    };
    ProbeOutput::Gpus(GpuQueryResult { on_pci, driver: Err(driver), gpus })
}

/// Whether all GPUs have the same fields in the same order, as GPUs of one model do.
pub(super) fn are_alike(all: &GpuQueryResult) -> bool {
    let are =
        |one: &Gpu, other: &Gpu| one.fields.iter().map(|(name, _)| name).eq(other.fields.iter().map(|(name, _)| name));
    all.gpus.windows(2).all(|two| are(&two[0], &two[1]))
}

/// Reduces an answer to the requested fields. `alike` is the result of [`are_alike`].
pub(super) fn select_fields(all: &GpuQueryResult, alike: bool, patterns: &[String]) -> GpuQueryResult {
    let patterns: Vec<RequestedField<'_>> = patterns.iter().map(|name| RequestedField::parse(name)).collect();
    let mut positions = Vec::new();
    let mut gpus = Vec::with_capacity(all.gpus.len());
    for gpu in &all.gpus {
        // If alike, the positions in the first GPU hold for all.
        if gpus.is_empty() || !alike {
            positions.clear();
            for one in &patterns {
                let fitting = gpu.fields.iter().enumerate().filter(|(_, (name, _))| one.matches(name));
                positions.extend(fitting.map(|(position, _)| position));
            }
        }
        let fields = positions.iter().filter_map(|position| gpu.fields.get(*position).cloned()).collect();
        gpus.push(Gpu { index: gpu.index, bus: gpu.bus.clone(), fields });
    }
    GpuQueryResult { on_pci: all.on_pci.clone(), driver: all.driver.clone(), gpus }
}

/// A field name as a check requests it.
enum RequestedField<'a> {
    One(&'a str),
    /// `nvlink.*.state`: one field per link. If the driver knows none, it answers under this name itself.
    PerLink {
        whole: &'a str,
        family: &'a str,
        what: &'a str,
    },
}

impl<'a> RequestedField<'a> {
    fn parse(name: &'a str) -> Self {
        match name.split_once(".*.") {
            None => Self::One(name),
            Some((family, what)) => Self::PerLink { whole: name, family, what },
        }
    }

    /// Whether `name` is a field of this request.
    fn matches(&self, name: &str) -> bool {
        match self {
            Self::One(pattern) => name == *pattern,
            Self::PerLink { whole, family, what } => {
                let number = || name.strip_prefix(family)?.strip_prefix('.')?.strip_suffix(what)?.strip_suffix('.');
                name == *whole || number().is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
            }
        }
    }
}

fn on_pci(root: &Path) -> Vec<String> {
    let folder = root.join("sys/bus/pci/devices");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is = |path: &Path, file: &str, start: &str| {
        fs::read_to_string(path.join(file)).is_ok_and(|text| text.trim().starts_with(start))
    };
    let mut addresses: Vec<String> = entries
        .filter(|entry| is(&entry.path(), "vendor", NVIDIA) && is(&entry.path(), "class", DISPLAY))
        .filter_map(|entry| normalize_bus_id(&entry.file_name().to_string_lossy()))
        .collect();
    addresses.sort();
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_reduced_to_the_requested_fields() {
        for (pattern, name, expected) in [
            ("nvlink.*.state", "nvlink.17.state", true),
            ("nvlink.*.state", "nvlink.17.remote_bus", false),
            ("nvlink.*.state", "nvlink.x.state", false),
            ("nvlink.*.state", "nvlink.*.state", true),
            ("power.limit", "power.limit", true),
            ("power.limit", "power.default_limit", false),
        ] {
            assert_eq!(RequestedField::parse(pattern).matches(name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn gpus_are_found_among_other_pci_devices() {
        let root = tempfile::tempdir().unwrap();
        for (bus, vendor, class) in [
            ("0000:18:00.0", "0x10de\n", "0x030200\n"),
            ("0000:05:00.0", "0x10de\n", "0x068000\n"),
            ("0000:3b:00.0", "0x15b3\n", "0x020700\n"),
            ("0000:19:00.0", "0x10de\n", "0x030000\n"),
        ] {
            let folder = root.path().join("sys/bus/pci/devices").join(bus);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("vendor"), vendor).unwrap();
            fs::write(folder.join("class"), class).unwrap();
        }
        let lib = root.path().join("usr/lib64");
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("libdoctor.so.1"), "").unwrap();
        for (machine, library, expected) in [
            (root.path(), "libdoctor.so.1", lib.join("libdoctor.so.1")),
            (root.path(), "libdoctor-has-none.so.1", "libdoctor-has-none.so.1".into()),
            (root.path(), "/own/libdoctor.so.1", "/own/libdoctor.so.1".into()),
            (Path::new("/"), "libdoctor.so.1", "libdoctor.so.1".into()),
        ] {
            assert_eq!(resolve_library(machine, OsStr::new(library)), expected, "{}", machine.display());
        }
        assert_eq!(on_pci(root.path()), ["0000:18:00.0", "0000:19:00.0"]);
        let result = query_driver(root.path(), OsStr::new("libdoctor-has-none.so.1"), &[], &mut |_, _| {});
        assert!(result.driver.unwrap_err().text.contains("libdoctor-has-none.so.1"));
        let without = tempfile::tempdir().unwrap();
        for (machine, library, may) in [
            (root.path(), "libdoctor.so.1", true),
            (without.path(), "/own/libdoctor.so.1", true),
            (without.path(), "libdoctor.so.1", Path::new("/dev/nvidiactl").exists()),
        ] {
            assert_eq!(may_have_driver(machine, OsStr::new(library)), may, "{} {library}", machine.display());
        }
    }
}
