//! The cloud-init file that `doctor fleet cloud-init` prints: validated with cloud-init's own checker, and its scripts
//! run here with stand-ins for the GPU and disk tools.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::workdir::{CommandOutput, Workdir};

fn printed(workdir: &Workdir) -> String {
    let example = workdir.expect(0, &["fleet", "provision", "--example"]).out;
    let download =
        format!("[doctor_node]\nurl = \"https://example.com/doctor-node\"\nsha256 = \"{}\"\n[network]", "0".repeat(64));
    workdir.write("cluster.toml", &example.replace("[network]", &download));
    workdir.expect(0, &["fleet", "cloud-init", "cluster.toml"]).out
}

/// The machine's files below a directory, and a directory of stand-in programs.
struct Machine {
    workdir: Workdir,
}

impl Machine {
    fn new() -> Self {
        let workdir = Workdir::new();
        let config: Value = serde_saphyr::from_str(&printed(&workdir)).unwrap();
        for file in config["write_files"].as_array().unwrap() {
            let path = workdir.path("root").join(file["path"].as_str().unwrap().trim_start_matches('/'));
            write(&path, file["content"].as_str().unwrap(), file["permissions"].as_str().unwrap());
        }
        for folder in ["root/var/log", "root/mnt", "bin"] {
            fs::create_dir_all(workdir.path(folder)).unwrap();
        }
        Self { workdir }
    }

    fn fake_program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.workdir.path("bin").join(name);
        write(&path, &format!("#!/bin/sh\n{script}\n"), "0755");
        path
    }

    fn run(&self, script: &str, args: &[&str]) -> CommandOutput {
        let mut command = Command::new(self.workdir.path("root/opt").join(script));
        command.args(args).env_clear().env("ROOT", self.workdir.path("root"));
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.workdir.path("bin").display()));
        command.env("AZNHC", self.workdir.path("bin/aznhc")).env("DOCTOR_NODE", self.workdir.path("bin/doctor-node"));
        CommandOutput::from_output(&command.output().unwrap())
    }

    /// Returns the word in the last line of a status file.
    fn status(&self, name: &str) -> String {
        let text = self.workdir.read(&format!("root/var/log/{name}.log.status"));
        text.lines().last().unwrap().split(' ').nth(1).unwrap().to_owned()
    }
}

fn write(path: &Path, text: &str, mode: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(u32::from_str_radix(mode, 8).unwrap())).unwrap();
}

#[test]
fn cloud_init_schema_accepts_our_file_and_typos_that_it_ignores_are_found() {
    let workdir = Workdir::new();
    workdir.write("ours.yaml", &printed(&workdir));
    workdir.expect(0, &["fleet", "cloud-init", "--check", "ours.yaml"]).stdout_contains("known to cloud-init");
    let typo = workdir.read("ours.yaml").replace("runcmd:", "run_cmd:");
    workdir.write("slip.yaml", &typo);
    workdir
        .expect(4, &["fleet", "cloud-init", "--check", "slip.yaml"])
        .stderr_contains("`run_cmd`")
        .stderr_contains("similar: runcmd");
    if !Path::new("/usr/bin/cloud-init").exists() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "cloud-init is not installed");
        println!("NOT RUN: cloud-init's own checker: it is not installed; scripts/system.sh installs it");
        return;
    }
    let schema = |file: &str| {
        let ran = Command::new("/usr/bin/cloud-init")
            .args(["schema", "--config-file"])
            .arg(workdir.path(file))
            .output()
            .unwrap();
        (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
    };
    let (good, output) = schema("ours.yaml");
    assert!(good, "{output}");
    workdir.write("bad.yaml", &workdir.read("ours.yaml").replace("package_update: true", "package_update: [1]"));
    let (good, output) = schema("bad.yaml");
    assert!(!good && output.contains("package_update"), "{output}");
}

