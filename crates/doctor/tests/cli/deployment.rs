//! `doctor deploy kubernetes` and the Helm chart: both produce the same objects, which a real API server accepts; and
//! configuration files that change the way the kubelet changes them.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use doctor_testbed::kubernetes::ControlPlane;
use serde_json::{Value, json};

#[cfg(feature = "kubernetes-bed")]
use crate::workdir::wait_until;
use crate::{
    this_machine::Service,
    workdir::{CommandOutput, Workdir},
};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Returns the path of Helm. `None` if it cannot be built, which is printed; in CI it is a failure.
fn helm() -> Option<PathBuf> {
    let built = Command::new(repository("scripts/helm.sh")).output().unwrap();
    if built.status.success() {
        return Some(String::from_utf8(built.stdout).unwrap().trim().into());
    }
    let why = String::from_utf8_lossy(&built.stderr).lines().last().unwrap_or_default().to_owned();
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
    println!("NOT RUN: the Helm chart: {}", why.trim_start_matches("not run: "));
    None
}

/// Runs Helm on the chart.
fn run(helm: &Path, bed: &Workdir, args: &[&str]) -> CommandOutput {
    let mut command = Command::new(helm);
    command.args(args).env_clear().env("HOME", bed.path("")).current_dir(repository("deploy/helm"));
    CommandOutput::from_output(&command.output().unwrap())
}

/// Sorts objects by kind and name.
fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.retain(|object| !object.is_null());
    let key = |object: &Value| (object["kind"].to_string(), object["metadata"]["name"].to_string());
    objects.sort_by_key(key);
    objects
}

fn printed(bed: &Workdir, args: &[&str]) -> Vec<Value> {
    bed.json(&[&["deploy", "kubernetes"], args].concat())["items"].as_array().unwrap().clone()
}

/// Sets of options that cover every setting that changes which objects exist.
const DEPLOY_ARGS: [&[&str]; 9] = [
    &[],
    &["--postgres", "doctor-db", "--set", "store.create=false"],
    &["--set", "data.kind=host-path", "--set", "data.hostPath=/fsx/doctor"],
    &["--set", "data.kind=none"],
    &["--set", "data.kind=none", "--set", "store.kind=postgres", "--set", "store.secret=doctor-db"],
    &["--storage-class", "efs", "--set", "data.size=1Ti", "--set", "data.create=true", "--set", "store.size=1Gi"],
    &["--set", "agent.enabled=false", "--set", "priorityClass.create=false", "--set", "store.create=false"],
    &[
        "--image",
        "registry.example.com:5000/a/node@sha256:0123",
        "--set",
        "agent.hostNetwork=true",
        "--set",
        "agent.runtimeClass=nvidia",
        "--set",
        "agent.priorityClass=system-node-critical",
        "--set",
        "agent.tolerations=[]",
        "--set",
        "agent.nodeSelector={}",
        "--set",
        r#"images.pullSecrets=[{"name":"registry"}]"#,
        "--set",
        r#"controller.nodeSelector={"pool":"system"}"#,
        "--set",
        r#"controller.tolerations=[{"key":"system","operator":"Exists"}]"#,
        "--set",
        "prefix=gpu-healthcheck.aws-samples.io",
        "--set",
        "port=9000",
        "--set",
        "replace=delete-node",
        "--set",
        "write.event=false",
        "--set",
        "write.condition=GpuHealthy",
        "--set",
        r#"controller.env=[{"name":"FLEET_TOKEN","valueFrom":{"secretKeyRef":{"name":"fleet","key":"token"}}}]"#,
        "--set",
        r#"controller.accountAnnotations={"eks.amazonaws.com/role-arn":"arn:aws:iam::1:role/doctor"}"#,
    ],
    &[
        "--set",
        "policy=version = 7\n\n[limits]\njobs = 2   # few\n",
        "--set",
        "settings.service=\ncycle = \"20s\"\n\n[retention]\nlogs = \"3d\"\n",
        "--set",
        "settings.kubernetes=pool_label = \"pool\"",
        "--set",
        r#"profiles={"ours.toml":"sku = \"ours\"\nversion = 1\n"}"#,
    ],
];

