//! Combines the states of the parts of a multi-node run. Pure.

use doctor_core::{
    run::{JobEnd, JobSeen},
    time::Timestamp,
};

/// If parts ended differently, the first of these is the run's end.
const WORST_FIRST: [JobEnd; 5] = [JobEnd::Lost, JobEnd::NodeDied, JobEnd::Failed, JobEnd::Killed, JobEnd::Displaced];

/// Returns the state of the whole run. An unknown part makes it unknown; it has ended when every part has, and succeeded when
/// every part did. A part that never started, of a run whose others did, is lost.
pub(super) fn together(parts: &[JobSeen]) -> JobSeen {
    if let [alone] = parts {
        return alone.clone();
    }
    if let Some(unknown) = parts.iter().find(|part| matches!(part, JobSeen::Unknown { .. })) {
        return unknown.clone();
    }
    let Some(job) = parts.iter().find_map(job_of) else { return JobSeen::Absent };
    let (mut began, mut waits, mut ends): (Option<Timestamp>, Option<Timestamp>, Vec<(Timestamp, JobEnd)>) =
        (None, None, Vec::new());
    let mut running = false;
    let earlier = |known: Option<Timestamp>, at: Timestamp| Some(known.map_or(at, |known| known.min(at)));
    for part in parts {
        match part {
            JobSeen::Running { since, .. } => (running, began) = (true, earlier(began, *since)),
            JobSeen::Pending { since, .. } => waits = earlier(waits, *since),
            JobSeen::Ended { started, at, how, .. } => {
                began = started.map_or(began, |started| earlier(began, started));
                ends.push((*at, *how));
            }
            JobSeen::Absent | JobSeen::Unknown { .. } => {}
        }
    }
    match (began, waits) {
        (Some(since), _) if running || waits.is_some() => JobSeen::Running { job: job.clone(), since },
        (_, Some(since)) => JobSeen::Pending { job: job.clone(), since },
        (started, None) => {
            let missing = ends.len() < parts.len();
            let how = if missing { Some(JobEnd::Lost) } else { None };
            let worst = || WORST_FIRST.into_iter().find(|worst| ends.iter().any(|(_, how)| how == worst));
            let at = ends.iter().map(|(at, _)| *at).max().or(started).unwrap_or(Timestamp::from_secs(0));
            JobSeen::Ended { job: job.clone(), started, at, how: how.or_else(worst).unwrap_or(JobEnd::Exited) }
        }
    }
}

const fn job_of(part: &JobSeen) -> Option<&doctor_core::ids::JobId> {
    match part {
        JobSeen::Pending { job, .. } | JobSeen::Running { job, .. } | JobSeen::Ended { job, .. } => Some(job),
        JobSeen::Absent | JobSeen::Unknown { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::ids::JobId;
    use proptest::prelude::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_secs(seconds)
    }

    fn job() -> JobId {
        JobId("ssh-r".to_owned())
    }

    fn pending(since: i64) -> JobSeen {
        JobSeen::Pending { job: job(), since: at(since) }
    }

    fn running(since: i64) -> JobSeen {
        JobSeen::Running { job: job(), since: at(since) }
    }

    fn ended(started: i64, end: i64, how: JobEnd) -> JobSeen {
        JobSeen::Ended { job: job(), started: Some(at(started)), at: at(end), how }
    }

    fn silent() -> JobSeen {
        JobSeen::Unknown { why: "host2: it does not answer".to_owned() }
    }

    #[test]
    fn a_run_is_over_when_every_part_is_and_well_when_every_part_was() {
        use JobEnd::{Exited, Failed, Killed, Lost};
        for (parts, whole) in [
            (vec![pending(3), running(4)], running(4)),
            (vec![pending(3), pending(2)], pending(2)),
            (vec![ended(1, 5, Exited), running(2)], running(1)),
            (vec![ended(1, 5, Exited), pending(2)], running(1)),
            (vec![ended(1, 5, Exited), ended(2, 4, Exited)], ended(1, 5, Exited)),
            (vec![ended(1, 5, Exited), ended(2, 4, Killed)], ended(1, 5, Killed)),
            (vec![ended(1, 5, Failed), ended(2, 6, Killed)], ended(1, 6, Failed)),
            (vec![ended(1, 5, Exited), JobSeen::Absent], ended(1, 5, Lost)),
            (vec![JobSeen::Absent, JobSeen::Absent], JobSeen::Absent),
            (vec![ended(1, 5, Exited), silent()], silent()),
            (vec![running(7)], running(7)),
        ] {
            assert_eq!(together(&parts), whole, "{parts:?}");
        }
    }

    fn any_part() -> impl Strategy<Value = JobSeen> {
        let how = prop::sample::select(JobEnd::ALL.to_vec());
        prop_oneof![
            Just(JobSeen::Absent),
            Just(silent()),
            (0..9_i64).prop_map(pending),
            (0..9_i64).prop_map(running),
            (0..9_i64, 0..9_i64, how).prop_map(|(started, end, how)| ended(started, started + end, how)),
        ]
    }

    proptest! {
        #[test]
        fn a_run_never_looks_better_than_its_worst_part(parts in prop::collection::vec(any_part(), 1..5)) {
            let whole = together(&parts);
            let is_well = |part: &JobSeen| matches!(part, JobSeen::Ended { how: JobEnd::Exited, .. });
            let is_over = |part: &JobSeen| matches!(part, JobSeen::Ended { .. } | JobSeen::Absent);
            let is_unknown = |part: &JobSeen| matches!(part, JobSeen::Unknown { .. });
            prop_assert_eq!(is_well(&whole), parts.iter().all(is_well));
            prop_assert_eq!(is_over(&whole), parts.iter().all(is_over));
            prop_assert_eq!(is_unknown(&whole), parts.iter().any(is_unknown));
            let mut reversed = parts;
            reversed.reverse();
            prop_assert_eq!(is_over(&together(&reversed)), is_over(&whole));
        }
    }
}
