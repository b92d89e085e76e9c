//! The systems that tests and benchmarks stand on: real ones, started from what the distribution installs, and a machine
//! with GPUs for where there is none. Nothing that is shipped depends on this.

pub mod machine;
pub mod postgres;
