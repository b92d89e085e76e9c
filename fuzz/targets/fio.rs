//! fio prints JSON with remarks before it, and a future version may print another format.
//!
//! Parsed numbers are never negative, whatever text follows, and nothing is made up from truncated text.

#![no_main]

use doctor_checks::fio::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(run) = parse(text) else { return };
    for side in [run.read, run.write] {
        let latency = side.latency.map_or([0.0; 3], |latency| [latency.p50, latency.p99, latency.p999]);
        let numbers = [side.bytes_per_second, side.iops].into_iter().chain(latency);
        for number in numbers {
            assert!(number >= 0.0 && number.is_finite(), "{number}");
        }
    }
    assert!(run.version.starts_with("fio-"), "{}", run.version);
    assert_eq!(parse(&format!("{text}\nfio: a last remark\n")).as_ref(), Ok(&run));
    // Nothing is made up from truncated text.
    if let Some(cut) = text.trim_end().strip_suffix('}') {
        assert!(parse(cut).is_err() || parse(cut).as_ref() == Ok(&run));
    }
});
