//! The API server's audit log: which user requested what, and with which result.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{KubernetesTestbedError, file_error};

/// A request that the API server answered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AuditedRequest {
    pub user: String,
    pub verb: String,
    pub group: String,
    /// Includes the subresource: `pods/eviction`.
    pub resource: String,
    pub status: u16,
}

/// Writes a policy that logs the metadata of every request of service accounts, without bodies.
pub(super) fn write_policy(path: &Path) -> Result<(), KubernetesTestbedError> {
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "Metadata", "userGroups": ["system:serviceaccounts"] },
            { "level": "None" },
        ],
    });
    fs::write(path, policy.to_string()).map_err(file_error("writing", path))
}

/// Returns all requests so far. A watch is logged as soon as it is answered.
pub(super) fn read(path: &PathBuf) -> Result<Vec<AuditedRequest>, KubernetesTestbedError> {
    let text = fs::read_to_string(path).map_err(file_error("reading", path))?;
    Ok(text.lines().filter_map(|line| audited_request(&serde_json::from_str(line).ok()?)).collect())
}

/// Parses a line of the log. Returns `None` for a request without an object.
fn audited_request(line: &Value) -> Option<AuditedRequest> {
    let string_at = |pointer: &str| line.pointer(pointer).and_then(Value::as_str);
    let resource = string_at("/objectRef/resource")?;
    let part = string_at("/objectRef/subresource").map_or_else(String::new, |part| format!("/{part}"));
    Some(AuditedRequest {
        user: string_at("/user/username")?.to_owned(),
        verb: string_at("/verb")?.to_owned(),
        group: string_at("/objectRef/apiGroup").unwrap_or_default().to_owned(),
        resource: format!("{resource}{part}"),
        status: u16::try_from(line.pointer("/responseStatus/code")?.as_u64()?).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audit_line_is_parsed_as_user_verb_and_resource() {
        let line = json!({
            "verb": "create", "user": { "username": "system:serviceaccount:a:b" }, "responseStatus": { "code": 403 },
            "objectRef": { "resource": "pods", "subresource": "eviction", "namespace": "a", "apiVersion": "v1" },
        });
        let expected = AuditedRequest {
            user: "system:serviceaccount:a:b".to_owned(),
            verb: "create".to_owned(),
            group: String::new(),
            resource: "pods/eviction".to_owned(),
            status: 403,
        };
        assert_eq!(audited_request(&line), Some(expected));
        assert_eq!(audited_request(&json!({ "verb": "get", "requestURI": "/version" })), None);
    }
}
