//! The command line of each component of a control plane.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{Component, certificate_authority::KeyPair, etcd_data};

/// The ports, files and options of a control plane.
#[derive(Debug)]
pub(super) struct ControlPlaneConfig {
    /// How long a node may miss heartbeats.
    pub(super) node_grace: Duration,
    pub(super) audit: bool,
    pub(super) streaming_lists: bool,
    pub(super) programs: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) etcd_port: u16,
    pub(super) port: u16,
    pub(super) server: KeyPair,
    pub(super) authority: PathBuf,
    pub(super) tokens: KeyPair,
    /// The client certificate with which the API server asks a kubelet for logs.
    pub(super) kubelet_client: KeyPair,
}

impl ControlPlaneConfig {
    pub(super) fn kubeconfig_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.kubeconfig"))
    }

    pub(super) fn audit_policy(&self) -> PathBuf {
        self.folder.join("audit-policy.json")
    }

    pub(super) fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    pub(super) fn arguments(&self, part: Component) -> Vec<String> {
        match part {
            Component::Etcd => self.etcd(),
            Component::ApiServer => self.apiserver(),
            Component::ControllerManager => self.controller_manager(),
            Component::Scheduler => self.client(Component::Scheduler),
        }
    }

    fn etcd(&self) -> Vec<String> {
        let url = format!("http://127.0.0.1:{}", self.etcd_port);
        vec![
            setting("data-dir", self.folder.join(etcd_data::FOLDER).display()),
            setting("listen-client-urls", &url),
            setting("advertise-client-urls", &url),
            // There are no peers, so any free port will do.
            setting("listen-peer-urls", "http://127.0.0.1:0"),
            // The data is disposable, so it need not survive a power failure.
            "--unsafe-no-fsync".to_owned(),
        ]
    }

    fn apiserver(&self) -> Vec<String> {
        let mut arguments = vec![
            setting("etcd-servers", format_args!("http://127.0.0.1:{}", self.etcd_port)),
            setting("bind-address", "127.0.0.1"),
            // Without it, the API server needs a default route to choose an address.
            setting("advertise-address", "127.0.0.1"),
            setting("endpoint-reconciler-type", "none"),
            setting("secure-port", self.port),
            setting("cert-dir", self.folder.display()),
            file("tls-cert-file", &self.server.certificate),
            file("tls-private-key-file", &self.server.key),
            file("client-ca-file", &self.authority),
            file("service-account-key-file", &self.tokens.certificate),
            file("service-account-signing-key-file", &self.tokens.key),
            setting("service-account-issuer", "https://kubernetes.default.svc"),
            setting("service-cluster-ip-range", "10.96.0.0/16"),
            setting("authorization-mode", "Node,RBAC"),
            setting("enable-admission-plugins", "NodeRestriction"),
            file("kubelet-client-certificate", &self.kubelet_client.certificate),
            file("kubelet-client-key", &self.kubelet_client.key),
            // The names of the nodes are not in DNS.
            setting("kubelet-preferred-address-types", "InternalIP"),
            // Pods that test or reset a node are privileged.
            setting("allow-privileged", true),
        ];
        if self.audit {
            arguments.push(file("audit-policy-file", &self.audit_policy()));
            arguments.push(file("audit-log-path", &self.audit_log()));
        }
        if !self.streaming_lists {
            arguments.push(setting("feature-gates", "WatchList=false"));
        }
        arguments
    }

    fn controller_manager(&self) -> Vec<String> {
        let mut arguments = self.client(Component::ControllerManager);
        arguments.extend([
            file("service-account-private-key-file", &self.tokens.key),
            file("root-ca-file", &self.authority),
            setting("use-service-account-credentials", true),
            setting("node-monitor-grace-period", format_args!("{}s", self.node_grace.as_secs())),
            // A short period, so that a new node loses its not-ready taint soon.
            setting("node-monitor-period", "1s"),
        ]);
        arguments
    }

    /// Returns the flags of each API client: its kubeconfig, no leader election, no rate limit worth mentioning.
    fn client(&self, part: Component) -> Vec<String> {
        vec![
            file("kubeconfig", &self.kubeconfig_path(part.program())),
            setting("leader-elect", false),
            setting("kube-api-qps", 500),
            setting("kube-api-burst", 1000),
            // No test queries its own endpoint.
            setting("secure-port", 0),
        ]
    }
}

fn setting(name: &str, value: impl fmt::Display) -> String {
    format!("--{name}={value}")
}

fn file(name: &str, path: &Path) -> String {
    setting(name, path.display())
}
