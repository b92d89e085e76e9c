//! The Slurm backend. `README.md` beside this file defines when a node is free, how marks and drains map to Slurm, and the
//! required rights.

mod accounting;
mod backend;
mod cluster;
mod cluster_config;
mod config;
mod drain_reason;
mod failures;
#[doc(hidden)]
pub mod fuzz_targets;
mod inspect;
mod job;
mod json;
mod kind;
mod maintenance_reservation;
mod marks;
mod node_comment;
mod node_ops;
mod nodes;
mod occupancy;
mod pending_demand;
mod programs;
mod queue;
mod remaining_output;
mod report_job;
mod reservations;
mod rest;
mod scontrol_text;
mod share_files;
mod states;
mod status_writer;
mod submit;
mod verify;
mod view;

pub use cluster::SlurmBackend;
pub use config::{Notes, OutAs, Rest, SlurmConfig, SlurmConfigError, Submission};
pub use inspect::inspect;
pub use kind::Slurm;
