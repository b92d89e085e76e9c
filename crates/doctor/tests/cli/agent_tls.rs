//! Agents report over TLS: the real agent and the real controller on loopback, with good certificates and every kind of bad one.

use std::{
    fs::{self, File},
    io::Write,
    net::TcpStream,
    os::unix::fs::MetadataExt,
    process::{Command, Stdio},
};

use doctor_testbed::certificates::{Authority, Issued, Validity};

use crate::{
    this_machine::Service,
    workdir::{CommandOutput, Workdir, doctor_node, wait_until},
};

const OFF_THE_BUS: &str = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.";
const MACHINE_CHECK: &str = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400";

/// A cluster of one node with an agent endpoint, and a recorded machine for agents to check.
struct TlsFixture {
    workdir: Workdir,
    port: u16,
}

impl TlsFixture {
    /// `agents` are further lines of the section of the endpoint.
    fn new(agents: &str) -> Self {
        let workdir = Workdir::local();
        let port = doctor_testbed::ports::reserve_one().unwrap();
        workdir.write("busy", "");
        let section = format!("[agents]\nlisten = \"127.0.0.1:{port}\"\n{agents}\n[backend");
        let config = workdir.read("doctor.toml").replace("[backend", &section);
        workdir.write("doctor.toml", &format!("{config}busy_file = \"busy\"\n"));
        for directory in ["machine/dev", "machine/proc/sys/kernel/random"] {
            fs::create_dir_all(workdir.path(directory)).unwrap();
        }
        workdir.write("machine/dev/kmsg", "6,1,1000,-;Linux version 6.8\n");
        workdir.write("machine/proc/uptime", "1000000.00 5.0\n");
        workdir.write("machine/proc/sys/kernel/random/boot_id", "8a5b1c9e-5d0e-4a77-9d3c-1f7a1f7a1f7a\n");
        Self { workdir, port }
    }

    fn serve(&self) -> Service {
        let mut service = Service::start(&self.workdir);
        service.wait_for_log("agent endpoint listening");
        service
    }

    fn enroll(&self) {
        self.workdir.expect(0, &["agent", "enroll", "here", "--out", "keys", "--yes"]);
    }

    fn command(&self, state: &str, args: &[&str]) -> Command {
        let mut command = Command::new(doctor_node());
        command.args(["agent", "--credential", "keys/here.key", "--root", "machine", "--state", state]).args(args);
        command.current_dir(self.workdir.path("")).stdin(Stdio::null()).env_clear();
        command
    }

    /// Starts an agent with its own state directory, so that several can run at once.
    fn agent(&self, state: &str, args: &[&str]) -> Service {
        Service::spawn(self.command(state, args))
    }

    fn write_certificate(&self, issued: &Issued) {
        // The key first: a controller that reads in between keeps the pair that it has.
        self.workdir.write("tls.key", &issued.key);
        self.workdir.write("tls.crt", &issued.certificate);
    }

    /// Connects until the controller logs this once more: it looks for a changed certificate when a client connects, every few seconds.
    #[track_caller]
    fn wait_for_reload(&self, service: &mut Service, logged: &str) {
        let before = service.count_in_log(logged);
        wait_until(logged, || {
            drop(TcpStream::connect(("127.0.0.1", self.port)));
            service.count_in_log(logged) > before
        });
    }

    fn fingerprint(&self) -> String {
        let view = self.workdir.json(&["agent", "certificate"]);
        view["fingerprint"].as_str().unwrap().to_owned()
    }

    fn reports(&self) -> bool {
        self.workdir.json(&["agent", "list"])[0]["state"] == "reports"
    }

    fn append_kernel_log(&self, sequence: u32, text: &str) {
        let mut log = File::options().append(true).open(self.workdir.path("machine/dev/kmsg")).unwrap();
        writeln!(log, "3,{sequence},999999000000,-;{text}").unwrap();
    }

    fn has_finding(&self, text: &str) -> bool {
        self.workdir.json(&["why", "here"])["open_findings"].to_string().contains(text)
    }
}

