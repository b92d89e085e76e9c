//! Formats a message as mail: headers that no text can break out of, and a base64 body, which every server transports.

use base64::{Engine, engine::general_purpose::STANDARD};
use doctor_core::{alert, time::Timestamp};

use super::{Email, Message};

/// Bytes per encoded word of a header, and per line of the body, before encoding.
const MAX_WORD_BYTES: usize = 45;
const LINE_BYTES: usize = 57;
const MAX_SUBJECT: usize = 150;

/// Returns the whole mail, with lines terminated by CR LF.
pub(super) fn compose(email: &Email, message: &Message<'_>) -> String {
    let domain = email.from.rsplit_once('@').map_or("localhost", |(_, domain)| domain);
    let headline: String = alert::headline(message.notes).chars().take(MAX_SUBJECT).collect();
    let headers = [
        ("From", email.from.clone()),
        ("To", email.to.join(",\r\n ")),
        ("Subject", encode_words(&format!("Cluster Doctor: {headline}"))),
        ("Date", date(message.now)),
        // Identical at each attempt: mailboxes recognise a duplicate.
        ("Message-ID", format!("<{}@{domain}>", message.key)),
        ("Auto-Submitted", "auto-generated".to_owned()),
        ("MIME-Version", "1.0".to_owned()),
        ("Content-Type", "text/plain; charset=utf-8".to_owned()),
        ("Content-Transfer-Encoding", "base64".to_owned()),
    ];
    let mut mail: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    for line in body(message).as_bytes().chunks(LINE_BYTES) {
        mail.push_str("\r\n");
        mail.push_str(&STANDARD.encode(line));
    }
    mail.push_str("\r\n");
    mail
}

fn body(message: &Message<'_>) -> String {
    let mut paragraphs = Vec::new();
    if message.lost_before > 0 {
        paragraphs.push(format!("messages lost before this one: {}; see doctor alert list", message.lost_before));
    }
    paragraphs.extend(alert::paragraphs(message.notes));
    format!("{}\r\n", paragraphs.join("\n\n").replace('\n', "\r\n"))
}

/// Encodes text as RFC 2047 words, so that any content stays within one header.
fn encode_words(text: &str) -> String {
    if text.len() <= 60 && text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) && !text.contains("=?") {
        return text.to_owned();
    }
    let mut words = Vec::new();
    let mut word = String::new();
    for character in text.chars() {
        if word.len() + character.len_utf8() > MAX_WORD_BYTES {
            words.push(std::mem::take(&mut word));
        }
        word.push(character);
    }
    words.push(word);
    let encoded = words.iter().map(|word| format!("=?utf-8?B?{}?=", STANDARD.encode(word)));
    encoded.collect::<Vec<_>>().join("\r\n ")
}

fn date(at: Timestamp) -> String {
    let moment = jiff::Timestamp::from_millisecond(at.millis()).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    moment.strftime("%a, %d %b %Y %H:%M:%S +0000").to_string()
}

#[cfg(test)]
mod tests {
    use doctor_core::alert::{Notification, Subject};
    use proptest::prelude::*;

    use super::*;
    use crate::alert::Security;

    fn composed_mail(by: &str) -> String {
        let now = Timestamp::from_secs(1_794_795_000);
        let notes = [Notification { at: now, subject: Subject::Test { by: by.to_owned() } }];
        let email = Email {
            server: "mail:25".to_owned(),
            from: "doctor@example.org".to_owned(),
            to: vec!["a@example.org".to_owned(), "b@example.org".to_owned()],
            security: Security::None,
            user: None,
            password: None,
        };
        compose(&email, &Message { key: "k-1", composed: now, notes: &notes, lost_before: 0, now })
    }

    #[test]
    fn a_mail_has_a_message_id_a_date_and_a_base64_body() {
        let mail = composed_mail("ann");
        assert!(mail.contains("Message-ID: <k-1@example.org>\r\n"), "{mail}");
        assert!(mail.contains("Date: Mon, 16 Nov 2026 02:10:00 +0000\r\n"), "{mail}");
        let (_, body) = mail.split_once("\r\n\r\n").unwrap();
        let text = String::from_utf8(STANDARD.decode(body.replace("\r\n", "")).unwrap()).unwrap();
        assert!(text.contains("test message by ann") && text.contains("details: doctor alert list"), "{text}");
    }

    proptest! {
        #[test]
        fn no_text_adds_a_header_or_ends_the_mail(by in any::<String>()) {
            let mail = composed_mail(&by);
            let (head, body) = mail.split_once("\r\n\r\n").unwrap();
            let lines: Vec<&str> = head.split("\r\n").filter(|line| !line.starts_with(' ')).collect();
            prop_assert_eq!(lines.len(), 9);
            prop_assert!(mail.is_ascii());
            prop_assert!(mail.split("\r\n").all(|line| line.len() <= 200 && !line.contains(['\r', '\n'])));
            prop_assert!(body.split("\r\n").all(|line| line != "."));
        }
    }
}
