//! Determines this node's place in a job, from the parameters or from the launcher's environment.
//!
//! | launcher | rank | nodes | address |
//! |---|---|---|---|
//! | manual, SSH | `DOCTOR_RANK` | `DOCTOR_NODES` | `DOCTOR_RENDEZVOUS` |
//! | Slurm (`srun --ntasks-per-node=1`) | `SLURM_PROCID` | `SLURM_NTASKS` | the first of `SLURM_STEP_NODELIST` |
//! | Kubernetes (Indexed Job) | `JOB_COMPLETION_INDEX` | `DOCTOR_NODES` | `DOCTOR_RENDEZVOUS` |
//!
//! Our variables take precedence. The secret is never an argument, which every user of the machine can read.

use doctor_checks::collective_params::Job;
use doctor_core::hostlist;

/// The default port of the first node.
pub(super) const PORT: u16 = 29_481;

/// A shorter secret can be guessed.
const MIN_SECRET_BYTES: usize = 16;

/// This node's place in a job.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct JobPosition {
    pub(super) rank: u32,
    pub(super) nodes: u32,
    /// `HOST:PORT`.
    pub(super) address: String,
    /// The nodes' names by rank, if they are known in advance.
    names: Vec<String>,
    pub(super) secret: Vec<u8>,
}

impl std::fmt::Debug for JobPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobPosition").field("rank", &self.rank).field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum PositionError {
    #[error("{what} is unknown; set {variables}, or --set {example}")]
    Missing { what: &'static str, variables: &'static str, example: &'static str },
    #[error("{variable} is `{value}`, which is not a valid {what}")]
    NoNumber { variable: String, value: String, what: &'static str },
    #[error("rank {rank} of {nodes} nodes: ranks are counted from 0")]
    RankTooLarge { rank: u32, nodes: u32 },
    #[error("cannot parse the node list `{list}`: {why}")]
    Names { list: String, why: String },
    #[error("cannot read the secret from {path}: {why}")]
    SecretFile { path: String, why: String },
    #[error(
        "no secret of at least {MIN_SECRET_BYTES} characters: set the same one on all nodes in DOCTOR_RENDEZVOUS_SECRET or \
         in the file that `secret_file` or DOCTOR_RENDEZVOUS_SECRET_FILE names"
    )]
    NoSecret,
}

const RANK_VARIABLES: [&str; 3] = ["DOCTOR_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];
const NODE_COUNT_VARIABLES: [&str; 2] = ["DOCTOR_NODES", "SLURM_NTASKS"];

impl JobPosition {
    /// Determines the place.
    ///
    /// # Errors
    /// If a value is missing or invalid; the error names the variables that can set it.
    pub(super) fn find(job: &Job, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, PositionError> {
        let number = |setting: Option<u32>, names: &[&str], what| match setting {
            Some(number) => Ok(Some(number)),
            None => first(names, variable)
                .map(|(name, value)| {
                    value.trim().parse().map_err(|_| PositionError::NoNumber { variable: name.to_owned(), value, what })
                })
                .transpose(),
        };
        let rank = number(job.rank, &RANK_VARIABLES, "rank")?.ok_or(PositionError::Missing {
            what: "the rank of this node",
            variables: "DOCTOR_RANK, or use srun or an Indexed Job",
            example: "rank=0",
        })?;
        let nodes = number(job.nodes, &NODE_COUNT_VARIABLES, "number of nodes")?.ok_or(PositionError::Missing {
            what: "the number of nodes",
            variables: "DOCTOR_NODES",
            example: "nodes=4",
        })?;
        if rank >= nodes {
            return Err(PositionError::RankTooLarge { rank, nodes });
        }
        let names = names(job, variable)?;
        let address = job.address.clone().or_else(|| variable("DOCTOR_RENDEZVOUS")).or_else(|| names.first().cloned());
        let address = address.ok_or(PositionError::Missing {
            what: "the address of the first node",
            variables: "DOCTOR_RENDEZVOUS",
            example: "address=node01:29481",
        })?;
        let secret = secret(job, variable)?;
        Ok(Self { rank, nodes, address: with_port(address), names, secret })
    }

    /// Formats `rank 3`, with its name if that is known.
    pub(super) fn describe_rank(&self, rank: u32) -> String {
        // With several tasks per node the list is shorter than the ranks and does not map to them.
        let name = self.names.get(rank as usize).filter(|_| self.names.len() == self.nodes as usize);
        name.map_or_else(|| format!("rank {rank}"), |name| format!("rank {rank} ({name})"))
    }
}

fn first(names: &[&str], variable: &dyn Fn(&str) -> Option<String>) -> Option<(String, String)> {
    names.iter().find_map(|name| Some(((*name).to_owned(), variable(name).filter(|value| !value.is_empty())?)))
}

fn names(job: &Job, variable: &dyn Fn(&str) -> Option<String>) -> Result<Vec<String>, PositionError> {
    let lists = ["DOCTOR_NODE_NAMES", "SLURM_STEP_NODELIST"];
    let Some(list) = job.names.clone().or_else(|| first(&lists, variable).map(|(_, list)| list)) else {
        return Ok(Vec::new());
    };
    match hostlist::parse(&list) {
        Ok(names) => Ok(names.iter().map(ToString::to_string).collect()),
        Err(error) => Err(PositionError::Names { list: list.chars().take(200).collect(), why: error.to_string() }),
    }
}

fn secret(job: &Job, variable: &dyn Fn(&str) -> Option<String>) -> Result<Vec<u8>, PositionError> {
    let file = job.secret_file.clone().or_else(|| variable("DOCTOR_RENDEZVOUS_SECRET_FILE"));
    let text = match file {
        Some(path) => match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) => return Err(PositionError::SecretFile { path, why: error.to_string() }),
        },
        None => variable("DOCTOR_RENDEZVOUS_SECRET"),
    };
    let secret = text.map(|text| text.trim().as_bytes().to_vec());
    secret.filter(|secret| secret.len() >= MIN_SECRET_BYTES).ok_or(PositionError::NoSecret)
}

