//! The configuration files of a node's programs. Paths are those inside the node, which has its own /run, /var/lib and /var/log.

use std::{fs, path::Path};

use serde_json::json;

use super::{
    super::{KubernetesTestbedError, certificate_authority::KeyPair, file_error},
    PAUSE_IMAGE, Programs,
};

/// Returns the configuration of containerd, in the format of 1.6, which newer versions migrate.
///
/// Root in a container or a small virtual machine may lack the right to lower an OOM score, and may have no AppArmor.
/// Without these two settings no sandbox starts there.
fn containerd(folder: &Path, plugins: &Path) -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{}"
conf_dir = "{}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"#,
        plugins.display(),
        folder.join("network").display(),
        snapshotter(folder),
    )
}

/// Returns containerd's snapshotter. overlayfs cannot be mounted on overlayfs, as in a machine that is itself a
/// container; `native` copies the layers instead.
pub(super) fn snapshotter(folder: &Path) -> &'static str {
    const OVERLAY: i128 = 0x794c_7630;
    match rustix::fs::statfs(folder) {
        Ok(at) if i128::from(at.f_type) == OVERLAY => "native",
        _ => "overlayfs",
    }
}

pub(super) fn write(folder: &Path, programs: &Programs, authority: &Path) -> Result<(), KubernetesTestbedError> {
    let network = folder.join("network");
    fs::create_dir(&network).map_err(file_error("creating", &network))?;
    // Pods of a node reach each other and the node. There is no NAT, so this machine's firewall rules are not changed.
    let bridge = json!({
        "cniVersion": "0.4.0", "name": "pods",
        "plugins": [{
            "type": "bridge", "bridge": "pods0", "isGateway": true,
            "ipam": {
                "type": "host-local", "ranges": [[{ "subnet": "198.19.0.0/24" }]], "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": { "anonymous": { "enabled": false }, "x509": { "clientCAFile": authority } },
        "authorization": { "mode": "Webhook" },
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "resolvConf": "",
        // The free memory and disk of the test machine must not matter.
        "evictionHard": { "memory.available": "1Mi" },
        "imageGCHighThresholdPercent": 100,
        // Tests wait for the next update.
        "nodeStatusReportFrequency": "1s",
        "nodeStatusUpdateFrequency": "1s",
    });
    let files = [
        ("containerd.toml", containerd(folder, &programs.plugins)),
        ("network/10-pods.conflist", bridge.to_string()),
        ("kubelet.json", kubelet.to_string()),
    ];
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).map_err(file_error("writing", &path))?;
    }
    Ok(())
}

/// Writes the kubelet's kubeconfig. The API server's certificate is valid for loopback, not for the relay's address.
pub(super) fn kubeconfig(
    folder: &Path,
    server: &str,
    authority: &Path,
    user: &KeyPair,
) -> Result<(), KubernetesTestbedError> {
    let config = json!({
        "apiVersion": "v1", "kind": "Config",
        "clusters": [{ "name": "bed", "cluster": {
            "server": server, "certificate-authority": authority, "tls-server-name": "localhost",
        } }],
        "users": [{ "name": "node", "user": { "client-certificate": user.certificate, "client-key": user.key } }],
        "contexts": [{ "name": "bed", "context": { "cluster": "bed", "user": "node" } }],
        "current-context": "bed",
    });
    let path = folder.join("kubeconfig");
    fs::write(&path, config.to_string()).map_err(file_error("writing", &path))
}
