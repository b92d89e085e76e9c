//! Concurrent writers, each waiting until its own result is durable.

use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

use doctor_engine::{
    result_validation::{KnownNode, open_document, without_baselines},
    settings::Settings,
};
use doctor_store::{GroupCommit, Store, records::Accepted};

use anyhow::{Context, Result, ensure};

use super::documents::Job;
use crate::stopwatch::{Sample, millis, time};

/// One repeat.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) sample: Sample,
    /// CPU time of the database server, if there is one.
    pub(super) server: Duration,
    /// The latency of every result, in ascending order.
    pub(super) latencies: Vec<Duration>,
}

impl Round {
    pub(super) fn p99_ms(&self) -> f64 {
        self.latencies.get(self.latencies.len() * 99 / 100).copied().map_or(f64::NAN, millis)
    }
}

/// Distributes the jobs and runs all writers. The time ends when every result is readable, which is later than when the
/// last one is durable.
pub(super) fn run(
    settings: &Settings,
    store: &Store,
    group: &GroupCommit,
    writers: usize,
    jobs: Vec<Job>,
) -> Result<Round> {
    let mut shares: Vec<Vec<Job>> = (0..writers).map(|_| Vec::with_capacity(jobs.len() / writers + 1)).collect();
    for (index, job) in jobs.into_iter().enumerate() {
        shares[index % writers].push(job);
    }
    let ready = Barrier::new(writers + 1);
    let ((done, readable), sample) = std::thread::scope(|scope| {
        let ready = &ready;
        let threads: Vec<_> = shares
            .into_iter()
            .map(|share| {
                scope.spawn(move || {
                    ready.wait();
                    share.into_iter().map(|job| write(settings, group, job)).collect::<Result<Vec<Duration>>>()
                })
            })
            .collect();
        // The clock starts when every thread is ready.
        ready.wait();
        time(|| {
            let done: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            (done, store.counters())
        })
    });
    readable.context("reading the counters")?;
    let mut latencies = Vec::new();
    for of_thread in done {
        latencies.extend(of_thread.ok().context("a writer panicked")??);
    }
    latencies.sort_unstable();
    Ok(Round { sample, server: Duration::ZERO, latencies })
}

fn write(settings: &Settings, group: &GroupCommit, job: Job) -> Result<Duration> {
    let began = Instant::now();
    let known = |_: &_| KnownNode::default();
    let result = open_document(settings, &job.run, job.document, job.received, known, &mut without_baselines)?;
    let accepted = group.submit(result).context("storing a result")?;
    ensure!(accepted == Accepted::Stored, "{} was not stored: {accepted:?}", job.run.run.id);
    Ok(began.elapsed())
}
