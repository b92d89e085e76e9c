//! Limits of text that comes from nodes: a node could send megabytes of it, or characters that a database refuses.

/// Cuts text to this many bytes, at the end of a character, and replaces NUL, which PostgreSQL does not store.
pub fn bound(text: &mut String, max_bytes: usize) {
    if text.contains('\0') {
        *text = text.replace('\0', "\u{FFFD}");
    }
    if text.len() > max_bytes {
        text.truncate(text.floor_char_boundary(max_bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_ends_with_a_whole_character_and_nul_is_replaced() {
        let bounded = |text: &str, max_bytes: usize| {
            let mut text = text.to_owned();
            bound(&mut text, max_bytes);
            text
        };
        assert_eq!(bounded("gpu", 3), "gpu");
        assert_eq!(bounded("größe", 3), "gr");
        assert_eq!(bounded("größe", 4), "grö");
        assert_eq!(bounded("a\0b", 10), "a\u{FFFD}b");
        assert_eq!(bounded("a\0b", 3), "a");
    }
}
