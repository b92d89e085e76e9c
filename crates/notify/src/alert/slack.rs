//! Chats with Slack-compatible incoming webhooks: one text, with the basic markup that all of them support.

use doctor_core::alert;
use serde_json::json;

use super::{DeliveryError, Message, UrlSource, http::Client, webhook};

/// Chats truncate longer texts, some of them in the middle of a character.
const MAX_TEXT_BYTES: usize = 3500;

pub(super) fn send(url: &UrlSource, message: &Message<'_>, client: &Client<'_>) -> Result<(), DeliveryError> {
    let body = webhook::json(&json!({ "text": text(message) }))?;
    client.post(&url.read()?, &[("x-doctor-key", message.key)], &body)
}

fn text(message: &Message<'_>) -> String {
    let mut text = format!("*{}*", escaped(&alert::headline(message.notes)));
    if message.lost_before > 0 {
        text.push_str(&format!("\n(messages lost before this one: {}; see `doctor alert list`)", message.lost_before));
    }
    let paragraphs = alert::paragraphs(message.notes);
    for (index, paragraph) in paragraphs.iter().enumerate() {
        let paragraph = format!("\n```{}```", escaped(&paragraph.replace('`', "'")));
        if text.len() + paragraph.len() > MAX_TEXT_BYTES {
            text.push_str(&format!("\nand {} more: `doctor cases`", paragraphs.len() - index));
            break;
        }
        text.push_str(&paragraph);
    }
    text
}

/// Escapes the three characters that Slack interprets, so that no text from a node becomes a link or a mention.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        alert::{Condition, Notification, ServiceNotification, Subject},
        time::Timestamp,
    };

    use super::*;

    fn note(text: &str) -> Notification {
        let (since, condition) = (Timestamp::from_secs(0), Condition::BreakerOpen);
        Notification {
            at: since,
            subject: Subject::Service(ServiceNotification { condition, raised: true, since, text: text.to_owned() }),
        }
    }

    fn message_text(notes: &[Notification]) -> String {
        let now = Timestamp::from_secs(0);
        text(&Message { key: "k", composed: now, notes, lost_before: 0, now })
    }

    #[test]
    fn text_from_nodes_cannot_mention_the_channel() {
        let text = message_text(&[note("<!channel> & `x` <http://evil|click>")]);
        assert!(!text.contains('<') && text.contains("&lt;!channel&gt; &amp;"), "{text}");
        assert_eq!(text.matches("```").count(), 2, "{text}");
    }

    #[test]
    fn a_truncated_message_ends_with_the_number_of_omitted_notes() {
        let notes = vec![note(&"x".repeat(900)); 9];
        let text = message_text(&notes);
        assert!(text.len() < MAX_TEXT_BYTES + 100 && text.contains("more: `doctor cases`"), "{}", text.len());
    }
}
