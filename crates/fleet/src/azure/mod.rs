//! Creates a cluster of GPU machines in Azure from one file, and deletes it, with Azure's own program `az`.
//!
//! The state is always queried from Azure, never remembered in a file: each round inspects it ([`seen`]), a pure
//! function computes what is missing ([`plan`]), and only that is done ([`provision`]). A second run therefore does
//! nothing, and a run after an interruption continues. Every resource that we create has a tag, and only resources with
//! the tag are changed or deleted.
//!
//! Keys are exchanged through Azure's run-command and not over SSH: it is authenticated by the account that created the
//! machines, so the host keys that it returns are genuine and no key is trusted on first use. The head node's private
//! key is generated there and never leaves it.

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

/// The tag of every resource that we create; its value is the name of the scale set.
pub const TAG: &str = "cluster-doctor";
