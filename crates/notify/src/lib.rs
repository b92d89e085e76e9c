//! Outbound data of the controller: alerts and reports to people, and traces to a collector.

pub mod alert;
pub mod report;
pub mod telemetry;
