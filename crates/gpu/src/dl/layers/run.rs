//! Runs the layers on a device: kernels are loaded and inputs created once, for any number of runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
};

use crate::{
    cuda::{Argument, Attribute, Buffer, CudaError, Gpu, Launch, Module},
    dl::kernels::LAYERS,
};

use super::{
    compare::{Deviation, wrong_numbers},
    exact,
    inject::{InjectedError, PassErrors},
    layer_inputs::Layer,
    passes::Pass,
    reference,
    report::{LayersReport, PassReport, WrongReplica, most_common},
};

/// As in kernels/layers.cuh.
const THREADS: u32 = 256;

/// One would do if blocks were distributed evenly, which is not guaranteed.
const REPLICAS_PER_MULTIPROCESSOR: usize = 2;

/// A NaN: an output that is never written is wrong.
const POISON: u32 = !0;

/// The number of wrong replicas of a pass that are examined in detail.
const MAX_WRONG_LISTED: usize = 16;

/// Compiles and runs all passes this many times, with at most one injected error.
pub fn run(gpu: &Gpu<'_>, repeats: u32, injected: Option<InjectedError>) -> Result<LayersReport, CudaError> {
    Layers::load(gpu)?.run(repeats, injected.as_slice())
}

/// The kernels and inputs, on a device.
#[derive(Debug)]
pub struct Layers<'g> {
    gpu: &'g Gpu<'g>,
    module: Module<'g>,
    multiprocessors: usize,
    replicas: u32,
    /// The inputs of all layers, one after the other.
    inputs: Buffer<'g>,
    outputs: Buffer<'g>,
    fingerprints: Buffer<'g>,
    /// The multiprocessor of each replica.
    places: Buffer<'g>,
    /// In the order of [`Pass::ALL`].
    expected: Vec<Expected>,
}

/// The expected outputs of a pass.
#[derive(Debug)]
struct Expected {
    reference: Vec<f64>,
    exact: Vec<f32>,
}

impl Expected {
    fn compute(pass: Pass) -> Self {
        Self { reference: reference::outputs(pass), exact: exact::outputs(pass) }
    }
}

impl<'g> Layers<'g> {
    /// Compiles the kernels, creates the inputs, and computes the expected outputs on the host.
    pub fn load(gpu: &'g Gpu<'g>) -> Result<Self, CudaError> {
        Self::with_module(gpu, gpu.module(LAYERS)?)
    }

    /// As [`Self::load`], with compiled kernels.
    pub(in crate::dl) fn with_module(gpu: &'g Gpu<'g>, module: Module<'g>) -> Result<Self, CudaError> {
        thread::scope(|scope| {
            let expected = scope.spawn(|| Pass::ALL.map(Expected::compute).into());
            let multiprocessors = usize::try_from(gpu.attribute(Attribute::Multiprocessors)?).unwrap_or_default();
            let replicas = multiprocessors * REPLICAS_PER_MULTIPROCESSOR;
            let largest = Pass::ALL.iter().map(|pass| pass.spec().numbers).max().unwrap_or_default();
            let count = Layer::ALL.iter().map(|layer| layer.count()).sum::<usize>();
            let inputs = gpu.allocate(count * size_of::<f32>())?;
            make_inputs(&module, &inputs)?;
            Ok(Self {
                gpu,
                module,
                multiprocessors,
                replicas: u32::try_from(replicas).expect("the number of replicas fits into u32"),
                inputs,
                outputs: gpu.allocate(replicas * largest * size_of::<f32>())?,
                fingerprints: gpu.allocate(replicas * size_of::<u64>())?,
                places: gpu.allocate(replicas * size_of::<u32>())?,
                expected: expected.join().expect("the reference computation does not panic"),
            })
        })
    }

    /// Returns the number of replicas of each pass: two per multiprocessor.
    pub const fn replicas(&self) -> usize {
        self.replicas as usize
    }

    /// Runs all passes this many times.
    ///
    /// # Panics
    /// Panics if an error is to be injected where there is no output.
    pub fn run(&self, repeats: u32, injected: &[InjectedError]) -> Result<LayersReport, CudaError> {
        let mut changed = vec![false; injected.len()];
        let mut passes = Vec::with_capacity(Pass::ALL.len());
        for (pass, expected) in Pass::ALL.into_iter().zip(&self.expected) {
            passes.push(self.pass(pass, expected, repeats, injected, &mut changed)?);
        }
        let (replicas, multiprocessors) = (self.replicas(), self.multiprocessors);
        Ok(LayersReport { passes, replicas, repeats, multiprocessors, injected_changed: changed })
    }

