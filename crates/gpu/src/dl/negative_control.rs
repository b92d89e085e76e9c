//! The negative control: verifies that the test still detects errors.
//!
//! A broken checker passes everything. Kernels that share no code with the checkers therefore inject errors into device
//! memory, the checkers run as usual, and every error must be found at its position. Otherwise the run proves nothing
//! about the GPU.

use std::collections::BTreeSet;

use super::{
    gemm::{Gemm, WrongNumber},
    layers::{self, Layers, OutputError, Pass, Replicas},
    memory::{MemoryTester, Pattern},
};
use crate::cuda::{CudaError, Gpu};

/// A kind of error, as faulty hardware produces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedErrorKind {
    /// A value is lost and replaced by zero.
    Zero,
    BitFlip,
    NotANumber,
    /// The same wrong value in every repeat, which a comparison of repeats would never reveal.
    Repeated,
}

impl InjectedErrorKind {
    pub const ALL: &[Self] = &[Self::Zero, Self::BitFlip, Self::NotANumber, Self::Repeated];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::BitFlip => "bit-flip",
            Self::NotANumber => "not-a-number",
            Self::Repeated => "repeated",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// Returns the code that `plant_words` and `plant_numbers` use.
    pub const fn code(self) -> u32 {
        match self {
            Self::Zero => 0,
            Self::BitFlip => 1,
            Self::NotANumber => 2,
            Self::Repeated => 3,
        }
    }
}

/// The result of injecting errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ControlResult {
    pub injected: u64,
    pub detected: u64,
    /// Positions reported as wrong that were not.
    pub false_alarms: u64,
}

impl ControlResult {
    pub const fn all_detected(self) -> bool {
        self.finds_errors() && self.false_alarms == 0
    }

    /// Returns whether every injected error was found. Others may be wrong as well: those are the GPU's own.
    pub const fn finds_errors(self) -> bool {
        self.injected > 0 && self.detected == self.injected
    }

    #[must_use]
    pub const fn combine(self, other: Self) -> Self {
        Self {
            injected: self.injected + other.injected,
            detected: self.detected + other.detected,
            false_alarms: self.false_alarms + other.false_alarms,
        }
    }
}

/// A deterministic pseudo-random sequence.
#[derive(Debug)]
struct PseudoRandom(u64);

impl PseudoRandom {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0) * u128::from(bound)) >> 64) as u64
    }
}

/// The number of rows that get an error at a time: few enough that there are untouched rows between them.
const ROWS_AT_A_TIME: u32 = 1024;

/// Injects at least `count` errors into products, at most one per row, and counts the rows that the check reports.
pub fn products(
    product: &Gemm<'_>,
    kind: InjectedErrorKind,
    count: u64,
    seed: u64,
) -> Result<ControlResult, CudaError> {
    let mut trial = ControlResult::default();
    let mut random = PseudoRandom(seed);
    let shape = product.shape;
    let at_a_time = ROWS_AT_A_TIME.min(shape.m / 2);
    while trial.injected < count {
        let step = shape.m / at_a_time;
        let injected: Vec<_> = (0..at_a_time)
            .map(|row| {
                (row * step * shape.n + random.below(shape.n.into()) as u32, kind.code(), random.below(32) as u32)
            })
            .collect();
        // The same error in two repeats: both must be detected.
        let repeats = if kind == InjectedErrorKind::Repeated { 2 } else { 1 };
        for _ in 0..repeats {
            product.multiply()?;
            let changed = product.inject(&injected)?;
            product.check()?;
            let flagged: BTreeSet<u32> = product.take_wrong_rows()?.into_iter().collect();
            let expected: BTreeSet<u32> = injected
                .iter()
                .zip(changed)
                .filter(|(_, changed)| *changed)
                .map(|((index, ..), _)| index / shape.n)
                .collect();
            trial = trial.combine(ControlResult {
                injected: expected.len() as u64,
                detected: expected.intersection(&flagged).count() as u64,
                false_alarms: flagged.difference(&expected).count() as u64,
            });
        }
    }
    // Also verifies that the wrong number in a wrong row is located.
    let index = random.below(u64::from(shape.m) * u64::from(shape.n)) as u32;
    product.multiply()?;
    if product.inject(&[(index, InjectedErrorKind::BitFlip.code(), 9)])? == [true] {
        product.check()?;
        let (rows, row) = (product.take_wrong_rows()?, index / shape.n);
        let located = if rows.contains(&row) { product.locate(row)? } else { Vec::new() };
        let is_here = |number: &WrongNumber| number.row * shape.n + number.column == index;
        let elsewhere = rows.iter().filter(|wrong| **wrong != row).count()
            + located.iter().filter(|number| !is_here(number)).count();
        let detected = located.iter().any(is_here).into();
        trial = trial.combine(ControlResult { injected: 1, detected, false_alarms: elsewhere as u64 });
    }
    Ok(trial)
}

