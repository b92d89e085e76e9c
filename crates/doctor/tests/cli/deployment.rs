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
fn run(helm: &Path, workdir: &Workdir, args: &[&str]) -> CommandOutput {
    let mut command = Command::new(helm);
    command.args(args).env_clear().env("HOME", workdir.path("")).current_dir(repository("deploy/helm"));
    CommandOutput::from_output(&command.output().unwrap())
}

/// Sorts objects by kind and name.
fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.retain(|object| !object.is_null());
    let key = |object: &Value| (object["kind"].to_string(), object["metadata"]["name"].to_string());
    objects.sort_by_key(key);
    objects
}

fn printed(workdir: &Workdir, args: &[&str]) -> Vec<Value> {
    workdir.json(&[&["deploy", "kubernetes"], args].concat())["items"].as_array().unwrap().clone()
}

/// Prints a certificate for the agent endpoint, writes it and its key to tls.crt and tls.key, and returns the ConfigMap with which the
/// agents trust it.
pub(crate) fn endpoint_certificate(workdir: &Workdir) -> Value {
    let [secret, authority]: [Value; 2] = printed(workdir, &["--what", "certificate"]).try_into().unwrap();
    for file in ["tls.crt", "tls.key"] {
        workdir.write(file, secret["stringData"][file].as_str().unwrap());
    }
    authority
}

/// Sets of options that cover every setting that changes which objects exist.
const DEPLOY_ARGS: [&[&str]; 10] = [
    &[],
    &["--set", "tls.kind=none"],
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
fn helm_renders_the_same_objects_as_the_command() {
    let Some(helm) = helm() else { return };
    let workdir = Workdir::new();
    let rendered = |deploy_args: &[&str], extra: &[&str]| -> Vec<Value> {
        let values = workdir.expect(0, &[&["deploy", "kubernetes", "--what", "values"], deploy_args].concat());
        workdir.write("values.yaml", &values.out);
        let file = workdir.path("values.yaml");
        let args = ["template", "release", "cluster-doctor", "--namespace", "cluster-doctor", "--values"];
        let rendered = run(&helm, &workdir, &[&args[..], &[file.to_str().unwrap()], extra].concat());
        assert_eq!(rendered.code, 0, "{deploy_args:?}\n{}\n{}", values.out, rendered.err);
        sorted(serde_saphyr::from_multiple(&rendered.out).unwrap())
    };
    for deploy_args in DEPLOY_ARGS {
        assert_same(
            &rendered(deploy_args, &[]),
            &sorted(printed(&workdir, &[deploy_args, &["--no-namespace"]].concat())),
        );
    }
    assert_same(&rendered(&[], &["--set", "namespace.create=true"]), &sorted(printed(&workdir, &[])));
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
fn helm_lint_accepts_the_chart_and_invalid_values_are_rejected() {
    let Some(helm) = helm() else { return };
    let workdir = Workdir::new();
    let lint = run(&helm, &workdir, &["lint", "--strict", "cluster-doctor"]);
    assert_eq!(lint.code, 0, "{}{}", lint.out, lint.err);
    for (wrong, name) in [
        ("store.size=ten", "/store/size"),
        ("store.kind=mysql", "/store/kind"),
        ("port=agents", "/port"),
        ("controller.user=0", "/controller/user"),
        ("stroe.kind=sqlite", "stroe"),
        ("agent.hostNetwrok=true", "hostNetwrok"),
    ] {
        let refused = run(&helm, &workdir, &["template", "release", "cluster-doctor", "--set", wrong]);
        assert!(refused.code != 0 && refused.err.contains(name), "{wrong}: {}{}", refused.out, refused.err);
    }
}

#[test]
fn a_real_api_server_accepts_every_printed_object() {
    let programs = match ControlPlane::programs() {
        Ok(programs) => programs,
        Err(why) => return why.skip_tests("what is deployed, on a real API server"),
    };
    let plane = ControlPlane::start(&programs).unwrap();
    let workdir = Workdir::new();
    let try_to_make = |object: &Value| {
        let path = format!("{}?dryRun=All&fieldValidation=Strict", ControlPlane::api_path(object));
        plane.request("POST", &path, Some(object)).unwrap()
    };
    let namespace = |name: &str, level: &str| {
        let labels = json!({ "pod-security.kubernetes.io/enforce": level });
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } })
    };
    plane.create(&namespace("strict", "restricted"));
    let all = printed(&workdir, &[]);
    plane.create(all.iter().find(|object| object["kind"] == "Namespace").unwrap());
    let mut checked = BTreeSet::new();
    for deploy_args in DEPLOY_ARGS {
        for object in printed(&workdir, &[deploy_args, &["--no-namespace"]].concat()) {
            if checked.insert(object.to_string()) {
                let response = try_to_make(&object);
                assert!(response.is_success(), "{deploy_args:?}\n{object:#}\n{}", response.text);
            }
        }
    }

    for object in printed(&workdir, &["--what", "certificate"]) {
        let response = try_to_make(&object);
        assert!(response.is_success(), "{}: {}", object["kind"], response.text);
    }

    // The controller is admitted at the restricted level; the agents' namespace admits the agents.
    for account in all.iter().filter(|object| object["kind"] == "ServiceAccount") {
        plane.create(account);
        let mut copy = account.clone();
        copy["metadata"]["namespace"] = json!("strict");
        plane.create(&copy);
    }
    for (kind, namespace, taken) in
        [("Deployment", "strict", true), ("DaemonSet", "strict", false), ("DaemonSet", "cluster-doctor", true)]
    {
        let template = &all.iter().find(|object| object["kind"] == kind).unwrap()["spec"]["template"];
        let mut pod =
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"] });
        pod["metadata"]["name"] = json!("tried");
        pod["metadata"]["namespace"] = json!(namespace);
        let response = try_to_make(&pod);
        assert_eq!(response.is_success(), taken, "{kind} in {namespace}: {}", response.text);
    }
    if let Some(helm) = helm() {
        install(&plane, &helm, &workdir);
    }
}

