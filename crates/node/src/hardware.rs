//! Identifies the physical machine independently of its node name.

use doctor_checks::probe::{Probe, ProbeOutput};
use doctor_core::{hex, node::Hardware};

use crate::runner::ProbeRunner;

const BOARD: &str = "/sys/class/dmi/id/board_serial";
/// Virtual machines have no board serial; the hypervisor assigns this id.
const PRODUCT: &str = "/sys/class/dmi/id/product_uuid";
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const GPUS: &str = "/proc/driver/nvidia/gpus";
const POOL: &str = "/var/lib/hyperv/.kvp_pool_3";
const NAME: usize = 512;
const VALUE: usize = 2048;
/// A pool has about a dozen records.
const MAX_POOL_BYTES: u32 = 128 * 1024;

/// Collects the identity. Unreadable parts are left out: a machine without any is identified by its node name.
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
        physical_host: physical_host(runner),
        boot_id: line(BOOT),
    }
}

/// Returns the name of the physical host below an Azure VM, from Hyper-V's guest data: records of a 512-byte name and a
/// 2048-byte value, both zero-padded.
fn physical_host(runner: &dyn ProbeRunner) -> Option<String> {
    let ProbeOutput::Files(files) = runner.run(&Probe::Bytes { pattern: POOL.to_owned(), most: MAX_POOL_BYTES }) else {
        return None;
    };
    let bytes = hex::decode(files.first()?.text.as_ref().ok()?)?;
    let text = |field: &[u8]| String::from_utf8_lossy(field).trim_matches(['\0', ' ', '\n']).to_owned();
    let mut records = bytes.chunks_exact(NAME + VALUE).map(|record| (text(&record[..NAME]), text(&record[NAME..])));
    let (_, host) = records.find(|(name, _)| name == "PhysicalHostNameFullyQualified")?;
    Some(host).filter(|host| !host.is_empty() && host.len() <= 256 && !host.chars().any(char::is_control))
}

/// Parses `GPU UUID: GPU-5a4d8c0e-…` of the driver's information file. A GPU that fell off the bus shows question
/// marks.
fn gpu_uuid(information: &str) -> Option<String> {
    let value = information.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?.trim();
    (value.starts_with("GPU-") && !value.contains('?')).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::FixtureRunner;

    #[test]
    fn hardware_has_the_fields_that_can_be_read() {
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
        assert_eq!(hardware.physical_host, None);
        assert_eq!(hardware.gpu_uuids, ["GPU-aaaa"]);
        assert_eq!(hardware.board_serial.as_deref(), Some("ec2f0e6d-0000-1111-2222-333344445555"));
        assert_eq!(hardware.boot_id.as_deref(), Some("0f2a3c4d-boot"));
        assert_eq!(collect(&FixtureRunner::default()), Hardware::default());
    }
    #[test]
    fn an_azure_machine_has_its_physical_host() {
        let pool = |records: &[(&str, &str)]| {
            let mut bytes = Vec::new();
            for (name, value) in records {
                bytes.extend(format!("{name:\0<512}{value:\0<2048}").into_bytes());
            }
            let digits = hex::encode(&bytes);
            let file = doctor_checks::probe::FileText { path: POOL.to_owned(), text: Ok(digits) };
            let probe = Probe::Bytes { pattern: POOL.to_owned(), most: MAX_POOL_BYTES };
            collect(&FixtureRunner::new([(probe, ProbeOutput::Files(vec![file]))])).physical_host
        };
        let host = ("PhysicalHostNameFullyQualified", "MNZ20-0123.example");
        assert_eq!(pool(&[("HostName", "x"), host]).as_deref(), Some("MNZ20-0123.example"));
        assert_eq!(pool(&[("HostName", "x")]), None);
        assert_eq!(pool(&[]), None);
    }
}
