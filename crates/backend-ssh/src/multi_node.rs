//! Combines the states of the parts of a multi-node run. Pure.

use doctor_core::{
    run::{JobEnd, ObservedJobState},
    time::Timestamp,
};

/// If parts ended differently, the first of these is the run's end.
const WORST_FIRST: [JobEnd; 5] = [JobEnd::Lost, JobEnd::NodeDied, JobEnd::Failed, JobEnd::Killed, JobEnd::Preempted];

/// Returns the state of the whole run. An unknown part makes it unknown; it has ended when every part has, and succeeded when
/// every part did. A part that never started, of a run whose others did, is lost.
pub(super) fn combined_state(parts: &[ObservedJobState]) -> ObservedJobState {
    if let [single] = parts {
        return single.clone();
    }
    if let Some(unknown) = parts.iter().find(|part| matches!(part, ObservedJobState::Unknown { .. })) {
        return unknown.clone();
    }
    let Some(job) = parts.iter().find_map(job_of) else { return ObservedJobState::Absent };
    let (mut running_since, mut pending_since, mut ends): (
        Option<Timestamp>,
        Option<Timestamp>,
        Vec<(Timestamp, JobEnd)>,
    ) = (None, None, Vec::new());
    let mut running = false;
    let earlier = |known: Option<Timestamp>, at: Timestamp| Some(known.map_or(at, |known| known.min(at)));
    for part in parts {
        match part {
            ObservedJobState::Running { since, .. } => {
                (running, running_since) = (true, earlier(running_since, *since));
            }
            ObservedJobState::Pending { since, .. } => pending_since = earlier(pending_since, *since),
            ObservedJobState::Ended { started, at, how, .. } => {
                running_since = started.map_or(running_since, |started| earlier(running_since, started));
                ends.push((*at, *how));
            }
            ObservedJobState::Absent | ObservedJobState::Unknown { .. } => {}
        }
    }
    match (running_since, pending_since) {
        (Some(since), _) if running || pending_since.is_some() => ObservedJobState::Running { job: job.clone(), since },
        (_, Some(since)) => ObservedJobState::Pending { job: job.clone(), since },
        (started, None) => {
            let missing = ends.len() < parts.len();
            let how = if missing { Some(JobEnd::Lost) } else { None };
            let worst = || WORST_FIRST.into_iter().find(|worst| ends.iter().any(|(_, how)| how == worst));
            let at = ends.iter().map(|(at, _)| *at).max().or(started).unwrap_or(Timestamp::from_secs(0));
            ObservedJobState::Ended { job: job.clone(), started, at, how: how.or_else(worst).unwrap_or(JobEnd::Exited) }
        }
    }
}

const fn job_of(part: &ObservedJobState) -> Option<&doctor_core::ids::JobId> {
    match part {
        ObservedJobState::Pending { job, .. }
        | ObservedJobState::Running { job, .. }
        | ObservedJobState::Ended { job, .. } => Some(job),
        ObservedJobState::Absent | ObservedJobState::Unknown { .. } => None,
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

    fn pending(since: i64) -> ObservedJobState {
        ObservedJobState::Pending { job: job(), since: at(since) }
    }

    fn running(since: i64) -> ObservedJobState {
        ObservedJobState::Running { job: job(), since: at(since) }
    }

    fn ended(started: i64, end: i64, how: JobEnd) -> ObservedJobState {
        ObservedJobState::Ended { job: job(), started: Some(at(started)), at: at(end), how }
    }

    fn unknown_part() -> ObservedJobState {
        ObservedJobState::Unknown { why: "host2: it does not answer".to_owned() }
    }

    #[test]
    fn a_run_ends_when_every_part_ended_and_succeeds_when_every_part_succeeded() {
        use JobEnd::{Exited, Failed, Killed, Lost};
        for (parts, combined) in [
            (vec![pending(3), running(4)], running(4)),
            (vec![pending(3), pending(2)], pending(2)),
            (vec![ended(1, 5, Exited), running(2)], running(1)),
            (vec![ended(1, 5, Exited), pending(2)], running(1)),
            (vec![ended(1, 5, Exited), ended(2, 4, Exited)], ended(1, 5, Exited)),
            (vec![ended(1, 5, Exited), ended(2, 4, Killed)], ended(1, 5, Killed)),
            (vec![ended(1, 5, Failed), ended(2, 6, Killed)], ended(1, 6, Failed)),
            (vec![ended(1, 5, Exited), ObservedJobState::Absent], ended(1, 5, Lost)),
            (vec![ObservedJobState::Absent, ObservedJobState::Absent], ObservedJobState::Absent),
            (vec![ended(1, 5, Exited), unknown_part()], unknown_part()),
            (vec![running(7)], running(7)),
        ] {
            assert_eq!(combined_state(&parts), combined, "{parts:?}");
        }
    }

    fn any_part() -> impl Strategy<Value = ObservedJobState> {
        let how = prop::sample::select(JobEnd::ALL.to_vec());
        prop_oneof![
            Just(ObservedJobState::Absent),
            Just(unknown_part()),
            (0..9_i64).prop_map(pending),
            (0..9_i64).prop_map(running),
            (0..9_i64, 0..9_i64, how).prop_map(|(started, end, how)| ended(started, started + end, how)),
        ]
    }

    proptest! {
        #[test]
        fn a_run_is_never_better_than_its_worst_part(parts in prop::collection::vec(any_part(), 1..5)) {
            let combined = combined_state(&parts);
            let is_succeeded = |part: &ObservedJobState| matches!(part, ObservedJobState::Ended { how: JobEnd::Exited, .. });
            let is_ended = |part: &ObservedJobState| matches!(part, ObservedJobState::Ended { .. } | ObservedJobState::Absent);
            let is_unknown = |part: &ObservedJobState| matches!(part, ObservedJobState::Unknown { .. });
            prop_assert_eq!(is_succeeded(&combined), parts.iter().all(is_succeeded));
            prop_assert_eq!(is_ended(&combined), parts.iter().all(is_ended));
            prop_assert_eq!(is_unknown(&combined), parts.iter().any(is_unknown));
            let mut reversed = parts;
            reversed.reverse();
            prop_assert_eq!(is_ended(&combined_state(&reversed)), is_ended(&combined));
        }
    }
}
