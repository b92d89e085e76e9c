//! Environment variables that make NCCL use the requested transport and log which one it used.
//!
//! A site's environment or /etc/nccl.conf may forbid a transport (some images ship NCCL_NET_DISABLE_INTRA=1), so each
//! relevant switch is set explicitly to on or off. Only what the site's network needs to work stays the site's, such as
//! NCCL_SOCKET_IFNAME or NCCL_IB_GID_INDEX.

use std::process::Command;

use doctor_checks::collective_params::{CollectiveParams, Mode};

/// To standard error, which is our pipe: no file is left behind.
const LOG: [(&str, &str); 3] =
    [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/dev/stderr"), ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET")];

/// Within a node by peer access; between nodes through the network.
const DIRECT: [(&str, &str); 2] = [("NCCL_P2P_DISABLE", "0"), ("NCCL_SHM_DISABLE", "0")];

/// Out through one network card and in through another, as each GPU has its own. No transport within the node is
/// allowed, nor the use of another GPU's card.
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

/// It would send the ranks to another rendezvous than ours.
const NEVER: [&str; 1] = ["NCCL_COMM_ID"];

pub(super) fn set(command: &mut Command, params: &CollectiveParams) {
    command.envs(LOG).env("NCCL_COLLNET_ENABLE", "0");
    match params.mode {
        Mode::Nvlink => command.envs(DIRECT),
        Mode::Loopback => command.envs(THROUGH_THE_NETWORK).env("NCCL_NET", &params.net),
        Mode::Nodes => command.envs(DIRECT).env("NCCL_NET", &params.net),
    };
    if let Some(hca) = &params.hca {
        command.env("NCCL_IB_HCA", hca);
    }
    for name in NEVER {
        command.env_remove(name);
    }
}
