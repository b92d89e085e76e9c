//! A cluster of GPU machines in Azure: made from one file, and taken away again, by Azure's own program `az`.
//!
//! What is there is what Azure says, never what a file of ours remembers: each round looks ([`seen`]), a pure function says what is
//! missing ([`plan`]), and only that is done ([`provision`]). So a second run does nothing, and one that was killed is taken up by the
//! next. Everything that we make bears a tag, and only what bears it is changed or deleted.
//!
//! Keys are exchanged through Azure's run-command and not over SSH: it is authenticated by the account that made the machines, so the host
//! keys that it brings back are the machines' own, and nobody has to believe a key because it was the first one seen. The head node's
//! private key is made there and stays there.

mod az;
mod cloud_init;
mod cloud_init_words;
mod cluster;
mod cluster_file;
mod destroy;
mod env_file;
mod forms;
pub mod fuzzed;
mod nodes;
mod plan;
mod provision;
mod seen;

pub use self::{
    az::{Az, AzureError, Call},
    cloud_init::{CloudInit, check as check_cloud_init, text as cloud_init},
    cluster::{Cluster, Download, EXAMPLE, Network},
    cluster_file::Mode,
    destroy::{Left, Removal, Removals, destroy, removal},
    nodes::{Hosts, Known},
    plan::{Files, Need, Part, Plan, Step, plan},
    provision::{Progress, Provisioned, look, provision},
    seen::Seen,
};

/// On everything that we make; its value is the name of the scale set.
pub const TAG: &str = "cluster-doctor";
