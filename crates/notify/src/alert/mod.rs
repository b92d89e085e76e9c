//! Notifications: delivers messages from the store's outbox to webhooks, chats, an Alertmanager and mailboxes.
//!
//! [`doctor_core::alert`] decides the notes, and they are written with the plan they report; nothing here decides. Each
//! receiver has its own thread, so that one that hangs delays neither the cycle nor the others. A receiver gets one
//! message at a time: later notes go into the next one, so a receiver that was unreachable is not flooded when it
//! returns.
//!
//! Guarantee: each message is delivered, or reported as lost. A process that dies after a receiver accepted a message
//! and before that is stored sends it again with the same key; a receiver that must not act twice compares keys.

mod alertmanager;
mod config;
mod delivery_worker;
pub(crate) mod http;
mod mime;
mod secret;
mod service_alerts;
mod slack;
mod smtp;
mod tls_roots;
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
pub use doctor_backend::secret::SecretSource;
use doctor_core::{
    alert::{Notification, Subject},
    time::{Span, Timestamp},
};
use doctor_engine::trigger::Trigger;
use doctor_store::Store;

pub(crate) use self::secret::read as read_secret;
pub use self::{
    config::{AlertSettings, BadReceiver, Channel, Email, Receiver, Security},
    secret::UrlSource,
    webhook::signature,
};
use self::{delivery_worker::DeliveryWorker, service_alerts::ServiceAlerts};

/// A message being sent to one receiver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    /// Identical at each attempt.
    pub(crate) key: &'a str,
    pub(crate) composed: Timestamp,
    pub(crate) notes: &'a [Notification],
    /// Messages to the same receiver that were given up since the last delivery.
    pub(crate) lost_before: u64,
    /// Time of this attempt, by the clock of this machine.
    pub(crate) now: Timestamp,
}

/// Why a message was not delivered. The text contains no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct DeliveryError {
    pub text: String,
    pub retry: Retry,
}

/// Whether a retry may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The receiver will never accept this message.
    Never,
    Later,
    /// The receiver specified the delay.
    After(Span),
}

impl DeliveryError {
    pub(crate) fn later(text: impl Into<String>) -> Self {
        Self { text: text.into(), retry: Retry::Later }
    }
}

/// Sends a message over its receiver's channel.
fn send(
    channel: &Channel,
    message: &Message<'_>,
    limit: Span,
    ca: Option<&std::path::Path>,
) -> Result<(), DeliveryError> {
    match channel {
        Channel::Webhook { url, secret } => webhook::send(url, secret.as_ref(), message, &http::Client::new(limit, ca)),
        Channel::Slack { url } => slack::send(url, message, &http::Client::new(limit, ca)),
        Channel::Alertmanager { url, token } => {
            alertmanager::send(url, token.as_ref(), message, &http::Client::new(limit, ca))
        }
        Channel::Email(email) => smtp::deliver(email, &mime::compose(email, message), limit, ca),
    }
}

/// Sends a test message to one receiver immediately, bypassing the outbox.
///
/// # Errors
/// If it is not delivered.
pub fn send_test_message(
    settings: &AlertSettings,
    receiver: &Receiver,
    by: &str,
    now: Timestamp,
) -> Result<(), DeliveryError> {
    let notes = [Notification { at: now, subject: Subject::Test { by: by.to_owned() } }];
    let key = format!("trial-{}", now.millis());
    let message = Message { key: &key, composed: now, notes: &notes, lost_before: 0, now };
    send(&receiver.channel, &message, settings.timeout, settings.ca.as_deref())
}

/// The delivery threads, and the one that watches the service itself. After a drop they end with their current task.
#[derive(Debug)]
pub struct Alerter {
    stop: Arc<AtomicBool>,
    triggers: Vec<Arc<Trigger>>,
    threads: Vec<JoinHandle<()>>,
}

/// How often a delivery worker runs without being woken.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

impl Alerter {
    /// Starts one delivery worker per receiver, and the self-check of the service if there is a receiver. `clock` is
    /// the cluster's clock, which gives the timestamps of cases; deliveries use this machine's clock.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(settings: &AlertSettings, store: &Store, clock: &Arc<dyn Clock>) -> std::io::Result<Self> {
        let mut alerter = Self { stop: Arc::default(), triggers: Vec::new(), threads: Vec::new() };
        for (name, receiver) in &settings.receivers {
            let mut worker = DeliveryWorker::new(name, receiver.clone(), settings, store.clone());
            let body = move |trigger: &Trigger| trigger.wait(worker.poll().min(POLL_INTERVAL));
            alerter.spawn(&format!("alert-{name}"), body)?;
        }
        if settings.receivers.is_empty() {
            // No worker is left to handle waiting messages.
            if let Err(error) = store.give_up_removed_receivers(&[], SystemClock.now()) {
                tracing::warn!(%error, "cannot discard messages without a receiver");
            }
        } else {
            let mut service_alerts = ServiceAlerts::new(settings.clone(), store.clone(), Arc::clone(clock));
            alerter.spawn("alert-watch", move |trigger: &Trigger| trigger.wait(service_alerts.check()))?;
        }
        Ok(alerter)
    }

    fn spawn(&mut self, name: &str, mut step: impl FnMut(&Trigger) -> bool + Send + 'static) -> std::io::Result<()> {
        let (trigger, stop) = (Arc::new(Trigger::default()), Arc::clone(&self.stop));
        self.triggers.push(Arc::clone(&trigger));
        let body = move || {
            while !stop.load(Ordering::Relaxed) {
                step(&trigger);
            }
        };
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(body)?);
        Ok(())
    }

    /// Wakes the workers, because notes may be waiting.
    pub fn wake(&self) {
        self.triggers.iter().for_each(|trigger| trigger.fire());
    }

    /// Stops the threads and waits for the current deliveries, which have a timeout.
    pub fn stop(mut self) {
        self.request_stop();
        for thread in self.threads.drain(..) {
            // The thread returns nothing.
            let _result = thread.join();
        }
    }

    fn request_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
    }
}

impl Drop for Alerter {
    /// Does not wait: the control loop drops it when the receivers change.
    fn drop(&mut self) {
        self.request_stop();
    }
}

/// Checks the service and delivers what is due, once, for a short-lived program.
pub fn deliver_once(settings: &AlertSettings, store: &Store, clock: &Arc<dyn Clock>) {
    if settings.receivers.is_empty() {
        return;
    }
    ServiceAlerts::new(settings.clone(), store.clone(), Arc::clone(clock)).check();
    thread::scope(|scope| {
        for (name, receiver) in &settings.receivers {
            let mut worker = DeliveryWorker::new(name, receiver.clone(), settings, store.clone());
            scope.spawn(move || worker.deliver_now());
        }
    });
}
