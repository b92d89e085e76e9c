//! A fake machine: eight GPUs behind NVSwitches, eight InfiniBand ports, two NVMe disks.
//!
//! Its driver is the stand-in library, its /sys and /proc a tree of files. The real `doctor-node` checks it through its
//! real loading and reading code. The stand-in also computes what the deep tests ask of CUDA and NCCL, at rates that
//! are invented: `test dl` and `test collective` run on this machine to their end.
//!
//! File names and formats follow Linux 6.8 and driver 570 on an HGX H100. GPU values are those of a real H200 (driver
//! 580.159.04, 2026-11-15) where it has them; the others are made by hand.

mod deep_tests;
mod hgx_h100;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use tempfile::TempDir;

use hgx_h100::{HOST_FILES, PROFILE, gpu};

pub const GPUS: usize = 8;
pub const PORTS: usize = 8;

/// Returns the path of the stand-in library: the one in `$DOCTOR_BUILT`, or one built into the folder of `program`.
///
/// # Panics
/// Panics if it cannot be built.
pub fn fake_nvidia_library(program: &Path) -> PathBuf {
    const LIBRARY: &str = "libdoctor_fake_nvidia.so";
    if let Some(library) = crate::programs::prebuilt(LIBRARY) {
        return library;
    }
    let folder = program.parent().expect("a program lies in a folder");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "-p", "doctor-fake-nvidia"]);
    if folder.ends_with("release") {
        build.arg("--release");
    }
    let built = build.status().is_ok_and(|status| status.success());
    assert!(built, "building the fake NVML failed");
    folder.join(LIBRARY)
}

/// The value of a field in the stand-in's file.
#[derive(Debug, Clone)]
pub enum Field {
    Number(f64),
    Text(String),
    /// The driver returns this error code.
    Error(u32),
}

#[derive(Debug, Clone)]
pub struct FakeMachine {
    driver: String,
    init: u32,
    hang: String,
    lost_descriptors: u32,
    gpus: Vec<FakeGpu>,
    files: BTreeMap<String, String>,
    links: BTreeMap<String, String>,
    policy: String,
    profile: String,
}

#[derive(Debug, Clone)]
struct FakeGpu {
    bus: String,
    handle: u32,
    hang: bool,
    touches: PathBuf,
    fields: BTreeMap<String, Field>,
    /// Fields that differ while the GPU multiplies.
    load: BTreeMap<String, Field>,
    /// Rates by metric, and planted faults: the stand-in's table `[gpu.cuda]`.
    cuda: BTreeMap<String, Field>,
}

/// The results of one check run: `CHECK REASON SEVERITY ENTITY` per failure, `CHECK REASON TEXT` per inconclusive result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckSummary {
    pub failing: Vec<String>,
    pub inconclusive: Vec<String>,
    pub passing: Vec<String>,
    pub not_applicable: Vec<String>,
}

/// A machine written to disk, and the program that checks it.
#[derive(Debug)]
pub struct InstalledMachine {
    folder: TempDir,
    program: PathBuf,
    library: PathBuf,
}

pub fn gpu_bus(n: usize) -> String {
    format!("0000:{:02x}:00.0", 0x18 + 0x10 * n)
}

pub fn nic_bus(n: usize) -> String {
    format!("0000:{:02x}:00.0", 0x1a + 0x10 * n)
}

/// Returns the path of a file of an InfiniBand device.
pub fn ib(n: usize, name: &str) -> String {
    format!("{}/infiniband/mlx5_{n}/{name}", nic_pci(n))
}

fn nic_pci(n: usize) -> String {
    let port = root_port(n, 2);
    format!("/sys/devices/pci{}/{port}/{}", &port[..7], nic_bus(n))
}

/// Returns the path of a file of a GPU's PCI device.
pub fn gpu_pci(n: usize, name: &str) -> String {
    let port = root_port(n, 1);
    format!("/sys/devices/pci{}/{port}/{}/{name}", &port[..7], gpu_bus(n))
}

