//! Parses jobs from `squeue`, in a format of our choice. Pure.
//!
//! Users name their jobs freely: with bars, blanks, line breaks, or whole lines that look like another job. Fields are therefore
//! separated by a control character, the name is the last field, and each line begins with a random token that no user can know.

use doctor_core::{hostlist, ids::NodeName, time::Timestamp};

use super::{
    nodes::gpus,
    scontrol_text::{is_null, time},
    states::{JobState, Phase},
};

/// The field separator: the ASCII unit separator.
const FIELD_SEPARATOR: char = '\u{1f}';

/// The requested fields, in this order; the name follows.
const FIELDS: [&str; 18] =
    ["%A", "%U", "%u", "%T", "%r", "%P", "%V", "%S", "%e", "%N", "%n", "%x", "%D", "%c", "%m", "%b", "%v", "%f"];
const NAME: &str = "%j";

/// Returns the argument of `squeue --format`. `token` begins each line.
pub(super) fn format(token: &str) -> String {
    let between = FIELD_SEPARATOR.to_string();
    [&[token][..], &FIELDS, &[NAME]].concat().join(&between)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) number: u64,
    pub(super) uid: Option<u32>,
    pub(super) user: String,
    /// `None`: an unknown word.
    pub(super) state: Option<JobState>,
    /// Why it is pending.
    pub(super) reason: String,
    pub(super) partitions: Vec<String>,
    pub(super) submitted: Option<Timestamp>,
    pub(super) started: Option<Timestamp>,
    pub(super) ended: Option<Timestamp>,
    pub(super) nodes: Vec<NodeName>,
    pub(super) required: Vec<NodeName>,
    pub(super) excluded: Vec<NodeName>,
    /// The number of nodes.
    pub(super) node_count: u32,
    /// Per node.
    pub(super) cpus: u64,
    pub(super) memory: u64,
    pub(super) gpus: u32,
    pub(super) reservation: Option<String>,
    pub(super) features: Option<String>,
    pub(super) name: String,
}

impl Job {
    /// Returns the phase. A job in an unknown state that has nodes counts as running on them.
    pub(super) fn phase(&self) -> Phase {
        match self.state {
            Some(state) => state.phase(),
            None if self.nodes.is_empty() => Phase::Pending,
            None => Phase::Active,
        }
    }
}

/// Parses the lines that begin with `token`. Other lines are parts of names.
pub(super) fn parse(text: &str, token: &str) -> Vec<Job> {
    let begin = format!("{token}{FIELD_SEPARATOR}");
    text.split('\n').filter_map(|line| job(line.strip_prefix(&begin)?)).collect()
}

fn job(line: &str) -> Option<Job> {
    let mut fields = line.splitn(FIELDS.len() + 1, FIELD_SEPARATOR);
    let mut next = || fields.next().map(str::trim).map(|field| if is_null(field) { "" } else { field });
    let job = Job {
        number: next()?.parse().ok()?,
        uid: next()?.parse().ok(),
        user: next()?.to_owned(),
        state: JobState::from_word(next()?),
        reason: next()?.to_owned(),
        partitions: next()?.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect(),
        submitted: time(next()?),
        started: time(next()?),
        ended: time(next()?),
        nodes: parse_nodes(next()?),
        required: parse_nodes(next()?),
        excluded: parse_nodes(next()?),
        node_count: leading_number(next()?).max(1),
        cpus: leading_number(next()?).into(),
        memory: megabytes(next()?),
        gpus: gpus(plain_gres(next()?)),
        reservation: Some(next()?.to_owned()).filter(|name| !name.is_empty()),
        features: Some(next()?.to_owned()).filter(|text| !text.is_empty()),
        name: next()?.to_owned(),
    };
    Some(job)
}

/// An unreadable list names no node: the nodes' own state shows that they are in use.
fn parse_nodes(text: &str) -> Vec<NodeName> {
    hostlist::parse(text).unwrap_or_default()
}

/// Parses the leading number, as in `2-4`.
fn leading_number(text: &str) -> u32 {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().unwrap_or_default()
}

