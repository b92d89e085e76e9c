//! The layers: their inputs, the passes, and the comparison of replicas.
//!
//! Every replica computes the same from the same inputs, so a pass is computed once for each content of its inputs, and
//! replicas differ only where an error was planted.

mod elementwise;
mod functions;
mod matrices;
mod rows;

use std::sync::{Arc, Mutex, PoisonError};

use super::{Arguments, KernelError};
use crate::cuda::{
    contents::{
        Content,
        layer_output::{LayerOutput, fingerprint_term},
        matrix::hash,
    },
    device::Device,
};

pub(crate) struct LayerPass {
    pub(crate) name: &'static str,
    /// The numbers in its inputs.
    inputs: usize,
    compute: fn(&[f32]) -> Vec<f32>,
}

const fn pass(name: &'static str, inputs: usize, compute: fn(&[f32]) -> Vec<f32>) -> LayerPass {
    LayerPass { name, inputs, compute }
}

const PASS_COUNT: usize = 19;

pub(crate) static PASSES: [LayerPass; PASS_COUNT] = [
    pass("linear_forward", matrices::LINEAR_INPUT, matrices::linear_forward),
    pass("linear_backward", matrices::LINEAR_INPUT, matrices::linear_backward),
    pass("conv2d_forward", matrices::CONV_INPUT, matrices::conv2d_forward),
    pass("conv2d_backward", matrices::CONV_INPUT, matrices::conv2d_backward),
    pass("attention_forward", matrices::ATTENTION_INPUT, matrices::attention_forward),
    pass("attention_backward", matrices::ATTENTION_INPUT, matrices::attention_backward),
    pass("layernorm_forward", rows::LAYER_NORM_INPUT, rows::layer_norm_forward),
    pass("layernorm_backward", rows::LAYER_NORM_INPUT, rows::layer_norm_backward),
    pass("rmsnorm_forward", rows::RMS_NORM_INPUT, rows::rms_norm_forward),
    pass("rmsnorm_backward", rows::RMS_NORM_INPUT, rows::rms_norm_backward),
    pass("softmax_forward", rows::SOFTMAX_INPUT, rows::softmax_forward),
    pass("softmax_backward", rows::SOFTMAX_INPUT, rows::softmax_backward),
    pass("cross_entropy_forward", rows::ENTROPY_INPUT, rows::cross_entropy_forward),
    pass("cross_entropy_backward", rows::ENTROPY_INPUT, rows::cross_entropy_backward),
    pass("gelu_forward", elementwise::GELU_INPUT, elementwise::gelu_forward),
    pass("gelu_backward", elementwise::GELU_INPUT, elementwise::gelu_backward),
    pass("embedding_forward", elementwise::EMBEDDING_INPUT, elementwise::embedding_forward),
    pass("embedding_backward", elementwise::EMBEDDING_INPUT, elementwise::embedding_backward),
    pass("adam_step", elementwise::ADAM_INPUT, elementwise::adam_step),
];

pub(crate) fn make_values(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, count, seed, kind, range, scale] = arguments.take()?;
    let (range, scale) = (range as u32, f32::from_bits(scale as u32));
    let value = |index: u64| {
        let h = hash(index as u32 ^ seed as u32);
        let unscaled = match kind {
            0 => ((h >> 8) as i32 - (1 << 23)) as f32 / (1 << 23) as f32,
            1 => (h >> 8) as f32 / (1 << 24) as f32,
            2 => ((((h >> 16) * (2 * range + 1)) >> 16) as i32 - range as i32) as f32,
            _ => (((h >> 16) * range) >> 16) as f32,
        };
        (unscaled * scale).to_bits()
    };
    Ok(device.memory().write(address, (0..count).map(value).collect())?)
}

