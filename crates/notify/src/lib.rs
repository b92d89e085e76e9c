//! What leaves the controller by itself: alerts to people, and traces to a collector.

pub mod alert;
pub mod telemetry;
