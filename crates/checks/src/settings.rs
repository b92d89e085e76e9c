//! How checks read their parameters. One of the wrong kind is told, with what would be accepted: it is never as if it
//! had not been written.

use doctor_core::observation::{FailureKind, Observation, ProbeFailure};

use crate::spec::Params;

/// A list of words, such as `modules = ["efa", "gdrdrv"]`. `None` where it is not set.
///
/// # Errors
/// With the observation that the check should return.
pub fn words(params: &Params, name: &str, example: &str) -> Result<Option<Vec<String>>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let list = value.as_array().and_then(|list| list.iter().map(|word| Some(word.as_str()?.to_owned())).collect());
    list.filter(|list: &Vec<String>| !list.is_empty()).map(Some).ok_or_else(|| refused(name, example))
}

/// One word, such as `program = "/usr/sbin/nhc"`. `None` where it is not set.
///
/// # Errors
/// With the observation that the check should return.
pub fn word(params: &Params, name: &str, example: &str) -> Result<Option<String>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let word = value.as_str().filter(|word| !word.is_empty());
    word.map(|word| Some(word.to_owned())).ok_or_else(|| refused(name, example))
}

/// A number, whole or not. `None` where it is not set.
///
/// # Errors
/// With the observation that the check should return.
pub fn number(params: &Params, name: &str, example: &str) -> Result<Option<f64>, Observation> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let number = value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64));
    number.filter(|number| number.is_finite()).map(Some).ok_or_else(|| refused(name, example))
}

/// What a check says of a parameter that it does not understand.
pub fn refused(name: &str, example: &str) -> Observation {
    let text = format!("the parameter `{name}` is not understood; write it as `{example}`");
    Observation::CouldNot(ProbeFailure::new(FailureKind::Unparseable, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_of_the_wrong_kind_is_not_as_if_it_were_not_set() {
        let params: Params = toml::from_str("a = ['x', 'y']\nb = 'x'\nc = [1]\nd = []\ne = 3\nf = 'many'").unwrap();
        assert_eq!(words(&params, "a", ""), Ok(Some(vec!["x".to_owned(), "y".to_owned()])));
        assert_eq!(words(&params, "none", ""), Ok(None));
        for name in ["b", "c", "d", "e"] {
            let Err(Observation::CouldNot(failure)) = words(&params, name, "b = [\"x\"]") else { panic!("{name}") };
            assert!(failure.text.contains(name) && failure.text.contains("[\"x\"]"), "{}", failure.text);
        }
        assert_eq!(word(&params, "b", ""), Ok(Some("x".to_owned())));
        assert!(word(&params, "e", "").is_err());
        assert_eq!(number(&params, "e", ""), Ok(Some(3.0)));
        assert!(number(&params, "f", "").is_err());
    }
}
