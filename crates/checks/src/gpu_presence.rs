//! gpu-presence: does the driver have every GPU on the PCI bus, and is each usable?
//!
//! What it does: compares three lists: the NVIDIA GPUs that the kernel found on the PCI bus, those that the driver
//! lists, and the device files `/dev/nvidia0`, `/dev/nvidia1`, … that programs open. Queries each GPU's name and
//! evaluates the error if the query fails. A GPU passed through to a virtual machine (`vfio-pci`) is ignored.
//!
//! Why it matters: a GPU that fell off the bus or that the driver abandoned is missing from every list that users see.
//! A job that needs eight waits forever or fails when NCCL counts its peers.
//!
//! What to do: `doctor why NODE` names the GPU by its bus id. `lspci -s BUS` shows whether the bus still answers
//! (`rev ff` means it does not), `journalctl -k -g "NVRM.*BUS"` why the driver abandoned it.
//! - `gpu-lost` is `reboot`: the driver had it and it fell off the bus (Xid 79). NVIDIA advises a restart, and the
//!   field diagnostic if it recurs; run `nvidia-bug-report.sh` first, the restart destroys the evidence.
//! - `gpu-not-driven` is `reboot`: it is on the bus and the driver does not have it. Often its initialisation failed
//!   (`RmInitAdapter failed` in the log). If a reboot does not cure it, open a repair case.
//! - `gpu-off-bus` is `reboot`: the driver has it and it is no longer on the bus.
//! - `gpu-needs-reset` is `reset`: the driver refuses work until `nvidia-smi --gpu-reset -i BUS`.
//! - `gpu-power-missing` is `isolate`: its power cable is not connected, which no restart cures.
//! - `gpu-interrupt` is `reboot`: the kernel delivers no interrupts for it.
//! - `gpu-device-missing` is `reboot`, confirmed by a second failure: there is no device file for it.
//!   `nvidia-modprobe -c MINOR` creates it immediately.
//!
//! `gpu-count` reports a GPU that is not even on the bus, using the machine profile. Not applicable without an NVIDIA
//! GPU on the bus.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{Gpu, GpuQueryResult, NVML_GPU_IS_LOST, NVML_RESET_REQUIRED, FieldValue, normalize_bus_id, no_gpu, read_failure},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-presence", "GPUs on the bus, in the driver and in /dev");

const RULES: &str = r#"
rules = [
  { id = "gpu-presence-power", check = "gpu-presence", event = "gpu-power-missing", reason = "gpu-power-missing",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "gpu-presence-lost", check = "gpu-presence", event = "gpu-lost", reason = "gpu-lost",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "gpu-presence-not-driven", check = "gpu-presence", event = "gpu-not-driven", reason = "gpu-not-driven",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "gpu-presence-off-bus", check = "gpu-presence", event = "gpu-off-bus", reason = "gpu-off-bus",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "gpu-presence-interrupt", check = "gpu-presence", event = "gpu-interrupt", reason = "gpu-interrupt",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "gpu-presence-device", check = "gpu-presence", event = "gpu-device-missing", reason = "gpu-device-missing",
    severity = "reboot", confirm = 2, text = "{entity}: {value}" },
  { id = "gpu-presence-reset", check = "gpu-presence", event = "gpu-needs-reset", reason = "gpu-needs-reset",
    severity = "reset", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_presence.rs")), rules: RULES, probes, interpret };

const FIELDS: [&str; 3] = ["name", "uuid", "minor_number"];

/// NVML's other error codes that describe the GPU's state.
const NVML_POWER: u32 = 8;
const NVML_INTERRUPT: u32 = 11;

fn probes(_: &Params) -> Vec<Probe> {
    let list = |path: &str| Probe::List { path: path.to_owned() };
    vec![Probe::gpu(&FIELDS), list("/dev"), list("/sys/bus/pci/drivers/vfio-pci")]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let answer = match outputs.first() {
        Some(ProbeOutput::Gpus(answer)) => answer,
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return could_not(FailureKind::Unparseable, "the probe returned no GPU data"),
    };
    if answer.on_pci.is_empty() && answer.gpus.is_empty() {
        return no_gpu();
    }
    // Without a driver no GPU is driven; gpu-driver reports that once, instead of once per GPU here.
    if let Err(failure) = &answer.driver {
        return Observation::Failed(failure.clone());
    }
    let guests = match outputs.get(2) {
        Some(ProbeOutput::Names(names)) => names.iter().filter_map(|name| normalize_bus_id(name)).collect(),
        // The driver does not exist: no GPU is passed through.
        Some(ProbeOutput::Failed(failure)) if failure.kind == FailureKind::Missing => Vec::new(),
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return could_not(FailureKind::Unparseable, "the answer for the devices of vfio-pci is not a list"),
    };
    let mut builder = ObservationBuilder::default();
    compare_bus_and_driver(answer, &guests, &mut builder);
    for gpu in &answer.gpus {
        report_gpu_error(gpu, &mut builder);
    }
    match outputs.get(1) {
        Some(ProbeOutput::Names(names)) => check_device_files(&answer.gpus, names, &mut builder),
        Some(ProbeOutput::Failed(failure)) => builder.unreadable(failure.clone()),
        _ => builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, "the answer for /dev is not a list")),
    }
    builder.build_or(no_gpu())
}

