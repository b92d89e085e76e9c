//! The shipped kernels: PTX, which the driver compiles for the present GPU. `scripts/kernels.sh` generates it from the
//! CUDA sources.

use super::gemm::{NumberFormat, is_hopper};
use crate::cuda::{CudaError, Gpu, Module};

pub(super) const MEMORY: &str = include_str!("../../kernels/memory.ptx");
pub(super) const CHECKS: &str = include_str!("../../kernels/checks.ptx");
pub(super) const LAYERS: &str = include_str!("../../kernels/layers.ptx");

/// Returns the kernel that multiplies such numbers on Hopper, or on any other GPU. `None`: the GPU has no such
/// instruction that our kernels use.
pub(super) const fn gemm_ptx(number: NumberFormat, hopper: bool) -> Option<&'static str> {
    Some(match (number, hopper) {
        (NumberFormat::Fp32, _) => include_str!("../../kernels/products_fp32.ptx"),
        (NumberFormat::Bf16, true) => include_str!("../../kernels/products_hopper_bf16.ptx"),
        (NumberFormat::Fp16, true) => include_str!("../../kernels/products_hopper_fp16.ptx"),
        (NumberFormat::Tf32, true) => include_str!("../../kernels/products_hopper_tf32.ptx"),
        (NumberFormat::Fp8, true) => include_str!("../../kernels/products_hopper_fp8.ptx"),
        (NumberFormat::Int8, true) => include_str!("../../kernels/products_hopper_int8.ptx"),
        (NumberFormat::Bf16, false) => include_str!("../../kernels/products_ampere_bf16.ptx"),
        (NumberFormat::Fp16, false) => include_str!("../../kernels/products_ampere_fp16.ptx"),
        (NumberFormat::Tf32, false) => include_str!("../../kernels/products_ampere_tf32.ptx"),
        (NumberFormat::Int8, false) => include_str!("../../kernels/products_ampere_int8.ptx"),
        (NumberFormat::Fp8, false) => return None,
    })
}

/// The small kernels, compiled.
#[derive(Debug)]
pub(super) struct CommonModules<'g> {
    pub(super) memory: Module<'g>,
    pub(super) layers: Module<'g>,
    pub(super) checks: Module<'g>,
}

impl<'g> CommonModules<'g> {
    pub(super) fn load(gpu: &'g Gpu<'g>) -> Result<Self, CudaError> {
        let (modules, ()) = gpu.modules(&[MEMORY, LAYERS, CHECKS], || Ok(()))?;
        let [memory, layers, checks] = <[Module<'g>; 3]>::try_from(modules).expect("one module per source");
        Ok(Self { memory, layers, checks })
    }
}

/// Compiles the product kernels for each type of number that the GPU has. The driver takes a second or more for each;
/// meanwhile `work` may use the device.
pub(super) fn load_gemm_modules<'g, T>(
    gpu: &'g Gpu<'g>,
    work: impl FnOnce() -> Result<T, CudaError>,
) -> Result<(Vec<(NumberFormat, Module<'g>)>, T), CudaError> {
    let hopper = is_hopper(gpu)?;
    let known = NumberFormat::ALL.iter().filter_map(|&number| Some((number, gemm_ptx(number, hopper)?)));
    let (numbers, sources): (Vec<_>, Vec<_>) = known.unzip();
    let (modules, done) = gpu.modules(&sources, work)?;
    Ok((numbers.into_iter().zip(modules).collect(), done))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Driver 525 shipped with CUDA 12.0 and accepts PTX up to 8.0.
    #[test]
    fn every_kernel_is_ptx_that_the_oldest_supported_driver_accepts() {
        let everywhere =
            NumberFormat::ALL.iter().filter_map(|&number| gemm_ptx(number, false)).chain([MEMORY, CHECKS, LAYERS]);
        let hopper = NumberFormat::ALL.iter().filter(|&&number| number != NumberFormat::Fp32);
        let hopper = hopper.filter_map(|&number| gemm_ptx(number, true));
        for (ptx, target) in everywhere.map(|ptx| (ptx, "sm_80")).chain(hopper.map(|ptx| (ptx, "sm_90a"))) {
            let mut lines = ptx.lines();
            assert_eq!(lines.next(), Some(".version 8.0"));
            assert_eq!(lines.next(), Some(format!(".target {target}").as_str()));
        }
    }
}
