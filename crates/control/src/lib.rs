//! The controller: everything between `doctor-core`'s judgement and the outside world.

pub mod backend;
pub mod clock;
pub mod cycle;
mod door;
pub mod execute;
pub mod ingest;
mod observe;
pub mod past;
pub mod picture;
mod publish;
pub mod rejudge;
pub mod settings;
pub mod share;
pub mod store;
pub mod wake;
pub mod web;