fn could_not(kind: FailureKind, text: &str) -> Observation {
    Observation::Failed(ProbeFailure::new(kind, text))
}

/// Compares the bus with the driver.
fn compare_bus_and_driver(answer: &GpuQueryResult, guests: &[String], builder: &mut ObservationBuilder) {
    let same = |text: &String| normalize_bus_id(text).unwrap_or_else(|| text.clone());
    let on_pci: Vec<String> = answer.on_pci.iter().map(same).filter(|bus| !guests.contains(bus)).collect();
    let driven: Vec<String> = answer.gpus.iter().map(|gpu| same(&gpu.bus)).collect();
    let nameless = driven.iter().any(String::is_empty);
    let count = |list: &[String]| list.len() as f64;
    builder.metric(Metric::count("gpus_on_pci", Entity::node(), count(&on_pci)));
    builder.metric(Metric::count("gpus_in_driver", Entity::node(), count(&driven)));
    // A GPU that does not even report its bus id may be any of those that seem to be missing.
    for bus in on_pci.iter().filter(|bus| !nameless && !driven.contains(bus)) {
        let entity = Entity::new(EntityKind::Gpu, bus.clone());
        builder.event(Event::seen("gpu-not-driven", entity, "GPU on the PCI bus, but not in the driver"));
    }
    // A GPU whose queries fail is reported by its error instead.
    let answers = |gpu: &&Gpu| !gpu.fields.iter().any(|(_, reading)| matches!(reading, FieldValue::Failed { .. }));
    for gpu in answer.gpus.iter().filter(answers) {
        let bus = same(&gpu.bus);
        if !bus.is_empty() && !on_pci.contains(&bus) {
            let text = "GPU off bus: in the driver, but not on the PCI bus";
            builder.event(Event::seen("gpu-off-bus", gpu.entity(), text));
        }
    }
}

/// Reports a GPU's error, if any. The worst error counts: one cause makes every field fail.
fn report_gpu_error(gpu: &Gpu, builder: &mut ObservationBuilder) {
    let error_text = |nvml_code: u32| {
        gpu.fields.iter().find_map(|(_, reading)| match reading {
            FieldValue::Failed { code, text } if *code == nvml_code => Some(text.clone()),
            _ => None,
        })
    };
    let known = [
        (NVML_GPU_IS_LOST, "gpu-lost"),
        (NVML_POWER, "gpu-power-missing"),
        (NVML_INTERRUPT, "gpu-interrupt"),
        (NVML_RESET_REQUIRED, "gpu-needs-reset"),
    ];
    match known.into_iter().find_map(|(nvml_code, code)| Some((code, error_text(nvml_code)?))) {
        Some((code, text)) => builder.event(Event::seen(code, gpu.entity(), format!("the driver reports: {text}"))),
        None => read_failure(gpu, &FIELDS).into_iter().for_each(|failure| builder.unreadable(failure)),
    }
}

