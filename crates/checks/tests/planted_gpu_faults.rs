//! Runs all GPU checks on one simulated machine: a healthy one has no finding and no inconclusive result, and each
//! planted fault is found by the intended check and by no other.
//!
//! The machine is an HGX H200. The GPU values are captured (nvidia-smi, driver 580.159.04, one H200, 2026-11-15);
//! NVLink, fabric and the number of GPUs are made by hand.

use std::collections::BTreeMap;

use doctor_checks::{
    CHECKS, Catalogue, Check, Depth, Params,
    gpu::{Driver, FieldValue, Gpu, GpuQueryResult},
    probe::{FileText, Probe, ProbeOutput, Process},
};
use doctor_core::{
    classify::classify,
    finding::Verdict,
    ids::{CheckId, Sku},
    observation::{FailureKind, ProbeFailure},
    policy::Policy,
    profile::Profile,
    time::Span,
};

const GPUS: u32 = 8;
const LINKS: u32 = 18;

#[derive(Clone)]
struct Machine {
    on_pci: Vec<String>,
    driver: Result<Driver, ProbeFailure>,
    gpus: Vec<(String, BTreeMap<String, FieldValue>)>,
    dev: Vec<String>,
    processes: Vec<(u32, &'static str, char)>,
    library: &'static str,
}

fn bus(index: u32) -> String {
    format!("0000:{:02x}:00.0", 0x18 + index)
}

fn number(value: f64) -> FieldValue {
    FieldValue::Number(value)
}

/// The fields that are not numbered, with the values of an H200.
fn captured() -> BTreeMap<String, FieldValue> {
    let texts = [
        ("name", "NVIDIA H200"),
        ("uuid", "GPU-00000000-1111-2222-3333-444444444444"),
        ("serial", "1650000000000"),
        ("board_part", "692-2G520-0282-001"),
        ("vbios_version", "96.00.A5.00.1A"),
        ("inforom.image", "G520.0282.02.02"),
    ];
    let numbers = [
        ("inforom.valid", 1.0),
        ("architecture", 9.0),
        ("persistence_mode", 1.0),
        ("mig.mode.current", 0.0),
        ("mig.mode.pending", 0.0),
        ("ecc.mode.current", 1.0),
        ("ecc.mode.pending", 1.0),
        ("compute_mode", 0.0),
        ("recovery_action", 0.0),
        ("ecc.errors.uncorrected.volatile.total", 0.0),
        ("ecc.errors.uncorrected.volatile.sram", 0.0),
        ("ecc.errors.uncorrected.volatile.dram", 0.0),
        ("ecc.errors.uncorrected.aggregate.sram", 0.0),
        ("ecc.errors.corrected.volatile.sram", 0.0),
        ("ecc.errors.corrected.volatile.dram", 0.0),
        ("ecc.sram.threshold_exceeded", 0.0),
        ("remapped_rows.correctable", 6.0),
        ("remapped_rows.uncorrectable", 0.0),
        ("remapped_rows.pending", 0.0),
        ("remapped_rows.failure", 0.0),
        ("clocks.sm", 360.0),
        ("clocks.max.sm", 1980.0),
        ("clocks.max.mem", 3201.0),
        ("clocks.applications.graphics", 1980.0),
        ("clocks.applications.memory", 3201.0),
        ("clocks.default_applications.graphics", 1980.0),
        ("clocks.default_applications.memory", 3201.0),
        ("clocks_event_reasons.active", 1.0),
        ("pstate", 0.0),
        ("utilization.gpu", 0.0),
        ("temperature.gpu", 40.0),
        ("temperature.memory", 40.0),
        ("temperature.gpu.tlimit", 47.0),
        ("power.draw", 97.39),
        ("power.limit", 700.0),
        ("power.default_limit", 700.0),
        ("memory.total", 143_771.0 * 1_048_576.0),
        ("pcie.link.gen.current", 5.0),
        ("pcie.link.gen.max", 5.0),
        ("pcie.link.width.current", 16.0),
        ("pcie.link.width.max", 16.0),
        ("pcie.replay", 0.0),
        // By hand: the capture is from a virtual machine, which does not see the fabric.
        ("fabric.state", 3.0),
        ("fabric.status", 0.0),
        ("fabric.health_mask", 0.0),
    ];
    let lacking = [
        "retired_pages.single_bit_ecc.count",
        "retired_pages.double_bit.count",
        "retired_pages.pending",
        "temperature.slowdown",
    ];
    let texts = texts.map(|(name, text)| (name.to_owned(), FieldValue::Text(text.to_owned())));
    let numbers = numbers.map(|(name, value)| (name.to_owned(), number(value)));
    let lacking = lacking.map(|name| (name.to_owned(), FieldValue::NotSupported));
    texts.into_iter().chain(numbers).chain(lacking).collect()
}

fn healthy() -> Machine {
    let gpu = |index: u32| {
        let mut fields = captured();
        fields.insert("minor_number".to_owned(), number(f64::from(index)));
        for link in 0..LINKS {
            let counters = ["crc_flit_errors", "crc_data_errors", "replay_errors", "recovery_errors"];
            fields.extend(counters.map(|what| (format!("nvlink.{link}.{what}"), number(0.0))));
            fields.insert(format!("nvlink.{link}.state"), number(1.0));
            fields.insert(format!("nvlink.{link}.remote_kind"), number(2.0));
        }
        for other in (0..GPUS).filter(|other| *other != index) {
            fields.insert(format!("p2p.{other}.nvlink"), number(0.0));
        }
        (bus(index), fields)
    };
    let devices = (0..GPUS).map(|index| format!("nvidia{index}"));
    let switches = (0..4).map(|index| format!("nvidia-nvswitch{index}"));
    Machine {
        on_pci: (0..GPUS).map(bus).collect(),
        driver: Ok(Driver { version: "580.159.04".into(), cuda: Some("13.0".into()), source: "nvml".into() }),
        gpus: (0..GPUS).map(gpu).collect(),
        dev: devices.chain(switches).chain(["nvidiactl".to_owned(), "nvidia-nvswitchctl".to_owned()]).collect(),
        processes: vec![
            (1, "systemd", 'S'),
            (2, "kthreadd", 'S'),
            (900, "nv-fabricmanage", 'S'),
            (901, "python3", 'R'),
        ],
        library: "7f454c46",
    }
}

impl Machine {
    /// Answers like the runner. Panics on a probe or field that the GPU checks are not expected to request.
    fn answer(&self, probe: &Probe) -> ProbeOutput {
        let missing = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "not there"));
        let text = |text: &str| ProbeOutput::Text(text.to_owned());
        match probe {
            Probe::Gpu { fields } => ProbeOutput::Gpus(self.gpu_answer(fields)),
            Probe::Processes => ProbeOutput::Processes(self.processes.iter().map(process).collect()),
            Probe::List { path } if path == "/dev" => ProbeOutput::Names(self.dev.clone()),
            Probe::List { path } if path == "/proc/driver/nvidia/gpus" => ProbeOutput::Names(self.on_pci.clone()),
            Probe::List { path } if path == "/sys/class/infiniband" => ProbeOutput::Names(vec!["mlx5_0".to_owned()]),
            Probe::List { .. } | Probe::DcgmHealth { .. } => missing(),
            Probe::Read { path } if path == "/proc/uptime" => text("360000.00 1.00\n"),
            Probe::Read { path } if path == "/proc/modules" => text("nvidia_peermem 16384 0 - Live 0x0\n"),
            Probe::Read { path } if path == "/proc/driver/nvidia/version" => text("NVIDIA UNIX x86_64 Kernel Module"),
            Probe::Read { .. } => missing(),
            Probe::Bytes { pattern, .. } if pattern == "/usr/lib/x86_64-linux-gnu/libcuda.so.*" => {
                let path = "/usr/lib/x86_64-linux-gnu/libcuda.so.1".to_owned();
                ProbeOutput::Files(vec![FileText { path, text: Ok(self.library.to_owned()) }])
            }
            Probe::Bytes { .. } => ProbeOutput::Files(Vec::new()),
            other => panic!("no GPU check uses {other:?}"),
        }
    }

    fn gpu_answer(&self, requested: &[String]) -> GpuQueryResult {
        let fields = |known: &BTreeMap<String, FieldValue>| {
            let mut found = Vec::new();
            for name in requested {
                match name.split_once(".*.") {
                    None => found.push((name.clone(), known.get(name).unwrap_or_else(|| panic!("{name}?")).clone())),
                    Some((family, what)) => found.extend((0..64).filter_map(|n| {
                        let name = format!("{family}.{n}.{what}");
                        Some((name.clone(), known.get(&name)?.clone()))
                    })),
                }
            }
            found
        };
        let gpus = self.gpus.iter().zip(0..).map(|((bus, known), index)| Gpu {
            index,
            bus: bus.clone(),
            fields: fields(known),
        });
        let gpus = if self.driver.is_ok() { gpus.collect() } else { Vec::new() };
        GpuQueryResult { on_pci: self.on_pci.clone(), driver: self.driver.clone(), gpus }
    }

    /// Returns `CHECK REASON SEVERITY ENTITY` for each finding, `CHECK ? REASON` for each inconclusive result.
    fn findings(&self) -> Vec<String> {
        let expect = [
            ("gpu_count", f64::from(GPUS)),
            ("nvlink_count", f64::from(LINKS)),
            ("nvswitch_count", 4.0),
            ("gpu_memory_bytes", 143_771.0 * 1_048_576.0),
        ];
        let expect = expect.map(|(name, value)| (name.to_owned(), value.into())).into();
        self.findings_with(Some(&Profile { sku: Sku::new("hgx-h200").unwrap(), version: 1, expect }))
    }

    fn findings_with(&self, profile: Option<&Profile>) -> Vec<String> {
        let rules = Catalogue::built_in().rules(&Policy::built_in()).unwrap();
        let mut lines = Vec::new();
        for (check, probes) in gpu_checks() {
            let outputs: Vec<ProbeOutput> = probes.iter().map(|probe| self.answer(probe)).collect();
            let observation = (check.interpret)(&Params::new(), &outputs);
            let id = CheckId::new(check.spec.id).unwrap();
            let judged = classify(&rules, profile, &id, &observation);
            let found = judged.findings.iter();
            lines.extend(found.map(|f| format!("{} {} {} {}", f.check, f.reason, f.severity, f.entity)));
            if judged.verdict == Verdict::Inconclusive {
                lines.push(format!("{id} ? {}", judged.reason));
            }
        }
        lines.sort();
        lines
    }

    fn with(&self, index: usize, field: &str, value: FieldValue) -> Self {
        let mut other = self.clone();
        let old = other.gpus[index].1.insert(field.to_owned(), value);
        assert!(old.is_some(), "this machine has no field {field}");
        other
    }
}