/// Strips the prefix: `gres:gpu:8` in older versions, `gres/gpu:8` in newer ones.
fn plain_gres(text: &str) -> &str {
    text.strip_prefix("gres:").or_else(|| text.strip_prefix("gres/")).unwrap_or(text)
}

/// Parses `4000M` or `1.5T`. An amount per CPU is 0, because the number of CPUs is unknown here.
fn megabytes(text: &str) -> u64 {
    let (number, scale) = match text.char_indices().next_back() {
        Some((at, 'K')) => (&text[..at], 1.0 / 1024.0),
        Some((at, 'M')) => (&text[..at], 1.0),
        Some((at, 'G')) => (&text[..at], 1024.0),
        Some((at, 'T')) => (&text[..at], 1_048_576.0),
        Some((_, '0'..='9')) => (text, 1.0),
        _ => return 0,
    };
    let number = number.parse::<f64>().unwrap_or_default();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float-to-integer cast saturates")]
    let rounded = (number * scale) as u64;
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOKEN: &str = "k7";

    fn line(fields: [&str; 19]) -> String {
        [&[TOKEN][..], &fields].concat().join("\u{1f}")
    }

    fn running() -> [&'static str; 19] {
        [
            "12",
            "1000",
            "alice",
            "RUNNING",
            "None",
            "gpu,debug",
            "2026-11-15T22:58:02",
            "2026-11-15T22:58:03",
            "2026-11-15T23:08:03",
            "node[1-2]",
            "node1",
            "",
            "2",
            "1",
            "0",
            "gres:gpu:8",
            "(null)",
            "(null)",
            "train",
        ]
    }

    #[test]
    fn a_running_job_is_parsed() {
        let jobs = parse(&line(running()), TOKEN);
        let [job] = &jobs[..] else { panic!("{jobs:?}") };
        assert_eq!((job.number, job.uid, &*job.user, &*job.name), (12, Some(1000), "alice", "train"));
        assert_eq!((job.state, job.phase()), (Some(JobState::Running), Phase::Active));
        assert_eq!(job.nodes.len(), 2);
        assert_eq!((job.node_count, job.gpus, job.memory), (2, 8, 0));
        assert_eq!((&job.reservation, &job.features, &*job.reason), (&None, &None, ""));
        assert_eq!(job.partitions, ["gpu", "debug"]);
    }

    #[test]
    fn a_name_with_separators_unicode_and_forged_lines_is_one_job() {
        let mut fields = running();
        let forged = format!("a|b \u{1f} ü\nk6\u{1f}{}\n99\u{1f}0\u{1f}root", running().join("\u{1f}"));
        fields[18] = &forged;
        let jobs = parse(&line(fields), TOKEN);
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        assert_eq!(jobs[0].name, "a|b \u{1f} ü");
    }

    #[test]
    fn a_job_in_an_unknown_state_holds_its_nodes() {
        let mut fields = running();
        fields[3] = "TELEPORTING";
        assert_eq!(parse(&line(fields), TOKEN)[0].phase(), Phase::Active);
        fields[9] = "";
        assert_eq!(parse(&line(fields), TOKEN)[0].phase(), Phase::Pending);
    }

    #[test]
    fn amounts_are_parsed_in_both_slurm_generations() {
        for (text, amount) in [("4000M", 4000), ("1.5T", 1_572_864), ("500Mc", 0), ("0", 0), ("2048K", 2), ("x", 0)] {
            assert_eq!(megabytes(text), amount, "{text}");
        }
        assert_eq!(gpus(plain_gres("gres/gpu:h100:4")), 4);
        assert_eq!(gpus(plain_gres("gpu:2")), 2);
    }

    proptest! {
        #[test]
        fn no_job_name_can_forge_another_job(name in "\\PC{0,40}(\n\\PC{0,60}){0,3}") {
            let mut fields = running();
            fields[18] = &name;
            let jobs = parse(&line(fields), TOKEN);
            // A user who does not know the token cannot write a line with it except by chance.
            prop_assume!(!name.contains(TOKEN));
            prop_assert_eq!(jobs.len(), 1);
        }

        #[test]
        fn parsing_never_panics(text in "(k7\u{1f})?\\PC{0,300}") {
            let _ = parse(&text, TOKEN);
        }
    }
}
