//! Gathers the facts about this machine: firmware, PCI bus, and the cloud if the firmware identifies one.

use std::{fs, path::Path};

use doctor_checks::probe::{FileText, Probe, ProbeOutput};
use doctor_core::{
    ids::Sku,
    sku_detection::{Cloud, MachineFacts},
};

use super::{MachineArgs, metadata};
use crate::runner::ProbeRunner;

const DMI: &str = "/sys/class/dmi/id";
const PCI: &str = "/sys/bus/pci/devices/*/uevent";
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Cache of the cloud's answer in the state directory: a machine's type does not change while it is up.
const CACHE_FILE: &str = "instance-type";

/// The facts, and notes on what could not be determined.
#[derive(Debug)]
pub struct GatheredFacts {
    pub machine: MachineFacts,
    pub notes: Vec<String>,
}

/// Gathers all facts that identify the machine type.
pub fn gather(args: &MachineArgs, state: Option<&Path>, runner: &dyn ProbeRunner) -> GatheredFacts {
    let mut machine = local_facts(args.label.clone(), runner);
    let mut notes = Vec::new();
    if let Some(cloud) = machine.cloud() {
        let boot = boot_id(runner);
        match instance_type(cloud, &args.metadata, state.zip(boot.as_deref())) {
            Ok(name) => machine.instance_type = Some(name),
            Err(error) => notes.push(format!("metadata: this is {cloud}, but {error}")),
        }
    }
    GatheredFacts { machine, notes }
}

/// Gathers the facts that the machine gives without its cloud.
pub fn local_facts(label: Option<Sku>, runner: &dyn ProbeRunner) -> MachineFacts {
    let dmi = |name: &str| line(runner, &format!("{DMI}/{name}"));
    let mut machine = MachineFacts {
        instance_type: None,
        declared_sku: label,
        vendor: dmi("sys_vendor"),
        product: dmi("product_name"),
        asset_tag: dmi("chassis_asset_tag"),
        gpu_ids: Vec::new(),
        gpu_names: Vec::new(),
    };
    match runner.run(&Probe::glob(PCI)) {
        // A container may not see the bus; the driver may know then.
        ProbeOutput::Files(files) if !files.is_empty() => machine.gpu_ids = gpu_ids(&files),
        _ => machine.gpu_names = gpu_names(runner),
    }
    machine
}

/// Returns the id of the current boot.
pub fn boot_id(runner: &dyn ProbeRunner) -> Option<String> {
    line(runner, BOOT)
}

fn line(runner: &dyn ProbeRunner, path: &str) -> Option<String> {
    match runner.run(&Probe::read(path)) {
        ProbeOutput::Text(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
        _ => None,
    }
}

/// Returns the cloud's answer that was cached during this boot.
pub fn cached_instance_type(state: &Path, boot: &str) -> Option<String> {
    let text = fs::read_to_string(state.join(CACHE_FILE)).ok()?;
    let (of, name) = text.trim_end().split_once('\n')?;
    (of == boot).then(|| name.to_owned())
}

/// Returns the instance type, from the cache in a state directory or from the cloud. `cache`: the directory and the
/// current boot.
///
/// # Errors
/// If the cloud does not answer.
pub fn instance_type(cloud: Cloud, url: &str, cache: Option<(&Path, &str)>) -> Result<String, metadata::MetadataError> {
    if let Some(name) = cache.and_then(|(state, boot)| cached_instance_type(state, boot)) {
        return Ok(name);
    }
    let name = metadata::instance_type(cloud, url)?;
    if let Some((state, boot)) = cache {
        // If it cannot be cached, the next call queries again.
        let _kept = fs::write(state.join(CACHE_FILE), format!("{boot}\n{name}\n"));
    }
    Ok(name)
}

/// Returns the PCI id, such as `10de:2330`, of every NVIDIA GPU. The kernel writes classes without leading zeros: 3xxxx
/// is a display controller.
fn gpu_ids(files: &[FileText]) -> Vec<String> {
    let id = |file: &FileText| {
        let text = file.text.as_ref().ok()?;
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
        let class = value("PCI_CLASS=")?;
        let id = value("PCI_ID=")?.to_ascii_lowercase();
        (class.len() == 5 && class.starts_with('3') && id.starts_with("10de:")).then_some(id)
    };
    files.iter().filter_map(id).collect()
}

fn gpu_names(runner: &dyn ProbeRunner) -> Vec<String> {
    match runner.run(&Probe::gpu(&["name"])) {
        ProbeOutput::Gpus(result) => result.gpus.iter().filter_map(|gpu| gpu.text("name")).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nvidia_display_controllers_are_gpus() {
        let file = |text: &str| FileText { path: String::new(), text: Ok(text.to_owned()) };
        let files = [
            // NVIDIA H200 with driver 570, 2026-11-15.
            file("DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2335\nPCI_SUBSYS_ID=10DE:18BE\n"),
            // Written by hand: an NVSwitch, a NIC, a management controller's display.
            file("DRIVER=nvidia-nvswitch\nPCI_CLASS=68000\nPCI_ID=10DE:22A3\n"),
            file("DRIVER=mlx5_core\nPCI_CLASS=20700\nPCI_ID=15B3:1021\n"),
            file("DRIVER=ast\nPCI_CLASS=30000\nPCI_ID=1A03:2000\n"),
            file(""),
        ];
        assert_eq!(gpu_ids(&files), ["10de:2335"]);
    }
}