#[test]
fn helm_makes_what_the_command_prints() {
    let Some(helm) = helm() else { return };
    let bed = Workdir::new();
    let made = |way: &[&str], more: &[&str]| -> Vec<Value> {
        let values = bed.expect(0, &[&["deploy", "kubernetes", "--what", "values"], way].concat());
        bed.write("values.yaml", &values.out);
        let file = bed.path("values.yaml");
        let args = ["template", "release", "cluster-doctor", "--namespace", "cluster-doctor", "--values"];
        let made = run(&helm, &bed, &[&args[..], &[file.to_str().unwrap()], more].concat());
        assert_eq!(made.code, 0, "{way:?}\n{}\n{}", values.out, made.err);
        sorted(serde_saphyr::from_multiple(&made.out).unwrap())
    };
    for way in DEPLOY_ARGS {
        assert_same(&made(way, &[]), &sorted(printed(&bed, &[way, &["--no-namespace"]].concat())));
    }
    assert_same(&made(&[], &["--set", "namespace.create=true"]), &sorted(printed(&bed, &[])));
}

/// Compares objects one by one, so that only the difference is printed.
#[track_caller]
fn assert_same(by_helm: &[Value], printed: &[Value]) {
    for (by_helm, printed) in by_helm.iter().zip(printed) {
        assert_eq!(by_helm, printed, "\nby Helm: {by_helm:#}\nprinted: {printed:#}");
    }
    assert_eq!(by_helm.len(), printed.len());
}

#[test]
fn helm_finds_nothing_wrong_with_the_chart_and_refuses_values_that_are() {
    let Some(helm) = helm() else { return };
    let bed = Workdir::new();
    let lint = run(&helm, &bed, &["lint", "--strict", "cluster-doctor"]);
    assert_eq!(lint.code, 0, "{}{}", lint.out, lint.err);
    for (wrong, name) in [
        ("store.size=ten", "/store/size"),
        ("store.kind=mysql", "/store/kind"),
        ("port=agents", "/port"),
        ("controller.user=0", "/controller/user"),
        ("stroe.kind=sqlite", "stroe"),
        ("agent.hostNetwrok=true", "hostNetwrok"),
    ] {
        let refused = run(&helm, &bed, &["template", "release", "cluster-doctor", "--set", wrong]);
        assert!(refused.code != 0 && refused.err.contains(name), "{wrong}: {}{}", refused.out, refused.err);
    }
}

#[test]
fn a_real_api_server_takes_everything_that_is_printed() {
    let programs = match ControlPlane::programs() {
        Ok(programs) => programs,
        Err(why) => return why.skip_tests("what is deployed, on a real API server"),
    };
    let plane = ControlPlane::start(&programs).unwrap();
    let bed = Workdir::new();
    let try_to_make = |object: &Value| {
        let place = format!("{}?dryRun=All&fieldValidation=Strict", ControlPlane::api_path(object));
        plane.request("POST", &place, Some(object)).unwrap()
    };
    let namespace = |name: &str, level: &str| {
        let labels = json!({ "pod-security.kubernetes.io/enforce": level });
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } })
    };
    plane.create(&namespace("strict", "restricted"));
    let all = printed(&bed, &[]);
    plane.create(all.iter().find(|object| object["kind"] == "Namespace").unwrap());
    let mut tried = BTreeSet::new();
    for way in DEPLOY_ARGS {
        for object in printed(&bed, &[way, &["--no-namespace"]].concat()) {
            if tried.insert(object.to_string()) {
                let answer = try_to_make(&object);
                assert!(answer.is_success(), "{way:?}\n{object:#}\n{}", answer.text);
            }
        }
    }

    // The controller is admitted at the restricted level; the agents' namespace admits the agents.
    for account in all.iter().filter(|object| object["kind"] == "ServiceAccount") {
        plane.create(account);
        let mut there = account.clone();
        there["metadata"]["namespace"] = json!("strict");
        plane.create(&there);
    }
    for (kind, namespace, taken) in
        [("Deployment", "strict", true), ("DaemonSet", "strict", false), ("DaemonSet", "cluster-doctor", true)]
    {
        let template = &all.iter().find(|object| object["kind"] == kind).unwrap()["spec"]["template"];
        let mut pod =
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"] });
        pod["metadata"]["name"] = json!("tried");
        pod["metadata"]["namespace"] = json!(namespace);
        let answer = try_to_make(&pod);
        assert_eq!(answer.is_success(), taken, "{kind} in {namespace}: {}", answer.text);
    }
    if let Some(helm) = helm() {
        install(&plane, &helm, &bed);
    }
}

