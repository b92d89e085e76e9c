//! The files with which a node's programs are started. Paths in them are the node's, whose /run, /var/lib and /var/log are its own.

use std::{fs, path::Path};

use serde_json::json;

use super::{
    super::{BedError, at, authority::Pair},
    PAUSE_IMAGE, Programs,
};

/// containerd 1.6 reads this, and newer ones translate it.
///
/// Root in a container or a small virtual machine may lack the right to lower the score by which the kernel chooses whom to
/// end when memory is short, and may have no AppArmor; without these two settings no sandbox starts there.
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

/// How containerd lays the layers of an image over each other: an overlay cannot lie on another one, as a machine that is itself
/// a container has it, and copies do.
pub(super) fn snapshotter(folder: &Path) -> &'static str {
    const OVERLAY: i128 = 0x794c_7630;
    match rustix::fs::statfs(folder) {
        Ok(at) if i128::from(at.f_type) == OVERLAY => "native",
        _ => "overlayfs",
    }
}

pub(super) fn write(folder: &Path, programs: &Programs, authority: &Path) -> Result<(), BedError> {
    let network = folder.join("network");
    fs::create_dir(&network).map_err(at("creating", &network))?;
    // Pods of one node reach each other and the node; nothing is translated, so nothing of the machine's firewall is touched.
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
        // How full the machine is that tests run on is not what they are about.
        "evictionHard": { "memory.available": "1Mi" },
        "imageGCHighThresholdPercent": 100,
        // A test waits for the next time.
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
        fs::write(&path, text).map_err(at("writing", &path))?;
    }
    Ok(())
}

/// The kubelet's own. The API server's certificate names loopback and not the address at which the node finds it.
pub(super) fn kubeconfig(folder: &Path, server: &str, authority: &Path, user: &Pair) -> Result<(), BedError> {
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
    fs::write(&path, config.to_string()).map_err(at("writing", &path))
}
