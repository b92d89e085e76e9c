//! The kernels as they are shipped: PTX, which the driver compiles for the GPU it finds. `scripts/kernels.sh` makes it
//! from the CUDA sources.

use super::products::{Number, is_hopper};
use crate::cuda::{CudaError, Gpu, Module};

pub(super) const MEMORY: &str = include_str!("../../kernels/memory.ptx");
pub(super) const CHECKS: &str = include_str!("../../kernels/checks.ptx");
pub(super) const LAYERS: &str = include_str!("../../kernels/layers.ptx");

/// The kernel that multiplies such numbers on a GPU of Hopper's, or on any other. `None`: it cannot, as far as we know how
/// to ask it.
pub(super) const fn product(number: Number, hopper: bool) -> Option<&'static str> {
    Some(match (number, hopper) {
        (Number::Fp32, _) => include_str!("../../kernels/products_fp32.ptx"),
        (Number::Bf16, true) => include_str!("../../kernels/products_hopper_bf16.ptx"),
        (Number::Fp16, true) => include_str!("../../kernels/products_hopper_fp16.ptx"),
        (Number::Tf32, true) => include_str!("../../kernels/products_hopper_tf32.ptx"),
        (Number::Fp8, true) => include_str!("../../kernels/products_hopper_fp8.ptx"),
        (Number::Int8, true) => include_str!("../../kernels/products_hopper_int8.ptx"),
        (Number::Bf16, false) => include_str!("../../kernels/products_ampere_bf16.ptx"),
        (Number::Fp16, false) => include_str!("../../kernels/products_ampere_fp16.ptx"),
        (Number::Tf32, false) => include_str!("../../kernels/products_ampere_tf32.ptx"),
        (Number::Int8, false) => include_str!("../../kernels/products_ampere_int8.ptx"),
        (Number::Fp8, false) => return None,
    })
}

/// Every kernel that fits a GPU, compiled.
#[derive(Debug)]
pub(super) struct Kernels<'g> {
    pub(super) memory: Module<'g>,
    pub(super) layers: Module<'g>,
    pub(super) checks: Module<'g>,
    pub(super) products: Vec<(Number, Module<'g>)>,
}

impl<'g> Kernels<'g> {
    /// All at the same time: the driver takes a second and more over some of them.
    pub(super) fn load(gpu: &'g Gpu<'g>) -> Result<Self, CudaError> {
        let hopper = is_hopper(gpu)?;
        let products = Number::ALL.iter().filter_map(|&number| Some((number, product(number, hopper)?)));
        let (numbers, mut sources): (Vec<_>, Vec<_>) = products.unzip();
        sources.extend([MEMORY, LAYERS, CHECKS]);
        let mut modules = gpu.modules(&sources)?;
        let mut last = || modules.pop().expect("as many modules as sources");
        let (checks, layers, memory) = (last(), last(), last());
        Ok(Self { memory, layers, checks, products: numbers.into_iter().zip(modules).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Driver 525 came with CUDA 12.0 and understands PTX up to 8.0.
    #[test]
    fn every_kernel_is_ptx_that_the_oldest_driver_understands() {
        let everywhere =
            Number::ALL.iter().filter_map(|&number| product(number, false)).chain([MEMORY, CHECKS, LAYERS]);
        let hopper = Number::ALL.iter().filter(|&&number| number != Number::Fp32);
        let hopper = hopper.filter_map(|&number| product(number, true));
        for (ptx, target) in everywhere.map(|ptx| (ptx, "sm_80")).chain(hopper.map(|ptx| (ptx, "sm_90a"))) {
            let mut lines = ptx.lines();
            assert_eq!(lines.next(), Some(".version 8.0"));
            assert_eq!(lines.next(), Some(format!(".target {target}").as_str()));
        }
    }
}
