//! Every built-in machine profile against a second table of machines, `data/machines.toml`, which is written from the
//! vendors' pages. The shipped `doctor-node check` finds a stand-in tree with those devices healthy, and one with a
//! device missing not.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use doctor_checks::{Catalogue, Depth, profiles};
use doctor_core::{
    profile::{MachineTypes, Profile},
    sku_detection::{DetectionSource, MachineFacts, detect},
};
use doctor_testbed::fake_machine::{
    FakeMachine, GPUS, InstalledMachine, PORTS, fake_nvidia_library, gpu_bus, gpu_pci, ib, nic_bus,
};
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    gpu: BTreeMap<String, GpuModel>,
    machine: Vec<Machine>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuModel {
    pci_id: String,
    name: String,
    memory_mib: u32,
}

/// The devices of one machine type.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    name: String,
    cloud: String,
    gpu: String,
    gpus: usize,
    #[serde(default)]
    nvlinks: usize,
    #[serde(default)]
    nvswitches: usize,
    #[serde(default)]
    efa: usize,
    #[serde(default)]
    infiniband: usize,
    #[serde(default)]
    roce: usize,
    #[serde(default)]
    port_gbps: u32,
    #[serde(default)]
    nvme: usize,
    sockets: usize,
    cores: usize,
    threads: usize,
    memory_gib: u64,
    source: String,
}

fn table() -> Table {
    let table: Table = toml::from_str(include_str!("data/machines.toml")).unwrap();
    assert!(table.machine.iter().all(|machine| !machine.source.is_empty()));
    table
}

const NVLINKS: usize = 18;
const NVSWITCHES: usize = 4;
/// NVML's code for a value that a GPU does not have.
const NOT_SUPPORTED: u32 = 3;

/// Makes the tree of a machine from that of the testbed, which has eight GPUs, four switches and eight ports.
fn stand_in(machine: &Machine, model: &GpuModel) -> FakeMachine {
    let mut fake = FakeMachine::hgx_h100();
    for n in 0..PORTS {
        let device = ib(n, "");
        let pci = device.split("/infiniband/").next().unwrap();
        let bus = nic_bus(n);
        for path in [
            pci,
            &format!("/sys/class/infiniband/mlx5_{n}"),
            &format!("/sys/class/net/ibp{n}"),
            &format!("/sys/bus/pci/devices/{bus}"),
            &format!("/sys/bus/pci/drivers/mlx5_core/{bus}"),
            &format!("/dev/infiniband/uverbs{n}"),
        ] {
            fake = fake.without(path);
        }
    }
    for n in 0..2 {
        let bus = format!("0000:{:02x}:00.0", 0xc1 + n);
        fake = fake.without(&format!("/sys/class/nvme/nvme{n}")).without(&format!("/sys/bus/pci/devices/{bus}"));
        fake = fake.without(&format!("/sys/bus/pci/drivers/nvme/{bus}"));
    }
    fake = gpus(fake, machine, model);
    fake = switches(fake, machine.nvswitches);
    fake = host(fake, machine);
    for n in 0..machine.efa {
        fake = rdma(fake, n, &format!("rdmap{n}"), "1D0F:EFA2", "efa", ("Unspecified", 100));
    }
    if machine.efa > 0 {
        fake.file("/opt/amazon/efa/lib64/libfabric.so.1", "");
    }
    for n in 0..machine.infiniband {
        fake = rdma(fake, n, &format!("mlx5_{n}"), "15B3:1021", "mlx5_core", ("InfiniBand", machine.port_gbps));
    }
    for n in 0..machine.roce {
        fake = rdma(fake, n, &format!("mlx5_{n}"), "15B3:1021", "mlx5_core", ("Ethernet", machine.port_gbps));
    }
    for n in 0..machine.nvme {
        fake = pci(fake, &nvme_bus(n), "10802", "144D:A80A", "nvme");
        let real = format!("{}/nvme/nvme{n}", real_path(&nvme_bus(n)));
        for (name, text) in [("state", "live"), ("model", "SSD"), ("firmware_rev", "1"), ("transport", "pcie")] {
            fake.file(&format!("{real}/{name}"), &format!("{text}\n"));
        }
        fake = fake.linked(&format!("/sys/class/nvme/nvme{n}"), &real);
    }
    fake
}

