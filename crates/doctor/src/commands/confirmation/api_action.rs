//! Changes through the API of a controller: the plan of an action, its confirmation, and its result.

use doctor_api::operator_api::ActionKind;
use serde_json::{Map, Value};

use super::{Change, ChangeArgs, MAX_PLANS};
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

    fn request(
        &self,
        server: &Server,
        why: &str,
        confirm: Option<&str>,
    ) -> std::result::Result<ActionReply, ServerError> {
        let mut body = self.fields.clone();
        body.insert("why".to_owned(), why.into());
        body.extend(confirm.map(|confirm| ("confirm".to_owned(), confirm.into())));
        server.act(&format!("/actions/{}", self.kind.name()), &Value::Object(body))
    }

    /// Has the controller plan the action, asks for confirmation, has it carried out and reports it.
    ///
    /// With `--yes` no plan is reviewed, so an action whose plan is outdated is carried out by its current plan.
    pub(super) fn submit(&self, context: &Context, server: &Server, args: &ChangeArgs, why: &str) -> Result<Exit> {
        if args.names_operator() {
            let text = "--by is not accepted with a controller's API: the audit trail records the name of the token";
            return Err(Failure::Usage(text.to_owned()));
        }
        let mut plan = self.request(server, why, None)?;
        args.confirm(&change(&plan))?;
        let mut plans = 1;
        loop {
            match self.request(server, why, plan.confirm.as_deref()) {
                Ok(done) => {
                    args.report(context, &change(&done))?;
                    return Ok(Exit::Ok);
                }
                Err(ServerError::PlanChanged(current)) if args.is_confirmed() && plans < MAX_PLANS => plan = *current,
                Err(error) => return Err(error.into()),
            }
            plans += 1;
        }
    }
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
