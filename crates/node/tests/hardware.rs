//! Runs the real program on a simulated machine with planted faults: each is found on its entity with its severity, and
//! nothing else is.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use doctor_testbed::fake_machine::{FakeMachine, GPUS, InstalledMachine, fake_nvidia_library, gpu_pci, ib};

/// A name, the fault, and the expected findings: `CHECK REASON SEVERITY ENTITY`.
struct Fault {
    name: &'static str,
    inject: fn(FakeMachine) -> FakeMachine,
    expected: &'static [&'static str],
}

const fn fault(name: &'static str, inject: fn(FakeMachine) -> FakeMachine, expected: &'static [&'static str]) -> Fault {
    Fault { name, inject, expected }
}

/// Faults that the first run finds.
const FAULTS: &[Fault] = &[
    // GPU memory
    fault(
        "a row waits for a reset",
        |m| m.gpu(3, "remapped_rows.pending", 1.0),
        &["gpu-row-remap row-remap-pending reset gpu:0000:48:00.0"],
    ),
    fault(
        "no spare row is left",
        |m| m.gpu(0, "remapped_rows.failure", 1.0),
        &["gpu-row-remap row-remap-failed isolate gpu:0000:18:00.0"],
    ),
    fault(
        "many rows were exchanged",
        |m| m.gpu(7, "remapped_rows.uncorrectable", 600.0),
        &["gpu-row-remap row-remap-many monitor gpu:0000:88:00.0"],
    ),
    fault(
        "an uncorrected error since the reset",
        |m| {
            m.gpu(2, "ecc.errors.uncorrected.volatile.total", 1.0)
                .gpu(2, "ecc.errors.uncorrected.volatile.dram", 1.0)
                .gpu(2, "ecc.errors.uncorrected.aggregate.total", 1.0)
                .gpu(2, "ecc.errors.uncorrected.aggregate.dram", 1.0)
        },
        &["gpu-ecc-volatile ecc-uncorrected reset gpu:0000:38:00.0"],
    ),
    fault(
        "the SRAM threshold is exceeded",
        |m| m.gpu(5, "ecc.sram.threshold_exceeded", 1.0),
        &["gpu-ecc-sram sram-threshold isolate gpu:0000:68:00.0"],
    ),
    fault(
        "SRAM corrects very often",
        |m| {
            m.gpu(1, "ecc.errors.corrected.volatile.sram", 20_000.0).gpu(
                1,
                "ecc.errors.corrected.volatile.total",
                20_000.0,
            )
        },
        &["gpu-ecc-corrected ecc-corrected-sram monitor gpu:0000:28:00.0"],
    ),
    fault(
        "ECC is to be switched off",
        |m| m.gpu(4, "ecc.mode.pending", 0.0),
        &["gpu-ecc-mode ecc-mode-pending monitor gpu:0000:58:00.0"],
    ),
    fault(
        "memory is missing",
        |m| m.gpu(6, "memory.total", 64e9),
        &["gpu-memory-size gpu-memory-small isolate gpu:0000:78:00.0"],
    ),
    // GPU presence and driver
    fault("a GPU is lost", |m| m.gpu_lost(3, 15), &["gpu-presence gpu-lost reboot gpu:0000:48:00.0"]),
    fault("a GPU needs a reset", |m| m.gpu_lost(3, 16), &["gpu-presence gpu-needs-reset reset gpu:0000:48:00.0"]),
    fault("driver and library differ", |m| m.driver_fails(18), &["gpu-driver driver-mismatch reboot node"]),
    fault("the driver is not loaded", |m| m.driver_fails(9), &["gpu-driver driver-not-loaded reboot node"]),
    fault(
        "the infoROM is corrupt",
        |m| m.gpu(2, "inforom.valid", 0.0),
        &["gpu-inforom inforom-corrupt isolate gpu:0000:38:00.0"],
    ),
    fault(
        "one VBIOS is another",
        |m| m.gpu_text(6, "vbios_version", "96.00.61.00.01"),
        &["gpu-versions vbios-differs monitor gpu:0000:78:00.0"],
    ),
    fault(
        "persistence mode is off",
        |m| (0..GPUS).fold(m, |m, n| m.gpu(n, "persistence_mode", 0.0)),
        &[
            "gpu-persistence persistence-off monitor gpu:0000:18:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:28:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:38:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:48:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:58:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:68:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:78:00.0",
            "gpu-persistence persistence-off monitor gpu:0000:88:00.0",
        ],
    ),
    fault(
        "MIG is on for one GPU",
        |m| m.gpu(1, "mig.mode.current", 1.0).gpu(1, "mig.mode.pending", 1.0),
        &["gpu-mig mig-mixed monitor node"],
    ),
    fault(
        "MIG waits for a reset",
        |m| m.gpu(1, "mig.mode.pending", 1.0),
        &["gpu-mig mig-pending monitor gpu:0000:28:00.0"],
    ),
    fault(
        "the driver asks for a reset",
        |m| m.gpu(0, "recovery_action", 1.0),
        &["gpu-recovery-action recovery-reset reset gpu:0000:18:00.0"],
    ),
    fault(
        "the driver asks for a reboot",
        |m| m.gpu(0, "recovery_action", 2.0),
        &["gpu-recovery-action recovery-reboot reboot gpu:0000:18:00.0"],
    ),
    fault(
        "a context has no process",
        |m| m.gpu(4, "process.0.pid", 31_337.0).gpu(4, "process.0.memory", 1e9),
        &["gpu-processes gpu-process-ghost reset gpu:0000:58:00.0"],
    ),
    // Heat, power, clocks
    fault(
        "hot",
        |m| m.gpu(5, "temperature.gpu.tlimit", 1.0).gpu(5, "temperature.gpu", 88.0),
        &["gpu-temperature gpu-hot monitor gpu:0000:68:00.0"],
    ),
    fault(
        "hot memory",
        |m| m.gpu(5, "temperature.memory", 99.0),
        &["gpu-memory-temperature gpu-memory-hot monitor gpu:0000:68:00.0"],
    ),
    fault(
        "the hardware slows down for heat",
        |m| m.gpu(2, "clocks_event_reasons.active", f64::from(0x40 | 0x8)),
        &["gpu-throttle thermal-slowdown monitor gpu:0000:38:00.0"],
    ),
    fault(
        "the power brake is on",
        |m| m.gpu(2, "clocks_event_reasons.active", f64::from(0x80 | 0x8)),
        &["gpu-power-brake power-brake monitor gpu:0000:38:00.0"],
    ),
    fault(
        "the power limit was lowered",
        |m| m.gpu(3, "power.limit", 400.0),
        &["gpu-power-limit power-limit-low monitor gpu:0000:48:00.0"],
    ),
    fault(
        "application clocks were lowered",
        |m| m.gpu(3, "clocks.applications.graphics", 1200.0),
        &["gpu-clocks clocks-lowered monitor gpu:0000:48:00.0"],
    ),
    // NVLink and NVSwitch
    fault("a link is down", |m| m.gpu(0, "nvlink.7.state", 0.0), &["nvlink-state nvlink-down reset gpu:0000:18:00.0"]),
    fault(
        "two GPUs do not reach each other",
        |m| m.gpu(0, "p2p.1.nvlink", 2.0).gpu(1, "p2p.0.nvlink", 2.0),
        &["nvlink-topology nvlink-no-path reset gpu:0000:18:00.0"],
    ),
    fault(
        "the fabric manager is dead",
        |m| m.without("/proc/412"),
        &["fabric-manager fabric-manager-down reboot service:nvidia-fabricmanager"],
    ),
    fault(
        "the fabric is not ready",
        |m| m.gpu(6, "fabric.state", 2.0),
        &["gpu-fabric fabric-not-ready reset gpu:0000:78:00.0"],
    ),
    // PCIe
    fault(
        "a GPU has half its lanes",
        |m| m.gpu(4, "pcie.link.width.current", 8.0).with(&gpu_pci(4, "current_link_width"), "8\n"),
        &["gpu-pcie pcie-width reboot gpu:0000:58:00.0"],
    ),
    // InfiniBand
    fault(
        "a port is down",
        |m| m.with(&ib(2, "ports/1/state"), "1: DOWN\n").with(&ib(2, "ports/1/phys_state"), "3: Disabled\n"),
        &["ib-count ib-count-wrong isolate node", "ib-ports port-unused monitor link:mlx5_2/1"],
    ),
    fault(
        "a port is slow",
        |m| m.with(&ib(5, "ports/1/rate"), "200 Gb/sec (4X HDR)\n"),
        &["ib-rate port-slow isolate link:mlx5_5/1"],
    ),
    fault(
        "one firmware is another",
        |m| m.with(&ib(1, "fw_ver"), "28.36.1010\n"),
        &["ib-firmware firmware-differs monitor nic:mlx5_1"],
    ),
    // Host
    fault(
        "a slow clock",
        |m| m.with("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
        &["clock-source clock-source-slow monitor node"],
    ),
    fault(
        "a processor is offline",
        |m| m.with("/sys/devices/system/cpu/online", "0-2\n").with("/sys/devices/system/cpu/offline", "3\n"),
        &["cpu-online cpu-offline monitor node"],
    ),
    fault(
        "the governor saves power",
        |m| m.with("/sys/devices/system/cpu/cpufreq/policy1/scaling_governor", "powersave\n"),
        &["cpu-governor governor-slow monitor node"],
    ),
    fault(
        "memory is gone",
        |m| {
            m.with(
                "/proc/meminfo",
                "MemTotal:       1900000000 kB\nMemFree:        1800000000 kB\nMemAvailable:   1850000000 kB\n",
            )
        },
        &["memory memory-small isolate node"],
    ),
    fault(
        "a file system is read-only",
        |m| m.with("/proc/mounts", "/dev/md0 / ext4 ro,relatime 0 0\n"),
        &["mounts mount-read-only reboot mount:/"],
    ),
    fault(
        "a disk has left its mirror",
        |m| {
            m.with("/proc/mdstat", "Personalities : [raid1]\nmd0 : active raid1 nvme1n1p2[1](F) nvme0n1p2[0]\n      3750606848 blocks super 1.2 [2/1] [U_]\n\nunused devices: <none>\n").with("/sys/block/md0/md/degraded", "1\n")
        },
        &["raid raid-degraded monitor disk:md0"],
    ),
    fault(
        "a disk does not answer",
        |m| m.with("/sys/devices/pci0000:c0/0000:c0:01.0/0000:c2:00.0/nvme/nvme1/state", "dead\n"),
        &["nvme-state nvme-dead isolate disk:nvme1"],
    ),
    fault(
        "memory cannot be locked",
        |m| {
            m.with("/proc/self/limits", "Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         65536                65536                bytes     \n")
        },
        &["memlock memlock-small monitor node"],
    ),
    fault(
        "a process hangs in the driver",
        |m| {
            m.with_new(
                "/proc/4242/stat",
                "4242 (nvidia-smi) D 1 4242 4242 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 80000000 3149824 384",
            )
            .with_new("/proc/4242/wchan", "os_acquire_rwlock_write")
        },
        &["processes-stuck nvidia-stuck reboot node"],
    ),
    // Kernel log
    fault(
        "fallen off the bus",
        |m| {
            m.kernel_message(
                "NVRM: Xid (PCI:0000:48:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            )
        },
        &["gpu-xid xid-79 reboot gpu:0000:48:00.0"],
    ),
    fault(
        "a double-bit error",
        |m| m.kernel_message("NVRM: Xid (PCI:0000:48:00): 48, pid=1234, name=python, DBE (double bit error)"),
        &["gpu-xid xid-48 reset gpu:0000:48:00.0"],
    ),
    fault(
        "an uncontained error",
        |m| m.kernel_message("NVRM: Xid (PCI:0000:28:00): 95, pid=77, Uncontained: FBHUB. RST: Yes, D-RST: No"),
        &["gpu-xid xid-95 reset gpu:0000:28:00.0"],
    ),
    fault(
        "the GSP does not answer",
        |m| {
            m.kernel_message("NVRM: Xid (PCI:0000:28:00): 119, pid=77, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU2 GSP!")
        },
        &["gpu-xid xid-119 reset gpu:0000:28:00.0"],
    ),
    fault(
        "a switch fails",
        |m| {
            m.kernel_message(
                "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 22012, Fatal, Link 32 minion link NA interrupt",
            )
        },
        &["nvswitch-sxid sxid-22012 reboot switch:0000:06:00.0"],
    ),
    fault(
        "a machine check",
        |m| m.kernel_message("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400"),
        &["kernel-log machine-check reboot node"],
    ),
    fault(
        "a file system is damaged",
        |m| {
            m.kernel_message(
                "EXT4-fs error (device md0): ext4_lookup:1855: inode #2: comm ls: deleted inode referenced",
            )
        },
        &["kernel-log file-system-error reboot disk:md0"],
    ),
    fault(
        "the kernel is damaged",
        |m| m.kernel_message("BUG: unable to handle page fault for address: ffffb0a1c0de0000"),
        &["kernel-log kernel-oops reboot node"],
    ),
    fault(
        "a task hangs",
        |m| m.kernel_message("INFO: task dd:4242 blocked for more than 120 seconds."),
        &["kernel-log hung-task monitor node"],
    ),
    fault(
        "a processor is stuck",
        |m| m.kernel_message("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]"),
        &["kernel-log soft-lockup monitor node"],
    ),
    fault(
        "memory ran out",
        |m| m.kernel_message("Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB"),
        &["kernel-log oom-kill monitor node"],
    ),
    fault(
        "a disk fails to read",
        |m| m.kernel_message("I/O error, dev nvme0n1, sector 12345 op 0x0:(READ) flags 0x0"),
        &["kernel-log disk-error monitor disk:nvme0n1"],
    ),
    fault(
        "a network card is lost",
        |m| {
            m.kernel_message(
                "mlx5_core 0000:2a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
            )
        },
        &["nic-log nic-health-lost reboot nic:mlx5_1"],
    ),
];

/// Faults that are found when counters have grown since the previous run.
const GROWING: &[Fault] = &[
    fault(
        "a link went down",
        |m| m.with(&ib(0, "ports/1/counters/link_downed"), "1\n"),
        &["ib-counters link-downed monitor link:mlx5_0/1"],
    ),
    fault(
        "symbol errors",
        |m| m.with(&ib(3, "ports/1/counters/symbol_error"), "500000\n"),
        &["ib-counters symbol-errors isolate link:mlx5_3/1"],
    ),
    fault(
        "link integrity errors",
        |m| m.with(&ib(3, "ports/1/counters/local_link_integrity_errors"), "3\n"),
        &["ib-counters link-integrity-errors isolate link:mlx5_3/1"],
    ),
    fault(
        "memory gave wrong data",
        |m| {
            m.with("/sys/devices/system/edac/mc/mc0/dimm0/dimm_ue_count", "1\n")
                .with("/sys/devices/system/edac/mc/mc0/ue_count", "1\n")
        },
        &["edac memory-uncorrected reboot dimm:CPU_SrcID#0_MC#0_Chan#0_DIMM#0"],
    ),
    fault(
        "the bus gave a fatal error",
        |m| m.with(&gpu_pci(2, "aer_dev_fatal"), "RxErr 0\nTOTAL_ERR_FATAL 1\n"),
        &["pcie-aer pcie-fatal isolate gpu:0000:38:00.0"],
    ),
    fault(
        "a file system finds errors",
        |m| m.with("/sys/fs/ext4/md0/errors_count", "4\n"),
        &["fs-errors file-system-errors-grow reboot disk:md0"],
    ),
];

#[test]
fn a_healthy_machine_has_no_findings() {
    let machine = install(&FakeMachine::hgx_h100());
    for _run in 0..2 {
        let results = machine.run_check();
        assert_eq!(results.failing, [""; 0]);
        assert_eq!(results.inconclusive, [""; 0]);
        assert!(results.passing.len() >= 40, "{:?}", results.passing);
    }
}

#[test]
fn every_injected_fault_is_found_at_its_entity_without_false_alarms() {
    assert!(FAULTS.len() + GROWING.len() >= 60, "{}", FAULTS.len() + GROWING.len());
    let mut mismatches = String::new();
    for fault in FAULTS {
        let results = install(&(fault.inject)(FakeMachine::hgx_h100())).run_check();
        compare(&mut mismatches, fault, &results.failing);
    }
    for fault in GROWING {
        let machine = install(&FakeMachine::hgx_h100());
        let before = machine.run_check();
        assert_eq!(before.failing, [""; 0]);
        machine.replace(&(fault.inject)(FakeMachine::hgx_h100()));
        compare(&mut mismatches, fault, &machine.run_check().failing);
    }
    assert!(mismatches.is_empty(), "{mismatches}");
}

/// A recording of a real machine, and the program's findings there.
#[derive(serde::Deserialize)]
struct Recording {
    files: BTreeMap<String, String>,
    links: BTreeMap<String, String>,
    scene: String,
    expected: String,
}

#[test]
fn a_recording_of_a_real_h200_is_judged_as_the_machine_itself_was() {
    let recording: Recording = serde_json::from_str(include_str!("recordings/h200.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let host_path = |path: &str| folder.path().join("root").join(path.trim_start_matches('/'));
    let create_parent = |path: &str| fs::create_dir_all(host_path(path).parent().unwrap()).unwrap();
    for (path, target) in &recording.links {
        create_parent(path);
        // The target is a directory, even if nothing in it was read.
        fs::create_dir_all(host_path(path).parent().unwrap().join(target)).unwrap();
        std::os::unix::fs::symlink(target, host_path(path)).unwrap();
    }
    for (path, text) in &recording.files {
        create_parent(path);
        fs::write(host_path(path), text).unwrap();
    }
    fs::write(folder.path().join("nvml.toml"), &recording.scene).unwrap();
    // The machine had just been booted, and the program at that time had neither the boot grace nor `job-ends`.
    let policy = "[agents]\nboot_grace = \"0s\"\n[tests.job-ends]\nenabled = false\n";
    fs::write(folder.path().join("policy.toml"), policy).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_doctor-node"));
    let output = Command::new(program)
        .args(["check", "--fast-only", "--json", "--root"])
        .arg(folder.path().join("root"))
        .arg("--policy")
        .arg(folder.path().join("policy.toml"))
        .arg("--nvml")
        .arg(library())
        .env("DOCTOR_FAKE_NVIDIA", folder.path().join("nvml.toml"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), recording.expected);
}

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(env!("CARGO_BIN_EXE_doctor-node"))))
}

fn install(machine: &FakeMachine) -> InstalledMachine {
    machine.install(Path::new(env!("CARGO_BIN_EXE_doctor-node")), library())
}

fn compare(mismatches: &mut String, fault: &Fault, found: &[String]) {
    if found != fault.expected {
        let _infallible =
            writeln!(mismatches, "{}:\n  expected {:?}\n  found    {found:?}", fault.name, fault.expected);
    }
}
