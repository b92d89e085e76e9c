//! Entry points for the fuzzer: this backend's state files, which a job, an operator or a full disk may have changed.

use doctor_checks::job_file::{JobFile, JobProcess};
use doctor_core::node::ForeignMark;
use doctor_host::{files, jobs::DecisionTime, marks::OurMarks};

/// Returns the kinds of state file as which these bytes parse.
pub fn parsed_kinds(bytes: &[u8]) -> Vec<&'static str> {
    let kinds = [
        ("job", files::parse::<JobFile>(bytes).is_ok()),
        ("process", files::parse::<JobProcess>(bytes).is_ok()),
        ("decision", files::parse::<DecisionTime>(bytes).is_ok()),
        ("our marks", files::parse::<OurMarks>(bytes).is_ok()),
        ("foreign marks", files::parse::<Vec<ForeignMark>>(bytes).is_ok()),
    ];
    kinds.into_iter().filter_map(|(kind, fits)| fits.then_some(kind)).collect()
}

/// Parses the load average of a `/proc/loadavg`.
pub fn load(text: &str) -> Option<f64> {
    doctor_host::parse_load_average(text)
}
