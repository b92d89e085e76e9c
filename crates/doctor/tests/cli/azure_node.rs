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

fn printed(bed: &Workdir) -> String {
    let example = bed.expect(0, &["fleet", "provision", "--example"]).out;
    let download =
        format!("[doctor_node]\nurl = \"https://example.com/doctor-node\"\nsha256 = \"{}\"\n[network]", "0".repeat(64));
    bed.write("cluster.toml", &example.replace("[network]", &download));
    bed.expect(0, &["fleet", "cloud-init", "cluster.toml"]).out
}

/// The machine's files below a directory, and a directory of stand-in programs.
struct Machine {
    bed: Workdir,
}

impl Machine {
    fn new() -> Self {
        let bed = Workdir::new();
        let config: Value = serde_saphyr::from_str(&printed(&bed)).unwrap();
        for file in config["write_files"].as_array().unwrap() {
            let path = bed.path("root").join(file["path"].as_str().unwrap().trim_start_matches('/'));
            write(&path, file["content"].as_str().unwrap(), file["permissions"].as_str().unwrap());
        }
        for folder in ["root/var/log", "root/mnt", "bin"] {
            fs::create_dir_all(bed.path(folder)).unwrap();
        }
        Self { bed }
    }

    fn fake_program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.bed.path("bin").join(name);
        write(&path, &format!("#!/bin/sh\n{script}\n"), "0755");
        path
    }

    fn run(&self, script: &str, args: &[&str]) -> CommandOutput {
        let mut command = Command::new(self.bed.path("root/opt").join(script));
        command.args(args).env_clear().env("ROOT", self.bed.path("root"));
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.bed.path("bin").display()));
        command.env("AZNHC", self.bed.path("bin/aznhc")).env("DOCTOR_NODE", self.bed.path("bin/doctor-node"));
        CommandOutput::from_output(&command.output().unwrap())
    }

    /// Returns the word in the last line of a status file.
    fn status(&self, name: &str) -> String {
        let text = self.bed.read(&format!("root/var/log/{name}.log.status"));
        text.lines().last().unwrap().split(' ').nth(1).unwrap().to_owned()
    }
}

fn write(path: &Path, text: &str, mode: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(u32::from_str_radix(mode, 8).unwrap())).unwrap();
}

#[test]
fn cloud_inits_own_checker_takes_what_is_printed_and_what_it_passes_over_is_found() {
    let bed = Workdir::new();
    bed.write("ours.yaml", &printed(&bed));
    bed.expect(0, &["fleet", "cloud-init", "--check", "ours.yaml"]).stdout_contains("known to cloud-init");
    let slip = bed.read("ours.yaml").replace("runcmd:", "run_cmd:");
    bed.write("slip.yaml", &slip);
    bed.expect(4, &["fleet", "cloud-init", "--check", "slip.yaml"])
        .stderr_contains("`run_cmd`")
        .stderr_contains("similar: runcmd");
    if !Path::new("/usr/bin/cloud-init").exists() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "cloud-init is not installed");
        println!("NOT RUN: cloud-init's own checker: it is not installed; scripts/system.sh installs it");
        return;
    }
    let schema = |file: &str| {
        let ran =
            Command::new("/usr/bin/cloud-init").args(["schema", "--config-file"]).arg(bed.path(file)).output().unwrap();
        (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
    };
    let (good, said) = schema("ours.yaml");
    assert!(good, "{said}");
    bed.write("bad.yaml", &bed.read("ours.yaml").replace("package_update: true", "package_update: [1]"));
    let (good, said) = schema("bad.yaml");
    assert!(!good && said.contains("package_update"), "{said}");
}

#[test]
fn only_an_aznhc_that_says_it_checked_has_passed() {
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
    let log = machine.bed.read("root/var/log/aznhc-health.log");
    assert!(log.contains("AzNHC is not installed") && log.contains("NHC2009"), "{log}");
}

#[test]
fn a_machine_is_healthy_only_if_all_three_have_passed() {
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
    for (said, health) in [("passed", "unknown"), ("failed", "unhealthy")] {
        machine.bed.write("root/var/log/dcgmi-diag.log.status", &format!("2025-01-01T00:00:00Z {said}\n"));
        machine.run("run-doctor-check.sh", &[]);
        assert_eq!(machine.status("node-health"), health, "{said} long ago");
    }
    let refused = machine.run("run-dcgmi.sh", &["5"]);
    assert!(refused.code == 2 && refused.err.contains("expected 1 to 4"), "{}", refused.err);
}

