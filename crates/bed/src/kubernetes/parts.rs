//! How each component of a control plane is started.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{Part, authority::Pair, data};

/// Where a control plane is: its ports and its files.
#[derive(Debug)]
pub(super) struct Place {
    /// How long a node may be silent.
    pub(super) node_grace: Duration,
    pub(super) audit: bool,
    pub(super) programs: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) etcd_port: u16,
    pub(super) port: u16,
    pub(super) server: Pair,
    pub(super) authority: PathBuf,
    pub(super) tokens: Pair,
    /// As whom the API server asks a kubelet for logs.
    pub(super) kubelet_client: Pair,
}

impl Place {
    pub(super) fn kubeconfig_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.kubeconfig"))
    }

    pub(super) fn audit_policy(&self) -> PathBuf {
        self.folder.join("audit-policy.json")
    }

    pub(super) fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    pub(super) fn arguments(&self, part: Part) -> Vec<String> {
        match part {
            Part::Etcd => self.etcd(),
            Part::ApiServer => self.apiserver(),
            Part::ControllerManager => self.controller_manager(),
            Part::Scheduler => self.client(Part::Scheduler),
        }
    }

    fn etcd(&self) -> Vec<String> {
        let url = format!("http://127.0.0.1:{}", self.etcd_port);
        vec![
            setting("data-dir", self.folder.join(data::FOLDER).display()),
            setting("listen-client-urls", &url),
            setting("advertise-client-urls", &url),
            // It has no peers: any port that is free.
            setting("listen-peer-urls", "http://127.0.0.1:0"),
            // Nobody's data: a power cut may have it.
            "--unsafe-no-fsync".to_owned(),
        ]
    }

    fn apiserver(&self) -> Vec<String> {
        let mut arguments = vec![
            setting("etcd-servers", format_args!("http://127.0.0.1:{}", self.etcd_port)),
            setting("bind-address", "127.0.0.1"),
            // Otherwise a machine without a default route has none to announce.
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
            // Nobody resolves the names of a bed's nodes.
            setting("kubelet-preferred-address-types", "InternalIP"),
            // What runs on a node to reset or test it is privileged.
            setting("allow-privileged", true),
        ];
        if self.audit {
            arguments.push(file("audit-policy-file", &self.audit_policy()));
            arguments.push(file("audit-log-path", &self.audit_log()));
        }
        arguments
    }

    fn controller_manager(&self) -> Vec<String> {
        let mut arguments = self.client(Part::ControllerManager);
        arguments.extend([
            file("service-account-private-key-file", &self.tokens.key),
            file("root-ca-file", &self.authority),
            setting("use-service-account-credentials", true),
            setting("node-monitor-grace-period", format_args!("{}s", self.node_grace.as_secs())),
            // The shortest that takes the taint off a new node soon.
            setting("node-monitor-period", "1s"),
        ]);
        arguments
    }

    /// What every part that asks the API server is told: whom to ask and as whom, that it is alone, that it need not hold back.
    fn client(&self, part: Part) -> Vec<String> {
        vec![
            file("kubeconfig", &self.kubeconfig_path(part.program())),
            setting("leader-elect", false),
            setting("kube-api-qps", 500),
            setting("kube-api-burst", 1000),
            // It serves nothing that anybody here asks for.
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