pub(crate) fn compute(device: &Device, pass: usize, replicas: u32, arguments: &Arguments) -> Result<(), KernelError> {
    let [inputs, outputs, stride, places] = arguments.take()?;
    let (name, count) = (PASSES[pass].name, PASSES[pass].inputs as u64);
    let inputs = device.memory().read(inputs, count)?;
    // Not under the lock: the first GPU computes, the others wait for the result.
    let output = output_of(pass, inputs);
    if output.count() != stride {
        return Err(KernelError::Unexpected("replicas do not follow each other"));
    }
    let multiprocessors = device.model.multiprocessors.max(1);
    let mut memory = device.memory();
    memory.put(outputs, u64::from(replicas) * stride * 4, Content::Layer(Arc::clone(&output)), outputs)?;
    memory.write(places, (0..replicas).map(|replica| replica % multiprocessors).collect())?;
    if let Some(fault) = device.model.faults.layer.as_ref().filter(|fault| fault.pass == name && fault.output < stride)
    {
        for replica in (0..replicas).filter(|replica| replica % multiprocessors == fault.multiprocessor) {
            let place = u64::from(replica) * stride + fault.output;
            memory.set_word(outputs + place * 4, output.word(place) ^ (1 << fault.bit))?;
        }
    }
    drop(memory);
    // Invented, and compared with nothing.
    device.spend(1e-4);
    Ok(())
}

/// The inputs of a pass, and its outputs for them.
type Computed = (Vec<u32>, Arc<LayerOutput>);

/// Returns the outputs for these inputs, computed once.
fn output_of(pass: usize, inputs: Vec<u32>) -> Arc<LayerOutput> {
    static COMPUTED: [Mutex<Vec<Computed>>; PASS_COUNT] = [const { Mutex::new(Vec::new()) }; PASS_COUNT];
    let mut computed = COMPUTED[pass].lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, output)) = computed.iter().find(|(known, _)| *known == inputs) {
        return Arc::clone(output);
    }
    let numbers: Vec<f32> = inputs.iter().map(|bits| f32::from_bits(*bits)).collect();
    let output = (PASSES[pass].compute)(&numbers).into_iter().map(f32::to_bits).collect();
    let output = Arc::new(LayerOutput::new(output));
    computed.push((inputs, Arc::clone(&output)));
    output
}

pub(crate) fn fingerprint(device: &Device, replicas: u32, arguments: &Arguments) -> Result<(), KernelError> {
    let [outputs, stride, count, prints] = arguments.take()?;
    let mut memory = device.memory();
    let stretch = memory.stretch(outputs, u64::from(replicas) * stride * 4)?;
    let output = match stretch.pieces.as_slice() {
        [piece] if piece.origin == outputs && stride == count => match &piece.content {
            Content::Layer(output) if output.count() == count => output,
            _ => return Err(KernelError::Unexpected("no layer was computed there")),
        },
        _ => return Err(KernelError::Unexpected("the outputs of a layer were written to")),
    };
    let mut found = vec![output.fingerprint(); replicas as usize];
    for (at, bits) in &stretch.changed {
        let place = (at - outputs) / 4;
        let of = |bits: u32| fingerprint_term((place % count) as u32, bits);
        let print = &mut found[(place / count) as usize];
        *print = print.wrapping_sub(of(output.word(place))).wrapping_add(of(*bits));
    }
    let words = found.iter().flat_map(|print| [*print as u32, (print >> 32) as u32]);
    Ok(memory.write(prints, words.collect())?)
}

pub(crate) fn plant_outputs(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [outputs, errors, changed, count] = arguments.take()?;
    let mut memory = device.memory();
    let errors = memory.read(errors, count * 4)?;
    let mut has_changed = Vec::new();
    for error in errors.chunks_exact(4) {
        let at = outputs + (u64::from(error[0]) | u64::from(error[1]) << 32) * 4;
        let was = memory.word(at)?;
        let now = match error[2] {
            0 => 0,
            1 => was ^ (1 << (error[3] % 32)),
            _ => f32::NAN.to_bits(),
        };
        memory.set_word(at, now)?;
        has_changed.push(u32::from(now != was));
    }
    Ok(memory.write(changed, has_changed)?)
}
