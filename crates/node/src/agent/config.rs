//! The agent's settings, from its command line and from a file that is reloaded when it changes.
//!
//! An invalid change keeps the previous settings. The agent runs as root on every node, so it uses settings, a policy, a profile and a
//! credential only if no user other than root (or the agent's own) could change them.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    io::{self, Read as _},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use doctor_checks::{
    Catalogue, Check, Depth,
    credential::Credential,
    document::{Schema, Versions},
    key_fingerprint::KeyFingerprint,
};
use doctor_core::{
    ids::{CheckId, NodeName, Sku},
    policy::{Policy, Rule},
    profile::Profile,
    time::Span,
    toml_text::{self, TomlError},
};
use doctor_host::trusted_file;
use serde::Deserialize;

use super::{
    exchange::{NodeCredentials, Route},
    http::{Address, BadAddress},
    machine::MachineSources,
    spool::SpoolLimits,
    tls::{TlsClient, TlsError},
    token::{Token, TokenError},
};
use crate::{
    policy::{FileError, load_policy, load_profile},
    profile::LINK_LOCAL,
};

/// Read if `--config` is not given and the file exists.
pub const DEFAULT_FILE: &str = "/etc/cluster-doctor/agent.toml";
const DEFAULT_STATE: &str = "/var/lib/cluster-doctor/agent";
const DEFAULT_CREDENTIAL: &str = "/etc/cluster-doctor/agent.key";

/// Settings as written on the command line or in the file. The command line overrides the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct AgentSettings {
    /// Address of the controller: https://HOST:PORT. [default: the credential's]
    #[arg(long, value_name = "URL")]
    pub controller: Option<String>,
    /// Certificates in PEM with which the controller's certificate is verified. It is read again when it changes.
    #[arg(long, value_name = "FILE", conflicts_with = "fingerprints")]
    pub ca_file: Option<PathBuf>,
    /// Fingerprint of the controller's public key, instead of --ca-file: sha256:DIGITS. May be repeated, for the time of a
    /// change of the key. [default: the credential's]
    #[arg(long = "fingerprint", value_name = "SHA256")]
    pub fingerprints: Vec<KeyFingerprint>,
    /// Allow a controller address with http:// on another machine: anyone on the network between reads what is sent.
    #[arg(long)]
    pub plain: bool,
    /// Credential file that `doctor agent enroll` wrote for this node. [default: /etc/cluster-doctor/agent.key]
    #[arg(long, value_name = "FILE")]
    pub credential: Option<PathBuf>,
    /// File with a token that the cluster issues for this agent, instead of a credential. It is read for each message.
    #[arg(long, value_name = "FILE", conflicts_with = "credential")]
    pub token: Option<PathBuf>,
    /// Name of this node in its cluster. Only with --token: a credential contains the name.
    #[arg(long, value_name = "NAME", env = "DOCTOR_NODE_NAME")]
    pub node: Option<NodeName>,
    /// Directory for spooled reports and counter history. [default: /var/lib/cluster-doctor/agent]
    #[arg(long, value_name = "DIR", env = "DOCTOR_NODE_STATE")]
    pub state: Option<PathBuf>,
    /// The site's policy file. [default: the built-in policy]
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Hardware profile of the machine type, as TOML. [default: by the detected type]
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// The cluster's label for the machine type, for machines whose cloud does not report it.
    #[arg(long, value_name = "NAME", env = "DOCTOR_LABEL")]
    pub label: Option<Sku>,
    /// URL of the cloud's metadata service. It is queried only if the firmware identifies a cloud.
    /// [default: http://169.254.169.254]
    #[arg(long, value_name = "URL")]
    pub metadata: Option<String>,
    /// Root of this machine's file system, for a container that has the host mounted there. [default: /]
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Path of NVIDIA's management library, if the loader does not find it by name.
    #[arg(long, value_name = "FILE", env = "DOCTOR_NVML")]
    pub nvml: Option<OsString>,
    /// Bytes of reports to spool while the controller is unreachable. [default: 67108864]
    #[arg(long, value_name = "N")]
    pub spool_bytes: Option<u64>,
    /// Number of reports to spool. [default: 10000]
    #[arg(long, value_name = "N")]
    pub spool_reports: Option<usize>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {source}", .path.display())]
    Bad { path: PathBuf, source: TomlError },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("no controller address: set --controller, or enroll the node again")]
    NoController,
    #[error("no node name: set --node or DOCTOR_NODE_NAME; in a pod, to spec.nodeName of the downward API")]
    NoNode,
    #[error("both `token` and `credential` are set: keep one")]
    TwoCredentials,
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Address(#[from] BadAddress),
    #[error(
        "reports to {0} would cross the network unencrypted: use https:// with `ca_file`, or with the fingerprint that \
         `doctor agent enroll` writes; `plain = true` allows it, here and under [agents] of the controller"
    )]
    Plain(Address),
    #[error(
        "{0} cannot be authenticated: set `fingerprints` (`doctor agent certificate` prints it on the controller) or \
         `ca_file`"
    )]
    NoTrust(Address),
    #[error("both `ca_file` and `fingerprints` are set: keep one")]
    TwoTrusts,
    #[error(
        "{0} is not encrypted, and `ca_file` or `fingerprints` is set, which nothing would be checked with: use https://, or \
         remove them"
    )]
    TrustOfPlain(Address),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{} is readable by all users and allows them to report as this node: chmod 600", .0.display())]
    WorldReadable(PathBuf),
    #[error("cannot parse the default rules of a check")]
    Rules(#[source] toml::de::Error),
}