#[test]
fn aznhc_passes_only_if_it_reports_checks() {
    let machine = Machine::new();
    machine.run("run-aznhc.sh", &[]);
    assert_eq!(machine.status("aznhc-health"), "unknown", "it is not installed");
    let fault =
        "echo 'ERROR:  nhc:  Health check failed:  check_gpu_count: Expected 8 and found 7. FaultCode: NHC2009'";
    let could_not = "echo 'ERROR:  nhc:  Health check failed:  check_x: no tool. FaultCode: NHCNA'";
    let began = "echo 'Running health checks for Standard_ND96isr_H200_v5 SKU...'";
    let ended = "echo 'Health checks completed with exit code: 0.'";
    for (script, status) in [
        (began.to_owned(), "unknown"),
        (format!("{began}; {ended}"), "passed"),
        (ended.to_owned(), "unknown"),
        (format!("{began}; echo 'SUCCESS:  nhc:  Health check passed:  check_gpu_count: 8'"), "passed"),
        (format!("{began}; {fault}"), "failed"),
        (format!("{began}; {could_not}"), "unknown"),
        (format!("{began}; {could_not}; {fault}; exit 1"), "failed"),
        (format!("{began}; exit 1"), "unknown"),
        ("echo 'The vm SKU standard_d4 is currently not supported by Azure health checks.'".to_owned(), "unknown"),
        ("true".to_owned(), "unknown"),
    ] {
        machine.fake_program("aznhc", &script);
        machine.run("run-aznhc.sh", &[]);
        assert_eq!(machine.status("aznhc-health"), status, "{script}");
    }
    let log = machine.workdir.read("root/var/log/aznhc-health.log");
    assert!(log.contains("AzNHC is not installed") && log.contains("NHC2009"), "{log}");
}

#[test]
fn a_machine_is_healthy_only_if_all_three_checks_pass() {
    let machine = Machine::new();
    let aznhc = "echo 'Running health checks for Standard_X'; echo 'Health checks completed with exit code: 0.'";
    machine.fake_program("aznhc", aznhc);
    machine.fake_program("doctor-node", "test \"$1\" = check");
    machine.run("run-health-checks.sh", &[]);
    assert_eq!(machine.status("dcgmi-diag"), "unknown", "there is no dcgmi");
    assert_eq!(machine.status("node-health"), "unknown");

    let table = "echo '| Memory | Pass |'";
    machine.fake_program("dcgmi", &format!("test \"$1 $2 $3\" = 'diag -r 2' && {table}"));
    machine.run("run-dcgmi.sh", &[]);
    assert_eq!(
        (machine.status("dcgmi-diag"), machine.status("node-health")),
        ("passed".to_owned(), "healthy".to_owned())
    );
    for (script, status, health) in [
        (format!("{table}; echo '| PCIe | Fail - GPU 3 |'"), "failed", "unhealthy"),
        (format!("{table}; exit 226"), "unknown", "unknown"),
        ("true".to_owned(), "unknown", "unknown"),
        ("echo '| Denylist | Pass |'; echo '| Memory | Skip - All |'".to_owned(), "unknown", "unknown"),
    ] {
        machine.fake_program("dcgmi", &script);
        machine.run("run-dcgmi.sh", &["4"]);
        assert_eq!(
            (machine.status("dcgmi-diag").as_str(), machine.status("node-health").as_str()),
            (status, health),
            "{script}"
        );
    }
    machine.fake_program("dcgmi", table);
    machine.run("run-dcgmi.sh", &[]);
    for (code, status, health) in
        [("exit 1", "passed", "healthy"), ("exit 2", "failed", "unhealthy"), ("exit 3", "unknown", "unknown")]
    {
        machine.fake_program("doctor-node", code);
        machine.run("run-doctor-check.sh", &[]);
        assert_eq!(
            (machine.status("doctor-check").as_str(), machine.status("node-health").as_str()),
            (status, health),
            "{code}"
        );
    }
    // An old pass is unknown; an old failure still counts.
    machine.fake_program("doctor-node", "exit 0");
    for (verdict, health) in [("passed", "unknown"), ("failed", "unhealthy")] {
        machine.workdir.write("root/var/log/dcgmi-diag.log.status", &format!("2025-01-01T00:00:00Z {verdict}\n"));
        machine.run("run-doctor-check.sh", &[]);
        assert_eq!(machine.status("node-health"), health, "{verdict} long ago");
    }
    let refused = machine.run("run-dcgmi.sh", &["5"]);
    assert!(refused.code == 2 && refused.err.contains("expected 1 to 4"), "{}", refused.err);
}

