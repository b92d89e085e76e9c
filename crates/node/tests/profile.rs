//! Detection of the machine type, on file trees and with a metadata service on the loopback interface.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::Path,
    process::{Command, Output},
    thread,
};

use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A machine as a file tree, with this many H100s on its bus.
fn machine(vendor: &str, product: &str, gpus: u32) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "proc/meminfo", "MemTotal: 2000000000 kB\nMemAvailable: 1900000000 kB\n");
    write(root.path(), "proc/uptime", "100000.00 900.00\n");
    write(root.path(), "proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n");
    write(root.path(), "sys/class/dmi/id/sys_vendor", &format!("{vendor}\n"));
    write(root.path(), "sys/class/dmi/id/product_name", &format!("{product}\n"));
    write(root.path(), "sys/class/dmi/id/chassis_asset_tag", "none\n");
    write(root.path(), "dev/kmsg", "6,1,0,-;booted\n");
    write(root.path(), "sys/bus/pci/devices/0000:00:00.0/uevent", "PCI_CLASS=60000\nPCI_ID=8086:0000\n");
    for gpu in 0..gpus {
        let uevent = "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n";
        write(root.path(), &format!("sys/bus/pci/devices/0000:{gpu:02x}:01.0/uevent"), uevent);
    }
    root
}

fn node(root: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(args).arg("--root").arg(root).args(["--nvml", "/no/such/library"]);
    command.env_remove("DOCTOR_SKU").env_remove("DOCTOR_LABEL").env_remove("DOCTOR_NODE_STATE").output().unwrap()
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Answers like Amazon's service, this many times.
fn aws(times: usize, instance_type: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for _ in 0..times * 2 {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let reader = BufReader::new(stream.try_clone().unwrap());
            let request = reader.lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            let request: Vec<_> = request.collect();
            let body = if request[0].starts_with("PUT") { "token" } else { instance_type };
            let length = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        }
    });
    url
}

#[test]
fn a_cloud_machine_queries_its_metadata_service_once_per_boot() {
    let root = machine("Amazon EC2", "not-a-type", 8);
    let state = tempfile::tempdir().unwrap();
    let state = state.path().to_str().unwrap();
    let url = aws(1, "p5en.48xlarge");
    for _ in 0..2 {
        let output = node(root.path(), &["profile", "show", "--metadata", &url, "--state", state]);
        let text = output_text(&output);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(text.contains("profile: p5en.48xlarge (by metadata)") && text.contains("efa_devices = 16"), "{text}");
    }
}

#[test]
fn without_the_metadata_service_the_other_facts_decide() {
    let root = machine("Amazon EC2", "p5.48xlarge", 8);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = node(root.path(), &["profile", "show", "--metadata", &format!("http://{closed}")]);
    let text = output_text(&output);
    assert!(text.contains("profile: p5.48xlarge (by product)") && text.contains("does not answer"), "{text}");
}

#[test]
fn without_a_cloud_no_service_is_queried_and_the_gpus_decide() {
    let root = machine("Supermicro", "SYS-821GE", 7);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let output = node(root.path(), &["profile", "show", "--json", "--metadata", &url]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["detection"]["found"]["sku"], "hgx-h100", "{json}");
    assert_eq!(json["detection"]["found"]["source"], "gpus");
    assert!(listener.accept().is_err(), "the metadata service was queried");
    // The operator's choice overrides detection.
    let output = node(root.path(), &["profile", "show", "--sku", "Standard_ND96isr_H100_v5"]);
    assert!(output_text(&output).contains("profile: nd96isr_h100_v5"), "{}", output_text(&output));
    let output = node(root.path(), &["profile", "show", "--sku", "none"]);
    assert_eq!(output.status.code(), Some(3), "{}", output_text(&output));
    let output = node(root.path(), &["profile", "show", "--sku", "p99"]);
    assert!(
        output.status.code() == Some(3) && output_text(&output).contains("p5.48xlarge"),
        "{}",
        output_text(&output)
    );
}

#[test]
fn checks_use_the_detected_profile_and_without_one_no_size_is_expected() {
    let root = machine("Supermicro", "SYS-1", 0);
    let memory = |args: &[&str]| {
        let output = node(root.path(), &[&["check", "memory", "--json"], args].concat());
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        json[0]["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(memory(&[]), "within-limits");
    assert_eq!(memory(&["--sku", "a4-highgpu-8g"]), "memory-small");
    assert_eq!(memory(&["--label", "a4-highgpu-8g"]), "memory-small");
    assert_eq!(memory(&["--sku", "none"]), "within-limits");
}

#[test]
fn a_learned_profile_fits_the_machine_it_was_learned_from() {
    let root = machine("Supermicro", "SYS 821GE", 8);
    let site = tempfile::tempdir().unwrap();
    let file = site.path().join("ours.toml");
    let out = file.to_str().unwrap();
    // Only the memory of this tree is a healthy machine's: nothing else is learnt.
    let output = node(root.path(), &["profile", "learn", "--anyway", "--out", out]);
    assert_eq!(output.status.code(), Some(0), "{}", output_text(&output));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("sku = \"sys-821ge\"") && text.contains("mem_total_bytes = 2048000000000"), "{text}");
    let directory = site.path().to_str().unwrap();
    let output = node(root.path(), &["profile", "show", "--profiles", directory]);
    assert!(output_text(&output).contains("profile: sys-821ge (by product)"), "{}", output_text(&output));
    let output = node(root.path(), &["profile", "diff", out]);
    assert_eq!(output.status.code(), Some(0), "{}", output_text(&output));

    write(root.path(), "proc/meminfo", "MemTotal: 1000000000 kB\nMemAvailable: 900000000 kB\n");
    let output = node(root.path(), &["profile", "diff", "sys-821ge", "--profiles", directory]);
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    assert!(output_text(&output).contains("less"), "{}", output_text(&output));
    let output = node(root.path(), &["profile", "diff", "no-such-thing"]);
    assert!(output.status.code() == Some(3) && output_text(&output).contains("neither a file nor a profile"));
}
