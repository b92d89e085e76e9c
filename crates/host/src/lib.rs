//! Jobs and marks of one machine, stored in files on it so that they survive a restart of the controller. And what both programs
//! need of a machine: files that no other user can change ([`trusted_file`]), open files ([`open_files`]).
//!
//! The local backend calls this crate on its own machine. On an SSH host, `doctor-node host` calls it, and the
//! controller talks to that program through [`protocol`].

pub mod files;
pub mod heap;
pub mod host_directory;
pub mod jobs;
pub mod marks;
pub mod occupancy;
pub mod open_files;
pub mod output_file;
pub mod process;
pub mod protocol;
pub mod shared_directory;
pub mod trusted_file;
pub mod vendor_reports;

/// Parses the one-minute load average from the text of `/proc/loadavg`.
pub fn parse_load_average(text: &str) -> Option<f64> {
    let load: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    (load.is_finite() && load >= 0.0).then_some(load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_is_not_a_number_is_rejected() {
        assert_eq!(parse_load_average("0.02 0.17 0.09 1/84 7182\n"), Some(0.02));
        for text in ["", "x", "-1 0 0", "nan 0 0"] {
            assert_eq!(parse_load_average(text), None, "{text}");
        }
    }
}