fn process(&(pid, name, state): &(u32, &'static str, char)) -> Process {
    let age = Span::hours(1);
    Process { pid, parent: 1, user: 0, name: name.to_owned(), state, age, wchan: None }
}

/// Checks that query the driver or its services. Checks of the kernel log and tests that load a GPU are excluded.
fn gpu_checks() -> impl Iterator<Item = (&'static Check, Vec<Probe>)> {
    CHECKS.iter().map(|check| (check, (check.probes)(&Params::new()))).filter(|(check, probes)| {
        let asks = probes.iter().any(|probe| matches!(probe, Probe::Gpu { .. }));
        let logs = probes.iter().any(|probe| matches!(probe, Probe::Kmsg));
        !logs && check.spec.depth == Depth::Quick && (asks || ["fabric-manager", "imex"].contains(&check.spec.id))
    })
}

#[test]
fn a_healthy_machine_has_no_finding_and_no_inconclusive_check() {
    assert!(gpu_checks().count() >= 35, "{}", gpu_checks().count());
    assert_eq!(healthy().findings(), [""; 0]);
}

#[test]
fn each_faulty_field_is_reported_once() {
    for (field, value, line) in [
        ("recovery_action", 1.0, "gpu-recovery-action recovery-reset reset"),
        ("recovery_action", 2.0, "gpu-recovery-action recovery-reboot reboot"),
        ("recovery_action", 4.0, "gpu-recovery-action recovery-drain-reset reset"),
        ("inforom.valid", 0.0, "gpu-inforom inforom-corrupt isolate"),
        ("persistence_mode", 0.0, "gpu-persistence persistence-off monitor"),
        ("mig.mode.pending", 1.0, "gpu-mig mig-pending monitor"),
        ("ecc.mode.pending", 0.0, "gpu-ecc-mode ecc-mode-pending monitor"),
        ("compute_mode", 2.0, "gpu-compute-mode compute-mode monitor"),
        ("ecc.errors.uncorrected.volatile.total", 1.0, "gpu-ecc-volatile ecc-uncorrected reset"),
        ("ecc.errors.corrected.volatile.sram", 1e5, "gpu-ecc-corrected ecc-corrected-sram monitor"),
        ("ecc.errors.corrected.volatile.dram", 1e8, "gpu-ecc-corrected ecc-corrected-dram monitor"),
        ("ecc.sram.threshold_exceeded", 1.0, "gpu-ecc-sram sram-threshold isolate"),
        ("remapped_rows.pending", 1.0, "gpu-row-remap row-remap-pending reset"),
        ("remapped_rows.failure", 1.0, "gpu-row-remap row-remap-failed isolate"),
        ("clocks.max.sm", 1755.0, "gpu-clocks clocks-differ monitor"),
        ("clocks.applications.graphics", 1200.0, "gpu-clocks clocks-lowered monitor"),
        ("clocks_event_reasons.active", 72.0, "gpu-throttle thermal-slowdown monitor"),
        ("clocks_event_reasons.active", 8.0, "gpu-throttle hw-slowdown monitor"),
        ("clocks_event_reasons.active", 136.0, "gpu-power-brake power-brake monitor"),
        ("temperature.gpu.tlimit", 1.0, "gpu-temperature gpu-hot monitor"),
        ("temperature.memory", 99.0, "gpu-memory-temperature gpu-memory-hot monitor"),
        ("power.limit", 400.0, "gpu-power-limit power-limit-low monitor"),
        ("memory.total", 8e10, "gpu-memory-size gpu-memory-small isolate"),
        ("pcie.link.width.current", 8.0, "gpu-pcie pcie-width reboot"),
        ("pcie.replay", 1e6, "gpu-pcie-replay pcie-replays isolate"),
        ("fabric.state", 1.0, "gpu-fabric fabric-not-ready reset"),
        ("fabric.status", 999.0, "gpu-fabric fabric-failed reset"),
        ("fabric.health_mask", 16.0, "gpu-fabric fabric-unhealthy reset"),
        ("nvlink.7.state", 0.0, "nvlink-state nvlink-down reset"),
        ("p2p.0.nvlink", 3.0, "nvlink-topology nvlink-no-path reset"),
    ] {
        // The first GPU is blamed for a pair.
        let blamed = bus(if field.starts_with("p2p") { 0 } else { 5 });
        let machine = healthy().with(5, field, number(value));
        assert_eq!(machine.findings(), [format!("{line} gpu:{blamed}")], "{field} {value}");
    }
    for (field, value, line) in [
        ("nvlink.3.crc_flit_errors", 1e9, "nvlink-crc nvlink-crc isolate"),
        ("nvlink.3.recovery_errors", 500.0, "nvlink-errors nvlink-errors monitor"),
    ] {
        let machine = healthy().with(2, field, number(value));
        assert_eq!(machine.findings(), [format!("{line} link:{}/3", bus(2))], "{field}");
    }
    let other = healthy().with(6, "vbios_version", FieldValue::Text("96.00.A0.00.01".to_owned()));
    assert_eq!(other.findings(), [format!("gpu-versions vbios-differs monitor gpu:{}", bus(6))]);
}

#[test]
fn each_missing_part_is_reported_once() {
    let machine = |change: fn(&mut Machine)| {
        let mut machine = healthy();
        change(&mut machine);
        machine.findings()
    };
    let findings = machine(|m| m.processes.retain(|(_, name, _)| *name != "nv-fabricmanage"));
    assert_eq!(findings, ["fabric-manager fabric-manager-down reboot service:nvidia-fabricmanager"]);
    let findings = machine(|m| m.dev.retain(|name| name != "nvidia-nvswitch2"));
    assert_eq!(findings, ["nvswitch nvswitch-count reboot node"]);
    let findings = machine(|m| m.dev.retain(|name| name != "nvidia3"));
    assert_eq!(findings, [format!("gpu-presence gpu-device-missing reboot gpu:{}", bus(3))]);
    let findings = machine(|m| m.library = "");
    assert_eq!(findings, ["gpu-libraries library-broken isolate node"]);
    // On no bus and in no driver: only the count shows it.
    let findings = machine(|m| {
        m.on_pci.pop();
        m.gpus.pop();
        m.dev.retain(|name| name != "nvidia7");
    });
    assert_eq!(findings, ["gpu-count gpu-count reboot node"]);
    let findings = machine(|m| {
        m.gpus.pop();
    });
    assert_eq!(findings, [format!("gpu-presence gpu-not-driven reboot gpu:{}", bus(7))]);
    let findings = machine(|m| {
        m.gpus[1].1.insert("process.0.pid".to_owned(), number(4242.0));
        m.gpus[2].1.insert("process.0.pid".to_owned(), number(901.0));
    });
    assert_eq!(findings, [format!("gpu-processes gpu-process-ghost reset gpu:{}", bus(1))]);
    let findings = machine(|m| {
        for (_, fields) in &mut m.gpus {
            (0..4).for_each(|link| drop(fields.insert(format!("nvlink.{link}.state"), FieldValue::Number(0.0))));
        }
    });
    assert_eq!(findings, ["nvlink-state nvlink-down-all reset node"]);
}

/// One cause is one finding; whatever could not be checked is inconclusive, and nothing passes because of it.
#[test]
fn a_lost_gpu_or_a_hung_driver_is_one_finding_and_other_checks_are_inconclusive() {
    let mut lost = healthy();
    for reading in lost.gpus[4].1.values_mut() {
        *reading = FieldValue::Failed { code: 15, text: "GPU is lost".to_owned() };
    }
    let findings = lost.findings();
    let (doubts, found): (Vec<_>, Vec<_>) = findings.iter().partition(|line| line.contains(" ? "));
    assert_eq!(found, [&format!("gpu-presence gpu-lost reboot gpu:{}", bus(4))]);
    assert!(doubts.len() > 20, "{doubts:?}");

    let mut hung = healthy();
    hung.driver = Err(ProbeFailure::new(FailureKind::TimedOut, "no answer within 10s"));
    let findings = hung.findings();
    let (doubts, found): (Vec<_>, Vec<_>) = findings.iter().partition(|line| line.contains(" ? "));
    assert_eq!(found, ["gpu-driver driver-hung reboot node"]);
    assert!(doubts.len() > 20, "{doubts:?}");
}

#[test]
fn no_gpu_check_fails_on_a_machine_without_gpus_unless_gpus_are_expected() {
    let mut bare = healthy();
    bare.on_pci.clear();
    bare.gpus.clear();
    bare.dev = vec!["null".to_owned()];
    bare.driver = Err(ProbeFailure::new(FailureKind::Missing, "libnvidia-ml.so.1: not found"));
    assert_eq!(bare.findings_with(None), [""; 0]);
    let findings = bare.findings();
    let (missing, found): (Vec<_>, Vec<_>) = findings.iter().partition(|line| line.contains(" ? "));
    assert_eq!(found, ["gpu-count gpu-count reboot node"]);
    assert!(missing.len() > 20 && missing.iter().all(|line| line.ends_with(" ? hardware-missing")), "{missing:?}");
}
