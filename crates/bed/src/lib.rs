//! Real systems for tests and benchmarks, started from the distribution's packages or from source, and a fake machine
//! with GPUs for hosts without any. No shipped program depends on this crate.

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