fn adapter_bus(n: usize) -> String {
    format!("0001:{n:02x}:00.0")
}

fn nvme_bus(n: usize) -> String {
    format!("0002:{n:02x}:00.0")
}

fn real_path(bus: &str) -> String {
    format!("/sys/devices/pci{}:00/{bus}", &bus[..4])
}

fn pci(mut fake: FakeMachine, bus: &str, class: &str, id: &str, driver: &str) -> FakeMachine {
    let real = real_path(bus);
    let (vendor, device) = id.split_once(':').unwrap();
    let uevent = format!("DRIVER={driver}\nPCI_CLASS={class}\nPCI_ID={id}\nPCI_SLOT_NAME={bus}\n");
    for (name, text) in [
        ("uevent", uevent.as_str()),
        ("vendor", &format!("0x{}\n", vendor.to_lowercase())),
        ("device", &format!("0x{}\n", device.to_lowercase())),
        ("class", &format!("0x{class:0>6}\n")),
        ("current_link_speed", "32.0 GT/s PCIe\n"),
        ("max_link_speed", "32.0 GT/s PCIe\n"),
        ("current_link_width", "16\n"),
        ("max_link_width", "16\n"),
        ("enable", "1\n"),
        ("numa_node", "0\n"),
    ] {
        fake.file(&format!("{real}/{name}"), text);
    }
    fake.linked(&format!("/sys/bus/pci/devices/{bus}"), &real)
        .linked(&format!("/sys/bus/pci/drivers/{driver}/{bus}"), &real)
        .linked(&format!("{real}/driver"), &format!("/sys/bus/pci/drivers/{driver}"))
}

/// Adds an adapter with one active port.
fn rdma(fake: FakeMachine, n: usize, name: &str, id: &str, driver: &str, (layer, gbps): (&str, u32)) -> FakeMachine {
    let bus = adapter_bus(n);
    let mut fake = pci(fake, &bus, "20000", id, driver);
    let real = format!("{}/infiniband/{name}", real_path(&bus));
    for (file, text) in [
        ("fw_ver", "28.39.1002"),
        ("hca_type", "MT4129"),
        ("board_id", "MT_0000000838"),
        ("node_guid", "946d:ae03:0000:0001"),
        ("ports/1/state", "4: ACTIVE"),
        ("ports/1/phys_state", "5: LinkUp"),
        ("ports/1/rate", &format!("{gbps} Gb/sec (4X)")),
        ("ports/1/link_layer", layer),
        ("ports/1/lid", "0x1"),
        ("ports/1/pkeys/0", "0x7fff"),
    ] {
        fake.file(&format!("{real}/{file}"), &format!("{text}\n"));
    }
    for counter in ["link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "port_xmit_discards"] {
        fake.file(&format!("{real}/ports/1/counters/{counter}"), "0\n");
    }
    for counter in ["rx_drops", "retrans_timeout_events", "out_of_sequence", "packet_seq_err"] {
        fake.file(&format!("{real}/ports/1/hw_counters/{counter}"), "0\n");
    }
    if layer == "Ethernet" {
        for (file, text) in [("operstate", "up\n"), ("mtu", "9000\n")] {
            fake.file(&format!("{}/net/eth{n}/{file}", real_path(&bus)), text);
        }
    }
    fake.file(&format!("/dev/infiniband/uverbs{n}"), "");
    fake.file(&format!("/sys/module/{driver}/refcnt"), "1\n");
    fake.file("/sys/module/ib_uverbs/refcnt", "1\n");
    fake.linked(&format!("{real}/device"), &real_path(&bus)).linked(&format!("/sys/class/infiniband/{name}"), &real)
}

