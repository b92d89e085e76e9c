//! What a GPU is and how fast, from the scene: its table `[gpu.cuda]`, which also has the planted faults.
//!
//! The rates are invented. A GPU without a rate in its scene has about that of an H100.

use std::fmt;

use crate::fixture::{FakeGpu, Field};

/// The formats of numbers that products have, by their names in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum NumberFormat {
    Bf16,
    Fp16,
    Tf32,
    Fp32,
    Fp8,
    Int8,
}

impl NumberFormat {
    pub(crate) const ALL: [Self; 6] = [Self::Bf16, Self::Fp16, Self::Tf32, Self::Fp32, Self::Fp8, Self::Int8];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Tf32 => "tf32",
            Self::Fp32 => "fp32",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyKind {
    ToDevice,
    ToHost,
    OnDevice,
    ToPeer,
}

impl CopyKind {
    const ALL: [(Self, &'static str); 4] =
        [(Self::ToDevice, "h2d"), (Self::ToHost, "d2h"), (Self::OnDevice, "d2d"), (Self::ToPeer, "p2p")];
}

/// Operations and bytes per second.
#[derive(Debug, Clone)]
pub(crate) struct Rates {
    /// In the order of [`NumberFormat::ALL`]. The check of a product takes no time of its own.
    gemm: [f64; 6],
    /// After some time under load.
    pub(crate) gemm_bf16_warm: f64,
    pub(crate) memory: f64,
    pub(crate) h2d: f64,
    pub(crate) d2h: f64,
    pub(crate) d2d: f64,
    pub(crate) p2p: f64,
    /// The bus bandwidth of an all-reduce inside the machine, and through its network adapters. `None`: measured, not
    /// invented.
    pub(crate) nccl: Option<f64>,
    pub(crate) nccl_loopback: Option<f64>,
}

impl Rates {
    const DEFAULT: Self = Self {
        gemm: [7.0e14, 6.9e14, 3.6e14, 4.4e13, 1.25e15, 1.2e15],
        gemm_bf16_warm: 6.8e14,
        memory: 2.9e12,
        h2d: 5.5e10,
        d2h: 5.5e10,
        d2d: 2.8e12,
        p2p: 3.8e11,
        nccl: None,
        nccl_loopback: None,
    };

    pub(crate) fn gemm(&self, format: NumberFormat) -> f64 {
        self.gemm[format as usize]
    }

    /// Sets the rate with the name of a metric. Returns `None` for an unknown name.
    fn set(&mut self, metric: &str, rate: f64) -> Option<()> {
        let place = match metric {
            "gemm_bf16_warm_flop_per_s" => &mut self.gemm_bf16_warm,
            "memory_bytes_per_s" => &mut self.memory,
            "h2d_bytes_per_s" => &mut self.h2d,
            "d2h_bytes_per_s" => &mut self.d2h,
            "d2d_bytes_per_s" => &mut self.d2d,
            "p2p_bytes_per_s" => &mut self.p2p,
            "nccl_busbw_bytes_per_s" => self.nccl.get_or_insert_default(),
            "nccl_ib_loopback_busbw_bytes_per_s" => self.nccl_loopback.get_or_insert_default(),
            _ => {
                let name = metric.strip_prefix("gemm_")?.strip_suffix("_flop_per_s")?;
                let format = NumberFormat::ALL.iter().position(|format| format.name() == name)?;
                &mut self.gemm[format]
            }
        };
        *place = rate;
        (rate > 0.0).then_some(())
    }
}

/// The faults of one GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct PlantedFaults {
    pub(crate) product: Option<WrongProduct>,
    pub(crate) memory: Option<WeakBit>,
    pub(crate) layer: Option<WrongLayer>,
    pub(crate) copy: Option<WrongCopy>,
    /// The multiprocessor, and how many times as long it takes.
    pub(crate) slow_multiprocessor: Option<(u32, f64)>,
    /// The seconds of work after which the GPU fails, and the `CUresult` of every call from then on.
    pub(crate) lost: Option<(f64, i32)>,
}

/// One number of every product in this format is wrong.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrongProduct {
    pub(crate) format: NumberFormat,
    pub(crate) row: u32,
    pub(crate) column: u32,
    pub(crate) bit: u32,
}

/// A cell that inverts what is written to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WeakBit {
    /// The byte, from the beginning of the GPU's memory.
    pub(crate) offset: u64,
    /// Within the 32-bit word.
    pub(crate) bit: u32,
}

/// One output of a layer is wrong wherever this multiprocessor computes it.
#[derive(Debug, Clone)]
pub(crate) struct WrongLayer {
    pub(crate) pass: String,
    pub(crate) multiprocessor: u32,
    pub(crate) output: u64,
    pub(crate) bit: u32,
}

/// One word of every copy of this kind that is long enough arrives wrong.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrongCopy {
    pub(crate) kind: CopyKind,
    pub(crate) offset: u64,
    pub(crate) bit: u32,
}

#[derive(Debug, Clone)]
pub(crate) struct GpuModel {
    pub(crate) name: String,
    /// As in the scene.
    pub(crate) bus: String,
    pub(crate) multiprocessors: u32,
    /// Major and minor compute capability.
    pub(crate) capability: (i32, i32),
    /// The memory that programs can allocate, and how much of it other programs use.
    pub(crate) memory_bytes: u64,
    pub(crate) memory_used: u64,
    /// Whether opening it fails, or never returns.
    pub(crate) is_lost: bool,
    pub(crate) hangs: bool,
    pub(crate) rates: Rates,
    pub(crate) faults: PlantedFaults,
}

