//! The variables that make NCCL take the way that is asked for, and say which way it took.
//!
//! What a site has in the environment or in /etc/nccl.conf may forbid a way (some images ship NCCL_NET_DISABLE_INTRA=1), so
//! each switch that matters is set, to either side. All that is left to the site is what its network needs to work, such as
//! NCCL_SOCKET_IFNAME or NCCL_IB_GID_INDEX.

use std::process::Command;

use doctor_checks::collective_order::{CollectiveOrder, Mode};

/// To standard error, which is a pipe of ours: no file is left behind.
const LOG: [(&str, &str); 3] =
    [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/dev/stderr"), ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET")];

/// Inside a node: by peer access; between nodes: through the network.
const DIRECT: [(&str, &str); 2] = [("NCCL_P2P_DISABLE", "0"), ("NCCL_SHM_DISABLE", "0")];

/// Out by one network card and in by another, as each GPU has its own; nothing may take a way inside, and no card another
/// GPU's.
const THROUGH_THE_NETWORK: [(&str, &str); 9] = [
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_MNNVL_ENABLE", "0"),
    ("NCCL_NET_DISABLE_INTRA", "0"),
    ("NCCL_PXN_DISABLE", "1"),
    ("NCCL_CROSS_NIC", "0"),
    ("NCCL_NET_GDR_LEVEL", "5"),
    ("NCCL_IB_PCI_RELAXED_ORDERING", "1"),
];

/// It would lead the ranks to another place to meet than the one that they were given.
const NEVER: [&str; 1] = ["NCCL_COMM_ID"];

pub(super) fn set(command: &mut Command, order: &CollectiveOrder) {
    command.envs(LOG).env("NCCL_COLLNET_ENABLE", "0");
    match order.mode {
        Mode::Nvlink => command.envs(DIRECT),
        Mode::Loopback => command.envs(THROUGH_THE_NETWORK).env("NCCL_NET", &order.net),
        Mode::Nodes => command.envs(DIRECT).env("NCCL_NET", &order.net),
    };
    if let Some(hca) = &order.hca {
        command.env("NCCL_IB_HCA", hca);
    }
    for name in NEVER {
        command.env_remove(name);
    }
}
