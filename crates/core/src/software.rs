//! Third-party software that deep tests run. A node without it is not at fault: the test is not applicable there, and
//! the status of the fleet names the software, the nodes and the remedy in one line.

use crate::reason::{ReasonCode, coded};

coded! {
    /// Software that a test needs, by the reason code of a node without it.
    pub enum Software {
        Dcgm => "no-dcgm",
        Fio => "no-fio",
        Nccl => "no-nccl",
        /// `ib_write_bw` for InfiniBand and RoCE, `fi_pingpong` for EFA.
        Perftest => "no-perftest",
        NvmeCli => "no-nvme-cli",
    }
}

impl Software {
    pub const fn reason(self) -> ReasonCode {
        ReasonCode::fixed(self.code())
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Dcgm => "DCGM",
            Self::Fio => "fio",
            Self::Nccl => "NCCL",
            Self::Perftest => "perftest or libfabric",
            Self::NvmeCli => "nvme-cli",
        }
    }

    /// Returns how to install it, or what to set where it is not wanted.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Dcgm => {
                "install `datacenter-gpu-manager` on the nodes, or build the node image with DCGM=yes; without DCGM: \
                 `[tests.dcgm] enabled = false`"
            }
            Self::Fio => "install the package `fio`; without it: `[tests.storage] enabled = false`",
            Self::Nccl => {
                "install `libnccl2`, build the node image with NCCL_TESTS=yes, or name the library in \
                 `[tests.collective] params = { library = \"…\" }`; without NCCL: `[tests.collective-loopback] enabled = false`"
            }
            Self::Perftest => {
                "install the package `perftest`, for EFA `libfabric-bin`; without them: `[tests.fabric] enabled = false`"
            }
            Self::NvmeCli => "install the package `nvme-cli`; without it: `[tests.nvme-health] enabled = false`",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back_and_is_a_reason() {
        for software in Software::ALL {
            assert_eq!(Software::from_code(software.code()), Some(*software));
            assert_eq!(software.reason().as_str(), software.code());
        }
    }
}
