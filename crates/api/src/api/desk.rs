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

use super::{answer::Lasts, refusal::Refusal};

/// How long to wait beyond the deadline for work that ends by itself.
const GRACE: Duration = Duration::from_secs(2);

/// Workers for the store or the share, and how many of them one endpoint may use.
const READERS: usize = 6;
const READERS_OF_ONE: usize = 2;
/// Workers for requests that the in-memory cluster state answers.
const PAINTERS: usize = 2;
/// One command at a time: two prepared from the same facts would not see each other.
const ACTORS: usize = 1;
/// Workers that record rejections and load tokens.
const OTHERS: usize = 2;
/// Queue length of each pool.
const LINE: usize = 128;

/// Threads in all, so that no request with a worker waits for a thread.
pub(super) const THREADS: usize = READERS + PAINTERS + ACTORS + OTHERS;

/// A worker pool with a queue.
#[derive(Debug, Clone)]
pub(super) struct Desk {
    places: Arc<Semaphore>,
    line: Arc<Semaphore>,
}

impl Desk {
    pub(super) fn new(places: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), line: Arc::new(Semaphore::new(LINE)) }
    }

    async fn place(&self, until: Instant) -> Result<OwnedSemaphorePermit, Refusal> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(place);
        }
        let _in_line = self.line.try_acquire().map_err(|_| Refusal::Busy)?;
        let place = timeout_at(until, Arc::clone(&self.places).acquire_owned()).await;
        place.map_err(|_| Refusal::Busy)?.map_err(|_| Refusal::Busy)
    }

    /// Runs `work` when a worker is free.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let place = self.place(until).await?;
        done(until, vec![place], work).await
    }
}

/// Runs `work` on a thread that holds its permits until it ends, even if the request was abandoned.
fn done<T: Send + 'static>(
    until: Instant,
    places: Vec<OwnedSemaphorePermit>,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, Refusal>> {
    let working = spawn_blocking(move || {
        let made = work();
        drop(places);
        made
    });
    async move {
        let made = timeout_at(until + GRACE, working).await.map_err(|_| Refusal::Late)?;
        // The work panicked, which the panic hook has printed.
        made.map_err(|_| Refusal::Store)
    }
}

/// All worker pools of the API.
#[derive(Debug)]
pub(super) struct Desks {
    readers: Desk,
    of_one: HashMap<&'static str, Desk>,
    painters: Desk,
    pub(super) actors: Desk,
    pub(super) notes: Desk,
}

impl Desks {
    /// Creates pools for the endpoints with these names.
    pub(super) fn new(places: impl Iterator<Item = &'static str>) -> Self {
        let of_one = places.map(|name| (name, Desk::new(READERS_OF_ONE)));
        Self {
            readers: Desk::new(READERS),
            of_one: of_one.collect(),
            painters: Desk::new(PAINTERS),
            actors: Desk::new(ACTORS),
            notes: Desk::new(1),
        }
    }

    /// Runs a read of the endpoint with this name and cache policy.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        (name, lasts): (&str, Lasts),
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        if lasts == Lasts::WithScene {
            return self.painters.work(until, work).await;
        }
        let own = self.of_one.get(name).unwrap_or(&self.readers).place(until).await?;
        let place = self.readers.place(until).await?;
        done(until, vec![own, place], work).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::api::{cases, endpoint::Route, history, nodes, routes::ROUTES, runs};

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(THREADS).build().unwrap()
    }

    /// Returns a route's name and cache policy.
    const fn place(route: &Route) -> (&'static str, Lasts) {
        (route.name, route.lasts)
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
        let answers = runtime.block_on(async {
            let desks = Arc::new(Desks::new(ROUTES.iter().map(|route| route.name)));
            let mut asked = Vec::new();
            for _ in 0..8 {
                let (desks, stuck) = (Arc::clone(&desks), Arc::clone(&stuck));
                let hangs = move || stuck.lock().unwrap().recv().is_err();
                asked.push(tokio::spawn(async move { desks.read(place(&runs::LOG), soon(), hangs).await }));
            }
            for one in asked {
                assert!(matches!(one.await.unwrap(), Err(Refusal::Late | Refusal::Busy)), "no request waits for ever");
            }
            // The hanging ones still hold their workers.
            assert_eq!(desks.readers.places.available_permits(), READERS - READERS_OF_ONE);
            let mut answers = Vec::new();
            for route in [&history::LIST, &cases::LIST, &nodes::LIST] {
                answers.push(desks.read(place(route), later(), || 7).await);
            }
            answers.push(desks.actors.work(later(), || 7).await);
            drop(release);
            answers
        });
        assert_eq!(answers, vec![Ok(7); 4]);
    }

    #[test]
    fn a_request_is_rejected_immediately_if_the_queue_is_full() {
        let runtime = runtime();
        runtime.block_on(async {
            let desk = Desk::new(1);
            let _taken = desk.place(later()).await.unwrap();
            let mut waiting = Vec::new();
            for _ in 0..LINE {
                let desk = desk.clone();
                waiting.push(tokio::spawn(async move { desk.work(later(), || ()).await }));
            }
            while desk.line.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(desk.work(later(), || ()).await, Err(Refusal::Busy));
            waiting.iter().for_each(tokio::task::JoinHandle::abort);
        });
    }
}
