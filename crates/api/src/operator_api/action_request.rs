//! Bodies of action requests: the fields of each, in one table, and the operator command they describe.

use doctor_core::{
    case::Repair,
    hostlist::{HostlistError, Selector},
    ids::{CaseId, PoolName, TestId},
    reason::UnknownCode,
    time::{Span, Timestamp},
};
use doctor_engine::operator_commands::{self, OperatorCommand};
use serde_json::{Map, Value, json};

use super::error::ApiError;

/// An action of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActionKind {
    Test,
    Hold,
    Release,
    Quarantine,
    Repair,
    Pause,
    Resume,
    CloseBreaker,
    Acknowledge,
    Snooze,
}

impl ActionKind {
    pub const ALL: [Self; 10] = [
        Self::Test,
        Self::Hold,
        Self::Release,
        Self::Quarantine,
        Self::Repair,
        Self::Pause,
        Self::Resume,
        Self::CloseBreaker,
        Self::Acknowledge,
        Self::Snooze,
    ];

    /// Its name in the path.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Test => "test",
            Self::Hold => "hold",
            Self::Release => "release",
            Self::Quarantine => "quarantine",
            Self::Repair => "repair",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::CloseBreaker => "close-breaker",
            Self::Acknowledge => "acknowledge",
            Self::Snooze => "snooze",
        }
    }

    /// Its name in the audit trail.
    pub(super) const fn audit_name(self) -> &'static str {
        match self {
            Self::Test => "api-test",
            Self::Hold => "api-hold",
            Self::Release => "api-release",
            Self::Quarantine => "api-quarantine",
            Self::Repair => "api-repair",
            Self::Pause => "api-pause",
            Self::Resume => "api-resume",
            Self::CloseBreaker => "api-close-breaker",
            Self::Acknowledge => "api-acknowledge",
            Self::Snooze => "api-snooze",
        }
    }

    pub(super) const fn summary(self) -> &'static str {
        match self {
            Self::Test => "Test nodes now, before tests that are due",
            Self::Hold => "Hold nodes: the controller leaves them alone",
            Self::Release => "Release nodes: ends a hold, requalifies a node that was out of service",
            Self::Quarantine => "Take nodes out of service and examine them",
            Self::Repair => "Reset, reboot or replace nodes once, then requalify them",
            Self::Pause => "Pause validation",
            Self::Resume => "Resume validation",
            Self::CloseBreaker => "Close the circuit breaker: nodes may be taken out again",
            Self::Acknowledge => "Acknowledge cases: no more notifications about them until they close",
            Self::Snooze => "Snooze cases: no notifications about them for a while",
        }
    }

    /// Fields other than `why` and `confirm`, and whether each is required.
    const fn fields(self) -> &'static [(&'static str, bool, FieldKind)] {
        match self {
            Self::Test => &[
                ("nodes", true, FieldKind::TextList),
                ("tests", false, FieldKind::TextList),
                ("multi_node", false, FieldKind::Flag),
            ],
            Self::Hold => &[("nodes", true, FieldKind::TextList), ("until", false, FieldKind::Text)],
            Self::Release => &[("nodes", true, FieldKind::TextList)],
            Self::Quarantine => &[
                ("nodes", true, FieldKind::TextList),
                ("drain", false, FieldKind::Flag),
                (CONFIRM_NODES, false, FieldKind::Count),
            ],
            Self::Repair => &[
                ("nodes", true, FieldKind::TextList),
                ("step", true, FieldKind::Repair),
                ("drain", false, FieldKind::Flag),
                (CONFIRM_NODES, false, FieldKind::Count),
            ],
            Self::Pause => &[("pool", false, FieldKind::Text), ("for", false, FieldKind::Text)],
            Self::Resume => &[("pool", false, FieldKind::Text)],
            Self::CloseBreaker => &[],
            Self::Acknowledge => &[("cases", true, FieldKind::TextList)],
            Self::Snooze => &[("cases", true, FieldKind::TextList), ("until", true, FieldKind::Text)],
        }
    }

    /// Returns the schema of its body.
    pub(super) fn schema(self) -> Value {
        let mut properties = Map::new();
        let mut required = vec!["why"];
        for (name, is_required, kind) in self.fields() {
            properties.insert((*name).to_owned(), kind.schema(name));
            required.extend(is_required.then_some(*name));
        }
        let why = json!({
            "type": "string", "minLength": 1, "maxLength": MAX_REASON_LENGTH, "description": "the reason, for the audit trail",
        });
        let confirm = json!({
            "type": "string", "maxLength": 128,
            "description": "from the response to the same request without it; carries out the plan",
        });
        properties.extend([("why".to_owned(), why), ("confirm".to_owned(), confirm)]);
        json!({ "type": "object", "required": required, "properties": properties, "additionalProperties": false })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FieldKind {
    Text,
    TextList,
    Flag,
    Count,
    Repair,
}

impl FieldKind {
    fn schema(self, name: &str) -> Value {
        let about = match name {
            "nodes" => "selectors: node[01-64], pool=NAME, state=STATE, or a name with `*`",
            "tests" => "tests or suites; default: all regular tests",
            "cases" => "case ids, as `GET /cases` lists them",
            "multi_node" => "one run over all these nodes",
            "until" => "a duration such as 4h, or a time; default of `hold`: until released",
            "for" => "a duration such as 4h; default: until resumed",
            "drain" => "evict user work, if the cluster supports it",
            "step" => "what is done to each node, once",
            CONFIRM_NODES => "the number of nodes, required with `confirm` if the plan has `confirm_nodes`",
            _ => "only this pool; default: all pools",
        };
        match self {
            Self::Text => json!({ "type": "string", "minLength": 1, "maxLength": 256, "description": about }),
            Self::TextList => json!({
                "type": "array", "minItems": 1, "maxItems": MAX_LIST_ITEMS, "description": about,
                "items": { "type": "string", "minLength": 1, "maxLength": 4096 },
            }),
            Self::Flag => json!({ "type": "boolean", "description": about }),
            Self::Count => json!({ "type": "integer", "minimum": 1, "description": about }),
            Self::Repair => {
                let accepted: Vec<&str> = Repair::ALL.iter().map(|repair| repair.code()).collect();
                json!({ "type": "string", "enum": accepted, "description": about })
            }
        }
    }
}

/// The field with the number of nodes. As `confirm`, it is not part of the command.
const CONFIRM_NODES: &str = "confirm_nodes";

/// Node names that one request may list: more than a cluster has, but less than a mistyped range expands to.
pub(super) const MAX_NODE_NAMES: usize = 20_000;

/// Parses a node selector, of which `remaining` names may still be listed.
pub(super) fn parse_selector(text: &str, remaining: usize) -> Result<Selector, String> {
    Selector::parse_up_to(text, remaining).map_err(|error| match error {
        HostlistError::TooMany(_) => {
            format!("more than {MAX_NODE_NAMES} names: use pool=NAME, state=STATE or a name with `*`")
        }
        other => other.to_string(),
    })
}

const MAX_REASON_LENGTH: usize = 500;
const MAX_LIST_ITEMS: usize = 256;

/// A body with valid fields.
#[derive(Debug)]
pub(super) struct ActionRequest {
    fields: Map<String, Value>,
    pub(super) why: String,
    pub(super) confirm: Option<String>,
    pub(super) confirm_nodes: Option<u64>,
}

impl ActionRequest {
    pub(super) fn parse(action: ActionKind, bytes: &[u8]) -> Result<Self, ApiError> {
        let bad = |why: String| ApiError::BadBody { why };
        let mut fields: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|error| bad(format!("not a JSON object: {error}")))?;
        let known: Vec<&str> = action.fields().iter().map(|(name, ..)| *name).chain(["why", "confirm"]).collect();
        if let Some(name) = fields.keys().find(|name| !known.contains(&name.as_str())) {
            let name: String = name.chars().take(64).collect();
            return Err(bad(format!("unknown field `{name}`; accepted: {}", known.join(", "))));
        }
        for (name, required, _) in action.fields() {
            if *required && !fields.contains_key(*name) {
                return Err(bad(format!("the field `{name}` is missing")));
            }
        }
        let why = match fields.remove("why") {
            Some(Value::String(why)) if !why.trim().is_empty() && why.chars().count() <= MAX_REASON_LENGTH => why,
            _ => return Err(bad(format!("`why` is required: 1 to {MAX_REASON_LENGTH} characters"))),
        };
        let confirm = match fields.remove("confirm") {
            None => None,
            Some(Value::String(confirm)) if confirm.len() <= 128 => Some(confirm),
            Some(_) => return Err(bad("`confirm` must be the text from the first response".to_owned())),
        };
        let number = fields.remove(CONFIRM_NODES);
        let confirm_nodes = number
            .map(|number| number.as_u64().filter(|number| *number > 0))
            .map(|number| number.ok_or_else(|| bad(format!("`{CONFIRM_NODES}` must be the number of nodes"))));
        Ok(Self { fields, why, confirm, confirm_nodes: confirm_nodes.transpose()? })
    }

    /// Returns the request without its confirmation.
    pub(super) fn without_confirmation(&self) -> (&Map<String, Value>, &str) {
        (&self.fields, &self.why)
    }

    fn text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        match self.fields.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if (1..=256).contains(&text.len()) => Ok(Some(text)),
            Some(_) => Err(ApiError::BadBody { why: format!("`{name}` must be a string of 1 to 256 characters") }),
        }
    }

    fn repair(&self) -> Result<Repair, ApiError> {
        let step = self.text("step")?.unwrap_or_default();
        step.parse().map_err(|error: UnknownCode| ApiError::BadBody { why: format!("`step`: {error}") })
    }

    fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.fields.get(name) {
            None => Ok(false),
            Some(Value::Bool(yes)) => Ok(*yes),
            Some(_) => Err(ApiError::BadBody { why: format!("`{name}` must be true or false") }),
        }
    }

    fn text_list(&self, name: &str) -> Result<Vec<&str>, ApiError> {
        let bad = || ApiError::BadBody { why: format!("`{name}` must be a list of 1 to {MAX_LIST_ITEMS} strings") };
        let Some(value) = self.fields.get(name) else { return Ok(Vec::new()) };
        let items = value.as_array().filter(|items| (1..=MAX_LIST_ITEMS).contains(&items.len())).ok_or_else(bad)?;
        items.iter().map(|item| item.as_str().ok_or_else(bad)).collect()
    }

    fn nodes(&self) -> Result<Vec<Selector>, ApiError> {
        let mut remaining = MAX_NODE_NAMES;
        let mut selectors = Vec::new();
        for text in self.text_list("nodes")? {
            let selector =
                parse_selector(text, remaining).map_err(|why| ApiError::BadBody { why: format!("`nodes`: {why}") })?;
            remaining -= selector.name_count();
            selectors.push(selector);
        }
        Ok(selectors)
    }

    fn cases(&self) -> Result<Vec<CaseId>, ApiError> {
        let bad = |error: doctor_core::ids::InvalidName| ApiError::BadBody { why: format!("`cases`: {error}") };
        self.text_list("cases")?.into_iter().map(|text| text.parse().map_err(bad)).collect()
    }

    fn pool(&self) -> Result<Option<PoolName>, ApiError> {
        let pool = self.text("pool")?.map(str::parse).transpose();
        pool.map_err(|error: doctor_core::ids::InvalidName| ApiError::BadBody { why: format!("`pool`: {error}") })
    }

    /// Returns the operator command for this request, given now.
    pub(super) fn command(&self, action: ActionKind, now: Timestamp) -> Result<OperatorCommand, ApiError> {
        Ok(match action {
            ActionKind::Test => self.test_command()?,
            ActionKind::Hold => {
                let until = self.text("until")?.map(|text| operator_commands::parse_deadline(text, now)).transpose()?;
                OperatorCommand::Hold { nodes: self.nodes()?, until }
            }
            ActionKind::Release => OperatorCommand::Release { nodes: self.nodes()? },
            ActionKind::Quarantine => OperatorCommand::Quarantine { nodes: self.nodes()?, evict: self.flag("drain")? },
            ActionKind::Repair => {
                OperatorCommand::Repair { nodes: self.nodes()?, step: self.repair()?, evict: self.flag("drain")? }
            }
            ActionKind::Pause => {
                let length = self.text("for")?.map(str::parse::<Span>).transpose();
                let length = length.map_err(|error| ApiError::BadBody { why: format!("`for`: {error}") })?;
                OperatorCommand::Pause { pool: self.pool()?, length }
            }
            ActionKind::Resume => OperatorCommand::Resume { pool: self.pool()? },
            ActionKind::CloseBreaker => OperatorCommand::CloseBreaker,
            ActionKind::Acknowledge => OperatorCommand::Acknowledge { cases: self.cases()? },
            ActionKind::Snooze => {
                let until = self.text("until")?.unwrap_or_default();
                OperatorCommand::Snooze { cases: self.cases()?, until: operator_commands::parse_deadline(until, now)? }
            }
        })
    }

    fn test_command(&self) -> Result<OperatorCommand, ApiError> {
        let (nodes, tests) = (self.nodes()?, self.text_list("tests")?);
        if self.flag("multi_node")? {
            let test = match tests.as_slice() {
                [] => None,
                [one] => Some((*one).to_owned()),
                _ => return Err(ApiError::BadCommand("a run over several nodes takes one test".to_owned())),
            };
            return Ok(OperatorCommand::MultiNodeTest { nodes, test });
        }
        let bad = |error: doctor_core::ids::InvalidName| ApiError::BadBody { why: format!("`tests`: {error}") };
        let tests: Result<Vec<TestId>, ApiError> = tests.into_iter().map(|test| test.parse().map_err(bad)).collect();
        Ok(OperatorCommand::Test { nodes, tests: tests? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_needs_a_reason_and_the_fields_of_its_action() {
        let now = Timestamp::from_secs(1000);
        let read = |action, text: &str| {
            ActionRequest::parse(action, text.as_bytes()).and_then(|request| request.command(action, now))
        };
        let hold = read(ActionKind::Hold, r#"{"nodes": ["n[1-2]"], "until": "4h", "why": "fan"}"#).unwrap();
        assert!(matches!(hold, OperatorCommand::Hold { until: Some(until), .. } if until == now.plus(Span::hours(4))));
        assert!(matches!(read(ActionKind::CloseBreaker, r#"{"why": "seen"}"#), Ok(OperatorCommand::CloseBreaker)));
        for (action, bad, part) in [
            (ActionKind::Hold, r#"{"nodes": ["n1"]}"#, "`why`"),
            (ActionKind::Hold, r#"{"nodes": ["n1"], "why": " "}"#, "`why`"),
            (ActionKind::Hold, r#"{"why": "x"}"#, "`nodes` is missing"),
            (ActionKind::Hold, r#"{"nodes": "n1", "why": "x"}"#, "list of"),
            (ActionKind::Hold, r#"{"nodes": ["n[1"], "why": "x"}"#, "bracket"),
            (ActionKind::Hold, r#"{"nodes": ["n1"], "why": "x", "drain": true}"#, "accepted: nodes, until"),
            (ActionKind::Hold, r#"{"nodes": ["n1"], "why": "x", "until": "yesterday"}"#, "neither a duration"),
            (ActionKind::Hold, r#"{"nodes": ["n[0-20000]"], "why": "x"}"#, "more than 20000 names"),
            (ActionKind::Hold, r#"{"nodes": ["n[1-19999]", "m1", "m2"], "why": "x"}"#, "more than 20000 names"),
            (ActionKind::Pause, r#"{"for": "long", "why": "x"}"#, "duration"),
            (ActionKind::Pause, "[1]", "not a JSON object"),
            (ActionKind::Quarantine, r#"{"nodes": ["n1"], "why": "x", "drain": 1}"#, "true or false"),
            (ActionKind::Quarantine, r#"{"nodes": ["n1"], "why": "x", "confirm_nodes": "1"}"#, "number of nodes"),
            (ActionKind::Hold, r#"{"nodes": ["n1"], "why": "x", "confirm_nodes": 1}"#, "accepted: nodes, until"),
            (ActionKind::Repair, r#"{"nodes": ["n1"], "why": "x"}"#, "`step` is missing"),
            (ActionKind::Repair, r#"{"nodes": ["n1"], "why": "x", "step": "kick"}"#, "reset, reboot, replace"),
        ] {
            let error = read(action, bad).unwrap_err();
            assert!(error.to_string().contains(part), "{bad}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_body_is_parsed_or_rejected(text in ".{0,200}", n in 0..ActionKind::ALL.len()) {
            let _result = ActionRequest::parse(ActionKind::ALL[n], text.as_bytes());
        }
    }
}
