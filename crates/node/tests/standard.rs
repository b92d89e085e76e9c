//! The suite `standard` on the simulated machine with eight GPUs, from the command line to the verdict: healthy, and
//! with each fault planted in its CUDA.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::{Duration, Instant},
};

use doctor_testbed::fake_machine::{FakeMachine, GPUS, InstalledMachine, fake_nvidia_library, gpu_bus};
use serde_json::Value;

/// Timeout that distinguishes a hang from slowness, even on a busy machine. Alone, `dl` takes a quarter of a minute.
const DEAD: Duration = Duration::from_secs(240);
const PROGRAM: &str = env!("CARGO_BIN_EXE_doctor-node");

fn install(machine: &FakeMachine) -> InstalledMachine {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    machine.install(Path::new(PROGRAM), LIBRARY.get_or_init(|| fake_nvidia_library(Path::new(PROGRAM))))
}

fn gpu(n: usize) -> String {
    format!("gpu:{}", gpu_bus(n))
}

/// The rows of a run, and the log of its tests.
struct Tested {
    rows: Vec<Value>,
    log: String,
    elapsed: Duration,
}

impl Tested {
    fn by(command: &mut Command) -> Self {
        let started = Instant::now();
        let Output { stdout, stderr, .. } = command.args(["--json", "--echo"]).output().unwrap();
        let log = String::from_utf8_lossy(&stderr).into_owned();
        let rows = serde_json::from_slice(&stdout).unwrap_or_else(|error| panic!("{error}: {log}"));
        Self { rows, log, elapsed: started.elapsed() }
    }

    fn verdict_of(&self, check: &str) -> &str {
        let row = self.rows.iter().find(|row| row["check"] == check);
        row.and_then(|row| row["verdict"].as_str()).unwrap_or_else(|| panic!("no row for {check}: {}", self.log))
    }

    /// Returns `REASON SEVERITY ENTITY` of each finding.
    fn findings(&self) -> BTreeSet<String> {
        let failing = self.rows.iter().filter(|row| row["verdict"] == "fail");
        let cell = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
        failing.map(|row| ["reason", "severity", "entity"].map(|key| cell(row, key)).join(" ")).collect()
    }

    fn assert_findings<const N: usize>(&self, expected: [String; N]) {
        assert_eq!(self.findings(), BTreeSet::from(expected), "{}", self.log);
    }

    fn assert_text(&self, reason: &str, expected: &str) {
        let texts: Vec<_> = self.rows.iter().filter(|row| row["reason"] == reason).map(|row| &row["text"]).collect();
        assert!(texts.iter().any(|text| text.as_str().is_some_and(|text| text.contains(expected))), "{texts:?}");
    }
}

#[test]
fn the_healthy_machine_passes_standard_in_bounded_time() {
    let storage = "[tests.storage.params]\ndirectories = ['/data']\nsize = '32MiB'\npattern_time = '200ms'\n";
    let installed = install(&FakeMachine::hgx_h100().policy(storage));
    fs::create_dir(installed.path("root/data")).unwrap();
    let tested = Tested::by(&mut installed.test(&["standard"]));
    assert_eq!((tested.verdict_of("dl"), tested.verdict_of("collective-loopback")), ("pass", "pass"), "{}", tested.log);
    let has_fio = Command::new("fio").arg("--version").output().is_ok_and(|output| output.status.success());
    if has_fio {
        assert_eq!(tested.verdict_of("storage"), "pass", "{}", tested.log);
    } else {
        println!("NOT RUN: storage in `standard`: fio is not installed");
        assert!(std::env::var_os("CI").is_none(), "in CI this must run");
    }
    for n in 0..GPUS {
        let lines: Vec<_> = tested.log.lines().filter(|line| line.starts_with(&gpu(n))).collect();
        let says = |text: &str| assert!(lines.iter().any(|line| line.contains(text)), "{text}: {lines:?}");
        ["NVIDIA H100 80GB HBM3, compute capability 9.0", "fp8: 1250.0 Tflop/s, checked", " done"]
            .into_iter()
            .for_each(says);
        says("19 passes on 132 of 132 multiprocessors, 0 wrong replicas");
        says("memory: 84.");
        let control = lines.iter().find(|line| line.contains("negative control")).unwrap();
        let words: Vec<&str> = control.split_whitespace().collect();
        let of = words.iter().position(|word| *word == "of").unwrap();
        assert!(words[of - 1] == words[of + 1] && words[of + 1].len() > 3, "{control}");
    }
    assert!(tested.log.contains("8 GPUs of 1 nodes"), "{}", tested.log);
    assert!(tested.log.contains("17179869184"), "the largest message has 16 GiB: {}", tested.log);
    assert!(tested.elapsed < DEAD, "{:?}", tested.elapsed);
}

