//! Parses the kernel's processor lists, such as `0-3,8,10-11`.

/// Returns the number of processors in a list; an empty list has none. Returns `None` if the text is not a list.
pub fn count(text: &str) -> Option<u64> {
    let text = text.trim();
    if text.is_empty() {
        return Some(0);
    }
    let mut each = text.split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    each.try_fold(0_u64, |sum, count| sum.checked_add(count?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HUGE: &str = "0-9223372036854775807,0-9223372036854775807";

    #[test]
    fn cpus_of_a_list_are_counted() {
        for (text, number) in
            [("0-3,8\n", Some(5)), ("0", Some(1)), ("\n", Some(0)), ("3-1", None), ("a", None), (HUGE, None)]
        {
            assert_eq!(count(text), number, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9,-]{0,12}") {
            count(&text);
        }
    }
}