    fn pass(
        &self,
        pass: Pass,
        expected: &Expected,
        repeats: u32,
        injected: &[InjectedError],
        changed: &mut [bool],
    ) -> Result<PassReport, CudaError> {
        let known = pass.spec();
        let kernel = self.module.function("plant_outputs")?;
        let errors = PassErrors::upload(self.gpu, kernel, pass, self.replicas(), injected)?;
        let mut counts = BTreeMap::new();
        let mut report = PassReport {
            pass,
            fingerprint: 0,
            deviation: Deviation::NONE,
            seconds: 0.0,
            multiprocessors: BTreeSet::new(),
            wrong_replicas: 0,
            flagged_replicas: BTreeSet::new(),
            wrong: Vec::new(),
        };
        for repeat in 0..repeats {
            report.seconds += self.compute(pass)?;
            if let Some(errors) = &errors {
                errors.inject(&self.outputs, changed)?;
            }
            let found = self.fingerprints(known.numbers)?;
            let places: Vec<u32> = self.places.read(self.replicas())?;
            if repeat == 0 {
                let outputs: Vec<f32> = self.outputs.read(known.numbers)?;
                report.deviation = Deviation::between(&outputs, &expected.reference, known.tolerance);
            }
            for (replica, (fingerprint, multiprocessor)) in found.into_iter().zip(places).enumerate() {
                *counts.entry(fingerprint).or_insert(0) += 1;
                report.multiprocessors.insert(multiprocessor);
                if fingerprint == known.fingerprint {
                    continue;
                }
                report.wrong_replicas += 1;
                report.flagged_replicas.insert(replica);
                if report.wrong.len() < MAX_WRONG_LISTED {
                    let outputs: Vec<f32> = self.outputs.read_from(replica * known.numbers, known.numbers)?;
                    let (numbers, first) = wrong_numbers(&outputs, &expected.exact);
                    report.wrong.push(WrongReplica { repeat, replica, multiprocessor, fingerprint, numbers, first });
                }
            }
        }
        report.fingerprint = most_common(counts);
        Ok(report)
    }

    /// Runs a pass once on every replica and returns its seconds.
    fn compute(&self, pass: Pass) -> Result<f64, CudaError> {
        let known = pass.spec();
        let kernel = self.module.function(known.name)?;
        self.outputs.fill(POISON)?;
        let before: usize = Layer::ALL[..pass.layer() as usize].iter().map(|layer| layer.count()).sum();
        let inputs = self.inputs.address() + (before * size_of::<f32>()) as u64;
        let stride = known.numbers as u32;
        self.gpu.timed(|| {
            kernel.launch(
                Launch::new(self.replicas, THREADS),
                &[Argument::Address(inputs), (&self.outputs).into(), stride.into(), (&self.places).into()],
            )
        })
    }

    fn fingerprints(&self, numbers: usize) -> Result<Vec<u64>, CudaError> {
        let (kernel, numbers) = (self.module.function("fingerprint")?, numbers as u32);
        kernel.launch(
            Launch::new(self.replicas, THREADS),
            &[(&self.outputs).into(), numbers.into(), numbers.into(), (&self.fingerprints).into()],
        )?;
        self.fingerprints.read(self.replicas())
    }
}

/// Enqueues the creation of the inputs of all layers, one after the other.
fn make_inputs(module: &Module<'_>, to: &Buffer<'_>) -> Result<(), CudaError> {
    let kernel = module.function("make_values")?;
    let mut address = to.address();
    for layer in Layer::ALL {
        for (index, tensor) in layer.tensors().iter().enumerate() {
            let count = tensor.count as u32;
            let (kind, range, scale) = tensor.spread.encode();
            kernel.launch(
                Launch::new(count.div_ceil(THREADS), THREADS),
                &[
                    Argument::Address(address),
                    count.into(),
                    layer.seed(index).into(),
                    kind.into(),
                    range.into(),
                    scale.into(),
                ],
            )?;
            address += (tensor.count * size_of::<f32>()) as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without `.rn`, the driver's compiler may fuse a multiplication and an addition, which rounds differently;
    /// approximations differ between architectures; sums by atomics have no order.
    #[test]
    fn every_operation_rounds_in_one_way_only() {
        let arithmetic = ["add", "sub", "mul", "fma", "mad", "div", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "tanh"];
        let mut count = 0;
        for line in LAYERS.lines() {
            let name = line.split_whitespace().find(|token| !token.starts_with('@')).unwrap_or_default();
            let operation = name.split('.').next().unwrap_or_default();
            assert!(!["atom", "red"].contains(&operation), "{line}");
            if name.ends_with(".f32") && arithmetic.contains(&operation) {
                assert!(name.contains(".rn.") && !name.contains(".ftz"), "{line}");
                count += 1;
            }
        }
        assert!(count > 100, "{count} operations");
    }
}