/// A key of the scene that has no meaning, or a value that cannot be parsed.
#[derive(Debug)]
pub(crate) struct SceneError {
    key: String,
    bus: String,
}

impl fmt::Display for SceneError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot use `{}` of {} in [gpu.cuda]", self.key, self.bus)
    }
}

impl GpuModel {
    /// A small GPU, without a scene. Its messages take as long as the sockets do.
    pub(crate) fn without_scene(index: usize) -> Self {
        Self {
            name: "NVIDIA Stand-in".to_owned(),
            bus: format!("0000:{:02x}:00.0", 0x18 + 0x10 * index),
            multiprocessors: 8,
            capability: (9, 0),
            memory_bytes: 64 << 20,
            memory_used: 0,
            is_lost: false,
            hangs: false,
            rates: Rates::DEFAULT,
            faults: PlantedFaults::default(),
        }
    }

    pub(crate) fn from_scene(gpu: &FakeGpu) -> Result<Self, SceneError> {
        let text = |name: &str| match gpu.field(name, false) {
            Some(Field::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let number = |name: &str, otherwise: f64| match gpu.field(name, false) {
            Some(Field::Number(number)) => *number,
            _ => otherwise,
        };
        let capability = text("compute_cap").unwrap_or_default();
        let (major, minor) = capability.split_once('.').unwrap_or(("9", "0"));
        let total = number("memory.total", 80e9);
        let mut model = Self {
            name: text("name").unwrap_or_default(),
            bus: gpu.bus.clone(),
            multiprocessors: 132,
            capability: (major.parse().unwrap_or(9), minor.parse().unwrap_or(0)),
            memory_bytes: (total - number("memory.reserved", 0.0)).max(0.0) as u64,
            memory_used: number("memory.used", 0.0) as u64,
            is_lost: gpu.handle != 0 || matches!(gpu.field("name", false), Some(Field::Error(_))),
            hangs: gpu.hang,
            rates: Rates { nccl: Some(4.7e11), nccl_loopback: Some(4.0e10), ..Rates::DEFAULT },
            faults: PlantedFaults::default(),
        };
        for (key, value) in &gpu.cuda {
            let wrong = || SceneError { key: key.clone(), bus: gpu.bus.clone() };
            model.set(key, value).ok_or_else(wrong)?;
        }
        Ok(model)
    }

    fn set(&mut self, key: &str, value: &Field) -> Option<()> {
        match (key, value) {
            ("multiprocessors", Field::Number(count)) => self.multiprocessors = *count as u32,
            (metric, Field::Number(rate)) => self.rates.set(metric, *rate)?,
            (fault, Field::Text(text)) => self.faults.set(fault, &text.split_whitespace().collect::<Vec<_>>())?,
            (_, Field::Error(_)) => return None,
        }
        Some(())
    }

    /// Returns the rate of products in this format.
    pub(crate) fn gemm_rate(&self, format: NumberFormat, is_warm: bool) -> f64 {
        let rate = match format {
            NumberFormat::Bf16 if is_warm => self.rates.gemm_bf16_warm,
            _ => self.rates.gemm(format),
        };
        // Tiles are distributed evenly in advance: all wait for the slowest multiprocessor.
        rate / self.faults.slow_multiprocessor.map_or(1.0, |(_, factor)| factor.max(1.0))
    }
}

impl PlantedFaults {
    /// Parses a fault from its words. Returns `None` for an unknown one.
    fn set(&mut self, fault: &str, words: &[&str]) -> Option<()> {
        match (fault, words) {
            ("wrong_product", [format, row, column, bit]) => {
                let format = NumberFormat::ALL.into_iter().find(|known| known.name() == *format)?;
                let (row, column) = (row.parse().ok()?, column.parse().ok()?);
                self.product = Some(WrongProduct { format, row, column, bit: parse_bit(bit)? });
            }
            ("wrong_memory", [offset, bit]) => {
                self.memory = Some(WeakBit { offset: parse_offset(offset)?, bit: parse_bit(bit)? });
            }
            ("wrong_layer", [pass, multiprocessor, output, bit]) => {
                let (multiprocessor, output) = (multiprocessor.parse().ok()?, output.parse().ok()?);
                self.layer =
                    Some(WrongLayer { pass: (*pass).to_owned(), multiprocessor, output, bit: parse_bit(bit)? });
            }
            ("wrong_copy", [kind, offset, bit]) => {
                let (kind, _) = *CopyKind::ALL.iter().find(|(_, name)| name == kind)?;
                self.copy = Some(WrongCopy { kind, offset: parse_offset(offset)?, bit: parse_bit(bit)? });
            }
            ("slow_multiprocessor", [multiprocessor, factor]) => {
                self.slow_multiprocessor = Some((multiprocessor.parse().ok()?, factor.parse().ok()?));
            }
            ("lost", [seconds, code]) => self.lost = Some((seconds.parse().ok()?, code.parse().ok()?)),
            _ => return None,
        }
        Some(())
    }
}

fn parse_bit(text: &str) -> Option<u32> {
    text.parse().ok().filter(|bit| *bit < 32)
}

/// Parses a multiple of the word's size, in bytes: decimal, or hexadecimal after `0x`.
fn parse_offset(text: &str) -> Option<u64> {
    let offset = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => text.parse().ok()?,
    };
    (offset % 4 == 0).then_some(offset)
}
