//! Parses the output of `fio --output-format=json`: one fio run, with all its jobs combined.
//!
//! fio may print remarks before the JSON on the same stream. Since version 3 the format has only been extended: unused
//! fields are ignored. Version 2 used other units for the same names and is rejected. A missing or invalid number is an
//! error, never zero: an unreadable result is not a slow one.

use serde::Deserialize;

use crate::measurements::MAX_MEASUREMENTS_BYTES;

/// The result of one fio run.
#[derive(Debug, Clone, PartialEq)]
pub struct FioRun {
    /// Such as `fio-3.33`.
    pub version: String,
    /// The errno of the first failed job; 0 if none failed.
    pub error: i32,
    pub read: FioDirection,
    pub write: FioDirection,
}

/// The result for reading or for writing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FioDirection {
    pub bytes: u64,
    pub bytes_per_second: f64,
    pub iops: f64,
    /// `None` if no operation was timed.
    pub latency: Option<Latency>,
}

/// Percentiles of the completion latency in seconds. For several jobs, the maximum of each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

/// Why a text is not the result of a fio run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FioError {
    #[error("fio printed {0} bytes; the limit is {MAX_MEASUREMENTS_BYTES} bytes")]
    TooLong(usize),
    #[error("fio printed no JSON; it printed: {0}")]
    NoJson(String),
    #[error("fio's JSON cannot be parsed: {0}")]
    Malformed(String),
    #[error("fio version `{0}` is not supported; 3.0 or newer is required")]
    OldVersion(String),
    #[error("fio reported no job")]
    NoJobs,
    #[error("fio reported `{0}`; expected a number of at least 0")]
    NotANumber(&'static str),
}

#[derive(Deserialize)]
struct FioOutput {
    #[serde(rename = "fio version")]
    version: String,
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
struct FioJob {
    error: i32,
    read: JsonDirection,
    write: JsonDirection,
}

#[derive(Deserialize)]
struct JsonDirection {
    io_bytes: u64,
    bw_bytes: f64,
    iops: f64,
    clat_ns: Option<Completion>,
}

#[derive(Deserialize)]
struct Completion {
    percentile: Option<Percentiles>,
}

#[derive(Deserialize)]
struct Percentiles {
    #[serde(rename = "50.000000")]
    p50: f64,
    #[serde(rename = "99.000000")]
    p99: f64,
    #[serde(rename = "99.900000")]
    p999: f64,
}

/// Parses the result of one fio run.
///
/// # Errors
/// If the text is not a complete result of fio 3 or newer.
pub fn parse(text: &str) -> Result<FioRun, FioError> {
    if text.len() > MAX_MEASUREMENTS_BYTES {
        return Err(FioError::TooLong(text.len()));
    }
    let Some(begin) = json_start(text) else { return Err(FioError::NoJson(last_line(text))) };
    let mut values = serde_json::Deserializer::from_str(&text[begin..]).into_iter::<serde_json::Value>();
    let malformed = |error: serde_json::Error| FioError::Malformed(error.to_string());
    let value = values.next().ok_or(FioError::NoJobs)?.map_err(malformed)?;
    // Check the version first: an old version would only be reported as malformed.
    let version = value.get("fio version").and_then(|version| version.as_str()).unwrap_or_default();
    if !is_supported_version(version) {
        return Err(FioError::OldVersion(version.chars().take(40).collect()));
    }
    let FioOutput { version, jobs } = serde_json::from_value(value).map_err(malformed)?;
    if jobs.is_empty() {
        return Err(FioError::NoJobs);
    }
    let mut run = FioRun { version, error: 0, read: FioDirection::default(), write: FioDirection::default() };
    for job in jobs {
        run.error = if run.error == 0 { job.error } else { run.error };
        run.read = run.read.combine(job.read.side()?);
        run.write = run.write.combine(job.write.side()?);
    }
    let sums = [run.read, run.write].map(|side| side.bytes_per_second + side.iops);
    if sums.iter().any(|sum| !sum.is_finite()) {
        return Err(FioError::NotANumber("bw_bytes"));
    }
    Ok(run)
}

/// fio's remarks are whole lines, and its JSON starts a line.
fn json_start(text: &str) -> Option<usize> {
    if text.starts_with('{') { Some(0) } else { text.find("\n{").map(|line_end| line_end + 1) }
}

/// Accepts `fio-3.33`, `fio-3.16-29-g0a1b`, and later major versions.
fn is_supported_version(version: &str) -> bool {
    let major = version.strip_prefix("fio-").and_then(|rest| rest.split(['.', '-']).next());
    major.and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major >= 3)
}

fn last_line(text: &str) -> String {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing").chars().take(200).collect()
}

impl JsonDirection {
    fn side(&self) -> Result<FioDirection, FioError> {
        let number = |name, value: f64| {
            if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(FioError::NotANumber(name)) }
        };
        let seconds = |nanoseconds: f64| Ok(number("clat_ns", nanoseconds)? / 1e9);
        let percentiles = self.clat_ns.as_ref().and_then(|completion| completion.percentile.as_ref());
        let latency = match percentiles {
            Some(Percentiles { p50, p99, p999 }) => {
                Some(Latency { p50: seconds(*p50)?, p99: seconds(*p99)?, p999: seconds(*p999)? })
            }
            None => None,
        };
        Ok(FioDirection {
            bytes: self.io_bytes,
            bytes_per_second: number("bw_bytes", self.bw_bytes)?,
            iops: number("iops", self.iops)?,
            latency,
        })
    }
}

