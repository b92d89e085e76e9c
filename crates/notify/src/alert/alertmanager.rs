//! Prometheus' Alertmanager, API version 2: cases and service conditions as alerts that fire and resolve.
//!
//! An Alertmanager resolves an alert that is not sent again for some minutes. Every alert therefore has an end time,
//! and open ones are sent again before it; see `DeliveryWorker::refresh`.

use doctor_core::{
    alert::{self, CaseNotification, Notification, Subject},
    finding::Severity,
    time::{Span, Timestamp},
};
use serde_json::{Value, json};

use super::{DeliveryError, Message, SecretSource, UrlSource, http::Client, secret::read, webhook};

/// Three times the refresh interval.
const ALERT_LIFETIME: Span = Span::minutes(15);

pub(super) fn send(
    url: &UrlSource,
    token: Option<&SecretSource>,
    message: &Message<'_>,
    client: &Client<'_>,
) -> Result<(), DeliveryError> {
    let body = webhook::json(&alerts(message))?;
    let url = format!("{}/api/v2/alerts", url.read()?.trim_end_matches('/'));
    let bearer = token.map(|token| Ok::<_, DeliveryError>(format!("Bearer {}", read(token)?))).transpose()?;
    let headers: Vec<(&str, &str)> = bearer.iter().map(|bearer| ("authorization", bearer.as_str())).collect();
    client.post(&url, &headers, &body)
}

/// In the order of the notes: of two about the same alert, the later one counts.
fn alerts(message: &Message<'_>) -> Vec<Value> {
    message.notes.iter().flat_map(|note| alert_from_note(note, message.now)).collect()
}

fn alert_from_note(note: &Notification, now: Timestamp) -> Vec<Value> {
    let annotations = json!({
        "summary": alert::line(note),
        "description": alert::paragraphs(std::slice::from_ref(note)).join("\n"),
        "command": alert::command(note),
    });
    let make_alert = |labels: Value, since: Timestamp, active: bool| {
        // A simulated cluster may be ahead of this machine's clock; an alert that ends before it starts would be
        // rejected.
        let ends = (if active { now.plus(ALERT_LIFETIME) } else { now }).max(since);
        json!({ "labels": labels, "annotations": annotations, "startsAt": since.to_string(), "endsAt": ends.to_string() })
    };
    match &note.subject {
        Subject::Case(case) => {
            // The severity is a label, so a change makes another alert: resolve the previous one.
            let resolved =
                case.severity_before.map(|severity| make_alert(case_labels(case, severity), case.opened, false));
            let now = make_alert(case_labels(case, case.severity), case.opened, case.open);
            resolved.into_iter().chain([now]).collect()
        }
        Subject::Service(service) => {
            let labels =
                json!({ "alertname": "ClusterDoctorService", "condition": service.condition, "severity": "service" });
            vec![make_alert(labels, service.since, service.raised)]
        }
        Subject::Test { by } => {
            vec![make_alert(json!({ "alertname": "ClusterDoctorTrial", "by": by }), note.at, false)]
        }
    }
}

/// The labels that identify an alert: none changes while the case is open, except the severity.
fn case_labels(case: &CaseNotification, severity: Severity) -> Value {
    json!({
        "alertname": "ClusterDoctorCase",
        "case": case.case.to_string(),
        "node": case.node,
        "severity": severity,
    })
}