/// Installs a release, changes its database and uninstalls it; the volume claims remain.
fn install(plane: &ControlPlane, helm: &Path, bed: &Workdir) {
    let helm = |args: &[&str]| {
        let kubeconfig = plane.admin().to_str().unwrap();
        let said = run(helm, bed, &[args, &["--namespace", "by-helm", "--kubeconfig", kubeconfig]].concat());
        assert_eq!(said.code, 0, "{args:?}: {}", said.err);
        said
    };
    let claims = || {
        let answer = plane.request("GET", "/api/v1/namespaces/by-helm/persistentvolumeclaims", None).unwrap();
        serde_json::from_str::<Value>(&answer.text).unwrap()["items"].as_array().unwrap().len()
    };
    helm(&["install", "doctor", "cluster-doctor", "--create-namespace"]).stdout_contains("doctor status");
    assert_eq!(claims(), 2);
    let other = ["upgrade", "doctor", "cluster-doctor", "--set", "store.kind=postgres"];
    helm(&other).stdout_contains("create secret generic cluster-doctor-store");
    helm(&["uninstall", "doctor"]);
    assert_eq!(claims(), 2, "the claims outlive the release");
}

/// Returns the status of a controller's answer; 0 while it does not answer.
#[cfg(feature = "kubernetes-bed")]
fn status(port: u16, path: &str) -> u16 {
    use std::io::{Read, Write};
    let ask = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().unwrap_or_default();
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

#[cfg(feature = "kubernetes-bed")]
#[test]
fn what_is_printed_makes_a_controller_that_outlives_its_api_server() {
    let programs = match ControlPlane::programs() {
        Ok(programs) => programs,
        Err(why) => return why.skip_tests("a controller from what is printed"),
    };
    let plane = ControlPlane::start(&programs).unwrap();
    let bed = Workdir::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let all = printed(&bed, &["--set", &format!("port={port}"), "--set", "settings.service=cycle = \"1s\""]);
    for object in &all {
        plane.create(object);
    }
    let text = |map: &str, file: &str| {
        let found = all.iter().find(|object| object["kind"] == "ConfigMap" && object["metadata"]["name"] == map);
        found.unwrap()["data"][file].as_str().unwrap().to_owned()
    };
    // Only the pod's paths are replaced with paths on this machine.
    let mut doctor = text("cluster-doctor", "doctor.toml").replace("0.0.0.0:", "127.0.0.1:");
    for (there, here) in
        [("sqlite:/var/lib/cluster-doctor", "store"), ("/data", "data"), ("/etc/cluster-doctor-profiles", "profiles")]
    {
        fs::create_dir(bed.path(here)).unwrap();
        assert!(doctor.contains(there), "{doctor}");
        doctor = doctor.replace(there, bed.path(here).to_str().unwrap());
    }
    let mut map = MountedMap { bed: &bed, folder: "mounted", turns: 0 };
    map.update(&[("doctor.toml", &doctor), ("policy.toml", &text("cluster-doctor-policy", "policy.toml"))]);
    let account = plane.kubeconfig_for_service_account("cluster-doctor", "cluster-doctor").unwrap();
    let mut command = bed.command(&["serve", "--config", "mounted/doctor.toml"]);
    command.env("KUBECONFIG", account);
    let mut service = Service::spawn(command);
    service.wait_for_log("agent endpoint listening");
    wait_until("a controller that is ready", || status(port, "/readyz") == 200 && status(port, "/healthz") == 200);
    plane.kill_apiserver().unwrap();
    service.wait_for_log("read the cluster state");
    assert_eq!((status(port, "/healthz"), status(port, "/readyz")), (200, 200), "a restart would not help");
    plane.restart_apiserver().unwrap();
    service.wait_for_log("problems resolved");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    // A new API server does not know any permissions for a moment.
    let before = log.split("read the cluster state").next().unwrap();
    assert!(!before.contains("forbidden"), "{log}");
}

#[test]
fn a_setting_that_is_not_there_or_not_right_is_refused_by_name() {
    let bed = Workdir::new();
    for (args, complaint) in [
        (["--set", "store.sise=1Gi"], "unknown setting `store.sise`; similar settings: store.kind"),
        (["--set", "store.size=ten"], "`store.size` is \"ten\", expected a size, such as 20Gi"),
        (["--set", "store.size"], "SETTING=VALUE"),
        (["--image", "a b"], "`images.node` is \"a b\", expected an image"),
        (["--namespace", "Not_A_Name"], "`namespace` is Not_A_Name"),
    ] {
        bed.expect(2, &[&["deploy", "kubernetes"], &args[..]].concat()).stderr_contains(complaint);
    }
    let rights = bed.expect(0, &["deploy", "kubernetes", "--what", "rights"]);
    rights.stdout_contains("kind: ClusterRole").stdout_contains("pod-security.kubernetes.io/enforce: privileged");
    assert!(!rights.out.contains("Deployment"), "{}", rights.out);
}

/// A directory like a mounted ConfigMap: files are links through the link `..data`, which is switched atomically from
/// one directory to the next.
struct MountedMap<'a> {
    bed: &'a Workdir,
    folder: &'static str,
    turns: u32,
}

