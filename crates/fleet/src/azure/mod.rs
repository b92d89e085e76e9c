//! Creates a cluster of GPU machines in Azure from one file, and deletes it, with Azure's own program `az`.
//!
//! The state is always queried from Azure, never remembered in a file: each round inspects it ([`inventory`]), a pure
//! function computes what is missing ([`plan`]), and only that is done ([`provision`]). A second run therefore does
//! nothing, and a run after an interruption continues. Every resource that we create has a tag, and only resources with
//! the tag are changed or deleted.
//!
//! Keys are exchanged through Azure's run-command and not over SSH: it is authenticated by the account that created the
//! machines, so the host keys that it returns are genuine and no key is trusted on first use. The head node's private
//! key is generated there and never leaves it.

mod az;
mod cloud_init;
mod cloud_init_keys;
mod cluster;
mod cluster_file;
mod destroy;
mod env_file;
pub mod fuzz_targets;
mod inventory;
mod nodes;
mod plan;
mod provision;
mod value_formats;

pub use self::{
    az::{Az, AzCommand, AzureError},
    cloud_init::{CloudInitError, check as check_cloud_init, render as cloud_init},
    cluster::{Cluster, Download, EXAMPLE, Network},
    cluster_file::Mode,
    destroy::{KeptResource, Removal, Removals, destroy, plan_removal},
    inventory::Inventory,
    nodes::{Hosts, KnownHost},
    plan::{AzureStepKind, AzureStepState, Files, Plan, Step, plan},
    provision::{Progress, Provisioned, provision, read_inventory},
};

/// The tag of every resource that we create; its value is the name of the scale set.
pub const TAG: &str = "cluster-doctor";
