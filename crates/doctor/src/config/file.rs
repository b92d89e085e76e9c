//! The service's configuration file, `doctor.toml`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use doctor_api::{
    TlsFiles,
    metrics::MetricsSettings,
    operator_api::{InvalidWebConfig, WebConfig},
};
use doctor_backend::registration::ServiceSettings;
use doctor_core::{
    time::Span,
    toml_text::{self, Limit, TomlError},
};
use doctor_notify::{
    alert::{AlertSettings, BadReceiver},
    report::ReportSettings,
    telemetry::{BadTelemetry, TelemetrySettings},
};
use doctor_store::{MigrationBackup, Store, StoreUrl, records::RetentionPolicy};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::default_text;
use crate::backends::{self, BackendChoice, Sections};

/// The configuration of the service. Paths are resolved against the directory of the file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Config {
    #[serde(serialize_with = "serialize_display")]
    pub store: StoreUrl,
    #[serde(serialize_with = "serialize_backup")]
    pub migration_backup: MigrationBackup,
    pub data: PathBuf,
    pub policy: Option<PathBuf>,
    pub profiles: Vec<PathBuf>,
    pub cycle: Span,
    pub publish: Span,
    pub lease: Span,
    pub workers: usize,
    pub retention: RetentionPolicy,
    pub agents: AgentEndpointConfig,
    pub probes: ProbesConfig,
    pub alerts: AlertSettings,
    pub metrics: MetricsSettings,
    pub reports: ReportSettings,
    pub telemetry: TelemetrySettings,
    /// `None`: the API is off.
    pub web: Option<WebConfig>,
    pub backend: BackendChoice,
}

/// The agent endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentEndpointConfig {
    /// `None`: the endpoint is off.
    pub listen: Option<SocketAddr>,
    /// The URL that agents use, if it differs from `listen`.
    pub url: Option<String>,
    /// Whether validation jobs post their results to `url`. `None`: if it is set.
    pub results: Option<bool>,
    /// The certificate and its key. `None`: the controller makes them, unless the endpoint is plain.
    pub tls: Option<TlsFiles>,
    /// Whether the endpoint speaks HTTP without TLS. `None`: only on a loopback address.
    pub plain: Option<bool>,
    /// Connections of one address at a time. `None`: [`doctor_api::CONNECTIONS_PER_ADDRESS`].
    pub per_address: Option<usize>,
}

/// The listener of the health probes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProbesConfig {
    /// `None`: there is no such listener.
    pub listen: Option<SocketAddr>,
}

impl AgentEndpointConfig {
    /// Whether the endpoint speaks HTTP without TLS.
    pub(crate) fn is_plain(&self) -> bool {
        let is_loopback = self.listen.is_some_and(|at| at.ip().is_loopback());
        self.tls.is_none() && self.plain.unwrap_or(is_loopback)
    }

    /// Whether agents on other machines send what anyone on the network between can read.
    pub(crate) fn is_unencrypted(&self) -> bool {
        self.is_plain() && self.listen.is_some_and(|at| !at.ip().is_loopback())
    }

    /// Returns the URL of the address that it listens on. `None`: it listens on all addresses, or not at all.
    pub(crate) fn listen_url(&self) -> Option<String> {
        let at = self.listen.filter(|at| !at.ip().is_unspecified())?;
        Some(format!("{}://{at}", if self.is_plain() { "http" } else { "https" }))
    }

    /// Returns the URL to which validation jobs post their results.
    pub(crate) fn results_url(&self) -> Option<String> {
        self.url.clone().filter(|_| self.results != Some(false))
    }

    /// Returns what is wrong with these settings.
    fn invalid_setting(&self) -> Option<String> {
        if self.tls.is_some() && self.plain == Some(true) {
            return Some("`agents` has both `tls` and `plain = true`: keep one".to_owned());
        }
        if self.results == Some(true) && self.url.is_none() {
            return Some(
                "`agents.results` is true, expected `agents.url`, to which jobs post their results".to_owned(),
            );
        }
        let url = self.url.as_ref()?;
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Some(format!("`agents.url` is `{url}`, expected http:// or https://, a host and a port"));
        }
        // https with a plain endpoint is in order: a proxy may decrypt.
        (self.listen.is_some() && !self.is_plain() && url.starts_with("http://")).then(|| {
            format!("`agents.url` is `{url}`, but the endpoint is encrypted: write https://, or set `plain = true`")
        })
    }
}

fn serialize_display<S: serde::Serializer>(url: &StoreUrl, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(url)
}

