//! Errors that end a command, each with an exit code and, where possible, a hint.

use std::{error::Error, io, path::PathBuf};

use doctor_api::{ListenError, operator_api::ApiServerError, self_made_certificate::CertificateError};
use doctor_backend::{BackendError, Effect};
use doctor_core::{near, toml_text::TomlError};
use doctor_engine::{
    cycle::CycleError, operator_commands::CommandError, share::ShareError, support_bundle::BundleError,
};
use doctor_fleet::azure::AzureError;
use doctor_notify::report::ReportError;
use doctor_store::{LeaseError, StoreError};

use crate::{
    config::ConfigError,
    connection::{ContextsError, ServerError},
    deploy::{DeployError, SettingError},
    exit::Exit,
};

/// The most characters of a list of names that is printed beside a suggestion.
const SHORT_LIST: usize = 120;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot open the store {store}")]
    StoreOpen { store: String, source: StoreError },
    #[error("there is no store at {0}")]
    NoStore(String),
    #[error("the cluster query failed")]
    Backend(#[from] BackendError),
    #[error("cannot {0}")]
    OpenCluster(BackendError),
    /// Why the service would not start.
    #[error("{} problems", .0.len())]
    Several(Vec<Failure>),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(transparent)]
    SupportBundle(#[from] BundleError),
    #[error(transparent)]
    AgentListener(#[from] ListenError),
    #[error(transparent)]
    Web(#[from] ApiServerError),
    #[error("another controller leads: {by} until {until}")]
    NotLeader { by: String, until: doctor_core::time::Timestamp },
    /// A newer program has migrated the store of this controller.
    #[error(
        "the store has schema {found}, this program knows up to {known}; a newer controller has taken over{}",
        by.as_deref().map(|version| format!(" (doctor {version})")).unwrap_or_default()
    )]
    Superseded { found: i64, known: i64, by: Option<String> },
    #[error("{operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("writing to standard output")]
    Output(#[source] io::Error),
    #[error("no {what} `{name}`")]
    Unknown { what: &'static str, name: String, known: String },
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("{}, {error}", path.display())]
    Cluster { path: PathBuf, error: TomlError },
    #[error(transparent)]
    Azure(#[from] AzureError),
    #[error("{0}")]
    Usage(String),
    #[error("nothing was changed")]
    NotConfirmed,
    /// More nodes than the circuit breaker would allow, and their number was not given, or is wrong.
    #[error("nothing was changed: {limit}")]
    NumberNotConfirmed { limit: String, nodes: usize },
    #[error("refused: {why}")]
    Refused { why: String, instead: String },
    #[error(transparent)]
    Contexts(#[from] ContextsError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("{0}")]
    Unreachable(String),
    /// A component failed; the text names it and the cause.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Contexts(ContextsError::Unknown { .. } | ContextsError::Contradiction(_)) => Exit::Usage,
            Self::Several(failures) => {
                let mut exits = failures.iter().map(Self::exit);
                let first = exits.next().unwrap_or(Exit::ProblemsFound);
                // An invalid setting has to be changed, whatever else is unreachable at the moment.
                if exits.any(|exit| exit == Exit::Configuration) { Exit::Configuration } else { first }
            }
            Self::OpenCluster(error) if error.effect == Effect::NotAppliedPermanent => Exit::Configuration,
            Self::AgentListener(ListenError::Store(error)) | Self::Web(ApiServerError::Store(error)) => {
                store_exit(error)
            }
            Self::AgentListener(_) => Exit::Configuration,
            Self::Web(error) if !matches!(error, ApiServerError::Start(_)) => Exit::Configuration,
            Self::Config(_) | Self::Contexts(_) | Self::Cluster { .. } => Exit::Configuration,
            Self::Azure(error) if error.is_connectivity() => Exit::Unreachable,
            Self::Azure(_) => Exit::ProblemsFound,
            Self::Store(error) | Self::StoreOpen { source: error, .. } => store_exit(error),
            Self::Unknown { .. } | Self::Setting(_) | Self::Usage(_) => Exit::Usage,
            Self::Other(_) | Self::Refused { .. } => Exit::ProblemsFound,
            Self::Server(error) => error.exit(),
            Self::Unreachable(_)
            | Self::NoStore(_)
            | Self::Backend(_)
            | Self::OpenCluster(_)
            | Self::Share(_)
            | Self::SupportBundle(_)
            | Self::Web(_)
            | Self::File { .. }
            | Self::Output(_) => Exit::Unreachable,
            Self::NotLeader { .. } => Exit::NotLeader,
            Self::Superseded { .. } => Exit::Superseded,
            Self::NotConfirmed | Self::NumberNotConfirmed { .. } => Exit::NotConfirmed,
        }
    }

    /// Returns what the operator can do, if the message does not say it already.
    pub(crate) fn hint(&self) -> Option<String> {
        if let Self::Store(error) | Self::StoreOpen { source: error, .. } = self
            && let Some(hint) = tls_hint(error)
        {
            return Some(hint.to_owned());
        }
        Some(match self {
            Self::NoStore(_) => {
                "run `doctor run` or `doctor serve` first, or choose another store with --store or --config".to_owned()
            }
            Self::NotLeader { .. } => "`doctor status` shows it; stop it, or wait until its lease expires".to_owned(),
            Self::Superseded { .. } => {
                "start the newer version here too, or stop it and restore the backup of the older schema \
                 (docs/guide/operations.md)"
                    .to_owned()
            }
            Self::Unknown { name, known, .. } => {
                let near = near::near_in_list(name, known);
                let all = format!("known: {known}");
                match near::question(&near) {
                    // A short list helps beside a suggestion, unless it is the suggestion.
                    Some(question) if known.len() <= SHORT_LIST && near.join(", ") != *known => {
                        format!("{question} {all}")
                    }
                    Some(question) => question,
                    None => all,
                }
            }
            Self::NotConfirmed => "add --yes to confirm".to_owned(),
            Self::NumberNotConfirmed { nodes, .. } => {
                format!("if all {nodes} nodes are meant, add `--yes --confirm-nodes {nodes}`")
            }
            Self::Refused { instead, .. } => format!("accepted: {instead}"),
            Self::Cluster { .. } => "`doctor fleet provision --example` prints a commented file".to_owned(),
            Self::Config(_) => {
                "`doctor config check` reads all files; `doctor config init` writes commented defaults".to_owned()
            }
            Self::Store(error) | Self::StoreOpen { source: error, .. } if is_full(error) => {
                "free disk space for the store; no data was lost".to_owned()
            }
            Self::Store(error) | Self::StoreOpen { source: error, .. } if is_read_only(error) => {
                "give this user permission for the store file, for the files FILE-wal and FILE-shm beside it and, where a \
                 command changes something, for their directory"
                    .to_owned()
            }
            Self::StoreOpen { source: StoreError::Postgres { .. }, .. } => {
                "check that the database is running and that URL, user and password are correct".to_owned()
            }
            Self::Server(error) => return error.hint(),
            Self::Contexts(ContextsError::Unknown { known, .. }) => format!("known: {known}"),
            Self::Backend(error) | Self::OpenCluster(error) => match error.effect {
                Effect::NotAppliedPermanent => return None,
                _ => "retry; no node is classified while the cluster does not answer".to_owned(),
            },
            _ => return None,
        })
    }

    /// Returns the failures of which this one consists: itself, or several.
    pub(crate) fn parts(&self) -> &[Self] {
        match self {
            Self::Several(failures) => failures,
            one => std::slice::from_ref(one),
        }
    }

    /// Returns what the program prints on standard error: each message with its causes, followed by its hint.
    pub(crate) fn report(&self) -> String {
        let line = |failure: &Self| {
            let hint = failure.hint().map_or_else(String::new, |hint| format!("hint: {hint}\n"));
            format!("doctor: {}\n{hint}", failure.chain())
        };
        self.parts().iter().map(line).collect()
    }

    /// Returns the message followed by its chain of causes, separated by colons.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let next = error.to_string();
            // A transparent error repeats the text of its source.
            if !text.ends_with(&next) {
                text = format!("{text}: {next}");
            }
            cause = error.source();
        }
        text
    }
}

