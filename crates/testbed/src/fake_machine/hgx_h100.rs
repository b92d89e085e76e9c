//! The values that the fake machine reports while it is healthy.

use std::{collections::BTreeMap, path::PathBuf};

use super::{FakeGpu, Field, GPUS, gpu_bus};

pub(super) fn gpu(n: usize) -> FakeGpu {
    let mut fields = BTreeMap::new();
    for (name, value) in GPU_NUMBERS {
        fields.insert((*name).to_owned(), Field::Number(*value));
    }
    for (name, value) in [
        ("name", "NVIDIA H100 80GB HBM3".to_owned()),
        ("uuid", format!("GPU-{n:08x}-3140-7a11-38a1-18a59fc73b67")),
        ("serial", format!("16539241854{n:02}")),
        ("board_part", "692-2G520-0200-000".to_owned()),
        ("vbios_version", "96.00.74.00.01".to_owned()),
        ("inforom.image", "G520.0200.00.05".to_owned()),
        ("compute_cap", "9.0".to_owned()),
    ] {
        fields.insert(name.to_owned(), Field::Text(value));
    }
    fields.insert("minor_number".to_owned(), Field::Number(n as f64));
    for link in 0..18 {
        for (what, value) in [
            ("state", 1.0),
            ("remote_kind", 2.0),
            ("crc_flit_errors", 0.0),
            ("crc_data_errors", 0.0),
            ("replay_errors", 0.0),
            ("recovery_errors", 0.0),
        ] {
            fields.insert(format!("nvlink.{link}.{what}"), Field::Number(value));
        }
        let switch = format!("0000:{:02x}:00.0", 0x05 + link % 4);
        fields.insert(format!("nvlink.{link}.remote_bus"), Field::Text(switch));
    }
    for other in (0..GPUS).filter(|other| *other != n) {
        fields.insert(format!("topology.{other}.level"), Field::Number(50.0));
        fields.insert(format!("p2p.{other}.nvlink"), Field::Number(0.0));
    }
    let numbers =
        |table: &[(&str, f64)]| table.iter().map(|(name, value)| ((*name).to_owned(), Field::Number(*value))).collect();
    FakeGpu {
        bus: gpu_bus(n),
        handle: 0,
        hang: false,
        touches: PathBuf::new(),
        fields,
        load: numbers(GPU_LOAD),
        cuda: numbers(GPU_RATES),
    }
}

/// What the GPU reports while it multiplies: warm from the first moment, so that a load soon ends, and at its power limit.
const GPU_LOAD: &[(&str, f64)] = &[
    ("clocks.sm", 1755.0),
    ("clocks_event_reasons.active", 4.0),
    ("power.draw", 691.5),
    ("temperature.gpu", 61.0),
    ("temperature.memory", 74.0),
    ("temperature.gpu.tlimit", 26.0),
    ("utilization.gpu", 100.0),
];

/// Invented, in the order of magnitude of an H100: no such machine was measured.
const GPU_RATES: &[(&str, f64)] = &[
    ("gemm_bf16_flop_per_s", 7.0e14),
    ("gemm_bf16_warm_flop_per_s", 6.8e14),
    ("gemm_fp16_flop_per_s", 6.9e14),
    ("gemm_tf32_flop_per_s", 3.6e14),
    ("gemm_fp32_flop_per_s", 4.4e13),
    ("gemm_fp8_flop_per_s", 1.25e15),
    ("gemm_int8_flop_per_s", 1.2e15),
    ("memory_bytes_per_s", 2.9e12),
    ("h2d_bytes_per_s", 5.5e10),
    ("d2h_bytes_per_s", 5.5e10),
    ("d2d_bytes_per_s", 2.8e12),
    ("p2p_bytes_per_s", 3.8e11),
    ("nccl_busbw_bytes_per_s", 4.7e11),
    ("nccl_ib_loopback_busbw_bytes_per_s", 4.0e10),
    ("multiprocessors", 132.0),
];