fn serialize_backup<S: serde::Serializer>(backup: &MigrationBackup, serializer: S) -> Result<S::Ok, S::Error> {
    match backup {
        MigrationBackup::Auto { .. } => serializer.serialize_str(BACKUP_AUTO),
        MigrationBackup::None => serializer.serialize_str(BACKUP_NONE),
        MigrationBackup::Directory(path) => path.serialize(serializer),
    }
}

/// The values of `migration_backup` that are no directory.
const BACKUP_AUTO: &str = "auto";
const BACKUP_NONE: &str = "none";

/// The file as parsed, before validation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    store: Spanned<String>,
    migration_backup: Spanned<String>,
    data: PathBuf,
    policy: Option<PathBuf>,
    profiles: Vec<PathBuf>,
    cycle: Spanned<Span>,
    publish: Spanned<Span>,
    lease: Spanned<Span>,
    workers: usize,
    retention: RetentionPolicy,
    #[serde(default)]
    probes: ProbesConfig,
    agents: Option<Spanned<AgentEndpointConfig>>,
    web: Option<Spanned<WebConfig>>,
    #[serde(default)]
    alerts: Option<Spanned<AlertSettings>>,
    #[serde(default)]
    metrics: MetricsSettings,
    #[serde(default)]
    reports: ReportSettings,
    telemetry: Option<Spanned<TelemetrySettings>>,
    #[serde(default)]
    backend: Option<Spanned<Sections>>,
}

const WORKERS: Limit = Limit { key: &["workers"], min: 1.0, max: 256.0, accepted: "1 to 256" };
const PER_ADDRESS: Limit = Limit { key: &["agents", "per_address"], min: 1.0, max: 512.0, accepted: "1 to 512" };

const MIN_INTERVAL: Span = Span::from_secs(1);

impl Config {
    /// Parses and validates the file's text. `config_dir` is the directory of the file.
    pub(crate) fn parse(text: &str, config_dir: &Path) -> Result<Self, TomlError> {
        let limits: Vec<Limit> = backends::limits().chain([WORKERS, PER_ADDRESS]).collect();
        let written: RawConfig = toml_text::read_merged(default_text(), text, &limits)?;
        written.check(text)?;
        let bad_store =
            |error: doctor_store::StoreError| TomlError::at(text, Some(written.store.span()), error.to_string());
        let store = match written.store.get_ref().parse::<StoreUrl>().map_err(bad_store)? {
            StoreUrl::Sqlite(path) => StoreUrl::Sqlite(config_dir.join(path)),
            url @ StoreUrl::Postgres(_) => url,
        };
        Store::check_url(&store).map_err(bad_store)?;
        let migration_backup = written.migration_backup(text, &store, config_dir)?;
        let data = config_dir.join(&written.data);
        let policy = written.policy.map(|path| config_dir.join(path));
        let mut alerts = written.alerts.map(Spanned::into_inner).unwrap_or_default();
        alerts.resolve(config_dir);
        let mut telemetry = written.telemetry.map(Spanned::into_inner).unwrap_or_default();
        telemetry.resolve(config_dir);
        let state = state_directory(&store);
        let service = ServiceSettings { state: &state, data: &data, policy: policy.as_deref() };
        let sections = written.backend.map(Spanned::into_inner).unwrap_or_default();
        let chosen = sections.chosen(config_dir, &service);
        let backend = chosen.unwrap_or_else(|| BackendChoice::local_machine(config_dir, &service));
        Ok(Self {
            store,
            migration_backup,
            data,
            policy,
            profiles: written.profiles.iter().map(|path| config_dir.join(path)).collect(),
            cycle: written.cycle.into_inner(),
            publish: written.publish.into_inner(),
            lease: written.lease.into_inner(),
            workers: written.workers,
            retention: written.retention,
            agents: written.agents.map_or_else(AgentEndpointConfig::default, |agents| {
                let mut agents = agents.into_inner();
                resolve_tls(&mut agents.tls, config_dir);
                agents
            }),
            probes: written.probes,
            alerts,
            metrics: written.metrics,
            reports: written.reports,
            telemetry,
            web: written.web.map(|web| {
                let mut web = web.into_inner();
                resolve_tls(&mut web.tls, config_dir);
                if let Some(secret) = web.proxy.as_mut().and_then(|proxy| proxy.secret.as_mut()) {
                    secret.resolve(config_dir);
                }
                web
            }),
            backend,
        })
    }

    /// Returns the part of this configuration that backends may use.
    pub(crate) fn service<'a>(&'a self, state: &'a Path) -> ServiceSettings<'a> {
        ServiceSettings { state, data: &self.data, policy: self.policy.as_deref() }
    }

