//! The spool under every order of adding, sending, failing and restarting.

use super::*;
use doctor_checks::document::{TestEvidence, Versions};
use doctor_core::ids::NodeName;
use proptest::prelude::*;

const PLENTY: SpoolLimits = SpoolLimits { bytes: 1 << 20, reports: 1000 };

fn report(number: u64, padding: usize) -> AgentReport {
    let at = Timestamp::from_secs(number as i64);
    let text = doctor_checks::probe::ProbeOutput::Text("x".repeat(padding));
    let evidence = TestEvidence {
        test: CheckId::new("memory").unwrap(),
        started: at,
        ended: at,
        probes: vec![(doctor_checks::probe::Probe::Kmsg, text)],
    };
    let heartbeat = AgentReport::heartbeat(NodeName::new("n1").unwrap(), number, at, Versions::default());
    AgentReport { checks: vec![evidence], ..heartbeat }
}

fn add(spool: &mut Spool, padding: usize) -> u64 {
    let number = spool.number();
    spool.add(&report(number, padding));
    number
}

fn send(spool: &mut Spool) -> Option<NextMessage> {
    let next = spool.next_message()?;
    spool.mark_accepted(&next);
    Some(next)
}

fn numbers(spool: &mut Spool) -> Vec<u64> {
    let one = |next| match next {
        NextMessage::Report(report) => report.sequence,
        NextMessage::Lost { .. } => panic!("no report may be lost"),
    };
    std::iter::from_fn(|| send(spool)).map(one).collect()
}

#[test]
fn impossible_report_numbers_are_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let max = u64::MAX;
    let dropped = r#"{"reports":1,"checks":{},"from":"2026-11-15T08:00:00Z","to":"2026-11-15T08:00:00Z"}"#;
    for (name, text) in [
        (NUMBER.to_owned(), max.to_string()),
        (LOST.to_owned(), format!(r#"{{"through":{max},"dropped":{dropped}}}"#)),
        (file_name(max), "{}".to_owned()),
        ("7.report".to_owned(), "{}".to_owned()),
    ] {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let mut spool = Spool::open(directory.path(), PLENTY).unwrap();
    assert!(spool.is_empty());
    let first = add(&mut spool, 10);
    assert_eq!(numbers(&mut spool), [first]);
}

#[test]
fn reports_come_back_in_order_after_a_restart_and_numbers_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut spool = Spool::open(directory.path(), PLENTY).unwrap();
    let sent: Vec<u64> = (0..5).map(|_| add(&mut spool, 10)).collect();
    send(&mut spool);
    drop(spool);
    let mut spool = Spool::open(directory.path(), PLENTY).unwrap();
    let later = add(&mut spool, 10);
    assert!(later > sent[4]);
    assert_eq!(numbers(&mut spool), [&sent[1..], &[later]].concat());
    assert!(spool.is_empty());
    drop(spool);
    assert!(Spool::open(directory.path(), PLENTY).unwrap().number() > later);
}

#[test]
fn dropped_reports_are_counted_and_the_count_is_sent_before_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let mut spool = Spool::open(directory.path(), SpoolLimits { reports: 3, ..PLENTY }).unwrap();
    let sent: Vec<u64> = (0..10).map(|_| add(&mut spool, 10)).collect();
    assert_eq!((spool.len(), spool.lost_count()), (3, 7));
    drop(spool);
    let mut spool = Spool::open(directory.path(), PLENTY).unwrap();
    let Some(NextMessage::Lost { number, dropped }) = send(&mut spool) else { panic!("the counts come first") };
    assert_eq!((number, dropped.reports), (sent[6], 7));
    assert_eq!(dropped.checks[&CheckId::new("memory").unwrap()], 7);
    assert_eq!(
        (dropped.from, dropped.to),
        (Timestamp::from_secs(sent[0] as i64), Timestamp::from_secs(sent[6] as i64))
    );
    assert_eq!(numbers(&mut spool), sent[7..]);
    drop(spool);
    assert!(Spool::open(directory.path(), PLENTY).unwrap().is_empty());
}

#[test]
fn bytes_count_against_the_limit_and_one_report_always_fits() {
    let directory = tempfile::tempdir().unwrap();
    let mut spool = Spool::open(directory.path(), SpoolLimits { bytes: 3000, reports: 100 }).unwrap();
    add(&mut spool, 1000);
    add(&mut spool, 1000);
    add(&mut spool, 10_000);
    assert_eq!((spool.len(), spool.lost_count()), (1, 2));
}

