//! `make bench [M=M1]`: the benchmarks of Cluster Doctor that this machine can run.
//!
//! Standard output is JSON lines, one figure each; progress goes to standard error. Each benchmark first verifies that
//! the measured code gives right answers. If it does not, the benchmark prints no figure and the program exits 1.

mod agent;
mod builds;
mod cache;
mod checks;
mod figure;
mod gpu;
mod history;
mod ingest;
mod kubernetes;
mod one_cycle;
mod plan;
mod process;
mod random;
mod shipped;
mod slurm;
mod ssh;
mod stopwatch;
mod web;

use std::{io::Write, process::ExitCode, time::Instant};

use crate::figure::{Figure, commit};

/// One benchmark. A metric may have several, for example one per database.
struct Benchmark {
    metric: &'static str,
    what: &'static str,
    run: fn() -> anyhow::Result<Measured>,
}

/// The result of a benchmark whose answers are right.
enum Measured {
    Figures(Vec<Figure>),
    /// This machine lacks a prerequisite.
    NotAvailable(String),
}

const BENCHMARKS: [Benchmark; 18] = [
    Benchmark { metric: "M1", what: "planning", run: plan::run },
    Benchmark { metric: "M2", what: "the controller's memory on Kubernetes", run: kubernetes::run_memory },
    Benchmark { metric: "M3", what: "traffic with the API server", run: kubernetes::run_traffic },
    Benchmark { metric: "M4", what: "history on SQLite", run: history::run_sqlite },
    Benchmark { metric: "M4", what: "history on PostgreSQL", run: history::run_postgres },
    Benchmark { metric: "M5", what: "ingest on SQLite", run: ingest::run_sqlite },
    Benchmark { metric: "M5", what: "ingest on PostgreSQL", run: ingest::run_postgres },
    Benchmark { metric: "M6", what: "the agent on simulated hardware", run: agent::run },
    Benchmark { metric: "M7", what: "fast checks on simulated hardware", run: checks::run },
    Benchmark { metric: "M8", what: "a verdict on a GPU", run: gpu::run_verdict },
    Benchmark { metric: "M9", what: "rates on a GPU", run: gpu::run_rates },
    Benchmark { metric: "M10", what: "planted errors on a GPU", run: gpu::run_detection },
    Benchmark { metric: "M14", what: "marking 750 nodes on Kubernetes", run: kubernetes::run_marking },
    Benchmark { metric: "M15", what: "a cycle on a Slurm of 10,000 nodes", run: slurm::run },
    Benchmark { metric: "M16", what: "a cycle on 200 SSH hosts, 20 of them dead", run: ssh::run },
    Benchmark { metric: "M17", what: "the API at 10,000 nodes", run: web::run },
    Benchmark { metric: "M17", what: "the dashboard at 10,000 nodes", run: web::browser::run },
    Benchmark { metric: "M18", what: "builds", run: builds::run },
];

/// Benchmarks that take many minutes and run only when named.
const BY_NAME: [&str; 2] = ["M16", "M18"];

fn main() -> ExitCode {
    let selected: Vec<String> = std::env::args().skip(1).map(|name| name.to_uppercase()).collect();
    if let Some(unknown) = selected.iter().find(|name| BENCHMARKS.iter().all(|one| one.metric != **name)) {
        let mut known: Vec<&str> = BENCHMARKS.iter().map(|one| one.metric).collect();
        known.dedup();
        eprintln!("there is no benchmark `{unknown}`; use {}", known.join(", "));
        return ExitCode::from(2);
    }
    let commit = commit();
    let mut all_well = true;
    for benchmark in BENCHMARKS {
        let is_long = BY_NAME.contains(&benchmark.metric);
        if selected.is_empty() && !is_long || selected.iter().any(|name| name == benchmark.metric) {
            all_well &= measure(&benchmark, &commit);
        }
    }
    if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one benchmark and prints its figures. Returns false if it failed.
fn measure(benchmark: &Benchmark, commit: &str) -> bool {
    let Benchmark { metric, what, run } = benchmark;
    eprintln!("{metric}: {what}");
    let began = Instant::now();
    let done = match run() {
        Ok(Measured::Figures(figures)) => print(metric, &figures, commit).map_err(anyhow::Error::from),
        Ok(Measured::NotAvailable(why)) => {
            eprintln!("NOT RUN: {metric}: {what}: {why}");
            Ok(())
        }
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => {
            eprintln!("{metric}: {what}: {:.1} s", began.elapsed().as_secs_f64());
            true
        }
        Err(error) => {
            eprintln!("{metric}: {what} FAILED: {error:#}");
            false
        }
    }
}

fn print(metric: &str, figures: &[Figure], commit: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for figure in figures {
        writeln!(out, "{}", figure.line(metric, commit))?;
    }
    out.flush()
}
