//! Gathers the facts about this machine: firmware, PCI bus, and the cloud if the firmware identifies one.

use std::{fs, path::Path};

use doctor_checks::probe::{FileText, Probe, ProbeOutput};
use doctor_core::sku_detection::{Cloud, MachineFacts};

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
    let line = |path: &str| match runner.run(&Probe::read(path)) {
        ProbeOutput::Text(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
        _ => None,
    };
    let dmi = |name: &str| line(&format!("{DMI}/{name}"));
    let mut machine = MachineFacts {
        instance_type: None,
        declared_sku: args.label.clone(),
        vendor: dmi("sys_vendor"),
        product: dmi("product_name"),
        asset_tag: dmi("chassis_asset_tag"),
        gpu_ids: Vec::new(),
        gpu_names: Vec::new(),
    };
    let mut notes = Vec::new();
    if let Some(cloud) = machine.cloud() {
        let boot = line(BOOT);
        match ask(cloud, &args.metadata, state.zip(boot.as_deref())) {
            Ok(name) => machine.instance_type = Some(name),
            Err(error) => notes.push(format!("metadata: this is {cloud}, but {error}")),
        }
    }
    match runner.run(&Probe::glob(PCI)) {
        // A container may not see the bus; the driver may know then.
        ProbeOutput::Files(files) if !files.is_empty() => machine.gpu_ids = gpu_ids(&files),
        _ => machine.gpu_names = gpu_names(runner),
    }
    GatheredFacts { machine, notes }
}

fn ask(cloud: Cloud, url: &str, memory: Option<(&Path, &str)>) -> Result<String, metadata::MetadataError> {
    let file = memory.map(|(state, _)| state.join(CACHE_FILE));
    let boot = memory.map(|(_, boot)| boot);
    if let (Some(file), Some(boot)) = (&file, boot)
        && let Ok(text) = fs::read_to_string(file)
        && let Some((of, name)) = text.trim_end().split_once('\n')
        && of == boot
    {
        return Ok(name.to_owned());
    }
    let name = metadata::instance_type(cloud, url)?;
    if let (Some(file), Some(boot)) = (file, boot) {
        // If it cannot be cached, the next call queries again.
        let _kept = fs::write(file, format!("{boot}\n{name}\n"));
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