/// Installs a release, changes its database and uninstalls it; the volume claims remain.
fn install(plane: &ControlPlane, helm: &Path, workdir: &Workdir) {
    let helm = |args: &[&str]| {
        let kubeconfig = plane.admin().to_str().unwrap();
        let output = run(helm, workdir, &[args, &["--namespace", "by-helm", "--kubeconfig", kubeconfig]].concat());
        assert_eq!(output.code, 0, "{args:?}: {}", output.err);
        output
    };
    let claims = || {
        let response = plane.request("GET", "/api/v1/namespaces/by-helm/persistentvolumeclaims", None).unwrap();
        serde_json::from_str::<Value>(&response.text).unwrap()["items"].as_array().unwrap().len()
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
    let request = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    };
    let response = request().unwrap_or_default();
    response.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// Returns the status of the agent endpoint's answer to a client that trusts what the agents trust and calls the Service by its name; 0
/// while it does not answer.
#[cfg(feature = "kubernetes-bed")]
fn status_for_agents(workdir: &Workdir, port: u16, path: &str) -> u16 {
    let mut curl = Command::new("curl");
    curl.args(["-sS", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}", "--cacert"]).arg(workdir.path("ca.crt"));
    curl.args(["--resolve", &format!("cluster-doctor.cluster-doctor.svc:{port}:127.0.0.1")]);
    let output = curl.arg(format!("https://cluster-doctor.cluster-doctor.svc:{port}{path}")).output().unwrap();
    String::from_utf8(output.stdout).unwrap().parse().unwrap_or(0)
}

#[cfg(feature = "kubernetes-bed")]
#[test]
fn the_printed_configuration_runs_a_controller_that_survives_api_server_outages() {
    let programs = match ControlPlane::programs() {
        Ok(programs) => programs,
        Err(why) => return why.skip_tests("a controller from what is printed"),
    };
    let plane = ControlPlane::start(&programs).unwrap();
    let workdir = Workdir::new();
    let [agents, port] = [(); 2].map(|()| doctor_testbed::ports::reserve_one().unwrap());
    let (agent_port, probe_port) = (format!("port={agents}"), format!("probePort={port}"));
    let all =
        printed(&workdir, &["--set", &agent_port, "--set", &probe_port, "--set", "settings.service=cycle = \"1s\""]);
    for object in &all {
        plane.create(object);
    }
    let text = |map: &str, file: &str| {
        let found = all.iter().find(|object| object["kind"] == "ConfigMap" && object["metadata"]["name"] == map);
        found.unwrap()["data"][file].as_str().unwrap().to_owned()
    };
    // Only the pod's paths are replaced with paths on this machine.
    let mut doctor = text("cluster-doctor", "doctor.toml").replace("0.0.0.0:", "127.0.0.1:");
    for (there, here) in [
        ("sqlite:/var/lib/cluster-doctor", "store"),
        ("/data", "data"),
        ("/etc/cluster-doctor-profiles", "profiles"),
        ("/etc/cluster-doctor-tls", "tls"),
    ] {
        fs::create_dir(workdir.path(here)).unwrap();
        assert!(doctor.contains(there), "{doctor}");
        doctor = doctor.replace(there, workdir.path(here).to_str().unwrap());
    }
    let authority = endpoint_certificate(&workdir);
    workdir.write("ca.crt", authority["data"]["ca.crt"].as_str().unwrap());
    for file in ["tls.crt", "tls.key"] {
        fs::rename(workdir.path(file), workdir.path("tls").join(file)).unwrap();
    }
    let mut map = MountedMap { workdir: &workdir, folder: "mounted", turns: 0 };
    map.update(&[("doctor.toml", &doctor), ("policy.toml", &text("cluster-doctor-policy", "policy.toml"))]);
    let account = plane.kubeconfig_for_service_account("cluster-doctor", "cluster-doctor").unwrap();
    let mut command = workdir.command(&["serve", "--config", "mounted/doctor.toml"]);
    command.env("KUBECONFIG", account);
    let mut service = Service::spawn(command);
    service.wait_for_log("health probes listening");
    wait_until("a controller that is ready", || status(port, "/readyz") == 200 && status(port, "/healthz") == 200);
    assert_eq!(status_for_agents(&workdir, agents, "/api/v1/ingest"), 405, "it answers over TLS");
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
fn an_unknown_or_invalid_setting_is_rejected_by_name() {
    let workdir = Workdir::new();
    for (args, expected) in [
        (["--set", "store.sise=1Gi"], "unknown setting `store.sise`; similar settings: store.kind"),
        (["--set", "store.size=ten"], "`store.size` is \"ten\", expected a size, such as 20Gi"),
        (["--set", "store.size"], "SETTING=VALUE"),
        (["--image", "a b"], "`images.node` is \"a b\", expected an image"),
        (["--namespace", "Not_A_Name"], "`namespace` is Not_A_Name"),
    ] {
        workdir.expect(2, &[&["deploy", "kubernetes"], &args[..]].concat()).stderr_contains(expected);
    }
    let rights = workdir.expect(0, &["deploy", "kubernetes", "--what", "rights"]);
    rights.stdout_contains("kind: ClusterRole").stdout_contains("pod-security.kubernetes.io/enforce: privileged");
    assert!(!rights.out.contains("Deployment"), "{}", rights.out);
}

/// A directory like a mounted ConfigMap: files are links through the link `..data`, which is switched atomically from
/// one directory to the next.
struct MountedMap<'a> {
    workdir: &'a Workdir,
    folder: &'static str,
    turns: u32,
}

impl MountedMap<'_> {
    fn update(&mut self, files: &[(&str, &str)]) {
        self.turns += 1;
        let at = |name: &str| self.workdir.path(self.folder).join(name);
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
        let _removed = fs::remove_dir_all(at(&before));
    }
}

#[test]
fn a_changed_config_map_takes_effect_without_a_restart() {
    let workdir = Workdir::local();
    let policy = workdir.read("policy.toml");
    let doctor = workdir.read("doctor.toml").replace("\"doctor.db\"", &format!("{:?}", workdir.path("doctor.db")));
    let doctor = doctor.replace("\"data\"", &format!("{:?}", workdir.path("data")));
    let doctor = format!("cycle = \"1s\"\nprofiles = [\"../types\"]\n{doctor}");
    let mut types = MountedMap { workdir: &workdir, folder: "types", turns: 0 };
    types.update(&[("ours.toml", "sku = \"ours\"\nversion = 1\n")]);
    let mut map = MountedMap { workdir: &workdir, folder: "mounted", turns: 0 };
    map.update(&[("doctor.toml", &doctor), ("policy.toml", &format!("version = 1\n{policy}"))]);
    let mut service = Service::spawn(workdir.command(&["serve", "--config", "mounted/doctor.toml"]));
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
