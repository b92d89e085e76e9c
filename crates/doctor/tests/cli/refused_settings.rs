//! Bad configurations: `doctor config check` and `doctor serve` refuse the same ones, in the same words, with the same exit
//! code. `serve` ends by itself, and `config check` changes nothing.

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Stdio},
};

use crate::{
    this_machine::Service,
    workdir::{CommandOutput, Workdir, wait_until},
};

const CONFIGURATION: i32 = 4;
const UNREACHABLE: i32 = 3;
const DAMAGED: i32 = 7;

/// A configuration that the service refuses.
struct Case {
    what: &'static str,
    code: i32,
    /// A part of what both print.
    says: &'static str,
    /// Changes the good configuration of a [`Workdir`].
    spoil: fn(&Workdir),
}

const fn case(what: &'static str, code: i32, says: &'static str, spoil: fn(&Workdir)) -> Case {
    Case { what, code, says, spoil }
}

/// Puts text before the first section.
fn set(workdir: &Workdir, text: &str) {
    let config = workdir.read("doctor.toml");
    workdir.write("doctor.toml", &format!("{text}\n{config}"));
}

/// Puts a section before the backend's.
fn section(workdir: &Workdir, text: &str) {
    let config = workdir.read("doctor.toml");
    workdir.write("doctor.toml", &config.replace("[backend.local]", &format!("{text}\n[backend.local]")));
}

/// Replaces a text of the configuration.
fn replace(workdir: &Workdir, from: &str, to: &str) {
    let config = workdir.read("doctor.toml");
    assert!(config.contains(from), "{from} is not in {config}");
    workdir.write("doctor.toml", &config.replace(from, to));
}

/// Sets the backend's section.
fn backend(workdir: &Workdir, text: &str) {
    let config = workdir.read("doctor.toml");
    let (service, _) = config.split_once("[backend.local]").unwrap();
    workdir.write("doctor.toml", &format!("{service}{text}\n"));
}

const FILES: [Case; 16] = [
    case("an unknown key", CONFIGURATION, "line 1, column 1", |dir| set(dir, "cycel = \"30s\"")),
    case("a bad duration", CONFIGURATION, "such as \"90s\"", |dir| set(dir, "cycle = \"30 parsecs\"")),
    case("a short lease", CONFIGURATION, "a lease must outlast a cycle", |dir| set(dir, "lease = \"10s\"")),
    case("no workers", CONFIGURATION, "1 to 256", |dir| set(dir, "workers = 0")),
    case("an address that is none", CONFIGURATION, "line ", |dir| section(dir, "[agents]\nlisten = \"everywhere\"")),
    case("a URL without a scheme", CONFIGURATION, "`agents.url` is `ctl:7443`", |dir| {
        section(dir, "[agents]\nurl = \"ctl:7443\"");
    }),
    case("results without a URL", CONFIGURATION, "expected `agents.url`", |dir| {
        section(dir, "[agents]\nresults = true");
    }),
    case("traces without a scheme", CONFIGURATION, "`telemetry.traces` must begin", |dir| {
        section(dir, "[telemetry]\ntraces = \"collector:4318\"");
    }),
    case("a receiver without a channel", CONFIGURATION, "exactly one of `webhook`", |dir| {
        section(dir, "[alerts.receivers.ops]\nseverity = \"reset\"");
    }),
    case("a mail server without a port", CONFIGURATION, "HOST:PORT", |dir| {
        section(dir, "[alerts.receivers.ops]\nemail = { server = \"mail\", from = \"a@b\", to = [\"a@b\"] }");
    }),
    case("an unknown test in the policy", CONFIGURATION, "tests.discs", |dir| {
        dir.write("policy.toml", "[tests.discs]\nenabled = false\n");
    }),
    case("a bad limit in the policy", CONFIGURATION, "policy.toml, line 2, column 8", |dir| {
        dir.write("policy.toml", "[limits]\njobs = -1\n");
    }),
    case("no policy", CONFIGURATION, "cannot read", |dir| fs::remove_file(dir.path("policy.toml")).unwrap()),
    case("a profile of an unknown base", CONFIGURATION, "hgx-h999", |dir| {
        dir.write("p.toml", "sku = \"x\"\nversion = 1\nlike = \"hgx-h999\"\n");
        set(dir, "profiles = [\"p.toml\"]");
    }),
    case("two clusters", CONFIGURATION, "one service serves one cluster", |dir| {
        section(dir, "[backend.ssh]\nhosts = \"a\"");
    }),
    case("an unsupported database", CONFIGURATION, "is not a store", |dir| {
        replace(dir, "store = \"doctor.db\"", "store = \"mysql://root@db/doctor\"");
    }),
];

