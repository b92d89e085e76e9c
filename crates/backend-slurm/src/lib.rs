//! A Slurm cluster. What "free" means here, how marks and drains map, and which rights are needed, are in `README.md` beside this
//! file.

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
