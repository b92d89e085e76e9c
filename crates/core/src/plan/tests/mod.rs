//! Tests of the planner: table tests by topic, then properties over random clusters.
//!
//! `cluster` has the fixtures, `model` applies plans to a snapshot as store and executor would, `lines` formats actions
//! so that a test reads like a scenario.

mod agents;
mod alerts;
mod breaker;
mod choosing;
mod cluster;
mod holds;
mod incremental;
mod ladder;
mod limits;
mod lines;
mod machines;
mod markless;
mod model;
mod modes;
mod proof;
mod properties;
mod quarantine;
mod random;
mod requests;
mod running;
mod shown;
mod together;