const STORE_AND_SHARE: [Case; 10] = [
    case("no directory for the store", UNREACHABLE, "create it first", |dir| {
        replace(dir, "store = \"doctor.db\"", "store = \"none/doctor.db\"");
    }),
    case("a store that is a directory", UNREACHABLE, "it is a directory", |dir| {
        fs::create_dir(dir.path("doctor.db")).unwrap();
    }),
    case("a file that is no database", DAMAGED, "does not start with the SQLite header", |dir| {
        dir.write("doctor.db", "this is no database at all, whatever its name says");
    }),
    case("a database server that does not answer", UNREACHABLE, "cannot open the store postgres://", |dir| {
        replace(dir, "store = \"doctor.db\"", "store = \"postgres://doctor@127.0.0.1:1/doctor\"");
        replace(dir, "node = \"here\"", "node = \"here\"\nstate = \"state\"");
    }),
    case("a way to verify the database that is none", CONFIGURATION, "verify-ca, verify-full", |dir| {
        replace(dir, "store = \"doctor.db\"", "store = \"postgres://doctor@127.0.0.1:1/doctor?sslmode=allow\"");
    }),
    case("an authority of the database that is not there", CONFIGURATION, "`sslrootcert` /none/ca.pem", |dir| {
        let url = "postgres://doctor@127.0.0.1:1/doctor?sslmode=verify-full&sslrootcert=/none/ca.pem";
        replace(dir, "store = \"doctor.db\"", &format!("store = \"{url}\""));
    }),
    case("no shared directory", UNREACHABLE, "create the directory", |dir| fs::remove_dir(dir.path("data")).unwrap()),
    case("a shared directory that is a file", UNREACHABLE, "opening the shared directory", |dir| {
        fs::remove_dir(dir.path("data")).unwrap();
        dir.write("data", "");
    }),
    // Files cannot be created there, whoever tries.
    case("a shared directory that cannot be written", UNREACHABLE, "writing to", |dir| {
        replace(dir, "data = \"data\"", "data = \"/proc\"");
    }),
    case("two faults at once", CONFIGURATION, "create the directory", |dir| {
        fs::remove_dir(dir.path("data")).unwrap();
        section(dir, "[web]\nlisten = \"127.0.0.1:0\"\ntls = { certificate = \"none.pem\", key = \"none.key\" }");
    }),
];

