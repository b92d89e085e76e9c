//! Parses the parameters of checks. An invalid parameter is reported with an example of what is accepted; it is never
//! ignored.

use doctor_core::{
    observation::{FailureKind, Observation, ProbeFailure},
    time::Span,
};

use crate::spec::Params;

/// Parses a list of words, such as `modules = ["efa", "gdrdrv"]`. Returns `None` if it is not set.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn string_list(params: &Params, name: &str, example: &str) -> Result<Option<Vec<String>>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let list = value.as_array().and_then(|list| list.iter().map(|word| Some(word.as_str()?.to_owned())).collect());
    list.filter(|list: &Vec<String>| !list.is_empty()).map(Some).ok_or_else(|| invalid_param(name, example))
}

/// Parses a word, such as `program = "/usr/sbin/nhc"`. Returns `None` if it is not set.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn string(params: &Params, name: &str, example: &str) -> Result<Option<String>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let word = value.as_str().filter(|word| !word.is_empty());
    word.map(|word| Some(word.to_owned())).ok_or_else(|| invalid_param(name, example))
}

/// Parses a number, integer or not. Returns `None` if it is not set.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn number(params: &Params, name: &str, example: &str) -> Result<Option<f64>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let number = value.as_float().or_else(|| value.as_integer().map(|integer| integer as f64));
    number.filter(|number| number.is_finite()).map(Some).ok_or_else(|| invalid_param(name, example))
}

/// Parses a Boolean. Returns `None` if it is not set.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn flag(params: &Params, name: &str, example: &str) -> Result<Option<bool>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    value.as_bool().map(Some).ok_or_else(|| invalid_param(name, example))
}

/// Parses a non-zero duration, such as `timeout = "5m"`. Returns `None` if it is not set.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn duration(params: &Params, name: &str, example: &str) -> Result<Option<Span>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let span = value.as_str().and_then(|text| text.parse::<Span>().ok()).filter(|span| *span > Span::ZERO);
    span.map(Some).ok_or_else(|| invalid_param(name, example))
}

/// Parses a number of bytes, such as `size = "1GiB"` or `size = 1073741824`. Returns `None` if it is not set.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn bytes(params: &Params, name: &str, example: &str) -> Result<Option<u64>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let bytes = match value {
        toml::Value::Integer(integer) => u64::try_from(*integer).ok(),
        toml::Value::String(text) => parse_bytes(text),
        _ => None,
    };
    bytes.filter(|bytes| *bytes > 0).map(Some).ok_or_else(|| invalid_param(name, example))
}

fn parse_bytes(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 8] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("kB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
    ];
    UNITS
        .iter()
        .find_map(|(unit, factor)| text.strip_suffix(unit)?.trim_end().parse::<u64>().ok()?.checked_mul(*factor))
}

/// Rejects unknown parameters, and returns a function that gives the example of each known one.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn reject_unknown<'a>(
    params: &Params,
    known: &'a [(&'a str, &'a str)],
) -> Result<impl Fn(&str) -> &'a str, Observation> {
    let example = |name: &str| known.iter().find(|(known, _)| *known == name).map_or("", |(_, example)| *example);
    match params.keys().find(|name| example(name).is_empty()) {
        None => Ok(example),
        Some(unknown) => {
            let known: Vec<_> = known.iter().map(|(_, example)| *example).collect();
            Err(invalid_param(unknown, &known.join("`, `")))
        }
    }
}

/// The observation of a check with an invalid parameter.
pub fn invalid_param(name: &str, example: &str) -> Observation {
    let text = format!("invalid parameter `{name}`; expected `{example}`");
    Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_of_the_wrong_type_is_an_error() {
        let params: Params = toml::from_str("a = ['x', 'y']\nb = 'x'\nc = [1]\nd = []\ne = 3\nf = 'many'").unwrap();
        assert_eq!(string_list(&params, "a", ""), Ok(Some(vec!["x".to_owned(), "y".to_owned()])));
        assert_eq!(string_list(&params, "none", ""), Ok(None));
        for name in ["b", "c", "d", "e"] {
            let Err(Observation::Failed(failure)) = string_list(&params, name, "b = [\"x\"]") else { panic!("{name}") };
            assert!(failure.text.contains(name) && failure.text.contains("[\"x\"]"), "{}", failure.text);
        }
        assert_eq!(string(&params, "b", ""), Ok(Some("x".to_owned())));
        assert!(string(&params, "e", "").is_err());
        assert_eq!(number(&params, "e", ""), Ok(Some(3.0)));
        assert!(number(&params, "f", "").is_err());
    }

    #[test]
    fn sizes_and_times_have_units() {
        let params: Params = toml::from_str(
            "a = '2GiB'\nb = '3 MB'\nc = 7\nd = '2 giga'\ne = -1\nf = '99999999TiB'\ng = '5m'\nh = '0s'\ni = true",
        )
        .unwrap();
        assert_eq!(bytes(&params, "a", ""), Ok(Some(2 << 30)));
        assert_eq!(bytes(&params, "b", ""), Ok(Some(3_000_000)));
        assert_eq!(bytes(&params, "c", ""), Ok(Some(7)));
        for name in ["d", "e", "f", "i"] {
            assert!(bytes(&params, name, "").is_err(), "{name}");
        }
        assert_eq!(duration(&params, "g", ""), Ok(Some(Span::minutes(5))));
        assert!(duration(&params, "h", "").is_err() && duration(&params, "c", "").is_err());
        assert_eq!(flag(&params, "i", ""), Ok(Some(true)));
        assert!(flag(&params, "a", "").is_err());
    }
}