impl FakeMachine {
    pub fn hgx_h100() -> Self {
        let mut machine = Self {
            driver: "570.124.06".into(),
            init: 0,
            hang: String::new(),
            lost_descriptors: 0,
            gpus: (0..GPUS).map(gpu).collect(),
            files: BTreeMap::new(),
            links: BTreeMap::new(),
            // The clock is that of the test machine.
            policy: "[tests.time-sync]\nenabled = false\n".to_owned(),
            profile: PROFILE.to_owned(),
        };
        machine.host();
        for n in 0..GPUS {
            machine.pci(
                &gpu_bus(n),
                &root_port(n, 1),
                "0x10de",
                "0x2330",
                "0x030200",
                ("32.0 GT/s PCIe", "16"),
                "nvidia",
            );
            machine.file(&format!("/dev/nvidia{n}"), "");
        }
        for n in 0..4 {
            let bus = format!("0000:{:02x}:00.0", 0x05 + n);
            machine.pci(
                &bus,
                &format!("0000:{:02x}:01.0", 0x02),
                "0x10de",
                "0x22a3",
                "0x068000",
                ("5.0 GT/s PCIe", "2"),
                "nvidia-nvswitch",
            );
            machine.file(&format!("/dev/nvidia-nvswitch{n}"), "");
        }
        for n in 0..PORTS {
            machine.port(n);
        }
        machine.nvme(0);
        machine.nvme(1);
        machine
    }

    pub fn driver(mut self, version: &str) -> Self {
        self.driver = version.to_owned();
        self
    }

    /// Sets the code that initialising the driver returns.
    pub fn driver_fails(mut self, code: u32) -> Self {
        self.init = code;
        self
    }

    /// Makes a function of the driver hang.
    pub fn driver_hangs(mut self, function: &str) -> Self {
        self.hang = function.to_owned();
        self
    }

    /// Makes the driver library leak this many file descriptors each time a session is closed.
    pub fn driver_loses_descriptors(mut self, count: u32) -> Self {
        self.lost_descriptors = count;
        self
    }

    pub fn gpu(mut self, n: usize, field: &str, value: f64) -> Self {
        self.gpus[n].fields.insert(field.to_owned(), Field::Number(value));
        self
    }

    pub fn gpu_text(mut self, n: usize, field: &str, value: &str) -> Self {
        self.gpus[n].fields.insert(field.to_owned(), Field::Text(value.to_owned()));
        self
    }

    pub fn gpu_error(mut self, n: usize, field: &str, code: u32) -> Self {
        self.gpus[n].fields.insert(field.to_owned(), Field::Error(code));
        self
    }

    /// Makes every query of this GPU return this code.
    pub fn gpu_lost(mut self, n: usize, code: u32) -> Self {
        for field in self.gpus[n].fields.values_mut() {
            *field = Field::Error(code);
        }
        self
    }

    /// Makes the driver hang on any query of this GPU.
    pub fn gpu_hangs(mut self, n: usize) -> Self {
        self.gpus[n].hang = true;
        self
    }

    /// Makes the driver write to this file on any query of this GPU.
    pub fn gpu_touches(mut self, n: usize, file: &Path) -> Self {
        self.gpus[n].touches = file.to_owned();
        self
    }

    /// Removes the GPU from the driver's list.
    pub fn gpu_unlisted(mut self, n: usize) -> Self {
        self.gpus.remove(n);
        self
    }

    /// Removes the GPU from the bus and from the driver's list.
    pub fn gpu_removed(self, n: usize) -> Self {
        let bus = gpu_bus(n);
        let machine = self.gpu_unlisted(n).without(&format!("/sys/bus/pci/devices/{bus}"));
        machine.without(&format!("/sys/bus/pci/drivers/nvidia/{bus}"))
    }

    /// Adds NVMe disks up to this number.
    pub fn nvme_disks(mut self, count: usize) -> Self {
        (2..count).for_each(|n| self.nvme(n));
        self
    }

    pub fn file(&mut self, path: &str, text: &str) {
        self.files.insert(path.to_owned(), text.to_owned());
    }

    pub fn with(mut self, path: &str, text: &str) -> Self {
        assert!(self.files.contains_key(path), "there is no {path}");
        self.file(path, text);
        self
    }

    pub fn with_new(mut self, path: &str, text: &str) -> Self {
        self.file(path, text);
        self
    }

    /// Adds a symbolic link to a path of this machine.
    pub fn linked(mut self, path: &str, to: &str) -> Self {
        let up = "../".repeat(path.matches('/').count() - 1);
        self.link(path, &format!("{up}{}", to.trim_start_matches('/')));
        self
    }

    /// Removes a path and everything below it.
    pub fn without(mut self, path: &str) -> Self {
        let below = format!("{path}/");
        let before = self.files.len() + self.links.len();
        self.files.retain(|file, _| file != path && !file.starts_with(&below));
        self.links.retain(|link, _| link != path && !link.starts_with(&below));
        assert!(self.files.len() + self.links.len() < before, "there is no {path}");
        self
    }

