//! Operations on all hosts of a fleet, independent of the service: host files, status files, all-reduce, and
//! provisioning in Azure.
//!
//! The hosts are reached through `doctor_backend::ssh`; this crate parses their answers and stores nothing in the
//! database.

pub mod azure;
pub mod hostfiles;
pub mod localization_trials;
pub mod nccl;
pub mod ranks;
pub mod status;