    /// Returns a directory on a local disk for the backend's state.
    pub(crate) fn state(&self) -> PathBuf {
        state_directory(&self.store)
    }

    /// Returns the default configuration with all state below one directory.
    pub(crate) fn built_in(state: &Path) -> Result<Self, TomlError> {
        let quoted = |path: PathBuf| toml::Value::String(path.to_string_lossy().into_owned()).to_string();
        let text = format!("store = {}\ndata = {}\n", quoted(state.join("doctor.db")), quoted(state.join("data")));
        Self::parse(&text, state)
    }
}

impl RawConfig {
    fn migration_backup(&self, text: &str, store: &StoreUrl, config_dir: &Path) -> Result<MigrationBackup, TomlError> {
        match self.migration_backup.get_ref().as_str() {
            BACKUP_AUTO => Ok(MigrationBackup::Auto { postgres: state_directory(store) }),
            BACKUP_NONE => Ok(MigrationBackup::None),
            // A mistyped word would otherwise be a directory beside the file.
            path if path.contains('/') => Ok(MigrationBackup::Directory(config_dir.join(path))),
            word => {
                let message = format!(
                    "`migration_backup` is `{word}`, expected \"auto\", \"none\" or a directory such as \"./backups\""
                );
                Err(TomlError::at(text, Some(self.migration_backup.span()), message))
            }
        }
    }

    fn check(&self, text: &str) -> Result<(), TomlError> {
        for (name, value) in [("cycle", &self.cycle), ("publish", &self.publish), ("lease", &self.lease)] {
            if *value.get_ref() < MIN_INTERVAL {
                let message = format!("`{name}` is {}, expected {MIN_INTERVAL} or more", value.get_ref());
                return Err(TomlError::at(text, Some(value.span()), message));
            }
        }
        if self.lease.get_ref() <= self.cycle.get_ref() {
            let message = format!(
                "`lease` is {} and `cycle` is {}: a lease must outlast a cycle",
                self.lease.get_ref(),
                self.cycle.get_ref()
            );
            return Err(TomlError::at(text, Some(self.lease_span(text)), message));
        }
        if let Some(agents) = &self.agents
            && let Some(message) = agents.get_ref().invalid_setting()
        {
            return Err(TomlError::at(text, Some(agents.span()), message));
        }
        if let Some(web) = &self.web {
            let bad = |error: InvalidWebConfig| TomlError::at(text, Some(web.span()), error.to_string());
            web.get_ref().check().map_err(bad)?;
        }
        if let Some(alerts) = &self.alerts {
            let bad = |error: BadReceiver| TomlError::at(text, Some(alerts.span()), error.to_string());
            alerts.get_ref().check().map_err(bad)?;
        }
        if let Some(telemetry) = &self.telemetry {
            let bad = |error: BadTelemetry| TomlError::at(text, Some(telemetry.span()), error.to_string());
            telemetry.get_ref().check().map_err(bad)?;
        }
        if let Some(backend) = &self.backend {
            backend.get_ref().check(text)?;
        }
        self.check_one_cluster(text)
    }

    fn check_one_cluster(&self, text: &str) -> Result<(), TomlError> {
        match self.backend.as_ref().filter(|backend| backend.get_ref().count() > 1) {
            Some(backend) => {
                let names: Vec<String> = Sections::NAMES.iter().map(|name| format!("[backend.{name}]")).collect();
                let message = format!("one service serves one cluster: keep one of {}", names.join(", "));
                Err(TomlError::at(text, Some(backend.span()), message))
            }
            None => Ok(()),
        }
    }

    /// Returns the position of `lease` if the site's file sets it, otherwise that of `cycle`: a default has no position
    /// there.
    fn lease_span(&self, text: &str) -> std::ops::Range<usize> {
        let here = |value: &Spanned<Span>| {
            text.get(value.span())
                .is_some_and(|quoted| quoted.trim_matches(['"', '\'']).parse() == Ok(*value.get_ref()))
        };
        if here(&self.lease) { self.lease.span() } else { self.cycle.span() }
    }
}

fn resolve_tls(tls: &mut Option<TlsFiles>, config_dir: &Path) {
    if let Some(tls) = tls {
        tls.certificate = config_dir.join(&tls.certificate);
        tls.key = config_dir.join(&tls.key);
    }
}

