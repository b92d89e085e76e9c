//! Commands through the API of a controller: the same output and exit codes as beside the store, and changes with their
//! plan and confirmation.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    api::KillOnDrop,
    this_machine::Service,
    workdir::{CommandOutput, Workdir, wait_until},
};

const STORE: &str = "demo/doctor.db";

/// A simulated cluster behind the API, whose time stands nearly still, and its store.
struct Demo {
    workdir: Workdir,
    address: String,
    _running: KillOnDrop,
}

impl Demo {
    fn start() -> Self {
        let workdir = Workdir::new();
        // A month in which a case is open at the end.
        let words = "demo --nodes 24 --days 3 --seed 2 --dir demo --serve --listen 127.0.0.1:0 --speed 1 --json";
        let args: Vec<&str> = words.split(' ').collect();
        let mut child = workdir.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let out = child.stdout.take().unwrap();
        let running = KillOnDrop(child);
        let mut printed = String::new();
        let address = BufReader::new(out).lines().map_while(Result::ok).find_map(|line| {
            printed.push_str(&line);
            Some(line.split_once("http://")?.1.split('/').next()?.to_owned())
        });
        let address = address.unwrap_or_else(|| panic!("the output has no URL: {printed}"));
        Self { workdir, address, _running: running }
    }

    /// Runs a command beside the store.
    fn here(&self, args: &[&str]) -> CommandOutput {
        self.workdir.doctor(&[args, &["--store", STORE]].concat())
    }

    /// Runs a command through the API.
    fn remote(&self, args: &[&str]) -> CommandOutput {
        let url = format!("http://{}", self.address);
        let mut all = [args, &["--server", &url]].concat();
        if self.workdir.path("token").exists() && !args.contains(&"--token-file") {
            all.extend(["--token-file", "token"]);
        }
        self.workdir.doctor(&all)
    }

    /// Asserts that a command prints the same and exits with the same code in both ways, as text and as JSON.
    #[track_caller]
    fn same(&self, args: &[&str]) -> CommandOutput {
        for flags in [&["--json"][..], &[]] {
            let args = [args, flags].concat();
            let mut last = None;
            // A cycle between the two would change the output of both.
            wait_until("two equal outputs", || {
                let before = self.here(&args);
                let remote = self.remote(&args);
                let is_still = parts(&self.here(&args)) == parts(&before);
                last = Some((before, remote));
                is_still
            });
            let (here, remote) = last.unwrap();
            assert_eq!(parts(&remote), parts(&here), "doctor {}", args.join(" "));
            if flags.is_empty() {
                return remote;
            }
        }
        unreachable!("the text is compared last")
    }

    /// Creates a token and has the next commands use it.
    fn use_token(&self, name: &str, role: &str) {
        let created = self.workdir.json(&["token", "create", name, "--role", role, "--yes", "--store", STORE]);
        self.workdir.write("token", created["token"].as_str().unwrap());
        wait_until("the token is known", || self.remote(&["breaker", "show"]).code == 0);
    }

    /// Posts a body to the endpoint of the command line, and returns the status and the error's code.
    fn post(&self, headers: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let head = format!(
            "POST /api/v1/cli HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n"
        );
        write!(stream, "{head}{headers}\r\n{body}").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        let body: Value = serde_json::from_str(body).unwrap_or_default();
        let code = body["error"]["code"].as_str().unwrap_or_default().to_owned();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), code)
    }
}

fn parts(output: &CommandOutput) -> (i32, &str, &str) {
    (output.code, &output.out, &output.err)
}