#[test]
fn local_disks_become_an_array_once_and_nothing_is_overwritten() {
    let machine = Machine::new();
    let none = machine.run("setup-nvme.sh", &[]);
    assert!(none.code == 0 && none.out.contains("nothing to do"), "{}{}", none.out, none.err);
    assert!(!machine.bed.path("root/etc/docker/daemon.json").exists(), "caches stay where they are");

    // Two local disks, and the system disk, which is NVMe too.
    for (disk, model) in [
        ("nvme0n1", "MSFT NVMe Accelerator v1.0"),
        ("nvme1n1", "Microsoft NVMe Direct Disk v2"),
        ("nvme2n1", "Microsoft NVMe Direct Disk v2"),
    ] {
        write(&machine.bed.path(&format!("root/sys/block/{disk}/device/model")), model, "0644");
    }
    write(&machine.bed.path("root/etc/docker/daemon.json"), "{\"runtimes\": {\"nvidia\": {\"path\": \"x\"}}}", "0644");
    let calls = machine.bed.path("calls");
    let noted = |name: &str, end: &str| {
        machine.fake_program(name, &format!("echo \"{name} $*\" >>{}; {end}", calls.display()));
    };
    noted("mountpoint", "exit 1");
    noted("mkfs.xfs", "");
    noted("mount", "");
    noted("mdadm", "test \"$1\" != --assemble");
    noted("wipefs", "echo ext4");
    let refused = machine.run("setup-nvme.sh", &[]);
    assert!(refused.code == 1 && refused.err.contains("has other content (ext4): not changed"), "{}", refused.err);
    assert!(!machine.bed.read("calls").contains("--create"));

    noted("wipefs", "");
    let made = machine.run("setup-nvme.sh", &[]);
    assert_eq!(made.code, 0, "{}", made.err);
    let done = machine.bed.read("calls");
    assert!(done.contains("--raid-devices 2 /dev/nvme1n1 /dev/nvme2n1\n") && !done.contains("nvme0n1"), "{done}");
    assert!(done.contains("mkfs.xfs -q -L resource_nvme"), "{done}");
    let docker: Value = serde_json::from_str(&machine.bed.read("root/etc/docker/daemon.json")).unwrap();
    assert_eq!(docker["data-root"], "/mnt/resource_nvme/docker");
    assert_eq!(docker["runtimes"]["nvidia"]["path"], "x", "existing settings are kept");

    fs::remove_file(&calls).unwrap();
    noted("mdadm", "");
    noted("blkid", "exit 2");
    assert_eq!(machine.run("setup-nvme.sh", &[]).code, 0);
    let halfway = machine.bed.read("calls");
    assert!(
        halfway.contains("mkfs") && !halfway.contains("--create"),
        "an earlier attempt ended in between: {halfway}"
    );
    fs::remove_file(&calls).unwrap();
    noted("blkid", "");
    assert_eq!(machine.run("setup-nvme.sh", &[]).code, 0);
    let again = machine.bed.read("calls");
    assert!(!again.contains("mkfs") && again.contains("mount "), "an existing array is not created again: {again}");
}

#[test]
fn a_machine_says_who_it_is_and_fetches_only_what_has_the_right_sum() {
    let machine = Machine::new();
    // Hyper-V records: names of 512 bytes and values of 2048, padded with zeros.
    let field = |text: &str, length: usize| [text.as_bytes(), &vec![0; length - text.len()]].concat();
    let pool = [("HostName", "rack"), ("PhysicalHostName", "BY2-17"), ("VirtualMachineName", "x")];
    let pool: Vec<u8> = pool.iter().flat_map(|(name, value)| [field(name, 512), field(value, 2048)].concat()).collect();
    fs::create_dir_all(machine.bed.path("root/var/lib/hyperv")).unwrap();
    fs::write(machine.bed.path("root/var/lib/hyperv/.kvp_pool_3"), pool).unwrap();
    machine.fake_program("ip", "echo '168.63.129.16 via 10.0.0.1 dev eth0 src 10.0.0.4 uid 0 \\    cache'");
    machine.fake_program("hostname", "echo vm-1");
    machine.run("node-info.sh", &[]);
    assert_eq!(machine.bed.read("root/var/log/node-info.log"), "vm-1 10.0.0.4 BY2-17\n");

    let sum = "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c";
    machine.fake_program("curl", "while [ \"$1\" != --output ]; do shift; done; echo foo >\"$2\"");
    let program = machine.bed.path("bin/doctor-node");
    let refused = machine.run("install-doctor-node.sh", &["https://x/y", &"0".repeat(64)]);
    assert!(refused.code == 1 && refused.err.contains("not installed"), "{}", refused.err);
    assert_eq!(fs::read_dir(machine.bed.path("bin")).unwrap().count(), 3, "no files are left behind");
    assert_eq!(machine.run("install-doctor-node.sh", &["https://x/y", sum]).code, 0);
    assert_eq!(fs::read_to_string(&program).unwrap(), "foo\n");
    assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o777, 0o755);
}
