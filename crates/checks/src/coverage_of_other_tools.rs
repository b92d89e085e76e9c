//! Maps what the health checks of other systems cover to the checks here, or gives the reason why there is none.
//!
//! The rows come from our survey of twelve systems (November 2026). A test verifies that every check named here exists.

/// One item that another system checks.
#[derive(Debug, Clone, Copy)]
pub struct PeerCoverageRow {
    pub area: &'static str,
    pub what: &'static str,
    pub coverage: Coverage,
}

#[derive(Debug, Clone, Copy)]
pub enum Coverage {
    /// Covered by these checks.
    Checked(&'static [&'static str]),
    /// Not covered by a check: the reason, or the test or controller function that covers it.
    NotChecked(&'static str),
}

use Coverage::{Checked, NotChecked};

const fn row(area: &'static str, what: &'static str, here: Coverage) -> PeerCoverageRow {
    PeerCoverageRow { area, what, coverage: here }
}

const GPU: &str = "GPU presence and identity";
const ECC: &str = "GPU memory";
const HEAT: &str = "Heat and throttling";
const LINK: &str = "NVLink, NVSwitch, fabric";
const PCIE: &str = "PCIe";
const NET: &str = "InfiniBand, RoCE, EFA, TCP";
const DISK: &str = "Storage";
const HOST: &str = "Processor, memory, system, services";

