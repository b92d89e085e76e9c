//! Bounded worker pools for blocking requests.
//!
//! Blocking work runs on dedicated threads, with a limit per kind. A request that finds no free worker waits in a short
//! queue, and is rejected if the queue is full or its deadline passes. Work that hangs on a disk, a server or a share
//! occupies its own worker until it ends and no other: requests of other kinds proceed.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

use super::{error::ApiError, response_cache::CachePolicy};

/// How long to wait beyond the deadline for work that ends by itself.
const GRACE: Duration = Duration::from_secs(2);

/// Workers for the store or the share, and how many of them one endpoint may use.
const STORE_WORKERS: usize = 6;
const STORE_WORKERS_PER_ENDPOINT: usize = 2;
/// Workers for requests that the in-memory cluster state answers.
const IN_MEMORY_WORKERS: usize = 2;
/// One command at a time: two prepared from the same facts would not see each other.
const COMMAND_WORKERS: usize = 1;
/// Workers that record rejections and load tokens.
const OTHER_WORKERS: usize = 2;
/// Queue length of each pool.
const QUEUE_LENGTH: usize = 128;

/// Threads in all, so that no request with a worker waits for a thread.
pub(super) const THREADS: usize = STORE_WORKERS + IN_MEMORY_WORKERS + COMMAND_WORKERS + OTHER_WORKERS;

/// A worker pool with a queue.
#[derive(Debug, Clone)]
pub(super) struct WorkerPool {
    workers: Arc<Semaphore>,
    queue: Arc<Semaphore>,
}

impl WorkerPool {
    pub(super) fn new(workers: usize) -> Self {
        Self { workers: Arc::new(Semaphore::new(workers)), queue: Arc::new(Semaphore::new(QUEUE_LENGTH)) }
    }

    async fn acquire(&self, until: Instant) -> Result<OwnedSemaphorePermit, ApiError> {
        if let Ok(permit) = Arc::clone(&self.workers).try_acquire_owned() {
            return Ok(permit);
        }
        let _queue_permit = self.queue.try_acquire().map_err(|_| ApiError::Overloaded)?;
        let permit = timeout_at(until, Arc::clone(&self.workers).acquire_owned()).await;
        permit.map_err(|_| ApiError::Overloaded)?.map_err(|_| ApiError::Overloaded)
    }

    /// Runs `work` when a worker is free.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.acquire(until).await?;
        run_on_thread(until, vec![permit], work).await
    }
}

/// Runs `work` on a thread that holds its permits until it ends, even if the request was abandoned.
fn run_on_thread<T: Send + 'static>(
    until: Instant,
    permits: Vec<OwnedSemaphorePermit>,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, ApiError>> {
    let task = spawn_blocking(move || {
        let result = work();
        drop(permits);
        result
    });
    async move {
        let result = timeout_at(until + GRACE, task).await.map_err(|_| ApiError::TimedOut)?;
        // The work panicked, which the panic hook has printed.
        result.map_err(|_| ApiError::StoreUnavailable)
    }
}

/// All worker pools of the API.
#[derive(Debug)]
pub(super) struct WorkerPools {
    store: WorkerPool,
    per_endpoint: HashMap<&'static str, WorkerPool>,
    in_memory: WorkerPool,
    pub(super) commands: WorkerPool,
    pub(super) audit: WorkerPool,
}

impl WorkerPools {
    /// Creates pools for the endpoints with these names.
    pub(super) fn new(endpoints: impl Iterator<Item = &'static str>) -> Self {
        let pools = endpoints.map(|name| (name, WorkerPool::new(STORE_WORKERS_PER_ENDPOINT)));
        Self {
            store: WorkerPool::new(STORE_WORKERS),
            per_endpoint: pools.collect(),
            in_memory: WorkerPool::new(IN_MEMORY_WORKERS),
            commands: WorkerPool::new(COMMAND_WORKERS),
            audit: WorkerPool::new(1),
        }
    }

    /// Runs a read of the endpoint with this name and cache policy.
    pub(super) async fn run_read<T: Send + 'static>(
        &self,
        (name, cache_policy): (&str, CachePolicy),
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if cache_policy == CachePolicy::UntilStateChanges {
            return self.in_memory.run(until, work).await;
        }
        let endpoint_permit = self.per_endpoint.get(name).unwrap_or(&self.store).acquire(until).await?;
        let store_permit = self.store.acquire(until).await?;
        run_on_thread(until, vec![endpoint_permit, store_permit], work).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::operator_api::{cases, endpoint::Route, history, nodes, routes::ROUTES, runs};

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(THREADS).build().unwrap()
    }

    /// Returns a route's name and cache policy.
    const fn route_key(route: &Route) -> (&'static str, CachePolicy) {
        (route.name, route.cache_policy)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(120)
    }

    #[test]
    fn stuck_requests_do_not_block_others() {
        let runtime = runtime();
        let (release, stuck) = mpsc::channel::<()>();
        let stuck = Arc::new(std::sync::Mutex::new(stuck));
        let results = runtime.block_on(async {
            let pools = Arc::new(WorkerPools::new(ROUTES.iter().map(|route| route.name)));
            let mut requests = Vec::new();
            for _ in 0..8 {
                let (pools, stuck) = (Arc::clone(&pools), Arc::clone(&stuck));
                let hangs = move || stuck.lock().unwrap().recv().is_err();
                requests.push(tokio::spawn(async move { pools.run_read(route_key(&runs::LOG), soon(), hangs).await }));
            }
            for request in requests {
                assert!(
                    matches!(request.await.unwrap(), Err(ApiError::TimedOut | ApiError::Overloaded)),
                    "no request waits for ever"
                );
            }
            // The hanging ones still hold their workers.
            assert_eq!(pools.store.workers.available_permits(), STORE_WORKERS - STORE_WORKERS_PER_ENDPOINT);
            let mut results = Vec::new();
            for route in [&history::LIST, &cases::LIST, &nodes::LIST] {
                results.push(pools.run_read(route_key(route), later(), || 7).await);
            }
            results.push(pools.commands.run(later(), || 7).await);
            drop(release);
            results
        });
        assert_eq!(results, vec![Ok(7); 4]);
    }

    #[test]
    fn a_request_is_rejected_immediately_if_the_queue_is_full() {
        let runtime = runtime();
        runtime.block_on(async {
            let pool = WorkerPool::new(1);
            let _taken = pool.acquire(later()).await.unwrap();
            let mut waiting = Vec::new();
            for _ in 0..QUEUE_LENGTH {
                let pool = pool.clone();
                waiting.push(tokio::spawn(async move { pool.run(later(), || ()).await }));
            }
            while pool.queue.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(pool.run(later(), || ()).await, Err(ApiError::Overloaded));
            waiting.iter().for_each(tokio::task::JoinHandle::abort);
        });
    }
}