const fn store_exit(error: &StoreError) -> Exit {
    match error {
        StoreError::Damaged { .. }
        | StoreError::NewerSchema { .. }
        | StoreError::OldSchema { .. }
        | StoreError::NotMigrated { .. } => Exit::Damaged,
        StoreError::NetworkFileSystem { .. } | StoreError::Tls { .. } => Exit::Configuration,
        StoreError::BadUrl { .. } => Exit::Usage,
        StoreError::Refused { .. } | StoreError::StateChanged { .. } | StoreError::ResultWaits { .. } => {
            Exit::ProblemsFound
        }
        _ => Exit::Unreachable,
    }
}

fn any_message_contains(error: &StoreError, phrases: &[&str]) -> bool {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        let text = error.to_string().to_lowercase();
        if phrases.iter().any(|phrase| text.contains(phrase)) {
            return true;
        }
        cause = error.source();
    }
    false
}

fn is_full(error: &StoreError) -> bool {
    any_message_contains(error, &["disk is full", "no space left", "disk full"])
}

fn is_read_only(error: &StoreError) -> bool {
    any_message_contains(error, &["readonly database", "read-only", "permission denied", "unable to open"])
}

/// Returns what helps if PostgreSQL and the store's URL do not agree on TLS.
fn tls_hint(error: &StoreError) -> Option<&'static str> {
    if any_message_contains(error, &["no encryption"]) {
        Some(
            "the server requires TLS: add `?sslmode=verify-full&sslrootcert=FILE` to the store's URL, with its authority's certificate",
        )
    } else if any_message_contains(error, &["server does not support tls"]) {
        Some("a server on another machine must offer TLS, unless the store's URL has `sslmode=disable`")
    } else if any_message_contains(error, &["tls handshake", "invalid peer certificate"]) {
        Some(
            "`sslmode` and `sslrootcert` in the store's URL say which certificate is trusted: docs/guide/configuration.md",
        )
    } else {
        None
    }
}

