//! What leaves the controller by itself: alerts and reports to people, and traces to a collector.

pub mod alert;
pub mod report;
pub mod telemetry;