#[test]
fn each_fault_planted_in_a_gpu_is_found_and_names_it() {
    let machine = FakeMachine::hgx_h100()
        .gpu_fault(0, "wrong_product", "bf16 77 123 12")
        .gpu_fault(1, "wrong_memory", "0x9c4000000 5")
        .gpu_fault(2, "wrong_layer", "gelu_forward 17 100 3")
        .gpu_fault(3, "wrong_copy", "d2h 4096 7")
        .gpu_fault(4, "slow_multiprocessor", "17 1.4")
        .gpu_fault(4, "wrong_copy", "d2d 0x10000000 0")
        .gpu_fault(5, "lost", "0.5 719")
        .gpu_fault(6, "wrong_copy", "h2d 4096 7")
        // Thermal slowdown by the hardware.
        .gpu_under_load(6, "clocks_event_reasons.active", 64.0)
        // Healthy, and of another generation: without fp8, with other kernels.
        .gpu_text(7, "compute_cap", "8.0");
    let tested = Tested::by(&mut install(&machine).test(&["dl"]));
    tested.assert_findings([
        format!("product-wrong isolate {}", gpu(0)),
        format!("memory-wrong isolate {}", gpu(1)),
        format!("layer-wrong isolate {}", gpu(2)),
        format!("copy-wrong isolate {}", gpu(3)),
        // One slow multiprocessor holds up each product.
        format!("multiprocessor-slow monitor {}", gpu(4)),
        format!("gpu-slow monitor {}", gpu(4)),
        format!("copy-wrong isolate {}", gpu(4)),
        format!("gpu-failed reboot {}", gpu(5)),
        format!("copy-wrong isolate {}", gpu(6)),
        format!("gpu-hot monitor {}", gpu(6)),
    ]);
    tested.assert_text("product-wrong", "row 77, column 123");
    tested.assert_text("memory-wrong", "bits 0x20;");
    tested.assert_text("layer-wrong", "gelu_forward: 6 wrong replicas, first by multiprocessor 17");
    tested.assert_text("multiprocessor-slow", "multiprocessor (SM) 17 takes 1.4");
    tested.assert_text("gpu-failed", "CUDA_ERROR_LAUNCH_FAILED");
    assert!(tested.log.lines().any(|line| line.starts_with(&gpu(7)) && line.ends_with("done")), "{}", tested.log);
}

/// What the stand-in's GPUs reach while they are healthy.
const PROFILE: &str = r#"
sku = "stand-in"
version = 1
[expect]
gemm_bf16_flop_per_s = 7.0e14
gemm_bf16_warm_flop_per_s = 6.8e14
gemm_fp16_flop_per_s = 6.9e14
gemm_tf32_flop_per_s = 3.6e14
gemm_fp32_flop_per_s = 4.4e13
gemm_fp8_flop_per_s = 1.25e15
gemm_int8_flop_per_s = 1.2e15
memory_bytes_per_s = 2.9e12
h2d_bytes_per_s = 5.5e10
d2h_bytes_per_s = 5.5e10
d2d_bytes_per_s = 2.8e12
p2p_bytes_per_s = 3.8e11
"#;

#[test]
fn a_gpu_that_is_slow_in_one_way_is_found_by_that() {
    // 44 % of the published peak in bf16: what a GPU reached that another process used.
    let slow: [(&str, f64); GPUS] = [
        ("gemm_bf16_flop_per_s", 0.44 * 989e12),
        ("gemm_bf16_warm_flop_per_s", 4.0e14),
        ("gemm_int8_flop_per_s", 9.0e14),
        ("memory_bytes_per_s", 2.0e12),
        ("h2d_bytes_per_s", 2.6e10),
        ("d2h_bytes_per_s", 2.6e10),
        ("d2d_bytes_per_s", 1.9e12),
        ("p2p_bytes_per_s", 1.0e11),
    ];
    let mut machine = FakeMachine::hgx_h100();
    for (n, (metric, rate)) in slow.into_iter().enumerate() {
        machine = machine.gpu_rate(n, metric, rate);
    }
    let installed = install(&machine);
    let profile = installed.path("chip.toml");
    fs::write(&profile, PROFILE).unwrap();
    let tested = Tested::by(installed.test(&["dl", "--profile"]).arg(profile));
    let gpus = (0..GPUS - 1).map(|n| format!("gpu-slow monitor {}", gpu(n)));
    let link = format!("gpu-slow monitor link:{}-{}", gpu_bus(GPUS - 1), gpu_bus(0));
    assert_eq!(tested.findings(), gpus.chain([link]).collect(), "{}", tested.log);
    for text in ["435.16 T", "warm, 400 T", "int8 900 T", "memory test 2 T", "1.9 T", "26 G", "100 G"] {
        tested.assert_text("gpu-slow", text);
    }
}

#[test]
fn a_copy_that_changes_between_two_gpus_names_the_link() {
    let machine = FakeMachine::hgx_h100().gpu_fault(2, "wrong_copy", "p2p 0x100000 3");
    let tested = Tested::by(&mut install(&machine).test(&["dl", "--set", "heat=0s"]));
    tested.assert_findings([format!("copy-wrong isolate link:{}-{}", gpu_bus(2), gpu_bus(3))]);
}

#[test]
fn a_machine_whose_gpus_cannot_be_opened_does_not_pass() {
    let unusable = FakeMachine::hgx_h100().gpu_fault(0, "wrong_weather", "rain");
    let mut without = FakeMachine::hgx_h100();
    for _ in 0..GPUS {
        without = without.gpu_unlisted(0);
    }
    for (machine, reason) in
        [(unusable, "failed"), (without, "missing"), (FakeMachine::hgx_h100().driver_fails(9), "missing")]
    {
        for test in ["dl", "collective"] {
            let tested = Tested::by(&mut install(&machine).test(&[test]));
            assert_eq!(tested.verdict_of(test), "inconclusive", "{}", tested.log);
            assert_eq!(tested.rows[0]["reason"], reason, "{:?}", tested.rows);
        }
    }
}
