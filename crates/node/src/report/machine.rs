//! Describes the machine: serials, firmware, and its identifiers in the cloud.

use doctor_checks::{
    gpu::{FieldValue, Gpu},
    probe::{FileText, Probe, ProbeOutput},
};
use serde_json::{Map, Value, json};

use crate::{
    clock::now,
    hardware,
    profile::{self, MachineArgs, metadata},
    runner::ProbeRunner,
};

const GPU: [&str; 6] = ["name", "uuid", "serial", "board_part", "vbios_version", "inforom.image"];
const ADAPTERS: &str = "/sys/class/infiniband/*/";
const ADAPTER: [(&str, &str); 3] = [("firmware", "fw_ver"), ("board", "board_id"), ("model", "hca_type")];
const SYSTEM: [(&str, &str); 6] = [
    ("vendor", "/sys/class/dmi/id/sys_vendor"),
    ("product", "/sys/class/dmi/id/product_name"),
    ("product_serial", "/sys/class/dmi/id/product_serial"),
    ("bios", "/sys/class/dmi/id/bios_version"),
    ("bios_date", "/sys/class/dmi/id/bios_date"),
    ("kernel", "/proc/sys/kernel/osrelease"),
];

/// Collects the description. An unreadable part is replaced by the error or left out.
pub(super) fn describe(metadata: &str, runner: &dyn ProbeRunner) -> Value {
    let mut system = Map::new();
    for (name, path) in SYSTEM {
        if let ProbeOutput::Text(text) = runner.run(&Probe::read(path)) {
            system.insert(name.to_owned(), text.trim().into());
        }
    }
    let (driver, gpus) = gpus(runner);
    json!({
        "at": now(),
        "hardware": hardware::collect(runner),
        "system": system,
        "driver": driver,
        "gpus": gpus,
        "adapters": adapters(runner),
        "cloud": cloud(metadata, runner),
    })
}

fn gpus(runner: &dyn ProbeRunner) -> (Value, Vec<Value>) {
    let result = match runner.run(&Probe::gpu(&GPU)) {
        ProbeOutput::Gpus(result) => result,
        ProbeOutput::Failed(failure) => return (json!({ "not_read": failure }), Vec::new()),
        _ => return (Value::Null, Vec::new()),
    };
    let driver = match result.driver {
        Ok(driver) => json!({ "version": driver.version, "cuda": driver.cuda }),
        Err(failure) => json!({ "not_read": failure }),
    };
    (driver, result.gpus.iter().map(gpu).collect())
}

fn gpu(gpu: &Gpu) -> Value {
    let mut fields = Map::from_iter([("bus".to_owned(), Value::from(gpu.bus.as_str()))]);
    for (name, reading) in &gpu.fields {
        let value = match reading {
            FieldValue::Text(text) => text.as_str().into(),
            FieldValue::Number(number) => (*number).into(),
            FieldValue::NotSupported => Value::Null,
            FieldValue::Failed { text, .. } => json!({ "not_read": text }),
        };
        fields.insert(name.clone(), value);
    }
    fields.into()
}

/// RDMA adapters, by name.
fn adapters(runner: &dyn ProbeRunner) -> Value {
    let mut adapters = Map::new();
    for (key, file) in ADAPTER {
        let ProbeOutput::Files(files) = runner.run(&Probe::glob(&format!("{ADAPTERS}{file}"))) else { continue };
        for FileText { path, text } in files {
            let (Some(name), Ok(text)) = (path.rsplit('/').nth(1), text) else { continue };
            let adapter = adapters.entry(name).or_insert_with(|| json!({}));
            adapter[key] = text.trim().into();
        }
    }
    adapters.into()
}

/// Returns the cloud's identifiers, if the firmware identifies a cloud.
fn cloud(url: &str, runner: &dyn ProbeRunner) -> Value {
    let args = MachineArgs { metadata: url.to_owned(), ..MachineArgs::detect_all() };
    let facts = profile::gather(&args, None, runner);
    let Some(cloud) = facts.machine.cloud() else { return Value::Null };
    let mut document = Map::from_iter([("name".to_owned(), Value::from(cloud.code()))]);
    if let Some(kind) = facts.machine.instance_type {
        document.insert("instance_type".to_owned(), kind.into());
    }
    match metadata::instance_ids(cloud, url) {
        Ok(fields) => document.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value.into()))),
        Err(error) => drop(document.insert("not_read".to_owned(), error.to_string().into())),
    }
    document.into()
}