impl From<CycleError> for Failure {
    fn from(error: CycleError) -> Self {
        match error {
            CycleError::NotLeader { by, until } => Self::NotLeader { by, until },
            CycleError::Store(StoreError::NewerSchema { found, known, by }) => Self::Superseded { found, known, by },
            CycleError::Store(error) => Self::Store(error),
        }
    }
}

impl From<DeployError> for Failure {
    fn from(error: DeployError) -> Self {
        match error {
            DeployError::Setting(error) => Self::Setting(error),
            DeployError::Usage(text) => Self::Usage(text),
            DeployError::File { operation, path, source } => Self::File { operation, path, source },
            DeployError::Other(text) => Self::Other(text),
        }
    }
}

impl From<ReportError> for Failure {
    fn from(error: ReportError) -> Self {
        match error {
            ReportError::Store(error) => Self::Store(error),
            ReportError::File { operation, path, source } => Self::File { operation, path, source },
            ReportError::Share(error) => Self::Share(error),
            ReportError::Json(error) => Self::Other(format!("writing the report as JSON: {error}")),
        }
    }
}

impl From<CertificateError> for Failure {
    fn from(error: CertificateError) -> Self {
        match error {
            CertificateError::File { operation, path, source } => Self::File { operation, path, source },
            CertificateError::NotPrepared(_) | CertificateError::AlreadyPrepared(_) => Self::Usage(error.to_string()),
            CertificateError::Make(_) | CertificateError::Unreadable { .. } => {
                let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
                Self::Other(format!("{error}{cause}"))
            }
        }
    }
}

impl From<CommandError> for Failure {
    fn from(error: CommandError) -> Self {
        match error {
            CommandError::Unknown { what, name, known } => Self::Unknown { what, name, known },
            CommandError::Usage(text) => Self::Usage(text),
            CommandError::Refused { why, instead } => Self::Refused { why, instead },
        }
    }
}

impl From<LeaseError> for Failure {
    fn from(error: LeaseError) -> Self {
        match error {
            LeaseError::Held { by, until } => Self::NotLeader { by, until },
            LeaseError::Store(error) => Self::Store(error),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;