/// The rows, in the order of the survey.
pub static COVERAGE: &[PeerCoverageRow] = &[
    row(GPU, "number of GPUs", Checked(&["gpu-count", "gpu-presence"])),
    row(GPU, "driver and tools usable", Checked(&["gpu-driver", "gpu-presence", "gpu-inforom"])),
    row(GPU, "GPU lost or needing a reset", Checked(&["gpu-presence", "gpu-recovery-action", "gpu-xid"])),
    row(GPU, "infoROM", Checked(&["gpu-inforom"])),
    row(GPU, "VBIOS, driver and CUDA versions uniform", Checked(&["gpu-versions"])),
    row(GPU, "MIG mode", Checked(&["gpu-mig"])),
    row(GPU, "persistence mode", Checked(&["gpu-persistence"])),
    row(GPU, "application and SM clocks", Checked(&["gpu-clocks"])),
    row(GPU, "power state, auxiliary power", Checked(&["gpu-presence", "gpu-power-limit", "gpu-xid"])),
    row(GPU, "slowed by the power brake under load", Checked(&["gpu-power-brake"])),
    row(GPU, "processes left on an idle GPU", Checked(&["gpu-processes"])),
    row(GPU, "zombie and stuck processes of the driver", Checked(&["processes-stuck", "zombies"])),
    row(ECC, "uncorrected errors since the reset", Checked(&["gpu-ecc-volatile"])),
    row(ECC, "lifetime uncorrected SRAM errors", Checked(&["gpu-ecc-sram"])),
    row(ECC, "rate of corrected errors", Checked(&["gpu-ecc-corrected"])),
    row(ECC, "retired pages (before Ampere)", Checked(&["gpu-retired-pages"])),
    row(ECC, "row remapping pending", Checked(&["gpu-row-remap"])),
    row(ECC, "row remapping failed", Checked(&["gpu-row-remap"])),
    row(ECC, "rows remapped after uncorrectable errors", Checked(&["gpu-row-remap"])),
    row(ECC, "memory test", Checked(&["dl", "dcgm"])),
    row(HEAT, "temperature", Checked(&["gpu-temperature", "gpu-memory-temperature"])),
    row(HEAT, "reasons for throttling", Checked(&["gpu-throttle", "gpu-power-brake"])),
    row(HEAT, "thermal violations under load", Checked(&["dl", "dcgm"])),
    row(HEAT, "sustained stress", Checked(&["dl", "dcgm"])),
    row(LINK, "state of links", Checked(&["nvlink-state", "nvlink-count"])),
    row(LINK, "errors of links", Checked(&["nvlink-errors", "nvlink-crc"])),
    row(LINK, "topology matrix", Checked(&["nvlink-topology"])),
    row(LINK, "fabric manager", Checked(&["fabric-manager", "gpu-fabric"])),
    row(LINK, "IMEX", Checked(&["imex"])),
    row(LINK, "SXid of NVSwitches", Checked(&["nvswitch-sxid", "nvswitch"])),
    row(LINK, "peer memory", Checked(&["peermem"])),
    row(LINK, "NVLink bandwidth", NotChecked("occupies the GPU: needs a test, not a check")),
    row(PCIE, "generation and width", Checked(&["gpu-pcie", "pcie-link"])),
    row(PCIE, "bandwidth to and from the host", Checked(&["dl", "dcgm"])),
    row(PCIE, "replay counter", Checked(&["gpu-pcie-replay"])),
    row(PCIE, "ACS", Checked(&["pcie-acs"])),
    row(PCIE, "AER records of the kernel", Checked(&["pcie-aer", "kernel-log"])),
    row(
        PCIE,
        "order of devices against NCCL's topology file",
        NotChecked("the file is specific to the site: use a site command"),
    ),
    row(NET, "ports: number, state, rate", Checked(&["ib-ports", "ib-count", "ib-rate"])),
    row(NET, "dropped ports", Checked(&["ib-flaps", "ib-counters"])),
    row(NET, "flapping", Checked(&["ib-flaps", "net-link"])),
    row(NET, "error counters", Checked(&["ib-counters", "efa-counters", "net-link"])),
    row(NET, "records of the network driver", Checked(&["nic-log"])),
    row(NET, "firmware and OFED versions", Checked(&["ib-firmware"])),
    row(NET, "partition key", Checked(&["ib-pkey"])),
    row(NET, "loop-back bandwidth", Checked(&["fabric"])),
    row(NET, "NCCL over the network in one node", Checked(&["collective"])),
    row(NET, "EFA presence", Checked(&["efa-devices", "efa-count", "efa-provider"])),
    row(NET, "EFA loop-back", Checked(&["fabric"])),
    row(NET, "memory lock limit, gdrcopy", Checked(&["memlock", "kernel-modules"])),
    row(NET, "RoCE interfaces", Checked(&["roce"])),
    row(NET, "TCP mesh", NotChecked("involves other nodes: needs a test, not a check")),
    row(NET, "DNS, NTP, network latency", Checked(&["time-sync"])),
    row(DISK, "free space of local disks", Checked(&["disk-space"])),
    row(DISK, "inodes", Checked(&["disk-space"])),
    row(DISK, "mounts present and writable", Checked(&["mounts"])),
    row(DISK, "NVMe: number and health", Checked(&["nvme-count", "nvme-state", "nvme-health"])),
    row(DISK, "RAID", Checked(&["raid"])),
    row(DISK, "file-system errors in the kernel log", Checked(&["kernel-log", "fs-errors", "disk-errors"])),
    row(DISK, "performance", Checked(&["storage"])),
    row(DISK, "creating and deleting a volume", NotChecked("concerns the cluster, not a node")),
    row(HOST, "sockets, cores, threads", Checked(&["cpu-count", "cpu-online"])),
    row(HOST, "size of memory", Checked(&["memory"])),
    row(HOST, "DIMMs, ECC, machine checks", Checked(&["edac", "kernel-log"])),
    row(HOST, "governor, frequency, clock source", Checked(&["cpu-governor", "cpu-throttle", "clock-source"])),
    row(HOST, "fragmentation of memory", Checked(&["memory-fragmentation"])),
    row(HOST, "memory bandwidth", NotChecked("loads the CPU: needs a test, not a check")),
    row(HOST, "load, file handles, processes, zombies", Checked(&["limits", "zombies", "host-pressure"])),
    row(HOST, "time since boot", NotChecked("a recent boot is no fault; the policy has a boot grace period")),
    row(HOST, "OOM, lockups, hung tasks, panics", Checked(&["kernel-log", "oom"])),
    row(HOST, "kernel modules, command line, settings", Checked(&["kernel-modules", "kernel-settings"])),
    row(HOST, "services", Checked(&["services"])),
    row(HOST, "packages", NotChecked("needs the distribution's package manager: use a site command")),
    row(HOST, "authentication, certificates, directories", NotChecked("specific to the site: use a site command")),
    row(HOST, "user processes without a job", NotChecked("needs the scheduler: use its epilog")),
    row(HOST, "controllers of the scheduler", NotChecked("concerns the cluster, not a node")),
    row(HOST, "libraries of the driver", Checked(&["gpu-libraries"])),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_named_here_exists_and_no_row_is_empty() {
        for row in COVERAGE {
            match row.coverage {
                Checked(checks) => {
                    assert!(!checks.is_empty(), "{}", row.what);
                    for id in checks {
                        assert!(crate::CHECKS.iter().any(|check| check.spec.id == *id), "{}: no check {id}", row.what);
                    }
                }
                NotChecked(why) => assert!(why.len() > 10, "{}", row.what),
            }
        }
    }
}
