//! NCCL's log, with lines of other programs in it, and the output of nccl-tests.
//!
//! A log that does not name every connection has no transport, and a run that reports its own failure is never accepted.

#![no_main]

use doctor_checks::{
    collective_params::Mode,
    nccl_log::{NcclLog, RequestedPath},
    nccl_tests,
};
use doctor_fuzz::{pick, text};
use libfuzzer_sys::fuzz_target;

const PARSERS: &[fn(&[u8])] = &[log, tests];

fn log(bytes: &[u8]) {
    let said = text(bytes);
    let read = NcclLog::read(&said);
    assert!(read.warnings.len() <= 8 && read.warnings.iter().all(|line| line.chars().count() <= 300));
    for mode in Mode::ALL {
        let asked = RequestedPath { mode: *mode, net: "IB", shared_memory: false, ranks: 0..2 };
        let Ok(paths) = read.check_path(&asked) else { continue };
        assert!(paths.all > 0 && paths.without_gpu_direct <= paths.network && paths.network <= paths.all);
        assert!(*mode != Mode::Loopback || paths.network == paths.all);
        assert!(*mode != Mode::Nvlink || paths.network == 0);
        // One connection through sockets invalidates it.
        let mut more = read.clone();
        more.add_line("host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0");
        assert!(more.check_path(&asked).is_err());
    }
}

fn tests(bytes: &[u8]) {
    let said = text(bytes);
    let Ok(run) = nccl_tests::parse(&said) else { return };
    assert!(!run.rows.is_empty());
    assert!(run.rows.iter().all(|row| row.seconds >= 0.0 && row.bus_bandwidth >= 0.0 && row.bus_bandwidth.is_finite()));
    let failed = nccl_tests::parse(&format!("{said}\nhost: Test NCCL failure common.cu:1\n"));
    assert!(failed.is_err(), "it says that it failed");
}

fuzz_target!(|data: &[u8]| {
    if let Some((read, rest)) = pick(PARSERS, data) {
        read(rest);
    }
});