    /// Adds a kernel log record, dated a minute ago.
    pub fn kernel_message(mut self, text: &str) -> Self {
        let log = self.files.get_mut("/dev/kmsg").expect("a machine has one");
        let number = log.lines().count() + 1000;
        let _infallible = writeln!(log, "3,{number},863940{number:06},-;{text}");
        self
    }

    pub fn policy(mut self, text: &str) -> Self {
        self.policy.push_str(text);
        self
    }

    fn link(&mut self, path: &str, to: &str) {
        self.links.insert(path.to_owned(), to.to_owned());
    }

    fn host(&mut self) {
        for (path, text) in HOST_FILES {
            self.file(path, text);
        }
        let mut cpuinfo = String::new();
        for n in 0..4 {
            let (socket, core) = (n / 2, n % 2);
            let _infallible = writeln!(
                cpuinfo,
                "processor\t: {n}\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n\
                 physical id\t: {socket}\nsiblings\t: 2\ncore id\t\t: {core}\ncpu cores\t: 2\nflags\t\t: fpu vme de pse tsc msr\n",
            );
            let cpu = format!("/sys/devices/system/cpu/cpu{n}");
            self.file(&format!("/sys/devices/system/cpu/cpufreq/policy{n}/scaling_governor"), "performance\n");
            for (name, value) in [("physical_package_id", socket), ("core_id", core), ("thread_siblings_list", n)] {
                self.file(&format!("{cpu}/topology/{name}"), &format!("{value}\n"));
            }
            self.file(&format!("{cpu}/thermal_throttle/package_throttle_count"), "0\n");
            self.file(&format!("{cpu}/thermal_throttle/core_throttle_count"), "0\n");
        }
        self.file("/proc/cpuinfo", &cpuinfo);
        for (pid, name) in
            [(1, "systemd"), (2, "kthreadd"), (412, "nv-fabricmanage"), (511, "nvidia-persiste"), (700, "slurmd")]
        {
            let stat = format!("{pid} ({name}) S 1 {pid} {pid} 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 1000 3149824 384");
            self.file(&format!("/proc/{pid}/stat"), &stat);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a PCI device has this many attributes")]
    fn pci(
        &mut self,
        bus: &str,
        port: &str,
        vendor: &str,
        device: &str,
        class: &str,
        link: (&str, &str),
        driver: &str,
    ) {
        let real = format!("/sys/devices/pci{}/{port}/{bus}", &port[..7]);
        for (name, text) in [
            ("vendor", vendor),
            ("device", device),
            ("class", class),
            ("current_link_speed", link.0),
            ("max_link_speed", link.0),
            ("current_link_width", link.1),
            ("max_link_width", link.1),
            ("enable", "1"),
            ("numa_node", "0"),
        ] {
            self.file(&format!("{real}/{name}"), &format!("{text}\n"));
        }
        let ids = format!("{}:{}", vendor[2..].to_uppercase(), device[2..].to_uppercase());
        let class = class[2..].trim_start_matches('0').to_uppercase();
        let uevent =
            format!("DRIVER={driver}\nPCI_CLASS={class}\nPCI_ID={ids}\nPCI_SUBSYS_ID=10DE:16C1\nPCI_SLOT_NAME={bus}\n");
        self.file(&format!("{real}/uevent"), &uevent);
        for kind in ["fatal", "nonfatal", "correctable"] {
            let text = format!(
                "RxErr 0\nBadTLP 0\nTOTAL_ERR_{} 0\n",
                match kind {
                    "fatal" => "FATAL",
                    "nonfatal" => "NONFATAL",
                    _ => "COR",
                }
            );
            self.file(&format!("{real}/aer_dev_{kind}"), &text);
        }
        self.link(&format!("/sys/bus/pci/devices/{bus}"), &format!("../../../devices/pci{}/{port}/{bus}", &port[..7]));
        let from_driver = format!("../../../../devices/pci{}/{port}/{bus}", &port[..7]);
        self.link(&format!("/sys/bus/pci/drivers/{driver}/{bus}"), &from_driver);
        self.link(&format!("{real}/driver"), &format!("../../../../bus/pci/drivers/{driver}"));
    }

    fn port(&mut self, n: usize) {
        let (bus, port) = (nic_bus(n), root_port(n, 2));
        self.pci(&bus, &port, "0x15b3", "0x1021", "0x020700", ("32.0 GT/s PCIe", "16"), "mlx5_core");
        let pci = format!("/sys/devices/pci{}/{port}/{bus}", &port[..7]);
        let real = format!("{pci}/infiniband/mlx5_{n}");
        for (name, text) in [
            ("fw_ver", "28.39.1002"),
            ("hca_type", "MT4129"),
            ("board_id", "MT_0000000838"),
            ("node_guid", "946d:ae03:0000:0001"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/phys_state", "5: LinkUp"),
            ("ports/1/rate", "400 Gb/sec (4X NDR)"),
            ("ports/1/link_layer", "InfiniBand"),
            ("ports/1/lid", "0x1"),
            ("ports/1/pkeys/0", "0x7fff"),
        ] {
            self.file(&format!("{real}/{name}"), &format!("{text}\n"));
        }
        for counter in [
            "link_downed",
            "link_error_recovery",
            "symbol_error",
            "port_rcv_errors",
            "port_xmit_discards",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
            "port_rcv_remote_physical_errors",
            "port_rcv_constraint_errors",
            "port_xmit_constraint_errors",
            "VL15_dropped",
            "port_xmit_wait",
            "port_rcv_data",
            "port_xmit_data",
        ] {
            self.file(&format!("{real}/ports/1/counters/{counter}"), "0\n");
        }
        for counter in
            ["local_ack_timeout_err", "rnr_nak_retry_err", "roce_slow_restart", "out_of_sequence", "packet_seq_err"]
        {
            self.file(&format!("{real}/ports/1/hw_counters/{counter}"), "0\n");
        }
        self.link(&format!("{real}/device"), "../..");
        let class = format!("../../devices/pci{}/{port}/{bus}/infiniband/mlx5_{n}", &port[..7]);
        self.link(&format!("/sys/class/infiniband/mlx5_{n}"), &class);
        let net = format!("{pci}/net/ibp{n}");
        for (name, text) in [
            ("operstate", "up"),
            ("carrier", "1"),
            ("speed", "400000"),
            ("mtu", "4092"),
            ("carrier_changes", "2"),
            ("statistics/rx_errors", "0"),
            ("statistics/tx_errors", "0"),
            ("type", "32"),
        ] {
            self.file(&format!("{net}/{name}"), &format!("{text}\n"));
        }
        self.link(&format!("{net}/device"), "../..");
        self.link(
            &format!("/sys/class/net/ibp{n}"),
            &format!("../../devices/pci{}/{port}/{bus}/net/ibp{n}", &port[..7]),
        );
        self.file(&format!("/dev/infiniband/uverbs{n}"), "");
    }

    fn nvme(&mut self, n: usize) {
        let (bus, port) = (format!("0000:{:02x}:00.0", 0xc1 + n), format!("0000:{:02x}:01.0", 0xc0));
        self.pci(&bus, &port, "0x144d", "0xa80a", "0x010802", ("16.0 GT/s PCIe", "4"), "nvme");
        let real = format!("/sys/devices/pci{}/{port}/{bus}/nvme/nvme{n}", &port[..7]);
        for (name, text) in
            [("state", "live"), ("model", "SAMSUNG MZQL23T8"), ("firmware_rev", "GDC5602Q"), ("transport", "pcie")]
        {
            self.file(&format!("{real}/{name}"), &format!("{text}\n"));
        }
        self.link(
            &format!("/sys/class/nvme/nvme{n}"),
            &format!("../../devices/pci{}/{port}/{bus}/nvme/nvme{n}", &port[..7]),
        );
    }

    /// Writes the machine to a temporary folder.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    pub fn install(&self, program: &Path, library: &Path) -> InstalledMachine {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let machine = InstalledMachine { folder, program: program.to_owned(), library: library.to_owned() };
        machine.replace(self);
        machine
    }

    pub fn write(&self, folder: &Path) {
        let path_of = |path: &str| folder.join("root").join(path.trim_start_matches('/'));
        let in_folder = |path: &str| {
            fs::create_dir_all(path_of(path).parent().expect("a file lies in a folder"))
                .expect("the testbed is writable");
        };
        for (path, text) in &self.files {
            in_folder(path);
            fs::write(path_of(path), text).expect("the testbed is writable");
        }
        for (path, to) in &self.links {
            in_folder(path);
            std::os::unix::fs::symlink(to, path_of(path)).expect("the testbed is writable");
        }
        fs::write(folder.join("nvml.toml"), self.scene()).expect("the testbed is writable");
        fs::write(folder.join("policy.toml"), &self.policy).expect("the testbed is writable");
        fs::write(folder.join("profile.toml"), &self.profile).expect("the testbed is writable");
    }

    fn scene(&self) -> String {
        let mut out = format!(
            "driver = {:?}\ncuda = 12080\ninit = {}\nhang = {:?}\nloses = {}\n",
            self.driver, self.init, self.hang, self.lost_descriptors
        );
        for gpu in &self.gpus {
            let FakeGpu { bus, handle, hang, touches, .. } = gpu;
            let _infallible = write!(
                out,
                "\n[[gpu]]\nbus = {bus:?}\nhandle = {handle}\nhang = {hang}\ntouches = {touches:?}\n[gpu.fields]\n"
            );
            write_fields(&mut out, &gpu.fields);
            out.push_str("[gpu.load]\n");
            write_fields(&mut out, &gpu.load);
            out.push_str("[gpu.cuda]\n");
            write_fields(&mut out, &gpu.cuda);
        }
        out
    }
}

impl InstalledMachine {
    /// Returns the path of a file: `policy.toml`, `profile.toml`, `nvml.toml`, or one of the machine's own below
    /// `root`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces the machine's files. The program's state is kept, counter history included.
    pub fn replace(&self, machine: &FakeMachine) {
        let _was_there = fs::remove_dir_all(self.path("root"));
        machine.write(self.folder.path());
    }

    /// Replaces only the driver's replies, atomically, because a program may be querying the driver at this moment.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn set_driver(&self, machine: &FakeMachine) {
        let beside = self.path("scene.new");
        fs::write(&beside, machine.scene())
            .and_then(|()| fs::rename(beside, self.path("nvml.toml")))
            .expect("the testbed is writable");
    }

    /// Returns the command `doctor-node check` with these arguments, not yet started.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("check").arg("--root").arg(self.path("root")).arg("--state").arg(self.path("state"));
        command.arg("--policy").arg(self.path("policy.toml")).arg("--nvml").arg(&self.library).args(arguments);
        command.env("DOCTOR_FAKE_NVIDIA", self.path("nvml.toml"));
        command
    }