const GPU_NUMBERS: &[(&str, f64)] = &[
    ("inforom.valid", 1.0),
    ("architecture", 9.0),
    ("persistence_mode", 1.0),
    ("mig.mode.current", 0.0),
    ("mig.mode.pending", 0.0),
    ("ecc.mode.current", 1.0),
    ("ecc.mode.pending", 1.0),
    ("compute_mode", 0.0),
    ("recovery_action", 0.0),
    ("ecc.errors.corrected.volatile.total", 0.0),
    ("ecc.errors.corrected.volatile.sram", 0.0),
    ("ecc.errors.corrected.volatile.dram", 0.0),
    ("ecc.errors.corrected.aggregate.total", 0.0),
    ("ecc.errors.corrected.aggregate.sram", 0.0),
    ("ecc.errors.corrected.aggregate.dram", 0.0),
    ("ecc.errors.uncorrected.volatile.total", 0.0),
    ("ecc.errors.uncorrected.volatile.sram", 0.0),
    ("ecc.errors.uncorrected.volatile.dram", 0.0),
    ("ecc.errors.uncorrected.aggregate.total", 0.0),
    ("ecc.errors.uncorrected.aggregate.sram", 0.0),
    ("ecc.errors.uncorrected.aggregate.dram", 0.0),
    ("ecc.sram.threshold_exceeded", 0.0),
    ("remapped_rows.correctable", 0.0),
    ("remapped_rows.uncorrectable", 0.0),
    ("remapped_rows.pending", 0.0),
    ("remapped_rows.failure", 0.0),
    ("clocks.sm", 1980.0),
    ("clocks.mem", 2619.0),
    ("clocks.max.sm", 1980.0),
    ("clocks.max.mem", 2619.0),
    ("clocks.applications.graphics", 1980.0),
    ("clocks.applications.memory", 2619.0),
    ("clocks.default_applications.graphics", 1980.0),
    ("clocks.default_applications.memory", 2619.0),
    ("clocks_event_reasons.active", 1.0),
    ("pstate", 0.0),
    ("violation.power", 0.0),
    ("violation.thermal", 0.0),
    ("utilization.gpu", 0.0),
    ("temperature.gpu", 32.0),
    ("temperature.memory", 41.0),
    ("temperature.gpu.tlimit", 55.0),
    ("temperature.slowdown", 89.0),
    ("temperature.shutdown", 95.0),
    ("power.draw", 71.2),
    ("power.limit", 700.0),
    ("power.default_limit", 700.0),
    ("power.max_limit", 700.0),
    ("memory.total", 85_520_809_984.0),
    ("memory.used", 0.0),
    ("memory.reserved", 548_601_856.0),
    ("pcie.link.gen.current", 5.0),
    ("pcie.link.gen.max", 5.0),
    ("pcie.link.width.current", 16.0),
    ("pcie.link.width.max", 16.0),
    ("pcie.replay", 0.0),
    ("fabric.state", 3.0),
    ("fabric.status", 0.0),
    ("fabric.health_mask", 0.0),
    ("fabric.clique", 0.0),
];

