//! The real systems that tests and benchmarks stand on, started from what the distribution installs. Nothing that is
//! shipped depends on this.

pub mod postgres;
