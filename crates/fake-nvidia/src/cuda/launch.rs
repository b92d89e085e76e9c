//! Launches: the arguments of a kernel, copied when it is enqueued, and which function computes it.

use std::{ffi::c_void, sync::Arc};

use super::{
    device::Device,
    kernels::{self, Arguments},
    ptx_module::{Function, Kernel, Parameter},
};

/// `CUtensorMap`, as the stand-in writes it: the address first.
pub(crate) const TENSOR_MAP_WORDS: usize = 16;

pub(crate) struct Launch {
    function: Arc<Function>,
    grid: u32,
    arguments: Arguments,
}

impl Launch {
    /// Copies the arguments.
    ///
    /// # Safety
    /// `arguments` points to as many pointers to values as the function has parameters.
    pub(crate) unsafe fn read(function: Arc<Function>, grid: u32, arguments: *const *const c_void) -> Self {
        let value = |(index, parameter): (usize, &Parameter)| {
            // SAFETY: guaranteed by the caller.
            let at = unsafe { arguments.add(index).read() };
            match parameter {
                // SAFETY: the value has the size of the parameter.
                Parameter::Word => u64::from(unsafe { at.cast::<u32>().read_unaligned() }),
                // SAFETY: as above; of a tensor map, only the address matters here.
                Parameter::DoubleWord | Parameter::TensorMap => unsafe { at.cast::<u64>().read_unaligned() },
            }
        };
        let arguments = Arguments::new(function.parameters.iter().enumerate().map(value).collect());
        Self { function, grid, arguments }
    }

    /// Executes the launch on its GPU's thread.
    pub(crate) fn run(self, device: &Device) {
        if device.error() != 0 {
            return;
        }
        let (grid, arguments) = (self.grid, &self.arguments);
        let result = match self.function.kernel {
            Kernel::Fill(kind) => kernels::patterns::fill(device, kind, arguments),
            Kernel::Verify(kind) => kernels::patterns::verify(device, kind, arguments),
            Kernel::PlantWords => kernels::patterns::plant_words(device, arguments),
            Kernel::MakeMatrix(storage) => kernels::products::make_matrix(device, storage, arguments),
            Kernel::Product { format, has_tensor_maps } => {
                kernels::products::multiply(device, format, has_tensor_maps, grid, arguments)
            }
            Kernel::CheckRows { is_float } => kernels::product_checks::check_rows(device, is_float, grid, arguments),
            Kernel::Locate => kernels::product_checks::locate(device, arguments),
            Kernel::PlantNumbers => kernels::product_checks::plant_numbers(device, arguments),
            Kernel::MakeValues => kernels::layers::make_values(device, arguments),
            Kernel::Layer(pass) => kernels::layers::compute(device, pass, grid, arguments),
            Kernel::Fingerprint => kernels::layers::fingerprint(device, grid, arguments),
            Kernel::PlantOutputs => kernels::layers::plant_outputs(device, arguments),
            Kernel::FillShares => kernels::shares::fill_shares(device, arguments),
            Kernel::CheckSums => kernels::shares::check_sums(device, arguments),
            Kernel::PlantNumber => kernels::shares::plant_number(device, arguments),
        };
        if let Err(error) = result {
            eprintln!("fake CUDA: {:?}: {error}", self.function.kernel);
            device.fail(error.code());
        }
    }
}