fn gpus(mut fake: FakeMachine, machine: &Machine, model: &GpuModel) -> FakeMachine {
    let device = model.pci_id.split(':').nth(1).unwrap();
    for n in 0..machine.gpus {
        let uevent = format!("DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID={}\n", model.pci_id.to_uppercase());
        fake = fake.with(&gpu_pci(n, "uevent"), &uevent).with(&gpu_pci(n, "device"), &format!("0x{device}\n"));
        fake = fake.gpu_text(n, "name", &model.name).gpu(n, "memory.total", f64::from(model.memory_mib) * 1_048_576.0);
        for link in machine.nvlinks..NVLINKS {
            let fields =
                ["state", "remote_kind", "crc_flit_errors", "crc_data_errors", "replay_errors", "recovery_errors"];
            for field in fields.iter().chain(&["remote_bus"]) {
                fake = fake.gpu_error(n, &format!("nvlink.{link}.{field}"), NOT_SUPPORTED);
            }
        }
        for other in (0..GPUS).filter(|other| *other != n) {
            if other >= machine.gpus {
                fake = fake.gpu_error(n, &format!("topology.{other}.level"), NOT_SUPPORTED);
            }
            if other >= machine.gpus || machine.nvlinks == 0 {
                fake = fake.gpu_error(n, &format!("p2p.{other}.nvlink"), NOT_SUPPORTED);
            }
        }
        if machine.nvlinks == 0 || machine.gpu.starts_with("v100") {
            for field in ["fabric.state", "fabric.status", "fabric.health_mask", "fabric.clique"] {
                fake = fake.gpu_error(n, field, NOT_SUPPORTED);
            }
            for link in 0..machine.nvlinks {
                // Directly to another GPU.
                fake = fake.gpu(n, &format!("nvlink.{link}.remote_kind"), 0.0);
                fake = fake.gpu_text(n, &format!("nvlink.{link}.remote_bus"), &gpu_bus((n + link + 1) % machine.gpus));
            }
        }
    }
    for n in (machine.gpus..GPUS).rev() {
        let bus = gpu_bus(n);
        fake = fake.gpu_unlisted(n).without(&format!("/sys/bus/pci/devices/{bus}"));
        fake = fake.without(&format!("/sys/bus/pci/drivers/nvidia/{bus}")).without(&format!("/dev/nvidia{n}"));
    }
    fake
}

fn switches(mut fake: FakeMachine, count: usize) -> FakeMachine {
    for n in count..NVSWITCHES {
        let bus = format!("0000:{:02x}:00.0", 0x05 + n);
        fake = fake.without(&format!("/dev/nvidia-nvswitch{n}")).without(&format!("/sys/bus/pci/devices/{bus}"));
        fake = fake.without(&format!("/sys/bus/pci/drivers/nvidia-nvswitch/{bus}"));
    }
    for n in NVSWITCHES..count {
        fake.file(&format!("/dev/nvidia-nvswitch{n}"), "");
    }
    fake
}

