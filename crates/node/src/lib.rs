//! The node program: runs probes, checks and validation jobs, and reports the results.
//!
//! [`runner`] executes probes and is the only module that a broken machine can hang. [`check`] runs checks and
//! classifies them locally, for an operator or a health hook; [`test`] does the same for tests that load the node.
//! [`job`] is the entry point of a validation job: it collects evidence and leaves the classification to the
//! controller. [`agent`] runs checks continuously and reports changes. [`host`] serves a controller that reaches this
//! machine over SSH.

pub mod agent;
pub mod builtin;
mod builtin_test;
pub mod check;
pub mod clock;
pub mod hardware;
pub mod heap;
pub mod hook;
pub mod host;
pub mod job;
pub mod policy;
pub mod profile;
pub mod profile_command;
pub mod record;
pub mod repair;
pub mod report;
pub mod result_post;
pub mod runner;
pub mod stop;
pub mod test;
pub mod verdict_file;
