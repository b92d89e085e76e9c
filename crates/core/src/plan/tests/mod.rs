//! Tests of the planner: table tests by topic, then properties over random clusters.
//!
//! `cluster` has the fixtures, `model` applies plans to a snapshot as store and executor would, `lines` formats actions
//! so that a test reads like a scenario.

mod agents;
mod alerts;
mod breaker;
mod choosing;
mod cluster;
mod escalation;
mod hardware_identity;
mod holds;
mod incremental;
mod limits;
mod lines;
mod markless;
mod model;
mod modes;
mod multi_node;
mod node_status;
mod operator_commands;
mod properties;
mod quarantine;
mod random;
mod renewal;
mod repair_request;
mod requalification;
mod running;
