//! The program on the nodes: it runs probes, checks and validation jobs, and reports what it saw.
//!
//! [`runner`] carries out probes and is the only place that can be hung by the machine it looks at; [`check`] judges
//! on the spot for a person or a health hook; [`test`] does the same with a test that loads the node; [`job`] is what a validation job runs, and leaves the judging to the
//! controller; [`agent`] looks at the node all the time and reports what has changed; [`host`] is this machine for a controller
//! that reaches it over SSH.

pub mod agent;
pub mod builtin;
mod builtin_test;
pub mod check;
pub mod clock;
pub mod hardware;
pub mod hook;
pub mod host;
pub mod job;
pub mod memory;
pub mod policy;
pub mod profile;
pub mod profile_command;
pub mod record;
pub mod repair;
pub mod report;
pub mod runner;
pub mod stop;
pub mod test;
pub mod verdict;
