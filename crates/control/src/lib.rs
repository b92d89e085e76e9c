//! The controller: everything between `doctor-core`'s judgement and the outside world.

pub mod backend;
pub mod clock;
