//! The systemd units of `doctor deploy systemd` and of machines in Azure, verified with systemd's own checker.

use std::{fs, path::Path, process::Command};

use crate::workdir::{Workdir, doctor_node};

/// Verifies unit files with systemd. `None`: it is not installed, which is printed; in CI it is a failure.
fn verify(files: &[std::path::PathBuf]) -> Option<(bool, String)> {
    if !Path::new("/usr/bin/systemd-analyze").exists() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "systemd-analyze is not installed");
        println!("NOT RUN: systemd's own checker: it is not installed; scripts/system.sh installs it");
        return None;
    }
    let mut command = Command::new("/usr/bin/systemd-analyze");
    let ran = command.args(["verify", "--man=no", "--recursive-errors=no"]).args(files).output().unwrap();
    let output = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    Some((ran.status.success() && !output.contains("Unknown"), output))
}

#[test]
fn systemd_accepts_the_units_of_a_small_site() {
    let workdir = Workdir::new();
    workdir.write("doctor.toml", "store = \"/srv/doctor/doctor.db\"\ndata = \"/srv/data\"\n[agents]\nlisten = \"127.0.0.1:7443\"\n[backend.slurm]\n");
    let (doctor, node) = (env!("CARGO_BIN_EXE_doctor"), doctor_node().to_str().unwrap());
    let programs = ["--doctor", doctor, "--doctor-node", node];
    let output =
        workdir.expect(0, &[&["deploy", "systemd", "--user", "nobody", "--out", "service"], &programs[..]].concat());
    output.stdout_contains("enable --now doctor.service");
    workdir
        .expect(0, &[&["deploy", "systemd", "--timer", "10m", "--out", "timer"], &programs[..]].concat())
        .stdout_contains("doctor-run.timer");
    let units = |folder: &str| -> Vec<_> {
        let at = |on: &str| workdir.path(folder).join(on).join("etc/systemd/system");
        let folders = ["controller", "nodes"].map(at).into_iter().filter(|folder| folder.is_dir());
        folders.flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path()).collect()
    };
    let (service, timer) = (units("service"), units("timer"));
    assert_eq!((service.len(), timer.len()), (2, 2), "{service:?} {timer:?}");
    let unit = workdir.read("service/controller/etc/systemd/system/doctor.service");
    assert!(unit.contains("ReadWritePaths=/var/lib/cluster-doctor /srv/data /srv/doctor\n"), "{unit}");

    let Some((good, output)) = verify(&[service, timer].concat()) else { return };
    assert!(good, "{output}");
    let wrong = workdir.path("wrong.service");
    fs::write(&wrong, format!("[Service]\nExecStart={doctor} serve\nProtectSytem=strict\n")).unwrap();
    let (good, output) = verify(&[wrong]).unwrap();
    assert!(!good, "systemd's checker lets everything pass: {output}");
}

#[test]
fn systemd_accepts_the_units_of_azure_machines() {
    let workdir = Workdir::new();
    let folder = workdir.path("opt");
    fs::create_dir(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/azure/node");
    let mut units = Vec::new();
    for entry in fs::read_dir(source).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".service") {
            let text = fs::read_to_string(entry.path()).unwrap();
            let text =
                text.replace("/opt/", &format!("{}/", folder.display())).replace("/usr/bin/nvidia-smi", "/bin/true");
            workdir.write(&name, &text);
            units.push(workdir.path(&name));
        } else {
            fs::copy(entry.path(), folder.join(&name)).unwrap();
        }
    }
    assert_eq!(units.len(), 2);
    let Some((good, output)) = verify(&units) else { return };
    assert!(good, "{output}");
}

#[test]
fn values_not_allowed_in_a_unit_are_rejected() {
    let workdir = Workdir::new();
    for (args, expected) in [
        (["--doctor", "bin/doctor"], "an absolute path"),
        (["--doctor", "/opt/a b/doctor"], "no spaces"),
        (["--user", "x\nExecStart=y"], "not a valid user name"),
        (["--timer", "1s"], "10s or more"),
    ] {
        workdir.expect(2, &[&["deploy", "systemd"], &args[..]].concat()).stderr_contains(expected);
    }
}