/// Files of /proc and /sys that every machine has. Uptime: ten days.
pub(super) const HOST_FILES: &[(&str, &str)] = &[
    ("/proc/uptime", "864000.00 3000000.00\n"),
    ("/proc/sys/kernel/random/boot_id", "5b1f0a7e-3c52-4f7e-9a53-0d4a6c1f2b11\n"),
    (
        "/proc/meminfo",
        "MemTotal:       2113409060 kB\nMemFree:        1900000000 kB\nMemAvailable:   2000000000 kB\nSwapTotal:             0 kB\nSwapFree:              0 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n",
    ),
    ("/proc/mounts", "/dev/md0 / ext4 rw,relatime 0 0\nproc /proc proc rw 0 0\nsysfs /sys sysfs rw 0 0\n"),
    ("/etc/fstab", "/dev/md0 / ext4 defaults 0 1\n"),
    ("/proc/self/mounts", "/dev/md0 / ext4 rw,relatime 0 0\nproc /proc proc rw 0 0\nsysfs /sys sysfs rw 0 0\n"),
    (
        "/proc/mdstat",
        "Personalities : [raid1]\nmd0 : active raid1 nvme1n1p2[1] nvme0n1p2[0]\n      3750606848 blocks super 1.2 [2/2] [UU]\n\nunused devices: <none>\n",
    ),
    ("/sys/block/md0/md/array_state", "clean\n"),
    ("/sys/block/md0/md/degraded", "0\n"),
    (
        "/proc/modules",
        "nvidia_uvm 1830912 8 - Live 0x0000000000000000 (OE)\nnvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)\nnvidia 14299136 900 nvidia_uvm,nvidia_peermem, Live 0x0000000000000000 (OE)\nmlx5_ib 458752 0 - Live 0x0000000000000000\nib_uverbs 180224 1 mlx5_ib, Live 0x0000000000000000\nib_core 458752 2 mlx5_ib,ib_uverbs, Live 0x0000000000000000\nmlx5_core 2228224 1 mlx5_ib, Live 0x0000000000000000\n",
    ),
    (
        "/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         unlimited            unlimited            bytes     \nMax open files            1048576              1048576              files     \n",
    ),
    (
        "/proc/buddyinfo",
        "Node 0, zone   Normal   1000   1000   1000   1000   1000   1000   1000   1000   1000   1000   90000\n",
    ),
    ("/proc/vmstat", "nr_free_pages 475000000\noom_kill 0\n"),
    ("/proc/sys/fs/file-nr", "5000\t0\t9223372036854775807\n"),
    ("/proc/sys/kernel/pid_max", "4194304\n"),
    ("/proc/sys/kernel/threads-max", "16000000\n"),
    ("/proc/loadavg", "1.00 1.00 1.00 2/3000 4242\n"),
    ("/proc/cmdline", "BOOT_IMAGE=/vmlinuz-6.8.0 root=/dev/md0 ro\n"),
    (
        "/proc/pressure/memory",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    ),
    (
        "/proc/pressure/io",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    ),
    ("/proc/pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"),
    ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
    ("/sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm \n"),
    ("/sys/devices/system/cpu/online", "0-3\n"),
    ("/sys/devices/system/cpu/present", "0-3\n"),
    ("/sys/devices/system/cpu/possible", "0-3\n"),
    ("/sys/devices/system/cpu/offline", "\n"),
    ("/sys/devices/system/edac/mc/mc0/ce_count", "0\n"),
    ("/sys/devices/system/edac/mc/mc0/ue_count", "0\n"),
    ("/sys/devices/system/edac/mc/mc0/dimm0/dimm_label", "CPU_SrcID#0_MC#0_Chan#0_DIMM#0\n"),
    ("/sys/devices/system/edac/mc/mc0/dimm0/dimm_ce_count", "0\n"),
    ("/sys/devices/system/edac/mc/mc0/dimm0/dimm_ue_count", "0\n"),
    ("/sys/fs/ext4/md0/errors_count", "0\n"),
    (
        "/dev/kmsg",
        "6,1,0,-;Linux version 6.8.0-1015 (buildd@host) #1 SMP\n6,2,1000000,-;nvidia: loading out-of-tree module taints kernel.\n",
    ),
    ("/dev/nvidiactl", ""),
    ("/dev/nvidia-uvm", ""),
    ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "\u{7f}ELF-made-by-hand"),
    ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "\u{7f}ELF-made-by-hand"),
];

pub(super) const PROFILE: &str = r#"
sku = "hgx-h100"
version = 1
[expect]
gpu_count = 8
nvlink_count = 18
nvswitch_count = 4
efa_devices = 0
gpu_memory_bytes = 85520809984
fabric_ports_active = 8
nvme_disks = 2
mem_total_bytes = 2164130877440
"#;
