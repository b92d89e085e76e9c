//! Confirmation of changes: who makes them, why, and the prompt before they are made.

mod api_action;

use std::{
    io::{self, BufRead, IsTerminal, Write},
    sync::Arc,
};

use doctor_checks::Catalogue;
use doctor_core::time::Timestamp;
use doctor_engine::operator_commands::{CommandOrigin, OperatorCommand, OverLimit};
use doctor_store::{Store, StoreError};
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::sanitize,
};

pub(crate) use self::api_action::ApiAction;

/// How often a command with `--yes` is planned if the controller changes its nodes meanwhile.
const MAX_PLANS: u32 = 10;

/// The options of every command that changes something.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ChangeArgs {
    /// Name recorded in the audit trail. Default: $SUDO_USER, $USER or $LOGNAME.
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Skip the confirmation prompt.
    #[arg(long, short)]
    yes: bool,
}

/// The options of a command that takes nodes out of service.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct NodeChangeArgs {
    #[command(flatten)]
    change_args: ChangeArgs,
    /// Number of nodes that the command names. Required with `--yes` for more nodes than the circuit breaker would allow;
    /// those that operators took out within the hour or requested to take out count.
    #[arg(long, value_name = "N")]
    confirm_nodes: Option<u64>,
}

/// A change to be confirmed, or made.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Change {
    /// One sentence that says what would happen.
    #[serde(skip)]
    pub plan: String,
    /// One line per object that changes.
    pub changes: Vec<String>,
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    /// One sentence in the past tense that says what was done.
    pub done: String,
    /// What the operator can do next.
    pub next: String,
}

impl NodeChangeArgs {
    /// As [`ChangeArgs::submit_command`], for a command that takes nodes out of service.
    pub(crate) fn submit_command(
        &self,
        context: &Context,
        why: &str,
        action: &ApiAction,
        order: impl Fn(Timestamp) -> Result<OperatorCommand>,
    ) -> Result<Exit> {
        self.change_args.submit(context, why, self.confirm_nodes, action, &order)
    }
}

impl ChangeArgs {
    /// Returns the name for the audit trail.
    pub(crate) fn operator_name(&self) -> String {
        let env = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let named = self.by.clone().or_else(|| env("SUDO_USER")).or_else(|| env("USER")).or_else(|| env("LOGNAME"));
        named.unwrap_or_else(|| "unknown user".to_owned())
    }

    /// Whether the operator is named on the command line.
    const fn names_operator(&self) -> bool {
        self.by.is_some()
    }

    /// Whether the change is confirmed without a prompt.
    const fn is_confirmed(&self) -> bool {
        self.yes
    }

    /// Prepares an operator command, asks for confirmation, stores the command and reports it. `order` receives the
    /// current time. With a connection to a controller, the controller does the same by `action`.
    ///
    /// With `--yes` no plan is reviewed, so a command whose plan is outdated when it is stored is planned again.
    pub(crate) fn submit_command(
        &self,
        context: &Context,
        why: &str,
        action: &ApiAction,
        order: impl Fn(Timestamp) -> Result<OperatorCommand>,
    ) -> Result<Exit> {
        self.submit(context, why, None, action, &order)
    }

    fn submit(
        &self,
        context: &Context,
        why: &str,
        number: Option<u64>,
        action: &ApiAction,
        order: &dyn Fn(Timestamp) -> Result<OperatorCommand>,
    ) -> Result<Exit> {
        if let Some(server) = context.server() {
            return action.submit(context, server, self, (why, number));
        }
        let store = context.store_for_changes()?;
        for _ in 1..MAX_PLANS {
            match self.plan_and_store(context, &store, (why, number), order) {
                Err(Failure::Store(StoreError::StateChanged { .. })) if self.yes => {}
                done => return done,
            }
        }
        self.plan_and_store(context, &store, (why, number), order)
    }

