//! Classes of hardware that a machine may lack, and the metric that counts each.
//!
//! A check that finds nothing of its class reports this code as not applicable. Where the class is expected, nothing
//! found is not an absent class but missing hardware: the result is inconclusive and blocks "healthy". InfiniBand is no
//! class of its own: a profile counts RDMA ports, and on a machine with RoCE no port is InfiniBand.

use crate::reason::coded;

coded! {
    /// A class of hardware, by the code with which a check reports that there is none.
    pub enum HardwareClass {
        Gpu => "no-gpu",
        Nvlink => "no-nvlink",
        Nvswitch => "no-nvswitch",
        Efa => "no-efa",
        Rdma => "no-rdma",
        Nvme => "no-nvme",
    }
}

impl HardwareClass {
    /// Returns the metric whose expected value says how many of the class the machine has.
    pub const fn count_metric(self) -> &'static str {
        match self {
            Self::Gpu => "gpu_count",
            Self::Nvlink => "nvlink_count",
            Self::Nvswitch => "nvswitch_count",
            Self::Efa => "efa_devices",
            Self::Rdma => "fabric_ports_active",
            Self::Nvme => "nvme_disks",
        }
    }

    /// Returns the class in words, for a sentence such as "no GPU found".
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Nvlink => "NVLink",
            Self::Nvswitch => "NVSwitch",
            Self::Efa => "EFA adapter",
            Self::Rdma => "RDMA port",
            Self::Nvme => "NVMe disk",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back_and_names_a_metric() {
        for class in HardwareClass::ALL {
            assert_eq!(HardwareClass::from_code(class.code()), Some(*class));
            assert!(!class.count_metric().is_empty() && !class.label().is_empty());
        }
    }
}