    /// Returns the command `doctor-node agent` with the machine's profile and this credential, not yet started.
    ///
    /// # Panics
    /// Panics if the credential cannot be written.
    pub fn agent(&self, credential: &str) -> Command {
        let key = self.path("agent.key");
        fs::write(&key, credential)
            .and_then(|()| fs::set_permissions(&key, fs::Permissions::from_mode(0o600)))
            .expect("the testbed is writable");
        let mut command = Command::new(&self.program);
        command.arg("agent").arg("--credential").arg(key).arg("--state").arg(self.path("agent-state"));
        command.arg("--root").arg(self.path("root")).arg("--nvml").arg(&self.library);
        command.arg("--policy").arg(self.path("policy.toml")).arg("--profile").arg(self.path("profile.toml"));
        command.env("DOCTOR_FAKE_NVIDIA", self.path("nvml.toml"));
        command
    }

    /// Returns the command that runs the fast checks with the machine's profile and prints JSON.
    pub fn fast(&self) -> Command {
        let mut command = self.command(&["--fast-only", "--json", "--profile"]);
        command.arg(self.path("profile.toml"));
        command
    }

    /// Runs the fast checks and returns its results.
    ///
    /// # Panics
    /// Panics if the program does not start or prints no JSON.
    pub fn run_check(&self) -> CheckSummary {
        let output = self.fast().output().expect("the program starts");
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        let cell = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
        let of = |verdict: &str, keys: &[&str]| {
            let rows = rows.iter().filter(|row| row["verdict"] == verdict);
            rows.map(|row| keys.iter().map(|key| cell(row, key)).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        CheckSummary {
            failing: of("fail", &["check", "reason", "severity", "entity"]),
            inconclusive: of("inconclusive", &["check", "reason", "text"]),
            passing: of("pass", &["check"]),
            not_applicable: of("not-applicable", &["check", "reason"]),
        }
    }
}

fn write_fields(out: &mut String, fields: &BTreeMap<String, Field>) {
    for (name, field) in fields {
        let value = match field {
            Field::Number(value) => format!("{value:?}"),
            Field::Text(text) => format!("{text:?}"),
            Field::Error(code) => format!("{{ error = {code} }}"),
        };
        let _infallible = writeln!(out, "{name:?} = {value}");
    }
}

fn root_port(n: usize, slot: usize) -> String {
    format!("0000:{:02x}:{slot:02x}.0", 0x15 + 0x10 * n)
}
