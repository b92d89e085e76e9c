//! The output of the programs of the fabric test, and the kernel's counters.
//!
//! A result is a number of bits that moved. Text without the header line has none, and only a number from the kernel
//! makes a counter grow.

#![no_main]

use doctor_checks::{fabric_counters, perftest, pingpong, probe::FileText, sockets};
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;

const PARSERS: [fn(&str); 4] = [perftest, pingpong, listeners, counters];

fuzz_target!(|data: &[u8]| {
    if let Some((parser, rest)) = pick(&PARSERS, data) {
        parser(&text(rest));
    }
});

fn perftest(text: &str) {
    if let Ok(written) = perftest::parse(text) {
        assert!(written.bits_per_second > 0.0 && written.bits_per_second.is_finite());
        assert!(text.contains("#bytes"));
    }
    let (perftest::PerftestFailure::Traffic(said) | perftest::PerftestFailure::Other(said)) =
        perftest::classify_failure(text);
    assert!(!said.is_empty() && said.chars().count() < 300);
}

fn pingpong(text: &str) {
    if let Ok(returned) = pingpong::parse(text) {
        assert!(returned.bits_per_second > 0.0 && returned.bits_per_second.is_finite());
        assert!(returned.seconds >= 0.0 && text.contains("#ack"));
    }
    let (client, server) = text.split_once('\u{1}').unwrap_or((text, ""));
    match pingpong::classify_failure(client, server) {
        pingpong::PingpongFailure::Traffic(said) => assert!(!said.is_empty() && client.contains("cq_readerr")),
        pingpong::PingpongFailure::Other(said) => assert!(!said.is_empty()),
    }
}

fn listeners(text: &str) {
    let ports = (0..=u16::MAX).step_by(0x1111).filter(|port| sockets::is_listening(text, *port)).count();
    assert!(ports <= text.lines().count());
}

fn counters(text: &str) {
    let path = "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error".to_owned();
    let (before, after) = text.split_once('\n').unwrap_or((text, ""));
    let file = |text: &str| [FileText { path: path.clone(), text: Ok(text.to_owned()) }];
    let (events, _) = fabric_counters::growth_events(&file(before), &file(after), 5.0);
    assert!(events.len() <= 1 && (events.is_empty() || after.trim().parse::<u64>().is_ok()));
}