const ADDRESSES: [Case; 7] = [
    case("a certificate for agents that is not there", CONFIGURATION, "for the TLS of agents", |dir| {
        section(dir, "[agents]\nlisten = \"127.0.0.1:0\"\ntls = { certificate = \"none.pem\", key = \"none.key\" }");
    }),
    case("an address of another machine", CONFIGURATION, "cannot listen on 192.0.2.1:7443 for agents", |dir| {
        section(dir, "[agents]\nlisten = \"192.0.2.1:7443\"");
    }),
    case("metrics on an address of another machine", CONFIGURATION, "for Prometheus", |dir| {
        section(dir, "[metrics]\nlisten = \"192.0.2.1:9100\"");
    }),
    case("no certificate", CONFIGURATION, "cannot use the certificate and key of [web.tls]: cannot read", |dir| {
        section(dir, "[web]\nlisten = \"127.0.0.1:0\"\ntls = { certificate = \"none.pem\", key = \"none.key\" }");
    }),
    case("a key that is none", CONFIGURATION, "not valid PEM", |dir| {
        dir.write("web.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        dir.write("web.key", "secret");
        section(dir, "[web]\nlisten = \"127.0.0.1:0\"\ntls = { certificate = \"web.pem\", key = \"web.key\" }");
    }),
    case("an open API without a token", CONFIGURATION, "doctor token create", |dir| {
        section(dir, "[web]\nlisten = \"0.0.0.0:0\"");
    }),
    case("tokens that cross the network unencrypted", CONFIGURATION, "plain = true", |dir| {
        dir.expect(0, &["token", "create", "ops", "--yes"]);
        section(dir, "[web]\nlisten = \"0.0.0.0:0\"");
    }),
];

const CLUSTERS: [Case; 10] = [
    case("a program that does not exist", CONFIGURATION, "is not a program", |dir| {
        replace(dir, "node = \"here\"", "node = \"here\"\ndoctor_node = \"none/doctor-node\"");
    }),
    case("a program that cannot be executed", CONFIGURATION, "is not executable", |dir| {
        dir.write("doctor-node", "");
        replace(dir, "node = \"here\"", "node = \"here\"\ndoctor_node = \"doctor-node\"");
    }),
    case("a load limit of zero", CONFIGURATION, "`max_load_per_core` is 0", |dir| {
        replace(dir, "max_load_per_core = 1000.0", "max_load_per_core = 0.0");
    }),
    case("a state directory below a file", CONFIGURATION, "is not a directory", |dir| {
        dir.write("file", "");
        replace(dir, "node = \"here\"", "node = \"here\"\nstate = \"file/state\"");
    }),
    case("no programs of Slurm", CONFIGURATION, "there is no program scontrol in", |dir| {
        backend(dir, "[backend.slurm]\nprograms = \"none\"");
    }),
    case("no file of hosts", CONFIGURATION, "hostfile", |dir| {
        backend(dir, "[backend.ssh]\nstate = \"s\"\nhostfile = \"hostfile\"");
    }),
    case("hosts that cannot be read", CONFIGURATION, "`hosts`: line 1", |dir| {
        backend(dir, "[backend.ssh]\nstate = \"s\"\nhosts = \"node[1-\"");
    }),
    case("no configuration of ssh", CONFIGURATION, "`ssh_config`", |dir| {
        backend(dir, "[backend.ssh]\nstate = \"s\"\nhosts = \"node1\"\nssh_config = \"none\"");
    }),
    case("no token for dstack", CONFIGURATION, "no token", |dir| {
        backend(dir, "[backend.dstack]\nurl = \"http://127.0.0.1:1\"\nproject = \"main\"\ntoken_file = \"none\"");
    }),
    #[cfg(not(feature = "kubernetes"))]
    case("a cluster that this build does not know", CONFIGURATION, "without the Kubernetes client", |dir| {
        backend(dir, "[backend.kubernetes]");
    }),
    #[cfg(feature = "kubernetes")]
    case("no kubeconfig", CONFIGURATION, "open the Kubernetes backend", |dir| {
        backend(dir, "[backend.kubernetes]\nkubeconfig = \"none\"");
    }),
];

/// Returns every path below a directory with its content. Of a database only the name: SQLite writes to its own pages and
/// its log when it is opened, even if nothing is stored.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut left = vec![folder.to_owned()];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path.clone());
                all.insert(path.display().to_string(), Vec::new());
                continue;
            }
            let content = fs::read(&path).unwrap();
            let name = path.display().to_string();
            if content.starts_with(b"SQLite format 3") {
                all.insert(name, Vec::new());
            } else if !name.ends_with("-wal") && !name.ends_with("-shm") {
                all.insert(name, content);
            }
        }
    }
    all
}

