//! A real node leaves nothing behind, even if its supervisor is killed, and does not change the machine it runs on.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use doctor_testbed::kubernetes::{
    ControlPlane, KubernetesTestbedError,
    real_node::{Programs, RealNode},
};

/// Returns what a node could leave behind: cgroups, links, mounts.
fn traces() -> Vec<String> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path());
    let hierarchies: Vec<PathBuf> = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]).collect();
    let groups = hierarchies.iter().filter_map(|root| fs::read_dir(root).ok()).flatten().flatten();
    let groups = groups.map(|entry| entry.path().display().to_string()).filter(|group| group.contains("/doctor-bed-"));
    let links = Command::new("ip").args(["-o", "link"]).output().unwrap().stdout;
    let links = String::from_utf8(links).unwrap();
    let links = links.lines().filter(|link| link.contains("doctor-bed-")).map(str::to_owned);
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let mounts = mounts.lines().filter(|mount| mount.contains("doctor-node-")).map(str::to_owned);
    let mut found: Vec<String> = groups.chain(links).chain(mounts).collect();
    found.sort();
    found
}

/// Returns the kernel-wide settings that a kubelet changes.
fn kernel() -> Vec<String> {
    let names = ["vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"];
    names.map(|name| fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap()).to_vec()
}

fn plane() -> Result<(Programs, Arc<ControlPlane>), KubernetesTestbedError> {
    let programs = RealNode::programs()?;
    Ok((programs, Arc::new(ControlPlane::start(&ControlPlane::programs()?)?)))
}

#[test]
fn a_node_becomes_ready_and_leaves_nothing_behind_even_if_its_supervisor_was_killed() {
    let (programs, plane) = match plane() {
        Ok(started) => started,
        Err(why) => return why.skip_tests("a real node"),
    };
    let (before, settings) = (traces(), kernel());
    let node = RealNode::start(&programs, &plane, "real-1").unwrap();
    let info = node.object().unwrap()["status"]["nodeInfo"].clone();
    assert!(info["containerRuntimeVersion"].as_str().unwrap().starts_with("containerd://"), "{info}");
    assert_ne!(traces(), before, "leftovers would be detected");
    assert_eq!(kernel(), settings);

    let killed = Command::new("kill").args(["-KILL", &node.supervisor_pid().to_string()]).status().unwrap();
    assert!(killed.success());
    drop(node);
    assert_ne!(traces(), before, "its control groups are still there");

    let next = RealNode::start(&programs, &plane, "real-2").unwrap();
    let folder = next.log().parent().unwrap().to_owned();
    assert!(folder.exists());
    drop(next);
    assert_eq!(traces(), before);
    assert!(!folder.exists(), "{}", folder.display());
}
