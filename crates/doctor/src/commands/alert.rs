//! `doctor alert`: tests receivers, and lists pending and lost messages.

use clap::Subcommand;
use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::alert as notes;
use doctor_notify::alert::{self, Receiver};
use doctor_store::outbox::{MessageRow, MessageState, PendingNotifications};
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Cell, Table, ago, cell, format_time, plural},
};

/// Test alert receivers, and list pending and lost messages.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: AlertCommand,
}

#[derive(Debug, Subcommand)]
enum AlertCommand {
    /// Send a test message to receivers and print whether it arrived. Exit code 1 if one did not.
    Test(TestArgs),
    /// List pending and lost messages. Exit code 1 if a message was lost within the last day.
    List(ListArgs),
}

#[derive(Debug, clap::Args)]
struct TestArgs {
    /// Receivers, as named in `[alerts.receivers.NAME]`. Default: all.
    #[arg(value_name = "RECEIVER")]
    receivers: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Include delivered messages.
    #[arg(long)]
    all: bool,
    /// Maximum number of messages, newest first.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(super) limit: u32,
}

impl Args {
    /// Whether this only reads the store.
    pub(crate) const fn reads(&self) -> bool {
        matches!(self.command, AlertCommand::List(_))
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        AlertCommand::Test(args) => test(context, args),
        AlertCommand::List(args) => list(context, args),
    }
}

#[derive(Debug, Serialize)]
struct TestOutcome {
    receiver: String,
    arrived: bool,
    error: Option<String>,
}

fn test(context: &Context, args: &TestArgs) -> Result<Exit> {
    let settings = &context.config()?.alerts;
    let known: Vec<&str> = settings.receivers.keys().map(String::as_str).collect();
    if known.is_empty() {
        let text = "no receiver is configured: see [alerts] in `doctor config init`, and docs/guide/alerts.md";
        return Err(Failure::Usage(text.to_owned()));
    }
    if let Some(name) = args.receivers.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(Failure::Unknown { what: "receiver", name: name.clone(), known: known.join(", ") });
    }
    let selected = |name: &String| args.receivers.is_empty() || args.receivers.contains(name);
    let selected: Vec<(&String, &Receiver)> = settings.receivers.iter().filter(|(name, _)| selected(name)).collect();
    let by = std::env::var("USER").unwrap_or_else(|_| "unknown user".to_owned());
    let outcomes: Vec<TestOutcome> = selected
        .into_iter()
        .map(|(name, receiver)| {
            let sent = alert::send_test_message(settings, receiver, &by, SystemClock.now());
            TestOutcome { receiver: name.clone(), arrived: sent.is_ok(), error: sent.err().map(|error| error.text) }
        })
        .collect();
    context.out.show(&outcomes, |page| {
        for outcome in &outcomes {
            match &outcome.error {
                None => page.line(format!("{}: delivered", outcome.receiver)),
                Some(error) => page.line(format!("{}: not delivered: {error}", outcome.receiver)),
            };
        }
    })?;
    Ok(if outcomes.iter().all(|outcome| outcome.arrived) { Exit::Ok } else { Exit::ProblemsFound })
}

#[derive(Debug, Serialize)]
struct ListView {
    waiting: Vec<(String, PendingNotifications)>,
    messages: Vec<MessageRow>,
    lost_within_a_day: u64,
}

pub(super) fn list(context: &Context, args: &ListArgs) -> Result<Exit> {
    let store = context.store()?;
    let now = SystemClock.now();
    let view = ListView {
        waiting: store.pending_alerts()?.into_iter().filter(|(_, what)| what.notes + what.messages > 0).collect(),
        messages: store.alert_messages(args.limit, args.all)?,
        lost_within_a_day: store.alerts_given_up_since(now.minus(doctor_core::time::Span::days(1)))?,
    };
    context.out.show(&view, |page| {
        for (receiver, waiting) in view.waiting.iter().filter(|(_, waiting)| waiting.notes > 0) {
            let count = plural(usize::try_from(waiting.notes).unwrap_or(usize::MAX), "event");
            page.line(format!("{receiver}: {count} queued for the next message"));
        }
        if view.messages.is_empty() {
            page.line(if args.all { "No messages." } else { "No pending and no lost messages." });
            return;
        }
        let mut table =
            Table::new(["RECEIVER", "STATE", "CREATED (UTC)", "ATTEMPTS", "NEXT OR ENDED", "ABOUT", "ERROR"]);
        for row in &view.messages {
            table.row(cells(row, now));
        }
        page.table(&table);
        page.line("`doctor alert test RECEIVER` sends a test message");
    })?;
    Ok(if view.lost_within_a_day == 0 { Exit::Ok } else { Exit::ProblemsFound })
}

fn cells(row: &MessageRow, now: doctor_core::time::Timestamp) -> Vec<Cell> {
    let state = match row.state {
        MessageState::Waiting => cell("pending").warn(),
        MessageState::Delivered => cell("delivered"),
        MessageState::GivenUp => cell("lost").bad(),
    };
    let moment = match (row.next_attempt, row.ended) {
        (Some(next), _) if next > now => format!("in {}", next.since(now)),
        (Some(_), _) => "now".to_owned(),
        (None, Some(ended)) => ago(now, ended),
        (None, None) => String::new(),
    };
    vec![
        cell(row.receiver.as_str()),
        state,
        cell(format_time(row.composed)),
        cell(row.attempts.to_string()),
        cell(moment),
        cell(notes::headline(&row.notes)),
        cell(row.error.clone().unwrap_or_default()),
    ]
}