#[test]
fn a_controller_makes_its_certificate_at_the_first_start_and_enrolment_pins_its_key() {
    let fixture = TlsFixture::new("plain = false");
    let workdir = &fixture.workdir;
    workdir.expect(3, &["agent", "certificate"]).stderr_contains("`doctor serve` makes it");
    workdir.expect(0, &["config", "check"]);
    assert!(!workdir.path("agents.key").exists(), "a check changes nothing");
    let mut service = Service::start(workdir);
    service.wait_for_log("made a certificate for the agent endpoint");
    service.wait_for_log("agent endpoint listening");
    assert_eq!(fs::metadata(workdir.path("agents.key")).unwrap().mode() & 0o777, 0o600);

    fixture.enroll();
    let pinned = fixture.fingerprint();
    assert!(workdir.read("keys/here.key").contains(&format!("fingerprints = [\"{pinned}\"]")));
    let mut agent = fixture.agent("agent", &[]);
    agent.wait_for_log(&format!("reporting as here to https://127.0.0.1:{}", fixture.port));
    wait_until("a report", || fixture.reports());

    // Another server's key, and none at all.
    let other = format!("sha256:{}", "00".repeat(32));
    let mut misled = fixture.agent("misled", &["--fingerprint", &other]);
    let line = misled.wait_for_line("is not trusted");
    assert!(line.contains(&pinned) && line.contains("`doctor agent certificate`"), "{line}");
    let mut plain = fixture.agent("plain", &["--controller", &format!("http://127.0.0.1:{}", fixture.port)]);
    plain.wait_for_log("it expects TLS: use https://");
    drop((misled, plain));

    // A restart keeps the certificate.
    assert_eq!(service.stop().0, Some(0));
    let mut service = fixture.serve();
    assert_eq!(fixture.fingerprint(), pinned);
    fixture.append_kernel_log(2, OFF_THE_BUS);
    wait_until("the finding", || fixture.has_finding("fallen off the bus"));
    let (code, log) = service.stop();
    assert!(code == Some(0) && !log.contains("made a certificate"), "{log}");
    service = fixture.serve();
    assert_eq!((agent.stop().0, service.stop().0), (Some(0), Some(0)));
}