#[test]
fn local_disks_become_an_array_once_and_nothing_is_overwritten() {
    let machine = Machine::new();
    let none = machine.run("setup-nvme.sh", &[]);
    assert!(none.code == 0 && none.out.contains("nothing to do"), "{}{}", none.out, none.err);
    assert!(!machine.workdir.path("root/etc/docker/daemon.json").exists(), "caches stay where they are");

    // Two local disks, and the system disk, which is NVMe too.
    for (disk, model) in [
        ("nvme0n1", "MSFT NVMe Accelerator v1.0"),
        ("nvme1n1", "Microsoft NVMe Direct Disk v2"),
        ("nvme2n1", "Microsoft NVMe Direct Disk v2"),
    ] {
        write(&machine.workdir.path(&format!("root/sys/block/{disk}/device/model")), model, "0644");
    }
    write(
        &machine.workdir.path("root/etc/docker/daemon.json"),
        "{\"runtimes\": {\"nvidia\": {\"path\": \"x\"}}}",
        "0644",
    );
    let calls = machine.workdir.path("calls");
    let fake_with_log = |name: &str, end: &str| {
        machine.fake_program(name, &format!("echo \"{name} $*\" >>{}; {end}", calls.display()));
    };
    fake_with_log("mountpoint", "exit 1");
    fake_with_log("mkfs.xfs", "");
    fake_with_log("mount", "");
    fake_with_log("mdadm", "test \"$1\" != --assemble");
    fake_with_log("wipefs", "echo ext4");
    let refused = machine.run("setup-nvme.sh", &[]);
    assert!(refused.code == 1 && refused.err.contains("has other content (ext4): not changed"), "{}", refused.err);
    assert!(!machine.workdir.read("calls").contains("--create"));

    fake_with_log("wipefs", "");
    let created = machine.run("setup-nvme.sh", &[]);
    assert_eq!(created.code, 0, "{}", created.err);
    let done = machine.workdir.read("calls");
    assert!(done.contains("--raid-devices 2 /dev/nvme1n1 /dev/nvme2n1\n") && !done.contains("nvme0n1"), "{done}");
    assert!(done.contains("mkfs.xfs -q -L resource_nvme"), "{done}");
    let docker: Value = serde_json::from_str(&machine.workdir.read("root/etc/docker/daemon.json")).unwrap();
    assert_eq!(docker["data-root"], "/mnt/resource_nvme/docker");
    assert_eq!(docker["runtimes"]["nvidia"]["path"], "x", "existing settings are kept");

    fs::remove_file(&calls).unwrap();
    fake_with_log("mdadm", "");
    fake_with_log("blkid", "exit 2");
    assert_eq!(machine.run("setup-nvme.sh", &[]).code, 0);
    let halfway = machine.workdir.read("calls");
    assert!(
        halfway.contains("mkfs") && !halfway.contains("--create"),
        "an earlier attempt ended in between: {halfway}"
    );
    fs::remove_file(&calls).unwrap();
    fake_with_log("blkid", "");
    assert_eq!(machine.run("setup-nvme.sh", &[]).code, 0);
    let again = machine.workdir.read("calls");
    assert!(!again.contains("mkfs") && again.contains("mount "), "an existing array is not created again: {again}");
}

#[test]
fn a_machine_identifies_itself_and_verifies_its_download() {
    let machine = Machine::new();
    // Hyper-V records: names of 512 bytes and values of 2048, padded with zeros.
    let field = |text: &str, length: usize| [text.as_bytes(), &vec![0; length - text.len()]].concat();
    let pool = [("HostName", "rack"), ("PhysicalHostName", "BY2-17"), ("VirtualMachineName", "x")];
    let pool: Vec<u8> = pool.iter().flat_map(|(name, value)| [field(name, 512), field(value, 2048)].concat()).collect();
    fs::create_dir_all(machine.workdir.path("root/var/lib/hyperv")).unwrap();
    fs::write(machine.workdir.path("root/var/lib/hyperv/.kvp_pool_3"), pool).unwrap();
    machine.fake_program("ip", "echo '168.63.129.16 via 10.0.0.1 dev eth0 src 10.0.0.4 uid 0 \\    cache'");
    machine.fake_program("hostname", "echo vm-1");
    machine.run("node-info.sh", &[]);
    assert_eq!(machine.workdir.read("root/var/log/node-info.log"), "vm-1 10.0.0.4 BY2-17\n");

    let sum = "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c";
    machine.fake_program("curl", "while [ \"$1\" != --output ]; do shift; done; echo foo >\"$2\"");
    let program = machine.workdir.path("bin/doctor-node");
    let refused = machine.run("install-doctor-node.sh", &["https://x/y", &"0".repeat(64)]);
    assert!(refused.code == 1 && refused.err.contains("not installed"), "{}", refused.err);
    assert_eq!(fs::read_dir(machine.workdir.path("bin")).unwrap().count(), 3, "no files are left behind");
    assert_eq!(machine.run("install-doctor-node.sh", &["https://x/y", sum]).code, 0);
    assert_eq!(fs::read_to_string(&program).unwrap(), "foo\n");
    assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o777, 0o755);
}
