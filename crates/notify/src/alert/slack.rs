//! Chats with Slack-compatible incoming webhooks: one text, with the basic markup that all of them support.

use doctor_core::alert;
use serde_json::json;

use super::{DeliveryError, Message, UrlSource, http::Client, webhook};

/// Chats truncate longer texts, some of them in the middle of a character.
const MAX_TEXT_BYTES: usize = 3500;

pub(super) fn send(url: &UrlSource, letter: &Message<'_>, client: &Client<'_>) -> Result<(), DeliveryError> {
    let body = webhook::json(&json!({ "text": text(letter) }))?;
    client.post(&url.read()?, &[("x-doctor-key", letter.key)], &body)
}

fn text(letter: &Message<'_>) -> String {
    let mut text = format!("*{}*", escaped(&alert::headline(letter.notes)));
    if letter.lost_before > 0 {
        text.push_str(&format!("\n(messages lost before this one: {}; see `doctor alert list`)", letter.lost_before));
    }
    let paragraphs = alert::paragraphs(letter.notes);
    for (place, paragraph) in paragraphs.iter().enumerate() {
        let paragraph = format!("\n```{}```", escaped(&paragraph.replace('`', "'")));
        if text.len() + paragraph.len() > MAX_TEXT_BYTES {
            text.push_str(&format!("\nand {} more: `doctor cases`", paragraphs.len() - place));
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

    fn letter(notes: &[Notification]) -> String {
        let now = Timestamp::from_secs(0);
        text(&Message { key: "k", composed: now, notes, lost_before: 0, now })
    }

    #[test]
    fn nothing_that_a_node_says_calls_the_whole_channel() {
        let text = letter(&[note("<!channel> & `x` <http://evil|click>")]);
        assert!(!text.contains('<') && text.contains("&lt;!channel&gt; &amp;"), "{text}");
        assert_eq!(text.matches("```").count(), 2, "{text}");
    }

    #[test]
    fn a_long_message_ends_with_how_much_more_there_is() {
        let notes = vec![note(&"x".repeat(900)); 9];
        let text = letter(&notes);
        assert!(text.len() < MAX_TEXT_BYTES + 100 && text.contains("more: `doctor cases`"), "{}", text.len());
    }
}
