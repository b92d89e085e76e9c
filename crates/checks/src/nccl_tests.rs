//! Parses the output of `all_reduce_perf` of NVIDIA's nccl-tests: both formats of its table, and its JSON.
//!
//! Columns are found by name in the table's header, because versions have added some: `root`, `#wrong` instead of
//! `error`, quantiles and times of day. A line counts only if it has exactly the columns of the header, so NCCL's own
//! lines in between do no harm. A table without its header, without a row or without the final verdict on the values is
//! rejected: an incomplete run must not pass for a complete one.

use serde::Deserialize;

/// A complete run.
#[derive(Debug, Clone, PartialEq)]
pub struct NcclTests {
    /// In the order in which they ran. Never empty.
    pub rows: Vec<Row>,
    /// The number of wrong values in all rows.
    pub wrong: u64,
}

impl NcclTests {
    /// Returns the row of the largest size. An average over all sizes would be dominated by the small ones.
    pub fn largest(&self) -> &Row {
        self.rows.iter().max_by_key(|row| row.bytes).expect("a run has at least one row")
    }

    /// Returns the bandwidth of the largest size in bytes per second. If it ran several times (`-N`), the median,
    /// because the first one is often slow.
    pub fn bus_bandwidth(&self) -> f64 {
        let most = self.largest().bytes;
        let mut all: Vec<f64> = self.rows.iter().filter(|row| row.bytes == most).map(|row| row.bus_bandwidth).collect();
        all.sort_by(f64::total_cmp);
        all[(all.len() - 1) / 2]
    }
}