fn check_device_files(gpus: &[Gpu], names: &[String], builder: &mut ObservationBuilder) {
    for gpu in gpus {
        let Some(minor) = gpu.number("minor_number") else { continue };
        let name = format!("nvidia{minor:.0}");
        if !names.contains(&name) {
            let text = format!("/dev/{name} is missing; programs cannot open the GPU");
            builder.event(Event::seen("gpu-device-missing", gpu.entity(), text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, deaf, lost, n, none, t},
        classify_fixture::classify_outputs,
    };

    fn names(names: &[&str]) -> ProbeOutput {
        ProbeOutput::Names(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn fields(minor: f64) -> Vec<(&'static str, FieldValue)> {
        vec![("name", t("NVIDIA H200")), ("uuid", t("GPU-0")), ("minor_number", n(minor))]
    }

    fn refusing(code: u32) -> Vec<(&'static str, FieldValue)> {
        FIELDS.map(|field| (field, FieldValue::Failed { code, text: "no".to_owned() })).to_vec()
    }

    /// The driver's GPUs, and further ones on the bus.
    fn check(gpus: &[Vec<(&str, FieldValue)>], also_on_pci: &[&str], guests: &ProbeOutput) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        let ProbeOutput::Gpus(mut answer) = answer(&gpus) else { panic!("gpus") };
        answer.on_pci.extend(also_on_pci.iter().map(|&bus| bus.to_owned()));
        classify_outputs(
            &CHECK,
            &[ProbeOutput::Gpus(answer), names(&["null", "nvidia0", "nvidia1", "nvidiactl"]), guests.clone()],
        )
    }

    fn no_vfio() -> ProbeOutput {
        ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no such directory"))
    }

    #[test]
    fn three_lists_that_agree_pass() {
        assert_eq!(check(&[fields(0.0), fields(1.0)], &[], &no_vfio()), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &[none(), names(&[]), no_vfio()]), ["not-applicable no-gpu"]);
    }

    #[test]
    fn a_gpu_missing_in_the_driver_is_reported_unless_passed_to_a_guest() {
        let two = [fields(0.0), fields(1.0)];
        assert_eq!(check(&two, &["0000:9b:00.0"], &no_vfio()), ["fail gpu-not-driven reboot gpu:0000:9b:00.0"]);
        let guest = names(&["bind", "new_id", "0000:9b:00.0"]);
        assert_eq!(check(&two, &["0000:9b:00.0"], &guest), ["pass within-limits"]);
    }

    #[test]
    fn each_nvml_error_has_its_reason_code() {
        for (code, line) in [
            (8, "fail gpu-power-missing isolate gpu:0000:19:00.0"),
            (11, "fail gpu-interrupt reboot gpu:0000:19:00.0"),
            (15, "fail gpu-lost reboot gpu:0000:19:00.0"),
            (16, "fail gpu-needs-reset reset gpu:0000:19:00.0"),
        ] {
            assert_eq!(check(&[fields(0.0), refusing(code)], &[], &no_vfio()), [line]);
        }
        assert_eq!(check(&[fields(0.0), refusing(999)], &[], &no_vfio()), ["inconclusive failed"]);
    }

    #[test]
    fn a_gpu_off_the_bus_and_a_missing_device_file_are_reported() {
        assert_eq!(
            check(&[fields(0.0), fields(5.0)], &[], &no_vfio()),
            ["fail gpu-device-missing reboot gpu:0000:19:00.0"]
        );
        let ProbeOutput::Gpus(mut result) = answer(&[&fields(0.0), &fields(1.0)]) else { panic!("gpus") };
        result.on_pci.truncate(1);
        let outputs = [ProbeOutput::Gpus(result), names(&["nvidia0", "nvidia1"]), no_vfio()];
        assert_eq!(classify_outputs(&CHECK, &outputs), ["fail gpu-off-bus reboot gpu:0000:19:00.0"]);
        let ProbeOutput::Gpus(mut lost) = answer(&[&fields(0.0), &refusing(15)]) else { panic!("gpus") };
        lost.on_pci.truncate(1);
        let outputs = [ProbeOutput::Gpus(lost), names(&["nvidia0"]), no_vfio()];
        assert_eq!(classify_outputs(&CHECK, &outputs), ["fail gpu-lost reboot gpu:0000:19:00.0"]);
    }

    #[test]
    fn a_gpu_without_a_bus_id_is_not_confused_with_another() {
        let ProbeOutput::Gpus(mut answer) = answer(&[&fields(0.0), &FIELDS.map(|field| (field, lost()))]) else {
            panic!("gpus")
        };
        answer.gpus[1].bus = String::new();
        let outputs = [ProbeOutput::Gpus(answer), names(&["nvidia0"]), no_vfio()];
        assert_eq!(classify_outputs(&CHECK, &outputs), ["fail gpu-lost reboot gpu:1"]);
    }

    #[test]
    fn an_unreadable_input_does_not_pass() {
        let healthy = answer(&[&fields(0.0)]);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "no"));
        assert_eq!(classify_outputs(&CHECK, &[healthy.clone(), denied.clone(), no_vfio()]), ["inconclusive denied"]);
        assert_eq!(classify_outputs(&CHECK, &[healthy, names(&["nvidia0"]), denied]), ["inconclusive denied"]);
        let dead = deaf(FailureKind::Failed, "Driver Not Loaded");
        assert_eq!(classify_outputs(&CHECK, &[dead, names(&[]), no_vfio()]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }
}
