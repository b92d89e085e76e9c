//! The `traceparent` header of W3C Trace Context: the span that a request belongs to.

/// A span of another program, by its ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanContext {
    pub(super) trace: [u8; 16],
    pub(super) span: [u8; 8],
    /// Whether it is sampled; its children are sampled only if it is.
    pub(super) sampled: bool,
}

/// Parses the header. Returns `None` if it is malformed: the request then starts a new trace.
pub(super) fn parse(text: &str) -> Option<SpanContext> {
    let mut parts = text.trim().split('-');
    let version: [u8; 1] = hex(parts.next()?)?;
    let (trace, span): ([u8; 16], [u8; 8]) = (hex(parts.next()?)?, hex(parts.next()?)?);
    let [flags] = hex(parts.next()?)?;
    // Later versions may add fields.
    let more = parts.next().is_some();
    let known = version == [0] && !more || version != [0] && version != [0xff];
    (known && trace != [0; 16] && span != [0; 8]).then_some(SpanContext { trace, span, sampled: flags & 1 == 1 })
}

/// Lower case only, as the standard requires.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_lower_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != 2 * N || !text.bytes().all(is_lower_hex) {
        return None;
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_well_formed_header_is_accepted() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context = parse(good).unwrap();
        assert!(
            context.sampled
                && context.trace[0] == 0x4b
                && context.span == [0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]
        );
        assert!(!parse(&good.replace("-01", "-00")).unwrap().sampled);
        assert_eq!(parse(&format!("cc{}-more", &good[2..])), Some(context), "a later version");
        for bad in [
            "",
            "00",
            &good.to_uppercase(),
            &good[..54],
            &format!("{good}-more"),
            &format!("ff{}", &good[2..]),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e47é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
