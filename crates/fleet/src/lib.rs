//! What people do on all hosts of a fleet at once, apart from the service: its host files, its status files, its all-reduce.
//!
//! The hosts are reached by `doctor_backend::ssh`; what comes back is read here, and nothing here is kept in the store.

pub mod azure;
pub mod hostfiles;
pub mod nccl;
pub mod ranks;
pub mod search;
pub mod status;
