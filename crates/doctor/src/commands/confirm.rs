//! Changes: who makes them, why, and the question before they are made.

use std::{
    io::{self, BufRead, IsTerminal, Write},
    sync::Arc,
};

use doctor_checks::Catalogue;
use doctor_core::time::Timestamp;
use doctor_engine::orders::{Order, Signature};
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Options of every command that changes something.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Signed {
    /// Who asks; it stands in the audit trail. Else: $SUDO_USER or $USER.
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Do it without asking.
    #[arg(long, short)]
    yes: bool,
}

/// A change about to be made, or made.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Change {
    /// One sentence in the future tense: what would happen.
    #[serde(skip)]
    pub plan: String,
    /// One line for each thing that would change.
    pub changes: Vec<String>,
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    /// One sentence in the past tense.
    pub done: String,
    /// What to do next.
    pub next: String,
}

impl Signed {
    /// Whose name stands in the audit trail.
    pub(crate) fn by(&self) -> String {
        let env = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let named = self.by.clone().or_else(|| env("SUDO_USER")).or_else(|| env("USER")).or_else(|| env("LOGNAME"));
        named.unwrap_or_else(|| "somebody without a name".to_owned())
    }

    /// Gives an order, which is made at the moment it is given: shows what would come of it, makes sure that it is wanted,
    /// writes it down, and says so.
    pub(crate) fn give(
        &self,
        context: &Context,
        why: &str,
        order: impl FnOnce(Timestamp) -> Result<Order>,
    ) -> Result<Exit> {
        let store = context.store()?;
        let facts = context.facts(&store)?;
        let (by, why, at) = (self.by(), why.to_owned(), facts.now);
        let order = order(at)?;
        // A mistake in the policy keeps nobody from holding a node.
        let catalogue = match order.names_tests() {
            true => Arc::clone(&context.loaded()?.settings.catalogue),
            false => Arc::new(Catalogue::new([])),
        };
        let prepared = order.prepare(&facts, &catalogue)?;
        let change = Change {
            plan: prepared.plan.clone(),
            changes: prepared.changes.clone(),
            by: by.clone(),
            why: why.clone(),
            at,
            done: prepared.done.clone(),
            next: prepared.next.clone(),
        };
        self.carry_out(context, &change, || Ok(prepared.carry_out(&store, &Signature { by, why, at })?))
    }

    /// Shows what would change, makes sure that it is wanted, does it, and says that it was done.
    pub(crate) fn carry_out(
        &self,
        context: &Context,
        change: &Change,
        effect: impl FnOnce() -> Result<()>,
    ) -> Result<Exit> {
        self.confirm(change)?;
        effect()?;
        self.say(context, change)?;
        Ok(Exit::Ok)
    }

    /// Shows what would change and makes sure that it is wanted.
    pub(crate) fn confirm(&self, change: &Change) -> Result<()> {
        if self.yes { Ok(()) } else { Self::ask(change) }
    }

    /// Says that it was done.
    pub(crate) fn say(&self, context: &Context, change: &Change) -> Result<()> {
        const MOST: usize = 20;
        Ok(context.out.show(change, |page| {
            page.line(&change.done);
            for line in change.changes.iter().take(MOST) {
                page.line(format!("  {line}"));
            }
            if change.changes.len() > MOST {
                page.line(format!("  and {} more", change.changes.len() - MOST));
            }
            page.line(format!("Why: {} ({})", change.why, change.by));
            page.line(format!("Next: {}", change.next));
        })?)
    }

    fn ask(change: &Change) -> Result<()> {
        // The question is no part of the answer: standard output may be read by a program.
        let mut err = io::stderr().lock();
        writeln!(err, "{}", change.plan)?;
        for line in &change.changes {
            writeln!(err, "  {line}")?;
        }
        if !io::stdin().is_terminal() {
            return Err(Failure::NotConfirmed);
        }
        write!(err, "Do it? [y/N] ")?;
        err.flush()?;
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        if matches!(answer.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(Failure::NotConfirmed) }
    }
}