/// Returns the directory of the SQLite file, or /var/lib/cluster-doctor for PostgreSQL.
fn state_directory(store: &StoreUrl) -> PathBuf {
    match store {
        // The parent of a name alone is the empty path, which cannot be opened.
        StoreUrl::Sqlite(path) => {
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
        }
        StoreUrl::Postgres(_) => PathBuf::from("/var/lib/cluster-doctor"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_backend_dstack::{DstackConfig, Task};
    use doctor_backend_kubernetes::KubernetesConfig;
    use doctor_backend_slurm::{SlurmConfig, Submission};
    use doctor_backend_ssh::SshConfig;

    fn read(text: &str) -> Result<Config, TomlError> {
        Config::parse(text, Path::new("/etc/doctor"))
    }

    #[test]
    fn the_compiled_in_file_is_the_default_and_paths_are_relative_to_the_file() {
        let config = read("").unwrap();
        assert_eq!(config.cycle, Span::from_secs(30));
        assert!(matches!(config.backend, BackendChoice::Local(_)));
        let config = read("store = \"x.db\"\npolicy = \"p.toml\"\nprofiles = [\"/a.toml\", \"b.toml\"]\n").unwrap();
        assert_eq!(config.store, StoreUrl::Sqlite("/etc/doctor/x.db".into()));
        assert_eq!(config.policy, Some("/etc/doctor/p.toml".into()));
        assert_eq!(config.profiles, [PathBuf::from("/a.toml"), "/etc/doctor/b.toml".into()]);
        let BackendChoice::Local(local) = config.backend else { panic!("local is the default") };
        assert_eq!((local.state, local.policy), ("/etc/doctor/local".into(), Some("/etc/doctor/p.toml".into())));
    }

    #[test]
    fn the_backup_before_a_migration_is_beside_the_store_in_a_directory_or_skipped() {
        let read = |text: &str| read(text).map(|config| config.migration_backup);
        let auto = |folder: &str| MigrationBackup::Auto { postgres: folder.into() };
        assert_eq!(read("store = \"x.db\"").unwrap(), auto("/etc/doctor"));
        let postgres = "store = \"postgres://doctor@db.example/doctor\"\n";
        assert_eq!(read(postgres).unwrap(), auto("/var/lib/cluster-doctor"));
        assert_eq!(read("migration_backup = \"none\"").unwrap(), MigrationBackup::None);
        let named = read("migration_backup = \"./kept\"").unwrap();
        assert_eq!(named, MigrationBackup::Directory("/etc/doctor/./kept".into()));
        let error = read("migration_backup = \"non\"").unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("`non`") && error.contains("\"auto\", \"none\""), "{error}");
    }

    #[test]
    fn every_commented_setting_of_the_default_file_is_accepted() {
        let commented = default_text().lines().filter_map(|line| line.strip_prefix("# "));
        let settings: Vec<&str> = commented
            .filter(|line| line.starts_with('[') || line.contains(" = "))
            .filter(|line| !line.contains("Durations"))
            .collect();
        // Lines after a `[backend` line belong to that section. A file may have only one such section.
        let begins = |line: &&str| line.starts_with("[backend");
        let first = settings.iter().position(begins).unwrap();
        let (service, clusters) = settings.split_at(first);
        let sections: Vec<&[&str]> = clusters.chunk_by(|_, next| !begins(next)).collect();
        assert!(service.len() >= 5 && sections.len() == 6, "{service:?} {sections:?}");
        for (section, is_it) in sections.iter().zip([
            (|choice| matches!(choice, BackendChoice::Local(_))) as fn(&BackendChoice) -> bool,
            |choice| matches!(choice, BackendChoice::Kubernetes(_)),
            |choice| matches!(choice, BackendChoice::Slurm(_)),
            |choice| matches!(choice, BackendChoice::Ssh(_)),
            |choice| matches!(choice, BackendChoice::Dstack(_)),
            |choice| matches!(choice, BackendChoice::Sim(_)),
        ]) {
            assert!(section.len() > 1, "{section:?}");
            let config = read(&[service, section].concat().join("\n")).unwrap();
            assert!(is_it(&config.backend), "{section:?}");
        }
        // Commented settings must equal the defaults.
        let kubernetes = read(&sections[1].join("\n")).unwrap().backend;
        let BackendChoice::Kubernetes(written) = kubernetes else { panic!("{kubernetes:?}") };
        let named = KubernetesConfig {
            kubeconfig: written.kubeconfig.clone(),
            context: written.context.clone(),
            node_selector: written.node_selector.clone(),
            service_account: written.service_account.clone(),
            policy_map: written.policy_map.clone(),
            template: written.template.clone(),
            ..KubernetesConfig::default()
        };
        assert_eq!(*written, named);
        let slurm = read(&sections[2].join("\n")).unwrap().backend;
        let BackendChoice::Slurm(written) = slurm else { panic!("{slurm:?}") };
        let plain = SlurmConfig::default();
        let named = SlurmConfig {
            programs: written.programs.clone(),
            slurm_conf: written.slurm_conf.clone(),
            rest: written.rest.clone(),
            partitions: written.partitions.clone(),
            skus: written.skus.clone(),
            share: written.share.clone(),
            replace: written.replace.clone(),
            validated_feature: written.validated_feature.clone(),
            job: Submission {
                partition: written.job.partition.clone(),
                account: written.job.account.clone(),
                qos: written.job.qos.clone(),
                ..plain.job.clone()
            },
            ..plain
        };
        assert_eq!(*written, named);
        let ssh = read(&sections[3].join("\n")).unwrap().backend;
        let BackendChoice::Ssh(written) = ssh else { panic!("{ssh:?}") };
        let named = SshConfig {
            hostfile: Some("/etc/doctor/hostfile".into()),
            sku: written.sku.clone(),
            ssh_config: written.ssh_config.clone(),
            known_hosts: written.known_hosts.clone(),
            as_root: written.as_root.clone(),
            doctor_node: written.doctor_node.clone(),
            share: written.share.clone(),
            locks: written.locks.clone(),
            motd: written.motd.clone(),
            cordon: written.cordon.clone(),
            ..SshConfig::default()
        };
        assert_eq!(*written, named);
        let dstack = read(&sections[4].join("\n")).unwrap().backend;
        let BackendChoice::Dstack(written) = dstack else { panic!("{dstack:?}") };
        let plain = DstackConfig::default();
        let named = DstackConfig {
            token_file: Some("/etc/doctor/token".into()),
            ca_file: Some("/etc/doctor/ca.pem".into()),
            fleets: written.fleets.clone(),
            skus: written.skus.clone(),
            ssh: written.ssh.clone(),
            task: Task {
                state: written.task.state.clone(),
                volumes: written.task.volumes.clone(),
                ..plain.task.clone()
            },
            ..plain
        };
        assert_eq!(*written, named);
    }

    #[test]
    fn a_mistake_is_shown_with_line_column_and_what_is_accepted() {
        for (text, line, part) in [
            ("cycles = \"5m\"\n", 1, "expected one of `store`"),
            ("\ncycle = \"5 minuets\"\n", 2, "such as \"90s\""),
            ("cycle = 30\n", 1, "such as \"90s\""),
            ("cycle = \"0s\"\n", 1, "1s or more"),
            ("# here\ncycle = \"2m\"\n", 2, "a lease must outlast a cycle"),
            ("lease = \"10s\"\n", 1, "a lease must outlast a cycle"),
            ("workers = -1\n", 1, "expected 1 to 256"),
            ("store = \"mysql://x\"\n", 1, "postgres://USER@HOST/DATABASE"),
            ("[backend.locla]\n", 1, "expected one of `local`, `kubernetes`, `slurm`, `ssh`, `dstack`, `sim`"),
            ("[backend.kubernetes]\nshare = { claim = \"a\", host-path = \"/b\" }\n", 2, "share"),
            ("[backend.kubernetes]\nnamespce = \"x\"\n", 2, "namespace"),
            ("\n[backend.slurm]\nprefix = \"x\"\n", 2, "ends in a colon"),
            ("[backend.slurm]\nprefiks = \"x\"\n", 2, "prefix"),
            ("[backend.slurm]\n[backend.slurm.job]\nnise = 1\n", 3, "nice"),
            ("\n[backend.ssh]\nparallel = 1\n", 2, "exactly one of `hostfile` and `hosts`"),
            ("[backend.ssh]\nhosts = \"n[1-\"\n", 1, "`hosts`: line 1"),
            ("[backend.ssh]\nhostfiles = \"x\"\n", 2, "hostfile"),
            ("\n[backend.dstack]\nurl = \"x\"\n", 2, "such as https://dstack.example.com"),
            ("[backend.dstack]\n[backend.dstack.task]\nimages = \"x\"\n", 3, "image"),
            ("[backend.local]\nmax_load_per_core = -0.5\n", 2, "0 or more"),
            ("[backend.local]\n[backend.sim]\nsocket = \"s\"\n", 1, "one service serves one cluster"),
            ("[backend.sim]\n", 1, "missing field `socket`"),
            ("[retention]\nlogs = \"-3d\"\n", 2, "such as \"90s\""),
            ("[agents]\nlisten = \"10.0.0.5:1\"\nurl = \"http://ctl:1\"\n", 1, "write https://, or set `plain = true`"),
            ("[agents]\nplain = true\ntls = { certificate = \"a\", key = \"b\" }\n", 1, "keep one"),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.line(), Some(line), "{text}: {error}");
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }
}
