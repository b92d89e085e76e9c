//! Real systems for tests and benchmarks, started from the distribution's packages or from source, and a fake machine
//! with GPUs for hosts without any. No shipped program depends on this crate.

pub mod certificates;
pub mod dstack;
pub mod fake_aws;
pub mod fake_azure;
pub mod fake_machine;
pub mod kubernetes;
pub mod ports;
pub mod postgres;
pub mod programs;
pub mod skip;
pub mod slurm;
pub mod ssh;
