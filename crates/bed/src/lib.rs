//! The systems that tests and benchmarks stand on: real ones, started from what the distribution installs or from their
//! sources, and a machine with GPUs for where there is none. Nothing that is shipped depends on this.

pub mod azure;
pub mod cloud;
pub mod dstack;
pub mod excuse;
pub mod kubernetes;
pub mod machine;
pub mod postgres;
pub mod programs;
pub mod slurm;
pub mod ssh;
