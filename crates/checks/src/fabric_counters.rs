//! The growth of a port's error counters under load: the counters and limits of `ib-counters` and `efa-counters`, over
//! the seconds of a test instead of the minutes between two readings.

use doctor_core::observation::{Event, ProbeFailure};

use crate::{
    efa_counters,
    files::{match_pattern_exact, unexpected_content},
    ib_counters::{self, RateUnit},
    probe::FileText,
    rdma::port_entity,
};

/// A counter with its limit per second.
struct Counter {
    pattern: String,
    name: &'static str,
    code: &'static str,
    limit_per_second: f64,
}

fn counters() -> impl Iterator<Item = Counter> {
    let of_ports = ib_counters::COUNTERS.iter().map(|counter| Counter {
        pattern: counter.pattern(),
        name: counter.name,
        code: counter.code,
        limit_per_second: match counter.per {
            RateUnit::Second => counter.limit,
            RateUnit::Hour => counter.limit / 3600.0,
        },
    });
    let of_efa = efa_counters::COUNTERS.iter().map(|counter| Counter {
        pattern: counter.pattern.to_owned(),
        name: counter.label,
        code: counter.code,
        limit_per_second: counter.limit,
    });
    of_ports.chain(of_efa)
}

/// Returns the paths of all counters of this port, including those that it does not have.
pub fn counter_paths(device: &str, port: &str) -> Vec<String> {
    counters().map(|counter| counter.pattern.replacen('*', device, 1).replacen('*', port, 1)).collect()
}

/// Compares counters read before and after this many seconds of load. A counter that is missing in one of the readings,
/// or that the port does not support, has not grown; one that cannot be read is returned as a failure.
pub fn growth_events(before: &[FileText], after: &[FileText], seconds: f64) -> (Vec<Event>, Vec<ProbeFailure>) {
    let (mut events, mut unread) = (Vec::new(), Vec::new());
    for counter in counters() {
        for file in after {
            let Some([device, port]) = match_pattern_exact(&counter.pattern, &file.path) else { continue };
            let earlier = before.iter().find(|earlier| earlier.path == file.path);
            match (earlier.map(parse_counter), parse_counter(file)) {
                (Some(Ok(Some(earlier))), Ok(Some(now))) => {
                    // A counter that decreased was reset in between.
                    let growth = if now < earlier { now } else { now - earlier };
                    if growth > counter.limit_per_second * seconds.max(1.0) {
                        let text = format!("{} grew by {growth} within {seconds:.1} s under load", counter.name);
                        events.push(Event::seen(counter.code, port_entity(device, port), text));
                    }
                }
                (_, Err(failure)) | (Some(Err(failure)), _) => unread.push(failure),
                // A virtual function may not count: `N/A (no PMA)`.
                (Some(Ok(None)) | None, Ok(_)) | (Some(Ok(Some(_))), Ok(None)) => {}
            }
        }
    }
    (events, unread)
}

/// Returns `None` if the port does not support the counter.
fn parse_counter(file: &FileText) -> Result<Option<f64>, ProbeFailure> {
    let text = file.text.as_ref().map_err(Clone::clone)?.trim();
    match text.parse::<u64>() {
        Ok(number) => Ok(Some(number as f64)),
        Err(_) if text.starts_with("N/A") => Ok(None),
        Err(_) => Err(unexpected_content(&file.path, text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINK: &str = "/sys/class/infiniband/mlx5_0/ports/1/counters";
    const EFA: &str = "/sys/class/infiniband/rdmap79s0/ports/1/hw_counters";

    fn file(path: &str, text: &str) -> FileText {
        FileText { path: path.to_owned(), text: Ok(text.to_owned()) }
    }

    fn findings(path: &str, before: &str, after: &str, seconds: f64) -> Vec<String> {
        let (events, unread) = growth_events(&[file(path, before)], &[file(path, after)], seconds);
        let events = events.into_iter().map(|event| format!("{} {}", event.code, event.entity));
        events.chain(unread.into_iter().map(|failure| failure.kind.to_string())).collect()
    }

    #[test]
    fn only_counters_that_grew_under_load_are_reported() {
        let symbols = format!("{LINK}/symbol_error");
        assert_eq!(findings(&symbols, "900\n", "900\n", 5.0), [""; 0]);
        assert_eq!(findings(&symbols, "900\n", "903\n", 5.0), ["symbol-errors link:mlx5_0/1"]);
        assert_eq!(findings(&symbols, "900\n", "2\n", 5.0), ["symbol-errors link:mlx5_0/1"], "the counter was reset");
        assert_eq!(findings(&symbols, "N/A (no PMA)\n", "N/A (no PMA)\n", 5.0), [""; 0]);
        assert_eq!(findings(&symbols, "900\n", "?\n", 5.0), ["unparseable"]);
        let received = format!("{LINK}/port_rcv_errors");
        assert_eq!(findings(&received, "0\n", "40\n", 5.0), [""; 0], "ten a second are allowed");
        assert_eq!(findings(&received, "0\n", "60\n", 5.0), ["receive-errors link:mlx5_0/1"]);
        assert_eq!(findings(&format!("{EFA}/rx_drops"), "0\n", "600\n", 5.0), ["efa-drops link:rdmap79s0/1"]);
        assert_eq!(findings(&format!("{EFA}/tx_bytes"), "0\n", "600\n", 5.0), [""; 0]);
    }

    #[test]
    fn the_paths_are_those_of_one_port() {
        let all = counter_paths("mlx5_3", "2");
        assert!(all.contains(&"/sys/class/infiniband/mlx5_3/ports/2/counters/link_downed".to_owned()), "{all:?}");
        assert!(all.iter().all(|path| !path.contains('*')) && all.len() == 12);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(before in ".{0,12}", after in "[0-9]{0,24}", seconds in 0.0..100.0) {
            findings(&format!("{LINK}/symbol_error"), &before, &after, seconds);
        }
    }
}