/// The out-of-place result of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    pub bytes: u64,
    pub seconds: f64,
    /// Bytes per second, not GB.
    pub bus_bandwidth: f64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcclTestsError {
    #[error("nccl-tests failed: {0}")]
    Failed(String),
    #[error("nccl-tests did not verify the values; run it with `-c 1`")]
    NotVerified,
    #[error("not the output of all_reduce_perf: {0}")]
    NoTable(&'static str),
    #[error("the JSON of nccl-tests cannot be parsed: {0}")]
    Json(String),
}

/// The messages for a failed NCCL or CUDA call.
const FAILURES: [&str; 6] = [
    "Test NCCL failure",
    "Test CUDA failure",
    "Test failure",
    "ncclSystemError",
    "ncclInternalError",
    "ncclRemoteError",
];
const OUT_OF_BOUNDS: &str = "Out of bounds values :";
const MAX_TEXT_CHARS: usize = 300;

/// Parses the output.
///
/// # Errors
/// If it is not a complete run whose values were compared.
pub fn parse(text: &str) -> Result<NcclTests, NcclTestsError> {
    let failed = text.lines().find(|line| FAILURES.iter().any(|mark| line.contains(mark)));
    if let Some(line) = failed {
        return Err(NcclTestsError::Failed(line.trim().chars().take(MAX_TEXT_CHARS).collect()));
    }
    let run = if text.trim_start().starts_with('{') { parse_json(text)? } else { parse_table(text)? };
    if run.rows.is_empty() {
        return Err(NcclTestsError::NoTable("it has no row"));
    }
    Ok(run)
}

fn parse_table(text: &str) -> Result<NcclTests, NcclTestsError> {
    let mut head: Option<TableHeader> = None;
    let (mut rows, mut reported, mut marked) = (Vec::new(), None, 0u64);
    for line in text.lines() {
        if let Some(found) = TableHeader::parse(line) {
            head = Some(found);
        } else if let Some((_, verdict)) = line.split_once(OUT_OF_BOUNDS) {
            reported = Some(out_of_bounds(verdict).ok_or(NcclTestsError::NotVerified)?);
        } else if let Some((row, wrong)) = head.as_ref().and_then(|head| head.row(line)) {
            marked = marked.saturating_add(wrong?);
            rows.push(row);
        }
    }
    match (head, reported) {
        (None, _) => Err(NcclTestsError::NoTable("it has no table of sizes and bandwidths")),
        (_, None) => Err(NcclTestsError::NoTable("it ends before the line `Out of bounds values`")),
        // Both count the same values. The larger one applies, so that neither line hides an error in the other.
        (Some(_), Some(reported)) => Ok(NcclTests { rows, wrong: reported.max(marked) }),
    }
}

/// Parses `0 OK` and `12 FAILED`.
fn out_of_bounds(verdict: &str) -> Option<u64> {
    let mut fields = verdict.split_whitespace();
    let count = fields.next()?.parse::<u64>().ok()?;
    match fields.next()? {
        "OK" => Some(count),
        "FAILED" => Some(count.max(1)),
        _ => None,
    }
}

/// The positions of the columns.
struct TableHeader {
    columns: usize,
    time: usize,
    bus_bandwidth: usize,
    /// Both `#wrong` columns; an old table has none.
    wrong: Vec<usize>,
    error: Option<usize>,
}

impl TableHeader {
    fn parse(line: &str) -> Option<Self> {
        let names: Vec<_> = line.trim_start().strip_prefix('#')?.split_whitespace().collect();
        let column = |name: &str| names.iter().position(|other| *other == name);
        (names.first() == Some(&"size")).then_some(())?;
        Some(Self {
            columns: names.len(),
            time: column("time")?,
            bus_bandwidth: column("busbw")?,
            wrong: (0..names.len()).filter(|column| names[*column] == "#wrong").collect(),
            error: column("error"),
        })
    }

    /// Returns the row and its number of wrong values, or `None` if the line is not a row.
    fn row(&self, line: &str) -> Option<(Row, Result<u64, NcclTestsError>)> {
        let cells: Vec<_> = line.split_whitespace().collect();
        if cells.len() != self.columns {
            return None;
        }
        let number =
            |column: usize| cells[column].parse::<f64>().ok().filter(|number| *number >= 0.0 && number.is_finite());
        let row = Row {
            bytes: cells[0].parse().ok()?,
            seconds: number(self.time)? / 1e6,
            bus_bandwidth: number(self.bus_bandwidth)? * 1e9,
        };
        let compared = |column: &usize| cells[*column].parse::<u64>().map_err(|_| NcclTestsError::NotVerified);
        let wrong = match self.error {
            // The tool itself evaluates the deviation, in its last line.
            Some(column) => number(column).map(|_| 0).ok_or(NcclTestsError::NotVerified),
            None if self.wrong.is_empty() => Err(NcclTestsError::NotVerified),
            None => self.wrong.iter().map(compared).try_fold(0u64, |all, one| Ok(all.saturating_add(one?))),
        };
        Some((row, wrong))
    }
}

#[derive(Deserialize)]
struct JsonRun {
    results: Vec<JsonRow>,
    out_of_bounds: JsonVerdict,
    #[serde(default)]
    errors: serde_json::Value,
}

#[derive(Deserialize)]
struct JsonRow {
    size: u64,
    out_of_place: JsonSide,
    in_place: JsonSide,
}

#[derive(Deserialize)]
struct JsonSide {
    #[serde(alias = "cpu_time")]
    time: f64,
    bus_bw: f64,
    nwrong: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct JsonVerdict {
    count: u64,
    okay: bool,
}

fn parse_json(text: &str) -> Result<NcclTests, NcclTestsError> {
    let run: JsonRun = serde_json::from_str(text).map_err(|error| NcclTestsError::Json(error.to_string()))?;
    let none = match &run.errors {
        serde_json::Value::Null => true,
        serde_json::Value::Array(list) => list.is_empty(),
        serde_json::Value::Object(map) => map.is_empty(),
        serde_json::Value::Number(count) => count.as_u64() == Some(0),
        _ => false,
    };
    if !none {
        return Err(NcclTestsError::Failed(run.errors.to_string().chars().take(MAX_TEXT_CHARS).collect()));
    }
    let mut wrong = run.out_of_bounds.count.max(u64::from(!run.out_of_bounds.okay));
    let mut rows = Vec::new();
    let mut marked = 0u64;
    for JsonRow { size, out_of_place, in_place } in run.results {
        for side in [&out_of_place, &in_place] {
            let count = side.nwrong.as_ref().and_then(serde_json::Value::as_u64);
            marked = marked.saturating_add(count.ok_or(NcclTestsError::NotVerified)?);
        }
        let JsonSide { time, bus_bw, .. } = out_of_place;
        if !(time >= 0.0 && bus_bw >= 0.0) {
            return Err(NcclTestsError::Json("a time or a bandwidth is negative".to_owned()));
        }
        rows.push(Row { bytes: size, seconds: time / 1e6, bus_bandwidth: bus_bw * 1e9 });
    }
    wrong = wrong.max(marked);
    Ok(NcclTests { rows, wrong })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NEW: &str = include_str!("../fixtures/nccl-tests/2.13-by-hand.txt");
    const OLD: &str = include_str!("../fixtures/nccl-tests/2.10-by-hand.txt");
    const QUANTILES: &str = include_str!("../fixtures/nccl-tests/2.17-quantiles-by-hand.txt");
    const WRONG: &str = include_str!("../fixtures/nccl-tests/wrong-by-hand.txt");
    const JSON: &str = include_str!("../fixtures/nccl-tests/2.17-by-hand.json");

    fn largest(text: &str) -> (u64, f64, u64) {
        let run = parse(text).unwrap();
        (run.largest().bytes, run.largest().bus_bandwidth / 1e9, run.wrong)
    }

    #[test]
    fn every_output_format_gives_the_bandwidth_of_the_largest_size() {
        for (text, bytes, bandwidth) in [
            (NEW, 134_217_728, 425.21),
            (OLD, 4_194_304, 62.23),
            (QUANTILES, 1_073_741_824, 467.41),
            (JSON, 33_554_432, 308.59),
        ] {
            let (found, rate, wrong) = largest(text);
            assert_eq!((found, wrong), (bytes, 0));
            assert!((rate - bandwidth).abs() < 1e-9, "{rate}");
        }
        let seconds = parse(NEW).unwrap().rows[0].seconds;
        assert!((seconds - 87.43e-6).abs() < 1e-12, "{seconds}");
    }

    #[test]
    fn the_median_of_repeated_runs_of_a_size_counts() {
        let row =
            |rate: &str| format!("  8589934592 2147483648 float sum -1 35920 239.14 {rate} 0 35915 239.17 418.55 0\n");
        let head = NEW.lines().find(|line| line.contains("busbw")).unwrap();
        let cycles = ["120.0", "418.1", "418.4", "419.9", "418.2"].map(row).concat();
        let run = parse(&format!("{head}\n{cycles}# Out of bounds values : 0 OK\n")).unwrap();
        assert!((run.bus_bandwidth() - 418.2e9).abs() < 1.0, "{}", run.bus_bandwidth());
        assert!((parse(NEW).unwrap().bus_bandwidth() - 425.21e9).abs() < 1.0);
    }

    #[test]
    fn wrong_values_are_counted_wherever_they_are_reported() {
        assert_eq!(parse(WRONG).unwrap().wrong, 12);
        assert_eq!(parse(&WRONG.replace("12 FAILED", "0 OK")).unwrap().wrong, 12, "the rows count wrong values too");
        assert_eq!(parse(&NEW.replace("0 OK", "3 FAILED")).unwrap().wrong, 3);
        assert_eq!(
            parse(&JSON.replace(r#""nwrong":0},"in_place":{"cpu_time""#, r#""nwrong":7},"in_place":{"cpu_time""#))
                .unwrap()
                .wrong,
            7
        );
        assert_eq!(parse(&JSON.replace(r#""count":0,"okay":true"#, r#""count":0,"okay":false"#)).unwrap().wrong, 1);
    }

    #[test]
    fn a_failed_truncated_or_unverified_run_is_an_error() {
        let failed = format!("{NEW}gpu-f: Test NCCL failure common.cu:958 'unhandled system error'\n");
        assert!(matches!(parse(&failed), Err(NcclTestsError::Failed(text)) if text.contains("common.cu:958")));
        let cut = &NEW[..NEW.find("# Out of bounds").unwrap()];
        assert!(matches!(parse(cut), Err(NcclTestsError::NoTable(_))));
        assert!(matches!(parse(""), Err(NcclTestsError::NoTable(_))));
        let unchecked = NEW.replace("      0\n", "    N/A\n");
        assert_eq!(parse(&unchecked), Err(NcclTestsError::NotVerified));
        assert_eq!(parse(&OLD.replace("4e-07", "  N/A")), Err(NcclTestsError::NotVerified));
        assert_eq!(parse(&JSON.replace(",\"nwrong\":0", "")), Err(NcclTestsError::NotVerified));
        let errors = JSON.replace(r#""errors":[]"#, r#""errors":["out of memory"]"#);
        assert!(matches!(parse(&errors), Err(NcclTestsError::Failed(text)) if text.contains("out of memory")));
        let empty: String = NEW.lines().filter(|line| line.starts_with('#')).map(|line| format!("{line}\n")).collect();
        assert!(matches!(parse(&empty), Err(NcclTestsError::NoTable("it has no row"))));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_parsed_values_are_finite(text in ".{0,400}", cut in 0..2000usize) {
            let _read = parse(&text);
            for output in [NEW, OLD, JSON] {
                let end = (0..=cut.min(output.len())).rev().find(|end| output.is_char_boundary(*end)).unwrap();
                if let Ok(run) = parse(&format!("{}{text}", &output[..end])) {
                    prop_assert!(run.rows.iter().all(|row| row.bus_bandwidth.is_finite() && row.seconds >= 0.0));
                }
            }
        }
    }
}