/// Processors, memory and what the firmware says.
fn host(mut fake: FakeMachine, machine: &Machine) -> FakeMachine {
    for thread in 0..machine.threads {
        let core = thread % machine.cores;
        let siblings = match machine.threads > machine.cores {
            true => format!("{core},{}\n", core + machine.cores),
            false => format!("{core}\n"),
        };
        let topology = format!("/sys/devices/system/cpu/cpu{thread}/topology");
        fake.file(&format!("{topology}/thread_siblings_list"), &siblings);
        fake.file(&format!("{topology}/core_id"), &format!("{core}\n"));
        let socket = core * machine.sockets / machine.cores;
        fake.file(&format!("{topology}/physical_package_id"), &format!("{socket}\n"));
    }
    for list in ["online", "present", "possible"] {
        fake.file(&format!("/sys/devices/system/cpu/{list}"), &format!("0-{}\n", machine.threads - 1));
    }
    // Linux reports 98.4 % of what the vendor sells: see the table.
    let kib = machine.memory_gib * 1024 * 1024 * 984 / 1000;
    let text = format!(
        "MemTotal: {kib} kB\nMemFree: {} kB\nMemAvailable: {} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n\
         Hugepagesize: 2048 kB\n",
        kib * 9 / 10,
        kib * 9 / 10
    );
    fake.file("/proc/meminfo", &text);
    let (vendor, product, tag) = match machine.cloud.as_str() {
        "aws" => ("Amazon EC2", machine.name.as_str(), "Amazon EC2"),
        "azure" => ("Microsoft Corporation", "Virtual Machine", "7783-7084-3265-9085-8269-3286-77"),
        "gcp" => ("Google", "Google Compute Engine", ""),
        "oci" => ("Oracle Corporation", "ORACLE SERVER", "OracleCloud.com"),
        _ => ("NVIDIA", machine.name.as_str(), ""),
    };
    for (name, text) in [("sys_vendor", vendor), ("product_name", product), ("chassis_asset_tag", tag)] {
        fake.file(&format!("/sys/class/dmi/id/{name}"), &format!("{text}\n"));
    }
    fake
}

/// Answers like the metadata service of any cloud.
fn metadata_service(instance_type: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let name = instance_type.to_owned();
    let answer = move |mut stream: TcpStream| -> std::io::Result<()> {
        let lines = BufReader::new(stream.try_clone()?).lines().map_while(Result::ok);
        let request: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let asks_token = request.first().is_some_and(|line| line.starts_with("PUT"));
        let body = if asks_token { "token" } else { &name };
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(answer(stream))));
    url
}

/// One machine on disk with its metadata service.
struct Bed {
    installed: InstalledMachine,
    fake: FakeMachine,
    metadata: String,
}

impl Bed {
    fn new(machine: &Machine, model: &GpuModel, program: &Path, library: &Path) -> Self {
        let fake = stand_in(machine, model);
        let metadata = metadata_service(&machine.name);
        Self { installed: fake.install(program, library), fake, metadata }
    }

    /// Runs these checks with the shipped program and returns the rows and the exit code.
    fn check(&self, names: &[&str]) -> (Vec<Value>, Option<i32>) {
        let mut command = self.installed.command(names);
        command.args(["--json", "--metadata", &self.metadata]).env_remove("DOCTOR_SKU").env_remove("DOCTOR_LABEL");
        let output = command.env_remove("DOCTOR_PROFILES").output().unwrap();
        let rows = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        (rows, output.status.code())
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.installed.path("root").join(path.trim_start_matches('/'))).unwrap();
    }
}

/// The checks of the quick suite that start no program.
fn fast_checks() -> Vec<&'static str> {
    let catalogue = Catalogue::built_in();
    // The clock is that of the test machine.
    let fast = catalogue.iter().filter(|check| check.spec.depth == Depth::Quick && check.spec.is_fast());
    fast.map(|check| check.spec.id).filter(|id| *id != "time-sync").collect()
}

fn rows_with(rows: &[Value], verdict: &str) -> Vec<String> {
    let of = rows.iter().filter(|row| row["verdict"] == verdict);
    of.map(|row| format!("{} {}: {}", row["check"], row["reason"], row["text"])).collect()
}

