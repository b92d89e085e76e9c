//! Which machine this is, whatever it is called today.

use doctor_checks::probe::{Probe, ProbeOutput};
use doctor_core::node::Hardware;

use crate::runner::ProbeRunner;

const BOARD: &str = "/sys/class/dmi/id/board_serial";
/// Virtual machines have no board of their own; this is what their host calls them.
const PRODUCT: &str = "/sys/class/dmi/id/product_uuid";
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const GPUS: &str = "/proc/driver/nvidia/gpus";

/// What can be learnt. A part that cannot be read is left out: a machine that tells nothing is known by its name.
pub fn collect(runner: &dyn ProbeRunner) -> Hardware {
    let line = |path: &str| match runner.run(&Probe::Read { path: path.to_owned() }) {
        ProbeOutput::Text(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
        _ => None,
    };
    let gpus = match runner.run(&Probe::List { path: GPUS.to_owned() }) {
        ProbeOutput::Names(names) => names,
        _ => Vec::new(),
    };
    let uuid = |gpu: String| line(&format!("{GPUS}/{gpu}/information")).and_then(|text| gpu_uuid(&text));
    Hardware {
        gpu_uuids: gpus.into_iter().filter_map(uuid).collect(),
        board_serial: line(BOARD).or_else(|| line(PRODUCT)),
        physical_host: None,
        boot_id: line(BOOT),
    }
}

/// `GPU UUID: GPU-5a4d8c0e-…` of the driver's information file. A GPU that fell off the bus shows question marks.
fn gpu_uuid(information: &str) -> Option<String> {
    let value = information.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?.trim();
    (value.starts_with("GPU-") && !value.contains('?')).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::FixtureRunner;

    #[test]
    fn a_machine_is_described_by_what_can_be_read_of_it() {
        let read = |path: &str, text: &str| (Probe::Read { path: path.to_owned() }, ProbeOutput::Text(text.to_owned()));
        let names = vec!["0000:18:00.0".to_owned(), "0000:2a:00.0".to_owned(), "0000:3b:00.0".to_owned()];
        let recorded = FixtureRunner::new([
            read(PRODUCT, "ec2f0e6d-0000-1111-2222-333344445555\n"),
            read(BOOT, "0f2a3c4d-boot\n"),
            (Probe::List { path: GPUS.to_owned() }, ProbeOutput::Names(names)),
            read(&format!("{GPUS}/0000:18:00.0/information"), "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-aaaa\n"),
            read(&format!("{GPUS}/0000:2a:00.0/information"), "GPU UUID: \t GPU-????????\n"),
        ]);
        let hardware = collect(&recorded);
        assert_eq!(hardware.gpu_uuids, ["GPU-aaaa"]);
        assert_eq!(hardware.board_serial.as_deref(), Some("ec2f0e6d-0000-1111-2222-333344445555"));
        assert_eq!(hardware.boot_id.as_deref(), Some("0f2a3c4d-boot"));
        assert_eq!(collect(&FixtureRunner::default()), Hardware::default());
    }
}