impl FioDirection {
    /// Combines the results of jobs that ran at the same time.
    #[must_use]
    pub fn combine(self, other: Self) -> Self {
        let latency = match (self.latency, other.latency) {
            (Some(a), Some(b)) => {
                Some(Latency { p50: a.p50.max(b.p50), p99: a.p99.max(b.p99), p999: a.p999.max(b.p999) })
            }
            (one, other) => one.or(other),
        };
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            bytes_per_second: self.bytes_per_second + other.bytes_per_second,
            iops: self.iops + other.iops,
            latency,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RANDRW: &str = include_str!("../fixtures/storage/fio-3.33-randrw.json");

    #[test]
    fn measurements_are_in_bytes_and_seconds() {
        let run = parse(RANDRW).unwrap();
        assert_eq!((run.version.as_str(), run.error), ("fio-3.33", 0));
        assert_eq!(run.read.bytes, 519_245_824);
        assert_eq!((run.read.bytes_per_second, run.read.iops), (259_493_165.0, 63_352.823_588));
        assert_eq!(run.read.latency, Some(Latency { p50: 444_416e-9, p99: 4_489_216e-9, p999: 6_979_584e-9 }));
        assert_eq!(run.write.bytes_per_second, 111_011_630.0);
        let written = parse(include_str!("../fixtures/storage/fio-3.33-write.json")).unwrap();
        assert_eq!((written.read.bytes, written.read.latency), (0, None));
        assert_eq!(written.write.bytes, 3_365_928_960);
    }

    #[test]
    fn other_versions_parse_alike_and_an_older_one_is_rejected() {
        let of_333 = parse(RANDRW).unwrap();
        for (text, version) in [
            (include_str!("../fixtures/storage/fio-3.28-by-hand.json"), "fio-3.28"),
            (include_str!("../fixtures/storage/fio-3.39-by-hand.txt"), "fio-3.39"),
        ] {
            assert_eq!(parse(text).unwrap(), FioRun { version: version.to_owned(), ..of_333.clone() });
        }
        let old = parse(include_str!("../fixtures/storage/fio-2.21-by-hand.json"));
        assert_eq!(old, Err(FioError::OldVersion("fio-2.21".to_owned())));
        for (version, known) in
            [("fio-3.16-29-g0a1b", true), ("fio-4.0", true), ("fio-2.99", false), ("fio", false), ("3.33", false)]
        {
            assert_eq!(is_supported_version(version), known, "{version}");
        }
    }

    #[test]
    fn a_failed_job_reports_its_error_even_after_other_lines() {
        for (text, error) in [
            (include_str!("../fixtures/storage/fio-3.33-mismatch.txt"), 84),
            (include_str!("../fixtures/storage/fio-3.33-no-space.txt"), 28),
            (include_str!("../fixtures/storage/fio-3.33-verify.json"), 0),
            (include_str!("../fixtures/storage/fio-3.33-nfiles.json"), 0),
        ] {
            assert_eq!(parse(text).unwrap().error, error);
        }
    }

    #[test]
    fn parallel_jobs_add_up_and_the_worst_latency_counts() {
        let mut printed: serde_json::Value = serde_json::from_str(RANDRW).unwrap();
        let mut other = printed["jobs"][0].clone();
        other["error"] = 5.into();
        other["read"]["clat_ns"]["percentile"]["99.000000"] = 9_000_000_000_u64.into();
        printed["jobs"].as_array_mut().unwrap().push(other);
        let (one, two) = (parse(RANDRW).unwrap(), parse(&printed.to_string()).unwrap());
        assert_eq!(two.error, 5);
        assert_eq!(two.read.bytes, 2 * one.read.bytes);
        assert_eq!(two.write.iops, 2.0 * one.write.iops);
        let latency = two.read.latency.unwrap();
        assert_eq!((latency.p99, latency.p50), (9.0, one.read.latency.unwrap().p50));
    }

    #[test]
    fn truncated_missing_and_non_numeric_values_are_errors() {
        assert_eq!(parse("fio: failed to open\n\n"), Err(FioError::NoJson("fio: failed to open".to_owned())));
        assert_eq!(parse(""), Err(FioError::NoJson("nothing".to_owned())));
        assert!(matches!(parse(&RANDRW[..3000]), Err(FioError::Malformed(_))));
        assert_eq!(parse("{\"fio version\":\"fio-3.33\",\"jobs\":[]}"), Err(FioError::NoJobs));
        assert!(matches!(parse(&RANDRW.replace("\"bw_bytes\"", "\"bw_byte\"")), Err(FioError::Malformed(_))));
        assert_eq!(parse(&RANDRW.replace("63352.823588", "-1")), Err(FioError::NotANumber("iops")));
        let huge = RANDRW.replace("\"bw_bytes\" : 259493165", "\"bw_bytes\" : 1e308");
        let mut twice: serde_json::Value = serde_json::from_str(&huge).unwrap();
        let job = twice["jobs"][0].clone();
        twice["jobs"].as_array_mut().unwrap().push(job);
        assert_eq!(parse(&twice.to_string()), Err(FioError::NotANumber("bw_bytes")));
        assert!(matches!(parse(&" ".repeat(MAX_MEASUREMENTS_BYTES + 1)), Err(FioError::TooLong(_))));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_or_return_a_non_finite_value(
            at in 0..RANDRW.len(), text in "[-0-9.eE\"{}\\[\\],:]{0,6}|.{0,8}", all in ".{0,200}",
        ) {
            let _refused = parse(&all);
            let mut changed = RANDRW.to_owned();
            changed.replace_range(at..(at + text.len()).min(RANDRW.len()), &text);
            if let Ok(run) = parse(&changed) {
                for side in [run.read, run.write] {
                    prop_assert!(side.bytes_per_second >= 0.0 && side.iops.is_finite());
                }
            }
        }
    }
}
