//! Parses the human-readable table of `dcgmi diag`, found in logs of a diagnostic that did not use JSON.
//!
//! Up to 3.3 a row has a test and its result (`Pass`, `Pass - All`, `Fail - GPU 3`); from 4.0 on the result of each GPU
//! has a row without a name (`GPU0: Pass`), and with `-v` further rows with explanations. A row whose second cell is no
//! known result is ignored. A table without a pass is not healthy, and a skipped test has not passed.

/// The content of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DcgmTextOutput {
    /// The number of passed results, over all tests and GPUs.
    pub passed: usize,
    /// Of those, results of hardware tests: memory, links or load. The others only inspect the installation.
    pub hardware_passed: usize,
    pub skipped: usize,
    /// Tests that failed or warned, each with DCGM's wording of the result.
    pub failed: Vec<String>,
    pub warned: Vec<String>,
    /// Tests that did not run.
    pub not_run: Vec<String>,
}

/// Length limit of a test with its result, in characters.
const MAX_TEXT_CHARS: usize = 120;
/// The number of failures kept per list; more add no information.
const MAX_FAILURES: usize = 64;

impl DcgmTextOutput {
    /// Parses the rows and ignores all other text.
    pub fn parse(text: &str) -> Self {
        let mut table = Self::default();
        let mut test = "";
        for (name, result) in text.lines().filter_map(parse_row) {
            if !name.is_empty() {
                test = name;
            }
            let summary = || format!("{test}: {result}").chars().take(MAX_TEXT_CHARS).collect::<String>();
            let list = match parse_status(result) {
                Some(DcgmTestStatus::Pass) => {
                    table.passed += 1;
                    table.hardware_passed += usize::from(is_hardware_test(test));
                    continue;
                }
                Some(DcgmTestStatus::Skip) => {
                    table.skipped += 1;
                    continue;
                }
                Some(DcgmTestStatus::Fail) => &mut table.failed,
                Some(DcgmTestStatus::Warn) => &mut table.warned,
                Some(DcgmTestStatus::NotRun) => &mut table.not_run,
                None => continue,
            };
            if list.len() < MAX_FAILURES {
                list.push(summary());
            }
        }
        table
    }
}

/// Matches DCGM's test names of all versions.
fn is_hardware_test(test: &str) -> bool {
    let test = test.to_ascii_lowercase().replace(['_', '-'], " ");
    let names = ["memory", "pcie", "diagnostic", "stress", "power", "bandwidth", "nccl", "nvlink"];
    test.split_whitespace().any(|word| names.contains(&word))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DcgmTestStatus {
    Pass,
    Skip,
    Warn,
    Fail,
    NotRun,
}

const STATUS_WORDS: [(&str, DcgmTestStatus); 5] = [
    ("Pass", DcgmTestStatus::Pass),
    ("Skip", DcgmTestStatus::Skip),
    ("Warn", DcgmTestStatus::Warn),
    ("Fail", DcgmTestStatus::Fail),
    ("Not Run", DcgmTestStatus::NotRun),
];

/// Parses `| name | result |`. Returns `None` for separators and headings.
fn parse_row(line: &str) -> Option<(&str, &str)> {
    let (name, result) = line.trim().strip_prefix('|')?.strip_suffix('|')?.split_once('|')?;
    (!result.contains('|')).then_some((name.trim(), result.trim()))
}

/// Parses a result, with an optional GPU before it and text after it.
fn parse_status(result: &str) -> Option<DcgmTestStatus> {
    let result = match result.split_once(':') {
        Some((gpu, rest)) if is_entity(gpu) => rest.trim_start(),
        _ => result,
    };
    let (_, found) = STATUS_WORDS.iter().find(|(text, _)| {
        let rest = result.strip_prefix(text);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(" - ") || rest == "ed" || rest == "ped")
    })?;
    Some(*found)
}

/// Matches `GPU0`, `CPU1`, `NVSWITCH2`.
fn is_entity(text: &str) -> bool {
    let letters = text.bytes().take_while(u8::is_ascii_alphabetic).count();
    letters > 0 && letters < text.len() && text.bytes().skip(letters).all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Both were made by hand after examples of 3.3 and 4.4 in DCGM's documentation and users' reports.
    const OLD: &str = "\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
| DCGM Version              | 3.3.8                                          |
|-----  Deployment  --------+------------------------------------------------|
| Denylist                  | Pass                                           |
| Persistence Mode          | Fail                                           |
+-----  Integration  -------+------------------------------------------------+
| PCIe                      | Pass - All                                     |
+-----  Hardware  ----------+------------------------------------------------+
| GPU Memory                | Fail - GPU 3                                   |
| Diagnostic                | Skip - All                                     |
+---------------------------+------------------------------------------------+
";
    const NEW: &str = "\
|-----  Metadata  ----------+------------------------------------------------|
| DCGM Version              | 4.4.2                                          |
| GPU Device IDs Detected   | 2237                                           |
|-----  Deployment  --------+------------------------------------------------|
| software                  | Pass                                           |
|                           | GPU0: Pass                                     |
+-----  Hardware  ----------+------------------------------------------------+
| memory                    | Warn                                           |
|                           | GPU0: Pass                                     |
|                           | GPU1: Warn                                     |
| pcie                      | Not Run                                        |
";

    #[test]
    fn both_formats_are_parsed_and_a_gpu_belongs_to_the_test_above_it() {
        let old = DcgmTextOutput::parse(OLD);
        assert_eq!((old.passed, old.skipped), (2, 1));
        assert_eq!(old.failed, ["Persistence Mode: Fail", "GPU Memory: Fail - GPU 3"]);
        let new = DcgmTextOutput::parse(NEW);
        assert_eq!((new.passed, new.failed.len()), (3, 0));
        assert_eq!(
            (new.warned.as_slice(), new.not_run.as_slice()),
            (&["memory: Warn".to_owned(), "memory: GPU1: Warn".to_owned()][..], &["pcie: Not Run".to_owned()][..])
        );
    }

    #[test]
    fn a_line_that_is_not_a_result_passes_nothing() {
        for text in [
            "",
            "Pass",
            "dcgmi diag passed",
            "| Pass |",
            "| a | Passing through |",
            "| a | b | Pass |",
            "Error: unable to establish a connection to the specified host: localhost",
        ] {
            assert_eq!(DcgmTextOutput::parse(text), DcgmTextOutput::default(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_each_result_has_its_line(text in "(\\||Pass|Fail - |GPU[0-9]:|Skip|[a-c]| |\n){0,60}") {
            let table = DcgmTextOutput::parse(&text);
            let results = table.passed + table.skipped + table.failed.len() + table.warned.len() + table.not_run.len();
            prop_assert!(results <= text.lines().count());
        }
    }
}