#[test]
fn a_report_in_flight_is_not_counted_as_lost() {
    let directory = tempfile::tempdir().unwrap();
    let mut spool = Spool::open(directory.path(), SpoolLimits { reports: 2, ..PLENTY }).unwrap();
    let first = add(&mut spool, 10);
    let flying = spool.next_message().unwrap();
    for _ in 0..4 {
        add(&mut spool, 10);
    }
    assert_eq!(spool.lost_count(), 3);
    let again = Spool::open(directory.path(), PLENTY).unwrap();
    assert_eq!((again.len(), again.lost_count()), (2, 3), "nor by the process after a crash");
    assert!(matches!(&flying, NextMessage::Report(report) if report.sequence == first));
    spool.mark_accepted(&flying);
    assert!(matches!(send(&mut spool), Some(NextMessage::Lost { dropped, .. }) if dropped.reports == 3));
    assert_eq!(numbers(&mut spool).len(), 1);
}

#[test]
fn a_truncated_file_is_counted_as_lost_and_the_others_are_sent() {
    let directory = tempfile::tempdir().unwrap();
    let mut spool = Spool::open(directory.path(), PLENTY).unwrap();
    let sent: Vec<u64> = (0..3).map(|_| add(&mut spool, 100)).collect();
    let last = spool.path(sent[2]);
    drop(spool);
    let bytes = fs::read(&last).unwrap();
    fs::write(&last, &bytes[..bytes.len() / 2]).unwrap();
    let mut spool = Spool::open(directory.path(), PLENTY).unwrap();
    assert!(matches!(send(&mut spool), Some(NextMessage::Report(report)) if report.sequence == sent[0]));
    assert!(matches!(send(&mut spool), Some(NextMessage::Report(report)) if report.sequence == sent[1]));
    assert!(
        matches!(send(&mut spool), Some(NextMessage::Lost { number, dropped }) if number == sent[2] && dropped.reports == 1)
    );
    assert!(spool.is_empty());
}

#[test]
fn a_crash_between_counting_and_removing_counts_no_report_twice() {
    let directory = tempfile::tempdir().unwrap();
    let mut spool = Spool::open(directory.path(), SpoolLimits { reports: 2, ..PLENTY }).unwrap();
    let first = add(&mut spool, 10);
    let body = fs::read(spool.path(first)).unwrap();
    for _ in 0..2 {
        add(&mut spool, 10);
    }
    // As if the count had been written and the file not yet removed.
    fs::write(spool.path(first), body).unwrap();
    let spool = Spool::open(directory.path(), PLENTY).unwrap();
    assert_eq!((spool.len(), spool.lost_count()), (2, 1));
}

#[test]
fn reports_stay_in_memory_while_the_disk_rejects_writes() {
    let directory = tempfile::tempdir().unwrap();
    let spool_directory = directory.path().join("spool");
    let mut spool = Spool::open(&spool_directory, PLENTY).unwrap();
    fs::remove_dir(&spool_directory).unwrap();
    fs::write(&spool_directory, "a file in its place").unwrap();
    let sent: Vec<u64> = (0..MEMORY_LIMITS.reports + 5).map(|_| add(&mut spool, 10)).collect();
    assert!(spool.disk_error().is_some());
    assert_eq!((spool.len(), spool.lost_count()), (MEMORY_LIMITS.reports, 5));
    assert!(matches!(send(&mut spool), Some(NextMessage::Lost { .. })));
    assert!(matches!(send(&mut spool), Some(NextMessage::Report(report)) if report.sequence == sent[5]));
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Add,
    Send,
    Fail,
    Restart,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Each report is sent once or counted once, always in order.
    #[test]
    fn every_report_is_sent_once_or_counted_once(
        steps in proptest::collection::vec(
            prop_oneof![4 => Just(Step::Add), 2 => Just(Step::Send), 1 => Just(Step::Fail), 1 => Just(Step::Restart)],
            1..80,
        ),
        max_reports in 1_usize..12,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let max_reports = SpoolLimits { reports: max_reports, ..PLENTY };
        let mut spool = Spool::open(directory.path(), max_reports).unwrap();
        let (mut added, mut sent, mut counted, mut last) = (0_u64, 0_u64, 0_u64, 0_u64);
        let mut take = |spool: &mut Spool| {
            let Some(next) = send(spool) else { return Ok(false) };
            let number = match &next {
                NextMessage::Report(report) => { sent += 1; report.sequence }
                NextMessage::Lost { number, dropped } => { counted += dropped.reports; *number }
            };
            prop_assert!(number > last, "{number} after {last}");
            last = number;
            Ok(true)
        };
        for step in steps {
            match step {
                Step::Add => { add(&mut spool, 5); added += 1; }
                Step::Send => { take(&mut spool)?; }
                Step::Fail => { if spool.next_message().is_some() { spool.mark_retry(); } }
                Step::Restart => { spool = Spool::open(directory.path(), max_reports).unwrap(); }
            }
            prop_assert!(spool.len() <= max_reports.reports);
        }
        while take(&mut spool)? {}
        prop_assert_eq!(sent + counted, added);
        prop_assert!(spool.is_empty());
        if added <= max_reports.reports as u64 {
            prop_assert_eq!(counted, 0);
        }
    }
}
