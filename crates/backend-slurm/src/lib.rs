//! The Slurm backend. `README.md` beside this file defines when a node is free, how marks and drains map to Slurm, and the
//! required rights.

mod accounting;
mod acts;
mod backend;
mod board;
mod cluster;
mod config;
mod failures;
#[doc(hidden)]
pub mod fuzzed;
mod inspect;
mod job;
mod json;
mod kind;
mod marks;
mod nodes;
mod note;
mod occupancy;
mod programs;
mod queue;
mod reservations;
mod rest;
mod shelter;
mod site;
mod states;
mod submit;
mod text;
mod view;
mod wanted;

pub use cluster::SlurmBackend;
pub use config::{BadSettings, Notes, OutAs, Rest, SlurmConfig, Submission};
pub use inspect::inspect;
pub use kind::Slurm;