/// The effective settings, read together.
#[derive(Debug)]
pub struct Config {
    pub route: Route,
    pub state: PathBuf,
    pub root: PathBuf,
    pub library: OsString,
    pub spool_limits: SpoolLimits,
    pub policy: Policy,
    /// The one that is set; without it, the one of the detected machine type applies.
    pub profile: Option<Profile>,
    pub machine: MachineSources,
    pub catalogue: Catalogue,
    /// Rules of the quick checks.
    rules: BTreeMap<CheckId, Vec<Rule>>,
    files: Vec<Stamp>,
}

/// Identity of a file when it was read. Content is not compared: the check every minute must cost nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    path: PathBuf,
    identity: Option<(SystemTime, u64, u64)>,
}

impl Stamp {
    fn of(path: &Path) -> Self {
        let identity = fs::metadata(path)
            .ok()
            .and_then(|metadata| Some((metadata.modified().ok()?, metadata.len(), metadata.ino())));
        Self { path: path.to_owned(), identity }
    }
}

impl Config {
    /// Reads the file, merges the command line over it, and loads policy, profile and credential.
    ///
    /// # Errors
    /// If any of the files cannot be used.
    pub fn load(cli_settings: &AgentSettings, file: Option<&Path>) -> Result<Self, ConfigError> {
        let path = file.map_or_else(|| PathBuf::from(DEFAULT_FILE), Path::to_owned);
        let mut files = vec![Stamp::of(&path)];
        let exists = file.is_some() || path.exists();
        let settings = if exists { cli_settings.clone().merge_over(read(&path)?) } else { cli_settings.clone() };
        files.extend(settings.policy.iter().chain(&settings.profile).map(|path| Stamp::of(path)));
        let ReportIdentity { node, proof, controller, fingerprints } = load_identity(&settings, &mut files)?;
        let url = settings.controller.as_ref().or(controller.as_ref()).ok_or(ConfigError::NoController)?;
        let address: Address = url.parse()?;
        let tls = load_tls(&settings, &address, &fingerprints, &mut files)?;
        let policy = load_policy(settings.policy.as_deref())?;
        let catalogue = Catalogue::with_site_checks(&policy);
        let versions = Versions {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            schema: Schema::CURRENT,
            policy: policy.version,
            queued: 0,
        };
        let defaults = SpoolLimits::default();
        Ok(Self {
            route: Route { node, credentials: proof, address, tls, versions },
            state: settings.state.unwrap_or_else(|| DEFAULT_STATE.into()),
            root: settings.root.unwrap_or_else(|| "/".into()),
            library: settings.nvml.unwrap_or_else(|| doctor_gpu::nvml::LIBRARY.into()),
            spool_limits: SpoolLimits {
                bytes: settings.spool_bytes.unwrap_or(defaults.bytes),
                reports: settings.spool_reports.unwrap_or(defaults.reports).max(1),
            },
            profile: load_profile(settings.profile.as_deref())?,
            machine: MachineSources {
                label: settings.label,
                metadata: settings.metadata.unwrap_or_else(|| LINK_LOCAL.to_owned()),
            },
            rules: rules(&catalogue, &policy)?,
            policy,
            catalogue,
            files,
        })
    }

