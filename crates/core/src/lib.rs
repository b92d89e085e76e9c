//! The domain model and the planner of Cluster Doctor, free of I/O.
//!
//! This crate has no clock, no files, no network and no threads. The engine observes a cluster and builds a
//! [`Snapshot`](snapshot::Snapshot), the planner returns a [`Plan`](plan::Plan), and the engine executes it. The same
//! snapshot always gives the same plan.
//!
//! Reading order: [`node`], [`run`], [`observation`] and [`finding`] define the basic types; [`policy`] holds the
//! settings of a site; [`classify`] turns observations into findings; [`lifecycle`] is the state machine of a node;
//! [`plan`] makes every decision; [`view`] builds what the CLI and the API show; [`alert`] builds notifications.

pub mod access;
pub mod alert;
pub mod bounded_text;
pub mod capacity_plan;
pub mod case;
pub mod classify;
pub mod fault_localization;
pub mod finding;
pub mod fnv;
pub mod hardware_class;
pub mod hex;
pub mod hostlist;
pub mod ids;
pub mod job_failures;
pub mod last_output;
pub mod lifecycle;
pub mod measured_count;
pub mod near;
pub mod node;
pub mod node_status;
pub mod observation;
pub mod plan;
pub mod policy;
pub mod profile;
pub mod reason;
pub mod run;
pub mod sku_detection;
pub mod snapshot;
pub mod software;
pub mod test_status;
pub mod time;
pub mod toml_text;
pub mod view;
