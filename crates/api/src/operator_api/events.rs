//! `GET /api/v1/events`: a stream of change notifications.
//!
//! An event names what changed, not the new content: a client that missed some reloads once. The last few hundred are
//! kept for clients that reconnect (`Last-Event-ID`); a client that is too late gets the event `everything`. A client
//! that falls behind gets the event `dropped` and is disconnected, so nothing accumulates for it. So is one whose token
//! was revoked or changed its role.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use doctor_core::ids::{CaseId, NodeName, RunId};
use futures_util::{future::BoxFuture, stream};
use serde_json::{Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, broadcast, broadcast::error::RecvError},
    time::timeout,
};

use super::error::ApiError;

/// Limits of events kept for reconnecting clients: number and bytes.
const MAX_REPLAY_EVENTS: usize = 512;
const MAX_REPLAY_BYTES: usize = 2 << 20;
/// How many events a client may be behind.
const MAX_LAG: usize = 128;
const MAX_STREAMS: usize = 256;
/// Streams per caller: a person with many pages open, but not all of the streams.
const MAX_STREAMS_PER_CALLER: usize = 32;
/// Names in one event; for more, the client reloads everything.
const MAX_NAMES: usize = 500;
/// Interval of keep-alive comments, so that proxies do not close an idle stream.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// How often a client's authorisation is checked again.
const AUTH_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Checks whether a client is still authorised.
pub(super) type AuthorisationCheck = Box<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Everything,
    Nodes(Vec<NodeName>),
    Runs(Vec<RunId>),
    Cases(Vec<CaseId>),
    /// The breaker, pauses, requests or the policy.
    Status,
    /// The plan of the next cycle.
    Plan,
}

impl Change {
    /// Event names, for the API description.
    pub(super) const NAMES: [&'static str; 7] = ["everything", "nodes", "runs", "cases", "status", "plan", "dropped"];

    const fn name(&self) -> &'static str {
        match self {
            Self::Everything => "everything",
            Self::Nodes(_) => "nodes",
            Self::Runs(_) => "runs",
            Self::Cases(_) => "cases",
            Self::Status => "status",
            Self::Plan => "plan",
        }
    }

    fn data(&self) -> Value {
        fn few<T: ToString>(name: &str, all: &[T]) -> Value {
            let names: Vec<String> = all.iter().take(MAX_NAMES).map(ToString::to_string).collect();
            json!({ name: names, "more": all.len().saturating_sub(MAX_NAMES) })
        }
        match self {
            Self::Nodes(nodes) => few("nodes", nodes),
            Self::Runs(runs) => few("runs", runs),
            Self::Cases(cases) => few("cases", cases),
            Self::Everything | Self::Status | Self::Plan => json!({}),
        }
    }
}

#[derive(Debug)]
struct Event {
    number: u64,
    frame: Bytes,
}

/// Event streams, and recent events.
#[derive(Debug)]
pub(super) struct EventBroker {
    /// Event ids of another process are not valid here.
    epoch: String,
    log: Mutex<EventLog>,
    sender: broadcast::Sender<Arc<Event>>,
    stream_permits: Arc<Semaphore>,
    streams_by_caller: Arc<Mutex<HashMap<String, usize>>>,
}

#[derive(Debug, Default)]
struct EventLog {
    number: u64,
    recent: VecDeque<Arc<Event>>,
    bytes: usize,
}

/// A stream's permit, globally and per caller.
#[derive(Debug)]
struct StreamPermit {
    caller: String,
    streams_by_caller: Arc<Mutex<HashMap<String, usize>>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut streams = self.streams_by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = streams.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                streams.remove(&self.caller);
            }
        }
    }
}