    /// Returns the rules of one check.
    pub fn rules_of(&self, check: &CheckId) -> &[Rule] {
        self.rules.get(check).map_or(&[], Vec::as_slice)
    }

    /// Whether a file has changed since it was read.
    pub fn has_changed(&self) -> bool {
        self.files.iter().any(|file| Stamp::of(&file.path) != *file)
    }

    /// Records the files' current state after an invalid change, so that it is not reloaded until the next change.
    pub fn note_files(&mut self) {
        for file in &mut self.files {
            *file = Stamp::of(&file.path);
        }
    }

    /// Checks that start no program; a scheduler's hook runs these too.
    pub fn fast_checks(&self) -> impl Iterator<Item = CheckId> + '_ {
        let fast = |id: &CheckId| self.catalogue.get(id).is_some_and(|check| check.spec.is_fast());
        self.checks().into_iter().map(|(id, _)| id).filter(fast)
    }

    /// Checks that the agent may run, with their interval. Excludes those that occupy the node.
    pub fn checks(&self) -> Vec<(CheckId, Span)> {
        let tests = self.catalogue.tests(&self.policy).into_iter();
        tests
            .filter_map(|test| {
                let check = self.catalogue.get(&test.id)?;
                let quick = check.spec.depth == Depth::Quick && !check.spec.exclusive;
                let every = match check.spec.is_fast() {
                    true => self.policy.agents.check_every,
                    false => check.spec.every.max(self.policy.agents.check_every),
                };
                quick.then_some((test.id, every))
            })
            .collect()
    }
}

impl AgentSettings {
    /// Merges these settings over `below`.
    fn merge_over(self, below: Self) -> Self {
        // `ca_file` or `fingerprints` on the command line replaces both of the file's.
        let trusts_here = self.ca_file.is_some() || !self.fingerprints.is_empty();
        let (ca_file, fingerprints) = match trusts_here {
            true => (self.ca_file, self.fingerprints),
            false => (below.ca_file, below.fingerprints),
        };
        Self {
            controller: self.controller.or(below.controller),
            ca_file,
            fingerprints,
            plain: self.plain || below.plain,
            // `token` or `credential` on the command line replaces both of the file's.
            credential: self.credential.clone().or(below.credential.filter(|_| self.token.is_none())),
            token: self.token.or(below.token.filter(|_| self.credential.is_none())),
            node: self.node.or(below.node),
            state: self.state.or(below.state),
            policy: self.policy.or(below.policy),
            profile: self.profile.or(below.profile),
            label: self.label.or(below.label),
            metadata: self.metadata.or(below.metadata),
            root: self.root.or(below.root),
            nvml: self.nvml.or(below.nvml),
            spool_bytes: self.spool_bytes.or(below.spool_bytes),
            spool_reports: self.spool_reports.or(below.spool_reports),
        }
    }
}

fn read(path: &Path) -> Result<AgentSettings, ConfigError> {
    let text =
        trusted_file::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    toml_text::read(&text, &[]).map_err(|source| ConfigError::Bad { path: path.to_owned(), source })
}

/// Returns the rules of all quick checks.
fn rules(catalogue: &Catalogue, policy: &Policy) -> Result<BTreeMap<CheckId, Vec<Rule>>, ConfigError> {
    let rule_book = catalogue.rule_book(policy);
    let quick = catalogue.iter().filter(|check| check.spec.depth == Depth::Quick);
    let of = |check: &Check| Some((CheckId::new(check.spec.id).ok()?, rule_book.rules_of(check)));
    quick.filter_map(of).map(|(id, rules)| Ok((id, rules.map_err(ConfigError::Rules)?))).collect()
}