    fn plan_and_store(
        &self,
        context: &Context,
        store: &Store,
        (why, number): (&str, Option<u64>),
        order: &dyn Fn(Timestamp) -> Result<OperatorCommand>,
    ) -> Result<Exit> {
        let facts = context.facts(store)?;
        let (by, why, at) = (self.operator_name(), why.to_owned(), facts.now);
        let order = order(at)?;
        // Only commands that name tests need the policy, so that a node can be held while the policy is invalid.
        let catalogue = match order.needs_catalogue() {
            true => Arc::clone(&context.loaded()?.settings.catalogue),
            false => Arc::new(Catalogue::new([])),
        };
        let prepared = order.prepare(&facts, &catalogue)?;
        let over_limit = unconfirmed_limit(prepared.nodes.len(), prepared.over_limit.as_ref(), number)?;
        let change = Change {
            plan: prepared.plan.clone(),
            changes: prepared.changes.clone(),
            by: by.clone(),
            why: why.clone(),
            at,
            done: prepared.done.clone(),
            next: prepared.next.clone(),
        };
        self.confirm_within(&change, over_limit)?;
        prepared.execute(store, &CommandOrigin { by, why, at })?;
        self.report(context, &change)?;
        Ok(Exit::Ok)
    }

    /// Shows the change, asks for confirmation, makes the change and reports it.
    pub(crate) fn apply(
        &self,
        context: &Context,
        change: &Change,
        effect: impl FnOnce() -> Result<()>,
    ) -> Result<Exit> {
        self.confirm(change)?;
        effect()?;
        self.report(context, change)?;
        Ok(Exit::Ok)
    }

    /// Shows the change and asks for confirmation, unless `--yes` is given.
    pub(crate) fn confirm(&self, change: &Change) -> Result<()> {
        self.confirm_within(change, None)
    }

    /// As [`Self::confirm`]. Beyond a limit, `--yes` is not enough: the number of nodes confirms the change.
    fn confirm_within(&self, change: &Change, over_limit: Option<&OverLimit>) -> Result<()> {
        match over_limit {
            _ if !self.yes => Self::prompt(change, over_limit),
            Some(limit) => Err(not_confirmed(limit)),
            None => Ok(()),
        }
    }

    /// Reports a change that was made.
    pub(crate) fn report(&self, context: &Context, change: &Change) -> Result<()> {
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

    fn prompt(change: &Change, over_limit: Option<&OverLimit>) -> Result<()> {
        // The prompt goes to standard error, because a program may read standard output.
        let mut err = io::stderr().lock();
        writeln!(err, "{}", sanitize(&change.plan))?;
        for line in &change.changes {
            writeln!(err, "  {}", sanitize(line))?;
        }
        if let Some(limit) = over_limit {
            writeln!(err, "Note: {}.", sanitize(&limit.text))?;
        }
        if !io::stdin().is_terminal() {
            return Err(over_limit.map_or(Failure::NotConfirmed, not_confirmed));
        }
        match over_limit {
            Some(_) => write!(err, "Type the number of nodes to proceed: ")?,
            None => write!(err, "Proceed? [y/N] ")?,
        }
        err.flush()?;
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        match over_limit {
            Some(limit) if limit.is_confirmed_by(answer.trim().parse().ok()) => Ok(()),
            Some(limit) => Err(not_confirmed(limit)),
            None if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
            None => Err(Failure::NotConfirmed),
        }
    }
}

/// Returns the limit that this number does not confirm. A number that does not fit the command is an error.
fn unconfirmed_limit(nodes: usize, limit: Option<&OverLimit>, number: Option<u64>) -> Result<Option<&OverLimit>> {
    let Some(number) = number else { return Ok(limit) };
    if usize::try_from(number).is_ok_and(|number| number == nodes) {
        return Ok(None);
    }
    let limit = format!("the command names {nodes} nodes, and `--confirm-nodes` {number}");
    Err(Failure::NumberNotConfirmed { limit, nodes })
}

fn not_confirmed(limit: &OverLimit) -> Failure {
    Failure::NumberNotConfirmed { limit: limit.text.clone(), nodes: limit.nodes }
}
