//! The service's file: `doctor.toml`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use doctor_api::{
    api::{BadWebConfig, WebConfig},
    metrics::MetricsSettings,
};
use doctor_backend::local::LocalConfig;
use doctor_backend_dstack::DstackConfig;
use doctor_backend_kubernetes::KubernetesConfig;
use doctor_backend_slurm::SlurmConfig;
use doctor_backend_ssh::SshConfig;
use doctor_core::{
    ids::{NodeName, Sku},
    time::Span,
    toml_text::{self, BadText, Limit},
};
use doctor_notify::{
    alert::{AlertSettings, BadReceiver},
    telemetry::{BadTelemetry, TelemetrySettings},
};
use doctor_store::{StoreUrl, records::RetentionPolicy};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::DEFAULT_TEXT;
use crate::report::ReportSettings;

/// The configuration of the service, with every path made absolute or relative to where the program stands.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Config {
    #[serde(serialize_with = "as_text")]
    pub store: StoreUrl,
    pub data: PathBuf,
    pub policy: Option<PathBuf>,
    pub profiles: Vec<PathBuf>,
    pub cycle: Span,
    pub publish: Span,
    pub lease: Span,
    pub workers: usize,
    pub retention: RetentionPolicy,
    pub agents: Agents,
    pub alerts: AlertSettings,
    pub metrics: MetricsSettings,
    pub reports: ReportSettings,
    pub telemetry: TelemetrySettings,
    /// Without it, nobody listens.
    pub web: Option<WebConfig>,
    pub backend: BackendChoice,
}

/// The door for nodes' agents.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Agents {
    /// Without it, nobody listens.
    pub listen: Option<SocketAddr>,
    /// What agents are told to call, where that is not `listen`.
    pub url: Option<String>,
}

/// The one cluster this service is for.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BackendChoice {
    Local(LocalConfig),
    Kubernetes(Box<KubernetesConfig>),
    Slurm(Box<SlurmConfig>),
    Ssh(Box<SshConfig>),
    Dstack(Box<DstackConfig>),
    Sim(SimConfig),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct SimConfig {
    pub socket: PathBuf,
}