/// The identity to report as, its proof, and the controller's address and keys that a credential may contain.
struct ReportIdentity {
    node: NodeName,
    proof: NodeCredentials,
    controller: Option<String>,
    fingerprints: Vec<KeyFingerprint>,
}

/// Returns how the controller is authenticated, where the address is encrypted. `enrolled` are the keys of the credential,
/// which the settings override.
fn load_tls(
    settings: &AgentSettings,
    address: &Address,
    enrolled: &[KeyFingerprint],
    files: &mut Vec<Stamp>,
) -> Result<Option<TlsClient>, ConfigError> {
    if !address.is_encrypted() {
        // Those of a credential are of the address that was enrolled; an address in the settings replaces it.
        if settings.ca_file.is_some() || !settings.fingerprints.is_empty() {
            return Err(ConfigError::TrustOfPlain(address.clone()));
        }
        let allowed = settings.plain || address.is_loopback();
        return if allowed { Ok(None) } else { Err(ConfigError::Plain(address.clone())) };
    }
    let pinned = if settings.fingerprints.is_empty() { enrolled } else { &settings.fingerprints };
    let client = match &settings.ca_file {
        Some(_) if !settings.fingerprints.is_empty() => return Err(ConfigError::TwoTrusts),
        Some(path) => {
            files.push(Stamp::of(path));
            TlsClient::with_authorities(path)?
        }
        None if pinned.is_empty() => return Err(ConfigError::NoTrust(address.clone())),
        None => TlsClient::with_pinned_keys(pinned)?,
    };
    Ok(Some(client))
}

/// Reads the identity. A credential joins the watched files; a token does not, because the cluster renews it
/// constantly.
fn load_identity(settings: &AgentSettings, files: &mut Vec<Stamp>) -> Result<ReportIdentity, ConfigError> {
    if let Some(token) = &settings.token {
        if settings.credential.is_some() {
            return Err(ConfigError::TwoCredentials);
        }
        let node = settings.node.clone().ok_or(ConfigError::NoNode)?;
        // A wrong path is reported now; the content is read again for each message.
        Token::read(token)?;
        let proof = NodeCredentials::Token(token.clone());
        return Ok(ReportIdentity { node, proof, controller: None, fingerprints: Vec::new() });
    }
    let path = settings.credential.clone().unwrap_or_else(|| DEFAULT_CREDENTIAL.into());
    files.push(Stamp::of(&path));
    let Credential { node, key, controller, fingerprints } = read_credential(&path)?;
    Ok(ReportIdentity { node, proof: NodeCredentials::Key(key), controller, fingerprints })
}

