//! Modules: the names and parameters of the kernels in a PTX text, and what they multiply. The kernels themselves are
//! functions of this crate.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    contents::{matrix::Storage, pattern::PatternKind},
    gpu_model::NumberFormat,
    kernels::layers,
};

/// A kernel of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Fill(PatternKind),
    Verify(PatternKind),
    PlantWords,
    MakeMatrix(Storage),
    Product {
        format: NumberFormat,
        has_tensor_maps: bool,
    },
    CheckRows {
        is_float: bool,
    },
    Locate,
    PlantNumbers,
    MakeValues,
    /// An index into [`layers::PASSES`].
    Layer(usize),
    Fingerprint,
    PlantOutputs,
    FillShares,
    CheckSums,
    PlantNumber,
}

/// A parameter, by its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parameter {
    Word,
    DoubleWord,
    TensorMap,
}

/// A kernel with the parameters that its PTX declares.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) kernel: Kernel,
    pub(crate) parameters: Vec<Parameter>,
}

/// The functions of a module, by name.
type PtxModule = Vec<(String, Arc<Function>)>;

/// A GPU that lacks the instructions of a module.
const NO_BINARY_FOR_GPU: i32 = 209;
const INVALID_PTX: i32 = 218;

static MODULES: Mutex<Vec<PtxModule>> = Mutex::new(Vec::new());
static FUNCTIONS: Mutex<Vec<Arc<Function>>> = Mutex::new(Vec::new());

/// Loads a module for a GPU of this compute capability. Returns its handle.
pub(crate) fn load(ptx: &str, capability: (i32, i32)) -> Result<usize, i32> {
    let target = ptx.lines().find_map(|line| line.strip_prefix(".target ")).ok_or(INVALID_PTX)?;
    let (number, only_this) = match target.trim().strip_prefix("sm_").ok_or(INVALID_PTX)? {
        number if number.ends_with('a') => (&number[..number.len() - 1], true),
        number => (number, false),
    };
    let (wanted, has): (i32, i32) = (number.parse().map_err(|_| INVALID_PTX)?, capability.0 * 10 + capability.1);
    if has < wanted || (only_this && has != wanted) {
        return Err(NO_BINARY_FOR_GPU);
    }
    let mut module = PtxModule::new();
    let mut lines = ptx.lines();
    while let Some(line) = lines.next() {
        let Some((_, name)) = line.split_once(".entry ") else { continue };
        let name = name.trim_end_matches('(');
        let parameters = lines.by_ref().take_while(|line| !line.starts_with(')')).filter_map(parameter).collect();
        if let Some(kernel) = kernel(name, ptx) {
            module.push((name.to_owned(), Arc::new(Function { kernel, parameters })));
        }
    }
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    modules.push(module);
    Ok(modules.len())
}

fn parameter(line: &str) -> Option<Parameter> {
    let kind = line.trim().strip_prefix(".param ")?;
    Some(match kind {
        kind if kind.starts_with(".u64") => Parameter::DoubleWord,
        kind if kind.starts_with(".u32") || kind.starts_with(".f32") => Parameter::Word,
        kind if kind.contains("[128]") => Parameter::TensorMap,
        _ => return None,
    })
}

/// Returns the handle of a function.
pub(crate) fn function(module: usize, name: &str) -> Option<usize> {
    let function = {
        let modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&modules.get(module.checked_sub(1)?)?.iter().find(|(known, _)| known == name)?.1)
    };
    let mut functions = FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let place = functions.iter().position(|known| *known == function);
    Some(
        1 + place.unwrap_or_else(|| {
            functions.push(function);
            functions.len() - 1
        }),
    )
}

pub(crate) fn by_handle(handle: usize) -> Option<Arc<Function>> {
    FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner).get(handle.checked_sub(1)?).cloned()
}

fn kernel(name: &str, ptx: &str) -> Option<Kernel> {
    let layer = layers::PASSES.iter().position(|pass| pass.name == name).map(Kernel::Layer);
    let after = |verb: &str| name.strip_prefix(verb);
    layer
        .or_else(|| PatternKind::named(after("fill_")?).map(Kernel::Fill))
        .or_else(|| PatternKind::named(after("verify_")?).map(Kernel::Verify))
        .or_else(|| Storage::named(after("make_")?).map(Kernel::MakeMatrix))
        .or_else(|| {
            Some(match name {
                "plant_words" => Kernel::PlantWords,
                "product_of_matrices" => product(ptx),
                "check_rows_float" => Kernel::CheckRows { is_float: true },
                "check_rows_int" => Kernel::CheckRows { is_float: false },
                "locate" => Kernel::Locate,
                "plant_numbers" => Kernel::PlantNumbers,
                "make_values" => Kernel::MakeValues,
                "fingerprint" => Kernel::Fingerprint,
                "plant_outputs" => Kernel::PlantOutputs,
                "fill_shares" => Kernel::FillShares,
                "check_sums" => Kernel::CheckSums,
                "plant_number" => Kernel::PlantNumber,
                _ => return None,
            })
        })
}

/// Tells from its instructions what a kernel multiplies. Without the tensor cores, it is single precision.
fn product(ptx: &str) -> Kernel {
    let instruction =
        ptx.lines().map(str::trim).find(|line| line.starts_with("wgmma.mma") || line.starts_with("mma.sync"));
    let types = [
        (".bf16.bf16", NumberFormat::Bf16),
        (".f16.f16", NumberFormat::Fp16),
        (".tf32.tf32", NumberFormat::Tf32),
        (".e4m3.e4m3", NumberFormat::Fp8),
        (".s8.s8", NumberFormat::Int8),
    ];
    let format = instruction.and_then(|line| types.iter().find(|(word, _)| line.contains(word)));
    let has_tensor_maps = instruction.is_some_and(|line| line.starts_with("wgmma"));
    Kernel::Product { format: format.map_or(NumberFormat::Fp32, |(_, format)| *format), has_tensor_maps }
}