/// Injects `count` errors into words of memory and counts those found at their position.
pub fn memory(
    gpu: &Gpu<'_>,
    tester: &MemoryTester<'_>,
    kind: InjectedErrorKind,
    count: u64,
    seed: u64,
) -> Result<ControlResult, CudaError> {
    let pattern = Pattern::random(seed);
    let buffer = gpu.allocate(64 << 20)?;
    let word_count = (buffer.bytes() / 8) as u64;
    let mut random = PseudoRandom(seed);
    let chosen: BTreeSet<u64> = (0..count).map(|_| random.below(word_count)).collect();
    let injected: Vec<_> = chosen.iter().map(|&index| (index, kind.code(), 0xdead_beef_0bad_f00d ^ index)).collect();
    let repeats = if kind == InjectedErrorKind::Repeated { 2 } else { 1 };
    let mut trial = ControlResult::default();
    for _ in 0..repeats {
        tester.fill(pattern, &buffer)?;
        tester.inject(&buffer, &injected)?;
        tester.verify(pattern, &buffer)?;
        let (_, wrong_words) = tester.take_wrong_words(pattern, std::slice::from_ref(&buffer))?;
        let flagged: BTreeSet<u64> = wrong_words.iter().map(|word| word.offset / 8).collect();
        trial = trial.combine(ControlResult {
            injected: chosen.len() as u64,
            detected: chosen.intersection(&flagged).count() as u64,
            false_alarms: flagged.difference(&chosen).count() as u64,
        });
    }
    Ok(trial)
}

/// Injects errors into the outputs of layers, in every replica of every pass, at least `count` of each kind, and counts
/// the replicas reported as wrong.
pub fn layers(layers: &Layers<'_>, kinds: &[InjectedErrorKind], count: u64) -> Result<ControlResult, CudaError> {
    let mut trial = ControlResult::default();
    for &kind in kinds {
        let mut random = PseudoRandom(kind.code().into());
        let mut of_kind = ControlResult::default();
        while of_kind.injected < count {
            of_kind = of_kind.combine(layers_round(layers, kind, &mut random)?);
        }
        trial = trial.combine(of_kind);
    }
    Ok(trial)
}

fn layers_round(
    layers: &Layers<'_>,
    kind: InjectedErrorKind,
    random: &mut PseudoRandom,
) -> Result<ControlResult, CudaError> {
    let replicas = layers.replicas();
    let mut injected = Vec::new();
    for pass in Pass::ALL {
        let numbers = pass.spec().numbers as u64;
        let error = |random: &mut PseudoRandom| match kind {
            InjectedErrorKind::Zero => OutputError::Zeroed,
            InjectedErrorKind::BitFlip | InjectedErrorKind::Repeated => {
                OutputError::Flipped { bit: random.below(32) as u32 }
            }
            InjectedErrorKind::NotANumber => OutputError::NotANumber,
        };
        if kind == InjectedErrorKind::Repeated {
            let error = error(random);
            injected.push(layers::InjectedError {
                pass,
                replicas: Replicas::All,
                place: random.below(numbers) as usize,
                error,
            });
        } else {
            injected.extend((0..replicas).map(|replica| {
                let error = error(random);
                let replicas = Replicas::One(replica);
                layers::InjectedError { pass, replicas, place: random.below(numbers) as usize, error }
            }));
        }
    }
    let report = layers.run(1, &injected)?;
    let mut trial = ControlResult::default();
    for pass in &report.passes {
        let of_pass = injected.iter().zip(&report.injected_changed).filter(|(one, _)| one.pass == pass.pass);
        let changed = of_pass.filter(|(_, changed)| **changed).flat_map(|(one, _)| match one.replicas {
            Replicas::One(replica) => replica..replica + 1,
            Replicas::All => 0..replicas,
        });
        let chosen: BTreeSet<usize> = changed.collect();
        // The first replica is also compared with the reference, where a NaN is never within the tolerance.
        let blind = kind == InjectedErrorKind::NotANumber && pass.deviation.is_allowed();
        trial = trial.combine(ControlResult {
            injected: chosen.len() as u64,
            detected: if blind { 0 } else { chosen.intersection(&pass.flagged_replicas).count() as u64 },
            false_alarms: pass.flagged_replicas.difference(&chosen).count() as u64,
        });
    }
    Ok(trial)
}