impl EventBroker {
    pub(super) fn new(epoch: String) -> Self {
        let (sender, _) = broadcast::channel(MAX_LAG);
        let stream_permits = Arc::new(Semaphore::new(MAX_STREAMS));
        Self { epoch, log: Mutex::default(), sender, stream_permits, streams_by_caller: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, EventLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn publish(&self, changes: &[Change]) {
        for change in changes {
            let mut log = self.lock();
            log.number += 1;
            let number = log.number;
            let (epoch, name, data) = (&self.epoch, change.name(), change.data());
            let frame = Bytes::from(format!("id: {epoch}-{number}\nevent: {name}\ndata: {data}\n\n"));
            let event = Arc::new(Event { number, frame });
            log.bytes += event.frame.len();
            log.recent.push_back(Arc::clone(&event));
            while log.recent.len() > MAX_REPLAY_EVENTS || log.bytes > MAX_REPLAY_BYTES {
                let Some(oldest) = log.recent.pop_front() else { break };
                log.bytes -= oldest.frame.len();
            }
            // Under the lock, so that a new client gets each event exactly once. Having no clients is not an error.
            let _no_receivers = self.sender.send(event);
        }
    }

    /// Returns the events after this id, and a receiver for later ones. `None` instead of a list if that is not known
    /// any more.
    fn subscribe(&self, last: Option<&str>) -> (Option<VecDeque<Arc<Event>>>, broadcast::Receiver<Arc<Event>>) {
        let log = self.lock();
        let receiver = self.sender.subscribe();
        let Some(last) = last else { return (Some(VecDeque::new()), receiver) };
        let number = last.rsplit_once('-').filter(|(epoch, _)| *epoch == self.epoch);
        let number: Option<u64> = number.and_then(|(_, number)| number.parse().ok());
        let oldest = log.recent.front().map_or(log.number + 1, |event| event.number);
        let missed = number.filter(|number| *number <= log.number && *number + 1 >= oldest).map(|number| {
            let after = log.recent.iter().filter(|event| event.number > number);
            after.cloned().collect()
        });
        (missed, receiver)
    }

    fn acquire_stream(&self, caller: &str) -> Result<StreamPermit, ApiError> {
        let permit = Arc::clone(&self.stream_permits).try_acquire_owned().map_err(|_| ApiError::CapacityReached)?;
        let mut streams = self.streams_by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        let count = streams.entry(caller.to_owned()).or_default();
        if *count >= MAX_STREAMS_PER_CALLER {
            return Err(ApiError::TooManyStreams(MAX_STREAMS_PER_CALLER));
        }
        *count += 1;
        Ok(StreamPermit {
            caller: caller.to_owned(),
            streams_by_caller: Arc::clone(&self.streams_by_caller),
            _permit: permit,
        })
    }

    /// Streams events to one client, starting after this id, for as long as it is authorised.
    pub(super) fn serve(
        &self,
        last: Option<&str>,
        caller: &str,
        is_authorised: AuthorisationCheck,
    ) -> Result<Response, ApiError> {
        let permit = self.acquire_stream(caller)?;
        let (missed, receiver) = self.subscribe(last);
        let greeting = match &missed {
            Some(_) => Bytes::from_static(b"retry: 2000\n: listening\n\n"),
            None => Bytes::from_static(b"retry: 2000\nevent: everything\ndata: {}\n\n"),
        };
        let event_stream = EventStream {
            first_frame: Some(greeting),
            missed: missed.unwrap_or_default(),
            receiver,
            closed: false,
            is_authorised,
            auth_checked: Instant::now(),
            last_sent: Instant::now(),
            _permit: permit,
        };
        let frames = stream::unfold(event_stream, |mut event_stream| async {
            let frame = event_stream.next().await?;
            Some((Ok::<Bytes, std::convert::Infallible>(frame), event_stream))
        });
        let mut response = Response::new(Body::from_stream(frames));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(response)
    }
}

struct EventStream {
    first_frame: Option<Bytes>,
    missed: VecDeque<Arc<Event>>,
    receiver: broadcast::Receiver<Arc<Event>>,
    closed: bool,
    is_authorised: AuthorisationCheck,
    /// When authorisation was last checked.
    auth_checked: Instant,
    /// When data was last sent.
    last_sent: Instant,
    _permit: StreamPermit,
}

impl EventStream {
    async fn next(&mut self) -> Option<Bytes> {
        if self.closed {
            return None;
        }
        let frame = self.next_frame().await;
        self.last_sent = Instant::now();
        frame
    }

    async fn next_frame(&mut self) -> Option<Bytes> {
        if let Some(greeting) = self.first_frame.take() {
            return Some(greeting);
        }
        loop {
            if self.auth_checked.elapsed() >= AUTH_CHECK_INTERVAL {
                if !(self.is_authorised)().await {
                    return Some(
                        self.final_frame(&json!({ "missed": 0, "text": "authorisation was revoked or changed" })),
                    );
                }
                self.auth_checked = Instant::now();
            }
            if let Some(event) = self.missed.pop_front() {
                return Some(event.frame.clone());
            }
            match timeout(AUTH_CHECK_INTERVAL, self.receiver.recv()).await {
                Err(_) if self.last_sent.elapsed() < KEEP_ALIVE_INTERVAL => {}
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
                Ok(Ok(event)) => return Some(event.frame.clone()),
                Ok(Err(RecvError::Lagged(missed))) => {
                    let text = "the client fell behind: reconnect and reload";
                    return Some(self.final_frame(&json!({ "missed": missed, "text": text })));
                }
                Ok(Err(RecvError::Closed)) => return None,
            }
        }
    }

    /// Returns the last event of a stream.
    fn final_frame(&mut self, data: &Value) -> Bytes {
        self.closed = true;
        Bytes::from(format!("event: dropped\ndata: {data}\n\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(names: &[&str]) -> Change {
        Change::Nodes(names.iter().map(|name| NodeName::new(name).unwrap()).collect())
    }

    fn frames(missed: Option<VecDeque<Arc<Event>>>) -> Option<Vec<String>> {
        missed.map(|all| all.iter().map(|event| String::from_utf8_lossy(&event.frame).into_owned()).collect())
    }

    #[test]
    fn a_reconnecting_client_gets_missed_events_or_reloads_everything() {
        let broker = EventBroker::new("e".to_owned());
        broker.publish(&[nodes(&["a"]), Change::Plan]);
        broker.publish(&[nodes(&["b"])]);
        let missed = frames(broker.subscribe(Some("e-2")).0).unwrap();
        assert_eq!(missed, ["id: e-3\nevent: nodes\ndata: {\"more\":0,\"nodes\":[\"b\"]}\n\n"]);
        assert_eq!(frames(broker.subscribe(Some("e-3")).0), Some(Vec::new()));
        assert_eq!(frames(broker.subscribe(None).0), Some(Vec::new()));
        for other in ["e-4", "f-2", "nonsense", "e-", ""] {
            assert_eq!(frames(broker.subscribe(Some(other)).0), None, "{other}");
        }
        for _ in 0..MAX_REPLAY_EVENTS {
            broker.publish(&[Change::Plan]);
        }
        assert_eq!(frames(broker.subscribe(Some("e-2")).0), None);
    }

    /// A client that is authorised while `is_authorised` returns true.
    fn client(broker: &EventBroker, is_authorised: fn(()) -> bool) -> EventStream {
        let (missed, receiver) = broker.subscribe(None);
        let is_authorised: AuthorisationCheck = Box::new(move || Box::pin(async move { is_authorised(()) }));
        let (auth_checked, last_sent, permit) = (Instant::now(), Instant::now(), broker.acquire_stream("ann").unwrap());
        let missed = missed.unwrap();
        EventStream {
            first_frame: None,
            missed,
            receiver,
            closed: false,
            is_authorised,
            auth_checked,
            last_sent,
            _permit: permit,
        }
    }

    #[test]
    fn streams_are_limited_per_caller_and_released() {
        let broker = EventBroker::new("e".to_owned());
        let permits: Vec<StreamPermit> =
            (0..MAX_STREAMS_PER_CALLER).map(|_| broker.acquire_stream("ann").unwrap()).collect();
        assert_eq!(broker.acquire_stream("ann").unwrap_err(), ApiError::TooManyStreams(MAX_STREAMS_PER_CALLER));
        assert!(broker.acquire_stream("bob").is_ok());
        drop(permits);
        assert!(broker.acquire_stream("ann").is_ok());
        assert!(broker.streams_by_caller.lock().unwrap().is_empty(), "a caller without streams leaves no entry");
    }

    #[test]
    fn a_client_without_authorisation_is_disconnected_even_during_many_events() {
        let broker = EventBroker::new("e".to_owned());
        let mut client = client(&broker, |()| false);
        client.auth_checked = Instant::now().checked_sub(AUTH_CHECK_INTERVAL).unwrap();
        broker.publish(&[Change::Plan, Change::Status]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (first, second) = runtime.block_on(async { (client.next().await, client.next().await) });
        let first = String::from_utf8_lossy(&first.unwrap()).into_owned();
        assert!(first.starts_with("event: dropped\n") && first.contains("authorisation was revoked"), "{first}");
        assert_eq!(second, None);
    }

    #[test]
    fn events_for_reconnecting_clients_are_bounded() {
        let broker = EventBroker::new("e".to_owned());
        let long: Vec<String> = (0..MAX_NAMES).map(|n| format!("{n:0>200}")).collect();
        let many = nodes(&long.iter().map(String::as_str).collect::<Vec<_>>());
        for _ in 0..MAX_REPLAY_EVENTS {
            broker.publish(std::slice::from_ref(&many));
        }
        let log = broker.lock();
        let bytes: usize = log.recent.iter().map(|event| event.frame.len()).sum();
        assert!(bytes == log.bytes && bytes <= MAX_REPLAY_BYTES && log.recent.len() > 5, "{bytes}");
    }

    #[test]
    fn a_client_that_falls_behind_is_disconnected() {
        let broker = EventBroker::new("e".to_owned());
        let mut client = client(&broker, |()| true);
        for _ in 0..=MAX_LAG * 2 {
            broker.publish(&[Change::Plan]);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (first, second) = runtime.block_on(async { (client.next().await, client.next().await) });
        assert!(String::from_utf8_lossy(&first.unwrap()).starts_with("event: dropped\n"));
        assert_eq!(second, None);
    }
}