fn as_text<S: serde::Serializer>(url: &StoreUrl, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(url)
}

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    store: Spanned<String>,
    data: PathBuf,
    policy: Option<PathBuf>,
    profiles: Vec<PathBuf>,
    cycle: Spanned<Span>,
    publish: Spanned<Span>,
    lease: Spanned<Span>,
    workers: usize,
    retention: RetentionPolicy,
    #[serde(default)]
    agents: Agents,
    web: Option<Spanned<WebConfig>>,
    #[serde(default)]
    alerts: Option<Spanned<AlertSettings>>,
    #[serde(default)]
    metrics: MetricsSettings,
    #[serde(default)]
    reports: ReportSettings,
    telemetry: Option<Spanned<TelemetrySettings>>,
    #[serde(default)]
    backend: Option<Spanned<WrittenBackend>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenBackend {
    local: Option<WrittenLocal>,
    kubernetes: Option<Box<KubernetesConfig>>,
    slurm: Option<Box<Spanned<SlurmConfig>>>,
    ssh: Option<Box<Spanned<SshConfig>>>,
    dstack: Option<Box<Spanned<DstackConfig>>>,
    sim: Option<WrittenSim>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenLocal {
    node: Option<NodeName>,
    sku: Option<Sku>,
    max_load_per_core: Option<f64>,
    busy_file: Option<PathBuf>,
    load_file: Option<PathBuf>,
    doctor_node: Option<PathBuf>,
    state: Option<PathBuf>,
    grace: Option<Span>,
    start_limit: Option<Span>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSim {
    socket: PathBuf,
}

const LIMITS: [Limit; 2] = [
    Limit { key: &["workers"], least: 1.0, most: 256.0, accepted: "1 to 256" },
    Limit {
        key: &["backend", "local", "max_load_per_core"],
        least: 0.0,
        most: 1000.0,
        accepted: "a load per core, 0 or more",
    },
];

const SHORTEST: Span = Span::from_secs(1);

impl Config {
    /// Reads the file's text; `beside` is the directory it is in.
    pub(crate) fn read(text: &str, beside: &Path) -> Result<Self, BadText> {
        let written: Written = toml_text::read_over(DEFAULT_TEXT, text, &LIMITS)?;
        written.check(text)?;
        let bad_store =
            |error: doctor_store::StoreError| BadText::at(text, Some(written.store.span()), error.to_string());
        let store = match written.store.get_ref().parse::<StoreUrl>().map_err(bad_store)? {
            StoreUrl::Sqlite(path) => StoreUrl::Sqlite(beside.join(path)),
            url @ StoreUrl::Postgres(_) => url,
        };
        let data = beside.join(&written.data);
        let policy = written.policy.map(|path| beside.join(path));
        let mut alerts = written.alerts.map(Spanned::into_inner).unwrap_or_default();
        alerts.resolve(beside);
        let mut telemetry = written.telemetry.map(Spanned::into_inner).unwrap_or_default();
        telemetry.resolve(beside);
        let backend = match written.backend.map(Spanned::into_inner) {
            Some(WrittenBackend { sim: Some(sim), .. }) => {
                BackendChoice::Sim(SimConfig { socket: beside.join(sim.socket) })
            }
            Some(WrittenBackend { kubernetes: Some(mut kubernetes), .. }) => {
                kubernetes.kubeconfig = kubernetes.kubeconfig.map(|path| beside.join(path));
                kubernetes.template = kubernetes.template.map(|path| beside.join(path));
                BackendChoice::Kubernetes(kubernetes)
            }
            Some(WrittenBackend { slurm: Some(slurm), .. }) => {
                let mut slurm = slurm.into_inner();
                slurm.slurm_conf = slurm.slurm_conf.map(|path| beside.join(path));
                slurm.programs = slurm.programs.map(|path| beside.join(path));
                if let Some(file) = slurm.rest.as_mut().and_then(|rest| rest.token_file.as_mut()) {
                    *file = beside.join(&*file);
                }
                BackendChoice::Slurm(Box::new(slurm))
            }
            Some(WrittenBackend { ssh: Some(ssh), .. }) => {
                let mut ssh = ssh.into_inner();
                let files = [&mut ssh.hostfile, &mut ssh.ssh_config, &mut ssh.known_hosts, &mut ssh.doctor_node];
                files.into_iter().flatten().for_each(|path| *path = beside.join(&*path));
                ssh.state = beside.join(ssh.state);
                BackendChoice::Ssh(Box::new(ssh))
            }
            Some(WrittenBackend { dstack: Some(dstack), .. }) => {
                let mut dstack = dstack.into_inner();
                dstack.beside(beside);
                BackendChoice::Dstack(Box::new(dstack))
            }
            other => {
                let local = other.and_then(|backend| backend.local).unwrap_or_default();
                BackendChoice::Local(local.resolve(beside, &store, &data, policy.as_deref()))
            }
        };
        Ok(Self {
            store,
            data,
            policy,
            profiles: written.profiles.iter().map(|path| beside.join(path)).collect(),
            cycle: written.cycle.into_inner(),
            publish: written.publish.into_inner(),
            lease: written.lease.into_inner(),
            workers: written.workers,
            retention: written.retention,
            agents: written.agents,
            alerts,
            metrics: written.metrics,
            reports: written.reports,
            telemetry,
            web: written.web.map(|web| {
                let mut web = web.into_inner();
                if let Some(tls) = &mut web.tls {
                    tls.certificate = beside.join(&tls.certificate);
                    tls.key = beside.join(&tls.key);
                }
                web
            }),
            backend,
        })
    }

    /// The defaults with everything kept below one directory.
    pub(crate) fn built_in(state: &Path) -> Result<Self, BadText> {
        let quoted = |path: PathBuf| toml::Value::String(path.to_string_lossy().into_owned()).to_string();
        let text = format!("store = {}\ndata = {}\n", quoted(state.join("doctor.db")), quoted(state.join("data")));
        Self::read(&text, state)
    }
}

impl Written {
    fn check(&self, text: &str) -> Result<(), BadText> {
        for (name, value) in [("cycle", &self.cycle), ("publish", &self.publish), ("lease", &self.lease)] {
            if *value.get_ref() < SHORTEST {
                let message = format!("`{name}` is {}, expected {SHORTEST} or more", value.get_ref());
                return Err(BadText::at(text, Some(value.span()), message));
            }
        }
        if self.lease.get_ref() <= self.cycle.get_ref() {
            let message = format!(
                "`lease` is {} and `cycle` is {}: a lease must outlast a cycle",
                self.lease.get_ref(),
                self.cycle.get_ref()
            );
            return Err(BadText::at(text, Some(self.place_of_lease(text)), message));
        }
        if let Some(web) = &self.web {
            let bad = |error: BadWebConfig| BadText::at(text, Some(web.span()), error.to_string());
            web.get_ref().check().map_err(bad)?;
        }
        if let Some(slurm) = self.backend.as_ref().and_then(|backend| backend.get_ref().slurm.as_ref()) {
            let bad =
                |error: doctor_backend_slurm::BadSettings| BadText::at(text, Some(slurm.span()), error.to_string());
            slurm.get_ref().check().map_err(bad)?;
        }
        if let Some(ssh) = self.backend.as_ref().and_then(|backend| backend.get_ref().ssh.as_ref()) {
            let bad = |error: doctor_backend_ssh::BadSettings| BadText::at(text, Some(ssh.span()), error.to_string());
            ssh.get_ref().check().map_err(bad)?;
        }
        if let Some(alerts) = &self.alerts {
            let bad = |error: BadReceiver| BadText::at(text, Some(alerts.span()), error.to_string());
            alerts.get_ref().check().map_err(bad)?;
        }
        if let Some(telemetry) = &self.telemetry {
            let bad = |error: BadTelemetry| BadText::at(text, Some(telemetry.span()), error.to_string());
            telemetry.get_ref().check().map_err(bad)?;
        }
        if let Some(dstack) = self.backend.as_ref().and_then(|backend| backend.get_ref().dstack.as_ref()) {
            let bad =
                |error: doctor_backend_dstack::BadSettings| BadText::at(text, Some(dstack.span()), error.to_string());
            dstack.get_ref().check().map_err(bad)?;
        }
        self.check_one_cluster(text)
    }

    fn check_one_cluster(&self, text: &str) -> Result<(), BadText> {
        let both = self.backend.as_ref().filter(|backend| {
            let backend = backend.get_ref();
            let chosen = [
                backend.local.is_some(),
                backend.kubernetes.is_some(),
                backend.slurm.is_some(),
                backend.ssh.is_some(),
                backend.dstack.is_some(),
                backend.sim.is_some(),
            ];
            chosen.into_iter().filter(|chosen| *chosen).count() > 1
        });
        match both {
            Some(backend) => {
                let message = "one service serves one cluster: keep one of [backend.local], [backend.kubernetes], \
                               [backend.slurm], [backend.ssh], [backend.dstack], [backend.sim]";
                Err(BadText::at(text, Some(backend.span()), message))
            }
            None => Ok(()),
        }
    }

    /// Of the two, the one that the site wrote; the other has its place in the defaults.
    fn place_of_lease(&self, text: &str) -> std::ops::Range<usize> {
        let here = |value: &Spanned<Span>| {
            text.get(value.span())
                .is_some_and(|quoted| quoted.trim_matches(['"', '\'']).parse() == Ok(*value.get_ref()))
        };
        if here(&self.lease) { self.lease.span() } else { self.cycle.span() }
    }
}

impl WrittenLocal {
    fn resolve(self, beside: &Path, store: &StoreUrl, data: &Path, policy: Option<&Path>) -> LocalConfig {
        let state = match (self.state, store) {
            (Some(state), _) => beside.join(state),
            // Beside the database: on a local disk, as jobs' records must be.
            (None, StoreUrl::Sqlite(path)) => path.with_file_name("local"),
            (None, StoreUrl::Postgres(_)) => PathBuf::from("/var/lib/cluster-doctor/local"),
        };
        let plain = LocalConfig::new(state, data);
        LocalConfig {
            node: self.node,
            sku: self.sku,
            max_load_per_core: self.max_load_per_core.unwrap_or(plain.max_load_per_core),
            busy_file: self.busy_file.map(|path| beside.join(path)),
            load_file: self.load_file.unwrap_or(plain.load_file),
            doctor_node: self.doctor_node.map(|path| beside.join(path)),
            policy: policy.map(Path::to_owned),
            grace: self.grace.unwrap_or(plain.grace),
            start_limit: self.start_limit.unwrap_or(plain.start_limit),
            state: plain.state,
            share: plain.share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_backend_dstack::Task;
    use doctor_backend_slurm::Submission;

    fn read(text: &str) -> Result<Config, BadText> {
        Config::read(text, Path::new("/etc/doctor"))
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
    fn every_commented_setting_of_the_default_file_is_accepted() {
        let commented = DEFAULT_TEXT.lines().filter_map(|line| line.strip_prefix("# "));
        let settings: Vec<&str> = commented
            .filter(|line| line.starts_with('[') || line.contains(" = "))
            .filter(|line| !line.contains("Durations"))
            .collect();
        // A section of a cluster goes to the next one; of several only one may be there.
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
        // What is commented is the default.
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
            ("\n[backend.ssh]\nparallel = 1\n", 2, "`hostfile` or `hosts`"),
            ("[backend.ssh]\nhosts = \"n[1-\"\n", 1, "`hosts`: line 1"),
            ("[backend.ssh]\nhostfiles = \"x\"\n", 2, "hostfile"),
            ("\n[backend.dstack]\nurl = \"x\"\n", 2, "such as https://dstack.example.com"),
            ("[backend.dstack]\n[backend.dstack.task]\nimages = \"x\"\n", 3, "image"),
            ("[backend.local]\nmax_load_per_core = -0.5\n", 2, "0 or more"),
            ("[backend.local]\n[backend.sim]\nsocket = \"s\"\n", 1, "one service serves one cluster"),
            ("[backend.sim]\n", 1, "missing field `socket`"),
            ("[retention]\nlogs = \"-3d\"\n", 2, "such as \"90s\""),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.line(), Some(line), "{text}: {error}");
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }
}