/// Returns the ids of open cases.
fn open_cases(demo: &Demo) -> Vec<String> {
    let cases: Value = serde_json::from_str(&demo.here(&["cases", "--json"]).out).unwrap();
    cases.as_array().unwrap().iter().map(|case| case["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn commands_through_the_api_are_the_commands_beside_the_store() {
    let demo = Demo::start();
    reading_is_the_same(&demo);
    reports_logs_and_bundles_are_written_here(&demo);
    hostile_requests_are_rejected(&demo);
    commands_that_need_this_machine_are_refused(&demo);
    tokens_are_required_and_roles_hold(&demo);
    changes_are_planned_confirmed_and_refused(&demo);
    cases_are_muted(&demo);
    demo.same(&["status"]);
    demo.same(&["audit"]);
}

fn reading_is_the_same(demo: &Demo) {
    for line in [
        "status",
        "nodes",
        "nodes node[001-003] node01*",
        "nodes state=in-service",
        "why node001",
        "why node001 --audit 2",
        "history --limit 20",
        "history node001 node002 --test storage --since 2d",
        "cases",
        "cases --all --limit 3",
        "audit --limit 7",
        "audit node001",
        "report --since 2d",
        "report --last day --format markdown",
        "report --format html",
        "plan",
        "plan --all",
        "plan node001",
        "explain",
        "explain disk-space",
        "explain xid 79",
        "explain suites",
        "breaker show",
        "agent list",
        "alert list --all",
        // Errors, with their hints and exit codes.
        "why node999",
        "nodes pool=none",
        "history --since yesterday",
        "explain spoon",
        "explain xid 999",
        "log r0000000000009",
        "audit node999",
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        demo.same(&args);
    }
    // Mistakes in the command line never leave this machine.
    assert_eq!(demo.remote(&["frobnicate"]).code, 2);
    assert_eq!(demo.remote(&["status", "--help"]).code, 0);
}

fn reports_logs_and_bundles_are_written_here(demo: &Demo) {
    let history: Value = serde_json::from_str(&demo.here(&["history", "--limit", "500", "--json"]).out).unwrap();
    let run = history.as_array().unwrap().iter().find_map(|row| row["run"].as_str()).expect("a run").to_owned();
    let log = demo.same(&["log", &run]);
    assert_eq!(parts(&demo.remote(&["log", &run, "--follow"])), parts(&log), "an ended run is not waited for");

    demo.remote(&["report", "--format", "html", "--out", "remote.html"]).stderr_contains("wrote remote.html");
    demo.here(&["report", "--format", "html", "--out", "here.html"]);
    assert_eq!(demo.workdir.read("remote.html"), demo.workdir.read("here.html"));
    assert_eq!(demo.remote(&["report", "--out", "x"]).code, 2);

    let cases: Value = serde_json::from_str(&demo.here(&["cases", "--all", "--json"]).out).unwrap();
    let case = cases[0]["id"].as_str().expect("the demo has a case").to_owned();
    let remote = demo.remote(&["bundle", &case, "--out", "bundle.tar.gz"]);
    let bytes = std::fs::read(demo.workdir.path("bundle.tar.gz")).unwrap();
    let here = demo.here(&["bundle", &case, "--out", "bundle.tar.gz"]);
    assert_eq!(parts(&remote), parts(&here));
    assert_eq!(bytes, std::fs::read(demo.workdir.path("bundle.tar.gz")).unwrap(), "the same archive");
    let unknown = demo.remote(&["bundle", "c0000000000009"]);
    assert_eq!(parts(&unknown), parts(&demo.here(&["bundle", "c0000000000009"])));
}

fn hostile_requests_are_rejected(demo: &Demo) {
    let json = "content-type: application/json\r\n";
    let args = |args: &[&str]| json!({ "args": args }).to_string();
    for hostile in [
        &["status", "--config", "/etc/shadow"][..],
        &["status", "--store", "/etc/shadow"],
        &["report", "--format", "html", "--out", "/tmp/doctor-test-must-not-exist"],
        &["rejudge", "--policy", "/etc/shadow"],
        &["db", "backup", "/tmp/doctor-test-must-not-exist"],
        &["hold", "node001", "--why", "x", "--yes"],
        &["fleet", "exec", "--", "id"],
        &["history", "--limit", "4294967295"],
        &["nodes", "n[0-99999]"],
        &["--help"],
    ] {
        assert_eq!(demo.post(json, &args(hostile)), (400, "command-line".to_owned()), "{hostile:?}");
    }
    assert!(!std::path::Path::new("/tmp/doctor-test-must-not-exist").exists());
    for (headers, body, expected) in [
        (json, r#"{"args": []}"#.to_owned(), (400, "bad-body")),
        (json, r#"{"args": ["status"], "store": "x"}"#.to_owned(), (400, "bad-body")),
        (json, "x".to_owned(), (400, "bad-body")),
        (json, json!({ "args": ["x".repeat(70_000)] }).to_string(), (413, "too-long")),
        ("content-type: text/plain\r\n", args(&["status"]), (415, "not-json")),
        ("content-type: application/json\r\norigin: https://evil.example\r\n", args(&["status"]), (403, "cross-site")),
    ] {
        let (status, code) = demo.post(headers, &body);
        assert_eq!((status, code.as_str()), expected, "{headers}");
    }
    assert_eq!(demo.post(json, &args(&["status"])), (200, String::new()));
}

fn commands_that_need_this_machine_are_refused(demo: &Demo) {
    for (line, part) in [
        ("serve", "`doctor serve` runs on this machine"),
        ("run", "`doctor run` runs on this machine"),
        ("db verify", "`doctor db verify` runs on this machine"),
        ("demo", "`doctor demo` runs on this machine"),
        ("sim compare", "`doctor sim compare` runs on this machine"),
        ("import x", "`doctor import` runs on this machine"),
        ("completions bash", "`doctor completions` runs on this machine"),
        ("config init", "`doctor config init` runs on this machine"),
        ("config check", "`doctor config check` needs the controller's machine"),
        ("token create x --yes", "`doctor token create` needs the controller's machine"),
        ("agent enroll n1 --yes", "`doctor agent enroll` needs the controller's machine"),
        ("alert test", "`doctor alert test` needs the controller's machine"),
        ("rejudge", "`doctor rejudge` needs the controller's machine"),
        ("bundle c0000000000009 --from-node", "`doctor bundle` needs the controller's machine"),
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        let output = demo.remote(&args);
        output.stderr_contains(part);
        assert_eq!((output.code, output.out.as_str()), (2, ""), "{line}");
    }
    let both = demo.workdir.expect(2, &["nodes", "--store", STORE, "--server", "http://127.0.0.1:1"]);
    both.stderr_contains("leave out --server");
    let unreachable = demo.workdir.expect(3, &["status", "--server", "http://127.0.0.1:1"]);
    unreachable.stderr_contains("cannot reach the controller at http://127.0.0.1:1");
    demo.workdir.expect(2, &["nodes", "--server", "doctor:7480"]).stderr_contains("https://doctor.example.com:7480");
    // The environment names a controller too, and a store on the command line precedes it.
    let mut command = demo.workdir.command(&["breaker", "show"]);
    let output = command.env("DOCTOR_SERVER", format!("http://{}", demo.address)).output().unwrap();
    assert_eq!(parts(&CommandOutput::from_output(&output)), parts(&demo.here(&["breaker", "show"])));
    let mut command = demo.workdir.command(&["breaker", "show", "--store", STORE]);
    let output = command.env("DOCTOR_SERVER", "http://127.0.0.1:1").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    // Until a token exists, nothing is changed through the API.
    let output = demo.remote(&["pause", "--why", "x", "--yes"]);
    assert_eq!(output.code, 3, "{}", output.err);
    output.stderr_contains("read-only").stderr_contains("doctor token create");
}

fn tokens_are_required_and_roles_hold(demo: &Demo) {
    demo.use_token("vi", "viewer");
    demo.same(&["nodes", "node001"]);
    demo.workdir.write("wrong", "doctor_token_wrong");
    demo.workdir.write("empty", "\n");
    let with = |file: &str| demo.remote(&["status", "--token-file", file]);
    for (file, part) in [
        ("wrong", "the token is unknown, expired or revoked"),
        ("empty", "empty holds no token"),
        ("missing", "reading the token in missing"),
    ] {
        let output = with(file);
        output.stderr_contains(part).stderr_contains("hint: `doctor token create NAME");
        assert_eq!((output.code, output.out.as_str()), (3, ""), "{file}");
    }
    let none = demo.workdir.expect(3, &["status", "--server", &format!("http://{}", demo.address)]);
    none.stderr_contains("sign in required").stderr_contains("doctor token create");
    for args in [&["hold", "node001", "--why", "x", "--yes"][..], &["config", "show"], &["token", "list"]] {
        let output = demo.remote(args);
        assert_eq!(output.code, 3, "{}", output.err);
        output.stderr_contains("the role operator is required; the caller has the role viewer");
    }
    demo.use_token("op", "operator");
    demo.same(&["config", "show"]);
    demo.same(&["token", "list"]);
}

fn changes_are_planned_confirmed_and_refused(demo: &Demo) {
    for line in [
        "hold node[001-002] --why fans",
        "release node001 --why done",
        "quarantine node001 --why smoke --drain",
        "test node001 --test storage,dl",
        "test --nodes node[001-004] collective",
        "pause --why upgrade",
        "pause --pool gpu --why upgrade",
        "breaker close --why looked",
        "hold node999 --why x",
        "hold node001 --until yesterday --why x",
        "resume --why x",
        "cases ack c0000000000009",
    ] {
        // Without a terminal and without --yes: the plan, and nothing else.
        let args: Vec<&str> = line.split(' ').collect();
        let (remote, here) = (demo.remote(&args), demo.here(&args));
        assert_eq!(parts(&remote), parts(&here), "{line}");
    }
    let audit: Value = serde_json::from_str(&demo.here(&["audit", "--json"]).out).unwrap();
    let done = |row: &&Value| row["by"] == "op" && row["what"] != "api-refused";
    let rows: Vec<&Value> = audit.as_array().unwrap().iter().filter(done).collect();
    assert!(rows.is_empty(), "nothing was done: {rows:#?}");
    let unknown = demo.remote(&["test", "node001", "--test", "spoon", "--why", "x"]);
    unknown.stderr_contains("no test or suite `spoon`").stderr_contains("known: dl, nccl, storage");
    assert_eq!(unknown.code, 2);

    let held = demo.remote(&["hold", "node[001-002]", "--why", "new fans", "--yes"]);
    held.stdout_contains("Held 2 nodes").stdout_contains("Why: new fans (op)").stdout_contains("Next: `doctor release");
    assert_eq!((held.code, held.err.as_str()), (0, ""), "{}", held.err);
    let hold: Value = serde_json::from_str(&demo.here(&["why", "node001", "--json"]).out).unwrap();
    assert_eq!(hold["hold"]["by"], "op", "the name of the token");
    demo.here(&["audit", "--limit", "10"]).stdout_contains("api-hold");
    let released = demo.remote(&["release", "node002", "--why", "done", "--yes", "--json"]);
    let released: Value = serde_json::from_str(&released.out).unwrap();
    assert_eq!((released["by"].as_str(), released["why"].as_str()), (Some("op"), Some("done")), "{released}");
    let by = demo.remote(&["release", "node001", "--why", "done", "--by", "ann", "--yes"]);
    by.stderr_contains("the audit trail records the name of the token");
    assert_eq!(by.code, 2);

    // Commands with --yes are carried out although others change the node meanwhile.
    std::thread::scope(|scope| {
        for operator in 0..3 {
            scope.spawn(move || {
                for time in 0..3 {
                    let why = format!("{operator} {time}");
                    let output = demo.remote(&["hold", "node003", "--why", &why, "--yes"]);
                    assert_eq!(output.code, 0, "{}", output.err);
                }
            });
        }
    });
    for args in [
        &["pause", "--pool", "gpu", "--why", "upgrade", "--yes"][..],
        &["resume", "--pool", "gpu", "--why", "done", "--yes"],
        &["breaker", "close", "--why", "looked", "--yes"],
        &["test", "node004", "--test", "storage", "--yes"],
        &["quarantine", "node007", "--why", "smoke", "--yes"],
    ] {
        let output = demo.remote(args);
        assert_eq!(output.code, 0, "{args:?}: {}", output.err);
    }
}

fn cases_are_muted(demo: &Demo) {
    let cases = open_cases(demo);
    let case = cases.first().expect("the demo has an open case").as_str();
    for args in [&["cases", "ack", case][..], &["cases", "ack", case, "--why", "known"]] {
        assert_eq!(parts(&demo.remote(args)), parts(&demo.here(args)), "{args:?}");
    }
    demo.remote(&["cases", "ack", case, "--yes"]).stdout_contains("Acknowledged.").stdout_contains("Why: seen (op)");
    demo.remote(&["cases", "snooze", case, "--why", "known", "--yes"]).stdout_contains("Snoozed.");
    demo.here(&["audit", "--limit", "10"]).stdout_contains("api-acknowledge").stdout_contains("snooze");
}

/// Creates a certificate for localhost; returns `false` if this machine cannot.
fn certificate(workdir: &Workdir) -> bool {
    let args = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
                -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:false -keyout key.pem -out cert.pem";
    let mut openssl = Command::new("openssl");
    let output = openssl.args(args.split_whitespace()).current_dir(workdir.path("")).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn a_context_names_a_controller_with_its_certificate_and_token() {
    let workdir = Workdir::local();
    if !certificate(&workdir) {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "openssl is needed");
        println!("NOT RUN: the remote command line over TLS: openssl is not installed");
        return;
    }
    let web = "[web]\nlisten = \"127.0.0.1:0\"\ntls = { certificate = \"cert.pem\", key = \"key.pem\" }\n[backend";
    workdir.write("doctor.toml", &workdir.read("doctor.toml").replace("[backend", web));
    let created = workdir.json(&["token", "create", "ops", "--role", "operator", "--yes"]);
    let mut service = Service::start(&workdir);
    let line = service.wait_for_line("API listening");
    let port =
        line.split("at=").nth(1).unwrap().split_whitespace().next().unwrap().rsplit(':').next().unwrap().to_owned();
    let url = format!("https://localhost:{port}");
    workdir.write("ops.token", created["token"].as_str().unwrap());
    let base = ["breaker", "show", "--server", &url, "--token-file", "ops.token"];
    let untrusted = workdir.expect(3, &base);
    untrusted.stderr_contains("certificate").stderr_contains("--ca-file");
    let trusted = workdir.expect(0, &[&base[..], &["--ca-file", "cert.pem"]].concat());
    trusted.stdout_contains("The breaker is closed");
    workdir.expect(3, &[&base[..], &["--ca-file", "ops.token"]].concat()).stderr_contains("no certificate");

    // Without a contexts file there is nothing to list, and commands run here.
    workdir.expect(0, &["context", "list"]).stdout_contains("No contexts");
    let directory = workdir.path(".config/cluster-doctor");
    std::fs::create_dir_all(&directory).unwrap();
    let context = |name: &str, url: &str| {
        let [token, ca] = ["ops.token", "cert.pem"].map(|file| workdir.path(file).display().to_string());
        format!("[contexts.{name}]\nserver = \"{url}\"\ntoken_file = \"{token}\"\nca_file = \"{ca}\"\n")
    };
    let file = ".config/cluster-doctor/contexts.toml";
    workdir.write(file, &(context("prod", &url) + &context("gone", "https://localhost:1")));
    workdir.expect(0, &["context", "list"]).stdout_contains("prod").stdout_contains(&url);
    workdir.expect(2, &["context", "use", "pord"]).stderr_contains("known: gone, prod");
    wait_until("the node is observed", || workdir.doctor(&["why", "here", "--context", "prod"]).code != 2);
    workdir
        .expect(3, &["nodes", "--context", "gone"])
        .stderr_contains("cannot reach the controller at https://localhost:1");
    workdir.expect(2, &["nodes", "--context", "pord"]).stderr_contains("no context `pord`");
    workdir.expect(0, &["context", "use", "gone"]);
    workdir.expect(3, &["nodes"]).stderr_contains("https://localhost:1");
    workdir.expect(0, &["nodes", "--store", "doctor.db"]).stdout_contains("here");
    // What is of this machine stays here, and what would act on another store is refused.
    workdir.expect(0, &["completions", "bash"]);
    workdir.expect(2, &["token", "revoke", "ops", "--why", "x", "--yes"]).stderr_contains("the context gone is in use");
    workdir.expect(0, &["context", "use", "prod"]);
    workdir.expect(0, &["context", "show"]).stdout_contains("ops.token");
    assert!(!workdir.expect(0, &["context", "show", "--json"]).out.contains(created["token"].as_str().unwrap()));
    workdir.expect(0, &["hold", "here", "--why", "mine", "--yes"]).stdout_contains("Why: mine (ops)");
    assert_eq!(workdir.json(&["why", "here"])["hold"]["by"], "ops");
    assert_eq!(service.stop().0, Some(0));
    workdir.expect(3, &["nodes"]).stderr_contains("cannot reach the controller");
    workdir.expect(0, &["context", "use"]);
    workdir.expect(0, &["nodes"]).stdout_contains("here");
}
