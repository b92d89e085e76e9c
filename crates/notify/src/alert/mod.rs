//! Telling people: messages from the store's outbox to webhooks, chats, an Alertmanager and mailboxes.
//!
//! What is told is decided in [`doctor_core::alert`] and written with the plan it tells of; nothing here decides. Each
//! receiver has a thread of its own, so that one that hangs holds up neither the cycle nor the others. A receiver is sent one
//! message at a time: what happens meanwhile goes into the next one, so a receiver that was away is not flooded when it comes
//! back.
//!
//! What is promised: each message arrives, or is said to be lost. A process that dies after a receiver has taken a message
//! and before that is written down sends it again, with the same key: who must not act twice compares keys.

mod alertmanager;
mod config;
mod courier;
pub(crate) mod http;
mod mime;
mod secret;
mod slack;
mod smtp;
mod trust;
mod watch;
mod webhook;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{
    alert::{About, Note},
    time::{Span, Timestamp},
};
use doctor_engine::wake::Wake;
use doctor_store::Store;

pub use self::{
    config::{AlertSettings, BadReceiver, Email, Receiver, Security, Way},
    secret::{Address, Hidden},
    webhook::signature,
};
use self::{courier::Courier, watch::Watch};

/// A message on its way to one receiver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Letter<'a> {
    /// The same at each try.
    pub(crate) key: &'a str,
    pub(crate) composed: Timestamp,
    pub(crate) notes: &'a [Note],
    /// Messages to the same receiver that were given up since the last one arrived.
    pub(crate) lost_before: u64,
    /// By the clock of this machine, at this try.
    pub(crate) now: Timestamp,
}

/// Why a message did not arrive. The text names no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct NotSent {
    pub text: String,
    pub retry: Retry,
}

/// Whether trying again may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// This message will never be taken.
    Never,
    Later,
    /// The receiver said when.
    After(Span),
}

impl NotSent {
    pub(crate) fn later(text: impl Into<String>) -> Self {
        Self { text: text.into(), retry: Retry::Later }
    }
}

/// Sends a letter the way its receiver is reached.
fn send(way: &Way, letter: &Letter<'_>, limit: Span, ca: Option<&std::path::Path>) -> Result<(), NotSent> {
    match way {
        Way::Webhook { url, secret } => webhook::send(url, secret.as_ref(), letter, &http::Client::new(limit, ca)),
        Way::Slack { url } => slack::send(url, letter, &http::Client::new(limit, ca)),
        Way::Alertmanager { url, token } => {
            alertmanager::send(url, token.as_ref(), letter, &http::Client::new(limit, ca))
        }
        Way::Email(email) => smtp::deliver(email, &mime::mail(email, letter), limit, ca),
    }
}

/// Sends a message to one receiver at once, past the outbox, to see whether it arrives.
///
/// # Errors
/// If it does not.
pub fn try_receiver(settings: &AlertSettings, receiver: &Receiver, by: &str, now: Timestamp) -> Result<(), NotSent> {
    let notes = [Note { at: now, about: About::Trial { by: by.to_owned() } }];
    let key = format!("trial-{}", now.millis());
    let letter = Letter { key: &key, composed: now, notes: &notes, lost_before: 0, now };
    send(&receiver.way, &letter, settings.timeout, settings.ca.as_deref())
}

/// The threads that deliver, and the one that watches the service itself. Dropped, they end after what they are at.
#[derive(Debug)]
pub struct Alerter {
    stop: Arc<AtomicBool>,
    bells: Vec<Arc<Wake>>,
    threads: Vec<JoinHandle<()>>,
}

/// How often a courier looks without being called.
const LOOK: Duration = Duration::from_secs(2);

impl Alerter {
    /// `clock` is the cluster's: moments of cases are its. Deliveries go by this machine's.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(settings: &AlertSettings, store: &Store, clock: &Arc<dyn Clock>) -> std::io::Result<Self> {
        let mut alerter = Self { stop: Arc::default(), bells: Vec::new(), threads: Vec::new() };
        for (name, receiver) in &settings.receivers {
            let mut courier = Courier::new(name, receiver.clone(), settings, store.clone());
            let body = move |bell: &Wake| bell.wait(courier.look().min(LOOK));
            alerter.spawn(&format!("alert-{name}"), body)?;
        }
        if settings.receivers.is_empty() {
            // Nobody is left who would look after what waits.
            if let Err(error) = store.abandon_alerts(&[], SystemClock.now()) {
                tracing::warn!("messages that nobody receives any more cannot be given up: {error}");
            }
        } else {
            let mut watch = Watch::new(settings.clone(), store.clone(), Arc::clone(clock));
            alerter.spawn("alert-watch", move |bell: &Wake| bell.wait(watch.look()))?;
        }
        Ok(alerter)
    }

    fn spawn(&mut self, name: &str, mut turn: impl FnMut(&Wake) -> bool + Send + 'static) -> std::io::Result<()> {
        let (bell, stop) = (Arc::new(Wake::default()), Arc::clone(&self.stop));
        self.bells.push(Arc::clone(&bell));
        let body = move || {
            while !stop.load(Ordering::Relaxed) {
                turn(&bell);
            }
        };
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(body)?);
        Ok(())
    }

    /// Something may wait to be told.
    pub fn ring(&self) {
        self.bells.iter().for_each(|bell| bell.ring());
    }

    /// Ends when what is under way has ended, which has a limit.
    pub fn stop(mut self) {
        self.end();
        for thread in self.threads.drain(..) {
            // It has nothing to say but that it is over.
            let _over = thread.join();
        }
    }

    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.ring();
    }
}

impl Drop for Alerter {
    /// Without waiting: whoever exchanges receivers is in the middle of the cycle's loop.
    fn drop(&mut self) {
        self.end();
    }
}

/// Looks at the service and delivers what is due, once around, for a program that does not stay.
pub fn deliver_once(settings: &AlertSettings, store: &Store, clock: &Arc<dyn Clock>) {
    if settings.receivers.is_empty() {
        return;
    }
    Watch::new(settings.clone(), store.clone(), Arc::clone(clock)).look();
    thread::scope(|scope| {
        for (name, receiver) in &settings.receivers {
            let mut courier = Courier::new(name, receiver.clone(), settings, store.clone());
            scope.spawn(move || courier.deliver_now());
        }
    });
}