#[test]
fn a_key_is_changed_without_a_restart_and_without_a_silent_agent() {
    let fixture = TlsFixture::new("plain = false");
    let workdir = &fixture.workdir;
    // Enrolment before the first start makes the certificate, too.
    fixture.enroll();
    let old = fixture.fingerprint();
    let mut service = fixture.serve();
    let mut agent = fixture.agent("agent", &[]);
    wait_until("a report", || fixture.reports());

    workdir.expect(2, &["agent", "certificate", "--switch", "--yes"]).stderr_contains("--prepare");
    workdir.expect(0, &["agent", "certificate", "--prepare", "--yes"]).stdout_contains("not in use yet");
    let next = workdir.json(&["agent", "certificate"])["next"].as_str().unwrap().to_owned();
    assert_eq!(fixture.fingerprint(), old);
    // An enrolment now has both keys.
    fixture.enroll();
    assert!(workdir.read("keys/here.key").contains(&format!("fingerprints = [\"{old}\", \"{next}\"]")));
    agent.reload();
    agent.wait_for_log("the changed configuration is in force");

    workdir.expect(0, &["agent", "certificate", "--switch", "--yes"]).stdout_contains(&next);
    assert_eq!(fixture.fingerprint(), next);
    fixture.wait_for_reload(&mut service, "certificate reloaded");
    let mut misled = fixture.agent("misled", &["--fingerprint", &old]);
    misled.wait_for_log("is not trusted");
    drop(misled);
    fixture.append_kernel_log(2, OFF_THE_BUS);
    wait_until("a finding with the new key", || fixture.has_finding("fallen off the bus"));
    let (code, output) = agent.stop();
    assert!(code == Some(0) && !output.contains("is not trusted"), "{output}");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_certificate_is_accepted_only_from_a_trusted_authority_for_this_name_and_at_this_time() {
    let (authority, other) = (Authority::new(), Authority::new());
    let fixture = TlsFixture::new("tls = { certificate = \"tls.crt\", key = \"tls.key\" }");
    let workdir = &fixture.workdir;
    workdir.write("ca.crt", &authority.certificate);
    workdir.write("other-ca.crt", &other.certificate);
    fixture.write_certificate(&authority.issue(&["localhost"], Validity::Now));
    let mut service = fixture.serve();
    fixture.enroll();
    assert!(!workdir.read("keys/here.key").contains("fingerprints"), "the key of a site's certificate changes");
    let refused = CommandOutput::from_output(&fixture.command("none", &[]).output().unwrap());
    assert!(refused.code != 0, "{}", refused.err);
    refused.stderr_contains("cannot be authenticated").stderr_contains("`ca_file`");

    let by_name = format!("https://localhost:{}", fixture.port);
    let agent = fixture.agent("agent", &["--ca-file", "ca.crt", "--controller", &by_name]);
    wait_until("a report", || fixture.reports());
    let mut misled = fixture.agent("misled", &["--ca-file", "other-ca.crt", "--controller", &by_name]);
    misled.wait_for_log("is not trusted: invalid peer certificate: BadSignature");
    drop(misled);
    // Without --controller it calls the address of the credential, for which the certificate is not.
    let mut misled = fixture.agent("misled", &["--ca-file", "ca.crt"]);
    misled.wait_for_log("not valid for name \"127.0.0.1\"");
    drop(misled);

    // Each of these continues the numbering of the reports: a second agent of a node would repeat numbers.
    assert_eq!(agent.stop().0, Some(0));
    fixture.write_certificate(&authority.issue(&["localhost"], Validity::Expired));
    fixture.wait_for_reload(&mut service, "certificate reloaded");
    let mut late = fixture.agent("agent", &["--ca-file", "ca.crt", "--controller", &by_name]);
    late.wait_for_log("certificate expired");
    fixture.append_kernel_log(2, OFF_THE_BUS);
    assert_eq!(late.stop().0, Some(0));
    // A pinned key is accepted on any date and by any name.
    let expired = fixture.fingerprint();
    let pinned = fixture.agent("agent", &["--fingerprint", &expired]);
    wait_until("the finding of the agent that pins the key", || fixture.has_finding("fallen off the bus"));
    assert_eq!(pinned.stop().0, Some(0));

    // A renewed certificate is used without a restart of either, and half a certificate leaves the last good one in use.
    let mut agent = fixture.agent("agent", &["--ca-file", "ca.crt", "--controller", &by_name]);
    agent.wait_for_log("certificate expired");
    fixture.write_certificate(&authority.issue(&["localhost"], Validity::Now));
    agent.wait_for_log("accepts reports again");
    workdir.write("tls.crt", "-----BEGIN CERTIFICATE-----\n");
    fixture.wait_for_reload(&mut service, "cannot reload the certificate");
    fixture.append_kernel_log(3, MACHINE_CHECK);
    wait_until("a report with the last good one", || fixture.has_finding("Machine Check"));
    assert_eq!((agent.stop().0, service.stop().0), (Some(0), Some(0)));
}

#[test]
fn reports_cross_a_network_unencrypted_only_if_both_sides_say_so() {
    let fixture = TlsFixture::new("");
    let workdir = &fixture.workdir;
    // On loopback nothing crosses a network.
    fixture.enroll();
    assert!(workdir.read("keys/here.key").contains(&format!("controller = \"http://127.0.0.1:{}\"", fixture.port)));
    workdir.expect(1, &["agent", "certificate"]).stderr_contains("plain = false");

    let with = |agents: &str| {
        let config = workdir.read("doctor.toml");
        let section = format!("listen = \"127.0.0.1:{}\"", fixture.port);
        let path = "other.toml";
        workdir.write(path, &config.replace(&section, agents));
        path
    };
    let encrypted = with("listen = \"0.0.0.0:0\"\nurl = \"https://ctl.example:7443\"");
    let output = workdir.expect(0, &["agent", "enroll", "there", "--config", encrypted, "--yes"]);
    output.stdout_contains("fingerprints = [\"sha256:").stdout_contains("https://ctl.example:7443");
    let mixed = with("listen = \"0.0.0.0:0\"\nurl = \"http://ctl.example:7443\"");
    workdir.expect(4, &["config", "check", "--config", mixed]).stderr_contains("write https://, or set `plain = true`");
    let plain = with("listen = \"0.0.0.0:0\"\nplain = true\nurl = \"http://ctl.example:7443\"");
    workdir.expect(0, &["agent", "enroll", "there", "--out", "plain-keys", "--config", plain, "--yes"]);
    let mut service = Service::spawn(workdir.command(&["serve", "--config", plain]));
    service.wait_for_log("agents' reports cross the network unencrypted");
    drop(service);

    let agent = |args: &[&str]| {
        let mut command = Command::new(doctor_node());
        command
            .args(["agent", "--credential", "plain-keys/there.key", "--state", "there", "--root", "machine"])
            .args(args);
        command.current_dir(workdir.path("")).stdin(Stdio::null()).env_clear();
        command
    };
    let refused = CommandOutput::from_output(&agent(&[]).output().unwrap());
    assert!(refused.code != 0, "{}", refused.err);
    refused.stderr_contains("http://ctl.example:7443").stderr_contains("`plain = true`").stderr_contains("https://");
    let mut allowed = Service::spawn(agent(&["--plain"]));
    allowed.wait_for_log("reporting as there to http://ctl.example:7443");
    assert_eq!(allowed.stop().0, Some(0));
}
