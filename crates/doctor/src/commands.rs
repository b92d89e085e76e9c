//! One file per command, or per small family of commands. Each has its arguments and one function.

pub(crate) mod agent;
pub(crate) mod ask;
pub(crate) mod audit;
pub(crate) mod breaker;
pub(crate) mod cases;
pub(crate) mod config;
pub(crate) mod confirm;
pub(crate) mod db;
pub(crate) mod demo;
pub(crate) mod deploy;
pub(crate) mod docs;
pub(crate) mod explain;
pub(crate) mod history;
pub(crate) mod import;
pub(crate) mod log;
pub(crate) mod nodes;
pub(crate) mod pause;
pub(crate) mod plan;
pub(crate) mod rejudge;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod shell;
pub(crate) mod sim;
pub(crate) mod status;
pub(crate) mod why;