impl MountedMap<'_> {
    fn update(&mut self, files: &[(&str, &str)]) {
        self.turns += 1;
        let at = |name: &str| self.bed.path(self.folder).join(name);
        let (folder, before) = (format!("..turn_{}", self.turns), format!("..turn_{}", self.turns - 1));
        fs::create_dir_all(at(&folder)).unwrap();
        for (name, text) in files {
            fs::write(at(&folder).join(name), text).unwrap();
        }
        symlink(&folder, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        for (name, _) in files.iter().filter(|(name, _)| !at(name).is_symlink()) {
            symlink(Path::new("..data").join(name), at(name)).unwrap();
        }
        // Before the first turn there is none.
        let _gone = fs::remove_dir_all(at(&before));
    }
}

#[test]
fn a_config_map_that_changes_is_in_force_without_a_restart() {
    let bed = Workdir::local();
    let policy = bed.read("policy.toml");
    let doctor = bed.read("doctor.toml").replace("\"doctor.db\"", &format!("{:?}", bed.path("doctor.db")));
    let doctor = doctor.replace("\"data\"", &format!("{:?}", bed.path("data")));
    let doctor = format!("cycle = \"1s\"\nprofiles = [\"../types\"]\n{doctor}");
    let mut types = MountedMap { bed: &bed, folder: "types", turns: 0 };
    types.update(&[("ours.toml", "sku = \"ours\"\nversion = 1\n")]);
    let mut map = MountedMap { bed: &bed, folder: "mounted", turns: 0 };
    map.update(&[("doctor.toml", &doctor), ("policy.toml", &format!("version = 1\n{policy}"))]);
    let mut service = Service::spawn(bed.command(&["serve", "--config", "mounted/doctor.toml"]));
    service.wait_for_log("started");
    // The length is the same, so that only the content differs.
    map.update(&[("doctor.toml", &doctor), ("policy.toml", &format!("version = 2\n{policy}"))]);
    service.wait_for_log("configuration reloaded policy=2");
    map.update(&[("doctor.toml", &doctor), ("policy.toml", "version = 3\nmode = \"yolo\"\n")]);
    service.wait_for_log("configuration reload failed, the last valid configuration stays in force");
    map.update(&[("doctor.toml", &doctor), ("policy.toml", &format!("version = 4\n{policy}"))]);
    service.wait_for_log("configuration reloaded policy=4");
    types.update(&[("ours.toml", "sku = \"ours\"\nversion = 2\nlike = \"hgx-h999\"\n")]);
    service.wait_for_log("hgx-h999");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}
