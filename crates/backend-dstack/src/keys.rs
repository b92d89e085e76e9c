//! Keys of runs as secrets of the project: there from a run's submission until its job has begun.

use std::collections::{BTreeMap, BTreeSet};

use doctor_backend::{BackendError, JobRequest};
use doctor_core::{
    ids::RunId,
    time::{Span, Timestamp},
};
use serde_json::{Value, json};

use super::{
    answers::{Secret, run_of, run_of_secret, secret_name},
    client::Does,
    cluster::DstackBackend,
    config::KeyBy,
    work::Run,
};

impl DstackBackend {
    /// The key as a secret of the project, until the job has it.
    pub(super) fn hide_key(&self, operation: &'static str, job: &JobRequest) -> Result<(), BackendError> {
        if self.config.key != KeyBy::Secret {
            return Ok(());
        }
        let body = json!({ "name": secret_name(job.run), "value": job.key.to_hex() });
        let made: Result<Secret, _> = self.client.ask(&self.in_project("secrets/create_or_update"), &body);
        made.map_err(|error| {
            let mut failed = error.during(operation, Does::Reads);
            failed.text = format!(
                "the run's key cannot be made a secret: {}; a manager of the project may, or set `key = \"environment\"`",
                failed.text
            );
            failed
        })?;
        self.known().secrets.insert(job.run);
        Ok(())
    }

    /// Takes the keys of these runs away: their jobs have them, or will never want them. What fails is tried again.
    pub(super) fn forget_keys(&self, runs: &BTreeSet<RunId>) {
        let known = self.known();
        let there = &(&known.secrets | &known.left.used) & runs;
        drop(known);
        for run in there {
            if self.delete_key(run) {
                let mut known = self.known();
                known.secrets.remove(&run);
                known.left.used.remove(&run);
            }
        }
    }

    /// Keys that a controller before this one left.
    pub(super) fn tidy_keys(&self, runs: &[Run], now: Timestamp) {
        if self.config.key != KeyBy::Secret || !self.known().left.is_time(now) {
            return;
        }
        let Ok(secrets) = self.client.ask::<Vec<Secret>>(&self.in_project("secrets/list"), &json!({})) else { return };
        let there: BTreeSet<RunId> = secrets.iter().filter_map(|secret| run_of_secret(&secret.name)).collect();
        let under_way: BTreeSet<RunId> = runs.iter().filter_map(|run| run_of(run.name())).collect();
        let old = {
            let mut known = self.known();
            let wanted = &known.secrets | &under_way;
            known.left.used = &there & &under_way;
            known.left.old(&there, &wanted, now)
        };
        for run in old {
            self.delete_key(run);
        }
    }

    /// Whether it is gone.
    fn delete_key(&self, run: RunId) -> bool {
        let body = json!({ "secrets_names": [secret_name(run)] });
        let gone: Result<Value, _> = self.client.ask(&self.in_project("secrets/delete"), &body);
        match gone {
            Ok(_) => true,
            Err(error) if error.is_not_there() => true,
            Err(error) => {
                tracing::warn!(%run, %error, "the key of a run is still a secret of the project");
                false
            }
        }
    }
}

/// How often others' keys are looked for.
const EVERY: Span = Span::minutes(5);
/// A key is there before its run is. Only one that was without its run for this long was left behind: whoever submits needs seconds.
const LEFT_AFTER: Span = Span::minutes(30);

/// Keys that another process made.
#[derive(Debug, Default)]
pub(super) struct LeftBehind {
    looked: Option<Timestamp>,
    /// Those of runs that are under way.
    used: BTreeSet<RunId>,
    /// Those of runs that are not, and since when that is so.
    since: BTreeMap<RunId, Timestamp>,
}

impl LeftBehind {
    /// Whether to look again; the answer counts as a look.
    fn is_time(&mut self, now: Timestamp) -> bool {
        let is_time = self.looked.is_none_or(|looked| now.since(looked) >= EVERY);
        if is_time {
            self.looked = Some(now);
        }
        is_time
    }

    /// Those of the keys that are there which nobody will want any more.
    fn old(&mut self, there: &BTreeSet<RunId>, wanted: &BTreeSet<RunId>, now: Timestamp) -> Vec<RunId> {
        self.since.retain(|run, _| there.contains(run) && !wanted.contains(run));
        for run in there.difference(wanted) {
            self.since.entry(*run).or_insert(now);
        }
        let old = self.since.iter().filter(|(_, since)| now.since(**since) >= LEFT_AFTER);
        old.map(|(run, _)| *run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_left_behind_only_after_it_was_long_without_its_run() {
        let at = |minutes: i64| Timestamp::from_secs(minutes * 60);
        let set = |runs: &[u64]| runs.iter().map(|run| RunId::from_number(*run)).collect::<BTreeSet<_>>();
        let mut left = LeftBehind::default();
        let mut old = |there: &[u64], wanted: &[u64], minutes| {
            left.old(&set(there), &set(wanted), at(minutes)).into_iter().collect::<BTreeSet<_>>()
        };
        // Another controller makes the key of run 2 and has not submitted it yet; run 3 is under way.
        assert_eq!(old(&[1, 2, 3], &[3], 0), set(&[]));
        assert_eq!(old(&[1, 2, 3], &[2, 3], 29), set(&[]));
        assert_eq!(old(&[1, 2, 3], &[3], 30), set(&[1]), "run 2 was under way in between");
        assert_eq!(old(&[2, 3], &[], 59), set(&[]));
        assert_eq!(old(&[2, 3], &[], 60), set(&[2]));
        assert_eq!(old(&[3], &[], 89), set(&[3]));
    }

    #[test]
    fn others_keys_are_looked_for_now_and_then() {
        let mut left = LeftBehind::default();
        let asked: Vec<bool> = [0, 60, 299, 300, 301].map(|secs| left.is_time(Timestamp::from_secs(secs))).to_vec();
        assert_eq!(asked, [true, false, false, true, false]);
    }
}