/// Appends the default port if there is none: `node01`, `node01:29481`, `[fe80::1]:29481`.
fn with_port(address: String) -> String {
    let has_port = address
        .rsplit_once(':')
        .is_some_and(|(host, port)| port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')));
    match (has_port, address.contains(':') && !address.starts_with('[')) {
        (true, _) => address,
        (false, true) => format!("[{address}]:{PORT}"),
        (false, false) => format!("{address}:{PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: (&str, &str) = ("DOCTOR_RENDEZVOUS_SECRET", "0123456789abcdef");

    fn find(job: &Job, set: &[(&str, &str)]) -> Result<JobPosition, PositionError> {
        let set: Vec<_> = set.iter().copied().chain([SECRET]).collect();
        JobPosition::find(job, &|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn each_launcher_sets_rank_and_nodes() {
        let slurm = [
            ("SLURM_PROCID", "2"),
            ("SLURM_NTASKS", "3"),
            ("SLURM_STEP_NODELIST", "gpu[07-09]"),
            ("SLURM_NODEID", "2"),
        ];
        let position = find(&Job::default(), &slurm).unwrap();
        assert_eq!((position.rank, position.nodes, position.address.as_str()), (2, 3, "gpu07:29481"));
        assert_eq!(position.describe_rank(1), "rank 1 (gpu08)");
        let kubernetes =
            [("JOB_COMPLETION_INDEX", "1"), ("DOCTOR_NODES", "4"), ("DOCTOR_RENDEZVOUS", "nccl-0.nccl:31000")];
        let position = find(&Job::default(), &kubernetes).unwrap();
        assert_eq!((position.rank, position.nodes, position.address.as_str()), (1, 4, "nccl-0.nccl:31000"));
        assert_eq!(position.describe_rank(3), "rank 3");
        let settings = Job { rank: Some(0), nodes: Some(2), address: Some("10.0.0.1".to_owned()), ..Job::default() };
        let position = find(&settings, &slurm).unwrap();
        assert_eq!(
            (position.rank, position.nodes, position.address.as_str()),
            (0, 2, "10.0.0.1:29481"),
            "arguments go first"
        );
    }

    #[test]
    fn a_missing_or_invalid_value_names_the_variables_that_can_set_it() {
        let error_for = |set: &[(&str, &str)]| find(&Job::default(), set).unwrap_err().to_string();
        assert!(error_for(&[]).contains("DOCTOR_RANK") && error_for(&[]).contains("rank=0"));
        assert!(error_for(&[("DOCTOR_RANK", "0")]).contains("DOCTOR_NODES"));
        assert!(error_for(&[("DOCTOR_RANK", "0"), ("DOCTOR_NODES", "2")]).contains("DOCTOR_RENDEZVOUS"));
        assert!(error_for(&[("DOCTOR_RANK", "one")]).contains("`one`"));
        assert!(error_for(&[("DOCTOR_RANK", "2"), ("DOCTOR_NODES", "2")]).contains("counted from 0"));
        let names = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_NODELIST", "gpu[07-")];
        assert!(error_for(&names).contains("gpu[07-"));
        let short = Job { rank: Some(0), nodes: Some(2), address: Some("a".to_owned()), ..Job::default() };
        let secret = |text: &str| {
            let text = text.to_owned();
            JobPosition::find(&short, &move |name| (name == SECRET.0).then(|| text.clone()))
        };
        assert_eq!(secret("short"), Err(PositionError::NoSecret));
        assert!(!format!("{:?}", secret("0123456789abcdef").unwrap()).contains("0123"), "it is not printed");
    }

    #[test]
    fn an_address_without_a_port_gets_the_default() {
        for (given, full) in
            [("n1", "n1:29481"), ("n1:7", "n1:7"), ("fe80::1", "[fe80::1]:29481"), ("[fe80::1]:7", "[fe80::1]:7")]
        {
            assert_eq!(with_port(given.to_owned()), full);
        }
    }
}