fn read_credential(path: &Path) -> Result<Credential, ConfigError> {
    let read_error = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = trusted_file::open(path).map_err(read_error)?;
    if file.metadata().map_err(read_error)?.mode() & 0o007 != 0 {
        return Err(ConfigError::WorldReadable(path.to_owned()));
    }
    let mut text = String::new();
    file.take(trusted_file::MAX_TEXT_BYTES).read_to_string(&mut text).map_err(read_error)?;
    Credential::read(&text).map_err(|source| ConfigError::Bad { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::document::RunKey;
    use doctor_core::ids::NodeName;
    use std::os::unix::fs::PermissionsExt;

    struct Site(tempfile::TempDir);

    impl Site {
        fn new() -> Self {
            let site = Self(tempfile::tempdir().unwrap());
            let credential = Credential {
                node: NodeName::new("n1").unwrap(),
                key: RunKey::new([1; 32]),
                controller: Some("https://ctl:7443".to_owned()),
                fingerprints: vec![KeyFingerprint::of(b"enrolled")],
            };
            site.write("agent.key", &credential.text(), 0o600);
            site
        }

        fn write(&self, name: &str, text: &str, mode: u32) -> PathBuf {
            let path = self.0.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }

        fn load(&self, text: &str) -> Result<Config, ConfigError> {
            let file = self.write("agent.toml", text, 0o644);
            let cli_settings =
                AgentSettings { credential: Some(self.0.path().join("agent.key")), ..AgentSettings::default() };
            Config::load(&cli_settings, Some(&file))
        }
    }

    #[test]
    fn the_command_line_overrides_the_file_and_the_file_overrides_the_credential() {
        let site = Site::new();
        assert_eq!(site.load("").unwrap().route.address.to_string(), "https://ctl:7443");
        let config = site.load("controller = \"https://other:1\"\nspool_reports = 5\n").unwrap();
        assert_eq!((config.route.address.to_string().as_str(), config.spool_limits.reports), ("https://other:1", 5));
        assert!(!config.has_changed());
        site.write("agent.toml", "controller = \"https://third:1\"\n", 0o644);
        assert!(config.has_changed());
    }

    /// The kubelet writes a new directory and swaps one symlink to it; the agent's paths go through that link.
    #[test]
    fn a_change_of_a_mounted_config_map_is_detected() {
        let site = Site::new();
        let at = |name: &str| site.0.path().join(name);
        let turn = |folder: &str, text: &str| {
            fs::create_dir(at(folder)).unwrap();
            site.write(&format!("{folder}/policy.toml"), text, 0o644);
            std::os::unix::fs::symlink(folder, at("..data_tmp")).unwrap();
            fs::rename(at("..data_tmp"), at("..data")).unwrap();
        };
        turn("..1", "version = 7\n");
        std::os::unix::fs::symlink("..data/policy.toml", at("policy.toml")).unwrap();
        let text = format!("policy = {:?}\n", at("policy.toml").display());
        let config = site.load(&text).unwrap();
        assert_eq!((config.policy.version, config.has_changed()), (7, false));
        // Same length, and within the same tick of the file system's clock.
        turn("..2", "version = 8\n");
        fs::remove_dir_all(at("..1")).unwrap();
        assert!(config.has_changed());
        assert_eq!(site.load(&text).unwrap().policy.version, 8);
    }

    #[test]
    fn a_token_replaces_a_credential_and_requires_a_node_and_a_controller() {
        let site = Site::new();
        let token = site.write("token", "a.b.c", 0o644);
        let load = |text: &str| {
            let file = site.write("agent.toml", &format!("token = {:?}\n{text}", token.display()), 0o644);
            Config::load(&AgentSettings::default(), Some(&file))
        };
        assert!(matches!(load("controller = \"http://ctl:1\"\n"), Err(ConfigError::NoNode)));
        assert!(matches!(load("node = \"n1\"\n"), Err(ConfigError::NoController)));
        assert!(matches!(load("node = \"n1\"\ncredential = \"agent.key\"\n"), Err(ConfigError::TwoCredentials)));
        let config = load("node = \"n1\"\ncontroller = \"http://ctl:1\"\nplain = true\n").unwrap();
        assert_eq!(
            (config.route.node.as_str(), &config.route.credentials),
            ("n1", &NodeCredentials::Token(token.clone()))
        );
        // The cluster renews the token: that is no change of settings.
        site.write("token", "d.e.f.g", 0o644);
        assert!(!config.has_changed());
        // The command line overrides the file.
        let file = site.write("agent.toml", &format!("token = {:?}\n", token.display()), 0o644);
        let cli_settings =
            AgentSettings { credential: Some(site.0.path().join("agent.key")), ..AgentSettings::default() };
        assert!(matches!(Config::load(&cli_settings, Some(&file)).unwrap().route.credentials, NodeCredentials::Key(_)));
        fs::remove_file(&token).unwrap();
        assert!(matches!(load("node = \"n1\"\n"), Err(ConfigError::Token(_))));
    }

    #[test]
    fn files_that_others_can_read_or_write_are_rejected() {
        let site = Site::new();
        let policy = site.write("policy.toml", "", 0o666);
        let text = format!("policy = {:?}\n", policy.display());
        let refused_owner = |error: ConfigError| {
            let (ConfigError::Read { source, .. } | ConfigError::File(FileError::Read { source, .. })) = error else {
                panic!("{error}")
            };
            trusted_file::refusal(&source).expect("a refusal").owner
        };
        assert_eq!(refused_owner(site.load(&text).unwrap_err()), rustix::process::geteuid().as_raw());
        site.write("policy.toml", "", 0o644);
        site.load(&text).unwrap();
        // Only root can give a file away.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&policy, Some(12_345), None).unwrap();
            assert_eq!(refused_owner(site.load(&text).unwrap_err()), 12_345);
            std::os::unix::fs::chown(site.0.path().join("agent.key"), Some(12_345), None).unwrap();
            assert_eq!(refused_owner(site.load("").unwrap_err()), 12_345);
            std::os::unix::fs::chown(site.0.path().join("agent.key"), Some(0), None).unwrap();
        }
        let open = fs::Permissions::from_mode(0o644);
        fs::set_permissions(site.0.path().join("agent.key"), open).unwrap();
        assert!(matches!(site.load(""), Err(ConfigError::WorldReadable(_))));
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(site.0.path(), open).unwrap();
        refused_owner(site.load("").unwrap_err());
    }

    #[test]
    fn a_mistake_is_reported_with_its_position() {
        let site = Site::new();
        let error = site.load("\ncontroler = \"x\"\n").unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("controller"), "{error}");
        let error = site.load("fingerprints = [\"sha256:00\"]\n").unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("64 hexadecimal digits"), "{error}");
    }

    #[test]
    fn reports_are_encrypted_to_an_authenticated_controller_unless_a_setting_allows_otherwise() {
        let site = Site::new();
        let text = |error: ConfigError| error.to_string();
        // The credential pins a key.
        assert!(site.load("").unwrap().route.tls.is_some());
        let error = site.load("controller = \"http://ctl:7443\"\n").map(drop).map_err(text).unwrap_err();
        assert!(error.contains("http://ctl:7443") && error.contains("plain = true"), "{error}");
        for allowed in ["controller = \"http://ctl:7443\"\nplain = true\n", "controller = \"http://127.0.0.1:7443\"\n"]
        {
            assert!(site.load(allowed).unwrap().route.tls.is_none(), "{allowed}");
        }
        // The settings override the credential, and name one way to authenticate it.
        let one = KeyFingerprint::of(b"one");
        for trust in [format!("fingerprints = [\"{one}\"]\n"), "ca_file = \"/nowhere/ca.pem\"\n".to_owned()] {
            let plain = format!("controller = \"http://ctl:7443\"\nplain = true\n{trust}");
            assert!(matches!(site.load(&plain), Err(ConfigError::TrustOfPlain(_))), "{plain}");
        }
        assert!(site.load(&format!("fingerprints = [\"{one}\"]\n")).unwrap().route.tls.is_some());
        let error = site.load("ca_file = \"/nowhere/ca.pem\"\n").map(drop).map_err(text).unwrap_err();
        assert!(error.contains("/nowhere/ca.pem"), "{error}");
        let both = format!("ca_file = \"/nowhere/ca.pem\"\nfingerprints = [\"{one}\"]\n");
        assert!(matches!(site.load(&both), Err(ConfigError::TwoTrusts)));
        // A token's agent was not enrolled, so nothing is pinned.
        let token = site.write("token", "a.b.c", 0o644);
        let file = site.write("agent.toml", &format!("token = {:?}\nnode = \"n1\"\n", token.display()), 0o644);
        let cli_settings = AgentSettings { controller: Some("https://ctl:1".to_owned()), ..AgentSettings::default() };
        assert!(matches!(Config::load(&cli_settings, Some(&file)), Err(ConfigError::NoTrust(_))));
    }

    #[test]
    fn an_agent_runs_no_check_that_needs_the_whole_node() {
        let config = Site::new().load("").unwrap();
        let checks = config.checks();
        assert!(checks.iter().any(|(id, _)| id.as_str() == "kernel-log"));
        for (id, _) in checks {
            let spec = config.catalogue.get(&id).unwrap().spec;
            assert!(spec.depth == Depth::Quick && !spec.exclusive, "{id}");
        }
    }
}
