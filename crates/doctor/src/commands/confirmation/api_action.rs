//! Changes through the API of a controller: the plan of an action, its confirmation, and its result.

use doctor_api::operator_api::ActionKind;
use doctor_engine::operator_commands::OverLimit;
use serde_json::{Map, Value};

use super::{Change, ChangeArgs, MAX_PLANS, unconfirmed_limit};
use crate::{
    connection::{ActionReply, Server, ServerError},
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::sanitize,
};

/// A command as the API takes it.
#[derive(Debug)]
pub(crate) struct ApiAction {
    kind: ActionKind,
    fields: Map<String, Value>,
}

impl ApiAction {
    pub(crate) fn new(kind: ActionKind) -> Self {
        Self { kind, fields: Map::new() }
    }

    /// Adds a field that lists these, unless there are none.
    #[must_use]
    pub(crate) fn list(mut self, name: &str, items: impl IntoIterator<Item = impl ToString>) -> Self {
        let items: Vec<Value> = items.into_iter().map(|item| Value::String(item.to_string())).collect();
        if !items.is_empty() {
            self.fields.insert(name.to_owned(), Value::Array(items));
        }
        self
    }

    /// Adds a field, if there is a value.
    #[must_use]
    pub(crate) fn text(mut self, name: &str, value: Option<impl ToString>) -> Self {
        if let Some(value) = value {
            self.fields.insert(name.to_owned(), Value::String(value.to_string()));
        }
        self
    }

    /// Adds a field that is true, if it is.
    #[must_use]
    pub(crate) fn flag(mut self, name: &str, value: bool) -> Self {
        if value {
            self.fields.insert(name.to_owned(), Value::Bool(true));
        }
        self
    }

    /// Sends the action; with a plan, which the operator has confirmed, to be carried out.
    fn request(
        &self,
        server: &Server,
        why: &str,
        plan: Option<&ActionReply>,
    ) -> std::result::Result<ActionReply, ServerError> {
        let mut body = self.fields.clone();
        body.insert("why".to_owned(), why.into());
        if let Some(plan) = plan {
            body.extend(plan.confirm.as_deref().map(|confirm| ("confirm".to_owned(), confirm.into())));
            body.extend(plan.confirm_nodes.map(|number| ("confirm_nodes".to_owned(), number.into())));
        }
        server.act(&format!("/actions/{}", self.kind.name()), &Value::Object(body))
    }

    /// Has the controller plan the action, asks for confirmation, has it carried out and reports it.
    ///
    /// With `--yes` no plan is reviewed, so an action whose plan is outdated is carried out by its current plan. `number` is
    /// the number of nodes that the operator gave.
    pub(super) fn submit(
        &self,
        context: &Context,
        server: &Server,
        args: &ChangeArgs,
        (why, number): (&str, Option<u64>),
    ) -> Result<Exit> {
        if args.names_operator() {
            let text = "--by is not accepted with a controller's API: the audit trail records the name of the token";
            return Err(Failure::Usage(text.to_owned()));
        }
        let mut plan = self.request(server, why, None)?;
        confirm(args, &plan, number)?;
        let mut plans = 1;
        loop {
            match self.request(server, why, Some(&plan)) {
                Ok(done) => {
                    args.report(context, &change(&done))?;
                    return Ok(Exit::Ok);
                }
                Err(ServerError::PlanChanged(current)) if args.is_confirmed() && plans < MAX_PLANS => {
                    plan = *current;
                    confirm(args, &plan, number)?;
                }
                Err(error) => return Err(error.into()),
            }
            plans += 1;
        }
    }
}

/// Shows a plan and asks for its confirmation, unless the command line has it.
fn confirm(args: &ChangeArgs, plan: &ActionReply, number: Option<u64>) -> Result<()> {
    let limit = plan.confirm_nodes.map(|nodes| {
        let text = plan.limit.as_deref().map(sanitize).unwrap_or_default();
        OverLimit { nodes, text }
    });
    args.confirm_within(&change(plan), unconfirmed_limit(plan.nodes.len(), limit.as_ref(), number)?)
}

/// Returns a reply as the change that a local command shows.
fn change(reply: &ActionReply) -> Change {
    Change {
        plan: sanitize(&reply.text),
        changes: reply.changes.iter().map(|line| sanitize(line)).collect(),
        by: sanitize(&reply.by),
        why: sanitize(&reply.why),
        at: reply.at,
        done: sanitize(&reply.text),
        next: reply.next.as_deref().map(sanitize).unwrap_or_default(),
    }
}