/// Checks one machine whole and with each kind of device missing. Returns what is wrong, and the kinds that were tried.
fn judge(machine: &Machine, bed: &Bed, profile: &Profile) -> (String, Vec<&'static str>) {
    let mut wrong = String::new();
    let (rows, code) = bed.check(&fast_checks());
    for verdict in ["fail", "inconclusive"] {
        for row in rows_with(&rows, verdict) {
            let _infallible = writeln!(wrong, "{}: healthy, but {verdict}: {row}", machine.name);
        }
    }
    if wrong.is_empty() && code != Some(0) {
        let _infallible = writeln!(wrong, "{}: healthy, but exit code {code:?}", machine.name);
    }
    let expects = |metric: &str| profile.value(metric).is_some_and(|value| value > 0.0);
    let mut tried = Vec::new();
    let mut missing = |check: &'static str, remove: &dyn Fn()| {
        remove();
        tried.push(check);
        let (rows, _) = bed.check(&[check]);
        if rows_with(&rows, "fail").is_empty() {
            let _infallible = writeln!(wrong, "{}: a device is missing, and {check} is {rows:?}", machine.name);
        }
    };
    if expects("nvme_disks") {
        missing("nvme-count", &|| bed.remove("/sys/class/nvme/nvme0"));
    }
    if expects("efa_devices") {
        missing("efa-count", &|| bed.remove(&format!("/sys/bus/pci/devices/{}", adapter_bus(0))));
    }
    if expects("fabric_ports_active") {
        missing("ib-count", &|| bed.remove("/sys/class/infiniband/mlx5_0"));
    }
    if expects("nvswitch_count") {
        missing("nvswitch", &|| bed.remove("/dev/nvidia-nvswitch0"));
    }
    missing("gpu-count", &|| {
        bed.remove(&format!("/sys/bus/pci/devices/{}", gpu_bus(0)));
        bed.installed.set_driver(&bed.fake.clone().gpu_unlisted(0));
    });
    (wrong, tried)
}

/// Detects the machine type as the program does.
fn detected(types: &MachineTypes, machine: &Machine, model: &GpuModel) -> Profile {
    let facts = MachineFacts {
        instance_type: (machine.cloud != "none").then(|| machine.name.clone()),
        gpu_ids: vec![model.pci_id.clone(); machine.gpus],
        ..MachineFacts::default()
    };
    let found = detect(types, &facts).found.unwrap_or_else(|| panic!("{} has no profile", machine.name));
    assert_ne!(found.source, DetectionSource::Chip, "{} has only the profile of its chip", machine.name);
    types.profile(&found.sku).unwrap()
}

#[test]
fn each_built_in_profile_finds_the_vendors_machine_healthy_and_a_missing_device() {
    let (table, types) = (table(), profiles::built_in());
    let model = |machine: &Machine| &table.gpu[&machine.gpu];
    let found: BTreeSet<String> =
        table.machine.iter().map(|machine| detected(&types, machine, model(machine)).sku.to_string()).collect();
    let all: BTreeSet<String> = types.iter().map(|file| file.sku.to_string()).collect();
    assert_eq!(found, all, "each profile has its machine in the table");

    let program = PathBuf::from(env!("CARGO_BIN_EXE_doctor-node"));
    let library = fake_nvidia_library(&program);
    let (next, results) = (AtomicUsize::new(0), Mutex::new((String::new(), BTreeMap::<&str, u32>::new())));
    let workers = thread::available_parallelism().map_or(2, usize::from).min(4);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(machine) = table.machine.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let bed = Bed::new(machine, model(machine), &program, &library);
                    let (wrong, tried) = judge(machine, &bed, &detected(&types, machine, model(machine)));
                    let mut results = results.lock().unwrap();
                    results.0.push_str(&wrong);
                    tried.into_iter().for_each(|check| *results.1.entry(check).or_default() += 1);
                }
            });
        }
    });
    let (wrong, tried) = results.into_inner().unwrap();
    assert!(wrong.is_empty(), "{wrong}");
    // So many profiles expect the device: a profile that no longer counts it changes this.
    let expected = [("efa-count", 8), ("gpu-count", 54), ("ib-count", 12), ("nvme-count", 7), ("nvswitch", 20)];
    assert_eq!(tried.into_iter().collect::<Vec<_>>(), expected);
}
