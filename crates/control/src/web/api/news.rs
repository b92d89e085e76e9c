//! `GET /api/v1/events`: what changed, as it changes, for those who keep a page open.
//!
//! An event says what to look at again and not what is there: whoever missed some looks once. The last few hundred are kept for
//! those whose connection broke off (`Last-Event-ID`); who comes too late is told to begin anew. A listener that does not keep up
//! is told so and sent away: nothing piles up for it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, header},
    response::Response,
};
use doctor_core::ids::{CaseId, NodeName, RunId};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, broadcast, broadcast::error::RecvError},
    time::timeout,
};

use super::refusal::Refusal;

/// Kept for those who come back.
const KEPT: usize = 512;
/// A listener may be this many events behind.
const BEHIND: usize = 128;
const LISTENERS: usize = 256;
/// Names in one event; of more, everything is worth a look.
const MOST_NAMES: usize = 500;
/// A sign of life, so that proxies do not take the silence for an end.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Everything,
    Nodes(Vec<NodeName>),
    Runs(Vec<RunId>),
    Cases(Vec<CaseId>),
    /// The breaker, pauses, requests or the policy.
    Status,
    /// What would be done next.
    Plan,
}

impl Change {
    /// The names of events, for the description.
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
            let names: Vec<String> = all.iter().take(MOST_NAMES).map(ToString::to_string).collect();
            json!({ name: names, "more": all.len().saturating_sub(MOST_NAMES) })
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

/// Who listens, and what was said lately.
#[derive(Debug)]
pub(super) struct News {
    /// Numbers of another process mean nothing here.
    epoch: String,
    said: Mutex<Said>,
    out: broadcast::Sender<Arc<Event>>,
    places: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Said {
    number: u64,
    kept: VecDeque<Arc<Event>>,
}

impl News {
    pub(super) fn new(epoch: String) -> Self {
        let (out, _) = broadcast::channel(BEHIND);
        Self { epoch, said: Mutex::default(), out, places: Arc::new(Semaphore::new(LISTENERS)) }
    }

    fn lock(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, changes: &[Change]) {
        for change in changes {
            let mut said = self.lock();
            said.number += 1;
            let number = said.number;
            let (epoch, name, data) = (&self.epoch, change.name(), change.data());
            let frame = Bytes::from(format!("id: {epoch}-{number}\nevent: {name}\ndata: {data}\n\n"));
            let event = Arc::new(Event { number, frame });
            said.kept.push_back(Arc::clone(&event));
            if said.kept.len() > KEPT {
                said.kept.pop_front();
            }
            // Under the lock, so that who comes now gets each exactly once. That nobody listens is no matter.
            let _nobody = self.out.send(event);
        }
    }

    /// What somebody missed who heard the event with this id last, and what comes from now on. `None` instead of a list: nobody
    /// can say.
    fn listen(&self, last: Option<&str>) -> (Option<VecDeque<Arc<Event>>>, broadcast::Receiver<Arc<Event>>) {
        let said = self.lock();
        let receiver = self.out.subscribe();
        let Some(last) = last else { return (Some(VecDeque::new()), receiver) };
        let number = last.rsplit_once('-').filter(|(epoch, _)| *epoch == self.epoch);
        let number: Option<u64> = number.and_then(|(_, number)| number.parse().ok());
        let oldest = said.kept.front().map_or(said.number + 1, |event| event.number);
        let missed = number.filter(|number| *number <= said.number && *number + 1 >= oldest).map(|number| {
            let after = said.kept.iter().filter(|event| event.number > number);
            after.cloned().collect()
        });
        (missed, receiver)
    }

    /// The stream for one listener.
    pub(super) fn serve(&self, headers: &HeaderMap) -> Result<Response, Refusal> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Refusal::Full)?;
        let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
        let (missed, receiver) = self.listen(last);
        let greeting = match &missed {
            Some(_) => Bytes::from_static(b"retry: 2000\n: listening\n\n"),
            None => Bytes::from_static(b"retry: 2000\nevent: everything\ndata: {}\n\n"),
        };
        let listener = Listener {
            greeting: Some(greeting),
            missed: missed.unwrap_or_default(),
            receiver,
            over: false,
            _place: place,
        };
        let frames = stream::unfold(listener, |mut listener| async {
            let frame = listener.next().await?;
            Some((Ok::<Bytes, std::convert::Infallible>(frame), listener))
        });
        let mut response = Response::new(Body::from_stream(frames));
        let out = response.headers_mut();
        out.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        out.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(response)
    }
}

#[derive(Debug)]
struct Listener {
    greeting: Option<Bytes>,
    missed: VecDeque<Arc<Event>>,
    receiver: broadcast::Receiver<Arc<Event>>,
    over: bool,
    _place: OwnedSemaphorePermit,
}

impl Listener {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        if let Some(greeting) = self.greeting.take() {
            return Some(greeting);
        }
        if let Some(event) = self.missed.pop_front() {
            return Some(event.frame.clone());
        }
        match timeout(SIGN_OF_LIFE, self.receiver.recv()).await {
            Err(_) => Some(Bytes::from_static(b": still here\n\n")),
            Ok(Ok(event)) => Some(event.frame.clone()),
            Ok(Err(RecvError::Lagged(missed))) => {
                self.over = true;
                let data = json!({ "missed": missed, "text": "you did not keep up: connect again and look anew" });
                Some(Bytes::from(format!("event: dropped\ndata: {data}\n\n")))
            }
            Ok(Err(RecvError::Closed)) => None,
        }
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
    fn who_comes_back_gets_what_was_missed_and_who_was_away_too_long_begins_anew() {
        let news = News::new("e".to_owned());
        news.tell(&[nodes(&["a"]), Change::Plan]);
        news.tell(&[nodes(&["b"])]);
        let missed = frames(news.listen(Some("e-2")).0).unwrap();
        assert_eq!(missed, ["id: e-3\nevent: nodes\ndata: {\"more\":0,\"nodes\":[\"b\"]}\n\n"]);
        assert_eq!(frames(news.listen(Some("e-3")).0), Some(Vec::new()));
        assert_eq!(frames(news.listen(None).0), Some(Vec::new()));
        for other in ["e-4", "f-2", "nonsense", "e-", ""] {
            assert_eq!(frames(news.listen(Some(other)).0), None, "{other}");
        }
        for _ in 0..KEPT {
            news.tell(&[Change::Plan]);
        }
        assert_eq!(frames(news.listen(Some("e-2")).0), None);
    }

    #[test]
    fn a_listener_that_does_not_keep_up_is_told_and_sent_away() {
        let news = News::new("e".to_owned());
        let (missed, receiver) = news.listen(None);
        let place = Arc::clone(&news.places).try_acquire_owned().unwrap();
        let mut listener = Listener { greeting: None, missed: missed.unwrap(), receiver, over: false, _place: place };
        for _ in 0..=BEHIND * 2 {
            news.tell(&[Change::Plan]);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (first, second) = runtime.block_on(async { (listener.next().await, listener.next().await) });
        assert!(String::from_utf8_lossy(&first.unwrap()).starts_with("event: dropped\n"));
        assert_eq!(second, None);
    }
}
