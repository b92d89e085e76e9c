//! Runs and marks of one machine, kept in files on it, so that they outlive whoever asked for them.
//!
//! The local backend uses this on the machine that it runs on. On a host that is reached over SSH, `doctor-node host` does, and
//! [`protocol`] is what the controller and that program say to each other.

pub mod files;
pub mod jobs;
pub mod marks;
pub mod memory;
pub mod occupancy;
pub mod place;
pub mod process;
pub mod protocol;
pub mod reports;

/// The first number of /proc/loadavg.
pub fn one_minute(text: &str) -> Option<f64> {
    let load: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    (load.is_finite() && load >= 0.0).then_some(load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_is_no_number_is_none() {
        assert_eq!(one_minute("0.02 0.17 0.09 1/84 7182\n"), Some(0.02));
        for text in ["", "x", "-1 0 0", "nan 0 0"] {
            assert_eq!(one_minute(text), None, "{text}");
        }
    }
}