/// Runs `serve` without a limit of cycles, until it ends by itself.
fn serve(workdir: &Workdir, what: &str) -> CommandOutput {
    let mut command = workdir.command(&["serve"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut child = Ended(Some(child));
    wait_until(&format!("{what}: serve ends by itself"), || child.process().try_wait().unwrap().is_some());
    CommandOutput::from_output(&child.0.take().unwrap().wait_with_output().unwrap())
}

/// A process that does not outlive the test.
struct Ended(Option<Child>);

impl Ended {
    fn process(&mut self) -> &mut Child {
        self.0.as_mut().expect("it is taken only at the end")
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ended = child.kill();
            let _status = child.wait();
        }
    }
}

#[track_caller]
fn refuses_the_same(case: &Case) {
    let workdir = Workdir::local();
    (case.spoil)(&workdir);
    both_refuse(&workdir, case.what, case.code, case.says);
}

#[track_caller]
fn both_refuse(workdir: &Workdir, what: &str, code: i32, says: &str) {
    let before = contents(&workdir.path(""));
    let checked = workdir.doctor(&["config", "check"]);
    assert_eq!(before, contents(&workdir.path("")), "{what}: config check changed something");
    let served = serve(workdir, what);
    assert_eq!((checked.code, served.code), (code, code), "{what}\n{}\n{}", checked.err, served.err);
    assert_eq!(checked.err, served.err, "{what}: the words differ");
    assert!(checked.err.contains(says), "{what}: `{says}` is not in:\n{}", checked.err);
    assert!(!checked.out.contains("is valid"), "{what}: {}", checked.out);
}

#[test]
fn bad_files_are_refused_by_check_and_serve_in_the_same_words() {
    FILES.iter().for_each(refuses_the_same);
}

#[test]
fn bad_stores_and_shares_are_refused_by_check_and_serve_in_the_same_words() {
    STORE_AND_SHARE.iter().for_each(refuses_the_same);
}

#[test]
fn bad_addresses_are_refused_by_check_and_serve_in_the_same_words() {
    ADDRESSES.iter().for_each(refuses_the_same);
}

#[test]
fn bad_clusters_are_refused_by_check_and_serve_in_the_same_words() {
    CLUSTERS.iter().for_each(refuses_the_same);
}

#[test]
fn an_address_that_is_in_use_is_refused_and_so_is_one_that_is_named_twice() {
    let workdir = Workdir::local();
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = holder.local_addr().unwrap();
    section(&workdir, &format!("[agents]\nlisten = \"{at}\""));
    both_refuse(&workdir, "an address in use", CONFIGURATION, "in use");
    drop(holder);
    section(&workdir, &format!("[metrics]\nlisten = \"{at}\""));
    both_refuse(&workdir, "an address named twice", CONFIGURATION, "for Prometheus");
}

#[test]
fn the_addresses_of_the_running_service_do_not_make_its_configuration_bad() {
    let workdir = Workdir::local();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    section(&workdir, &format!("[agents]\nlisten = \"{free}\""));
    let mut service = Service::start(&workdir);
    service.wait_for_line("agent endpoint listening");
    workdir.expect(0, &["config", "check"]).stdout_contains(&format!("could not try to listen on {free}: doctor runs"));
    // A second service is refused all the same.
    let second = serve(&workdir, "a second service");
    assert_eq!(second.code, CONFIGURATION, "{}", second.err);
    second.stderr_contains("in use");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn a_secret_that_is_missing_is_a_remark_and_not_a_refusal() {
    let workdir = Workdir::local();
    section(&workdir, "[alerts.receivers.chat]\nslack = { url = { file = \"none\" } }");
    workdir.expect(1, &["config", "check"]).stdout_contains("alerts to chat cannot be sent: cannot read");
    workdir.expect(0, &["serve", "--cycles", "1"]).stderr_contains("alerts to chat cannot be sent: cannot read");
}

#[test]
fn a_good_configuration_is_accepted_by_both_and_checking_it_creates_nothing() {
    let workdir = Workdir::local();
    let before = contents(&workdir.path(""));
    workdir.expect(0, &["config", "check"]).stdout_contains("is valid.");
    assert_eq!(before, contents(&workdir.path("")));
    workdir.expect(0, &["serve", "--cycles", "1"]);
    // The store exists now, and no process has it open. A job of that cycle may still write its result.
    let store = || contents(&workdir.path("")).into_iter().filter(|(path, _)| path.contains("doctor.db"));
    let before: Vec<(String, Vec<u8>)> = store().collect();
    assert!(!before.is_empty());
    workdir.expect(0, &["config", "check"]).stdout_contains("is valid.");
    assert!(store().eq(before), "there are other files");
    // The files can be read without the machine on which the service runs.
    replace(&workdir, "data = \"data\"", "data = \"none\"");
    workdir.expect(0, &["config", "check", "--files-only"]).stdout_contains("is valid.");
}
