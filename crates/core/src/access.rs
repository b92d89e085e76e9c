//! Where a check runs, and which access to the machine it needs there.

use crate::reason::coded;

coded! {
    /// Access to a machine that a job in a container has only if it is given.
    pub enum Access {
        /// The machine's own files and devices, read as root: `/etc`, `/dev`, `/run`, libraries, the mount table.
        HostRoot => "host-root",
        Gpu => "gpu",
        /// The devices below `/dev/infiniband`, and the right to lock memory.
        Rdma => "rdma",
        /// `/dev/kmsg`.
        KernelLog => "kernel-log",
        /// All processes of the machine, under their own ids.
        HostPid => "host-pid",
        /// The file systems that users' work uses, writable.
        Mounts => "mounts",
    }
}

impl Access {
    /// Returns the access in words, for messages: "needs the kernel log".
    pub const fn label(self) -> &'static str {
        match self {
            Self::HostRoot => "the machine's own files as root",
            Self::Gpu => "the GPUs",
            Self::Rdma => "the RDMA devices",
            Self::KernelLog => "the kernel log",
            Self::HostPid => "the machine's processes",
            Self::Mounts => "the machine's mounts, writable",
        }
    }
}

coded! {
    /// Where a test normally runs.
    pub enum Place {
        /// By the node's agent, every few minutes. In a job where no agent is deployed.
        Agent => "agent",
        /// In a validation job: it loads the node.
        Job => "job",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back() {
        for access in Access::ALL {
            assert_eq!(Access::from_code(access.code()), Some(*access));
        }
        for place in Place::ALL {
            assert_eq!(Place::from_code(place.code()), Some(*place));
        }
    }
}
